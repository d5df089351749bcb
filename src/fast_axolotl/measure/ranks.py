"""One rank's lines folded into totals, and several ranks held against each other.

The steady phase is what counts: warm-up is left out, the replay of a cached batch is kept apart.
Everything is a sum first and a ratio last, so a block may hold one step or a thousand. The cost is
one pass over the lines.

Ranks wait for each other in every collective, so the slowest of them sets the pace of all. The rank
that waits most for data therefore decides about the data; with a dispatcher it is rank 0, which
reads for all, and whose waits look like communication on the others. A rank that recorded too
little to be judged decides nothing, where another has recorded more.

Where the ready queue ran dry in the steady phase (see ``ready_queue``), the steps before that are
warm-up: a queue that was full hid what the loader lacks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fast_axolotl.measure.ready_queue import Drain, find_capacity, find_drain
from fast_axolotl.record import Histogram, ProfileWindow, RankRecord, RankSummary, StepBlock
from fast_axolotl.record.arithmetic import finite, middle, ratio, total
from fast_axolotl.record.thresholds import is_long_enough

__all__ = [
    "Communication",
    "RankFigures",
    "Totals",
    "choose_rank",
    "compare_communication",
    "compare_own_time",
    "fold_rank",
    "summarise_rank",
]

LEAST_DEVICE_SHARE = 0.9
"""Share of the steady time over which device waits must be known to stand for all of it."""


@dataclass(slots=True)
class Totals:
    """Sums over the blocks of one phase."""

    steps: int = 0
    fetches: int = 0
    wall_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    device_wall_seconds: float = 0.0
    """Wall time of the blocks whose device waits are known."""
    counts: dict[str, int] = field(default_factory=dict)
    """Samples, rows, tokens and bytes of the blocks that counted them."""
    uncounted: set[str] = field(default_factory=set)
    """What at least one block with fetches did not count."""

    def add(self, block: StepBlock) -> None:
        """Add one block."""
        wall = finite(block.wall_seconds) or 0.0
        self.steps += block.steps
        self.fetches += block.fetches
        self.wall_seconds += wall
        self.host_wait_seconds += finite(block.host_wait_seconds) or 0.0
        device = finite(block.device_wait_seconds)
        if device is not None:
            self.device_wait_seconds += device
            self.device_wall_seconds += wall
        for name in _COUNTS:
            value = getattr(block, name)
            if finite(value) is not None:
                self.counts[name] = self.counts.get(name, 0) + value
            elif block.fetches:
                self.uncounted.add(name)

    def count(self, name: str) -> int | None:
        """How much of something there was; ``None`` where a part was not counted. The lengths of
        sequences are looked at now and then only, so they are never whole."""
        is_sampled = name in ("sequence_tokens", "sequence_squares")
        return None if name in self.uncounted and not is_sampled else self.counts.get(name)


_COUNTS = (
    "samples",
    "rows",
    "real_tokens",
    "trainable_tokens",
    "padded_tokens",
    "num_bytes",
    "sequence_tokens",
    "sequence_squares",
)


@dataclass(slots=True)
class RankFigures:
    """What one rank's lines come to."""

    record: RankRecord
    settings: dict[str, Any]
    warmup: Totals
    steady: Totals
    replay: Totals
    host_waits: Histogram
    device_waits: Histogram
    step_times: Histogram
    steady_blocks: Sequence[StepBlock]
    """Those the figures are made of."""
    drain: Drain | None
    """What became of the ready queue, if it drained."""
    spans: dict[str, float]
    steady_from: float | None
    """Seconds since 1970."""
    steady_to: float | None

    @property
    def rank(self) -> int:
        """Its number."""
        return self.record.start.rank

    @property
    def source(self) -> Literal["device", "host", ""]:
        """Whose waits the stall is made of."""
        if not self.steady.steps:
            return ""
        known = ratio(self.steady.device_wall_seconds, self.steady.wall_seconds)
        return "device" if known is not None and known >= LEAST_DEVICE_SHARE else "host"

    @property
    def host_stall(self) -> float | None:
        """Share of the time in which the host waited."""
        return ratio(self.steady.host_wait_seconds, self.steady.wall_seconds)

    @property
    def device_stall(self) -> float | None:
        """Share of the time in which the device had nothing to run for want of data."""
        if self.source != "device":
            return None
        return ratio(self.steady.device_wait_seconds, self.steady.device_wall_seconds)

    @property
    def stall(self) -> float | None:
        """The device's where it is known, else the host's."""
        return self.device_stall if self.source == "device" else self.host_stall

    @property
    def waits(self) -> Histogram:
        """The waits of single fetches that the stall is made of."""
        return self.device_waits if self.source == "device" else self.host_waits

    @property
    def own_seconds(self) -> float | None:
        """Steady time less the waits for data."""
        stall = self.stall
        return None if stall is None else self.steady.wall_seconds * (1.0 - stall)

    @property
    def is_long_enough(self) -> bool:
        """Whether its steady phase can be judged."""
        return is_long_enough(self.steady.fetches, self.steady.wall_seconds)

    def rate(self, name: str) -> float | None:
        """How much of something there was per second."""
        return ratio(self.steady.count(name), self.steady.wall_seconds)

    def setting(self, *names: str) -> float | None:
        """The first of these settings that is a number."""
        for name in names:
            value = self.settings.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return finite(value)
        return None


