"""How waits are distributed over a run, and whether its steps become longer.

*Pattern.* All along, in bursts, or once in a long while. Long waits hold most of the waiting:
a third as long as the one at half of it, or longer. Where they are few, all fetches ÷ their number
is the period. Up to 64 fetches it is a burst: a ready queue that deep hides it. A longer one is
periodic, and so are waits that come with the begin of an epoch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from fast_axolotl.record import Histogram, StepBlock, thresholds

DEEPEST_QUEUE = 64
"""Fetches: the longest period that a ready queue is expected to hide. Ours: a queue of 64 batches
still fits in memory, one of Axolotl's default 256 batches often does not."""

_MOST_LONG, _LEAST_HELD = 0.25, 0.6
"""Of all fetches, that are long waits at most; and of all waiting, that they hold at least. Waits
that vary by chance (exponential, lognormal) have more of them, or they hold less."""
_LEAST_DRIFT, _LEAST_DRIFTING = 1.3, 20
"""Times that steps become longer, to be told; steps in each third of a run."""


class Pattern(NamedTuple):
    """When the waits come."""

    kind: Literal["steady", "burst", "periodic"] = "steady"
    period_fetches: float | None = None
    period_of: Literal["rows", "epoch", ""] = ""
    """What the period follows."""


def find_pattern(waits: Histogram, waits_by_cause: Mapping[str, float]) -> Pattern:
    """The pattern of all waits, by how many of them are long, given what caused them."""
    bins = sorted(waits.items(), reverse=True)
    whole = sum(map(prod, bins))
    left, least = whole / 2, 0.0
    for seconds, count in bins:
        left -= seconds * count
        if left <= 0:
            least = seconds / 3
            break
    long = [(seconds, count) for seconds, count in bins if seconds >= least]
    number, held = sum(count for _, count in long), sum(map(prod, long))
    if number < 2 or not whole:
        return Pattern()
    period = waits.count / number
    if waits_by_cause.get("epoch", 0.0) >= thresholds.MOST_WAITING:
        return Pattern("periodic", period, "epoch")  # no queue reaches across epochs
    if number > _MOST_LONG * waits.count or held < _LEAST_HELD * whole:
        return Pattern()
    return Pattern("burst" if period <= DEEPEST_QUEUE else "periodic", period, "rows")


def find_drift(blocks: Sequence[StepBlock]) -> tuple[float, float] | None:
    """Seconds of a step without its waits, in the first third of the steps and in the last, where
    they grew all the while."""
    own = [
        (block.wall_seconds - block.host_wait_seconds) / block.steps
        for block in blocks
        for _ in range(block.steps)
    ]
    third = len(own) // 3
    if third < _LEAST_DRIFTING:
        return None
    first, middle, last = (
        statistics.median(own[part * third : (part + 1) * third]) for part in range(3)
    )
    grows = first * _LEAST_DRIFT <= last and first <= middle <= last
    return (first, last) if grows and first > 0 else None
