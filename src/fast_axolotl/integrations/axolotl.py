"""Put this package's names where Axolotl's users expect them, and take them away again.

``install()`` does two things. It enters the virtual modules of ``_VIRTUAL`` into ``sys.modules``;
their attributes resolve on access, so installing loads nothing heavy. And it sees to it that
post-import hooks lend a few names to Axolotl's own packages once those have loaded, or at once
where they already have. Cost: four small module objects, and one string comparison for each later
import in the process. wrapt, which runs the hooks, takes 40 ms to import (wrapt 2.5, asyncio and
importlib.metadata come with it), so it is loaded when Axolotl is, and not before.

It never creates ``axolotl``, ``axolotl.utils`` or ``axolotl.utils.data``: a stand-in for a real
package makes ``import axolotl.cli`` fail. It never replaces an attribute or a module that is
already there, and it replaces no function of Axolotl.

``FAST_AXOLOTL=0`` in the environment makes ``install()`` do nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Patch", "Status", "install", "status", "uninstall"]

LOG = logging.getLogger(__name__)

SWITCH = "FAST_AXOLOTL"
"""The environment variable that turns the automatic install off when it is ``0``."""

_VIRTUAL: dict[str, dict[str, str]] = {
    "axolotl.rust_ext": {},
    "axolotl.rust_ext.axolotl_ext": {"streaming_dataset_reader": "streaming_dataset_reader"},
    "axolotl.utils.data.rust_streaming": {
        "RUST_EXTENSION_AVAILABLE": "RUST_AVAILABLE",
        "get_rust_extension_status": "is_available",
        "streaming_dataset_reader": "streaming_dataset_reader",
    },
    "axolotl.utils.data.rust_wrapper": {
        "RustStreamingDataset": "RustStreamingDataset",
        "create_rust_streaming_dataset": "create_rust_streaming_dataset",
        "is_rust_streaming_available": "is_available",
        "load_dataset_with_rust_streaming": "streaming_dataset_reader",
        "should_use_rust_streaming": "should_use_rust_streaming",
    },
}
"""Virtual module → its attribute → the public name of this package behind it."""

_LENT: dict[str, dict[str, str]] = {
    "axolotl": {},
    "axolotl.utils": {},
    "axolotl.utils.data": {
        "fast_parallel_hash_rows": "parallel_hash_rows",
        "fast_deduplicate_indices": "deduplicate_indices",
    },
    "axolotl.utils.collators": {
        "fast_pad_sequences": "pad_sequences",
        "fast_create_padding_mask": "create_padding_mask",
    },
}
"""Real module with a hook → the attribute it is lent → the public name behind it."""

_ON_THE_WAY = {"axolotl": "utils", "axolotl.utils": "data"}
"""Real package → the child that leads to a virtual module."""


class Patch(NamedTuple):
    """What became of one change to Axolotl."""

    name: str
    """The function, or the module where a hook failed."""
    state: str
    """``failed``: the hook raised, and the module stays as Axolotl wrote it."""
    reason: str
    """Why it is in this state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is installed into Axolotl, and why the rest is not."""

    installed: bool
    """Whether ``install()`` is in force."""
    reason: str
    """Why it is not in force; empty where it is."""
    virtual_modules: tuple[str, ...]
    """The names in ``sys.modules`` that this package put there."""
    patches: tuple[Patch, ...]
    """Every change to Axolotl that has something to tell."""


@dataclass(slots=True)
class _State:
    installed: bool = False
    reason: str = "install() was not called"
    modules: dict[str, ModuleType] = field(default_factory=dict)
    placed: list[tuple[ModuleType, str, object]] = field(default_factory=list)
    patches: dict[str, Patch] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    """Names whose hook wrapt still holds: a hook cannot be taken back, only made inert."""


_STATE = _State()


def install() -> bool:
    """Install the virtual modules and the hooks; ``False`` where they are in or switched off."""
    if _STATE.installed:
        return False
    if os.environ.get(SWITCH) == "0":
        _STATE.reason = f"the environment has {SWITCH}=0"
        return False
    _STATE.installed, _STATE.reason = True, ""
    for name, targets in _VIRTUAL.items():
        _add_virtual_module(name, targets)
    if "axolotl" in sys.modules:
        _guarded("axolotl", _hook_all)
    else:
        sys.meta_path.insert(0, _TRIGGER)
    return True


def uninstall() -> bool:
    """Take everything out that ``install()`` put in; ``False`` where nothing was installed."""
    if not _STATE.installed:
        return False
    _STATE.installed, _STATE.reason = False, "uninstall() was called"
    for module, name, value in _STATE.placed:
        if vars(module).get(name) is value:
            delattr(module, name)
    for name in _present_modules():
        del sys.modules[name]
    _remove_trigger()
    _STATE.placed.clear()
    _STATE.modules.clear()
    _STATE.patches.clear()
    return True


def status() -> Status:
    """What is installed now, and the reason for what is not."""
    return Status(
        installed=_STATE.installed,
        reason=_STATE.reason,
        virtual_modules=_present_modules(),
        patches=tuple(_STATE.patches.values()),
    )


class _VirtualModule(ModuleType):
    """A module whose attributes are public names of this package, resolved on access."""

    def __init__(self, name: str, targets: dict[str, str]) -> None:
        super().__init__(name, "Served by fast_axolotl.")
        is_package = any(other.startswith(f"{name}.") for other in _VIRTUAL)
        self.__spec__ = ModuleSpec(name, None, origin="fast_axolotl", is_package=is_package)
        self.__package__ = self.__spec__.parent
        if is_package:
            self.__path__: list[str] = []
        self.__all__ = sorted(targets)
        self._targets = targets

    def __getattr__(self, name: str) -> Any:
        target = self._targets.get(name)
        if target is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _public(target)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._targets})


def _add_virtual_module(name: str, targets: dict[str, str]) -> None:
    if name in sys.modules:
        return
    module = _VirtualModule(name, targets)
    _STATE.modules[name] = sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in _STATE.modules:
        setattr(_STATE.modules[parent], child, module)


def _present_modules() -> tuple[str, ...]:
    return tuple(name for name, mod in _STATE.modules.items() if sys.modules.get(name) is mod)


class _Trigger:
    """A finder that sets the hooks when ``axolotl`` is first looked for, then steps aside."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "axolotl":
            return None
        _remove_trigger()
        _guarded(name, _hook_all)
        return importlib.util.find_spec(name)