def fold_rank(record: RankRecord) -> RankFigures:
    """Add up the lines of one rank."""
    settings = record.values
    steady = [block for block in record.blocks if block.phase == "steady"]
    drain = find_drain(steady, find_capacity(settings))
    hidden, steady = _set_apart(steady, drain)
    phases: dict[str, Totals] = {"warmup": Totals(), "steady": Totals(), "replay": Totals()}
    spans: dict[str, float] = {}
    for block in record.blocks:
        if block.phase != "steady":
            phases.setdefault(block.phase, Totals()).add(block)
        for name, seconds in block.spans.items():
            spans[name] = spans.get(name, 0.0) + (finite(seconds) or 0.0)
    for block in hidden:
        phases["warmup"].add(block)
    hosts, devices, times = Histogram(), Histogram(), Histogram()
    for block in steady:
        phases["steady"].add(block)
        hosts.merge(block.host_waits)
        devices.merge(block.device_waits or {})
        times.merge(block.step_times)
    begin, end = _steady_window(record, steady)
    return RankFigures(
        record=record,
        settings=settings,
        warmup=phases["warmup"],
        steady=phases["steady"],
        replay=phases["replay"],
        host_waits=hosts,
        device_waits=devices,
        step_times=times,
        steady_blocks=steady,
        drain=drain,
        spans=spans,
        steady_from=begin,
        steady_to=end,
    )


def _set_apart(
    blocks: list[StepBlock], drain: Drain | None
) -> tuple[list[StepBlock], list[StepBlock]]:
    """The blocks that a full queue hid, and those that count."""
    if drain is None or not drain.is_over:
        return [], blocks
    return blocks[: drain.first_block], blocks[drain.first_block :]


def _steady_window(
    record: RankRecord, blocks: Sequence[StepBlock]
) -> tuple[float | None, float | None]:
    if not blocks:
        return None, None
    first = blocks[0]
    took = (finite(first.wall_seconds) or 0.0) + (total(first.spans.values()) or 0.0)
    start = record.start.time
    return finite(start + first.t - took), finite(start + blocks[-1].t)


def summarise_rank(rank: RankFigures) -> RankSummary:
    """The line of one rank in the table of ranks."""
    end = rank.record.end
    return RankSummary(
        rank=rank.rank,
        steps=rank.steady.steps,
        fetches=rank.steady.fetches,
        stall_fraction=rank.stall,
        host_stall_fraction=rank.host_stall,
        step_p50_seconds=rank.step_times.quantile(0.5),
        tokens_per_second=rank.rate("real_tokens"),
        samples_per_second=rank.rate("samples"),
        is_finished=end is not None and end.reason == "finished",
    )


def choose_rank(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """The rank that decides about the data: it waits most of those that recorded enough to be
    judged, or it reads for all."""
    if not ranks:
        return None
    if any(rank.settings.get("dispatcher") for rank in ranks):
        readers = [rank for rank in ranks if rank.rank == 0]
        if readers:
            return readers[0]
    able = [rank for rank in ranks if rank.is_long_enough] or ranks
    return max(able, key=lambda rank: (_or(rank.stall, -1.0), rank.steady.steps, -rank.rank))


def compare_own_time(ranks: Sequence[RankFigures]) -> float | None:
    """How far the slowest rank is behind the median: time a step, less its waits for data."""
    own = [ratio(rank.own_seconds, rank.steady.steps) for rank in ranks]
    known = [value for value in own if value is not None]
    if len(known) < 2:
        return None
    half = statistics.median(known)
    return ratio(max(known) - half, half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What the profiler windows of the ranks say together."""

    device_idle_fraction: float | None = None
    exposed_fraction: float | None = None
    """Of the rank that shows most of it."""
    pure_fraction: float | None = None
    """Every collective at its least duration across ranks: what is over is waiting for a rank."""
    skew_share: float | None = None
    """Share of the longest rank's communication that is waiting for a slower rank."""
    slow_rank: int | None = None
    """The rank the others wait for: it spends least time in collectives."""
    reasons: Mapping[str, str] = field(default_factory=dict)


_NO_WINDOW = "no profiler window was recorded: fast-axolotl run --measure --profile-steps 5"


def compare_communication(
    ranks: Sequence[RankFigures], chosen: RankFigures | None
) -> Communication:
    """Compare the last profiler windows of the ranks, collective by collective."""
    windows = {rank.rank: rank.record.windows[-1] for rank in ranks if rank.record.windows}
    if not windows:
        names = ("device_idle", "exposed_communication", "pure_communication")
        return Communication(reasons={f"{name}_fraction": _NO_WINDOW for name in names})
    own = windows.get(chosen.rank) if chosen is not None else None
    own = own or next(iter(windows.values()))
    exposed = [
        ratio(window.exposed_communication_seconds, window.wall_seconds)
        for window in windows.values()
    ]
    shown = [value for value in exposed if value is not None]
    pure, reason = _pure_seconds(windows, len(ranks))
    sums = {rank: total(window.collectives) or 0.0 for rank, window in windows.items()}
    longest = max(sums.values())
    wall = middle(window.wall_seconds for window in windows.values())
    skew = None if pure is None else ratio(longest - pure, longest)
    return Communication(
        device_idle_fraction=ratio(own.device_idle_seconds, own.wall_seconds),
        exposed_fraction=max(shown) if shown else None,
        pure_fraction=ratio(pure, wall),
        skew_share=skew,
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


def _pure_seconds(windows: Mapping[int, ProfileWindow], num_ranks: int) -> tuple[float | None, str]:
    lists = [window.collectives for window in windows.values()]
    if num_ranks < 2:
        return None, "there is one rank: communication takes two"
    if len(lists) < num_ranks:
        return None, f"{len(lists)} of {num_ranks} ranks recorded a profiler window"
    counts = {len(one) for one in lists}
    if len(counts) > 1:
        return None, (
            f"the ranks' windows hold between {min(counts)} and {max(counts)} collectives, "
            "which cannot be compared one by one"
        )
    if counts == {0}:
        return None, "the profiler window saw no collective"
    return total(min(same) for same in zip(*lists, strict=True)), ""


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
