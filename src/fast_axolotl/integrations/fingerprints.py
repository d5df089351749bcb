"""Fingerprints of functions by their source text, found by name in the file.

No import of the host is needed to tell whether its code is familiar, and another Python makes no
difference to a function that was not edited. Cost: about a millisecond a function, once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import itertools
import re
import sys
from pathlib import Path

__all__ = ["fingerprint", "num_decorators"]


@functools.cache
def fingerprint(name: str) -> str:
    """SHA-256 of the source of ``module:qualname``, decorators included; empty if not found.

    Read from the file without importing it. Blank ends of lines do not count.
    """
    text = "\n".join(line.rstrip() for line in _definition(name))
    return hashlib.sha256(text.rstrip().encode()).hexdigest()[:16] if text else ""


def num_decorators(name: str) -> int:
    """How many decorators stand above a definition."""
    lines = _definition(name)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
    definition = re.compile(rf"{indent}(?:async )?(?:def|class) ")
    above = itertools.takewhile(lambda line: not definition.match(line), lines)
    return sum(line.startswith(f"{indent}@") for line in above)


@functools.cache
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
    return (*lines[first : start - 1], *inspect.getblock(lines[start - 1 :]))


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


@functools.cache
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
