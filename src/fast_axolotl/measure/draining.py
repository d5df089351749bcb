"""A loader on its own: how many batches a second it gives where no model takes its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fast_axolotl.measure.counting import BatchCount, BatchCounter
from fast_axolotl.measure.journal import Journal
from fast_axolotl.record import FreeRun

__all__ = ["drain"]


def drain(loader: Iterable[Any], seconds: float, journal: Journal) -> FreeRun:
    """Take batches for so long; the first is not timed, since workers start up in it."""
    clock = journal.clock
    counter = BatchCounter()
    total: BatchCount | None = None
    batches = 0
    start = now = clock()
    for batch in loader:
        now = clock()
        if batches == 0:
            start = now
        else:
            counted = counter.count(batch)
            total = counted if total is None else total + counted
        batches += 1
        if now - start >= seconds:
            break
    return FreeRun(
        t=journal.since_start(now),
        seconds=round(now - start, 6),
        batches=max(0, batches - 1),
        samples=0 if total is None else total.samples,
        num_bytes=None if total is None else total.num_bytes,
    )
