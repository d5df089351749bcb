"""What a live view shows at one moment: the figures of now, beside those of the summary.

*Now* is the newest blocks that hold five seconds of steps, and the samples of the last five
seconds. The marks of the stall cover time evenly: one a second, or one in several where blocks are
longer. As in the summary, the stall of a run is that of the rank that stalls most; with a
dispatcher, of rank 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fast_axolotl.record import (
    DeviceSample,
    RankRecord,
    RunRecord,
    RunSummary,
    StepBlock,
    SystemSample,
)

__all__ = ["Frame", "RankLine", "StallMark", "make_frame"]

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
    is_training: bool
    """Whether any rank has begun a record."""
    is_outside: bool
    """Whether it is a process that records nothing itself."""
    stall_now: float | None
    marks: tuple[StallMark, ...]
    mark_seconds: float
    rows_now: float | None
    tokens_now: float | None
    working_set_bytes: int | None
    """The latest ΣPSS, else the resident size."""
    processes: int | None
    cpu_cores: float | None
    read_now: float | None
    swap_in_now: float | None
    swap_out_now: float | None
    gpus: tuple[DeviceSample, ...]
    ranks: tuple[RankLine, ...]
    stepless_seconds: float | None = None
    """Since the last news of a step; ``None`` where nobody counts steps."""
    window_seconds: float | None = None
    """Since the window was reset; ``None`` where it never was."""
    is_over: bool = False
    """Whether the run has ended: *now* is its end then."""
    log: tuple[str, ...] = ()
    """The last lines that the command printed."""
    stage: tuple[str, ...] = ()
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
    readers = _deciding(ranks)
    samples = record.system.samples if record.system is not None else []
    recent = [_recent(rank) for rank in ranks]
    mark_seconds = _choose_mark_seconds(readers)
    return Frame(
        title=title,
        summary=summary,
        step=_last_step(ranks),
        loss=_last_loss(record),
        has_begun=bool(ranks) or record.system is not None,
        has_blocks=any(recent),
        is_training=bool(ranks),
        is_outside=is_outside,
        stall_now=_highest(_stall(_recent(rank)) for rank in readers),
        marks=_draw_marks(readers, mark_seconds),
        mark_seconds=mark_seconds,
        rows_now=_rows_now(recent, summary),
        tokens_now=_sum_rates(recent, "real_tokens"),
        working_set_bytes=_working_set(samples),
        processes=samples[-1].processes if samples else None,
        cpu_cores=_growth(samples, "cpu_seconds"),
        read_now=_growth(samples, "read_bytes"),
        swap_in_now=_growth(samples, "swap_in_bytes"),
        swap_out_now=_growth(samples, "swap_out_bytes"),
        gpus=samples[-1].gpus if samples else (),
        ranks=_rank_lines(ranks, summary),
        stepless_seconds=stepless_seconds if ranks else None,
        window_seconds=window_seconds,
        is_over=is_over,
        log=tuple(log),
        stage=tuple(stage),
    )


def _deciding(ranks: Sequence[RankRecord]) -> Sequence[RankRecord]:
    """The ranks whose waits are the run's."""
    if any(rank.values.get("dispatcher") for rank in ranks):
        return [rank for rank in ranks if rank.start.rank == 0] or ranks
    return ranks


def _recent(rank: RankRecord) -> list[StepBlock]:
    """The newest blocks that hold enough seconds, all of one phase."""
    found: list[StepBlock] = []
    seconds = 0.0
    for block in reversed(rank.blocks):
        if seconds >= NOW_SECONDS or (found and block.phase != found[0].phase):
            break
        found.append(block)
        seconds += block.wall_seconds
    return found


def _wait_seconds(block: StepBlock) -> float:
    device = block.device_wait_seconds
    return block.host_wait_seconds if device is None else device


def _stall(blocks: Sequence[StepBlock]) -> float | None:
    return _ratio(sum(map(_wait_seconds, blocks)), sum(block.wall_seconds for block in blocks))


def _rate(blocks: Sequence[StepBlock], name: str) -> float | None:
    counts = [getattr(block, name) for block in blocks]
    if None in counts:
        return None
    return _ratio(sum(counts), sum(block.wall_seconds for block in blocks))


def _ratio(above: float, below: float) -> float | None:
    """``None`` where it is no number."""
    found = above / below if below > 0 else None
    return found if found is not None and math.isfinite(found) else None


def _sum_rates(recent: Sequence[Sequence[StepBlock]], name: str) -> float | None:
    """Over the ranks that fetch; ``None`` where one of them did not count."""
    fetching = [blocks for blocks in recent if any(block.fetches for block in blocks)]
    rates = [_rate(blocks, name) for blocks in fetching]
    return None if not rates or None in rates else sum(rate or 0.0 for rate in rates)


