"""The rank that the others wait for, and what it is late with.

Two things show it without a profiler. *Data*: in the steps in which it waits, the others do not.
*Compute*: its forward pass takes longer. The forward pass is compared because no collective of data
parallelism runs in it; the rest of a step is as long on every rank, since they wait for each other.
A longer forward pass is explained by more *tokens*, else by a lower *device clock*, else it is
*compute*. Where weights are gathered in the forward pass (FSDP, ZeRO-3), only a profiler window
tells: the slow rank is the one that spends least time in collectives.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fast_axolotl.measure.ranks import Communication, JobStall, RankFigures
from fast_axolotl.record import SystemRecord, thresholds
from fast_axolotl.record.arithmetic import finite, ratio, total

__all__ = ["Straggler", "find_straggler", "mean_clocks"]

LEAST_SHARE = 0.5
"""Of the stall, that one rank causes alone. Ours: the larger part of it."""
LEAST_FRACTION = 0.01
"""Of the time, that the others lose to a rank. Ours: less is noise."""
LONGER_FORWARD = 0.10
"""By which a forward pass is longer than the median of the other ranks'. Ours: equal GPUs differ by
a few percent."""
MORE_TOKENS = 0.05
LOWER_CLOCK = 0.05
_MOST_SAMPLES = 1000
_STANDARD_ERRORS = 3.0
_LEAST_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that the others wait for; or why none is known."""

    rank: int | None = None
    part: str = ""
    """data, compute, tokens, device clock."""
    fraction: float | None = None
    """Share of the time that the others lose to it."""
    reason: str = ""


def find_straggler(
    ranks: Sequence[RankFigures],
    job: JobStall,
    seen: Communication,
    clocks: Mapping[int, float],
) -> Straggler:
    """The rank that costs the others most."""
    steady = [rank for rank in ranks if rank.steady.steps]
    if len(steady) < 2:
        return Straggler(reason="there is one rank with steady steps: stragglers take two")
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
        others = [clocks[rank.rank] for rank in steady if rank.rank in clocks]
        clock = clocks.get(slow.rank) if slow.rank is not None else None
        is_low = clock is not None and clock < (1.0 - LOWER_CLOCK) * statistics.median(others)
        if slow.part == "compute" and is_low:
            slow = Straggler(rank=slow.rank, part="device clock", fraction=slow.fraction)
        found.append(slow)
    worst = max(found, key=lambda one: one.fraction or 0.0, default=Straggler())
    if (worst.fraction or 0.0) >= LEAST_FRACTION:
        return worst
    return Straggler(reason=reason) if reason else Straggler(fraction=0.0)


def mean_clocks(ranks: Sequence[RankFigures], systems: Sequence[SystemRecord]) -> dict[int, float]:
    """MHz of each rank's GPU in its steady phase, where it is known which one that is."""
    clocks = {}
    for rank in ranks:
        uuid, since, until = rank.settings.get("device_uuid"), rank.steady_from, rank.steady_to
        for system in systems:
            if not uuid or uuid not in system.start.gpu_uuids or since is None or until is None:
                continue
            index, begin = system.start.gpu_uuids.index(uuid), system.start.time
            samples = [one for one in system.samples if since <= begin + one.t <= until]
            known = [
                gpu.clock_mhz
                for sample in samples[:: len(samples) // _MOST_SAMPLES + 1]
                for gpu in sample.gpus
                if gpu.index == index
            ]
            mean = ratio(total(known), len(known) - known.count(None))
            if mean is not None:
                clocks[rank.rank] = mean
    return clocks


def _find_slow_forward(ranks: Sequence[RankFigures]) -> tuple[Straggler | None, str]:
    """The rank whose forward pass takes longer than those of the others; or why nobody knows."""
    if any(
        rank.settings.get("fsdp") or rank.settings.get("deepspeed_stage") == 3 for rank in ranks
    ):
        return None, (
            "weights are gathered in the forward pass (FSDP, ZeRO-3), so a slow rank shows in a "
            "profiler window only: fast-axolotl measure --profile-steps 5"
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
