"""When the waits come: all along, in bursts, or once in a long while, and after how many rows.

Slow fetches that follow each other closely are one event. The events that hold most of the waiting
are walked in order for every distance between neighbours that occurs; the largest distance whose
multiples explain three quarters of the waiting is the period. Multiples count because a record
keeps a few slow fetches a second and leaves out the rest. Only if the fetches in that rhythm hold
at least half of all waiting do they make a pattern; else waits are spread: the pattern is steady.

A period of up to 64 fetches is a burst: a ready queue that deep hides it. A longer one is periodic:
the work behind it has to be spread or made smaller. The cost is bounded: at most 500 events are
looked at, whatever the length of the run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fast_axolotl.record import Histogram, Mark, SlowFetch

DEEPEST_QUEUE = 64
"""Fetches: the longest period that a ready queue is expected to hide. Ours: a queue of 64 batches
still fits in memory, one of Axolotl's default 256 batches often does not."""

LEAST_SHARE = 0.5
"""Of all waiting, for a rhythm to be the pattern of a run. Ours: the larger part of it."""

_LEAST_EVENTS = 3
_MOST_EVENTS = 500
_MOST_CANDIDATES = 64
_CLOSE_FETCHES = 2
_LEAST_EXPLAINED = 0.75
_IRREGULAR_TOP = 0.1
_IRREGULAR_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """When the waits come."""

    kind: Literal["steady", "burst", "periodic"] = "steady"
    period_fetches: float | None = None
    period_rows: float | None = None
    period_of: Literal["rows", "shard", "epoch", "step", ""] = ""
    """What the period follows."""


@dataclass(frozen=True, slots=True)
class _Event:
    fetch: int
    row: int
    seconds: float
    fetches: int


def find_pattern(
    slow: Sequence[SlowFetch],
    fetches: int,
    samples_per_fetch: float | None = None,
    marks: Sequence[Mark] = (),
    *,
    accumulation: int = 1,
    waits: Histogram | None = None,
) -> Pattern:
    """The pattern of the slow fetches among ``fetches``.

    ``waits`` holds the waits of all fetches and tells whether the slow ones matter;
    ``samples_per_fetch`` is the mean batch size, ``None`` where samples were not counted.
    """
    events = _heavy_events(slow)
    if len(events) < 2 or fetches < 1:
        return Pattern()
    period_of = _follows_marks(events, marks)
    rhythm = _find_rhythm(events)
    if rhythm is None and period_of:
        first, last, count = events[0], events[-1], len(events) - 1
        rhythm = (last.fetch - first.fetch) / count, (last.row - first.row) / count
    if rhythm is None:
        # Few fetches may hold nearly all waiting, but at no regular distance.
        worst = waits.worst_share(_IRREGULAR_TOP) if waits is not None else None
        is_irregular = len(events) >= _LEAST_EVENTS and (worst or 0.0) >= _IRREGULAR_SHARE
        return Pattern(kind="burst" if is_irregular else "steady")
    period, rows = rhythm
    width = sum(event.fetches for event in events) / len(events)
    if waits is not None and (waits.worst_share(min(1.0, width / period)) or 0.0) < LEAST_SHARE:
        return Pattern()
    if not period_of and accumulation > 1 and abs(period - accumulation) < 0.5:
        period_of = "step"
    elif not period_of and samples_per_fetch:
        period_of = "rows"
    return Pattern(
        kind="burst" if period <= DEEPEST_QUEUE else "periodic",
        period_fetches=period,
        period_rows=rows if samples_per_fetch else None,
        period_of=period_of,
    )


def is_burst_of_accumulation(
    *, accumulation: int, capacity: float, wait_seconds: float, own_seconds: float
) -> bool:
    """Whether a reader that is fast enough on average starves a trainer that fetches in bursts.

    HF's Trainer fetches all micro-batches of a step before the first forward pass. A full queue of
    ``capacity`` serves the first of them at once; the others come as fast as the reader is, so it
    takes ``wait ÷ (accumulation − capacity)`` a batch. If a whole step's batches are read in less
    than the model's own time a step, a deeper queue would hide the wait.
    """
    if not 1 <= capacity < accumulation or own_seconds <= 0:
        return False
    seconds_per_batch = wait_seconds / (accumulation - capacity)
    return seconds_per_batch * accumulation <= own_seconds


