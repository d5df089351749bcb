"""The curves of a run, from its record: plain columns in seconds, bytes and shares.

This is the data that a page embeds, draws and offers to download. Times are seconds since the
first line of any of the run's files.

The number of points is bounded, and nothing that stands out is lost. ``keep_extremes`` chooses
points: of every stretch, the least and the largest of each column stay. ``merge_steps`` folds
consecutive steps into points that carry their mean, least and largest. ``Windows`` spreads sums
over stretches of equal time, for rates and shares. All are one pass in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fast_axolotl.record import Histogram, RunRecord, RunSummary, StepBlock, SystemRecord
from fast_axolotl.record.arithmetic import finite, ratio

MOST_POINTS = 3000
"""Points of a curve: a few for every pixel of a wide screen, so that zooming shows more."""

_MOST_SPREAD = 6.0
"""Runs whose numbers of steps differ by more than this merge them on their own."""

_MOST_WINDOWS = 240
_MOST_MARKS = 200
_BINS_TOGETHER = 12
"""Bins of a histogram that make one bar: 1.02 ** 12, about ten bars in a decade."""

_MEMORY = (
    "working_set_bytes",
    "rss_bytes",
    "anon_bytes",
    "hwm_bytes",
    "swap_bytes",
    "cgroup_bytes",
)
_COUNTERS = ("read_bytes", "read_chars", "swap_in_bytes", "swap_out_bytes")

_FIGURES = 5
"""Significant figures of the numbers in a page: a pixel is a thousandth of a chart."""

Column = Sequence[float | None]
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
    system = record.systems.get(summary.node, record.system)
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
        whole = list(filter(_is_whole, blocks))
        offset = rank.start.time - zero
        is_device = summary.stall_source == "device"
        series["steps"] = _steps(whole, offset, is_device, together)
        series["stall"] = _stall(whole, offset, is_device)
        # Stretches that are no steady training, neighbours of one phase as one.
        phases: list[dict[str, Any]] = []
        is_open = False
        for block in blocks:
            if block.phase == "steady":
                is_open = False
            elif _is_whole(block):
                if not is_open or phases[-1]["name"] != block.phase:
                    phases.append({"name": block.phase, "begin": offset + _begin(block)})
                phases[-1]["end"] = offset + block.t
                is_open = True
        series["phases"] = phases
        series["slow"] = _slow(whole, offset)
        # Boundaries of shards and epochs are thinned evenly where there are very many.
        series["marks"] = {}
        for name in ("shard", "epoch"):
            t = [offset + mark.t for mark in rank.marks if mark.name == name]
            every = max(1, math.ceil(len(t) / _MOST_MARKS))
            if t:
                mark = {"all": len(t), "every": every, "t": round_figures(t[::every], 7)}
                series["marks"][name] = mark
        series["waits"] = _waits(blocks, is_device)
        logs = record.find_losses()
        losses = [finite(line.values["loss"]) for line in logs]
        if kept := keep_extremes([losses], most_points):
            wrong = [line.step for line, loss in zip(logs, losses, strict=True) if loss is None]
            series["losses"] = {
                "step": [logs[row].step for row in kept],
                "loss": round_figures((losses[row] for row in kept), 7),
                "not_finite": len(wrong),
                "first_not_finite": wrong[0] if wrong else None,
            }
        series["throughput"] = _throughput(record, zero)
        # Of the rank that shows most of it, as in the figures.
        ranks = record.ranks.values()
        shown = max(
            ranks, key=lambda r: sum(w.exposed_communication_seconds or 0 for w in r.windows)
        )
        if shown.windows[1:]:
            shares = (ratio(x.exposed_communication_seconds, x.wall_seconds) for x in shown.windows)
            times = [shown.start.time - zero + window.t for window in shown.windows]
            series["communication"] = _thin(times, {"exposed": list(shares)}, _MOST_WINDOWS)
    if system is not None:
        series |= _system_series(system, zero, most_points // 2)
    return {name: value for name, value in series.items() if value not in ({}, [])}


def _steps(blocks: Sequence[StepBlock], offset: float, is_device: bool, together: int) -> Columns:
    pieces = (point for block in blocks if block.steps > 0 for point in _pieces(block, is_device))
    points = list(merge_steps(pieces, together)) if together > 1 else list(pieces)
    if not points:
        return {}
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
    wall = block.wall_seconds
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
    return math.isfinite(block.t + block.wall_seconds)


def _begin(block: StepBlock) -> float:
    spans = sum(finite(seconds) or 0.0 for seconds in block.spans.values())
    return block.t - block.wall_seconds - spans


def _stall(blocks: Sequence[StepBlock], offset: float, is_device: bool) -> Columns:
    """Waiting ÷ time in windows of equal length: by host, and by device if the run's stall is."""
    if not blocks:
        return {}
    begin, end = min(map(_begin, blocks)), max(block.t for block in blocks)
    windows = Windows.over(begin, end, most=_MOST_WINDOWS)
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
    ranks = []
    for rank in record.ranks.values():
        blocks = list(filter(_is_whole, rank.blocks))
        if any(block.fetches for block in blocks):
            ranks.append((rank.start.time - zero, blocks))
    if not ranks:
        return {}
    begin = min(offset + _begin(block) for offset, blocks in ranks for block in blocks)
    end = max(offset + block.t for offset, blocks in ranks for block in blocks)
    names = [
        name
        for name in ("rows", "samples", "real_tokens")
        if any(getattr(block, name) for _, blocks in ranks for block in blocks)
    ]
    totals: dict[str, list[float | None]] = {}
    for offset, blocks in ranks:
        windows = Windows.over(begin, end, most=_MOST_WINDOWS)
        for block in blocks:
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