_TRIGGER = _Trigger()


def _remove_trigger() -> None:
    if _TRIGGER in sys.meta_path:
        sys.meta_path.remove(_TRIGGER)


def _hook_all() -> None:
    import wrapt

    for name in _LENT:
        loaded = sys.modules.get(name)
        if loaded is not None:
            _on_import(name, loaded)
        elif name not in _STATE.waiting:
            _STATE.waiting.add(name)
            wrapt.register_post_import_hook(partial(_on_import, name), name)


def _on_import(name: str, module: ModuleType) -> None:
    _STATE.waiting.discard(name)
    if _STATE.installed:
        _guarded(name, partial(_lend, name, module))


def _guarded(name: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001
        # The one broad except: what is raised here would end the import of Axolotl itself.
        _STATE.patches[name] = Patch(name, "failed", f"{type(error).__name__}: {error}")
        LOG.warning("fast_axolotl left %s as it is: %s", name, _STATE.patches[name].reason)


def _lend(name: str, module: ModuleType) -> None:
    for virtual, value in _STATE.modules.items():
        parent, _, child = virtual.rpartition(".")
        if parent == name:
            _place(module, child, value)
    if name in _ON_THE_WAY:
        _place(module, "__getattr__", _importer(name, _ON_THE_WAY[name]))
    for attribute, target in _LENT[name].items():
        _place(module, attribute, _public(target))


def _place(module: ModuleType, name: str, value: object) -> None:
    if name not in vars(module):
        setattr(module, name, value)
        _STATE.placed.append((module, name, value))


def _importer(parent: str, child: str) -> Callable[[str], ModuleType]:
    """A module ``__getattr__`` that imports ``child`` on first access.

    ``import axolotl.utils.data.rust_streaming`` finds the virtual module in ``sys.modules`` and
    therefore skips the packages above it; the dotted name is then missing from ``axolotl``.
    """
    full_name = f"{parent}.{child}"

    def __getattr__(name: str) -> ModuleType:
        missing = f"module {parent!r} has no attribute {name!r}"
        if name != child or full_name in sys.modules:
            raise AttributeError(missing)
        try:
            return importlib.import_module(full_name)
        except ImportError as error:
            raise AttributeError(f"{missing}: {error}") from error

    return __getattr__


def _public(name: str) -> Any:
    return getattr(importlib.import_module("fast_axolotl"), name)
