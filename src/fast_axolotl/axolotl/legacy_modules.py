"""Modules of the earlier package under Axolotl's name, and names lent to Axolotl's own packages.

Both keep code written for the earlier package running. Attributes resolve on access, so entering
the modules loads nothing heavy. No parent package is ever made up: a stand-in for ``axolotl`` makes
``import axolotl.cli`` fail. What Axolotl has of its own is never replaced.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LEGACY: dict[str, dict[str, str]] = {
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
"""Module name → its attribute → the public name of this package behind it."""

LENDERS: dict[str, dict[str, str]] = {
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


@dataclass(slots=True)
class LegacyModules:
    """What was put into ``sys.modules`` and Axolotl's packages, to be taken out again."""

    _modules: dict[str, ModuleType] = field(default_factory=dict)
    _placed: list[tuple[ModuleType, str, object]] = field(default_factory=list)

    def enter(self) -> None:
        """Enter the virtual modules; one that is there already stays."""
        for name, targets in _LEGACY.items():
            if name in sys.modules:
                continue
            module = _LegacyModule(name, targets)
            self._modules[name] = sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent in self._modules:
                setattr(self._modules[parent], child, module)

    def present(self) -> tuple[str, ...]:
        """The names in ``sys.modules`` that are ours."""
        return tuple(name for name, mod in self._modules.items() if sys.modules.get(name) is mod)

    def lend(self, module: ModuleType) -> None:
        """Give a package of Axolotl the names that users of the earlier package expect there."""
        package = module.__name__
        for virtual, value in self._modules.items():
            parent, _, child = virtual.rpartition(".")
            if parent == package:
                self._place(module, child, value)
        if package in _ON_THE_WAY:
            self._place(module, "__getattr__", _importer(package, _ON_THE_WAY[package]))
        for attribute, target in LENDERS[package].items():
            self._place(module, attribute, _public(target))

    def leave(self) -> None:
        """Take everything out again."""
        for module, name, value in self._placed:
            if vars(module).get(name) is value:
                delattr(module, name)
        for name in self.present():
            del sys.modules[name]
        self._placed.clear()
        self._modules.clear()

    def _place(self, module: ModuleType, name: str, value: object) -> None:
        if name not in vars(module):
            setattr(module, name, value)
            self._placed.append((module, name, value))


class _LegacyModule(ModuleType):
    """A module whose attributes are public names of this package, resolved on access."""

    def __init__(self, name: str, targets: dict[str, str]) -> None:
        super().__init__(name, "Served by fast_axolotl.")
        is_package = any(other.startswith(f"{name}.") for other in _LEGACY)
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
