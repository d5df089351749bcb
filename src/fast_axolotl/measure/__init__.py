"""Measuring a run: waits, tokens, memory, disk, devices, and what they mean together.

    with measure("runs/a") as meter:
        for batch in meter.watch(loader):
            train(batch)
    print(meter.summary().stall_fraction)

It has two halves that meet in the record, and nowhere else. Read either in this order:

- Collecting, while the run goes on: ``starting`` puts a ``meter`` together; ``steps`` sorts its
  fetches into steps, timed by ``waiting`` and ``events``, counted by ``counting``, folded by
  ``blocks`` and written by ``journal`` (``phases``, ``forks`` and ``owning`` beside it;
  ``draining`` runs the loader alone). From outside, ``sampler`` looks at a ``process_tree`` through
  ``procfs``, ``cgroup``, ``disk`` and ``gpu`` (``portable_tree`` where there is no procfs), and
  ``system_reasons`` says what it cannot see; ``watching`` and ``machine`` tell the rest.
- Concluding, from the lines alone: ``summary`` folds each rank (``ranks``, ``ready_queue``), finds
  the figures (``stall_figures`` with ``periods``, ``throughput_figures``, ``flops`` with ``peaks``,
  ``system_figures``), keeps what is missing in ``findings``, and asks ``verdict``. Its rules are
  drawn by ``thresholds``, speak through ``evidence`` and ``wording``, begin with ``inconclusive``,
  and end in ``actions`` or ``feeding``, which call settings by their ``naming``.

``fast_axolotl.measure`` is this package and, since the function is the name people look for there,
can be called as if it were ``measure`` itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from fast_axolotl.measure.meter import Meter, measure
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
