"""Hashes of the source code of the functions that are replaced, to recognise known versions.

That of a function is of its syntax tree, found by name in its file: no import of the host is
needed, and neither another Python nor another wording makes a difference. Costs the parsing of the
file, 0.1 s for all of Axolotl's together. That of a module is of the file's bytes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

ABSENT = "absent"
"""Stands for a fingerprint where a release does not have a function that others have."""

_NO_MEANING = {"annotation", "ctx", "kind", "returns", "type_comment", "type_params"}
"""Fields of a tree that change nothing that a call does."""

_LOGS = {"LOG", "LOGGER", "log", "logger", "logging"}


def mismatch(names: Iterable[str], known: Mapping[str, tuple[str, ...]]) -> str:
    """The first of these functions whose source is not a known one, and how; empty: all are."""
    for name in names:
        source = fingerprint(name)
        if source not in known.get(name, ()):
            is_missing = source in ("", ABSENT)
            return f"{name} {'is missing' if is_missing else 'has unknown source code'}"
    return ""


def definitions(module: str) -> set[str]:
    """The functions and classes that a module's file defines at its top."""
    file = _source_path(module)
    return set() if file is None else {node.name for node in _defined(_parse(file))}


@cache
def fingerprint(name: str) -> str:
    """SHA-256 of a module's file, or of what ``module:qualname`` does, decorators included.

    ``ABSENT`` where the module does not have it, empty where the module has no source file.

    Of a definition's syntax tree, read from the file without importing it. Comments, docstrings,
    annotations and lines that only write to the log do not count, nor does the Python that parses.
    """
    module, _, path = name.partition(":")
    file = _source_path(module)
    if file is None:
        return ""
    if not path:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    node: Any = _parse(file)
    for part in path.split("."):
        node = next((inner for inner in _defined(node) if inner.name == part), None)
        if node is None:
            return ABSENT
    parts: list[str] = []
    _describe(node, parts)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _describe(node: ast.AST, parts: list[str]) -> None:
    """What a tree says, field by field; what is empty is left out, as are new fields of Python."""
    parts.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _NO_MEANING or value is None or value == []:
            continue
        parts.append(name)
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, ast.AST):
                parts.append(repr(item))
            elif not _is_only_said(item):
                _describe(item, parts)
    parts.append(".")


def _is_only_said(node: ast.AST) -> bool:
    """Whether a statement is a docstring, a bare annotation, or a line for the log."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        owner = value.func.value
        return isinstance(owner, ast.Name) and owner.id in _LOGS
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


@lru_cache(maxsize=4)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _defined(node: Any) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes in the body of a module, a class or a function."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner


def _source_path(module: str) -> Path | None:
    """The source file of a module, found without importing it or its parent packages."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(next(iter(spec.submodule_search_locations)), *rest)
    candidates = [base / "__init__.py", base.with_name(base.name + ".py")]
    return next((path for path in candidates if path.is_file()), None)
