"""The figures, settings and sentences that verdicts are based on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.measure.phases import Phases, looks_error
from fast_axolotl.measure.ranks import Drain, number_of
from fast_axolotl.record import RunSummary, thresholds
from fast_axolotl.record.arithmetic import middle, ratio, times
from fast_axolotl.record.catalogue import FIGURES, LEDGER
from fast_axolotl.record.units import format_bytes, format_duration, format_seconds, format_share

_ORIGINS = {"DATA_STALL": ": MLPerf Storage requires 90 % accelerator utilisation", "DISK_NEAR": ""}
"""Where a threshold comes from that is not our own choice, or says so itself."""
_THRESHOLDS = {
    name: f"threshold {100 * value:.0f} %{_ORIGINS.get(name, ': our choice')}"
    for name, value in vars(thresholds).items()
    if name.isupper()
}

_CAUSES = {"epoch": "at the start of an epoch", "iterator": "at a new iterator, made for one batch"}
_PHASES = {
    "waiting": "data is waited for",
    "loading": "the workers load",
    "sampler": "the sampler chooses rows",
    "preparing": "batches are prepared",
    "other": "other code",
    "between": "between loops",
}
_LEAST_PHASE = 0.02
"""Of a step, for a phase to be told. Ours."""
_LEAST_CAUSE = 0.05
"""Of the waiting, for a cause to be worth a line. Ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at."""

    figures: RunSummary
    phases: Phases = field(default_factory=Phases)
    source: str = ""
    """What the meter was plugged into; of a run without one, what watched it: run, watch."""
    stall_error: float | None = None
    """Half of the 95 % interval of the stall; ``None``: not known."""
    drift: tuple[float, float] | None = None
    """Seconds of a step without waits, at first and at the end, where they grew all the while."""
    skew_share: float | None = None
    """Share of communication that is waiting for a slower rank."""
    slow_phase: str = ""
    """In which one rank works longer than the others, by looks at their stacks."""
    drain: Drain | None = None
    """What became of the ready queue of the rank that decides, if it drained."""
    interpreters: Mapping[str, str] = field(default_factory=dict)
    """Every Python that was to be measured, and why it could not be."""
    killed: str = ""
    """What of the run was killed, or ended without a word, if anything."""
    machine_oom_kills: int = 0
    """Processes that the kernel killed for memory meanwhile, of any program of the machine."""

    @property
    def stall(self) -> float:
        """Nothing where it is not known."""
        return self.figures.stall_fraction or 0.0

    @property
    def exposed(self) -> float:
        """Nothing where it is not known."""
        return self.figures.exposed_communication_fraction or 0.0

    @property
    def beside(self) -> float:
        """Share of a step that goes to preparing batches or to other code, whichever is larger."""
        return max(self.phases.cost("preparing"), self.phases.cost("other"))

    @property
    def is_swapping(self) -> bool:
        """Whether memory of this run is read back from swap all the time."""
        figures = self.figures
        is_pressed = (figures.psi_memory_full or 0.0) > thresholds.PRESSURE_MEMORY
        is_own = (figures.process_swap_bytes or 0) >= thresholds.PROCESS_SWAP_BYTES
        return bool(figures.is_swap_sustained) and (is_pressed or is_own)

    def compare_ranks(self, what: str) -> str:
        """How long the slow rank waits for data, or works, in a step, and how long the others."""
        slow = self.figures.straggler_rank
        times = {rank.rank: getattr(rank, f"{what}_seconds") for rank in self.figures.ranks}
        others = [time for rank, time in times.items() if rank != slow and time is not None]
        if slow is None or times.get(slow) is None or not others:
            return f"The ranks wait for rank {slow}, which reaches their collectives last"
        verb = "waits {} for data in a step" if what == "wait" else "works {} in a step"
        own = verb.format(format_seconds(times[slow]))
        return f"Rank {slow} {own}, the others {format_seconds(middle(others))}"

    @property
    def is_settled(self) -> bool:
        """Whether a short run can be judged all the same: its shares are clear of the thresholds by
        more than their error."""
        seconds = self.figures.measured_seconds
        if self.stall_error is None or seconds < thresholds.LEAST_FETCHES_SECONDS:
            return False
        shares = [self.phases.cost("preparing"), self.phases.cost("other")]
        least = [share - looks_error(share, seconds) for share in shares]
        if max(self.stall - self.stall_error, *least) >= thresholds.DATA_STALL:
            return True
        is_free = self.stall + self.stall_error < thresholds.FREE_STALL
        most = sum(shares) + looks_error(sum(shares), seconds)
        is_clear = is_free and most < thresholds.DATA_STALL
        return seconds >= thresholds.LEAST_SETTLED_SECONDS and is_clear

    @property
    def pattern(self) -> str:
        """When the waits come, as a subtype of the verdict: burst, periodic, or rate."""
        name = self.figures.stall_pattern
        return name if name in ("burst", "periodic") else "rate"

    @property
    def holds_up(self) -> bool:
        """Whether one rank makes the others wait for something else than data."""
        is_late = (self.figures.straggler_fraction or 0.0) >= thresholds.FREE_STALL
        return is_late and self.figures.straggler_part not in ("", "data")

    @property
    def is_stream(self) -> bool:
        """Whether rows come from a stream, not from a dataset that knows its rows by number."""
        return any(map(self.setting, ("streaming", "pretraining_dataset", "dispatcher")))

    @property
    def is_random(self) -> bool:
        """Whether the data's device is read in small requests."""
        size = self.figures.disk_request_bytes
        return size is not None and size < thresholds.SMALL_REQUEST_BYTES

    @property
    def cpu_losses(self) -> dict[str, float]:
        """Shares of time or of processor time that the run did not get, by who took them.

        Where other programs take processors, the time in which a process waited for one: a run
        that waits for its own workers has lost nothing.
        """
        figures, waited = self.figures, 0.0
        if (figures.other_cpu_share or 0.0) >= thresholds.CPU_LOST:
            waited = figures.cpu_wait_share or 0.0
        return {
            "quota": figures.cpu_throttled_share or 0.0,
            "steal": figures.cpu_steal_share or 0.0,
            "others": waited,
        }

    @property
    def cpu_room(self) -> float | None:
        """Times that the pace can grow until the processors are in use; ``None``: not known. Other
        programs keep what they use, up to half of all."""
        cores = number_of(self.figures.environment, "cores")
        free = max(0.5, 1.0 - (self.figures.other_cpu_share or 0.0))
        return ratio(times(cores, free), self.figures.cpu_cores or None)

    @property
    def start_share(self) -> float:
        """Share of the time that goes into the start of workers with every epoch: in which the loop
        waits for an epoch's first batch, and workers are not at work."""
        workers = self.number("num_workers")
        if self.setting("persistent_workers") or not workers or self.phases.loading is None:
            return 0.0
        at_epochs = self.stall * self.figures.waits_by_cause.get("epoch", 0.0)
        return max(0.0, min(at_epochs, 1.0 - self.phases.workers / workers))

    @property
    def cores(self) -> int | None:
        """Processors that one rank's loader may use. A dispatcher's other ranks read nothing."""
        cores = number_of(self.figures.environment, "cores")
        if cores is None:
            return None
        by_node = Counter(rank.node for rank in self.figures.ranks)
        sharing = max(by_node.values(), default=self.figures.world_size)
        return max(1, int(cores if self.setting("dispatcher") else cores // sharing))

    def setting(self, name: str) -> Any:
        """What was recorded of a loader or trainer, else of the framework's own configuration."""
        found = self.figures.settings.get(name)
        config = self.figures.settings.get("config")
        return config.get(name) if found is None and isinstance(config, dict) else found

    def number(self, name: str) -> int | None:
        """A setting that is a number."""
        number = number_of({name: self.setting(name)}, name)
        return None if number is None else int(number)

    def say(self, text: str, **words: object) -> str:
        """A sentence about the run: figures stand in it by their names, and are written with their
        units; thresholds in capitals, and are written with where they come from."""
        values = self.figures.figures
        figures = {name: figure.format(values.get(name)) for name, figure in FIGURES.items()}
        return text.format_map(_THRESHOLDS | figures | words)

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

    def line_of(self, phase: str) -> str:
        """The line of code that most of a phase was spent in; empty where it is not known."""
        return next((line.place for line in self.figures.where if line.phase == phase), "")

    def phase_lines(self) -> Iterator[str]:
        """How the looks at the stack divide a step, and where the rest of it was spent."""
        steps = [
            f"{name} {format_share(share)}"
            for name, share in self.phases.step.items()
            if share >= _LEAST_PHASE
        ]
        whose = f" of rank {self.figures.straggler_rank}" if self.holds_up else ""
        if steps:
            yield f"of a step{whose}: {', '.join(steps)}"
        if self.phases.visible < 1.0 - _LEAST_PHASE:
            yield "these are phases of the host: a busy GPU hides most of them"
        for phase, name in _PHASES.items():
            where = [line for line in self.figures.where if line.phase == phase]
            told = [f"{line.place}, {format_share(line.share)} of it" for line in where[:2]]
            share = self.lost_share(phase) if phase == "between" else self.phases.cost(phase)
            share = max(share, self.phases.waiting.get(phase, 0.0) * self.stall)
            is_large = phase == "loading" or share >= _LEAST_PHASE
            if told and is_large:
                yield f"{name}: {'; '.join(told)}"

    def stall_line(self, threshold: str = "") -> str:
        """How large the stall is, and whose."""
        is_device = self.figures.stall_source == "device"
        who = "the GPU had nothing to run" if is_device else "the loop waited for data"
        if self.figures.stall_source == "stacks":
            who = "the stack showed the loop waiting for data"
        # The stall is that of all ranks together, or of the one that reads for all.
        ranks, where = len(self.figures.ranks), ""
        if ranks > 1:
            where = f" on at least one of {ranks} ranks"
            if self.setting("dispatcher"):
                where = f" on rank {self.figures.deciding_rank}"
        line = "stall {stall_fraction}: share of the time after warm-up in which {who}{where}"
        if self.stall_error is not None and not self.figures.is_long_enough:
            line += f"; between {format_share(max(0.0, self.stall - self.stall_error))} and "
            line += f"{format_share(min(1.0, self.stall + self.stall_error))}, because only "
            line += f"{format_duration(self.figures.measured_seconds)} were measured"
        if self.drain is not None and self.drain.is_over:
            line += f"; steps before {self.drain.dry_step:,}, when a queue hid waits, are left out"
        return self.say(f"{line} ({threshold})" if threshold else line, who=who, where=where)

    def rank_lines(self) -> Iterator[str]:
        """How the ranks differ."""
        figures = self.figures
        if len(figures.ranks) < 2:
            return
        if self.setting("dispatcher"):
            yield (
                f"rank {figures.deciding_rank} reads for all {figures.world_size} ranks "
                "(dispatcher): on the other ranks its wait looks like communication"
            )
        elif figures.straggler_rank is not None and figures.straggler_fraction is not None:
            late = {
                "data": "waits for data in steps in which the others do not wait",
                "compute": "computes longer than the others",
            }.get(figures.straggler_part, "is late")
            text = "rank {rank} {late}: this costs the other ranks {straggler_fraction} of the time"
            yield self.say(text, rank=figures.straggler_rank, late=late)

    def window_lines(self) -> Iterator[str]:
        """What a profiler window tells of the communication."""
        if self.exposed:
            yield self.say(
                "in {exposed_communication_fraction} of the profiled time, only communication ran "
                "({BOUND_COMMUNICATION})"
            )
        if self.figures.pure_communication_fraction is not None:
            text = (
                "the transfers alone (each collective on its fastest rank) take "
                "{pure_communication_fraction} of the time; {skew} of the communication is waiting "
                "for the last rank"
            )
            yield self.say(text, skew=format_share(self.skew_share))

    def pattern_lines(self) -> Iterator[str]:
        """When the waits come, and with what."""
        figures, period = self.figures, self.figures.stall_period_fetches
        causes = [
            f"{format_share(share)} {_CAUSES.get(name, f'with {name}')}"
            for name, share in figures.waits_by_cause.items()
            if name != "loader" and share >= _LEAST_CAUSE
        ]
        if causes:
            yield f"of all waiting, {', '.join(causes)}"
        if figures.stall_pattern not in ("", "steady"):
            rows = figures.stall_period_rows
            samples = "" if rows is None else f" ({rows:,.0f} samples)"
            follows = ", once per epoch" if figures.stall_period_of == "epoch" else ""
            yield f"a long wait about every {period or 0:,.0f} fetches{samples}{follows}"

    def hidden_lines(self) -> Iterator[str]:
        """Waits of the host that cost nothing."""
        host, device = self.figures.host_stall_fraction, self.figures.device_stall_fraction
        if host is not None and device is not None and host - device >= thresholds.HIDDEN_WAIT:
            yield self.say(
                "the CPU-side wait is {host_stall_fraction}, but most of it is hidden behind work "
                "queued on the GPU: a timer around the loop alone would count it as stall"
            )

    def memory_lines(self) -> Iterator[str]:
        """Signs that the run is short of memory: swap, then pressure."""
        if self.is_swapping:
            yield self.say(
                "{swap_in_bytes_per_second} are read back from swap, in at least half of the "
                "samples (threshold {rate}/s); up to {process_swap_bytes} of this run are in swap",
                rate=format_bytes(thresholds.SWAP_RATE),
            )
        if (self.figures.psi_memory_full or 0.0) > thresholds.PRESSURE_MEMORY:
            yield self.say(
                "every task waited for memory {psi_memory_full} of the time (Linux PSI; "
                "{PRESSURE_MEMORY})"
            )

    def growth_lines(self) -> Iterator[str]:
        """Memory that the run takes more of with every step."""
        for one in self.figures.growth:
            line = f"the memory of {one.part} grows by {format_bytes(one.bytes_per_step)} per step"
            if one.full_in_seconds is not None:
                line += f", and is full in {format_duration(one.full_in_seconds)}"
            yield line

    def cpu_lines(self) -> Iterator[str]:
        """Signs that the run does not get the processors it asks for."""
        told = {
            "quota": "the CPU quota of the control group withheld {share} of the requested CPU "
            "time",
            "steal": "the hypervisor gave {share} of the CPU time to other virtual machines "
            "(steal)",
            "others": "other programs used {other_cpu_share} of the CPU cores, and the run waited "
            "for a core {share} of the time",
        }
        for name, share in self.cpu_losses.items():
            if share >= thresholds.CPU_LOST:
                yield self.say(f"{told[name]} ({{CPU_LOST}})", share=format_share(share))

    def system_lines(self) -> Iterator[str]:
        """What the samples of the machine show where nothing else does."""
        yield from self.memory_lines()
        yield from self.cpu_lines()
        if (self.figures.disk_share or 0.0) >= thresholds.DISK_NEAR:
            yield self.say("reads use {disk_share} of the disk's capacity")
