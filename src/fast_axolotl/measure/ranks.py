"""One rank's lines folded into totals, and several ranks held against each other.

The steady phase is what counts: warm-up is left out, the replay of a cached batch is kept apart.
Everything is a sum first and a ratio last, so a block may hold one step or a thousand. The cost is
one pass over the lines.

Ranks wait for each other in every collective, so each step is as late as the rank that waits
longest in it; see ``job_stall``. The rank that causes most of that decides about the data. With a
dispatcher it is rank 0, which reads for all, and whose waits look like communication on the others.
A rank that recorded too little to be judged decides nothing, where another has recorded more.

Where the ready queue ran dry in the steady phase (see ``ready_queue``), the steps before that are
warm-up: a queue that was full hid what the loader lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.measure.ready_queue import Drain, find_drain
from fast_axolotl.record import Histogram, RankRecord, RankSummary, StepBlock
from fast_axolotl.record.arithmetic import finite, middle, ratio, total
from fast_axolotl.record.job_stall import (
    LEAST_PRESENCE,
    find_common_steps,
    fold_waits,
    wall_between,
)
from fast_axolotl.record.stall import StallSource, WaitTotals
from fast_axolotl.record.thresholds import is_long_enough

__all__ = [
    "Communication",
    "JobStall",
    "PhaseTotals",
    "RankFigures",
    "compare_communication",
    "fold_job",
    "fold_rank",
    "summarise_rank",
]

_COUNTS = (
    "samples",
    "rows",
    "real_tokens",
    "trainable_tokens",
    "padded_tokens",
    "num_bytes",
    "sequence_tokens",
    "sequence_squares",
    "produced",
    "producing_seconds",
)
_SAMPLED = ("sequence_tokens", "sequence_squares", "produced", "producing_seconds")
"""What is looked at now and then only, so that it is never whole."""


@dataclass(slots=True)
class PhaseTotals(WaitTotals):
    """Sums over the blocks of one phase: waits, and what the batches held."""

    counts: dict[str, Any] = field(default_factory=dict)
    """Samples, rows, tokens and bytes of the blocks that counted them; and seconds."""
    uncounted: set[str] = field(default_factory=set)
    """What at least one block with fetches did not count."""

    def add_block(self, block: StepBlock) -> None:
        """Add one block."""
        WaitTotals.add_block(self, block)
        for name in _COUNTS:
            value = getattr(block, name)
            if finite(value) is not None:
                self.counts[name] = self.counts.get(name, 0) + value
            elif block.fetches:
                self.uncounted.add(name)

    def count(self, name: str) -> Any:
        """How much of something there was; ``None`` where a part was not counted."""
        is_partial = name in self.uncounted and name not in _SAMPLED
        return None if is_partial else self.counts.get(name)


@dataclass(slots=True)
class RankFigures:
    """What one rank's lines come to."""

    record: RankRecord
    settings: dict[str, Any]
    steady_blocks: Sequence[StepBlock]
    """Those the figures are made of."""
    drain: Drain | None
    """What became of the ready queue, if it drained."""
    warmup: PhaseTotals = field(default_factory=PhaseTotals)
    steady: PhaseTotals = field(default_factory=PhaseTotals)
    replay: PhaseTotals = field(default_factory=PhaseTotals)
    host_waits: Histogram = field(default_factory=Histogram)
    device_waits: Histogram = field(default_factory=Histogram)
    step_times: Histogram = field(default_factory=Histogram)
    spans: dict[str, float] = field(default_factory=dict)
    steady_from: float | None = None
    """Seconds since 1970."""
    steady_to: float | None = None

    @property
    def rank(self) -> int:
        """Its number."""
        return self.record.start.rank

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

    def rate(self, name: str) -> float | None:
        """How much of something there was per second."""
        return ratio(self.steady.count(name), self.steady.wall_seconds)


