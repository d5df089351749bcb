"""Modules of the earlier package under their old names, for code that imports them.

Both keep code written for the earlier package running. Attributes resolve on access, so entering
the modules loads nothing heavy. No parent package is ever made up: a stand-in for ``axolotl`` makes
``import axolotl.cli`` fail. What Axolotl has of its own is never replaced.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
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


class LegacyModules:
    """What was put into ``sys.modules`` and Axolotl's packages, to be taken out again."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._placed: list[tuple[ModuleType, str, object]] = []

    def enter(self) -> None:
        """Enter the virtual modules; one that is there already stays."""
        for name, targets in _LEGACY.items():
            if name in sys.modules:
                continue
            spec = ModuleSpec(name, None, origin="fast_axolotl", is_package=not targets)
            module: Any = module_from_spec(spec)
            module.__getattr__ = partial(_resolve, name)
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
        lent: dict[str, object] = {
            virtual.rpartition(".")[2]: value
            for virtual, value in self._modules.items()
            if virtual.rpartition(".")[0] == package
        }
        lent |= {name: _public(target) for name, target in LENDERS[package].items()}
        for name, value in lent.items():
            if name not in vars(module):
                setattr(module, name, value)
                self._placed.append((module, name, value))

    def leave(self) -> None:
        """Take everything out again."""
        for module, name, value in self._placed:
            if vars(module).get(name) is value:
                delattr(module, name)
        for name in self.present():
            del sys.modules[name]
        self._placed.clear()
        self._modules.clear()


def _resolve(module: str, name: str) -> Any:
    if name not in _LEGACY[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _public(_LEGACY[module][name])


def _public(name: str) -> Any:
    return getattr(importlib.import_module("fast_axolotl"), name)