def _slow(blocks: Sequence[StepBlock], offset: float) -> Columns:
    """Outliers among the fetches: of every stretch of the run, the longest."""
    outliers = []
    for block in blocks:
        for slow in block.slow if block.phase == "steady" else ():
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


def _waits(blocks: Sequence[StepBlock], is_device: bool) -> Columns:
    """How long fetches waited: share of the fetches, and of all waiting, by duration."""
    steady = Histogram()
    for block in blocks:
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


def _system_series(system: SystemRecord, zero: float, most: int) -> Columns:
    """Memory of the process tree, reads and swap, and GPUs; what was never sampled is left out."""
    offset = system.start.time - zero
    timed = [sample for sample in system.samples if finite(sample.t) is not None]
    sizes = {name: [getattr(sample, name) for sample in timed] for name in _MEMORY}
    sizes = {name: column for name, column in sizes.items() if any(column)}
    watched = [
        sizes[name] for name in ("working_set_bytes", "anon_bytes", "hwm_bytes") if name in sizes
    ]

    # Rates are between neighbouring samples.
    neighbours = zip(system.samples, system.samples[1:], strict=False)
    pairs = [(before, after) for before, after in neighbours if after.t > before.t]
    rates: dict[str, Column] = {}
    for name in _COUNTERS:
        column: list[float | None] = []
        for before, after in pairs:
            low, high = finite(getattr(before, name)), finite(getattr(after, name))
            if low is None or high is None:
                column.append(None)
            else:
                column.append(max(0.0, high - low) / (after.t - before.t))
        if any(value is not None for value in column):
            rates[f"{name}_per_second"] = column

    # Over all devices: the mean utilisation, and the memory of the fullest.
    devices = [sample for sample in system.samples if sample.gpus]
    utilization: list[float | None] = []
    for sample in devices:
        known = [share for gpu in sample.gpus if (share := finite(gpu.utilization)) is not None]
        utilization.append(sum(known) / len(known) if known else None)
    memory = [
        max((gpu.memory_bytes for gpu in sample.gpus if gpu.memory_bytes), default=None)
        for sample in devices
    ]
    gpus: dict[str, Column] = {"utilization": utilization, "memory_bytes": memory}
    return {
        "memory": _thin([offset + sample.t for sample in timed], sizes, most, watched),
        "disk": _thin([offset + after.t for _, after in pairs], rates, most),
        "gpus": _thin([offset + sample.t for sample in devices], gpus, most),
    }


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