def _heavy_events(slow: Sequence[SlowFetch]) -> list[_Event]:
    """The latest events that hold the waiting: a third as long as the one at half of all waiting,
    or longer. Slow fetches next to each other are one event that begins with the first."""
    groups: list[list[SlowFetch]] = []
    for fetch in sorted(slow, key=lambda item: item.fetch):
        if groups and fetch.fetch - groups[-1][-1].fetch <= _CLOSE_FETCHES:
            groups[-1].append(fetch)
        else:
            groups.append([fetch])
    events = [
        _Event(group[0].fetch, group[0].row, sum(fetch.seconds for fetch in group), len(group))
        for group in groups
    ]
    half = sum(event.seconds for event in events) / 2
    least = 0.0
    for event in sorted(events, key=lambda item: -item.seconds):
        half -= event.seconds
        if half <= 0:
            least = event.seconds / 3
            break
    return [event for event in events if event.seconds >= least][-_MOST_EVENTS:]


def _find_rhythm(events: Sequence[_Event]) -> tuple[float, float] | None:
    """The largest period whose multiples explain most of the waiting, in fetches and in rows."""
    whole = sum(event.seconds for event in events)
    starts = [event.fetch for event in events]
    # A stray event splits one distance in two, so that over two neighbours counts as well.
    gaps = [
        after - before
        for ahead in (1, 2)
        for before, after in zip(starts, starts[ahead:], strict=False)
    ]
    common = [gap for gap, _ in Counter(gaps).most_common(_MOST_CANDIDATES)]
    periods = []
    for gap, skip in itertools.product(common, range(min(3, len(events)))):
        beats, count = _walk(events[skip:], gap)
        first, last = beats[0], beats[-1]
        if len(beats) < _LEAST_EVENTS:
            continue
        # Half of the beats are there; or many are, and few would be by chance.
        chance = (2 * _play(gap) + 1) / gap
        is_regular = len(beats) > count / 2 or (len(beats) > 8 and chance <= 0.25)
        if is_regular and sum(beat.seconds for beat in beats) >= _LEAST_EXPLAINED * whole:
            # The first and the last may each be felt a fetch late: within that, a whole number.
            mean = (last.fetch - first.fetch) / count
            fetches = float(round(mean)) if abs(mean - round(mean)) <= 1.5 / count else mean
            periods.append((fetches, (last.row - first.row) / count))
    return max(periods, default=None)


def _walk(events: Sequence[_Event], period: float) -> tuple[list[_Event], int]:
    """The events in step with the first, and how many periods lie between the first and last."""
    beats, count = [events[0]], 0
    for event in events[1:]:
        distance = event.fetch - beats[-1].fetch
        times = round(distance / period)
        if times >= 1 and abs(distance - times * period) <= _play(period):
            beats.append(event)
            count += times
    return beats, count


def _play(period: float) -> float:
    """Batches do not divide a period of rows: one fetch, but not where that fits anything."""
    return max(1.0, period / 20) if period >= 8 else 0.0


def _follows_marks(
    events: Sequence[_Event], marks: Sequence[Mark]
) -> Literal["rows", "shard", "epoch", "step", ""]:
    """Whether nearly every event comes with a mark: a new epoch, a new shard."""
    names: tuple[Literal["shard", "epoch"], ...] = ("epoch", "shard")
    for name in names:
        places = [mark.fetch for mark in marks if mark.name == name and mark.fetch is not None]
        near = sum(
            event.seconds
            for event in events
            if any(abs(event.fetch - place) <= _CLOSE_FETCHES for place in places)
        )
        if len(places) > 1 and near >= _LEAST_EXPLAINED * sum(event.seconds for event in events):
            return name
    return ""