def _rows_now(recent: Sequence[Sequence[StepBlock]], summary: RunSummary) -> float | None:
    rows = _sum_rates(recent, "rows")
    is_packed = bool(summary.settings.get("sample_packing"))
    # Of packed samples the rows are unknown, unless they were told.
    return rows if rows is not None or is_packed else (_sum_rates(recent, "samples") or None)


def _choose_mark_seconds(ranks: Sequence[RankRecord]) -> float:
    """So that a mark holds about one block or more."""
    lengths = [_seconds(block) for rank in ranks[:8] for block in rank.blocks[-16:]]
    typical = statistics.median(lengths) if lengths else 0.0
    # Blocks of a second are a little longer than that.
    return next((one for one in _MARK_SECONDS if typical <= 1.5 * one), _MARK_SECONDS[-1])


def _seconds(block: StepBlock) -> float:
    return block.wall_seconds + sum(block.spans.values())


def _draw_marks(ranks: Sequence[RankRecord], mark_seconds: float) -> tuple[StallMark, ...]:
    most = max(32, _MOST_BLOCKS // max(1, len(ranks)))
    spread = [_spread(rank, rank.blocks[-most:], mark_seconds) for rank in ranks]
    places = {place for one in spread for place in one}
    if not places:
        return ()
    last = max(places)
    # Before the blocks that are looked at begin, a rank waited as well, only nobody knows how long.
    cut = [one for one, rank in zip(spread, ranks, strict=True) if len(rank.blocks) > most]
    known = max((min(one) for one in cut if one), default=min(places))
    first = max(min(places), known, last - MOST_MARKS + 1)
    return tuple(_mark_at(spread, place) for place in range(first, last + 1))


def _mark_at(spread: Sequence[dict[int, list[float]]], place: int) -> StallMark:
    found = [one[place] for one in spread if place in one]
    is_warmup = bool(found) and all(warmup > 0 for _, _, warmup in found)
    shares = (_ratio(waited, wall) for waited, wall, _ in found)
    return StallMark(share=_highest(shares), is_warmup=is_warmup)


def _spread(
    rank: RankRecord, blocks: Sequence[StepBlock], mark_seconds: float
) -> dict[int, list[float]]:
    """Waited, wall and warm-up seconds of the blocks, shared out to the marks that they cover."""
    found: dict[int, list[float]] = {}
    for block in blocks:
        if not math.isfinite(block.t + _seconds(block) + _wait_seconds(block)):
            continue
        end = (rank.start.time + block.t) / mark_seconds
        length = max(_seconds(block) / mark_seconds, 1e-9)
        begin = end - min(length, MOST_MARKS)
        for place in range(int(begin), int(end) + 1):
            part = (min(end, place + 1) - max(begin, place)) / length
            if part <= 0:
                continue
            sums = found.setdefault(place, [0.0, 0.0, 0.0])
            sums[0] += part * _wait_seconds(block)
            sums[1] += part * block.wall_seconds
            sums[2] += part if block.phase == "warmup" else 0.0
    return found


def _last_step(ranks: Sequence[RankRecord]) -> int | None:
    last = [rank.blocks[-1] for rank in ranks if rank.blocks]
    return max((block.first_step + block.steps for block in last), default=None)


def _last_loss(record: RunRecord) -> float | None:
    logged = record.find_losses()
    return logged[-1].values["loss"] if logged else None


def _working_set(samples: Sequence[SystemSample]) -> int | None:
    known = (one.pss_bytes for one in reversed(samples) if one.pss_bytes is not None)
    resident = samples[-1].rss_bytes if samples else None
    return next(known, resident)


def _growth(samples: Sequence[SystemSample], name: str) -> float | None:
    """Of a counter per second, now: since the last sample that is five seconds old."""
    if len(samples) < 2:
        return None
    last = samples[-1]
    first = samples[-2]
    for one in reversed(samples[:-1]):
        first = one
        if last.t - one.t >= NOW_SECONDS:
            break
    values = getattr(first, name), getattr(last, name)
    if None in values or last.t <= first.t:
        return None
    return float(max(0.0, (values[1] - values[0]) / (last.t - first.t)))


def _rank_lines(ranks: Sequence[RankRecord], summary: RunSummary) -> tuple[RankLine, ...]:
    found = {one.rank: one for one in summary.ranks}
    lines = []
    for rank in ranks:
        blocks, known = _recent(rank), found.get(rank.start.rank)
        steps = sum(block.steps for block in blocks)
        wall = sum(block.wall_seconds for block in blocks)
        now = _stall(blocks)
        lines.append(
            RankLine(
                rank=rank.start.rank,
                stall=_first(known and known.stall_fraction, now),
                stall_now=now,
                step_seconds=_first(known and known.step_p50_seconds, _ratio(wall, steps)),
                samples_per_second=_rate(blocks, "samples"),
                tokens_per_second=_rate(blocks, "real_tokens"),
                state="" if rank.end is None else rank.end.reason,
            )
        )
    return tuple(lines)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
