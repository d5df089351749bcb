"""What a verdict rests on: the figures, the thresholds with their origins, and the sentences."""

from __future__ import annotations

from dataclasses import dataclass

from fast_axolotl.measure.wording import percent, rate
from fast_axolotl.record import RunSummary

__all__ = [
    "BOUND_COMMUNICATION",
    "DATA_STALL",
    "DISK_FULL",
    "DISK_NEAR",
    "FREE_COMMUNICATION",
    "FREE_STALL",
    "HIDDEN_WAIT",
    "LEAST_FETCHES",
    "LEAST_SECONDS",
    "LEAST_SKEW_SHARE",
    "MLPERF",
    "MOST_CONTRADICTION",
    "PRESSURE_MEMORY",
    "Evidence",
    "hidden_lines",
    "loader_lines",
    "memory_lines",
    "pattern_lines",
    "rank_lines",
    "stall_line",
    "swap_lines",
    "system_lines",
]

LEAST_FETCHES = 200
"""Fetches. Ours: the worst 1 % of them is then two fetches, not one."""
LEAST_SECONDS = 60.0
"""Seconds. Ours: enough for slow steps, and for a periodic wait to show."""
DATA_STALL = 0.10
"""Share of steady time. MLPerf Storage passes a run at 90 % accelerator utilisation: the rest."""
FREE_STALL = 0.05
"""Share of steady time. Ours: half of MLPerf Storage's line is out of its reach."""
DISK_NEAR, DISK_FULL = 0.70, 0.90
"""Share of capacity. Queueing (M/M/1): a request takes 1 ÷ (1 − share) as long as on an idle disk,
3 times at 70 %, 10 times at 90 %."""
PRESSURE_MEMORY = 0.01
"""Share of time. Linux PSI ``full``: no task made progress for want of memory; a healthy machine
shows 0, and 1 % is well above the noise."""
BOUND_COMMUNICATION = 0.20
"""Share of the profiled time. Ours: twice the line of data, since some exposure is unavoidable."""
FREE_COMMUNICATION = 0.10
"""Share of the profiled time. Ours: half of the above."""
MOST_CONTRADICTION = 0.05
"""Points between the stall and the cached-batch check. Ours: half of MLPerf Storage's line."""
LEAST_SKEW_SHARE = 0.5
"""Of communication, to be waiting for a slow rank. Ours: the larger part of it."""
HIDDEN_WAIT = 0.05
"""Points by which the host's wait exceeds the device's, to be worth a line."""

MLPERF = "MLPerf Storage passes at 90 % accelerator utilisation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at."""

    figures: RunSummary
    source: str = ""
    """What the meter was plugged into."""
    decided_by: int | None = None
    """The rank whose waits these are, where there are several."""
    skew_share: float | None = None
    slow_rank: int | None = None

    @property
    def stall(self) -> float:
        """Nothing where it is not known."""
        return self.figures.stall_fraction or 0.0

    @property
    def exposed(self) -> float:
        """Nothing where it is not known."""
        return self.figures.exposed_communication_fraction or 0.0


def stall_line(given: Evidence, threshold: str = "") -> str:
    one = given.figures
    who = "the device had nothing to run" if one.stall_source == "device" else "the loop waited"
    where = "" if given.decided_by is None else f" on rank {given.decided_by}"
    line = f"stall {percent(one.stall_fraction)}: share of the steady time in which {who}{where}"
    return f"{line} ({threshold})" if threshold else line


def rank_lines(given: Evidence) -> list[str]:
    one = given.figures
    stalls = sorted(rank.stall_fraction for rank in one.ranks if rank.stall_fraction is not None)
    if given.decided_by is None or len(one.ranks) < 2:
        return []
    if one.settings.get("dispatcher"):
        return [
            f"rank {given.decided_by} reads for all {one.world_size} ranks (dispatcher): its wait "
            "looks like communication on the others"
        ]
    if len(stalls) < 2 or stalls[-1] - stalls[0] < FREE_STALL:
        return []
    skew = (
        "" if one.rank_skew is None else f"; skew of the ranks' own time {percent(one.rank_skew)}"
    )
    return [
        f"the ranks wait unevenly: rank {given.decided_by} {percent(stalls[-1])}, the least "
        f"{percent(stalls[0])}; the others wait for it in their collectives{skew}"
    ]


def pattern_lines(one: RunSummary) -> list[str]:
    if one.stall_pattern in ("", "steady"):
        return []
    share = ""
    if one.worst_percent_share is not None:
        share = f"; the worst 1 % of fetches hold {percent(one.worst_percent_share)} of the waiting"
    if one.stall_period_fetches is None:
        return [f"few fetches hold the waiting, at no regular distance{share}"]
    rows = "" if one.stall_period_rows is None else f" ({one.stall_period_rows:,.0f} samples)"
    follows = {
        "epoch": ", with each epoch",
        "shard": ", with each shard",
        "step": ", with each step",
    }
    of = follows.get(one.stall_period_of, "")
    limit = (
        "up to 64 a ready queue hides it"
        if one.stall_pattern == "burst"
        else "beyond 64 no queue is deep enough"
    )
    return [f"long waits every {one.stall_period_fetches:,.4g} fetches{rows}{of}: {limit}{share}"]


def loader_lines(one: RunSummary) -> list[str]:
    lines = []
    if one.headroom is not None:
        word = "more than" if one.headroom >= 1 else "less than"
        lines.append(
            f"alone, the loader gives {one.headroom:.2f} times what the model takes: {word} it"
        )
    if one.queue_depth is not None and one.queue_capacity:
        lines.append(f"{one.queue_depth:.1f} of {one.queue_capacity} batches are ready on average")
    if one.cached_stall_fraction is not None:
        lines.append(f"with a cached batch a step is {percent(one.cached_stall_fraction)} shorter")
    return lines


def hidden_lines(one: RunSummary) -> list[str]:
    host, device = one.host_stall_fraction, one.device_stall_fraction
    if host is None or device is None or host - device < HIDDEN_WAIT:
        return []
    return [
        f"the host waits {percent(host)}, but most of it behind work queued on the device: timing "
        "the loop alone would call that stall"
    ]


def swap_lines(one: RunSummary) -> list[str]:
    lines = []
    if one.is_swap_sustained:
        lines.append(
            f"{rate(one.swap_in_bytes_per_second)} come back from swap, in at least half of the "
            "samples and three in a row (threshold: any; ours)"
        )
    if one.psi_memory_full is not None and one.psi_memory_full > PRESSURE_MEMORY:
        lines.append(
            f"in {percent(one.psi_memory_full)} of the time every task waited for memory "
            "(threshold 1 %: Linux PSI memory full, 0 on a healthy machine)"
        )
    return lines


def memory_lines(one: RunSummary) -> list[str]:
    if one.limit_share is None:
        return []
    return [f"the working set reached {percent(one.limit_share)} of the memory it may take"]


def system_lines(given: Evidence) -> list[str]:
    """What the samples of the machine show where nothing else does."""
    one = given.figures
    lines = swap_lines(one)
    if one.disk_share is not None and one.disk_share >= DISK_NEAR:
        lines.append(f"reads take {percent(one.disk_share)} of the disk's capacity")
    if one.gpu_utilization is not None:
        lines.append(f"a kernel ran on the GPUs in {percent(one.gpu_utilization)} of the time")
    return lines
