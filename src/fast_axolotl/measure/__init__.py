"""Measuring a run: waits, tokens, memory, disk, devices, and what they mean together.

    with measure("runs/a") as meter:
        for batch in meter.watch(loader):
            train(batch)
    print(meter.summary().stall_fraction)

``fast_axolotl.measure`` is this package and, since the function is the name people look for there,
can be called as if it were ``measure`` itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from fast_axolotl.measure.meter import Meter
from fast_axolotl.measure.starting import measure
from fast_axolotl.measure.summary import summarise

__all__ = ["Meter", "measure", "summarise"]


class _Measure(ModuleType):
    """This package, which can be called."""

    def __call__(self, *arguments: Any, **named: Any) -> Meter:
        return measure(*arguments, **named)

    @property
    def __wrapped__(self) -> Any:
        """Where ``inspect.signature`` finds the parameters."""
        return measure


sys.modules[__name__].__class__ = _Measure