def fold_rank(record: RankRecord) -> RankFigures:
    """Add up the lines of one rank."""
    settings = record.values
    steady = [block for block in record.blocks if block.phase == "steady"]
    drain = find_drain(steady, settings)
    # What a full queue hid is warm-up.
    first = drain.first_block if drain is not None and drain.is_over else 0
    hidden, steady = steady[:first], steady[first:]
    folded = RankFigures(record, settings, steady, drain)
    for block in record.blocks:
        if block.phase == "warmup":
            folded.warmup.add_block(block)
        elif block.phase == "replay":
            folded.replay.add_block(block)
        for name, seconds in block.spans.items():
            folded.spans[name] = folded.spans.get(name, 0.0) + (finite(seconds) or 0.0)
    for block in hidden:
        folded.warmup.add_block(block)
    for block in steady:
        folded.steady.add_block(block)
        folded.host_waits.merge(block.host_waits)
        folded.device_waits.merge(block.device_waits or {})
        folded.step_times.merge(block.step_times)
    if steady:
        took = (finite(steady[0].wall_seconds) or 0.0) + (total(steady[0].spans.values()) or 0.0)
        folded.steady_from = finite(record.start.time + steady[0].t - took)
        folded.steady_to = finite(record.start.time + steady[-1].t)
    return folded


def summarise_rank(rank: RankFigures, gpu_clock_mhz: float | None = None) -> RankSummary:
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
        gpu_clock_mhz=gpu_clock_mhz,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStall:
    """What all ranks lose together to waiting for data."""

    source: StallSource = ""
    host_stall_fraction: float | None = None
    device_stall_fraction: float | None = None
    error: float | None = None
    """How far the stall can be off; ``None`` where it is exact."""
    unknown: float = 0.0
    """By how much it can be higher, because the waits of single steps are not known."""
    alone: Mapping[int, float] = field(default_factory=dict)
    """Share of the time in which only this rank waited."""

    @property
    def stall_fraction(self) -> float | None:
        """The device's where it is known, else the host's."""
        is_device = self.source == "device"
        return self.device_stall_fraction if is_device else self.host_stall_fraction


def fold_job(ranks: Sequence[RankFigures]) -> tuple[RankFigures | None, JobStall]:
    """The rank that decides about the data, and what the job loses.

    It causes most of the waiting, of those that recorded enough to be judged; or it reads for all.
    The waits of one rank alone, or of the one that reads for all, are the job's.
    """
    readers = [rank for rank in ranks if rank.rank == 0]
    is_dispatched = readers and any(rank.settings.get("dispatcher") for rank in ranks)
    steady = [rank for rank in ranks if rank.steady.steps and rank.steady.wall_seconds > 0]
    most = max((rank.steady.steps for rank in steady), default=0)
    steps = find_common_steps([rank.steady_blocks for rank in steady])
    if is_dispatched or len(steady) < 2 or not steps:
        candidates = readers if is_dispatched else steady or list(ranks)
        chosen = max(candidates, key=_own_waiting, default=None)
        own = chosen.steady if chosen else WaitTotals()
        return chosen, JobStall(
            source=own.source,
            host_stall_fraction=own.host_stall_fraction,
            device_stall_fraction=own.device_stall_fraction,
        )
    blocks = [rank.steady_blocks for rank in steady]
    is_device = all(rank.steady.source == "device" for rank in steady if rank.steady.fetches)
    waits = fold_waits(blocks, steps, "device" if is_device else "host")
    # Once steps are condensed, their waits are those of the device alone.
    has_hosts = all(block.hosts is not None for own in blocks for block in own)
    host = fold_waits(blocks, steps, "host") if is_device and has_hosts else None
    caused = {rank.rank: seconds for rank, seconds in zip(steady, waits.caused, strict=True)}
    whole = [rank for rank in steady if rank.steady.steps >= LEAST_PRESENCE * most]
    chosen = max(
        [rank for rank in whole if rank.is_long_enough] or whole,
        key=lambda rank: (caused[rank.rank], *_own_waiting(rank)),
    )
    wall = wall_between(chosen.steady_blocks, steps)
    timed = chosen.steady.device_wall_seconds if is_device else chosen.steady.wall_seconds
    known = wall * timed / chosen.steady.wall_seconds

    def share(seconds: float) -> float:
        return min(1.0, ratio(seconds, known) or 0.0)

    stall = share(waits.seconds)
    host_stall = stall
    if is_device:
        # At least what one rank waits.
        own_shares = (rank.steady.host_stall_fraction or 0.0 for rank in steady)
        host_stall = min(1.0, ratio(host.seconds, wall) or 0.0) if host else max(own_shares)
    return chosen, JobStall(
        source="device" if is_device else "host",
        host_stall_fraction=host_stall,
        device_stall_fraction=stall if is_device else None,
        error=min(share(waits.error_seconds), 1.0 - stall) or None,
        unknown=min(share(waits.unknown_seconds), 1.0 - stall),
        alone={
            rank.rank: share(seconds) for rank, seconds in zip(steady, waits.alone, strict=True)
        },
    )


