"""Replace functions of another library, and keep the originals callable.

A ``Replacement`` names a function of the host, ours that stands in for it, and the sources its
equality was proven against. ``Patchwork`` puts wrappers in place and takes them out again. A
wrapper calls ours; where ours refuses (``Unfamiliar``) or fails, it notes the reason and calls the
original with the same arguments. Ours therefore changes nothing until it can no longer fail, and
an error after that is ``Final``: the caller gets it.

Known source → ours. If the source of the function, or of anything that ours relies on, is not a
known one, or other code has replaced it, both functions first run on rows of this call, and ours
is used only where the results are equal: see ``self_check``. Functions that cannot be compared stay
as they are then.

Modules that imported a function by name hold the function itself. They are swept: every module
attribute that *is* the original becomes the wrapper. Out of reach stay partials, closures and
default arguments made before, which go on calling the original: slower, never wrong.

Calls are counted in each process; workers warn of what they leave to the host, and count for
themselves alone.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import pkgutil
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

from fast_axolotl.axolotl.fingerprints import ABSENT, definitions, fingerprint, mismatch

LOG = logging.getLogger("fast_axolotl")

MARK = "__fast_axolotl__"
"""The attribute by which a wrapper of ours is known."""

_MOST_REASONS = 10
"""Reasons told and kept for one replacement; more are counted under ``other reasons``."""


class Unfamiliar(Exception):
    """A replacement met something it cannot be proven equal for; the host's own function runs."""


class NotAsked(Unfamiliar):
    """What the replacement is for was not asked for: nothing to report."""


class Final(Exception):
    """Carries an error that the caller gets: the host's own function would raise it, too, or could
    no longer run instead.

    Workers send it to their parent, so all of it is in its arguments.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def from_stock(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the host's own function gives inside of ours; its errors are the caller's."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise Final(error) from error


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
    """Other functions of the host, ``module:qualname``, or whole modules, that ours reproduces."""
    check: str = ""
    """How ``self_check`` compares both functions where a source is unknown; empty: not at all."""
    proves: str = ""
    """The package of which ours itself proves what it needs, or raises ``Different``."""

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
    ``check``: a source is unknown, so the first call compares both functions;
    ``skipped``: the host's code is not what ours was proven equal to; ``absent``: what is installed
    is known to have no such function, and nothing is lost by that; ``failed``: the hook raised,
    and the module stays as it was;
    ``ready``: by the source files alone, it fits."""
    reason: str
    """Why it is in this state; empty for ``waiting``, and for ``active`` where all is known."""
    target: str = ""
    """``module:function`` of the host."""
    calls: int = 0
    """Calls in this process that ours answered."""
    fallbacks: tuple[tuple[str, int], ...] = ()
    """Reason and number of the calls that the host's own function answered."""
    rows: tuple[tuple[str, int], ...] = ()
    """Reason and number of the rows that the host's own function answered in calls of ours; of all
    replacements of this name."""


_Applied = tuple[Any, str, Any, Any]
"""A replacement in place: owner, attribute, what the owner held (a function, or a classmethod
object), and the wrapper."""


@dataclass(slots=True)
class _Record:
    """What is known of one replacement in this process."""

    state: str = "waiting"
    reason: str = ""
    calls: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    applied: _Applied | None = None


