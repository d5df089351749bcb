"""Functions of a host library replaced, with the original one call away.

A ``Replacement`` names a function of the host, ours that stands in for it, and the sources its
equality was proven against. ``Patchwork`` puts wrappers in place and takes them out again. A
wrapper calls ours; where ours refuses (``Unfamiliar``) or fails, it notes the reason and calls the
original with the same arguments. Ours therefore changes nothing until it can no longer fail, and
an error after that is ``Final``: the caller gets it.

Two guards: the sources of all that ours relies on have known fingerprints, looked at when a module
is patched; and the objects are those that these sources define, looked at in every call, since
others patch at run time, too. Cost: a few milliseconds a function once, then some 50 ns. A
fingerprint is of a definition's syntax tree, found by name in its file: no import of the host is
needed, and neither another Python nor another wording makes a difference.

Modules that imported a function by name hold the function itself. They are swept: every module
attribute that *is* the original becomes the wrapper. Out of reach stay partials, closures and
default arguments made before, which go on calling the original: slower, never wrong.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import logging
import pkgutil
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

__all__ = [
    "ABSENT",
    "MARK",
    "Final",
    "NotAsked",
    "Patch",
    "Patchwork",
    "Reliance",
    "Replacement",
    "Unfamiliar",
    "fingerprint",
    "mismatch",
    "tally",
]

LOG = logging.getLogger("fast_axolotl")

MARK = "__fast_axolotl__"
"""The attribute by which a wrapper of ours is known."""

ABSENT = "absent"
"""Stands for a fingerprint where a release does not have a function that others have."""

_MOST_REASONS = 20
"""Reasons kept for one replacement; more are counted under the last."""


class Unfamiliar(Exception):
    """A replacement met something it cannot be proven equal for; the host's own function runs."""


class NotAsked(Unfamiliar):
    """What the replacement is for was not asked for: nothing to tell."""


class Final(Exception):
    """Carries an error past the point where the host's own function could still run instead."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One function of the host and what stands in for it."""

    name: str
    """The switch it belongs to; several functions may share one."""
    target: str
    """``module:function`` or ``module:Class.method`` of the host."""
    ours: str
    """``module:function`` of this package, loaded at the first call."""
    relies_on: tuple[str, ...] = ()
    """Other functions of the host, ``module:qualname``, whose behaviour ours reproduces."""

    @property
    def module(self) -> str:
        """The host module that holds the function."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> list[str]:
        """The names that lead from the module to the function."""
        return self.target.partition(":")[2].split(".")


class Patch(NamedTuple):
    """What became of one change to the host."""

    name: str
    """The switch, or the module where a hook failed."""
    state: str
    """``active``; ``waiting``: its module has not been imported; ``off``: switched off;
    ``skipped``: the host's code is not what ours was proven equal to; ``lost``: another function
    took its place since; ``failed``: the hook raised, and the module stays as it was;
    ``ready``: told from the source files alone, it fits."""
    reason: str
    """Why it is in this state; empty for ``active`` and ``waiting``."""
    target: str = ""
    """``module:function`` of the host."""
    calls: int = 0
    """Calls that ours answered."""
    fallbacks: tuple[tuple[str, int], ...] = ()
    """Reason and number of the calls that the host's own function answered."""


@dataclass(slots=True)
class _Applied:
    """A replacement in place."""

    owner: Any
    attribute: str
    original: Any
    """What the owner held: a function, or a classmethod object."""
    wrapper: Any


@dataclass(slots=True)
class _Record:
    """What is known of one replacement in this process."""

    state: str = "waiting"
    reason: str = ""
    calls: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    applied: list[_Applied] = field(default_factory=list)
    """The last is the one in force; a reload leaves earlier ones on objects that live on."""


