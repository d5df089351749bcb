"""Fingerprints: what a module or a function of the host does, as a hash of its source.

That of a function is of its syntax tree, found by name in its file: no import of the host is
needed, and neither another Python nor another wording makes a difference. Costs a few milliseconds
for a function, once; the whole file is never parsed. That of a module is of the file's bytes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

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
    text = "" if file is None else file.read_text(encoding="utf-8")
    return set(re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))


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
    text = textwrap.dedent("".join(_definition(name)))
    if not text:
        return ABSENT
    parts: list[str] = []
    _describe(ast.parse(text).body[0], parts)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _describe(node: ast.AST, parts: list[str]) -> None:
    """What a tree says, field by field; what is empty is left out, as are new fields of Python."""
    parts.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _NO_MEANING or value is None or value == []:
            continue
        parts.append(name)
        if isinstance(value, list):
            for item in value:
                if isinstance(item, ast.AST):
                    if not _is_only_said(item):
                        _describe(item, parts)
                else:
                    parts.append(repr(item))
        elif isinstance(value, ast.AST):
            _describe(value, parts)
        else:
            parts.append(repr(value))
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


@cache
def _definition(name: str) -> tuple[str, ...]:
    module, _, path = name.partition(":")
    file = _source_path(module)
    if file is None:
        return ()
    lines = _lines(file)
    start, indent = 0, ""
    for part in path.split("."):
        found = _find(lines, part, start, indent)
        if found is None:
            return ()
        start, indent = found + 1, indent + "    "
    first = above = start - 1
    at = f"{indent[4:]}@"
    # A decorator may take several lines; a blank line ends what belongs to the definition.
    while above > 0 and lines[above - 1].strip():
        above -= 1
        first = above if lines[above].startswith(at) else first
    return tuple(lines[first : _end(lines, first, start, len(indent) - 4)])


def _end(lines: list[str], first: int, start: int, indent: int) -> int:
    """Where a definition ends: at a line that is not indented further, if that makes it whole.

    The head of a function, or a text in it, may have such lines, too. ``inspect.getblock`` would
    do, but tokenises line by line in Python.
    """
    for end in range(start, len(lines) + 1):
        line = lines[end] if end < len(lines) else ""
        text = line.strip()
        is_candidate = end == len(lines) or (text and len(line) - len(line.lstrip()) <= indent)
        if is_candidate and not text.startswith((")", "#")):
            try:
                ast.parse(textwrap.dedent("".join(lines[first:end])))
            except SyntaxError:
                continue
            return end
    return start


def _source_path(module: str) -> Path | None:
    """The source file of a module, found without importing it or its parent packages."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            return None
        base = Path(next(iter(spec.submodule_search_locations)), *rest)
        candidates = [base / "__init__.py", base.with_name(base.name + ".py")]
        return next((path for path in candidates if path.is_file()), None)
    path = Path(file)
    return path if path.suffix == ".py" and path.is_file() else None


@cache
def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines(keepends=True)


def _find(lines: list[str], name: str, start: int, indent: str) -> int | None:
    pattern = re.compile(rf"{indent}(?:async )?(?:def|class) {re.escape(name)}\b")
    for number in range(start, len(lines)):
        if pattern.match(lines[number]):
            return number
        if indent and re.match(r"(?:def|class|async def|@)", lines[number]):
            return None
    return None