class Patchwork:
    """The replacements of one host, in place or not."""

    def __init__(
        self, replacements: Iterable[Replacement], known: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._known = known
        self._records = {item: _Record() for item in replacements}

    @property
    def modules(self) -> tuple[str, ...]:
        """The host modules with something to replace, each once."""
        return tuple(dict.fromkeys(item.module for item in self._records))

    def switch_off(self, names: Iterable[str]) -> None:
        """Keep replacements of these names out from now on; unknown names are ignored here."""
        wanted = set(names)
        items = [item for item in self._records if item.name in wanted]
        self._remove(items)
        for item in items:
            self._records[item].state, self._records[item].reason = "off", "switched off"

    def apply(self, module: ModuleType, *, is_late: bool = False) -> bool:
        """Replace what the table names in a module; ``is_late`` where others may hold its names.

        Returns whether all of it could be replaced.
        """
        pairs, is_whole = {}, True
        for item, record in self._records.items():
            if item.module != module.__name__ or record.state == "off" or record.applied:
                continue
            record.applied = applied = self._apply_one(item, record, module)
            if applied is None:
                is_whole = False
            else:
                pairs[id(applied[2])] = applied[3]
        if pairs:
            _sweep(pairs, prefix="" if is_late else module.__name__.partition(".")[0])
        return is_whole

    def remove(self) -> None:
        """Put every original back, and forget what was counted."""
        self._remove(self._records)
        self._records = {item: _Record() for item in self._records}
        _ROWS.clear()

    def patches(self) -> tuple[Patch, ...]:
        """What became of every replacement, in the order of the table."""
        return tuple(
            Patch(
                *(item.name, record.state, record.reason, item.target, record.calls),
                *(tuple(record.fallbacks.items()), tuple(_ROWS[item.name].items())),
            )
            for item, record in self._records.items()
        )

    def check(self) -> tuple[Patch, ...]:
        """What would become of every replacement, by the source files alone."""
        found = []
        for item, record in self._records.items():
            state, reason = self._judge(item)
            if record.state == "off":
                state, reason = "off", record.reason
            state = "ready" if state == "active" else state
            found.append(Patch(item.name, state, reason, item.target))
        return tuple(found)

    def _judge(self, item: Replacement) -> tuple[str, str]:
        """The state that a replacement is to be in, by the source files alone, and why."""
        package = item.module.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            return "absent", f"{package} is not installed"
        if fingerprint(item.target) == ABSENT:
            if ABSENT in self._known.get(item.target, ()):
                return "absent", f"{item.target} does not exist in this release"
            return "skipped", f"{item.target} is missing"
        names = (item.target, *item.relies_on)
        reason = mismatch(names, self._known)
        if not reason:
            return "active", ""
        if item.proves:
            others = [name for name in names if not name.startswith(f"{item.proves}.")]
            unknown = mismatch(others, self._known)
            return ("skipped", unknown) if unknown else ("check", reason)
        return ("check" if item.check else "skipped"), reason

    def _apply_one(self, item: Replacement, record: _Record, module: ModuleType) -> _Applied | None:
        record.state, record.reason = self._judge(item)
        if record.state in ("skipped", "absent"):
            return None
        owner: Any = module
        *names, attribute = item.path
        for name in names:
            owner = getattr(owner, "__dict__", {}).get(name)
        original = getattr(owner, "__dict__", {}).get(attribute)
        inner: Any = getattr(original, "__func__", original)
        if hasattr(inner, MARK) or inner is None or _is_replaced(item.target):
            # Unlike unknown code, this is not seen from the files, and so reported nowhere else.
            record.state, record.reason = "skipped", f"{item.target} was replaced by other code"
            warn("fast-axolotl does not replace %s: %s", item.target, record.reason)
            return None
        wrapper: Any = _wrap(inner, item, record)
        if isinstance(original, classmethod):
            wrapper = classmethod(wrapper)
        setattr(owner, attribute, wrapper)
        return owner, attribute, original, wrapper

    def _remove(self, items: Iterable[Replacement]) -> None:
        """Put the originals back where replacements are in place."""
        pairs: dict[int, Any] = {}
        for item in items:
            record = self._records[item]
            # A partial or closure may hold the wrapper still; its record makes it step aside.
            record.state, record.reason = "waiting", ""
            applied, record.applied = record.applied, None
            if applied is not None:
                owner, attribute, original, wrapper = applied
                if vars(owner).get(attribute) is wrapper:
                    setattr(owner, attribute, original)
                pairs[id(wrapper)] = original
        if pairs:
            _sweep(pairs)


def tally(name: str, reason: str, count: int) -> None:
    """Count rows that the host's own function answered inside a call that ours answered.

    ``name`` is the switch of the replacement.
    """
    if count:
        text = "fast-axolotl: the stock %s function handles some rows of %s: %s"
        _note(_ROWS[name], reason, count, text, name)


def is_first_rank() -> bool:
    """Whether this process is no other rank of several, by the variables of launchers."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def warn(text: str, *values: str) -> None:
    """Log on the first rank alone, and in the first of a loader's workers."""
    if is_first_rank() and not worker_id():
        LOG.warning(text, *values)


def worker_id() -> int | None:
    """Of the worker of torch's loader that this process is."""
    torch_data = sys.modules.get("torch.utils.data")
    worker = torch_data.get_worker_info() if torch_data is not None else None
    return None if worker is None else int(worker.id)


_ROWS: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""Of each switch, reason and number of the rows that the host's own function answered."""


def _wrap(original: Callable[..., Any], item: Replacement, record: _Record) -> Callable[..., Any]:
    from fast_axolotl.axolotl.self_check import Check, Different, StockFails

    check = Check(item.check, original) if item.check else None

    @functools.cache
    def load() -> Callable[..., Any]:
        """At the first call, because others patch at run time, too."""
        changed = next(filter(_is_replaced, item.relies_on), None)
        if changed is not None and record.state == "active":
            record.state = "skipped" if check is None else "check"
            record.reason = f"{changed} was replaced by other code"
            if check is None:
                raise Unfamiliar(record.reason)
        ours: Callable[..., Any] = pkgutil.resolve_name(item.ours)
        return ours

    def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ours = load()
        compares = check if record.reason else None
        if compares is not None:
            if threading.current_thread() is not threading.main_thread():
                # Others may draw random numbers meanwhile.
                raise Unfamiliar(f"{record.reason}, and another thread than the main one called it")
            try:
                compares.before(ours, args, kwargs)
            except (Final, StockFails) as error:
                raise Unfamiliar(f"it cannot be compared: {error}") from error
        result = ours(*args, **kwargs)
        if compares is not None:
            compares.after(result, args, kwargs)
        if record.state == "check":
            record.state = "active"
            record.reason += "; equal to stock on rows of this run"
        return result

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if record.state not in ("active", "check"):
            return original(*args, **kwargs)
        error: Exception | None = None
        try:
            result = answer(args, kwargs)
        except Final as final:
            error = final.error
        except NotAsked:
            pass
        except Different as difference:
            record.state, record.reason = "skipped", f"{record.reason}; {difference}"
            text = "fast-axolotl: the results of %s differ: %s. The stock function runs; please "
            warn(text + "report this", item.target, str(difference))
        except Exception as refusal:  # noqa: BLE001
            # Whatever went wrong in ours, the host's own function decides what the caller sees.
            is_bug = not isinstance(refusal, Unfamiliar)
            reason = f"{type(refusal).__name__}: {refusal}" if is_bug else str(refusal)
            text = "fast-axolotl: the stock %s function %s runs instead: %s"
            _note(record.fallbacks, reason, 1, text, item.target)
        else:
            record.calls += 1
            return result
        if error is not None:
            raise error
        return original(*args, **kwargs)

    setattr(call, MARK, item.name)
    return call


def _note(reasons: Counter[str], reason: str, count: int, text: str, name: str) -> None:
    """Count a reason, and warn of it the first time."""
    reason = " ".join(reason.split())[:300]
    if reason not in reasons:
        if len(reasons) >= _MOST_REASONS:
            reason = "other reasons"
        else:
            warn(text, "TRL" if name.startswith("trl") else "Axolotl", name, reason)
    reasons[reason] += count


def _is_replaced(name: str) -> bool:
    """Whether a function, or one of a module, is of another package; ``False`` if not loaded."""
    module, _, path = name.partition(":")
    namespace = vars(sys.modules[module]) if module in sys.modules else {}
    if not path:
        own = [value for key, value in namespace.items() if key in definitions(module)]
        inner = [list(vars(value).values()) for value in own if isinstance(value, type)]
        return any(_is_foreign(value, module) for value in chain(own, *inner))
    value: Any = None
    for part in path.split("."):
        value = namespace.get(part)
        namespace = getattr(value, "__dict__", {})
    return _is_foreign(value, module)


def _is_foreign(value: Any, module: str) -> bool:
    value = getattr(value, "__func__", getattr(value, "fget", value))
    if MARK in getattr(value, "__dict__", {}):
        value = value.__wrapped__
    owner = getattr(value, "__globals__", {"__name__": module}).get("__name__", module)
    package = str(owner).partition(".")[0]
    return (
        package != module.partition(".")[0]
        and package not in sys.stdlib_module_names
        and package in sys.modules  # unlike the names that ``namedtuple`` makes up
    )


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
