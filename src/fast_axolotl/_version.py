"""The version, and the build flags that the earlier package had."""

from __future__ import annotations

__version__ = "1.0.0.dev0"

RUST_AVAILABLE = True
"""Kept from the earlier package, where it told whether the compiled part had loaded."""


def is_available() -> bool:
    """Whether the accelerated paths can run: always, since nothing here is compiled ahead."""
    return RUST_AVAILABLE


def get_version() -> str:
    """The version, with the engine behind it: ``1.0.0 (python)``."""
    return f"{__version__} (python)"
