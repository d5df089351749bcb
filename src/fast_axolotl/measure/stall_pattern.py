"""How waits are distributed over a run, and whether its end differs.

*Pattern.* All along, in bursts, or once in a long while. Long waits hold most of the waiting:
a third as long as the one at half of it, or longer. Where they are few, all fetches ÷ their number
is the period. Up to 64 fetches it is a burst: a ready queue that deep hides it. A longer one is
periodic, and so are waits that come with the begin of an epoch.

*End.* A run that was fine for hours can be starved. The steady time is cut into tenths. The last
one is a change if it is long enough to be judged, and its stall is five points above that of seven
of the nine tenths before it, or below. One bad moment is no change, and neither are waits that come
and go. A change in the middle of a run weighs enough in the figures of the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.record import Histogram, StepBlock, thresholds
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.waits import WaitTotals

DEEPEST_QUEUE = 64
"""Fetches: the longest period that a ready queue is expected to hide. Ours: a queue of 64 batches
still fits in memory, one of Axolotl's default 256 batches often does not."""

_MOST_LONG, _LEAST_HELD = 0.25, 0.6
"""Of all fetches, that are long waits at most; and of all waiting, that they hold at least. Waits
that vary by chance (exponential, lognormal) have more of them, or they hold less."""
_TENTHS = 10
_LEAST_APART = 7
"""Of the nine tenths before the last."""
_LEAST_CHANGE = 0.05
"""Points. Ours: the distance between free of a loss and bound by it."""


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


class LateChange(NamedTuple):
    """The stall of a run before its last tenth, and where that begins."""

    begin: float
    """Seconds since 1970."""
    first_step: int
    stall_before: float
    """Median of the tenths before."""


_LEAST_DRIFT, _LEAST_DRIFTING = 1.3, 20
"""Times that steps become longer, to be told; steps in each third of a run."""


def find_late_change(rank: RankFigures | None) -> LateChange | None:
    """The change at the end of a run, of the rank that decides about the data."""
    if rank is None or not rank.steady.wall_seconds:
        return None
    tenths, first, done = [WaitTotals() for _ in range(_TENTHS)], rank.steady_blocks[0], 0.0
    for block in rank.steady_blocks:
        tenth = tenths[min(int(_TENTHS * done / rank.steady.wall_seconds), _TENTHS - 1)]
        if tenth is tenths[-1] and not tenth.steps:
            first = block
        tenth.add_block(block)
        done += finite(block.wall_seconds) or 0.0
    last = tenths[-1]
    is_long = thresholds.is_long_enough(last.fetches, last.wall_seconds)
    if not is_long or not all(tenth.steps for tenth in tenths):
        return None
    *before, now = (tenth.stall_fraction or 0.0 for tenth in tenths)
    ranked = sorted(before)
    if max(now - ranked[_LEAST_APART - 1], ranked[-_LEAST_APART] - now) < _LEAST_CHANGE:
        return None
    begin = rank.record.start.time + first.begin
    return LateChange(begin, first.first_step, statistics.median(before))


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