def round_figures(values: Iterable[float | None], figures: int = _FIGURES) -> list[float | None]:
    """Numbers as they stand in a page; what is not finite is ``None``."""
    rounded = [None if finite(one) is None else float(f"{one:.{figures}g}") for one in values]
    return [
        int(one) if one is not None and one.is_integer() and abs(one) < 1e15 else one
        for one in rounded
    ]


def keep_extremes(columns: Sequence[Column], limit: int) -> list[int]:
    """Which rows to keep, about ``limit`` at most: the first, the last and every extreme.

    The rows are cut into stretches of equal length; of each stretch and column, the rows of the
    least and the largest value stay. A missing value is no extreme.
    """
    length = len(columns[0]) if columns else 0
    if length <= limit:
        return list(range(length))
    stretches = max(1, limit // (2 * len(columns)))
    kept = {0, length - 1}
    for number in range(stretches):
        begin, end = number * length // stretches, (number + 1) * length // stretches
        for column in columns:
            known = [row for row in range(begin, end) if finite(column[row]) is not None]
            if known:
                kept.add(min(known, key=column.__getitem__))  # type: ignore[arg-type]
                kept.add(max(known, key=column.__getitem__))  # type: ignore[arg-type]
    return sorted(kept)


@dataclass(slots=True)
class StepPoint:
    """Consecutive steps of one phase as a point of a chart."""

    t: float
    """When the last of them ended."""
    phase: str
    first_step: int
    steps: int
    wall_seconds: float
    """Summed."""
    wait_seconds: float
    low: float
    """The shortest step."""
    high: float
    high_step: int | None
    """Number of the longest step; ``None`` where single steps are not known."""


def merge_steps(points: Iterable[StepPoint], steps: int) -> Iterator[StepPoint]:
    """Join consecutive points until each holds so many steps; phases stay apart."""
    pending: StepPoint | None = None
    for point in points:
        if pending is not None and (pending.steps >= steps or pending.phase != point.phase):
            yield pending
            pending = None
        if pending is None:
            pending = point
            continue
        pending.t = point.t
        pending.steps += point.steps
        pending.wall_seconds += point.wall_seconds
        pending.wait_seconds += point.wait_seconds
        pending.low = min(pending.low, point.low)
        if point.high > pending.high:
            pending.high, pending.high_step = point.high, point.high_step
    if pending is not None:
        yield pending


@dataclass(slots=True)
class Windows:
    """Sums over stretches of equal time."""

    begin: float
    width: float
    count: int
    sums: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def over(cls, begin: float, end: float, most: int) -> Windows:
        """A window for about every second, and no more than so many."""
        length = max(end - begin, 1e-9)
        count = max(1, min(most, round(length)))
        return cls(begin=begin, width=length / count, count=count)

    @property
    def times(self) -> list[float]:
        """The middle of every window."""
        return [self.begin + (number + 0.5) * self.width for number in range(self.count)]

    def spread(self, begin: float, end: float, **amounts: float | None) -> None:
        """Share amounts out over the windows that a stretch of time touches."""
        first, last = self._place(begin), self._place(end)
        length = end - begin
        for number in range(first, last + 1):
            share = 1.0
            if last > first:
                left = self.begin + number * self.width
                inside = min(end, left + self.width) - max(begin, left)
                share = max(0.0, inside) / length
            for name, amount in amounts.items():
                known = finite(amount)
                if known is not None:
                    sums = self.sums.get(name) or self.sums.setdefault(name, [0.0] * self.count)
                    sums[number] += share * known

    def ratio(self, above: str, below: str) -> list[float | None]:
        """One sum over another, window by window; ``None`` where there is nothing below."""
        if above not in self.sums or below not in self.sums:
            return [None] * self.count
        return list(map(ratio, self.sums[above], self.sums[below]))

    def _place(self, t: float) -> int:
        return min(self.count - 1, max(0, int((t - self.begin) / self.width)))
