"""The figures of a run from its record alone: a pure fold over the lines.

Every figure is a ratio of sums over the steady phase; nothing here looks at the machine it runs on.
One rank decides about the data (see ``ranks``); tokens, samples and bytes are summed over ranks.
Whatever is missing is ``None`` with one sentence in ``reasons``: the one that the meter or the
watcher wrote down, else what the record lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fast_axolotl.measure.findings import Findings
from fast_axolotl.measure.flops import utilisation
from fast_axolotl.measure.ranks import (
    RankFigures,
    choose_rank,
    compare_communication,
    compare_own_time,
    fold_rank,
    summarise_rank,
)
from fast_axolotl.measure.stall_figures import add_queue, add_stall
from fast_axolotl.measure.system_figures import fold_system
from fast_axolotl.measure.throughput_figures import add_reading, add_steps, add_tokens, find_readers
from fast_axolotl.measure.verdict import judge
from fast_axolotl.record import ModelShape, RunRecord, RunSummary
from fast_axolotl.record.arithmetic import middle, ratio, times, total

__all__ = ["summarise"]

_NOTED = ("error", "clock_step")
"""Marks that a reader of the figures should know of."""
_MOST_NOTES = 5


def summarise(record: RunRecord) -> RunSummary:
    """Every figure of a run, its verdict, and a reason for every figure that is missing."""
    ranks = [fold_rank(record.ranks[number]) for number in sorted(record.ranks)]
    chosen = choose_rank(ranks)
    found = Findings(record, chosen)
    _add_course(found, record, ranks, chosen)
    add_stall(found, chosen)
    add_queue(found, chosen)
    add_reading(found, ranks, chosen)
    add_tokens(found, ranks)
    add_steps(found, chosen)
    _add_flops(found, ranks)
    _add_system(found, record, ranks)
    communication = compare_communication(ranks, chosen)
    found.put("device_idle_fraction", communication.device_idle_fraction, communication.reasons)
    found.put(
        "exposed_communication_fraction", communication.exposed_fraction, communication.reasons
    )
    found.put("pure_communication_fraction", communication.pure_fraction, communication.reasons)
    _add_overhead(found, chosen)
    draft = found.build()
    verdict = judge(
        draft,
        source=_source(record, chosen),
        decided_by=None if chosen is None or len(ranks) < 2 else chosen.rank,
        skew_share=communication.skew_share,
        slow_rank=communication.slow_rank,
        local_ranks=_local_ranks(ranks),
        warmup_step_seconds=_warmup_pace(chosen),
        drain=None if chosen is None else chosen.drain,
    )
    return replace(draft, verdict=verdict)


def _source(record: RunRecord, chosen: RankFigures | None) -> str:
    """What the meter was plugged into; else who watched from outside."""
    if chosen is not None:
        return chosen.record.start.source
    return "" if record.system is None else record.system.start.source


def _local_ranks(ranks: Sequence[RankFigures]) -> int | None:
    """Ranks that share one machine, at most."""
    starts = [rank.record.start for rank in ranks]
    seen = Counter(start.host for start in starts).values()
    return max([*seen, *(start.local_rank + 1 for start in starts)], default=None)


def _warmup_pace(rank: RankFigures | None) -> float | None:
    return None if rank is None else ratio(rank.warmup.wall_seconds, rank.warmup.steps)


def _add_course(
    found: Findings, record: RunRecord, ranks: Sequence[RankFigures], chosen: RankFigures | None
) -> None:
    """What ran, when, and how it ended."""
    starts = [rank.record.start for rank in ranks]
    system = record.system
    reason, error = _ending(record)
    world = max([len(ranks), *(start.world_size for start in starts)], default=0)
    times = [start.time for start in starts] or ([system.start.time] if system else [0.0])
    environment: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for rank in reversed(ranks):
        environment.update(rank.record.start.environment)
        settings.update(rank.settings)
    found.values.update(
        run_dir=record.path,
        started=min(times),
        is_finished=reason == "finished",
        end_reason=reason,
        error=error,
        duration_seconds=_duration(record),
        world_size=world,
        ranks=tuple(summarise_rank(rank) for rank in ranks),
        settings=settings,
        environment=environment,
        notes=(*_notes(record, world), *_short_notes(ranks, chosen)),
    )
    found.put("deciding_rank", None if chosen is None else chosen.rank, "no rank left a record")
    alone = "there is one rank" if len(ranks) == 1 else "fewer than two ranks have steady steps"
    found.put("rank_skew", compare_own_time(ranks), found.unseen or alone)


def _ending(record: RunRecord) -> tuple[str, str]:
    ends = [rank.end for rank in record.ranks.values()]
    if not ends and record.system is not None:
        ends = [record.system.end]
    for reason in ("exception", "interrupted"):
        for end in ends:
            if end is not None and end.reason == reason:
                return reason, end.error
    return ("cut off" if None in ends or not ends else "finished"), ""


def _duration(record: RunRecord) -> float:
    times = [0.0]
    for rank in record.ranks.values():
        lines: list[Any] = [*rank.blocks[-1:], *rank.marks[-1:], *rank.phases[-1:]]
        times += [line.t for line in [*lines, rank.end] if line is not None]
    if record.system is not None:
        samples: list[Any] = [*record.system.samples[-1:], record.system.end]
        times += [line.t for line in samples if line is not None]
    return max(times)


def _notes(record: RunRecord, world: int) -> tuple[str, ...]:
    notes = list(record.notes)
    if record.ranks and len(record.ranks) < world:
        notes.append(f"{len(record.ranks)} of {world} ranks left a record: sums are of those alone")
    for number, rank in sorted(record.ranks.items()):
        told = [mark.text or mark.name for mark in rank.marks if mark.name in _NOTED]
        notes += [f"rank {number}: {text}" for text in dict.fromkeys(told[:_MOST_NOTES])]
    return tuple(notes)


def _short_notes(ranks: Sequence[RankFigures], chosen: RankFigures | None) -> list[str]:
    """Ranks that recorded too little to decide, where another decides."""
    if chosen is None or not chosen.is_long_enough:
        return []
    short = [rank for rank in ranks if rank.steady.fetches and not rank.is_long_enough]
    return [
        f"rank {rank.rank} is too short to be judged: {rank.steady.fetches:,} fetches of the "
        "steady phase"
        for rank in short
    ]


def _add_flops(found: Findings, ranks: Sequence[RankFigures]) -> None:
    shapes = [rank.record.models[-1] for rank in ranks if rank.record.models]
    shape: ModelShape | None = shapes[0] if shapes else None
    use = utilisation(
        shape,
        tokens_per_second=found.values["tokens_per_second"],
        attended_length=found.values["mean_attended_length"],
        num_devices=_num_devices(ranks, shapes),
    )
    for name in ("model_flops_per_token", "model_flops_per_second", "mfu", "hfu", "matmul_share"):
        found.put(name, getattr(use, name), use.reasons, "model")
    found.put("peak_tflops", use.peak_tflops, use.reasons.get("mfu", ""), "mfu", "model")
    found.values["peak_source"] = use.peak_source
    found.values["flops_convention"] = use.convention


def _num_devices(ranks: Sequence[RankFigures], shapes: Sequence[ModelShape]) -> int | None:
    """Devices of the ranks whose tokens are counted: all, where rank 0 reads for all."""
    if not shapes:
        return None
    if any(rank.settings.get("dispatcher") for rank in ranks):
        world = max(rank.record.start.world_size for rank in ranks)
        return max(world, len(ranks)) * shapes[0].num_devices
    missing = len(find_readers(ranks)) - len(shapes)
    return sum(shape.num_devices for shape in shapes) + max(0, missing) * shapes[0].num_devices


def _add_system(found: Findings, record: RunRecord, ranks: Sequence[RankFigures]) -> None:
    begins = [rank.steady_from for rank in ranks if rank.steady_from is not None]
    ends = [rank.steady_to for rank in ranks if rank.steady_to is not None]
    figures = fold_system(
        record.system,
        min(begins, default=None),
        max(ends, default=None),
        trained_from=_trained_from(ranks),
    )
    by_phase: dict[str, int] = {}
    for rank in ranks:
        for phase in rank.record.phases:
            if phase.hwm_bytes is not None:
                by_phase[phase.name] = max(phase.hwm_bytes, by_phase.get(phase.name, 0))
    found.values["hwm_by_phase"] = by_phase
    own = _own_memory(ranks)
    if record.system is not None:
        own = _higher(figures.values, by_phase, _local_mark(ranks, record.system.start.host))
    for name, value in figures.values.items():
        found.put(name, own.get(name, value), figures.reasons, is_system=True)


def _trained_from(ranks: Sequence[RankFigures]) -> float | None:
    """The first step of all, in seconds since 1970; where none was made, the first line."""
    starts = [rank.record.start.time for rank in ranks]
    steps = [
        rank.record.start.time + mark.t
        for rank in ranks
        for mark in rank.record.marks
        if mark.name == "first_step"
    ]
    return min(steps or starts, default=None)


def _local_mark(ranks: Sequence[RankFigures], host: str) -> int:
    """The highest mark of one rank's own process on this machine."""
    marks = [
        phase.hwm_bytes or 0
        for rank in ranks
        if rank.record.start.host == host
        for phase in rank.record.phases
    ]
    return max(marks, default=0)


