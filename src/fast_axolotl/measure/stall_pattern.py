"""When the waits come: all along, in bursts, or once in a long while.

What the waits came with says most: where an epoch's or a shard's begin causes most of the waiting,
that is the pattern. Else slow fetches next to each other are one event, and the period is the
largest distance between neighbours of which nearly all distances are multiples; multiples count
because a record keeps a few slow fetches per second. If the fetches in that rhythm hold less than
half of all waiting, the pattern is steady.

A period of up to 64 fetches is a burst: a ready queue that deep hides it. A longer one is periodic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fast_axolotl.record import Histogram, SlowFetch, thresholds

DEEPEST_QUEUE = 64
"""Fetches: the longest period that a ready queue is expected to hide. Ours: a queue of 64 batches
still fits in memory, one of Axolotl's default 256 batches often does not."""

_LEAST_EVENTS = 3
_MOST_EVENTS = 500
_MOST_CANDIDATES = 64
_CLOSE_FETCHES = 2
_LEAST_REGULAR = 0.75
"""Of the distances, to be multiples of the period."""
_IRREGULAR_TOP, _IRREGULAR_SHARE = 0.1, 0.8
"""A tenth of the fetches with so much of the waiting are bursts, also without a period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """When the waits come."""

    kind: Literal["steady", "burst", "periodic"] = "steady"
    period_fetches: float | None = None
    period_of: Literal["rows", "shard", "epoch", "step", ""] = ""
    """What the period follows."""


def find_pattern(
    slow: Sequence[SlowFetch],
    waits: Histogram,
    waits_by_cause: Mapping[str, float],
    accumulation: int = 1,
) -> Pattern:
    """The pattern of the slow fetches, given the waits of all fetches and what caused them."""
    events = _heavy_events(slow)
    if len(events) < 2:
        return Pattern()
    gaps = [after - before for before, after in pairwise(events)]
    causes: tuple[Literal["epoch", "shard"], ...] = ("epoch", "shard")
    for cause in causes:
        if waits_by_cause.get(cause, 0.0) >= thresholds.MOST_WAITING:
            mean = sum(gaps) / len(gaps)
            # No queue reaches across epochs, and files are opened one after the other.
            return Pattern(kind="periodic", period_fetches=mean, period_of=cause)
    period = _find_period(gaps)
    if period is None:
        worst = waits.worst_share(_IRREGULAR_TOP) or 0.0
        is_irregular = len(events) >= _LEAST_EVENTS and worst >= _IRREGULAR_SHARE
        return Pattern(kind="burst" if is_irregular else "steady")
    width = len(slow) / len(events)
    held = waits.worst_share(min(1.0, width / period))
    if held is not None and held < thresholds.MOST_WAITING:
        return Pattern()
    is_step = accumulation > 1 and abs(period - accumulation) < 0.5
    return Pattern(
        kind="burst" if period <= DEEPEST_QUEUE else "periodic",
        period_fetches=period,
        period_of="step" if is_step else "rows",
    )


def _heavy_events(slow: Sequence[SlowFetch]) -> list[int]:
    """Where the latest events begin that hold the waiting: a third as long as the one at half of
    all waiting, or longer."""
    groups: list[list[SlowFetch]] = []
    for fetch in sorted(slow, key=lambda item: item.fetch):
        if groups and fetch.fetch - groups[-1][-1].fetch <= _CLOSE_FETCHES:
            groups[-1].append(fetch)
        else:
            groups.append([fetch])
    events = [(group[0].fetch, sum(fetch.seconds for fetch in group)) for group in groups]
    half, least = sum(seconds for _, seconds in events) / 2, 0.0
    for _, seconds in sorted(events, key=lambda event: -event[1]):
        half -= seconds
        if half <= 0:
            least = seconds / 3
            break
    return [fetch for fetch, seconds in events if seconds >= least][-_MOST_EVENTS:]


def _find_period(gaps: Sequence[int]) -> float | None:
    """The largest distance of which most are multiples, averaged over the events."""
    if len(gaps) < _LEAST_EVENTS - 1:
        return None
    common = [gap for gap, _ in Counter(gaps).most_common(_MOST_CANDIDATES)]
    for period in sorted(common, reverse=True):
        # Batches do not divide a period of rows: one fetch, but not where that fits anything.
        play = max(1.0, period / 20) if period >= 8 else 0.0
        beats = [(gap, round(gap / period)) for gap in gaps]
        regular = [(gap, n) for gap, n in beats if n and abs(gap - n * period) <= play]
        if len(regular) < _LEAST_REGULAR * len(gaps):
            continue
        count = sum(n for _, n in regular)
        mean = sum(gap for gap, _ in regular) / count
        # The first and the last may each be felt a fetch late: within that, a whole number.
        return float(round(mean)) if abs(mean - round(mean)) <= 1.5 / count else mean
    return None
