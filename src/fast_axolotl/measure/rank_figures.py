"""One rank's lines folded into totals.

The steady phase is what counts: warm-up is left out.
Everything is a sum first and a ratio last, so a block may hold one step or a thousand. The cost is
one pass over the lines.

Where the ready queue ran dry in the steady phase (see ``ready_queue``), the steps before that are
warm-up: a queue that was full hid what the loader lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.measure.ready_queue import Drain, find_drain, number_of
from fast_axolotl.record import Histogram, ProfileWindow, RankRecord, RankSummary, StepBlock
from fast_axolotl.record.arithmetic import finite, ratio, total
from fast_axolotl.record.thresholds import is_long_enough
from fast_axolotl.record.waits import LEAST_PRESENCE, WaitTotals


@dataclass(slots=True)
class RankFigures:
    """What one rank's lines come to."""

    record: RankRecord
    settings: dict[str, Any]
    steady_blocks: Sequence[StepBlock]
    """Those the figures are made of."""
    drain: Drain | None
    """What became of the ready queue, if it drained."""
    warmup: WaitTotals = field(default_factory=WaitTotals)
    steady: WaitTotals = field(default_factory=WaitTotals)
    host_waits: Histogram = field(default_factory=Histogram)
    device_waits: Histogram = field(default_factory=Histogram)
    step_times: Histogram = field(default_factory=Histogram)
    spans: dict[str, float] = field(default_factory=dict)
    steady_span_seconds: float = 0.0
    """What is taken out of its steady steps: evaluation, checkpoints, logging."""
    steady_from: float | None = None
    """Seconds since 1970."""
    steady_to: float | None = None

    @property
    def rank(self) -> int:
        """Its number."""
        return self.record.start.rank

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return round(number_of(self.settings, "gradient_accumulation") or 1)

    @property
    def waits(self) -> Histogram:
        """The waits of single fetches that the stall is made of."""
        return self.device_waits if self.steady.source == "device" else self.host_waits

    @property
    def own_seconds(self) -> float | None:
        """Steady time less the waits for data."""
        stall = self.steady.stall_fraction
        return None if stall is None else self.steady.wall_seconds * (1.0 - stall)

    @property
    def forward_seconds_per_step(self) -> float | None:
        """Time of the forward passes, where nearly all were timed."""
        timed = [block for block in self.steady_blocks if finite(block.forward_seconds) is not None]
        steps = sum(block.steps for block in timed)
        if steps < LEAST_PRESENCE * self.steady.steps:
            return None
        return ratio(total(block.forward_seconds for block in timed), steps)

    @property
    def is_long_enough(self) -> bool:
        """Whether its steady phase can be judged."""
        return is_long_enough(self.steady.fetches, self.steady.wall_seconds)

    @property
    def windows(self) -> Sequence[ProfileWindow]:
        """The profiler's windows of its steady phase; where none is, its last one."""
        own, begin = self.record.windows, self.record.start.time
        since = float("inf") if self.steady_from is None else self.steady_from
        return [window for window in own if begin + window.t > since] or own[-1:]

    def profiled_share(self, name: str) -> float | None:
        """What a field of the windows comes to, of the time of those that have it."""
        seen = [one for one in self.windows if finite(getattr(one, name)) is not None]
        wall = total(one.wall_seconds for one in seen)
        return ratio(total(getattr(one, name) for one in seen), wall)

    def rate(self, name: str) -> float | None:
        """How much of something there was per second."""
        return ratio(self.steady.count(name), self.steady.wall_seconds)


def fold_rank(record: RankRecord) -> RankFigures:
    """Add up the lines of one rank."""
    settings = record.values
    steady = [block for block in record.blocks if block.phase == "steady"]
    # Before a later warm-up, fetches were taken for steps: nobody had told one yet.
    warm = max((one.first_step for one in record.blocks if one.phase == "warmup"), default=0)
    hidden = [block for block in steady if block.first_step < warm]
    steady = steady[len(hidden) :]
    drain = find_drain(steady, settings)
    # What a full queue hid is warm-up.
    first = drain.first_block if drain is not None and drain.is_over else 0
    hidden, steady = hidden + steady[:first], steady[first:]
    folded = RankFigures(record, settings, steady, drain)
    for block in record.blocks:
        if block.phase == "warmup":
            folded.warmup.add_block(block)
        for name, seconds in block.spans.items():
            folded.spans[name] = folded.spans.get(name, 0.0) + (finite(seconds) or 0.0)
    for block in hidden:
        folded.warmup.add_block(block)
    for block in steady:
        folded.steady.add_block(block)
        folded.host_waits.merge(block.host_waits)
        folded.device_waits.merge(block.device_waits or {})
        folded.step_times.merge(block.step_times)
        folded.steady_span_seconds += total(block.spans.values()) or 0.0
    per_step = round(ratio(folded.steady.fetches, folded.steady.steps) or 1)
    if per_step > 1:
        # Where the trainer did not say it, it is what was counted.
        settings.setdefault("gradient_accumulation", per_step)
    if steady:
        took = (finite(steady[0].wall_seconds) or 0.0) + (total(steady[0].spans.values()) or 0.0)
        folded.steady_from = finite(record.start.time + steady[0].t - took)
        folded.steady_to = finite(record.start.time + steady[-1].t)
    return folded


def summarise_rank(rank: RankFigures) -> RankSummary:
    """The line of one rank in the table of ranks."""
    end = rank.record.end
    return RankSummary(
        rank=rank.rank,
        steps=rank.steady.steps,
        fetches=rank.steady.fetches,
        stall_fraction=rank.steady.stall_fraction,
        host_stall_fraction=rank.steady.host_stall_fraction,
        step_p50_seconds=rank.step_times.quantile(0.5),
        tokens_per_second=rank.rate("real_tokens"),
        samples_per_second=rank.rate("samples"),
        is_finished=end is not None and end.reason == "finished",
        node=rank.record.start.host,
        forward_seconds_per_step=rank.forward_seconds_per_step,
    )
