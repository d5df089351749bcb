"""Divide the wall time of a run into named parts that add up to it.

The clock is that of one machine, the one of the rank that decides: from the start of the command as
its watcher saw it, or else of the first record, to the last line.

    start-up │ first fetch ─ steps and waits ─ evaluation, checkpoints, … ─ last step │ other

Ranks wait for each other, so a part costs the job what it costs the rank that takes longest for it:
while rank 0 saves, the others wait in their next step. What is left of the loop is divided by looks
at the stack (see ``phases``); without them all of it counts as compute. Other
ranks' waits for data show as communication in a profiler window, and are taken out of that.
"""

from __future__ import annotations

from typing import Any

from fast_axolotl.measure.phases import Phases
from fast_axolotl.measure.ranks import Job, RankFigures
from fast_axolotl.record import RunRecord
from fast_axolotl.record.arithmetic import finite, known, ratio, total
from fast_axolotl.record.catalogue import LEDGER
from fast_axolotl.record.waits import WaitTotals

_PARTS_OF_SPANS = {
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "log": "logging",
    "between": "between",
    "resume": "resume",
}
"""Spans of other names belong to the rest."""
_PARTS_OF_LOOKS = {
    "preparing": "preparing",
    "data": "preparing",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "code",
}
"""What looks at the stack saw in steps, beside the model, and between loops. Other code between
loops stays there."""


def find_clock(record: RunRecord, chosen: RankFigures) -> tuple[float, float]:
    """When the run began, and the last that is known of it, in seconds since 1970.

    Only by lines of one machine: clocks of several differ.
    """
    host, seen = chosen.record.start.host, list[tuple[float, list[Any]]]()
    for rank in record.ranks.values():
        if rank.start.host == host:
            last = [*rank.blocks[-1:], *rank.marks[-1:], *rank.phases[-1:], rank.end]
            seen.append((rank.start.time, last))
    for node, system in record.systems.items():
        if not record.ranks or (node == host and record.is_first_training):
            seen.append((system.start.time, [*system.samples[-1:], system.end]))
    begin = min((start for start, _ in seen), default=0.0)
    ends = (start + line.t for start, lines in seen for line in lines if line is not None)
    return begin, max([begin, *known(ends)])


def fold_ledger(record: RunRecord, job: Job, phases: Phases, since: float | None) -> dict[str, Any]:
    """The whole wall clock, its parts, and the goodput: tokens ÷ all of it.

    ``phases`` divide what is not waited for. ``since`` leaves out what came before, start-up
    included.
    """
    chosen, ranks = job.chosen, job.ranks
    begin, end = find_clock(record, chosen)
    begin = begin if since is None else max(begin, since)
    whole = max(0.0, end - begin)
    # Real tokens of all steps, none where some were not counted.
    readers = [rank for rank in ranks if rank.warmup.fetches + rank.steady.fetches]
    read = [phase for rank in readers for phase in (rank.warmup, rank.steady) if phase.fetches]
    counts = [phase.count("real_tokens") for phase in read]
    tokens = None if None in counts else total(counts)
    groups = job.figures["data_parallel_size"]
    if tokens is not None and groups and len(readers) > groups:
        # The ranks of one model see the same tokens.
        tokens *= groups / len(readers)
    values = {"duration_seconds": whole, "goodput_tokens_per_second": ratio(tokens, whole)}
    if not ranks or not whole:
        return values

    both = (chosen.warmup, chosen.steady)
    steps = sum(phase.wall_seconds for phase in both)
    own_waits = sum(map(_waits_of, both))
    stall = job.stall_fraction or 0.0
    job_waits = _waits_of(chosen.warmup) + stall * chosen.steady.wall_seconds
    data = min(steps, max(job_waits, own_waits))

    exposed = chosen.profiled_share("exposed_communication_seconds")
    if exposed is None:
        exposed = job.figures["exposed_communication_fraction"]
    communication = min(max(0.0, (exposed or 0.0) * steps - (data - own_waits)), steps - data)

    spans = {name: max(_span(rank, name) for rank in ranks) for name in _PARTS_OF_SPANS}
    loop = steps + sum(_span(chosen, name) for name in _PARTS_OF_SPANS)
    startup, first_step = (0.0, 0.0) if since is not None else _find_start(chosen, begin, end)
    is_apart = exposed is not None or job.world_size < 2
    working = max(0.0, loop - data - communication - first_step - sum(spans.values()))
    rest = sum(share for phase, share in phases.step.items() if phase != "waiting") or 1.0
    beside = {phase: working * phases.cost(phase) / rest for phase in _PARTS_OF_LOOKS}
    compute, unknown = "compute", "compute_and_communication"
    if not is_apart:
        compute, unknown = unknown, compute
    parts = {part: 0.0 for part in LEDGER if part not in (unknown, "other")}
    parts |= {compute: working - sum(beside.values()), "communication": communication}
    parts |= {"data": data, "startup": startup, "first_step": first_step}
    for name, part in _PARTS_OF_SPANS.items():
        parts[part] += spans[name]
    for phase, part in _PARTS_OF_LOOKS.items():
        moved = spans["between"] * phases.between.get(phase, 0.0) if phase != "other" else 0.0
        parts["between"] -= moved
        parts[part] += beside[phase] + moved
    divided = sum(parts.values())
    if divided > whole:
        # Times of a device, or of two files, overlap a little.
        parts = {part: seconds * whole / divided for part, seconds in parts.items()}
    parts["other"] = max(0.0, whole - sum(parts.values()))
    return values | {"ledger": parts}


def _find_start(rank: RankFigures, begin: float, end: float) -> tuple[float, float]:
    """Seconds until the first fetch, and what the first step took beyond a usual one."""
    origin, first = rank.record.start.time, next(iter(rank.record.blocks), None)
    fetched = [mark.t for mark in rank.record.marks if mark.name == "first_fetch"]
    if first is None:
        return max(0.0, (origin + fetched[0] if fetched else end) - begin), 0.0
    spans = total(first.spans.values()) or 0.0
    took = (finite(first.wall_seconds) or 0.0) + spans
    if not fetched:
        return max(0.0, origin + (finite(first.t) or took) - took - begin), 0.0
    # Spans before the first fetch are recorded with the first step.
    early = min(max(0.0, took - ((finite(first.t) or took) - fetched[0])), spans)
    own_seconds = rank.steady.wall_seconds - _waits_of(rank.steady)
    extra, usual = 0.0, ratio(own_seconds, rank.steady.steps)
    if first.first_step == 0 and first.walls and first.hosts and usual is not None:
        extra = max(0.0, (finite(first.walls[0]) or 0.0) - first.hosts[0] - usual)
    return max(0.0, origin + fetched[0] - begin - early), extra


def _waits_of(phase: WaitTotals) -> float:
    """Of the device where they are known, else of the host."""
    return (phase.stall_fraction or 0.0) * phase.wall_seconds


def _span(rank: RankFigures, name: str) -> float:
    """Seconds of spans. What follows the last step, such as a last checkpoint, is a phase only."""
    phases = (phase.seconds for phase in rank.record.phases if phase.name == name)
    return max(rank.spans.get(name, 0.0), total(phases) or 0.0)
