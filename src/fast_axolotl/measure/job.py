"""Several ranks held against each other: what the job loses, and to whom.

*Stall.* Ranks wait for each other in every collective, so each step is as late as the rank that
waits longest in it; see ``stall``. The rank that causes most of that decides about the data. With a
dispatcher it is rank 0, which reads for all, and whose waits look like communication on the others.
A rank that recorded too little to be judged decides nothing, where another has recorded more.

*Stragglers.* Two things show the rank that the others wait for without a profiler. Data: in the
steps in which it waits, the others do not. Compute: its forward pass takes longer. The forward pass
is compared because no collective of data parallelism runs in it; the rest of a step is as long on
every rank, since they wait for each other. A longer forward pass is explained by more tokens, else
it is compute. Where weights are gathered in the forward pass (FSDP,
ZeRO-3), only a profiler window tells: the slow rank is the one that spends least time in
collectives.

*Replicas.* Ranks of one tensor, context or pipeline parallel group are fed the same batches, and
what they count is not added up twice. The sizes of these groups stand in the settings. Fingerprints
of a few batches go before them: ranks that all saw other batches count other tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.measure.ready_queue import number_of
from fast_axolotl.record import thresholds
from fast_axolotl.record.arithmetic import finite, middle, ratio, total
from fast_axolotl.record.waits import (
    LEAST_PRESENCE,
    StallSource,
    WaitTotals,
    find_common_steps,
    fold_waits,
    wall_between,
)

LEAST_SHARE = 0.5
"""Of the stall, that one rank causes alone. Ours: the larger part of it."""
LEAST_FRACTION = 0.01
"""Of the time, that the others lose to a rank. Ours: less is noise."""
LONGER_FORWARD = 0.10
"""By which a forward pass is longer than the median of the other ranks'. Ours: equal GPUs differ by
a few percent."""
MORE_TOKENS = 0.05
_STANDARD_ERRORS = 3.0
_LEAST_BLOCKS = 3
_SIZES = {
    "tensor_parallel": ("tensor_parallel_size",),
    "context_parallel": ("context_parallel_size", "sequence_parallel_degree"),
    "pipeline_parallel": ("pipeline_parallel_size",),
}
"""Setting → names of the same in a framework's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStall:
    """What all ranks lose together to waiting for data."""

    source: StallSource = ""
    host_stall_fraction: float | None = None
    device_stall_fraction: float | None = None
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
    wall = max(0.0, wall_between(chosen.steady_blocks, steps) - others_span_seconds(chosen, whole))
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
    """What the profiler windows of the ranks say together: sums over all of them."""

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
    """Compare profiler windows that began at the same step on all ranks, each collective."""
    seen = [rank for rank in ranks if rank.windows]
    if not seen:
        return Communication()
    own = chosen if chosen is not None and chosen.windows else seen[0]
    exposed = [rank.profiled_share("exposed_communication_seconds") for rank in seen]
    by_step = [{window.first_step: window for window in rank.windows} for rank in seen]
    shared = [
        [windows[step] for windows in by_step]
        for step in by_step[0]
        if all(step in windows for windows in by_step)
    ]
    alike = [
        same
        for same in shared
        if same[0].collectives
        and len({(one.num_collectives, len(one.collectives)) for one in same}) == 1
    ]
    pure, reason = None, ""
    if len(ranks) < 2:
        reason = "there is only one rank, so there is no communication"
    elif len(seen) < len(ranks):
        reason = f"only {len(seen)} of {len(ranks)} ranks recorded a profiler window"
    elif not any(one.collectives for rank in seen for one in rank.windows):
        reason = "the profiler window contains no collective"
    elif alike:
        lists = ([window.collectives for window in same] for same in alike)
        pure = total(min(times) for same in lists for times in zip(*same, strict=True))
    else:
        reason = (
            "no profiler window holds the same collectives on all ranks, so they cannot be "
            "compared one by one"
        )
    by_rank = list(zip(*alike, strict=True))
    sums = [sum(total(one.collectives) or 0.0 for one in windows) for windows in by_rank]
    longest = max(sums, default=0.0)
    wall = middle(total(one.wall_seconds for one in windows) for windows in by_rank)
    skew = None if pure is None else ratio(longest - pure, longest)
    why = own.windows[-1].reasons
    no_collective = "the profiler window contains no collective"
    return Communication(
        device_idle_fraction=own.profiled_share("device_idle_seconds"),
        exposed_communication_fraction=max(filter(None, exposed), default=exposed[0]),
        pure_communication_fraction=ratio(pure, wall),
        skew_share=skew,
        skew_fraction=None if pure is None else ratio(longest - pure, wall),
        slow_rank=None if skew is None else seen[sums.index(min(sums))].rank,
        reasons={
            "device_idle_fraction": why.get(
                "device_idle_seconds", "the profiler window has no GPU work"
            ),
            "exposed_communication_fraction": why.get(
                "exposed_communication_seconds", no_collective
            ),
            "pure_communication_fraction": reason,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that the others wait for; or why none is known."""

    rank: int | None = None
    part: str = ""
    """data, compute or tokens."""
    fraction: float | None = None
    """Share of the time that the others lose to it."""
    reason: str = ""


def find_straggler(ranks: Sequence[RankFigures], job: JobStall, seen: Communication) -> Straggler:
    """The rank that costs the others most."""
    steady = [rank for rank in ranks if rank.steady.steps]
    if len(steady) < 2:
        return Straggler(
            reason="only one rank has steady steps, so no rank can be slower than the others"
        )
    found = []
    late = max(job.alone, key=lambda rank: job.alone[rank], default=None)
    if late is not None and job.alone[late] >= LEAST_SHARE * (job.stall_fraction or 0.0):
        found.append(Straggler(rank=late, part="data", fraction=job.alone[late]))
    slow, reason = _find_slow_forward(steady)
    if slow is None and seen.slow_rank is not None:
        # A window compares the ranks' collectives, wherever they run.
        if (seen.skew_share or 0.0) >= thresholds.LEAST_SKEW_SHARE:
            slow = Straggler(rank=seen.slow_rank, part="compute", fraction=seen.skew_fraction)
        reason = ""
    if slow is not None:
        found.append(slow)
    worst = max(found, key=lambda one: one.fraction or 0.0, default=Straggler())
    if (worst.fraction or 0.0) >= LEAST_FRACTION:
        return worst
    return Straggler(reason=reason) if reason else Straggler(fraction=0.0)


def _find_slow_forward(ranks: Sequence[RankFigures]) -> tuple[Straggler | None, str]:
    """The rank whose forward pass takes longer than those of the others; or why nobody knows."""
    if any(
        rank.settings.get("fsdp") or rank.settings.get("deepspeed_stage") == 3 for rank in ranks
    ):
        return None, (
            "weights are gathered in the forward pass (FSDP, ZeRO-3), so a slow rank shows only "
            "in a profiler window; use fast-axolotl measure --profile-steps 5"
        )
    passes = {rank.rank: _forward_of(rank) for rank in ranks}
    times = {number: found for number, found in passes.items() if found is not None}
    if len(times) < len(ranks):
        return None, "the forward pass was not timed on every rank"
    slow = max(ranks, key=lambda rank: times[rank.rank][0])
    others = [rank for rank in ranks if rank is not slow]
    seconds, error = times[slow.rank]
    usual = statistics.median(times[rank.rank][0] for rank in others)
    noise = math.hypot(error, statistics.median(times[rank.rank][1] for rank in others))
    longer = ratio(seconds, usual)
    if longer is None or longer <= 1.0 + LONGER_FORWARD or seconds - usual < noise:
        return None, ""
    part = "compute"
    sizes = {rank.rank: _tokens_per_step(rank) for rank in ranks}
    known = [size for rank in others if (size := sizes[rank.rank]) is not None]
    more = ratio(sizes[slow.rank], statistics.median(known) if known else None)
    if more is not None and more > 1.0 + MORE_TOKENS and longer / more <= 1.0 + LONGER_FORWARD:
        part = "tokens"
    lost = (seconds - usual) * slow.steady.steps
    return Straggler(rank=slow.rank, part=part, fraction=ratio(lost, slow.steady.wall_seconds)), ""


def _forward_of(rank: RankFigures) -> tuple[float, float] | None:
    """Seconds per step, and three times the standard error over blocks."""
    means = [
        seconds / block.steps
        for block in rank.steady_blocks
        if (seconds := finite(block.forward_seconds)) is not None and block.steps
    ]
    per_step = rank.forward_seconds_per_step
    if per_step is None or len(means) < _LEAST_BLOCKS:
        return None
    return per_step, _STANDARD_ERRORS * statistics.stdev(means) / math.sqrt(len(means))


def _tokens_per_step(rank: RankFigures) -> float | None:
    """Positions that the model computes, padding included where that is known."""
    tokens = rank.steady.count("padded_tokens")
    return ratio(rank.steady.count("real_tokens") if tokens is None else tokens, rank.steady.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How a job's ranks share the batches."""

    copies: int = 1
    """Ranks that count the same tokens."""
    data_parallel_size: int | None = None
    """Groups that see other batches; ``None``: not known."""
    note: str = ""
    """What to know about sums over ranks."""


def others_span_seconds(rank: RankFigures, ranks: Sequence[RankFigures]) -> float:
    """Time in a rank's steady steps in which another one did what is no training.

    Ranks go in step, so what one brackets alone, a checkpoint say, lies in the others' steps.
    """
    longest = max((other.steady_span_seconds for other in ranks), default=0.0)
    return max(0.0, longest - rank.steady_span_seconds)


def find_replicas(ranks: Sequence[RankFigures], world_size: int) -> Replicas:
    """By the settings, else by the batches."""
    if world_size < 2:
        return Replicas(data_parallel_size=world_size or None)
    sizes = [_read_sizes(rank.settings) for rank in ranks]
    known = {name: size for found in sizes for name, size in found.items()}
    copies = math.prod(known.values())
    if any(rank.settings.get("dispatcher") for rank in ranks):
        # Rank 0 counts all of it, once.
        return Replicas(data_parallel_size=max(1, world_size // copies) if known else None)
    if len(ranks) == world_size and _all_differ(ranks):
        return Replicas(data_parallel_size=world_size)
    if known and world_size % copies == 0:
        return Replicas(copies=copies, data_parallel_size=world_size // copies)
    return Replicas(
        note=f"tokens, samples and rows are summed over {world_size} ranks: it is not known "
        "whether ranks of a tensor or context parallel group received the same batches; pass the "
        "sizes with meter.settings(tensor_parallel=…, context_parallel=…)"
    )


def _read_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    config = settings.get("config")
    found = {}
    for name, others in _SIZES.items():
        sizes = [number_of(settings, name)]
        if isinstance(config, Mapping):
            sizes += [number_of(config, other) for other in others]
        told = [round(size) for size in sizes if size is not None and size >= 1]
        if told:
            found[name] = max(told)
    return found


def _all_differ(ranks: Sequence[RankFigures]) -> bool:
    """Whether every rank saw other batches, by their fingerprints. Equal ones prove nothing: a
    made-up dataset may repeat one row."""
    prints = [
        {mark.fetch: mark.text for mark in rank.record.marks if mark.name == "batch" and mark.text}
        for rank in ranks
    ]
    common = sorted(set(prints[0]).intersection(*prints[1:]), key=str)
    seen = {tuple(found[fetch] for fetch in common) for found in prints}
    return len(common) > 1 and len(seen) == len(ranks)
