"""The curves of a run, from its record: plain columns in seconds, bytes and shares.

This is the data that a page embeds, draws and offers to download. Times are seconds since the
first line of any of the run's files. The number of points is bounded; extremes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fast_axolotl.record import (
    Histogram,
    RankRecord,
    RunRecord,
    RunSummary,
    StepBlock,
    SystemRecord,
    SystemSample,
)
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.report.downsampling import (
    Column,
    StepPoint,
    Windows,
    keep_extremes,
    merge_steps,
    round_figures,
)

__all__ = ["MOST_POINTS", "read_series", "steps_together"]

MOST_POINTS = 3000
"""Points of a curve: a few for every pixel of a wide screen, so that zooming shows more."""

_MOST_SPREAD = 6.0
"""Runs whose numbers of steps differ by more than this merge them on their own."""

_MOST_WINDOWS = 240
_MOST_MARKS = 200
_BINS_TOGETHER = 12
"""Bins of a histogram that make one bar: 1.02 ** 12, about ten bars in a decade."""

_MEMORY = ("pss_bytes", "rss_bytes", "anon_bytes", "hwm_bytes", "swap_bytes", "cgroup_bytes")
_COUNTERS = ("read_bytes", "read_chars", "swap_in_bytes", "swap_out_bytes")

Columns = dict[str, Any]


def steps_together(
    runs: Sequence[tuple[RunRecord, RunSummary]], *, most_points: int = MOST_POINTS
) -> list[int]:
    """How many steps of each run make a point: as many for all that are about as long."""
    counts = []
    for record, summary in runs:
        rank = summary.deciding_rank
        blocks = [] if rank is None else filter(_is_whole, record.ranks[rank].blocks)
        counts.append(sum(block.steps for block in blocks if block.steps > 0))
    known = [count for count in counts if count]
    if known and max(known) <= _MOST_SPREAD * min(known):
        counts = [max(known)] * len(counts)
    return [max(1, math.ceil(count / most_points)) for count in counts]


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
    system = record.system
    starts = [rank.start.time for rank in record.ranks.values()]
    zero = min([*starts, *([system.start.time] if system is not None else [])], default=0.0)
    series: Columns = {"rank": summary.deciding_rank}
    if summary.deciding_rank is not None:
        # As in the figures, what comes before their first step is warm-up.
        rank, first = record.ranks[summary.deciding_rank], summary.first_steady_step
        blocks = [
            replace(block, phase="warmup")
            if block.phase == "steady" and (first is None or block.first_step < first)
            else block
            for block in rank.blocks
        ]
        rank = replace(rank, blocks=blocks)
        offset = rank.start.time - zero
        is_device = summary.stall_source == "device"
        series["steps"] = _steps(rank, offset, is_device, together)
        series["stall"] = _stall(rank, offset, is_device)
        series["phases"] = _phases(rank, offset)
        series["slow"] = _slow(rank, offset)
        # Boundaries of shards and epochs are thinned evenly where there are very many.
        series["marks"] = {}
        for name in ("shard", "epoch"):
            t = [offset + mark.t for mark in rank.marks if mark.name == name]
            every = max(1, math.ceil(len(t) / _MOST_MARKS))
            if t:
                mark = {"all": len(t), "every": every, "t": round_figures(t[::every], 7)}
                series["marks"][name] = mark
        series["waits"] = _waits(rank, is_device)
        series["losses"] = _losses(record, most_points)
        series["throughput"] = _throughput(record, zero)
    if system is not None:
        offset = system.start.time - zero
        series["memory"] = _memory(system, offset, most_points // 2)
        series["disk"] = _disk(system, offset, most_points // 2)
        series["gpus"] = _gpus(system, offset, most_points // 2)
    return {name: value for name, value in series.items() if value not in ({}, [])}


def _steps(rank: RankRecord, offset: float, is_device: bool, together: int) -> Columns:
    blocks = [block for block in rank.blocks if block.steps > 0 and _is_whole(block)]
    if not blocks:
        return {}
    pieces = (piece for block in blocks for piece in _pieces(block, is_device))
    points = list(merge_steps(pieces, together)) if together > 1 else list(pieces)
    columns: Columns = {
        "t": round_figures((offset + point.t for point in points), 7),
        "step": [point.first_step for point in points],
        "is_steady": [point.phase == "steady" for point in points],
        "mean": round_figures(point.wall_seconds / point.steps for point in points),
        "wait": round_figures(point.wait_seconds / point.steps for point in points),
    }
    if any(point.steps > 1 for point in points):
        columns["steps"] = [point.steps for point in points]
        columns["low"] = round_figures(point.low for point in points)
        columns["high"] = round_figures(point.high for point in points)
        columns["high_step"] = [point.high_step for point in points]
    return columns


def _pieces(block: StepBlock, is_device: bool) -> Iterator[StepPoint]:
    """The single steps of a block where they are known, else the block as one point."""
    wall = finite(block.wall_seconds) or 0.0
    device = finite(block.device_wait_seconds) if is_device else None
    wait = (finite(block.host_wait_seconds) or 0.0) if device is None else device
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
            wait_seconds=wait,
            low=min(mean, times.quantile(0.0) or mean),
            high=max(mean, times.quantile(1.0) or mean),
            high_step=block.first_step if block.steps == 1 else None,
        )
        return
    t = block.t - sum(walls)
    for number, one in enumerate(walls):
        t += one
        own = finite(waits[number]) if waits and len(waits) == len(walls) else None
        yield StepPoint(
            t=t,
            phase=block.phase,
            first_step=block.first_step + number,
            steps=1,
            wall_seconds=one,
            wait_seconds=wait * one / (wall or 1.0) if own is None else own,
            low=one,
            high=one,
            high_step=block.first_step + number,
        )


def _is_whole(block: StepBlock) -> bool:
    """Whether its place in time and its length are known."""
    return finite(block.t) is not None and finite(block.wall_seconds) is not None


def _begin(block: StepBlock) -> float:
    spans = sum(finite(seconds) or 0.0 for seconds in block.spans.values())
    return block.t - (finite(block.wall_seconds) or 0.0) - spans


def _bounds(blocks: Iterable[StepBlock]) -> tuple[float, float]:
    whole = [block for block in blocks if _is_whole(block)]
    return min(map(_begin, whole), default=0.0), max((block.t for block in whole), default=0.0)


def _stall(rank: RankRecord, offset: float, is_device: bool) -> Columns:
    """Waiting ÷ time in windows of equal length: by host, and by device if the run's stall is."""
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
    columns = {
        "t": round_figures((offset + t for t in windows.times), 7),
        "host": round_figures(windows.ratio("host", "wall")),
    }
    if is_device:
        columns["device"] = round_figures(windows.ratio("device", "device_wall"))
    return columns


