"""Figures of each rank from its lines, and what a job of several ranks loses.

*One rank.* The steady phase is what counts: warm-up is left out. Everything is a sum first and a
ratio last, so a block may hold one step or a thousand. The cost is one pass over the lines.

*The ready queue.* A loader that is too slow is hidden for as long as its queue lasts: until then
the stall says nothing about the steady state. So a queue that is emptying holds the verdict back,
and what came before it ran dry counts as warm-up once the rest can be judged by itself. The batches
it loses per fetch are the share of the demand that the loader lacks: less than 5 % from the first
half of the steady phase to the second holds nothing back. A queue that fills again has not run dry,
nor has one after which nobody waits.

*Pattern.* Waits come all along, in bursts, or once in a long while. Long waits hold most of the
waiting: a third as long as the one at half of it, or longer. Where they are few, all fetches ÷
their number is the period. Up to 64 fetches it is a burst: a ready queue that deep hides it. A
longer one is periodic, and so are waits that come with the begin of an epoch.

*Stall.* Ranks wait for each other in every collective, so each step is as late as the rank that
waits longest in it; see ``record.waits``. The rank that causes most of that decides about the data.
With a dispatcher it is rank 0, which reads for all, and whose waits look like communication on the
others. A rank that recorded too little to be judged decides nothing, where another has recorded
more.

*Stragglers.* The rank that the others wait for is late with its data: it waits longer than any
other. Or it works longer: by looks at the stacks, or in a profiler window, in which it spends least
time in collectives. A step is as long on every rank, since they wait for each other.

*Replicas.* Ranks of one tensor, context or pipeline parallel group are fed the same batches, and
what they count is not added up twice. The sizes of these groups stand in the settings.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from fast_axolotl.record import Histogram, ProfileWindow, RankRecord, Start, StepBlock, thresholds
from fast_axolotl.record.arithmetic import finite, known, middle, ratio, total
from fast_axolotl.record.figures import RankSummary
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
JOB_FIGURES = (
    *("device_idle_fraction", "exposed_communication_fraction", "pure_communication_fraction"),
    *("straggler_rank", "straggler_fraction", "data_parallel_size"),
)
"""What the ranks lose to each other, and in how many groups they read; by profiler windows, and for
the rank that costs the others most. Exposed communication is of the rank that shows most of it;
pure is every collective at its least duration across ranks: what is over is waiting for a rank."""
_SIZES = {
    "tensor_parallel": ("tensor_parallel_size",),
    "context_parallel": ("context_parallel_size", "sequence_parallel_degree"),
    "pipeline_parallel": ("pipeline_parallel_size",),
}
"""Setting → names of the same in a framework's configuration."""

LEAST_LOOKED_SECONDS = 3.0
"""Of looks, to tell how long a rank works. Ours: sixty looks."""
LEAST_WORK_SHARE = 0.05
"""Of a step, by which the work of one rank is longer than that of the others. Ours."""
LEAST_JUDGED = 20
"""Steps, to tell how sure a share of their time is."""
_STRETCHES, _T_OF_STRETCHES = 10, 2.262
"""Of a run, and Student's t for them at 95 %."""
DEEPEST_QUEUE = 64
"""Fetches: the longest period that a ready queue is expected to hide. Ours: a queue of 64 batches
still fits in memory, one of Axolotl's default 256 batches often does not."""

_MOST_LONG, _LEAST_HELD = 0.25, 0.6
"""Of all fetches, that are long waits at most; and of all waiting, that they hold at least. Waits
that vary by chance (exponential, lognormal) have more of them, or they hold less."""
_LEAST_DRIFT, _LEAST_DRIFTING = 1.3, 20
"""Times that steps become longer, to be told; steps in each third of a run."""


