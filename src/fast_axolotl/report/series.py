"""Curves over time, from a record.

This is the data that a page embeds, draws and offers to download. Times are seconds since the
first line of any of the run's files.

There is one way of thinning. A curve is a ``Track``: values over stretches of time. Up to
``MOST_POINTS`` it stays as it is. A longer one is folded into windows of equal time: each window
has the mean, weighted by what the value is a mean of, and for columns in which single values matter
also the lowest and the highest. It is one pass in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fast_axolotl.record import RunRecord, RunSummary, StepBlock, SystemRecord
from fast_axolotl.record.arithmetic import finite, mean, ratio, times

MOST_POINTS = 1200
"""Points of a curve: about one for every pixel of a wide screen."""
_MOST_WINDOWS = 240
"""Of a share or a rate, which is more readable when it is calm."""
_FIGURES = 5
"""Significant figures of the numbers in a page: a pixel is a thousandth of a chart."""
_MEMORY = ("working_set_bytes", "anon_bytes", "hwm_bytes")
_COUNTERS = ("read_bytes", "read_chars", "swap_in_bytes", "swap_out_bytes")

Columns = dict[str, Any]


@dataclass(slots=True)
class Track:
    """Values over stretches of time, in their order."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """Of what each value is a mean: steps, or seconds."""
    columns: dict[str, list[float | None]] = field(default_factory=dict)

    def add(self, begin: float, end: float, weight: float = 1.0, **values: float | None) -> None:
        """Append one stretch; every call has the same names."""
        self.begins.append(begin)
        self.ends.append(end)
        self.weights.append(weight)
        for name, value in values.items():
            self.columns.setdefault(name, []).append(finite(value))

    def thin(
        self, most: int = MOST_POINTS, *, spread: Sequence[str] = (), is_folded: bool = False
    ) -> Columns:
        """As columns of at most so many points, without what was never measured."""
        columns = {
            name: column
            for name, column in self.columns.items()
            if any(value is not None for value in column)
        }
        if not columns:
            return {}
        if len(self.ends) <= most and not is_folded:
            thin: Columns = {"t": round_figures(self.ends, 7)}
            return thin | {name: round_figures(column) for name, column in columns.items()}
        begin = self.begins[0]
        width = max((self.ends[-1] - begin) / most, 1e-9)
        folded: Columns = {"t": round_figures((begin + (n + 0.5) * width for n in range(most)), 7)}
        for name in columns:
            means, lows, highs = self.fold(name, begin, width, most)
            folded[name] = round_figures(means)
            if name in spread:
                folded |= {f"{name}_low": round_figures(lows), f"{name}_high": round_figures(highs)}
        return folded

    def fold(
        self, name: str, begin: float, width: float, count: int
    ) -> tuple[list[float | None], list[float | None], list[float | None]]:
        """Mean, lowest and highest of a column in windows; ``None`` where there is no value."""
        sums, weights = [0.0] * count, [0.0] * count
        lows: list[float | None] = [None] * count
        highs: list[float | None] = [None] * count
        stretches = zip(self.begins, self.ends, self.weights, self.columns[name], strict=True)
        for start, end, weight, value in stretches:
            if value is None:
                continue
            first = min(count - 1, max(0, int((start - begin) / width)))
            last = min(count - 1, max(first, int((end - begin) / width)))
            for place in range(first, last + 1):
                share = 1.0
                if last > first:
                    left = begin + place * width
                    share = (min(end, left + width) - max(start, left)) / (end - start)
                    if share <= 0:
                        continue
                sums[place] += share * weight * value
                weights[place] += share * weight
                low, high = lows[place], highs[place]
                lows[place] = value if low is None else min(low, value)
                highs[place] = value if high is None else max(high, value)
        return list(map(ratio, sums, weights)), lows, highs


def read_series(record: RunRecord, summary: RunSummary) -> Columns:
    """Every curve of a run; what was not recorded is left out."""
    system = record.systems.get(summary.node, record.system)
    starts = [rank.start.time for rank in record.ranks.values()]
    zero = min([*starts, *([system.start.time] if system is not None else [])], default=0.0)
    series: Columns = {}
    if summary.deciding_rank is not None:
        series |= _rank_series(record, summary, zero)
        losses, before = Track(), 0
        for line in record.find_losses():
            losses.add(before, line.step, loss=line.values["loss"])
            before = line.step
        series["losses"] = losses.thin(spread=("loss",))
        series["throughput"] = _throughput(record, zero)
    if system is not None:
        series |= _system_series(system, system.start.time - zero)
    return {name: value for name, value in series.items() if value not in ({}, [])}


def _rank_series(record: RunRecord, summary: RunSummary, zero: float) -> Columns:
    """Steps and waits of the rank that decides."""
    assert summary.deciding_rank is not None
    rank, first = record.ranks[summary.deciding_rank], summary.first_steady_step
    # As in the figures, what comes before their first step is warm-up.
    blocks = [
        replace(block, phase="warmup")
        if block.phase == "steady" and (first is None or block.first_step < first)
        else block
        for block in rank.blocks
        if math.isfinite(block.t + block.wall_seconds)
    ]
    offset = rank.start.time - zero
    is_device = summary.stall_source == "device"
    steps, stall = Track(), Track()
    phases: list[dict[str, Any]] = []
    phase = "steady"
    for block in blocks:
        begin, end = offset + block.begin, offset + block.t
        if block.phase != "steady" and block.phase == phase:
            phases[-1]["end"] = round(end, 3)
        elif block.phase != "steady":
            phases.append({"name": block.phase, "begin": round(begin, 3), "end": round(end, 3)})
        phase = block.phase
        _add_steps(steps, block, end, is_device)
        waits = {"host": ratio(finite(block.host_wait_seconds), block.wall_seconds)}
        if is_device:
            waits["device"] = ratio(block.device_wait_seconds, block.wall_seconds)
        stall.add(begin, end, block.wall_seconds, **waits)
    return {
        "rank": summary.deciding_rank,
        "steps": steps.thin(spread=("mean",)),
        "stall": stall.thin(_MOST_WINDOWS),
        "phases": phases,
    }


def _add_steps(steps: Track, block: StepBlock, end: float, is_device: bool) -> None:
    """The single steps of a block where they are known, else their mean."""
    if block.steps <= 0:
        return
    wall = block.wall_seconds
    device = finite(block.device_wait_seconds) if is_device else None
    wait = (finite(block.host_wait_seconds) or 0.0) if device is None else device
    walls = block.walls
    if not walls or len(walls) != block.steps or any(finite(one) is None for one in walls):
        mean = wall / block.steps
        steps.add(end - wall, end, block.steps, mean=mean, wait=wait / block.steps)
        return
    waits = block.devices if is_device and block.devices else block.hosts
    t = end - sum(walls)
    for number, one in enumerate(walls):
        own = finite(waits[number]) if waits and len(waits) == len(walls) else None
        own = wait * one / (wall or 1.0) if own is None else own
        steps.add(t, t + one, mean=one, wait=own)
        t += one


def _throughput(record: RunRecord, zero: float) -> Columns:
    """Rows (or samples) and tokens per second, of all ranks that fetch."""
    ranks = [rank for rank in record.ranks.values() if any(one.fetches for one in rank.blocks)]
    blocks = [
        (rank.start.time - zero, block)
        for rank in ranks
        for block in rank.blocks
        if math.isfinite(block.t + block.wall_seconds)
    ]
    track = Track()
    for offset, block in sorted(blocks, key=lambda one: one[0] + one[1].t):
        # The mean of what goes on side by side, times the number of ranks, is their sum.
        wall, amounts = block.wall_seconds, (block.rows, block.samples, block.real_tokens)
        rows, samples, tokens = (times(ratio(one, wall), len(ranks)) for one in amounts)
        begin, end = offset + block.begin, offset + block.t
        track.add(begin, end, wall, rows=rows, samples=samples, tokens=tokens)
    if not track.ends:
        return {}
    num_seconds = round(track.ends[-1] - track.begins[0])
    columns = track.thin(max(1, min(_MOST_WINDOWS, num_seconds)), is_folded=True)
    if "rows" in columns:
        columns.pop("samples", None)
    return columns


def _system_series(system: SystemRecord, offset: float) -> Columns:
    """Memory of the process tree, reads and swap, and GPUs; what was never sampled is left out."""
    memory, disk, gpu = Track(), Track(), Track()
    samples = [sample for sample in system.samples if finite(sample.t) is not None]
    for before, sample in zip([None, *samples], samples, strict=False):
        end = offset + sample.t
        begin = end if before is None else offset + before.t
        memory.add(begin, end, **{name: getattr(sample, name) for name in _MEMORY})
        if sample.gpus:
            # Over all devices: the mean utilisation, and the memory of the fullest.
            busy = mean(one.utilization for one in sample.gpus)
            used = max(one.memory_bytes or 0 for one in sample.gpus)
            gpu.add(begin, end, utilization=busy, memory_bytes=used or None)
        if before is None or end <= begin:
            continue
        pairs = {name: (getattr(before, name), getattr(sample, name)) for name in _COUNTERS}
        grown = {
            name: max(0.0, high - low) / (end - begin) if None not in (low, high) else None
            for name, (low, high) in pairs.items()
        }
        disk.add(begin, end, end - begin, **grown)
    return {
        "memory": memory.thin(spread=("working_set_bytes",)),
        "disk": disk.thin(),
        "gpu": gpu.thin(),
    }


def round_figures(values: Iterable[float | None], figures: int = _FIGURES) -> list[float | None]:
    """Numbers as they stand in a page; what is not finite is ``None``."""
    rounded = (None if finite(one) is None else float(f"{one:.{figures}g}") for one in values)
    return [one if one is None or one % 1 or abs(one) >= 1e15 else int(one) for one in rounded]