def _throughput(record: RunRecord, zero: float) -> Columns:
    """Rows, samples and tokens a second: a rate for every rank that fetches, summed."""
    ranks = [
        rank
        for rank in record.ranks.values()
        if any(block.fetches and _is_whole(block) for block in rank.blocks)
    ]
    if not ranks:
        return {}
    bounds = [(rank.start.time - zero, *_bounds(rank.blocks)) for rank in ranks]
    begin = min(offset + first for offset, first, _ in bounds)
    end = max(offset + last for offset, _, last in bounds)
    names = [
        name
        for name in ("rows", "samples", "real_tokens")
        if any(getattr(block, name) for rank in ranks for block in rank.blocks)
    ]
    totals: dict[str, list[float | None]] = {}
    for rank in ranks:
        offset = rank.start.time - zero
        windows = Windows.over(begin, end, most=_MOST_WINDOWS)
        for block in filter(_is_whole, rank.blocks):
            amounts = {name: getattr(block, name) for name in names}
            place = offset + _begin(block), offset + block.t
            windows.spread(*place, wall=block.wall_seconds, **amounts)
        for name in names:
            rates = windows.ratio(name, "wall")
            sums = totals.get(name, [None] * len(rates))
            totals[name] = [
                rate if total is None else total + (rate or 0.0)
                for total, rate in zip(sums, rates, strict=True)
            ]
    columns: Columns = {"t": round_figures(windows.times, 7)}
    columns.update({f"{name}_per_second": round_figures(rates) for name, rates in totals.items()})
    return columns


def _phases(rank: RankRecord, offset: float) -> list[dict[str, Any]]:
    """Stretches that are no steady training, neighbours of one phase as one."""
    phases: list[dict[str, Any]] = []
    is_open = False
    for block in rank.blocks:
        if block.phase == "steady":
            is_open = False
        elif _is_whole(block):
            if not is_open or phases[-1]["name"] != block.phase:
                phases.append({"name": block.phase, "begin": offset + _begin(block)})
            phases[-1]["end"] = offset + block.t
            is_open = True
    return phases