def _higher(watched: Mapping[str, Any], by_phase: Mapping[str, int], local: int) -> dict[str, Any]:
    """What the watcher's samples missed: a rank reads its mark at the very end of each phase."""
    found: dict[str, Any] = {}
    top = max(by_phase.values(), default=0)
    if top > (watched["hwm_bytes"] or 0):
        found = {"hwm_bytes": top, "spike_ratio": ratio(top, watched["rss_bytes"])}
    share, proven = watched["limit_share"], ratio(local, watched["limit_bytes"])
    if share is not None and proven is not None:
        found["limit_share"] = max(share, proven)
    return found


def _own_memory(ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """What the ranks know of their own processes where nobody watched the tree."""
    phases = [rank.record.phases for rank in ranks]
    tops = [max((one.hwm_bytes or 0 for one in own), default=0) for own in phases]
    steady = [[one.rss_bytes for one in own if one.name == "steady"] for own in phases]
    rss = total(middle(one) for one in steady)
    hwm = sum(tops) or None
    return {
        "hwm_bytes": hwm,
        "rss_bytes": None if rss is None else round(rss),
        "spike_ratio": ratio(hwm, rss),
    }


def _add_overhead(found: Findings, rank: RankFigures | None) -> None:
    end = rank.record.end if rank else None
    per_fetch = ratio(end.overhead_seconds, end.overhead_fetches) if end else None
    reason = "the record was cut off before the meter told its own cost"
    if end is not None:
        reason = "the meter saw no fetch"
    if rank is None:
        reason = found.unseen
    found.put("overhead_seconds_per_fetch", per_fetch, reason)
    share = None
    if rank is not None:
        share = ratio(times(per_fetch, rank.steady.fetches), rank.steady.wall_seconds)
    found.put("overhead_fraction", share, reason if per_fetch is None else found.unseen or reason)