def _own_waiting(rank: RankFigures) -> tuple[bool, float, int, int]:
    stall = rank.steady.stall_fraction
    return rank.is_long_enough, -1.0 if stall is None else stall, rank.steady.steps, -rank.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What the profiler windows of the ranks say together."""

    device_idle_fraction: float | None = None
    exposed_communication_fraction: float | None = None
    """Of the rank that shows most of it."""
    pure_communication_fraction: float | None = None
    """Every collective at its least duration across ranks: what is over is waiting for a rank."""
    skew_share: float | None = None
    """Share of the longest rank's communication that is waiting for a slower rank."""
    skew_fraction: float | None = None
    """The same as a share of the window."""
    slow_rank: int | None = None
    """The rank the others wait for: it spends least time in collectives."""
    reasons: Mapping[str, str] = field(default_factory=dict)


def compare_communication(
    ranks: Sequence[RankFigures], chosen: RankFigures | None
) -> Communication:
    """Compare the last profiler windows of the ranks, collective by collective."""
    windows = {rank.rank: rank.record.windows[-1] for rank in ranks if rank.record.windows}
    if not windows:
        return Communication()
    own = windows.get(chosen.rank) if chosen is not None else None
    own = own or next(iter(windows.values()))
    exposed = [
        ratio(window.exposed_communication_seconds, window.wall_seconds)
        for window in windows.values()
    ]
    shown = [value for value in exposed if value is not None]
    lists = [window.collectives for window in windows.values()]
    counts = {len(collectives) for collectives in lists}
    pure, reason = None, ""
    if len(ranks) < 2:
        reason = "there is one rank: communication takes two"
    elif len(lists) < len(ranks):
        reason = f"{len(lists)} of {len(ranks)} ranks recorded a profiler window"
    elif len(counts) > 1:
        reason = (
            f"the ranks' windows hold between {min(counts)} and {max(counts)} collectives, "
            "which cannot be compared one by one"
        )
    elif counts == {0}:
        reason = "the profiler window saw no collective"
    else:
        pure = total(min(same) for same in zip(*lists, strict=True))
    sums = {rank: total(window.collectives) or 0.0 for rank, window in windows.items()}
    longest = max(sums.values())
    wall = middle(window.wall_seconds for window in windows.values())
    skew = None if pure is None else ratio(longest - pure, longest)
    return Communication(
        device_idle_fraction=ratio(own.device_idle_seconds, own.wall_seconds),
        exposed_communication_fraction=max(shown) if shown else None,
        pure_communication_fraction=ratio(pure, wall),
        skew_share=skew,
        skew_fraction=None if pure is None else ratio(longest - pure, wall),
        slow_rank=None if skew is None else min(sums, key=lambda rank: (sums[rank], rank)),
        reasons={
            "device_idle_fraction": own.reasons.get(
                "device_idle_seconds", "the profiler window saw no device"
            ),
            "exposed_communication_fraction": own.reasons.get(
                "exposed_communication_seconds", "the profiler window saw no collective"
            ),
            "pure_communication_fraction": reason,
        },
    )