class Drain(NamedTuple):
    """A ready queue that is emptying, or has become empty."""

    dry_step: int | None = None
    """The first step after it ran dry; ``None``: it has not."""
    first_block: int = 0
    """Which of the steady blocks that step begins."""
    is_over: bool = False
    """Whether what followed can be judged by itself."""


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
    waits: Histogram = field(default_factory=Histogram)
    """The waits of single fetches that the stall is made of."""
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
    def is_long_enough(self) -> bool:
        """Whether its steady phase can be judged."""
        return thresholds.is_long_enough(self.steady.fetches, self.steady.wall_seconds)

    @property
    def is_fed_unseen(self) -> bool:
        """Whether its data does not come from a loader in its own thread, so that only looks at
        the stack tell how long it waits."""
        has_reason = "stall_fraction" in self.record.reasons
        return bool(self.steady.steps) and (not self.steady.fetches or has_reason)

    @property
    def work(self) -> dict[str, float]:
        """Seconds of a step by phase, without waits for data and for other ranks, by looks at the
        stack; empty: not known."""
        inside, *beside = (
            add_up_looks(self.steady_blocks, place) for place in ("", "waiting", "backward")
        )
        looked = sum(sum(part.values()) for part in (inside, *beside))
        if "cuda_memory" in self.settings or looked < LEAST_LOOKED_SECONDS:
            return {}
        pace = self.steady.wall_seconds / max(1, self.steady.steps)
        idle = ("waiting", "data", "communication")
        return {name: pace * inside[name] / looked for name in inside if name not in idle}

    @property
    def worker_seconds(self) -> tuple[float, float]:
        """In which the loader's workers loaded, and in which they had nothing to do."""
        seen = [stacks for stacks in self.record.stacks if stacks.who == "workers"]
        lines = (line for stacks in seen for line in stacks.lines if line.phase == "idle")
        return sum(stacks.seconds for stacks in seen), sum(line.seconds for line in lines)

    @property
    def loading(self) -> float | None:
        """Share of their time in which the workers loaded; ``None``: nobody looked, or none."""
        loaded, idled = self.worker_seconds
        return loaded / (loaded + idled) if loaded and idled else None

    @property
    def stall_error(self) -> float | None:
        """Half of the 95 % interval of the stall that fetches tell, by how ten stretches of the run
        differ from it; ``None``: too few steps."""
        is_device = self.steady.source == "device"
        pairs: list[tuple[float, float]] = []
        for block in self.steady_blocks:
            singles = block.devices if is_device else block.hosts
            wait = block.wait_seconds(is_device=is_device)
            if block.walls is not None and singles is not None:
                pairs += zip(block.walls, singles, strict=True)
            else:
                pairs.append((block.wall_seconds, wait))
        count = len(pairs)
        wall, wait = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        if count < LEAST_JUDGED or wall <= 0:
            return None
        over = [seconds - wait / wall * length for length, seconds in pairs]
        edges = [part * count // _STRETCHES for part in range(_STRETCHES + 1)]
        spread = sum(sum(over[first:last]) ** 2 for first, last in pairwise(edges))
        return _T_OF_STRETCHES * math.sqrt(spread * _STRETCHES / (_STRETCHES - 1)) / wall

    @property
    def window(self) -> ProfileWindow | None:
        """What the profiler saw; ``None``: it was not used."""
        return self.record.windows[-1] if self.record.windows else None

    def profiled_share(self, name: str) -> float | None:
        """What a field of the profiler's window comes to, of its time."""
        seen = self.window
        return None if seen is None else ratio(getattr(seen, name), seen.wall_seconds)

    def summary(self) -> RankSummary:
        """Its line in the table of ranks."""
        end, steady = self.record.end, self.steady
        return RankSummary(
            rank=self.rank,
            steps=steady.steps,
            fetches=steady.fetches,
            stall_fraction=steady.stall_fraction,
            host_stall_fraction=steady.host_stall_fraction,
            step_p50_seconds=self.step_times.quantile(0.5),
            tokens_per_second=ratio(steady.count("real_tokens"), steady.wall_seconds),
            samples_per_second=ratio(steady.count("samples"), steady.wall_seconds),
            is_finished=end is not None and end.reason == "finished",
            node=self.record.start.host,
            wait_seconds=ratio(steady.host_wait_seconds, steady.steps),
            work_seconds=total(self.work.values()),
        )


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
        folded.step_times.merge(block.step_times)
        folded.steady_span_seconds += total(block.spans.values()) or 0.0
    for block in steady:
        is_device = folded.steady.source == "device"
        folded.waits.merge((block.device_waits if is_device else block.host_waits) or {})
    per_step = round(ratio(folded.steady.fetches, folded.steady.steps) or 1)
    if per_step > 1:
        # Where the trainer did not say it, it is what was counted.
        settings.setdefault("gradient_accumulation", per_step)
    if steady:
        folded.steady_from = finite(record.start.time + steady[0].begin)
        folded.steady_to = finite(record.start.time + steady[-1].t)
    return folded


def add_up_looks(blocks: Sequence[StepBlock], place: str = "") -> dict[str, float]:
    """Seconds by phase of the looks inside of steps, or of those that are told after a place."""
    found: dict[str, float] = defaultdict(float)
    for block in blocks:
        for name, seconds in block.phases.items():
            outer, _, phase = name.partition("/") if "/" in name else ("", "", name)
            if outer == place:
                found[phase] += finite(seconds) or 0.0
    return found


def find_capacity(settings: Mapping[str, Any]) -> int | None:
    """Batches that the loader's workers may have ready."""
    workers, prefetch = number_of(settings, "num_workers"), number_of(settings, "prefetch_factor")
    if workers is None or (prefetch is None and workers):
        return None
    return round(workers * (prefetch or 0))


def mean_depth(blocks: Sequence[StepBlock]) -> float | None:
    """Ready batches, mean over fetches; ``None`` where nothing was looked at."""
    known = [block for block in blocks if finite(block.queue_depth) is not None]
    depths = (block.fetches * (block.queue_depth or 0.0) for block in known)
    return ratio(sum(depths), sum(block.fetches for block in known))


def find_drain(blocks: Sequence[StepBlock], settings: Mapping[str, Any]) -> Drain | None:
    """How the queue drains over the blocks of the steady phase; ``None``: it does not, or what the
    loader lacks is too little to matter."""
    known = [block for block in blocks if finite(block.queue_depth) is not None]
    if first := _find_dry(blocks, settings):
        since, before = WaitTotals(), blocks[first - 1]
        for block in blocks[first:]:
            since.add_block(block)
        if (since.stall_fraction or 0.0) >= thresholds.FREE_STALL:
            is_over = thresholds.is_long_enough(since.fetches, since.wall_seconds)
            return Drain(before.first_step + before.steps, first, is_over)
    half = len(known) // 2
    earlier, later = mean_depth(known[:half]), mean_depth(known[half:])
    if earlier is None or later is None:
        return None
    apart = sum(block.fetches for block in known) / 2
    least = max(thresholds.LEAST_FALL_BATCHES, thresholds.FREE_STALL * apart)
    return Drain() if earlier - later >= least else None


def _find_dry(blocks: Sequence[StepBlock], settings: Mapping[str, Any]) -> int:
    """The first block after the queue was found empty, and stayed so but for little; 0 where it did
    not, or was empty all along."""
    capacity, workers = find_capacity(settings) or 0, number_of(settings, "num_workers")
    lying_about = min(thresholds.DRAINED_SHARE * capacity, workers or thresholds.DRAINED_BATCHES)
    level = max(thresholds.DRAINED_BATCHES, lying_about)
    most = min(4 * level, max(2.0, capacity / 2))
    for number, block in enumerate(blocks):
        if (depth := finite(block.queue_depth)) is not None and depth < level:
            has_stayed = number > 0 and (mean_depth(blocks[number:]) or 0.0) < most
            return number + 1 if has_stayed else 0
    return 0


class Pattern(NamedTuple):
    """When the waits come."""

    kind: Literal["steady", "burst", "periodic"] = "steady"
    period_fetches: float | None = None
    period_of: Literal["rows", "epoch", ""] = ""
    """What the period follows."""


def find_pattern(waits: Histogram, waits_by_cause: Mapping[str, float]) -> Pattern:
    """The pattern of all waits, by how many of them are long, given what caused them."""
    bins = sorted(waits.durations(), reverse=True)
    whole = sum(map(math.prod, bins))
    left, least = whole / 2, 0.0
    for seconds, count in bins:
        left -= seconds * count
        if left <= 0:
            least = seconds / 3
            break
    long = [(seconds, count) for seconds, count in bins if seconds >= least]
    number, held = sum(count for _, count in long), sum(map(math.prod, long))
    if number < 2 or not whole:
        return Pattern()
    period = waits.total() / number
    if waits_by_cause.get("epoch", 0.0) >= thresholds.MOST_WAITING:
        return Pattern("periodic", period, "epoch")  # no queue reaches across epochs
    if number > _MOST_LONG * waits.total() or held < _LEAST_HELD * whole:
        return Pattern()
    return Pattern("burst" if period <= DEEPEST_QUEUE else "periodic", period, "rows")


def find_drift(blocks: Sequence[StepBlock]) -> tuple[float, float] | None:
    """Seconds of a step without its waits, in the first third of the steps and in the last, where
    they grew all the while."""
    own = [
        (block.wall_seconds - block.host_wait_seconds) / block.steps
        for block in blocks
        for _ in range(block.steps)
    ]
    third = len(own) // 3
    if third < _LEAST_DRIFTING:
        return None
    first, middle, last = (
        statistics.median(own[part * third : (part + 1) * third]) for part in range(3)
    )
    grows = first * _LEAST_DRIFT <= last and first <= middle <= last
    return (first, last) if grows and first > 0 else None


def number_of(settings: Mapping[str, Any], name: str) -> float | None:
    """A setting that is a number."""
    value = settings.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return finite(value) if is_number else None


@dataclass(slots=True)
class Job:
    """What all ranks lose together to waiting for data, and to each other."""

    ranks: Sequence[RankFigures]
    chosen: RankFigures = field(init=False)
    """The rank that decides about the data: it causes most of the waiting, of those that recorded
    enough to be judged; or it reads for all. Without ranks, one that recorded nothing."""
    source: StallSource = ""
    host_stall_fraction: float | None = None
    device_stall_fraction: float | None = None
    figures: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(JOB_FIGURES))
    skew_share: float | None = None
    """Share of the longest rank's communication that is waiting for a slower rank."""
    slow_rank: int | None = None
    """The rank the others wait for: it spends least time in collectives."""
    straggler_part: str = ""
    """data or compute."""
    straggler_phase: str = ""
    """In which it works longer than the others, by looks at the stacks."""
    copies: int = 1
    """Ranks that count the same tokens."""
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def stall_fraction(self) -> float | None:
        """The device's where it is known, else the host's."""
        is_device = self.source == "device"
        return self.device_stall_fraction if is_device else self.host_stall_fraction

    @property
    def world_size(self) -> int:
        """Ranks that there were, recorded or not."""
        sizes = (rank.record.start.world_size for rank in self.ranks)
        return max([len(self.ranks), *sizes])

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 reads for all."""
        return any(rank.settings.get("dispatcher") for rank in self.ranks)

    @property
    def readers(self) -> list[RankFigures]:
        """Ranks that fetch."""
        return [rank for rank in self.ranks if rank.steady.fetches]


def fold_job(ranks: Sequence[RankFigures]) -> Job:
    """Hold the ranks against each other."""
    job = Job(ranks)
    _fold_stall(job)
    _find_straggler(job, _compare_windows(job))
    _find_replicas(job)
    return job


def _fold_stall(job: Job) -> None:
    """The waits of one rank alone, or of the one that reads for all, are the job's."""
    readers = [rank for rank in job.ranks if rank.rank == 0 and job.is_dispatched]
    steady = [rank for rank in job.ranks if rank.steady.steps and rank.steady.wall_seconds > 0]
    steps = find_common_steps([rank.steady_blocks for rank in steady])
    if readers or len(steady) < 2 or not steps:
        nobody = fold_rank(RankRecord(Start(time=0.0, pid=0, host="", version="")))
        job.chosen = max(readers or steady or job.ranks or [nobody], key=_own_waiting)
        own = job.chosen.steady
        job.source, job.host_stall_fraction = own.source, own.host_stall_fraction
        job.device_stall_fraction = own.device_stall_fraction
        return
    blocks = [rank.steady_blocks for rank in steady]
    is_device = all(rank.steady.source == "device" for rank in steady if rank.steady.fetches)
    waits = fold_waits(blocks, steps, "device" if is_device else "host")
    caused = {rank.rank: seconds for rank, seconds in zip(steady, waits, strict=True)}
    most = max(rank.steady.steps for rank in steady)
    whole = [rank for rank in steady if rank.steady.steps >= LEAST_PRESENCE * most]
    job.chosen = chosen = max(
        [rank for rank in whole if rank.is_long_enough] or whole,
        key=lambda rank: (caused[rank.rank], *_own_waiting(rank)),
    )
    wall = max(0.0, wall_between(chosen.steady_blocks, steps) - others_span_seconds(chosen, whole))
    timed = chosen.steady.device_wall_seconds if is_device else chosen.steady.wall_seconds
    stall = min(1.0, ratio(sum(waits), wall * timed / chosen.steady.wall_seconds) or 0.0)
    job.source, job.host_stall_fraction = "host", stall
    if is_device:
        job.source, job.device_stall_fraction = "device", stall
        # Once steps are condensed, their waits are those of the device alone; then the host's are
        # at least what one rank waits.
        if all(block.hosts is not None for own in blocks for block in own):
            host_seconds = sum(fold_waits(blocks, steps, "host"))
            job.host_stall_fraction = min(1.0, ratio(host_seconds, wall) or 0.0)
        else:
            job.host_stall_fraction = max(rank.steady.host_stall_fraction or 0.0 for rank in steady)


