"""Functions of a host library replaced, with the original one call away.

A ``Replacement`` names a function of the host, ours that stands in for it, and the sources its
equality was proven against. ``Patchwork`` puts wrappers in place and takes them out again. A
wrapper calls ours; where ours refuses (``Unfamiliar``) or fails, it notes the reason and calls the
original with the same arguments. Ours therefore changes nothing until it can no longer fail, and
an error after that is ``Final``: the caller gets it.

Where only a source differs and the function has no effects beyond its result (``is_pure``), ours is
tried: in the first calls both run, the caller gets the original's result, and ours goes on alone
once it was equal in ``_TRIAL_CALLS`` of them. One difference ends it for good. See ``trial``.

What happened is counted, in worker processes too: see ``Ledger``.

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
import json
import logging
import mmap
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

LOG = logging.getLogger("fast_axolotl")

MARK = "__fast_axolotl__"
"""The attribute by which a wrapper of ours is known."""

ABSENT = "absent"
"""Stands for a fingerprint where a release does not have a function that others have."""

_MOST_REASONS = 20
"""Reasons kept for one replacement; more are counted under the last."""
_MOST_WARNINGS = 5
"""Reasons of one replacement that are told when they are met; the others, at the end."""

_LEDGER_BYTES = 1 << 16
"""What one worker may write: some hundred reasons."""

_TRIAL_CALLS = 3
_TRIAL_VALUES = 100
"""Equal calls, and numbers or texts in their results, after which a trial is passed."""
_TRIAL_MOST_CALLS = 500
"""Calls after which a trial that has shown nothing ends: they cost more than without ours."""


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
    is_pure: bool = False
    """Whether the host's function does nothing but give a result and change its arguments, so that
    it may run beside ours: no files, no streams, no meeting of ranks."""

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
    ``trial``: the host's code is unfamiliar, and both functions run until ours is seen to be equal;
    ``skipped``: the host's code is not what ours was proven equal to; ``absent``: what is installed
    is known to have no such function, and nothing is lost by that; ``lost``: another function
    took its place since; ``failed``: the hook raised, and the module stays as it was;
    ``ready``: told from the source files alone, it fits."""
    reason: str
    """Why it is in this state; empty for ``active``, unless after a trial, and ``waiting``."""
    target: str = ""
    """``module:function`` of the host."""
    calls: int = 0
    """Calls that ours answered, in workers too."""
    fallbacks: tuple[tuple[str, int], ...] = ()
    """Reason and number of the calls that the host's own function answered."""
    rows: tuple[tuple[str, int], ...] = ()
    """Reason and number of the rows that the host's own function answered in calls of ours; of all
    replacements of this name."""
    trial: str = ""
    """What a trial has shown so far; empty where there was none."""


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
    trial: Counter[str] = field(default_factory=Counter)
    """Of a trial: ``calls``, those that were ``equal``, and the ``values`` in their results."""
    applied: list[_Applied] = field(default_factory=list)
    """The last is the one in force; a reload leaves earlier ones on objects that live on."""


