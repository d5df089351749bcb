"""What a verdict rests on: the figures, what the settings say, and the sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fast_axolotl.measure.ready_queue import Drain
from fast_axolotl.record import RunSummary, thresholds
from fast_axolotl.record.arithmetic import ratio
from fast_axolotl.record.catalogue import FIGURES, LEDGER
from fast_axolotl.record.units import (
    format_bytes,
    format_duration,
    format_rate,
    format_seconds,
    format_share,
)

MLPERF = "MLPerf Storage requires 90 % accelerator utilisation"

_CAUSES = {
    "epoch": "at the start of an epoch",
    "shard": "at a new shard",
    "refill": "while the shuffle buffer was filling",
    "gc": "during garbage collection",
    "checkpoint": "after a checkpoint",
    "handover": "for batches that were ready and only had to be handed over",
}
_LEAST_CAUSE = 0.05
"""Of the waiting, for a cause to be worth a line. Ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at."""

    figures: RunSummary
    source: str = ""
    """What the meter was plugged into; of a run without one, what watched it: run, watch."""
    decided_by: int | None = None
    """The rank whose waits these are, where there are several."""
    exposed_shares: tuple[float, ...] = ()
    """Exposed communication of each profiler window, where it was seen."""
    skew_share: float | None = None
    """Share of communication that is waiting for a slower rank."""
    slow_rank: int | None = None
    local_ranks: int | None = None
    """Ranks that share a machine, at most; ``None``: all of them may."""
    warmup_step_seconds: float | None = None
    """Time of a step of the warm-up."""
    drain: Drain | None = None
    """What became of the ready queue of the rank that decides, if it drained."""
    killed: str = ""
    """What of the run was killed, or ended without a word, if anything."""
    machine_oom_kills: int = 0
    """Processes that the kernel killed for memory meanwhile, of any program of the machine."""
    memory_growth: str = ""
    """What of its memory has grown, the largest part first."""

    @property
    def stall(self) -> float:
        """Nothing where it is not known."""
        return self.figures.stall_fraction or 0.0

    @property
    def exposed(self) -> float:
        """Nothing where it is not known."""
        return self.figures.exposed_communication_fraction or 0.0

    @property
    def pattern(self) -> str:
        """When the waits come, as a subtype of the verdict: handover, burst, periodic, or rate.

        A batch that is ready when its fetch begins has only to be handed over: most of the waiting
        is for such batches, and the queue is full on average.
        """
        figures, name = self.figures, self.figures.stall_pattern
        full = thresholds.FULL_QUEUE * (figures.queue_capacity or math.inf)
        is_most = figures.waits_by_cause.get("handover", 0.0) >= thresholds.MOST_WAITING
        if is_most and (figures.queue_depth or 0.0) >= full:
            return "handover"
        if name == "burst" and self.figures.stall_period_of == "epoch":
            return "periodic"  # no queue reaches across epochs
        return name if name in ("burst", "periodic") else "rate"

    @property
    def holds_up(self) -> bool:
        """Whether one rank makes the others wait for something else than data."""
        is_late = (self.figures.straggler_fraction or 0.0) >= thresholds.FREE_STALL
        return is_late and self.figures.straggler_part not in ("", "data")

    @property
    def is_padded(self) -> bool:
        """Whether padding explains much of what the device does."""
        share = self.figures.padding_share or 0.0
        return share >= thresholds.MUCH_PADDING and not self.setting("sample_packing")

    @property
    def gpu_memory(self) -> tuple[int | None, int | None]:
        """Bytes of a GPU that the run needed, and those that it could take as well."""
        cuda, free = self.setting("cuda_memory"), self.figures.gpu_free_bytes
        if not isinstance(cuda, dict) or not cuda.get("total") or not cuda.get("allocated_peak"):
            return self.figures.gpu_memory_bytes, free
        used = int(cuda["allocated_peak"])
        # What the allocator holds and the run does not use can be used; what others hold cannot.
        spare = int(cuda.get("reserved_peak") or used) - used
        return used, int(cuda["total"]) - used if free is None else free + spare

    @property
    def is_stream(self) -> bool:
        """Whether rows come from a stream, not from a dataset that knows its rows by number."""
        names = ("streaming", "pretraining_dataset", "dispatcher")
        return any(bool(self.setting(name)) for name in names)

    @property
    def is_random(self) -> bool:
        """Whether the data's device is read in small requests."""
        size = self.figures.disk_request_bytes
        return size is not None and size < thresholds.SMALL_REQUEST_BYTES

    @property
    def cpu_lost_to_others(self) -> float:
        """Share of time in which a process waited for a processor, where other programs take some:
        one that waits for its own workers has lost nothing. By the pressure where the kernel does
        not count it by process."""
        figures = self.figures
        if (figures.other_cpu_share or 0.0) < thresholds.CPU_LOST:
            return 0.0
        own = figures.cpu_wait_share
        return (figures.psi_cpu_some if own is None else own) or 0.0

    @property
    def cores(self) -> int | None:
        """Processors that one rank's loader may use. A dispatcher's other ranks read nothing."""
        cores = _whole(self.figures.environment.get("cores"))
        if cores is None:
            return None
        sharing = self.local_ranks or max(1, self.figures.world_size)
        return max(1, cores if self.setting("dispatcher") else cores // sharing)

    def setting(self, name: str) -> Any:
        """What was recorded of a loader or trainer, else of the framework's own configuration."""
        found = self.figures.settings.get(name)
        config = self.figures.settings.get("config")
        return config.get(name) if found is None and isinstance(config, dict) else found

    def number(self, name: str) -> int | None:
        """A setting that is a number."""
        return _whole(self.setting(name))

    def lost_share(self, part: str) -> float:
        """Of the wall clock; nothing where it was not divided."""
        return ratio(self.figures.ledger.get(part), self.figures.duration_seconds) or 0.0

    def lost_line(self, part: str) -> str:
        """How much of the wall clock a part takes."""
        seconds, whole = self.figures.ledger[part], self.figures.duration_seconds
        return (
            f"{LEDGER[part]}: {format_duration(seconds)} of {format_duration(whole)}, "
            f"{format_share(self.lost_share(part))} of the wall clock"
        )

    def lost_lines(self, *, but: str) -> list[str]:
        """Parts of the wall clock that are large, and not what the verdict is about."""
        parts = ("checkpoint", "evaluation", "startup", "resume")
        return [
            self.lost_line(part)
            for part in parts
            if part != but and self.lost_share(part) >= thresholds.LOST_TIME
        ]

    @property
    def batch_excess(self) -> float:
        """Global batch ÷ the upper bound of the gradient noise scale; 0 where one is not known."""
        high = self.figures.gradient_noise_scale_high
        return ratio(self.figures.global_batch_samples, high) or 0.0

    def batch_lines(self) -> list[str]:
        """Whether the global batch is far above the gradient noise scale."""
        batch, excess = self.figures.global_batch_samples or 0.0, self.batch_excess
        if excess < thresholds.LARGE_BATCH:
            return []
        show = FIGURES["gradient_noise_scale"].format
        return [
            f"global batch of {show(batch)}, gradient noise scale at most {show(batch / excess)}: "
            f"most samples of a step add little (threshold: a factor of {thresholds.LARGE_BATCH:g},"
            " our choice; a proxy, questioned by arXiv 2505.23971)"
        ]

    def stall_line(self, threshold: str = "") -> str:
        """How large the stall is, and whose."""
        is_device = self.figures.stall_source == "device"
        who = "the GPU had nothing to run" if is_device else ("the loop waited for data")
        where = "" if self.decided_by is None else f" on rank {self.decided_by}"
        if len(self.figures.ranks) > 1 and not self.setting("dispatcher"):
            # The stall is that of all ranks together.
            where = f" on at least one of {len(self.figures.ranks)} ranks"
        stall = format_share(self.figures.stall_fraction)
        line = f"stall {stall}: share of the time after warm-up in which {who}{where}"
        return f"{line} ({threshold})" if threshold else line

    def drain_lines(self) -> list[str]:
        """Why the steady phase begins late."""
        if self.drain is None or not self.drain.is_over:
            return []
        return [
            f"the queue of ready batches was empty by step {self.drain.dry_step:,}; the "
            "figures leave out the steps before that, because the queue hid the waits"
        ]

    def rank_lines(self) -> list[str]:
        """How the ranks differ."""
        figures, decided_by = self.figures, self.decided_by
        if decided_by is None or len(figures.ranks) < 2:
            return []
        if self.setting("dispatcher"):
            return [
                f"rank {decided_by} reads for all {figures.world_size} ranks (dispatcher): on "
                "the other ranks its wait looks like communication"
            ]
        lines = []
        fraction, rank = figures.straggler_fraction, figures.straggler_rank
        if rank is not None and fraction is not None:
            late = {
                "data": "waits for data in steps in which the others do not wait",
                "compute": "computes longer than the others",
                "tokens": "computes longer than the others, because it has more tokens",
                "device clock": "computes longer than the others, and its GPU clock is lower",
            }.get(figures.straggler_part, "is late")
            lost = format_share(fraction)
            lines.append(f"rank {rank} {late}: this costs the other ranks {lost} of the time")
        stalls = {rank.rank: rank.stall_fraction for rank in figures.ranks}
        known = [stall for stall in stalls.values() if stall is not None]
        own, least = stalls.get(decided_by) or 0.0, min(known, default=0.0)
        if own - least >= thresholds.FREE_STALL:
            lines.append(
                f"the ranks wait unevenly: rank {decided_by} {format_share(own)}, the best rank "
                f"{format_share(least)}; the others wait for it in their collectives"
            )
        return lines

    def communication_lines(self) -> list[str]:
        """How exposed communication moved, where there are several profiler windows."""
        shares = self.exposed_shares
        if len(shares) < 2:
            return []
        return [
            f"exposed communication was between {format_share(min(shares))} and "
            f"{format_share(max(shares))} over {len(shares):,} profiler windows"
        ]

    def small_batch_lines(self) -> list[str]:
        """Low latency with low throughput: short passes that leave most of a GPU unused."""
        mfu, (used, free) = self.figures.mfu, self.gpu_memory
        step, passes = self.figures.step_p50_seconds, self.number("gradient_accumulation") or 1
        seconds = (step or math.inf) / passes
        is_low = mfu is not None and mfu < thresholds.LOW_MFU and not self.is_padded
        is_free = (free or 0) >= (used or math.inf)
        if not (is_low and is_free) or seconds >= thresholds.SHORT_PASS_SECONDS:
            return []
        return [
            "low latency, but low throughput: a forward and backward pass takes "
            f"{format_seconds(seconds)} (threshold 0.5 s), MFU is {format_share(mfu)} (threshold "
            f"30 %), and {format_bytes(free)} of GPU memory are free with {format_bytes(used)} in "
            "use (threshold: as much; all our choice)"
        ]

    def pattern_lines(self) -> list[str]:
        """When the waits come, and with what."""
        figures, period = self.figures, self.figures.stall_period_fetches
        causes = [
            f"{format_share(share)} {_CAUSES.get(name, f'with {name}')}"
            for name, share in figures.waits_by_cause.items()
            if name != "loader" and share >= _LEAST_CAUSE
        ]
        lines = [f"of all waiting, {', '.join(causes)}"] if causes else []
        if figures.stall_pattern in ("", "steady"):
            return lines
        share = ""
        if figures.worst_percent_share is not None:
            worst = format_share(figures.worst_percent_share)
            share = f"; the slowest 1 % of fetches account for {worst} of the waiting"
        if period is None:
            return [*lines, f"few fetches cause most of the waiting, at irregular distances{share}"]
        rows = figures.stall_period_rows
        samples = "" if rows is None else f" ({rows:,.0f} samples)"
        is_named = figures.stall_period_of in ("epoch", "shard", "step")
        follows = f", once per {figures.stall_period_of}" if is_named else ""
        return [*lines, f"a long wait every {period:,.4g} fetches{samples}{follows}{share}"]

    def loader_lines(self) -> list[str]:
        """What the loader could give."""
        headroom, cached = self.figures.headroom, self.figures.cached_stall_fraction
        depth, capacity = self.figures.queue_depth, self.figures.queue_capacity
        lines = []
        if headroom is not None:
            lines.append(
                f"alone, the loader delivers {headroom:.2f} times what the model could consume"
            )
        if depth is not None and capacity:
            full = ""
            if self.pattern == "handover":
                wait = format_seconds(self.figures.wait_p50_seconds)
                full = f", and the median fetch still takes {wait}"
            lines.append(f"{depth:.1f} of {capacity} batches are ready when a fetch begins{full}")
        if cached is not None:
            lines.append(f"with a cached batch, a step is {format_share(cached)} shorter")
        return lines

    def hidden_lines(self) -> list[str]:
        """Waits of the host that cost nothing."""
        host, device = self.figures.host_stall_fraction, self.figures.device_stall_fraction
        if host is None or device is None or host - device < thresholds.HIDDEN_WAIT:
            return []
        return [
            f"the CPU-side wait is {format_share(host)}, but most of it is hidden behind work "
            "queued on the GPU: a timer around the loop alone would count it as stall"
        ]

    def memory_lines(self) -> list[str]:
        """Signs that the run is short of memory: swap, then pressure."""
        lines, figures = [], self.figures
        pressure, swapped = figures.psi_memory_full or 0.0, figures.process_swap_bytes or 0
        is_pressed = pressure > thresholds.PRESSURE_MEMORY
        if figures.is_swap_sustained and (is_pressed or swapped >= thresholds.PROCESS_SWAP_BYTES):
            lines.append(
                f"{format_rate(figures.swap_in_bytes_per_second)} are read back from swap, in "
                "at least half of the samples and in three in a row (threshold 1 MB/s, our "
                f"choice); up to {format_bytes(swapped)} of this run are in swap"
            )
        if is_pressed:
            lines.append(
                f"every task waited for memory {format_share(pressure)} of the time (threshold "
                "1 %; Linux PSI, 0 on a healthy machine)"
            )
        return lines

    def cpu_lines(self) -> list[str]:
        """Signs that the run does not get the processors it asks for: each with its threshold."""
        figures, lines = self.figures, []
        throttled, stolen = figures.cpu_throttled_share or 0.0, figures.cpu_steal_share or 0.0
        if throttled >= thresholds.CPU_LOST:
            lines.append(
                f"the CPU quota of the control group withheld {format_share(throttled)} of the "
                "CPU time that the run asked for (threshold 10 %, our choice)"
            )
        if stolen >= thresholds.CPU_LOST:
            lines.append(
                f"the hypervisor gave {format_share(stolen)} of the CPU time to other virtual "
                "machines (steal; threshold 10 %, our choice)"
            )
        if self.cpu_lost_to_others >= thresholds.CPU_LOST:
            who = "a process of the run" if figures.cpu_wait_share is not None else "a program"
            lines.append(
                f"other programs used {format_share(figures.other_cpu_share)} of the CPU "
                f"cores, and {who} waited for a core {format_share(self.cpu_lost_to_others)} "
                "of the time (threshold 10 % each, our choice)"
            )
            if figures.psi_cpu_some is not None:
                pressure = format_share(figures.psi_cpu_some)
                lines.append(f"CPU pressure {pressure}: a task waited for a core (Linux PSI)")
        return lines

    def system_lines(self) -> list[str]:
        """What the samples of the machine show where nothing else does."""
        disk, gpu = self.figures.disk_share, self.figures.gpu_utilization
        lines = self.memory_lines()
        if self.figures.is_swap_sustained and not lines:
            rate = format_rate(self.figures.swap_in_bytes_per_second)
            lines.append(f"the machine reads {rate} from swap, but hardly any for this run")
        lines += self.cpu_lines()
        if disk is not None and disk >= thresholds.DISK_NEAR:
            lines.append(f"reads use {format_share(disk)} of the disk's capacity")
        if gpu is not None:
            lines.append(f"a kernel was running on the GPUs {format_share(gpu)} of the time")
        return lines


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value)