def _own_waiting(rank: RankFigures) -> tuple[bool, float, int, int]:
    stall = rank.steady.stall_fraction
    return rank.is_long_enough, -1.0 if stall is None else stall, rank.steady.steps, -rank.rank


def others_span_seconds(rank: RankFigures, ranks: Sequence[RankFigures]) -> float:
    """Time in a rank's steady steps in which another one did what is no training.

    Ranks go in step, so what one brackets alone, a checkpoint say, lies in the others' steps.
    """
    longest = max((other.steady_span_seconds for other in ranks), default=0.0)
    return max(0.0, longest - rank.steady_span_seconds)


def _compare_windows(job: Job) -> float:
    """What profiler windows tell. Those of all ranks are compared, each collective with the same
    one of the other ranks. Share of them that waits for a slower rank."""
    seen = {rank.rank: window for rank in job.ranks if (window := rank.window) is not None}
    if not seen:
        return 0.0
    own = job.chosen
    if own.window is None:
        own = next(rank for rank in job.ranks if rank.rank in seen)
    exposed = [rank.profiled_share("exposed_communication_seconds") for rank in job.ranks]
    job.figures["device_idle_fraction"] = own.profiled_share("device_idle_seconds")
    job.figures["exposed_communication_fraction"] = max(known(exposed), default=None)
    why, no_work = seen[own.rank].reasons, "the profiler window has no GPU work"
    no_collective = "the profiler window contains no collective"
    job.reasons |= {
        "device_idle_fraction": why.get("device_idle_seconds", no_work),
        "exposed_communication_fraction": why.get("exposed_communication_seconds", no_collective),
    }
    times = [window.collectives for window in seen.values()]
    if len(job.ranks) < 2:
        reason = "there is only one rank, so there is no communication"
    elif len(seen) < len(job.ranks):
        reason = f"only {len(seen)} of {len(job.ranks)} ranks recorded a profiler window"
    elif not any(times):
        reason = no_collective
    elif len({(window.first_step, len(window.collectives)) for window in seen.values()}) > 1:
        reason = (
            "no profiler window holds the same collectives on all ranks, so they cannot be "
            "compared one by one"
        )
    else:
        pure = total(map(min, zip(*times, strict=True))) or 0.0
        sums = [total(own) or 0.0 for own in times]
        wall = middle(window.wall_seconds for window in seen.values())
        job.figures["pure_communication_fraction"] = ratio(pure, wall)
        job.skew_share = ratio(max(sums) - pure, max(sums))
        job.slow_rank = None if job.skew_share is None else list(seen)[sums.index(min(sums))]
        return ratio(max(sums) - pure, wall) or 0.0
    job.reasons["pure_communication_fraction"] = reason
    return 0.0