class Patchwork:
    """The replacements of one host, in place or not."""

    def __init__(
        self,
        replacements: Iterable[Replacement],
        known: Mapping[str, tuple[str, ...]],
        *,
        trial: str = "",
        ledger: Ledger | None = None,
    ) -> None:
        """``trial``: ``1`` tries even what is known, ``0`` nothing; else what is unfamiliar."""
        self._replacements = tuple(replacements)
        self._known = known
        self._trial = trial
        self._ledger = ledger or Ledger()
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

    def apply(self, module: ModuleType, *, is_late: bool = False) -> bool:
        """Replace what the table names in a module; ``is_late`` where others may hold its names.

        Returns whether all of it could be replaced.
        """
        pairs, is_whole = {}, True
        for item in self._replacements:
            record = self._records[item.target]
            if item.module != module.__name__ or record.state == "off":
                continue
            if _is_in_place(item, record):
                continue
            applied = self._apply_one(item, module)
            if applied is None:
                is_whole = False
            else:
                record.applied.append(applied)
                pairs[id(applied.original)] = applied.wrapper
        if pairs:
            _sweep(pairs, prefix="" if is_late else module.__name__.partition(".")[0])
        return is_whole

    def remove(self) -> None:
        """Put every original back, and forget what was counted."""
        for item in self._replacements:
            self._remove(item)
            self._records[item.target] = _Record()
        self._ledger.clear()

    def patches(self) -> tuple[Patch, ...]:
        """What became of every replacement, in the order of the table."""
        counts = self._ledger.read()
        return tuple(self._patch(item, counts) for item in self._replacements)

    def check(self) -> tuple[Patch, ...]:
        """What would become of every replacement, told from source files alone."""
        found = []
        for item in self._replacements:
            record = self._records[item.target]
            state, reason = self._judge(item)
            if record.state == "off":
                state, reason = "off", record.reason
            state = "ready" if state == "active" else state
            found.append(Patch(item.name, state, reason, item.target))
        return tuple(found)

    def _judge(self, item: Replacement) -> tuple[str, str]:
        """The state that a replacement is to be in, from source files alone, and why."""
        package = item.module.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            return "absent", f"{package} is not installed"
        if fingerprint(item.target) == ABSENT:
            if ABSENT in self._known.get(item.target, ()):
                return "absent", f"{item.target} does not exist in this release"
            return "skipped", f"{item.target} is missing"
        reason = mismatch((item.target, *item.relies_on), self._known)
        is_wanted = self._trial == "1" or (reason and self._trial != "0")
        if is_wanted and item.is_pure and "is missing" not in reason:
            return "trial", reason
        return ("skipped" if reason else "active"), reason

    def _named(self, names: Iterable[str]) -> list[Replacement]:
        wanted = set(names)
        return [item for item in self._replacements if item.name in wanted]

    def _apply_one(self, item: Replacement, module: ModuleType) -> _Applied | None:
        record = self._records[item.target]
        state, reason = self._judge(item)
        if state in ("skipped", "absent"):
            record.state, record.reason = state, reason
            return None
        record.state, record.reason = "skipped", reason
        owner, attribute = _owner(item, module), item.path[-1]
        original = getattr(owner, "__dict__", {}).get(attribute)
        inner: Any = getattr(original, "__func__", original)
        try:
            _as_written(item.target)
        except Unfamiliar as refusal:
            record.reason = str(refusal)
        if hasattr(inner, MARK):
            record.reason = "another copy of fast-axolotl has replaced it"
        if record.reason != reason:
            # Unlike unfamiliar code, this is not seen from the files, and so not told elsewhere.
            self._ledger.tell("fast-axolotl does not replace %s: %s", item.target, record.reason)
            return None
        wrapper: Any = _wrap(inner, item, record, self._ledger)
        if isinstance(original, classmethod):
            wrapper = classmethod(wrapper)
        setattr(owner, attribute, wrapper)
        record.state, record.reason = state, reason
        record.trial.clear()
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

    def _patch(self, item: Replacement, counts: Counter[_Key]) -> Patch:
        record = self._records[item.target]
        state, reason = record.state, record.reason
        if state in ("active", "trial") and not _is_in_place(item, record):
            state = "lost"
            reason = "its module was reloaded or changed; call install() again"

        def reasons(kind: str, name: str) -> tuple[tuple[str, int], ...]:
            return tuple(
                (key[2], count) for key, count in counts.items() if key[:2] == (kind, name)
            )

        return Patch(
            item.name,
            state,
            reason,
            item.target,
            counts["calls", item.target, ""],
            reasons("fallbacks", item.target),
            reasons("rows", item.name),
            "; ".join(dict(reasons("trial", item.target))),
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
                raise Unfamiliar(f"{name} was replaced by other code")


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
        raise Unfamiliar(f"{name} was replaced by other code")
    return name, vars(owner), attribute, value


_INSIDE = ("__wrapped__", "__func__", "fget", "func", "py_func")
"""Where a decorated function holds the one it decorates."""


def _beneath(value: Any) -> Any:
    """What a wrapper of ours stands for; anything else is itself."""
    inner = getattr(value, "__func__", value)
    return inner.__wrapped__ if MARK in getattr(inner, "__dict__", {}) else value


def mismatch(names: Iterable[str], known: Mapping[str, tuple[str, ...]]) -> str:
    """Why ours does not fit these functions of the installed host; empty where it does."""
    unfamiliar = ""
    for name in names:
        accepted = known.get(name, ())
        found = fingerprint(name)
        if not found or (found == ABSENT and found not in accepted):
            return f"{name} is missing"
        if found not in accepted:
            unfamiliar = unfamiliar or f"{name} has unknown source code"
    return unfamiliar


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


def _wrap(
    original: Callable[..., Any], item: Replacement, record: _Record, ledger: Ledger
) -> Callable[..., Any]:
    load = functools.cache(functools.partial(pkgutil.resolve_name, item.ours))
    reliance = Reliance(item.relies_on, item.module)

    def ours(*args: Any, **kwargs: Any) -> Any:
        reliance.check()
        return load()(*args, **kwargs)

    def refuse(refusal: Exception) -> None:
        if not isinstance(refusal, NotAsked):
            is_bug = not isinstance(refusal, Unfamiliar)
            text = f"{type(refusal).__name__}: {refusal}" if is_bug else str(refusal)
            ledger.add("fallbacks", item.target, text)

    def try_both(*args: Any, **kwargs: Any) -> Any:
        """A call on trial: the caller gets what the original gives."""
        from fast_axolotl.axolotl.trial import run_both

        outcome, trial = run_both(original, ours, args, kwargs), record.trial
        refuse(outcome.refusal or Unfamiliar(_ON_TRIAL))
        trial["calls"] += 1
        trial["equal"] += outcome.num_values > 0
        trial["values"] += outcome.num_values
        verdict = ""
        if outcome.difference:
            verdict, record.state = f"results differ: {outcome.difference}", "skipped"
            ledger.tell(
                "fast-axolotl: trial of %s: %s. The run used the stock result and continues with "
                "the stock function; please report this",
                item.target,
                verdict,
            )
        elif trial["equal"] >= _TRIAL_CALLS and trial["values"] >= _TRIAL_VALUES:
            verdict, record.state = f"results equal in {trial['equal']} calls", "active"
        elif trial["calls"] >= _TRIAL_MOST_CALLS:
            verdict, record.state = f"too little to compare in {trial['calls']} calls", "skipped"
        if verdict:
            record.reason = "; ".join(filter(None, (record.reason, f"trial: {verdict}")))
            ledger.add("trial", item.target, verdict)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if record.state != "active":
            # Other threads may draw random numbers, too: a trial is for the main one.
            is_main = threading.current_thread() is threading.main_thread()
            is_tried = record.state == "trial" and is_main
            return (try_both if is_tried else original)(*args, **kwargs)
        error: Exception | None = None
        try:
            result = ours(*args, **kwargs)
        except Final as final:
            error = final.error
        except Exception as refusal:  # noqa: BLE001
            # Whatever went wrong in ours, the host's own function decides what the caller sees.
            refuse(refusal)
        else:
            ledger.add("calls", item.target)
            return result
        if error is not None:
            raise error
        return original(*args, **kwargs)

    setattr(call, MARK, item.name)
    return call


def tally(name: str, reason: str, count: int) -> None:
    """Count rows that the host's own function answered inside a call that ours answered.

    ``name`` is the switch of the replacement.
    """
    LEDGER.add("rows", name, reason, count)


def is_first_rank() -> bool:
    """Whether this process is no other rank of several, as launchers tell it."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


_Key = tuple[str, str, str]
"""What is counted, the target or name, and the reason."""


class Ledger:
    """Counts of a process and its workers, which write theirs to a folder, a file each.

    Workers are often killed, so every count is written as it changes, into a file that is mapped
    to memory: about 1 µs. A line has the count in 20 digits, and what is counted. The folder's name
    reaches forked workers in memory and spawned ones by the environment; the first that needs the
    folder makes it, and the process it belongs to removes it. What cannot be written is not told.
    """

    def __init__(self) -> None:
        self.is_worker = False
        self._folder: Path | None = None
        self._counts: Counter[_Key] = Counter()
        self._map: mmap.mmap | None = None
        self._places: dict[_Key, int] = {}
        self._size = 0

    def share(self, inherited: str | None) -> str:
        """The folder to name to children; ``inherited``: the one that was named to this process."""
        if self._folder is None:
            os.register_at_fork(after_in_child=self._enter_worker)
            is_spawned = any(mark in text for mark in _WORKERS for text in sys.orig_argv)
            self.is_worker = is_spawned and inherited is not None
            name = f"fast-axolotl-{os.getpid()}-{os.urandom(8).hex()}"
            own = Path(tempfile.gettempdir(), name)
            if not self.is_worker:
                _remove_left(own.parent)
            self._folder = Path(inherited) if self.is_worker and inherited else own
        return str(self._folder)

    def add(self, kind: str, name: str, reason: str = "", count: int = 1) -> None:
        """Count; what goes to the host's own function is told the first time."""
        if not count:
            return
        key = (kind, name, reason)
        if key not in self._counts:
            key = (kind, name, " ".join(reason.split())[:300])
        if key not in self._counts:
            num_reasons = sum(other[:2] == key[:2] for other in list(self._counts))
            if num_reasons >= _MOST_REASONS:
                key = (kind, name, "other reasons")
            if kind in _TOLD and reason != _ON_TRIAL and num_reasons < _MOST_WARNINGS:
                self.tell(_TOLD[kind], "TRL" if name.startswith("trl") else "Axolotl", name, key[2])
        self._counts[key] += count
        if self.is_worker and self._folder is not None:
            try:
                self._write(key, self._folder)
            except OSError:
                self._folder = None

    def read(self) -> Counter[_Key]:
        """What this process and all its workers have counted so far."""
        found = self._counts.copy()
        files = self._folder.glob("*.counts") if self._folder and not self.is_worker else ()
        for line in (line for path in files for line in path.read_bytes().splitlines(True)):
            if line.endswith(b"\n"):
                kind, name, reason = json.loads(line[20:])
                found[kind, name, reason] += int(line[:20])
        return found

    def clear(self) -> None:
        """Forget all."""
        self._counts.clear()
        if self._folder is not None and not self.is_worker:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, key: _Key, folder: Path) -> None:
        if self._map is None:
            folder.mkdir(mode=0o700, exist_ok=True)
            with (folder / f"{os.urandom(8).hex()}.counts").open("x+b") as file:
                # Written, so that a full disk is an error here and no signal later.
                file.write(bytes(_LEDGER_BYTES))
                file.flush()
                self._map = mmap.mmap(file.fileno(), 0)
        line = b"%020d" % self._counts[key]
        if key not in self._places:
            line += json.dumps(key).encode() + b"\n"
            self._places[key], self._size = self._size, self._size + len(line)
        place = self._places[key]
        if place + len(line) <= _LEDGER_BYTES:
            self._map[place : place + len(line)] = line

    def tell(self, text: str, *values: str) -> None:
        """Warn, if no process of this ledger has done so; other ranks than the first do not."""
        is_first = is_first_rank()
        if is_first and self._folder is not None:
            mark = self._folder / hashlib.sha256(repr((text, values)).encode()).hexdigest()
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                mark.touch(exist_ok=False)
            except OSError:
                is_first = not mark.exists()
        if is_first:
            LOG.warning(text, *values)

    def _enter_worker(self) -> None:
        self.is_worker, self._map, self._size = True, None, 0
        self._counts, self._places = Counter(), {}


_WORKERS = ("--multiprocessing-fork", "multiprocessing.forkserver", "multiprocess.forkserver")
"""What the command line has of a process that ``multiprocessing`` spawned, or ``multiprocess``."""

_ON_TRIAL = "on trial"
_TOLD = {
    "fallbacks": "fast-axolotl: the stock %s function %s runs instead: %s",
    "rows": "fast-axolotl: the stock %s function handles some rows of %s: %s",
}


def _remove_left(parent: Path) -> None:
    """Remove the folders of processes that were killed, an hour later."""
    for folder in parent.glob("fast-axolotl-*-????????????????"):
        pid = folder.name.split("-")[2]
        with suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > 3600
            if is_old and pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


LEDGER = Ledger()
"""That of the Axolotl in this process."""


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
