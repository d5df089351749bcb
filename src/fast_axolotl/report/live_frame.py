"""What a live view shows at one moment: the figures of now, beside those of the summary.

*Now* is the newest blocks that hold five seconds of steps, and the samples of the last five
seconds. The marks of the stall cover time evenly: one a second, or one in several where blocks are
longer. As in the summary, the stall of a run is that of the rank that stalls most; with a
dispatcher, of rank 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fast_axolotl.record import (
    DeviceSample,
    RankRecord,
    RunRecord,
    RunSummary,
    StepBlock,
    SystemSample,
)
from fast_axolotl.record.arithmetic import ratio
from fast_axolotl.record.waits import WaitTotals, join_ranks

NOW_SECONDS = 5.0
"""How far back *now* reaches: long enough to be calm, short enough to follow a change."""
MOST_MARKS = 128
_MOST_BLOCKS = 2048
"""Of all ranks together, to draw marks from."""
_MARK_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallMark:
    """The stall of a short stretch of time."""

    share: float | None
    is_warmup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """One rank at this moment."""

    rank: int
    stall: float | None
    """Of the window; of now where there is no steady step yet."""
    stall_now: float | None
    step_seconds: float | None
    """Median of the window, else of now."""
    samples_per_second: float | None
    tokens_per_second: float | None
    state: str
    """How it ended; empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything that is drawn."""

    title: str
    """What is watched: a folder, or a process."""
    summary: RunSummary
    step: int | None
    loss: float | None
    has_begun: bool
    """Whether anything is recorded."""
    has_blocks: bool
    """Whether there is a step in the window."""
    is_outside: bool
    """Whether it is a process that records nothing itself."""
    stall_now: float | None
    marks: tuple[StallMark, ...]
    mark_seconds: float
    rows_now: float | None
    tokens_now: float | None
    working_set_bytes: int | None
    """The latest ΣPSS, else the resident size; as all below up to the GPUs, of the node that the
    summary's figures are of."""
    processes: int | None
    cpu_cores: float | None
    read_now: float | None
    swap_in_now: float | None
    swap_out_now: float | None
    gpus: tuple[DeviceSample, ...]
    ranks: tuple[RankLine, ...]
    """Of every rank that has begun a record."""
    stepless_seconds: float | None
    """Since the last news of a step; ``None`` where nobody counts steps."""
    window_seconds: float | None
    """Since the window was reset; ``None`` where it never was."""
    is_over: bool
    """Whether the run has ended: *now* is its end then."""
    log: tuple[str, ...]
    """The last lines that the command printed."""
    stage: tuple[str, ...]
    """Of a protocol: which of its runs this is, and how long the rest takes, in a few words."""


def make_frame(
    record: RunRecord,
    summary: RunSummary,
    *,
    title: str,
    is_outside: bool = False,
    stepless_seconds: float | None = None,
    window_seconds: float | None = None,
    is_over: bool = False,
    log: Sequence[str] = (),
    stage: Sequence[str] = (),
) -> Frame:
    """The frame of a record as it is now."""
    ranks = [record.ranks[number] for number in sorted(record.ranks)]
    recent: list[list[StepBlock]] = []
    """Of each rank, the newest blocks that hold enough seconds, all of one phase."""
    summaries = {rank.rank: rank for rank in summary.ranks}
    lines = []
    for rank in ranks:
        totals, known = WaitTotals(), summaries.get(rank.start.rank)
        blocks: list[StepBlock] = []
        for block in reversed(rank.blocks):
            is_other = bool(blocks) and block.phase != blocks[0].phase
            if totals.wall_seconds >= NOW_SECONDS or is_other:
                break
            blocks.append(block)
            totals.add_block(block)
        recent.append(blocks)
        stall, step = totals.stall_fraction, ratio(totals.wall_seconds, totals.steps)
        if known is not None and known.stall_fraction is not None:
            stall = known.stall_fraction
        if known is not None and known.step_p50_seconds is not None:
            step = known.step_p50_seconds
        lines.append(
            RankLine(
                rank=rank.start.rank,
                stall=stall,
                stall_now=totals.stall_fraction,
                step_seconds=step,
                samples_per_second=_rate(blocks, "samples"),
                tokens_per_second=_rate(blocks, "real_tokens"),
                state="" if rank.end is None else rank.end.reason,
            )
        )
    # The ranks whose waits are the run's.
    deciding = list(range(len(ranks)))
    if any(rank.values.get("dispatcher") for rank in ranks):
        deciding = [at for at in deciding if ranks[at].start.rank == 0] or deciding
    marks, mark_seconds = _stall_marks([ranks[at] for at in deciding])
    newest, now = [recent[at][::-1] for at in deciding], WaitTotals()
    for block in join_ranks(newest)[1] if any(newest) else ():
        now.add_block(block)
    rows_now = _sum_rates(recent, "rows")
    if rows_now is None and not summary.settings.get("sample_packing"):
        # Of packed samples the rows are unknown, unless they were counted.
        rows_now = _sum_rates(recent, "samples") or None
    last_blocks = [rank.blocks[-1] for rank in ranks if rank.blocks]
    losses = record.find_losses()
    system = record.systems.get(summary.node, record.system)
    samples = system.samples if system is not None else []
    last = samples[-1] if samples else None
    sizes = (sample.working_set_bytes for sample in reversed(samples))
    sets = (size for size in sizes if size is not None)
    return Frame(
        title=title,
        summary=summary,
        step=max((block.first_step + block.steps for block in last_blocks), default=None),
        loss=losses[-1].values["loss"] if losses else None,
        has_begun=bool(ranks or record.systems),
        has_blocks=any(recent),
        is_outside=is_outside,
        stall_now=now.stall_fraction,
        marks=marks,
        mark_seconds=mark_seconds,
        rows_now=rows_now,
        tokens_now=_sum_rates(recent, "real_tokens"),
        working_set_bytes=next(sets, None if last is None else last.rss_bytes),
        processes=None if last is None else last.processes,
        cpu_cores=_growth(samples, "cpu_seconds"),
        read_now=_growth(samples, "read_bytes"),
        swap_in_now=_growth(samples, "swap_in_bytes"),
        swap_out_now=_growth(samples, "swap_out_bytes"),
        gpus=() if last is None else last.gpus,
        ranks=tuple(lines),
        stepless_seconds=stepless_seconds if ranks else None,
        window_seconds=window_seconds,
        is_over=is_over,
        log=tuple(log),
        stage=tuple(stage),
    )