class Patchwork:
    """The replacements of one host, in place or not."""

    def __init__(
        self, replacements: Iterable[Replacement], known: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._replacements = tuple(replacements)
        self._known = known
        self._records = {item.target: _Record() for item in self._replacements}

    @property
    def modules(self) -> tuple[str, ...]:
        """The host modules with something to replace, each once."""
        return tuple(dict.fromkeys(item.module for item in self._replacements))

    def switch_off(self, names: Iterable[str]) -> None:
        """Keep replacements of these names out from now on; unknown names are ignored here."""
        for item in self._named(names):
            self._remove(item)
            self._records[item.target].state = "off"
            self._records[item.target].reason = "switched off"

    def apply(self, module: ModuleType, *, is_late: bool = False) -> None:
        """Replace what the table names in a module; ``is_late`` where others may hold its names."""
        pairs, skipped = {}, []
        for item in self._replacements:
            record = self._records[item.target]
            if item.module != module.__name__ or record.state == "off":
                continue
            if record.state == "active" and _is_in_place(item, record):
                continue
            applied = self._apply_one(item, module)
            if applied is None:
                skipped.append(record.reason)
            else:
                record.applied.append(applied)
                pairs[id(applied.original)] = applied.wrapper
        if skipped:
            reasons = "; ".join(dict.fromkeys(skipped))
            LOG.warning("fast-axolotl leaves functions of %s alone: %s", module.__name__, reasons)
        if pairs:
            _sweep(pairs, prefix="" if is_late else module.__name__.partition(".")[0])

    def remove(self) -> None:
        """Put every original back, and forget what was counted."""
        for item in self._replacements:
            self._remove(item)
            self._records[item.target] = _Record()

    def patches(self) -> tuple[Patch, ...]:
        """What became of every replacement, in the order of the table."""
        return tuple(self._patch(item) for item in self._replacements)

    def check(self) -> tuple[Patch, ...]:
        """What would become of every replacement, told from source files alone."""
        found = []
        for item in self._replacements:
            reason = mismatch(item, self._known)
            record = self._records[item.target]
            if record.state == "off":
                found.append(Patch(item.name, "off", record.reason, item.target))
            else:
                state = "skipped" if reason else "ready"
                found.append(Patch(item.name, state, reason, item.target))
        return tuple(found)

    def _named(self, names: Iterable[str]) -> list[Replacement]:
        wanted = set(names)
        return [item for item in self._replacements if item.name in wanted]

    def _apply_one(self, item: Replacement, module: ModuleType) -> _Applied | None:
        record = self._records[item.target]
        record.state, record.reason = "skipped", mismatch(item, self._known)
        if record.reason:
            return None
        owner, attribute = _owner(item, module), item.path[-1]
        original = getattr(owner, "__dict__", {}).get(attribute)
        inner: Any = getattr(original, "__func__", original)
        try:
            _as_written(item.target)
        except Unfamiliar as refusal:
            record.reason = str(refusal)
            return None
        if hasattr(inner, MARK):
            record.reason = "another copy of this package has replaced it"
            return None
        wrapper: Any = _wrap(inner, item, record)
        if isinstance(original, classmethod):
            wrapper = classmethod(wrapper)
        setattr(owner, attribute, wrapper)
        record.state, record.reason = "active", ""
        return _Applied(owner, attribute, original, wrapper)

    def _remove(self, item: Replacement) -> None:
        record = self._records[item.target]
        # A partial or closure may hold the wrapper still; its record tells it to step aside.
        record.state, record.reason = "waiting", ""
        while record.applied:
            applied = record.applied.pop()
            if vars(applied.owner).get(applied.attribute) is applied.wrapper:
                setattr(applied.owner, applied.attribute, applied.original)
            _sweep({id(applied.wrapper): applied.original})

    def _patch(self, item: Replacement) -> Patch:
        record = self._records[item.target]
        state, reason = record.state, record.reason
        if state == "active" and not _is_in_place(item, record):
            state = "lost"
            reason = "its module was reloaded or changed; install() puts it back"
        return Patch(
            item.name,
            state,
            reason,
            item.target,
            record.calls,
            tuple(record.fallbacks.items()),
        )


class Reliance:
    """Functions of the host that have to be the ones which their files define.

    Also under the name that the replaced function's own module has imported them by.
    """

    def __init__(self, names: Iterable[str], user: str) -> None:
        self._waiting = [name for name in names if fingerprint(name) != ABSENT]
        self._user = user
        self._found: list[tuple[str, Mapping[str, Any], str, Any]] = []

    def check(self) -> None:
        """``Unfamiliar`` where one has been replaced by other means than ours."""
        for name in list(self._waiting):
            found = _as_written(name)
            if found is None:
                continue
            self._waiting.remove(name)
            self._found.append(found)
            _, _, attribute, value = found
            namespace = getattr(sys.modules.get(self._user), "__dict__", {})
            if "." not in name.partition(":")[2] and attribute in namespace:
                self._found.append((name, namespace, attribute, value))
        for name, namespace, attribute, value in self._found:
            held = namespace.get(attribute)
            if held is not value and _beneath(held) is not _beneath(value):
                raise Unfamiliar(f"{name} was replaced by someone else")


def _as_written(name: str) -> tuple[str, Mapping[str, Any], str, Any] | None:
    """Where a function is and what is there; ``None`` while its module is not loaded."""
    module, _, path = name.partition(":")
    owner: Any = sys.modules.get(module)
    if owner is None:
        return None
    *way, attribute = path.split(".")
    for part in way:
        owner = vars(owner).get(part)
    value = getattr(owner, "__dict__", {}).get(attribute)
    inner, layers = _beneath(value), 0
    while not isinstance(inner, FunctionType | type) or hasattr(inner, "__wrapped__"):
        # Decorators: those of functools, numba, and the builtin ones.
        below = next((getattr(inner, key) for key in _INSIDE if hasattr(inner, key)), None)
        if below is None:
            break
        inner, layers = below, layers + 1
    is_own = getattr(inner, "__module__", "") == module
    is_own = is_own and getattr(inner, "__qualname__", "") == path
    lines = _definition(name)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
    definition = re.compile(rf"{indent}(?:async )?(?:def|class) ")
    above = itertools.takewhile(lambda line: not definition.match(line), lines)
    if not is_own or layers > sum(line.startswith(f"{indent}@") for line in above):
        raise Unfamiliar(f"{name} was replaced by someone else")
    return name, vars(owner), attribute, value


_INSIDE = ("__wrapped__", "__func__", "fget", "func", "py_func")
"""Where a decorated function holds the one it decorates."""


def _beneath(value: Any) -> Any:
    """What a wrapper of ours stands for; anything else is itself."""
    inner = getattr(value, "__func__", value)
    return inner.__wrapped__ if MARK in getattr(inner, "__dict__", {}) else value


def mismatch(item: Replacement, known: Mapping[str, tuple[str, ...]]) -> str:
    """Why a replacement does not fit the host that is installed; empty where it does."""
    for name in (item.target, *item.relies_on):
        accepted = known.get(name, ())
        found = fingerprint(name)
        if not found or (found == ABSENT and (name == item.target or found not in accepted)):
            return f"{name} is not there"
        if found not in accepted:
            return f"{name} is unfamiliar code"
    return ""


def _owner(item: Replacement, module: Any) -> Any:
    """The module or class that holds the function; ``None`` where a name on the way is missing."""
    owner = module
    for name in item.path[:-1]:
        owner = getattr(owner, "__dict__", {}).get(name)
    return owner


def _is_in_place(item: Replacement, record: _Record) -> bool:
    owner = _owner(item, sys.modules.get(item.module))
    held = getattr(owner, "__dict__", {}).get(item.path[-1])
    return bool(record.applied) and held is record.applied[-1].wrapper


def _wrap(original: Callable[..., Any], item: Replacement, record: _Record) -> Callable[..., Any]:
    load = functools.cache(functools.partial(pkgutil.resolve_name, item.ours))
    reliance = Reliance(item.relies_on, item.module)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if record.state != "active":
            return original(*args, **kwargs)
        error: Exception | None = None
        try:
            reliance.check()
            result = load()(*args, **kwargs)
        except NotAsked:
            reason = ""
        except Final as final:
            reason, error = "", final.error
        except Unfamiliar as refusal:
            reason = str(refusal)
        except Exception as mistake:  # noqa: BLE001
            # Whatever went wrong in ours, the host's own function decides what the caller sees.
            reason = f"{type(mistake).__name__}: {mistake}"
        else:
            record.calls += 1
            return result
        if error is not None:
            raise error
        if reason:
            _note(item, record, reason)
        return original(*args, **kwargs)

    setattr(call, MARK, item.name)
    return call


def tally(name: str, reason: str, count: int) -> None:
    """Count rows that the host's own function answered inside a call that ours answered.

    ``name`` is the switch of the replacement.
    """
    _TALLIES[name, reason] += count


_TALLIES: Counter[tuple[str, str]] = Counter()


def _note(item: Replacement, record: _Record, reason: str) -> None:
    reason = " ".join(reason.split())[:300]
    if reason not in record.fallbacks and len(record.fallbacks) >= _MOST_REASONS:
        reason = "other reasons"
    if reason not in record.fallbacks:
        LOG.info("fast-axolotl lets Axolotl's own %s run: %s", item.target, reason)
    record.fallbacks[reason] += 1


def _sweep(pairs: Mapping[int, Any], prefix: str = "") -> None:
    """In every loaded module, put ``pairs[id(value)]`` where an attribute is that value."""
    modules: dict[str, Any] = dict(sys.modules)
    for name, module in modules.items():
        if prefix and name != prefix and not name.startswith(f"{prefix}."):
            continue
        # An entry may be None, or an object of another kind.
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            replacement = pairs.get(id(value))
            if replacement is not None:
                setattr(module, attribute, replacement)


@functools.cache
def fingerprint(name: str) -> str:
    """SHA-256 of what ``module:qualname`` does, decorators included.

    ``ABSENT`` where the module does not have it, empty where the module has no source file.

    Of its syntax tree, read from the file without importing it. Comments, docstrings, annotations
    and lines that only write to the log do not count, nor does the Python that parses.
    """
    text = textwrap.dedent("".join(_definition(name)))
    if not text:
        return ABSENT if _source_path(name.partition(":")[0]) else ""
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


_NO_MEANING = {"annotation", "ctx", "kind", "returns", "type_comment", "type_params"}
"""Fields of a tree that change nothing that a call does."""

_LOGS = {"LOG", "LOGGER", "log", "logger", "logging"}


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
    return tuple(lines[first : _end(lines, first, start, len(indent) - 4)])


def _end(lines: list[str], first: int, start: int, indent: int) -> int:
    """Where a definition ends: at a line that is not indented further, if that makes it whole.

    The head of a function, or a text in it, may have such lines, too. Parsing is ten times as fast
    as ``inspect.getblock``.
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
