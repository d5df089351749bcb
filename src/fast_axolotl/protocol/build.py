"""Build the result of a protocol from its runs.

Losses are compared as the trainer logged them, to the last digit. Where runs of one and the same
arm differ, too, the larger spread of either is what the distance of the arms is held against.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, Literal

from fast_axolotl.errors import mask_words
from fast_axolotl.protocol.answer import describe_result, find_missing
from fast_axolotl.protocol.matrix import (
    build_matrix,
    describe_judgement,
    judge_matrix,
    primary_name,
)
from fast_axolotl.protocol.plan import ArmPlan, Plan, State, Turn
from fast_axolotl.protocol.statistics import spend_at
from fast_axolotl.record import RunSummary
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.protocol_result import Arm, ProtocolResult
from fast_axolotl.record.thresholds import BUSY_CPU, TAKEN_CPU
from fast_axolotl.record.units import count_words, format_share

LOADER_SETTINGS = (
    *("num_workers", "prefetch_factor", "dispatcher", "batch_size", "gradient_accumulation"),
    *("persistent_workers", "pin_memory"),
)
End = Literal["", "clear", "time"]
"""Why a protocol ended before its last pair; empty: it did not."""
_MOST_SPREADS = 2.0
"""Arms whose losses are further apart than twice their own spread are different."""
_HOW = "Values are medians over runs; ratios are geometric means over pairs, trimmed from 6 on."


def build_protocol(
    plan: Plan, state: State, figures: Mapping[int, RunSummary], notes: Sequence[str], end: End
) -> ProtocolResult:
    """What is known by now; ``figures`` are of the runs that count, by the number of the turn."""
    turns = plan.turns()
    begun = max((turn.pair for turn in turns if turn.number in figures), default=-1) + 1
    compared = {}
    for arm in plan.arms:
        by_pair = {turn.pair: figures.get(turn.number) for turn in turns if turn.arm is arm}
        compared[arm.name] = [by_pair.get(pair) for pair in range(begun)]
    spend = spend_at(begun, plan.pairs, is_last=end == "time")
    matrix = build_matrix(compared, spend)
    primary = primary_name(matrix, matrix.arms[-1])
    arms = tuple(_sum_up_arm(arm, turns, state, figures, primary) for arm in plan.arms)
    times = {}
    for planned, made in zip(plan.arms, arms, strict=True):
        if planned.times_decide:
            # How long the whole took says nothing where the work is not the same.
            is_same = made.name in (plan.same_work or ()) and made.steps == arms[0].steps
            whole = ["duration_seconds"] if is_same else []
            times[made.name] = ["start_to_step_seconds", *whole]
    matrix = judge_matrix(matrix, matters=plan.matters, times=times)
    # How the figures were made, and how they were judged.
    is_compared = primary != "duration_seconds" or len({arm.steps for arm in arms}) == 1
    judged = describe_judgement(matrix) if is_compared else ""
    matrix = replace(matrix, notes=(_HOW, *filter(None, [judged])) if primary else ())
    are_equal, losses = None, ""
    if plan.same_work is not None:
        logged = {
            arm.name: [run.losses for run in arm.runs if run.status == "done"] for arm in arms
        }
        first, second = plan.same_work
        are_equal, losses = compare_losses(logged[first], logged[second], second)
    done = {number for number, run in state.runs.items() if run.status == "done"}
    counted = [turn for turn in turns if turn.pair >= 0 and turn.number in done]
    by_round = Counter(turn.pair for turn in counted)
    return ProtocolResult(
        title=plan.title,
        started=state.started,
        seconds=state.seconds,
        pairs=sum(count == len(plan.arms) for count in by_round.values()),
        planned_pairs=plan.pairs,
        seed=plan.seed,
        planned_runs=len(state.runs) if end else len(turns),
        order=tuple(turn.arm.name for turn in counted),
        arms=arms,
        matrix=matrix,
        losses=losses,
        are_losses_equal=are_equal,
        differing_settings=differing_settings({arm.name: arm.settings for arm in arms}),
        dedupe=dict(state.dedupe),
        paragraph=describe_result(arms, matrix, are_losses_equal=are_equal, dedupe=state.dedupe),
        environment=next((dict(summary.environment) for summary in figures.values()), {}),
        notes=(
            *notes,
            *_describe_disturbances(plan, figures),
            *plan.notes,
            *_describe_work(arms),
        ),
    )


def is_settled(protocol: ProtocolResult) -> bool:
    """Whether more pairs would change no answer: every variant has one, or never succeeded."""
    arms, matrix = protocol.arms, protocol.matrix
    for at, arm in enumerate(arms[1:], 1):
        cells = {row.name: row.cells[at] for row in matrix.rows if row.cells[at].is_deciding}
        # The whole run is what a person waits for, whatever gained or lost the time.
        whole = cells.get("duration_seconds")
        outcomes = {cell.outcome for cell in ([whole] if whole else cells.values())}
        is_open = not outcomes or outcomes & {"no clear change", "not compared"}
        if is_open and not find_missing(arms[0], arm):
            return False
    return True


def compare_losses(
    baseline: Sequence[Sequence[float]], arm: Sequence[Sequence[float]], name: str
) -> tuple[bool | None, str]:
    """Whether the losses of the runs of two arms are equal, if that can be told, in a sentence."""
    first, second = [run for run in baseline if run], [run for run in arm if run]
    if not first or not second:
        who = "one variant logged none" if first or second else "neither variant logged any"
        return None, f"Losses: {who}."
    broken = [
        who
        for who, runs in {"the baseline": first, name: second}.items()
        if not all(map(math.isfinite, chain(*runs)))
    ]
    if broken:
        words = f"NaN or infinite losses in {' and '.join(broken)}"
        if len(broken) > 1:
            return None, f"Losses: {words}: fix that first."
        return False, f"DIFFERENT losses: {words} only."
    every = [*first, *second]
    counts = {len(run) for run in every}
    if len(set(map(tuple, every))) == 1:
        count = f"{len(first[0])} in each of {len(every)} runs"
        return True, f"Losses: identical to the last digit, {count}."
    if len(counts) > 1:
        return False, f"DIFFERENT losses: some runs logged {min(counts)}, others {max(counts)}."
    # How far runs of one arm are from each other. An arm that scatters beside a baseline that does
    # not is a difference, and no excuse.
    own, other = (
        max((_distance(a, b)[0] for a, b in combinations(runs, 2)), default=0.0)
        for runs in (first, second)
    )
    own = max(own, other) if own else 0.0
    far, step = max(_distance(a, b) for a in first for b in second)
    differs = f"{name} differs from the baseline by up to {far:.3g}, first at logged loss {step}"
    if len(first) == 1:
        return None, (
            f"Losses: {differs}. With one run, it is not known whether the baseline also differs "
            "from itself: pass more --pairs."
        )
    among = f"; runs of the same variant differ by up to {own:.3g}" if own else ""
    if own and far <= _MOST_SPREADS * own:
        return None, f"Losses: {differs}{among}: chance can explain that."
    return False, (
        f"DIFFERENT losses: {differs}{among}. Do not trust the speed until this is explained."
    )


def differing_settings(settings: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Loader settings that are not the same in all arms that tell them, one sentence each."""
    sentences = []
    for name in LOADER_SETTINGS:
        values = {arm: known[name] for arm, known in settings.items() if name in known}
        if len(set(map(repr, values.values()))) > 1:
            pairs = ", ".join(f"{value} in {arm}" for arm, value in values.items())
            sentences.append(f"{name} is {pairs}.")
    return tuple(sentences)


