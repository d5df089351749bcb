"""Measuring a run: waits, tokens, memory, disk, devices, and what they mean together.

    with measure("runs/a") as meter:
        for batch in meter.watch(loader):
            train(batch)
    print(meter.summary().stall_fraction)

It has two halves that meet in the record, and nowhere else. Read either in this order:

- Collecting, while the run goes on: a ``meter`` sorts fetches into ``steps``, timed by ``events``,
  described by ``batch_counts``, folded by ``blocks`` and written by ``writers``. From outside, a
  ``sampler`` looks at a tree of ``processes``, at the ``disk`` and at each ``gpu``.
- Concluding, from the lines alone: ``ranks`` folds each rank and holds them against each other,
  ``machine`` the samples, and ``summary`` makes the figures, those of the model by ``flops`` and of
  the wall clock by ``ledger``.
  ``verdict`` judges the figures by their ``evidence``, and ``advice`` follows.

``fast_axolotl.measure`` is this package and, since the function is the name people look for there,
can be called as if it were ``measure`` itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from fast_axolotl.measure.meter import Meter, measure
from fast_axolotl.measure.summary import summarise

__all__ = ["Meter", "measure", "summarise"]


class _Measure(ModuleType):
    """This package, which can be called."""

    def __call__(self, *arguments: Any, **named: Any) -> Meter:
        return measure(*arguments, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        # A training function that names it is sent to the workers of Ray Train.
        return import_module, (__name__,)

    @property
    def __wrapped__(self) -> Any:
        """Where ``inspect.signature`` finds the parameters."""
        return measure


sys.modules[__name__].__class__ = _Measure