def _rate(blocks: Sequence[StepBlock], name: str) -> float | None:
    counts = [getattr(block, name) for block in blocks]
    if None in counts:
        return None
    return ratio(sum(counts), sum(block.wall_seconds for block in blocks))


def _sum_rates(recent: Sequence[Sequence[StepBlock]], name: str) -> float | None:
    """Over the ranks that fetch; ``None`` where one of them did not count."""
    fetching = [blocks for blocks in recent if any(block.fetches for block in blocks)]
    rates = [_rate(blocks, name) for blocks in fetching]
    return None if not rates or None in rates else sum(rate or 0.0 for rate in rates)


def _stall_marks(ranks: Sequence[RankRecord]) -> tuple[tuple[StallMark, ...], float]:
    """The stall of all ranks together, stretch by stretch, and how long a stretch is."""
    lengths = [_seconds(block) for rank in ranks[:8] for block in rank.blocks[-16:]]
    typical = statistics.median(lengths) if lengths else 0.0
    # A mark holds about one block or more; blocks of a second are a little longer than that.
    fitting = (seconds for seconds in _MARK_SECONDS if typical <= 1.5 * seconds)
    mark_seconds = next(fitting, _MARK_SECONDS[-1])
    most = max(32, _MOST_BLOCKS // max(1, len(ranks)))
    blocks = [rank.blocks[-most:] for rank in ranks]
    if not any(blocks):
        return (), mark_seconds
    at, joined = join_ranks(blocks)
    spread = _spread(ranks[at], joined, mark_seconds)
    if not spread:
        return (), mark_seconds
    # Before the blocks that are looked at begin, a rank waited as well, only nobody knows how long.
    known = [
        int((rank.start.time + own[0].t - _seconds(own[0])) / mark_seconds)
        for rank, own in zip(ranks, blocks, strict=True)
        if len(rank.blocks) > most
    ]
    first = max(min(spread), *known, max(spread) - MOST_MARKS + 1)
    marks = []
    for place in range(first, max(spread) + 1):
        totals, warmup = spread.get(place) or (WaitTotals(), 0.0)
        marks.append(StallMark(share=totals.stall_fraction, is_warmup=warmup > 0))
    return tuple(marks), mark_seconds


def _seconds(block: StepBlock) -> float:
    return block.wall_seconds + sum(block.spans.values())


def _spread(
    rank: RankRecord, blocks: Sequence[StepBlock], mark_seconds: float
) -> dict[int, tuple[WaitTotals, float]]:
    """Waits of the blocks and their part of warm-up, shared out to the marks that they cover."""
    spread: dict[int, tuple[WaitTotals, float]] = {}
    for block in blocks:
        wall, host, device = block.wall_seconds, block.host_wait_seconds, block.device_wait_seconds
        seconds = _seconds(block)
        if not math.isfinite(block.t + seconds + host + (device or 0.0)):
            continue
        warmup_share = 1.0 if block.phase == "warmup" else 0.0
        end = (rank.start.time + block.t) / mark_seconds
        length = max(seconds / mark_seconds, 1e-9)
        begin = end - min(length, MOST_MARKS)
        for place in range(int(begin), int(end) + 1):
            part = (min(end, place + 1) - max(begin, place)) / length
            if part > 0:
                totals, warmup = spread.get(place) or (WaitTotals(), 0.0)
                totals.add(
                    wall_seconds=part * wall,
                    host_wait_seconds=part * host,
                    device_wait_seconds=None if device is None else part * device,
                )
                spread[place] = totals, warmup + part * warmup_share
    return spread


def _growth(samples: Sequence[SystemSample], name: str) -> float | None:
    """Of a counter per second, now: since the last sample that is five seconds old."""
    if len(samples) < 2:
        return None
    last = samples[-1]
    old = (one for one in reversed(samples[:-1]) if last.t - one.t >= NOW_SECONDS)
    first = next(old, samples[0])
    before, after = getattr(first, name), getattr(last, name)
    if before is None or after is None or last.t <= first.t:
        return None
    return float(max(0.0, (after - before) / (last.t - first.t)))
