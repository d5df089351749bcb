"""Replace functions of the real Axolotl by faster ones with the same results, and undo it.

``install()`` enters the module names of the earlier package and sees to it that Axolotl's
functions are replaced as their modules load, or at once where they have. Importing the package does
it. Nothing heavy is loaded: the hooks (wrapt, 40 ms) come when Axolotl is first looked for, the
table of replacements with them, and each replacement at its first call.

Which functions, and how they are guarded: ``patches`` and ``patching``. In Axolotl's YAML,
``plugins: [fast_axolotl.integrations.axolotl.FastAxolotlPlugin]`` does the same, later.
``import axolotl`` means the real one in here, too: all imports are absolute.

``FAST_AXOLOTL=0`` in the environment makes ``install()`` do nothing;
``FAST_AXOLOTL_SKIP=dedupe,save`` leaves those of Axolotl's functions alone.

At its end, the first rank says on stderr what was used in its process, whichever way this package
came in.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from fast_axolotl.axolotl.legacy_modules import LENDERS, LegacyModules
from fast_axolotl.axolotl.startup import SWITCH_NAME, begin

if TYPE_CHECKING:
    from fast_axolotl.axolotl.patching import Patch, Patchwork

LOG = logging.getLogger("fast_axolotl")

SWITCH = "FAST_AXOLOTL"
"""The environment variable that turns everything off when it is ``0``."""

SKIP = "FAST_AXOLOTL_SKIP"
"""The environment variable that names replacements to leave out, with commas between."""

HOSTS = ("axolotl", "trl")
"""Packages whose functions are replaced, or call what is."""

RUN = "FAST_AXOLOTL_RUN"
"""The environment variable that is ``1`` in what ``fast-axolotl run`` starts."""

SEE_LIST = "; list: fast-axolotl status"

_KINDS = {
    "check": "compared with stock first",
    "off": "switched off",
    "skipped": "inactive",
    "failed": "inactive",
}
"""How the states of replacements are counted; all others are active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Which replacements are installed in Axolotl, and why the others are not."""

    installed: bool
    """Whether ``install()`` is in force."""
    reason: str
    """Why it is not in force; empty if it is."""
    virtual_modules: tuple[str, ...]
    """The names that this package added to ``sys.modules``."""
    patches: tuple[Patch, ...]
    """Every replacement and its state; empty before the first import of Axolotl."""


@dataclass(slots=True)
class _State:
    installed: bool = False
    reason: str = "install() was not called"
    legacy: LegacyModules = field(default_factory=LegacyModules)
    patchwork: Patchwork | None = None
    failures: dict[str, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    """Names whose hook wrapt still holds: a hook cannot be taken back, only made inert."""
    skip: set[str] = field(default_factory=set)
    has_warned: bool = False


_STATE = _State()


def install(*, skip: Iterable[str] = ()) -> bool:
    """Install the replacements; ``False`` if all are installed already, or switched off.

    ``skip`` names replacements to skip, as ``FAST_AXOLOTL_SKIP`` does.
    """
    if os.environ.get(SWITCH) == "0":
        _STATE.reason = f"{SWITCH}=0 is set"
        return False
    asked = {*skip, *names_to_skip()}
    if _STATE.installed and not asked - _STATE.skip:
        return False
    was_installed, _STATE.installed, _STATE.reason = _STATE.installed, True, ""
    _STATE.skip |= asked
    _STATE.legacy.enter()
    if _STATE.patchwork is not None:
        _switch_off(_STATE.patchwork, _STATE.skip)
    if _has_host():
        _guarded("axolotl", _hook_all)
    elif not was_installed:
        sys.meta_path.insert(0, _TRIGGER)
    return True


def uninstall() -> bool:
    """Remove all replacements that ``install()`` made; ``False`` if there were none."""
    if not _STATE.installed:
        return False
    _STATE.installed, _STATE.reason = False, "uninstall() was called"
    _STATE.legacy.leave()
    if _STATE.patchwork is not None:
        _STATE.patchwork.remove()
    _remove_trigger()
    _STATE.failures.clear()
    _STATE.skip.clear()
    return True


def status() -> Status:
    """Which replacements are installed now, and why the others are not."""
    patches = _STATE.patchwork.patches() if _STATE.patchwork is not None else ()
    if _STATE.failures:
        from fast_axolotl.axolotl.patching import Patch

        failed = (Patch(name, "failed", reason) for name, reason in _STATE.failures.items())
        patches = (*failed, *patches)
    return Status(
        installed=_STATE.installed,
        reason=_STATE.reason,
        virtual_modules=_STATE.legacy.present(),
        patches=patches,
    )


def check() -> tuple[Patch, ...]:
    """What would be replaced in the Axolotl that is installed, told without importing it."""
    return _new_patchwork(names_to_skip()).check()


def names_to_skip(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The replacements that the environment leaves out."""
    return [name.strip() for name in environment.get(SKIP, "").split(",") if name.strip()]


def host_name() -> str:
    """Axolotl and its version, or TRL where there is no Axolotl; empty without either."""
    from importlib import metadata

    for name, label in zip(HOSTS, ("Axolotl", "TRL"), strict=True):
        with suppress(metadata.PackageNotFoundError):
            return f"{label} {metadata.version(name)}"
    return ""