def _slow(rank: RankRecord, offset: float) -> Columns:
    """Outliers among the fetches: of every stretch of the run, the longest."""
    outliers = []
    for block in rank.blocks:
        if block.phase == "steady" and _is_whole(block):
            for slow in block.slow:
                if finite(slow.seconds) is not None:
                    share = (slow.fetch - block.first_fetch + 1) / max(1, block.fetches)
                    left = (block.t - _begin(block)) * (1.0 - min(1.0, max(0.0, share)))
                    outliers.append((offset + block.t - left, slow.fetch, slow.row, slow.seconds))
    if not outliers:
        return {}
    begin, end = outliers[0][0], outliers[-1][0]
    width = max((end - begin) / _MOST_MARKS, 1e-9)
    longest: dict[int, tuple[float, int, int, float]] = {}
    for outlier in outliers:
        place = min(_MOST_MARKS - 1, int((outlier[0] - begin) / width))
        if place not in longest or outlier[3] > longest[place][3]:
            longest[place] = outlier
    is_few = len(outliers) <= _MOST_MARKS
    kept = outliers if is_few else [longest[place] for place in sorted(longest)]
    times, fetches, rows, seconds = zip(*kept, strict=True)
    return {
        "all": len(outliers),
        "t": round_figures(times, 7),
        "fetch": list(fetches),
        "row": list(rows),
        "seconds": round_figures(seconds),
    }


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
    shares = [bars.get(number, (0.0, 0.0)) for number in order]
    # Bar 0 holds what took a microsecond or less.
    middles = (1e-6 * 1.02 ** (max(0.0, number - 0.5) * _BINS_TOGETHER) for number in order)
    return {
        "fetches": int(fetches),
        "seconds": round_figures(middles),
        "fetch_share": round_figures(count / fetches for count, _ in shares),
        "wait_share": round_figures(wait / waited if waited else 0.0 for _, wait in shares),
    }


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


def _memory(system: SystemRecord, offset: float, most: int) -> Columns:
    """Memory of the process tree; what was never sampled is left out."""
    samples = [sample for sample in system.samples if finite(sample.t) is not None]
    columns = {name: [getattr(one, name) for one in samples] for name in _MEMORY}
    known = {name: column for name, column in columns.items() if any(column)}
    watched = [known[name] for name in ("pss_bytes", "anon_bytes", "hwm_bytes") if name in known]
    return _thin([offset + sample.t for sample in samples], known, most, watched)


def _disk(system: SystemRecord, offset: float, most: int) -> Columns:
    """Rates between neighbouring samples."""
    pairs = [
        (one, two)
        for one, two in zip(system.samples, system.samples[1:], strict=False)
        if two.t > one.t
    ]

    def rate(one: SystemSample, two: SystemSample, name: str) -> float | None:
        before, after = finite(getattr(one, name)), finite(getattr(two, name))
        if before is None or after is None:
            return None
        return max(0.0, after - before) / (two.t - one.t)

    columns = {f"{name}_per_second": [rate(*pair, name) for pair in pairs] for name in _COUNTERS}
    known = {
        name: column
        for name, column in columns.items()
        if any(value is not None for value in column)
    }
    return _thin([offset + two.t for _, two in pairs], known, most)


def _gpus(system: SystemRecord, offset: float, most: int) -> Columns:
    """Over all devices: the mean utilisation, and the memory of the fullest."""
    samples = [sample for sample in system.samples if sample.gpus]
    utilization: list[float | None] = []
    for sample in samples:
        known = [share for gpu in sample.gpus if (share := finite(gpu.utilization)) is not None]
        utilization.append(sum(known) / len(known) if known else None)
    memory = [
        max((gpu.memory_bytes for gpu in sample.gpus if gpu.memory_bytes), default=None)
        for sample in samples
    ]
    columns: dict[str, Column] = {"utilization": utilization, "memory_bytes": memory}
    return _thin([offset + sample.t for sample in samples], columns, most)


def _thin(
    times: Sequence[float], columns: Mapping[str, Column], most: int, watched: Sequence[Column] = ()
) -> Columns:
    """At most so many rows, with the extremes of the columns that are watched, or of all."""
    kept = keep_extremes(watched or list(columns.values()), most)
    if not kept:
        return {}
    thin: Columns = {"t": round_figures((times[row] for row in kept), 7)}
    for name, column in columns.items():
        thin[name] = round_figures(column[row] for row in kept)
    return thin