def find_disturbance(summary: RunSummary) -> str:
    """What kept the processors from a run; empty where nothing did, or nobody looked."""
    parts = []
    for share, most, words in (
        (summary.other_cpu_share, BUSY_CPU, "other programs used {} of the CPU cores"),
        (summary.cpu_steal_share, TAKEN_CPU, "the hypervisor took {} of the CPU time"),
        (summary.cpu_throttled_share, TAKEN_CPU, "the CPU quota stopped it for {} of the time"),
    ):
        if share is not None and share >= most:
            parts.append(words.format(format_share(share, decimals=0)))
    return " and ".join(parts)


def _describe_disturbances(plan: Plan, figures: Mapping[int, RunSummary]) -> list[str]:
    counted = [turn for turn in plan.turns() if turn.pair >= 0 and turn.number in figures]
    disturbed = [turn for turn in counted if find_disturbance(figures[turn.number])]
    if not disturbed:
        return []
    worst = max(disturbed, key=lambda turn: figures[turn.number].other_cpu_share or 0.0)
    return [
        f"{len(disturbed)} of {count_words(len(counted), 'run')} shared the CPU (the worst, "
        f"{worst.folder}: {find_disturbance(figures[worst.number])}). Differences may be caused by "
        "that: repeat on an idle machine"
    ]


def _sum_up_arm(
    plan: ArmPlan,
    turns: Sequence[Turn],
    state: State,
    figures: Mapping[int, RunSummary],
    primary: str,
) -> Arm:
    own = [turn for turn in turns if turn.arm.name == plan.name]
    runs = tuple(state.runs[turn.number] for turn in own if turn.number in state.runs)
    counts = [run.steps for run in runs if run.pair >= 0 and run.steps is not None]
    arm = Arm(
        name=plan.name,
        text=plan.text,
        command=mask_words(plan.command),
        runs=runs,
        steps=statistics.median(counts) if counts else None,
    )
    # The run in the middle by the figure that decides stands for the arm; before one counts, it is
    # the last warm-up.
    measured = [turn.number for turn in own if turn.number in figures]
    counted = [turn.number for turn in own if turn.number in figures and turn.pair >= 0]
    if not measured:
        return arm

    counted.sort(key=lambda number: finite(figures[number].figures.get(primary)) or 0.0)
    shown = counted[(len(counted) - 1) // 2] if counted else measured[-1]
    return replace(judge_arm(arm, figures[shown]), shown_run=state.runs[shown].folder)


def judge_arm(arm: Arm, summary: RunSummary) -> Arm:
    """The arm with the settings, the verdict and the phases of the run that stands for it."""
    verdict, known = summary.verdict, summary.settings
    return replace(
        arm,
        settings={name: known[name] for name in LOADER_SETTINGS if name in known},
        verdict=" ".join(filter(None, (verdict.kind, verdict.subtype))),
        headline=verdict.headline,
        action=verdict.action,
        phases=summary.phases,
    )


def _describe_work(arms: Sequence[Arm]) -> list[str]:
    """What to know of the runs: unequal work, several trainings."""
    notes = []
    counts = {arm.name: arm.steps for arm in arms if arm.steps is not None}
    if len(set(counts.values())) > 1:
        # Rates can be compared all the same; how long the whole took cannot.
        steps = ", ".join(f"{count:,.0f} in {name}" for name, count in counts.items())
        notes.append(
            f"Not the same work: recorded steps are {steps}. Compare rates, not the whole run."
        )
    most = max((run.trainings for arm in arms for run in arm.runs), default=1)
    if most > 1:
        notes.append(f"A run trained up to {most} times: the one with the most steps is compared.")
    return notes


def _distance(first: Sequence[float], second: Sequence[float]) -> tuple[float, int]:
    """The largest difference, and where the first one is, from 1."""
    places = [at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
    if not places:
        return 0.0, 0
    return max(abs(first[at] - second[at]) for at in places), places[0] + 1
