"""The public import path of the acceleration and of the plugin for Axolotl."""

from __future__ import annotations

from typing import Any

from fast_axolotl.axolotl import Status, check, install, status, uninstall

__all__ = ["Status", "check", "install", "status", "uninstall"]


def __getattr__(name: str) -> Any:
    # The plugin derives from Axolotl's class, so it exists where Axolotl does.
    if name == "FastAxolotlPlugin":
        from fast_axolotl.integrations.axolotl_plugin import FastAxolotlPlugin

        return FastAxolotlPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
