"""The curves of a run, from its record: plain columns in seconds, bytes and shares.

This is the data that a page embeds, draws and offers to download. Times are seconds since the
first line of any of the run's files. The number of points is bounded; extremes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fast_axolotl.record import (
    Histogram,
    RankRecord,
    RunRecord,
    RunSummary,
    StepBlock,
)
from fast_axolotl.report.downsampling import (
    StepPoint,
    Windows,
    finite,
    keep_extremes,
    merge_steps,
    round_figures,
)
from fast_axolotl.report.system_series import disk_series, gpu_series, memory_series

__all__ = ["MOST_POINTS", "read_series", "steps_together"]

MOST_POINTS = 3000
"""Points of a curve: a few for every pixel of a wide screen, so that zooming shows more."""

_MOST_SPREAD = 6.0
"""Runs whose numbers of steps differ by more than this merge them on their own."""

_MOST_WINDOWS = 240
_MOST_MARKS = 200
_BINS_TOGETHER = 12
"""Bins of a histogram that make one bar: 1.02 ** 12, about ten bars in a decade."""

Columns = dict[str, Any]


def steps_together(
    runs: Sequence[tuple[RunRecord, RunSummary]], *, most_points: int = MOST_POINTS
) -> list[int]:
    """How many steps of each run make a point: as many for all that are about as long."""
    counts = [
        0 if one.deciding_rank is None else _count_steps(record.ranks[one.deciding_rank])
        for record, one in runs
    ]
    known = [count for count in counts if count]
    if known and max(known) <= _MOST_SPREAD * min(known):
        counts = [max(known)] * len(counts)
    return [max(1, math.ceil(count / most_points)) for count in counts]


def _count_steps(rank: RankRecord) -> int:
    return sum(block.steps for block in rank.blocks if block.steps > 0 and _is_whole(block))


def read_series(
    record: RunRecord,
    summary: RunSummary,
    *,
    most_points: int = MOST_POINTS,
    together: int | None = None,
) -> Columns:
    """Every curve of a run; what was not recorded is left out. ``together``: steps of a point."""
    if together is None:
        (together,) = steps_together([(record, summary)], most_points=most_points)
    zero = _first_time(record)
    number = summary.deciding_rank
    found: Columns = {"rank": number}
    if number is not None:
        rank = _as_counted(record.ranks[number], summary.first_steady_step)
        offset = rank.start.time - zero
        is_device = summary.stall_source == "device"
        found["steps"] = _steps(rank, offset, is_device, together)
        found["stall"] = _stall(rank, offset)
        found["phases"] = _phases(rank, offset)
        found["slow"] = _slow(rank, offset)
        found["marks"] = _marks(rank, offset)
        found["waits"] = _waits(rank, is_device)
        found["losses"] = _losses(record, most_points)
        found["throughput"] = _throughput(record, zero)
    if record.system is not None:
        offset = record.system.start.time - zero
        found["memory"] = memory_series(record.system, offset, most_points // 2)
        found["disk"] = disk_series(record.system, offset, most_points // 2)
        found["gpus"] = gpu_series(record.system, offset, most_points // 2)
    return {name: value for name, value in found.items() if value not in ({}, [])}


def _first_time(record: RunRecord) -> float:
    times = [rank.start.time for rank in record.ranks.values()]
    if record.system is not None:
        times.append(record.system.start.time)
    return min(times, default=0.0)


def _as_counted(rank: RankRecord, first_step: int | None) -> RankRecord:
    """With the phases of the figures: what comes before their first step is warm-up."""

    def is_hidden(block: StepBlock) -> bool:
        return block.phase == "steady" and (first_step is None or block.first_step < first_step)

    blocks = [
        replace(block, phase="warmup") if is_hidden(block) else block for block in rank.blocks
    ]
    return replace(rank, blocks=blocks)


def _steps(rank: RankRecord, offset: float, is_device: bool, together: int) -> Columns:
    blocks = [block for block in rank.blocks if block.steps > 0 and _is_whole(block)]
    if not blocks:
        return {}
    pieces = (piece for block in blocks for piece in _pieces(block, is_device))
    points = list(merge_steps(pieces, together)) if together > 1 else list(pieces)
    found: Columns = {
        "t": round_figures((offset + point.t for point in points), 7),
        "step": [point.first_step for point in points],
        "is_steady": [point.phase == "steady" for point in points],
        "mean": round_figures(point.wall_seconds / point.steps for point in points),
        "wait": round_figures(point.wait_seconds / point.steps for point in points),
    }
    if any(point.steps > 1 for point in points):
        found["steps"] = [point.steps for point in points]
        found["low"] = round_figures(point.low for point in points)
        found["high"] = round_figures(point.high for point in points)
        found["high_step"] = [point.high_step for point in points]
    return found


def _pieces(block: StepBlock, is_device: bool) -> Iterator[StepPoint]:
    """The single steps of a block where they are known, else the block as one point."""
    wall = _wall(block) or 0.0
    waits = block.devices if is_device and block.devices else block.hosts
    walls = block.walls
    if not walls or len(walls) != block.steps or any(finite(one) is None for one in walls):
        times = Histogram(block.step_times)
        mean = wall / block.steps
        yield StepPoint(
            t=block.t,
            phase=block.phase,
            first_step=block.first_step,
            steps=block.steps,
            wall_seconds=wall,
            wait_seconds=_wait(block, is_device),
            low=min(mean, times.quantile(0.0) or mean),
            high=max(mean, times.quantile(1.0) or mean),
            high_step=block.first_step if block.steps == 1 else None,
        )
        return
    t = block.t - sum(walls)
    for number, one in enumerate(walls):
        t += one
        wait = finite(waits[number]) if waits and len(waits) == len(walls) else None
        yield StepPoint(
            t=t,
            phase=block.phase,
            first_step=block.first_step + number,
            steps=1,
            wall_seconds=one,
            wait_seconds=_wait(block, is_device) * one / (wall or 1.0) if wait is None else wait,
            low=one,
            high=one,
            high_step=block.first_step + number,
        )


def _wall(block: StepBlock) -> float | None:
    return finite(block.wall_seconds)


def _is_whole(block: StepBlock) -> bool:
    """Whether its place in time and its length are known."""
    return finite(block.t) is not None and _wall(block) is not None


def _wait(block: StepBlock, is_device: bool) -> float:
    device = finite(block.device_wait_seconds) if is_device else None
    return (finite(block.host_wait_seconds) or 0.0) if device is None else device


def _begin(block: StepBlock) -> float:
    spans = sum(finite(seconds) or 0.0 for seconds in block.spans.values())
    return block.t - (_wall(block) or 0.0) - spans


def _bounds(blocks: Iterable[StepBlock]) -> tuple[float, float]:
    kept = [block for block in blocks if _is_whole(block)]
    return (
        min((_begin(block) for block in kept), default=0.0),
        max((block.t for block in kept), default=0.0),
    )


def _stall(rank: RankRecord, offset: float) -> Columns:
    """Waiting ÷ time in windows of equal length, by host and by device."""
    blocks = [block for block in rank.blocks if _is_whole(block)]
    if not blocks:
        return {}
    windows = Windows.over(*_bounds(blocks), most=_MOST_WINDOWS)
    for block in blocks:
        device = finite(block.device_wait_seconds)
        windows.spread(
            _begin(block),
            block.t,
            wall=block.wall_seconds,
            host=block.host_wait_seconds,
            device=device,
            device_wall=None if device is None else block.wall_seconds,
        )
    found = {
        "t": round_figures((offset + t for t in windows.times), 7),
        "host": round_figures(windows.ratio("host", "wall")),
    }
    if "device" in windows.sums:
        found["device"] = round_figures(windows.ratio("device", "device_wall"))
    return found


def _throughput(record: RunRecord, zero: float) -> Columns:
    """Rows, samples and tokens a second: a rate for every rank that fetches, summed."""
    ranks = [
        rank
        for rank in record.ranks.values()
        if any(block.fetches and _is_whole(block) for block in rank.blocks)
    ]
    bounds = [_bounds(rank.blocks) for rank in ranks]
    if not ranks:
        return {}
    offsets = [rank.start.time - zero for rank in ranks]
    begin = min(offset + one[0] for offset, one in zip(offsets, bounds, strict=True))
    end = max(offset + one[1] for offset, one in zip(offsets, bounds, strict=True))
    names = [
        name
        for name in ("rows", "samples", "real_tokens")
        if any(getattr(block, name) for rank in ranks for block in rank.blocks)
    ]
    totals: dict[str, list[float | None]] = {}
    times: list[float] = []
    for rank, offset in zip(ranks, offsets, strict=True):
        windows = Windows.over(begin, end, most=_MOST_WINDOWS)
        times = windows.times
        for block in filter(_is_whole, rank.blocks):
            amounts = {name: getattr(block, name) for name in names}
            place = offset + _begin(block), offset + block.t
            windows.spread(*place, wall=block.wall_seconds, **amounts)
        for name in names:
            rates = windows.ratio(name, "wall")
            totals[name] = _add(totals.get(name), rates)
    found: Columns = {"t": round_figures(times, 7)}
    found.update({f"{name}_per_second": round_figures(rates) for name, rates in totals.items()})
    return found


def _add(sums: list[float | None] | None, rates: list[float | None]) -> list[float | None]:
    if sums is None:
        return rates
    pairs = zip(sums, rates, strict=True)
    return [two if one is None else one + (two or 0.0) for one, two in pairs]


def _phases(rank: RankRecord, offset: float) -> list[dict[str, Any]]:
    """Stretches that are no steady training, neighbours of one phase as one."""
    found: list[dict[str, Any]] = []
    is_open = False
    for block in rank.blocks:
        if block.phase == "steady":
            is_open = False
        elif _is_whole(block):
            if not is_open or found[-1]["name"] != block.phase:
                found.append({"name": block.phase, "begin": offset + _begin(block)})
            found[-1]["end"] = offset + block.t
            is_open = True
    return found


def _slow(rank: RankRecord, offset: float) -> Columns:
    """Outliers among the fetches: of every stretch of the run, the longest."""
    found = [
        (offset + _time_of(block, slow.fetch), slow.fetch, slow.row, slow.seconds)
        for block in rank.blocks
        for slow in block.slow
        if block.phase == "steady" and _is_whole(block) and finite(slow.seconds) is not None
    ]
    if not found:
        return {}
    begin, end = found[0][0], found[-1][0]
    width = max((end - begin) / _MOST_MARKS, 1e-9)
    longest: dict[int, tuple[float, int, int, float]] = {}
    for one in found:
        place = min(_MOST_MARKS - 1, int((one[0] - begin) / width))
        if place not in longest or one[3] > longest[place][3]:
            longest[place] = one
    kept = found if len(found) <= _MOST_MARKS else [longest[place] for place in sorted(longest)]
    return {
        "all": len(found),
        "t": round_figures((one[0] for one in kept), 7),
        "fetch": [one[1] for one in kept],
        "row": [one[2] for one in kept],
        "seconds": round_figures(one[3] for one in kept),
    }


def _time_of(block: StepBlock, fetch: int) -> float:
    share = (fetch - block.first_fetch + 1) / max(1, block.fetches)
    return block.t - (block.t - _begin(block)) * (1.0 - min(1.0, max(0.0, share)))


def _marks(rank: RankRecord, offset: float) -> Columns:
    """Boundaries of shards and epochs; evenly thinned where there are very many."""
    found: Columns = {}
    for name in ("shard", "epoch"):
        times = [offset + mark.t for mark in rank.marks if mark.name == name]
        every = max(1, math.ceil(len(times) / _MOST_MARKS))
        if times:
            found[name] = {"all": len(times), "every": every, "t": round_figures(times[::every], 7)}
    return found


def _waits(rank: RankRecord, is_device: bool) -> Columns:
    """How long fetches waited: share of the fetches, and of all waiting, by duration."""
    steady = Histogram()
    for block in rank.blocks:
        if block.phase == "steady":
            steady.merge((block.device_waits or {}) if is_device else block.host_waits)
    bars: dict[int, list[float]] = {}
    for (seconds, count), index in zip(steady.items(), steady.counts, strict=True):
        bar = bars.setdefault(0 if index == 0 else 1 + (index - 1) // _BINS_TOGETHER, [0.0, 0.0])
        bar[0] += count
        bar[1] += count * seconds
    fetches = sum(bar[0] for bar in bars.values())
    waited = sum(bar[1] for bar in bars.values())
    if not fetches:
        return {}
    order = range(min(bars), max(bars) + 1)
    empty = [0.0, 0.0]
    return {
        "fetches": int(fetches),
        "seconds": round_figures(_bar_middle(number) for number in order),
        "fetch_share": round_figures(bars.get(number, empty)[0] / fetches for number in order),
        "wait_share": round_figures(
            bars.get(number, empty)[1] / waited if waited else 0.0 for number in order
        ),
    }


def _bar_middle(number: int) -> float:
    """Bar 0 holds what took a microsecond or less."""
    return 1e-6 * 1.02 ** ((number - 0.5) * _BINS_TOGETHER) if number else 1e-6


def _losses(record: RunRecord, most: int) -> Columns:
    logs = record.find_losses()
    values = [finite(line.values["loss"]) for line in logs]
    kept = keep_extremes([values], most)
    if not kept:
        return {}
    wrong = [line.step for line, value in zip(logs, values, strict=True) if value is None]
    return {
        "step": [logs[row].step for row in kept],
        "loss": round_figures((values[row] for row in kept), 7),
        "not_finite": len(wrong),
        "first_not_finite": wrong[0] if wrong else None,
    }