def status_line(environment: Mapping[str, str], patches: Iterable[Patch] | None = None) -> str:
    """One line: how much of Axolotl is replaced and how much is not."""
    if environment.get(SWITCH) == "0":
        return f"stock Axolotl runs: {SWITCH}=0 is set"
    host = host_name()
    if not host:
        return "nothing to accelerate: neither Axolotl nor TRL is installed in this environment"
    states = [patch.state for patch in (check() if patches is None else patches)]
    counts = Counter(_KINDS.get(state, "active") for state in states if state != "absent")
    if counts["inactive"]:
        host = f"WARNING: not all replacements are active on {host}"
    texts = [f"{count} {kind}" for kind, count in counts.most_common()]
    return f"{host}; replacements: {', '.join(texts) or 'none'}{SEE_LIST}"


def use_line(patches: Iterable[Patch]) -> str:
    """One line: which replacements answered, and what went to Axolotl's own functions, and why."""
    calls: dict[str, int] = {}
    own: dict[str, None] = {}
    for patch in patches:
        if patch.calls:
            calls[patch.name] = calls.get(patch.name, 0) + patch.calls
        for unit, counts in (("", patch.fallbacks), (" rows", patch.rows)):
            most = sorted(counts, key=lambda pair: -pair[1])[:_SHOWN]
            own |= {f"{patch.name} ×{count}{unit} ({reason})": None for reason, count in most}
    if not calls and not own:
        return ""
    used = ", ".join(f"{name} ×{count}" for name, count in calls.items()) or "none"
    stock = f"; stock calls: {', '.join(own)}" if own else ""
    return f"accelerated calls: {used}{stock}"


_SHOWN = 3
"""Reasons of a replacement that the line at the end shows; ``status()`` has all."""


class _Trigger:
    """A finder that sets the hooks when ``axolotl`` is first looked for, then steps aside."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in HOSTS:
            return None
        if _remove_trigger():
            if SWITCH_NAME not in _STATE.skip:
                _guarded(SWITCH_NAME, begin)
            _guarded(name, _hook_all)
        return importlib.util.find_spec(name)


_TRIGGER = _Trigger()


def _has_host() -> bool:
    return any(name in sys.modules for name in HOSTS)


def _remove_trigger() -> bool:
    """Whether it was there; of several threads, one is told so."""
    try:
        sys.meta_path.remove(_TRIGGER)
    except ValueError:
        return False
    return True


def _hook_all() -> None:
    import wrapt

    if _STATE.patchwork is None:
        _STATE.patchwork = _new_patchwork(_STATE.skip)
        atexit.unregister(_say_use)
        atexit.register(_say_use)
    for name in dict.fromkeys((*LENDERS, *_STATE.patchwork.modules)):
        loaded = sys.modules.get(name)
        if loaded is not None:
            _on_import(loaded, is_late=True)
        elif name not in _STATE.waiting:
            _STATE.waiting.add(name)
            wrapt.register_post_import_hook(_on_import, name)


def _say_use() -> None:
    from fast_axolotl.axolotl.patching import is_first_rank

    # Somebody may have looked whether Axolotl is installed, and not used it.
    if _is_worker() or not _has_host() or not is_first_rank():
        return
    line = use_line(status().patches)
    if line:
        print(f"fast-axolotl: {line}", file=sys.stderr)


def _is_worker() -> bool:
    """Whether ``multiprocessing``, or ``multiprocess`` of datasets, started this process."""
    loaded = (sys.modules.get(f"{name}.process") for name in ("multiprocessing", "multiprocess"))
    return any(module is not None and module.parent_process() for module in loaded)


def _new_patchwork(skip: Iterable[str]) -> Patchwork:
    from fast_axolotl.axolotl import patches
    from fast_axolotl.axolotl.patching import Patchwork

    patchwork = Patchwork(patches.REPLACEMENTS, patches.KNOWN)
    _switch_off(patchwork, skip)
    return patchwork


def _switch_off(patchwork: Patchwork, names: Iterable[str]) -> None:
    wanted = {*names}
    patchwork.switch_off(wanted)
    unknown = wanted - {patch.name for patch in patchwork.patches()} - {SWITCH_NAME}
    if unknown:
        LOG.warning(
            "fast-axolotl has no replacement named %s; see `fast-axolotl status`",
            ", ".join(sorted(unknown)),
        )


def _on_import(module: ModuleType, *, is_late: bool = False) -> None:
    _STATE.waiting.discard(module.__name__)
    if _STATE.installed:
        _guarded(module.__name__, partial(_change, module, is_late=is_late))


def _change(module: ModuleType, *, is_late: bool) -> None:
    """Change a module; where ours does not fit, warn once of how many that is true.

    With a plain import nothing else does; ``fast-axolotl run`` and the plugin print a line.
    """
    from fast_axolotl.axolotl.patching import warn

    if module.__name__ in LENDERS:
        _STATE.legacy.lend(module)
    patchwork = _STATE.patchwork
    if patchwork is None or patchwork.apply(module, is_late=is_late) or _STATE.has_warned:
        return
    line = status_line({}, patchwork.check())
    if "WARNING" in line and os.environ.get(RUN) != "1" and not _is_worker():
        _STATE.has_warned = True
        warn("fast-axolotl: %s", line)


def _guarded(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001
        # The one broad except: what is raised here would end the import of Axolotl itself.
        _STATE.failures[name] = f"{type(error).__name__}: {error}"
        LOG.warning("fast-axolotl did not change %s: %s", name, _STATE.failures[name])
