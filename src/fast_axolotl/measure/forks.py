"""A forked child inherits its parent's meters and must not use them: not their file, and not the
parent's CUDA events. They go quiet in the child, whatever it does with them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["quiet_after_fork"]


class _Quietable(Protocol):
    def go_quiet(self) -> None: ...


_meters: weakref.WeakSet[_Quietable] = weakref.WeakSet()
_registered: list[bool] = []


def quiet_after_fork(meter: _Quietable) -> None:
    """Have a meter go quiet in every child that is forked from now on."""
    if not _registered and hasattr(os, "register_at_fork"):
        _registered.append(True)
        os.register_at_fork(after_in_child=_silence)
    _meters.add(meter)


def _silence() -> None:
    for meter in list(_meters):
        meter.go_quiet()
