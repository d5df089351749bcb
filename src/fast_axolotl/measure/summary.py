"""The figures of a run from its record alone: a pure fold over the lines.

Every figure is a ratio of sums over the steady phase; nothing here looks at the machine it runs on.
The stall is the job's, and one rank decides about the data (see ``ranks``); tokens, samples and
bytes are summed over ranks.
Whatever is missing is ``None`` with one sentence in ``reasons``: the one that the meter or the
watcher wrote down, else what the record lacks.

Where a run stalls otherwise at its end (see ``late_change``), its verdict is that of a summary of
the steps since then.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from fast_axolotl.measure import loop_figures
from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.flops import utilisation
from fast_axolotl.measure.job import (
    compare_communication,
    find_replicas,
    find_straggler,
    fold_job,
)
from fast_axolotl.measure.late_change import find_late_change
from fast_axolotl.measure.ledger import add_ledger
from fast_axolotl.measure.rank_figures import RankFigures, fold_rank, summarise_rank
from fast_axolotl.measure.summary_builder import SummaryBuilder
from fast_axolotl.measure.system_figures import describe_growth, fold_system, growth
from fast_axolotl.measure.verdict import judge, judge_change
from fast_axolotl.record import NodeSummary, RunRecord, RunSummary, SystemRecord
from fast_axolotl.record.arithmetic import ratio, times
from fast_axolotl.record.thresholds import CPU_LOST

_NOTED = ("error", "clock_step")
"""Marks that a reader of the figures should know of."""
_MOST_NOTES = 5
_NODE_FIGURES = [item.name for item in fields(NodeSummary) if item.name not in ("node", "ranks")]
_KILLED = ("exit code -9", "exit code 137")
"""How a command ends that signal 9 ended, or whose shell tells so."""
_LOST_CHILD = re.compile(
    "killed by signal: Killed|exited unexpectedly|SIGKILL|exitcode: -9|EOFError|ConnectionReset"
)
"""How torch tells of a worker or a rank that was killed: by its signal, or by its end of a pipe."""
_SIGNALLED = re.compile(r"exit code (-\d+|1[3-5]\d)")


def summarise(record: RunRecord, *, since: float | None = None) -> RunSummary:
    """Every figure of a run, its verdict, and a reason for every figure that is missing.

    ``since`` leaves out the steps that ended before it, in seconds since 1970.
    """
    if since is not None:
        later = {}
        for number, rank in record.ranks.items():
            begin = since - rank.start.time + 1e-3
            blocks = [block for block in rank.blocks if block.t > begin]
            phases = [phase for phase in rank.phases if phase.t > begin]
            later[number] = replace(rank, blocks=blocks, phases=phases)
        record = replace(record, ranks=later)
    ranks = [fold_rank(record.ranks[number]) for number in sorted(record.ranks)]
    chosen, job = fold_job(ranks)
    builder = SummaryBuilder(record, chosen)
    _add_course(builder, record, ranks, chosen)
    builder.values["ranks"] = tuple(summarise_rank(rank) for rank in ranks)
    loop_figures.add_stall(builder, chosen, job)
    replicas = find_replicas(ranks, builder.values["world_size"])
    unknown = replicas.note or "the sizes of tensor and context parallel groups are not known"
    builder.put("data_parallel_size", replicas.data_parallel_size, unknown)
    loop_figures.add_reading(builder, ranks, job, replicas.copies)
    loop_figures.add_tokens(builder, ranks, replicas.copies)
    builder.values["notes"] += (replicas.note,) if replicas.note else ()
    _add_flops(builder, ranks)
    _add_system(builder, record, ranks)
    seen = compare_communication(ranks, chosen)
    for name in ("device_idle", "exposed_communication", "pure_communication"):
        figure = f"{name}_fraction"
        builder.put(figure, getattr(seen, figure), seen.reasons.get(figure, ""))
    straggler = find_straggler(ranks, job, seen)
    nobody = "no rank makes the others wait"
    builder.put_steady("straggler_rank", straggler.rank, straggler.reason or nobody)
    builder.put_steady("straggler_fraction", straggler.fraction, straggler.reason)
    builder.values["straggler_part"] = straggler.part
    _add_overhead(builder, chosen)
    add_ledger(builder, record, ranks, chosen, since)
    draft = builder.build()
    source = "" if record.system is None else record.system.start.source
    starts = [rank.record.start for rank in ranks]
    system = record.systems.get(draft.node)
    by_host = Counter(start.host for start in starts).values()
    drain = pace = steady_from = None
    if chosen is not None:
        source, drain, steady_from = chosen.record.start.source, chosen.drain, chosen.steady_from
        pace = ratio(chosen.warmup.wall_seconds, chosen.warmup.steps)
    # The queue that is empty first, since the ranks wait for each other; where none is falling, the
    # one of the rank that decides.
    falling = [rank.drain for rank in ranks if rank.drain is not None and not rank.drain.is_over]
    if falling and not (chosen is not None and chosen.settings.get("dispatcher")):
        drain = min(falling, key=lambda drain: drain.left / drain.batches_per_step)
    evidence = Evidence(
        figures=draft,
        source=source,
        decided_by=None if chosen is None or len(ranks) < 2 else chosen.rank,
        skew_share=seen.skew_share,
        slow_rank=seen.slow_rank,
        local_ranks=max([*by_host, *(start.local_rank + 1 for start in starts)], default=None),
        warmup_step_seconds=pace,
        drain=drain,
        killed=_find_kill(record),
        machine_oom_kills=growth(system.samples, "machine_oom_kills") or 0 if system else 0,
        memory_growth=describe_growth(system, steady_from) if system else "",
    )
    verdict = judge(evidence)
    change = find_late_change(ranks, chosen) if since is None else None
    if change is not None:
        verdict = judge_change(verdict, draft, change, summarise(record, since=change.begin))
    return replace(draft, verdict=verdict)


def _add_course(
    builder: SummaryBuilder,
    record: RunRecord,
    ranks: Sequence[RankFigures],
    chosen: RankFigures | None,
) -> None:
    """What ran, when, how it ended, and what to know of it."""
    system = record.system
    starts = [rank.record.start for rank in ranks]
    dates = [start.time for start in starts] or ([system.start.time] if system else [0.0])
    world_size = max([len(ranks), *(start.world_size for start in starts)], default=0)
    environment: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for rank in reversed(ranks):
        environment.update(rank.record.start.environment)
        settings.update(rank.settings)

    ends = [rank.record.end for rank in ranks] or ([system.end] if system else [])
    errors: dict[str, str] = {end.reason: end.error for end in reversed(ends) if end is not None}
    reason = "cut off" if None in ends or not ends else "finished"
    reason = next((name for name in ("exception", "interrupted") if name in errors), reason)
    if ranks and reason in ("cut off", "finished"):
        # Who supervised the command knows its exit code, also where a rank could not tell its end.
        commands = [node.end for node in record.systems.values() if node.start.source == "run"]
        failed = [end for end in commands if end is not None and end.reason != "finished"]
        if failed:
            reason, errors[failed[0].reason] = failed[0].reason, failed[0].error
        elif commands and None not in commands:
            reason = "finished"

    notes = list(record.notes)
    kill = _find_kill(record)
    if kill:
        notes.append(kill)
    if ranks and len(ranks) < world_size:
        text = f"only {len(ranks)} of {world_size} ranks left a record, and sums cover only those"
        if world_size - len(ranks) >= max(Counter(start.host for start in starts).values()):
            text += (
                "; if other nodes recorded on their own disks, copy their rank-*.jsonl and "
                "system-*.jsonl files into this folder"
            )
        notes.append(text)
    for rank in ranks:
        texts = [mark.text or mark.name for mark in rank.record.marks if mark.name in _NOTED]
        notes += [f"rank {rank.rank}: {text}" for text in dict.fromkeys(texts[:_MOST_NOTES])]
    if chosen is not None and chosen.is_long_enough:
        # Ranks that recorded too little to decide, where another decides.
        notes += [
            f"rank {rank.rank} is too short to judge: its steady phase has "
            f"{rank.steady.fetches:,} fetches"
            for rank in ranks
            if rank.steady.fetches and not rank.is_long_enough
        ]
    settings.pop("replacements", None)
    replaced = [rank.settings["replacements"] for rank in ranks if "replacements" in rank.settings]
    names = tuple(dict.fromkeys(itertools.chain(*replaced))) if replaced else None
    builder.put("replacements", names, "the record does not name them")
    builder.values.update(
        run_dir=record.path,
        started=min(dates),
        is_finished=reason == "finished",
        end_reason=reason,
        error="" if reason == "finished" else errors.get(reason, ""),
        world_size=world_size,
        settings=settings,
        environment=environment,
        notes=tuple(notes),
    )
    builder.put("deciding_rank", chosen.rank if chosen else None, "no rank left a record")


def _add_flops(builder: SummaryBuilder, ranks: Sequence[RankFigures]) -> None:
    shapes = [rank.record.models[-1] for rank in ranks if rank.record.models]
    # Devices of the ranks whose tokens are counted: all, where rank 0 reads for all.
    num_devices = None
    if shapes and any(rank.settings.get("dispatcher") for rank in ranks):
        world_size = max(rank.record.start.world_size for rank in ranks)
        num_devices = max(world_size, len(ranks)) * shapes[0].num_devices
    elif shapes:
        missing = max(0, len(loop_figures.find_readers(ranks)) - len(shapes))
        num_devices = sum(shape.num_devices for shape in shapes) + missing * shapes[0].num_devices
    use = utilisation(
        shapes[0] if shapes else None,
        tokens_per_second=builder.values["tokens_per_second"],
        attended_length=builder.values["mean_attended_length"],
        num_devices=num_devices,
    )
    for name in ("model_flops_per_token", "model_flops_per_second", "mfu", "hfu", "matmul_share"):
        builder.put(name, getattr(use, name), use.reasons.get(name, ""), "model")
    builder.put("peak_tflops", use.peak_tflops, use.reasons.get("mfu", ""), "mfu", "model")
    builder.values["peak_source"] = use.peak_source
    builder.values["flops_convention"] = use.convention


def _find_kill(record: RunRecord) -> str:
    """What of the run was killed by signal 9, or ended without a word; empty where nothing was."""
    commands = [system.end for system in record.systems.values() if system.end is not None]
    for end in commands:
        if end.error in _KILLED:
            return f"signal 9 (SIGKILL) ended the command: {end.error}"
    ends = {number: rank.end for number, rank in record.ranks.items()}
    for number, own in ends.items():
        if own is not None and _LOST_CHILD.search(own.error):
            return f"rank {number} lost a process: {own.error.strip().splitlines()[0]}"
    # A launcher that has lost a rank ends with a plain error; a signal of its own is no loss.
    all_ends = [*commands, *(own for own in ends.values() if own is not None)]
    has_failed = any(end.reason == "exception" for end in all_ends)
    lost = [number for number, own in ends.items() if own is None]
    if lost and has_failed and not any(_SIGNALLED.fullmatch(end.error) for end in commands):
        return f"rank {lost[0]} stopped without a message while the run ended with an error"
    return ""


def _add_system(builder: SummaryBuilder, record: RunRecord, ranks: Sequence[RankFigures]) -> None:
    """Memory, processors, disk, swap and GPUs: of every node, and of the one under most pressure.

    A node's samples are compared with its own ranks, which have the same clock.
    """
    by_node: dict[str, list[RankFigures]] = defaultdict(list)
    for rank in ranks:
        by_node[rank.record.start.host].append(rank)
    folded = {
        node: _fold_node(record.systems.get(node), by_node.get(node, []), ranks)
        for node in dict.fromkeys([*by_node, *record.systems])
    }

    def pressure(node: str) -> tuple[bool, bool, bool, float]:
        values, _ = folded[node]
        waited = min(values["other_cpu_share"] or 0.0, values["cpu_wait_share"] or 0.0)
        refused = max(values["cpu_throttled_share"] or 0.0, values["cpu_steal_share"] or 0.0)
        return (
            bool(values["oom_kills"]),
            bool(values["is_swap_sustained"]),
            max(waited, refused, values["psi_io_full"] or 0.0) >= CPU_LOST,
            values["limit_share"] or 0.0,
        )

    watched = [node for node in folded if node in record.systems]
    worst = max(watched, key=pressure, default="")
    values, reasons = folded[worst] if worst else _fold_node(None, ranks, ranks)
    builder.values["node"] = worst
    builder.values["nodes"] = tuple(
        NodeSummary(
            node=node,
            ranks=tuple(rank.rank for rank in by_node.get(node, ())),
            **{name: found.get(name) for name in _NODE_FIGURES},
        )
        for node, (found, _) in folded.items()
    )
    notes = [
        f"{node}: {text}"
        for node, system in record.systems.items()
        if (text := system.start.reasons.get("processes"))
    ]
    if len(folded) > 1 and worst:
        notes.append(
            f"memory, CPU, disk, swap and GPU figures are from {worst}, the node under most "
            f"pressure of {len(folded)}"
        )
    unwatched = [node for node in folded if node not in record.systems]
    if worst and unwatched:
        notes.append(f"there are no samples from {', '.join(unwatched)}")
    builder.values["notes"] += tuple(notes)
    held = (rank.settings.get("cuda_memory") for rank in ranks)
    peaks = [one.get("allocated_peak", 0) for one in held if isinstance(one, dict)]
    values["gpu_peak_allocated_bytes"] = max(peaks, default=0) or None
    if values.get("gpu_memory_bytes") is None:
        reasons["gpu_peak_allocated_bytes"] = reasons.get("gpu_memory_bytes", "no GPU was detected")
    for name, value in values.items():
        builder.put(name, value, reasons.get(name, ""), is_system=True)


def _fold_node(
    system: SystemRecord | None, own: Sequence[RankFigures], all_ranks: Sequence[RankFigures]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of one node by its samples and by the high-water marks of its own ranks; reasons.

    Who watches a node without ranks, that of the launcher, goes by the times of all.
    """
    ranks = own or all_ranks
    # The first step of all, in seconds since 1970; where none was made, the first line.
    first_steps = [
        rank.record.start.time + mark.t
        for rank in ranks
        for mark in rank.record.marks
        if mark.name == "first_step"
    ]
    values, reasons = fold_system(
        system,
        min((rank.steady_from for rank in ranks if rank.steady_from is not None), default=None),
        max((rank.steady_to for rank in ranks if rank.steady_to is not None), default=None),
        trained_from=min(first_steps or [rank.record.start.time for rank in ranks], default=None),
    )
    marks = [max((phase.hwm_bytes or 0 for phase in rank.record.phases), default=0) for rank in own]
    if system is not None:
        # A rank reads its mark at the very end of each phase, and the samples may have missed it.
        highest = max(marks, default=0)
        if highest > (values["hwm_bytes"] or 0):
            values["hwm_bytes"] = highest
    # What torch's allocator held at most, which the samples may have missed.
    free = [values["gpu_free_bytes"]]
    for rank in own:
        held = rank.settings.get("cuda_memory")
        if isinstance(held, dict) and {"total", "reserved_peak"} <= held.keys():
            free.append(held["total"] - held["reserved_peak"])
    values["gpu_free_bytes"] = min((size for size in free if size is not None), default=None)
    return values, reasons


def _add_overhead(builder: SummaryBuilder, rank: RankFigures | None) -> None:
    """What the meter itself costs."""
    end = rank.record.end if rank else None
    per_fetch = ratio(end.overhead_seconds, end.overhead_fetches) if end else None
    reason = "the record ends before the meter wrote its own cost"
    if end is not None:
        reason = "the meter timed no fetch"
    if rank is None:
        reason = builder.unseen
    builder.put("overhead_seconds_per_fetch", per_fetch, reason)
    share = None
    if rank is not None:
        share = ratio(times(per_fetch, rank.steady.fetches), rank.steady.wall_seconds)
    no_share = reason if per_fetch is None else builder.unseen or reason
    builder.put("overhead_fraction", share, no_share)