def _find_straggler(job: Job, skew_fraction: float) -> None:
    """The rank that costs the others most; or why nobody knows."""
    reason = "a rank that computes longer shows only in a profiler window; use fast-axolotl measure"
    reason += " --profile-steps 5"
    found: list[tuple[float, int, str]] = []
    steady = [rank for rank in job.ranks if rank.steady.steps]
    if len(steady) < 2:
        reason = "only one rank has steady steps, so no rank can be slower than the others"
    else:
        stalls = {rank.rank: rank.steady.stall_fraction or 0.0 for rank in steady}
        late = max(stalls, key=stalls.__getitem__)
        share = stalls.pop(late) - max(stalls.values())
        if share >= LEAST_SHARE * (job.stall_fraction or 0.0) and not job.is_dispatched:
            found.append((share, late, "data"))
        if job.slow_rank is not None:
            reason = ""
            if (job.skew_share or 0.0) >= thresholds.LEAST_SKEW_SHARE:
                found.append((skew_fraction, job.slow_rank, "compute"))
        works = {rank.rank: rank.work for rank in steady}
        if all(works.values()):
            reason = ""
            slowest = max(works, key=lambda number: sum(works[number].values()))
            own = works.pop(slowest)
            usual = {
                phase: middle(work.get(phase, 0.0) for work in works.values()) or 0.0
                for phase in own.keys() | set().union(*works.values())
            }
            excess = {phase: own.get(phase, 0.0) - seconds for phase, seconds in usual.items()}
            totals = next(rank.steady for rank in steady if rank.rank == slowest)
            share = sum(excess.values()) * totals.steps / (totals.wall_seconds or 1.0)
            if share >= LEAST_WORK_SHARE:
                found.append((share, slowest, "compute"))
                job.straggler_phase = max(excess, key=lambda phase: excess[phase])
    fraction, rank, part = max(found, default=(0.0, 0, ""))
    if fraction >= LEAST_FRACTION:
        job.figures |= {"straggler_fraction": fraction, "straggler_rank": rank}
        job.straggler_part = part
    else:
        job.figures["straggler_fraction"] = None if reason else 0.0
        job.reasons["straggler_rank"] = reason or "no rank makes the others wait"
        job.reasons["straggler_fraction"] = reason


def _find_replicas(job: Job) -> None:
    """How the ranks share the batches, by the settings."""
    world_size = job.world_size
    known: dict[str, int] = {}
    for rank in job.ranks:
        config = rank.settings.get("config")
        for name, others in _SIZES.items():
            own = config if isinstance(config, Mapping) else {}
            sizes = [number_of(rank.settings, name), *(number_of(own, key) for key in others)]
            if whole := [round(size) for size in sizes if size is not None and size >= 1]:
                known[name] = max(whole)
    copies = math.prod(known.values())
    groups = None
    if world_size < 2:
        groups = world_size or None
    elif job.is_dispatched:
        # Rank 0 counts all of it, once.
        groups = max(1, world_size // copies) if known else None
    elif known and world_size % copies == 0:
        job.copies, groups = copies, world_size // copies
    else:
        job.reasons["data_parallel_size"] = (
            f"tokens, samples and rows are summed over {world_size} ranks: it is not known "
            "whether ranks of a tensor or context parallel group received the same batches; pass "
            "the sizes with meter.settings(tensor_parallel=…, context_parallel=…)"
        )
    job.figures["data_parallel_size"] = groups
