"""What a report is made of: runs with their summaries, and a protocol where there was one.

Beside the data stand the sentences that every form of a report tells: which run of an arm is
shown, how far a protocol has come, and what must be told before any verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.protocol_result import Arm, ArmRun, ProtocolResult
from fast_axolotl.record.units import format_duration, format_share


class VerdictLook(NamedTuple):
    """How a kind of verdict is shown."""

    title: str
    style: str
    """In a terminal."""
    tone: str
    """On a page."""


_LEAST_PART = 0.0005
"""Share of the wall clock below which a part is not named: it would read 0.0 %."""

VERDICTS = {
    "inconclusive": VerdictLook("Inconclusive", "bold white on grey35", "plain"),
    "memory": VerdictLook("Out of memory", "bold white on red", "bad"),
    "swap": VerdictLook("Swap-bound", "bold white on red", "bad"),
    "cpu": VerdictLook("CPU-bound", "bold white on red", "bad"),
    "io": VerdictLook("I/O-bound", "bold white on red", "bad"),
    "data": VerdictLook("Data-bound", "bold white on red", "bad"),
    "checkpoint": VerdictLook("Checkpoint-bound", "bold white on red", "bad"),
    "evaluation": VerdictLook("Evaluation-bound", "bold white on red", "bad"),
    "communication": VerdictLook("Communication-bound", "bold white on dark_orange3", "warn"),
    "startup": VerdictLook("Start-up-bound", "bold white on dark_orange3", "warn"),
    "compute": VerdictLook("Compute-bound", "bold white on green4", "good"),
    "mixed": VerdictLook("Mixed", "bold black on yellow", "warn"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One run of a report."""

    name: str
    """As it is called on the page: the arm's name, or the folder's."""
    record: RunRecord
    summary: RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a page shows."""

    title: str
    runs: tuple[ReportRun, ...]
    """The runs with charts; of a protocol, one of each arm, and then those given beside it."""
    arm_runs: int = 0
    """How many of them are a protocol's."""
    protocol: ProtocolResult | None = None
    notes: tuple[str, ...] = ()
    """What was left out, one sentence each."""
    made: float
    """When the page was made, in seconds since 1970."""
    version: str
    """Version of this package."""


def verdict_title(kind: str, subtype: str) -> str:
    """``Data-bound (burst)``."""
    title = VERDICTS[kind].title
    return f"{title} ({subtype})" if subtype else title


def divide_clock(ledger: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """The parts of the wall clock that took any of it: name, seconds, share."""
    whole = sum(ledger.values())
    return [
        (part, seconds, seconds / whole)
        for part, seconds in ledger.items()
        if seconds >= _LEAST_PART * whole > 0
    ]


def describe_regimes(summary: RunSummary) -> list[tuple[str, str, str]]:
    """What bounded the run, from when on, and its stall then; none where that never changed."""
    if len(summary.regimes) < 2:
        return []
    return [
        (
            f"{verdict_title(regime.kind, '')} from step {regime.first_step:,}",
            f"{format_duration(regime.begin_seconds)} in",
            f"stall {format_share(regime.stall_fraction)}",
        )
        for regime in summary.regimes
    ]


def counted_runs(arm: Arm) -> list[ArmRun]:
    """Its runs that the matrix is of."""
    return [run for run in arm.runs if run.status == "done" and run.pair >= 0]


def shown_run(arm: Arm) -> ArmRun | None:
    """The run that stands for an arm; where none was chosen, the last that counts."""
    done = [run for run in arm.runs if run.status == "done"]
    chosen = [run for run in done if run.folder == arm.shown_run]
    return next(reversed(chosen or counted_runs(arm) or done), None)


def describe_run(arm: Arm) -> str:
    """``08-baseline, the one nearest the median of 3``; empty where there is none."""
    run = shown_run(arm)
    if run is None:
        return ""
    count = len(counted_runs(arm))
    name = run.folder.rstrip("/").rpartition("/")[2]
    if run.pair < 0:
        return f"{name}, a warm-up run"
    if count == 1:
        return f"{name}, the only measured run"
    if run.folder == arm.shown_run:
        return f"{name}, closest to the median of {count}"
    return f"{name}, the last of {count}"


def describe_drawn(report: Report) -> str:
    """Which run of each arm the charts are of; empty where there are no arms."""
    if report.protocol is None:
        return ""
    drawn = {run.name for run in report.runs}
    parts = [
        f"{arm.name}: {words}"
        for arm in report.protocol.arms
        if arm.name in drawn and (words := describe_run(arm))
    ]
    rest = (
        "; the comparison table shows medians"
        if any(map(counted_runs, report.protocol.arms))
        else ""
    )
    return f"One run of each variant{rest}. {'; '.join(parts)}." if parts else ""


def describe_gpus(record: RunRecord) -> str:
    """``8 × NVIDIA H200``; empty where there is none, or none was recorded."""
    names = [name for system in record.systems.values() for name in system.start.gpu_names]
    if not names:
        models = [rank.models[-1] for rank in record.ranks.values() if rank.models]
        names = [
            one.device_name for one in models if one.device_name for _ in range(one.num_devices)
        ]
    counts = Counter(names)
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in counts.items())


def describe_progress(protocol: ProtocolResult) -> str:
    """How far a protocol has come that has not made every run; empty for all others."""
    runs = [run for arm in protocol.arms for run in arm.runs]
    if not protocol.planned_runs or len(runs) >= protocol.planned_runs:
        return ""
    failed = sum(run.status == "failed" for run in runs)
    words = f"{len(runs)} of {protocol.planned_runs} runs done"
    words += f", {failed} of them failed" if failed else ""
    if not protocol.pairs:
        return f"{words}, no pair yet."
    planned = f" of {protocol.planned_pairs}" if protocol.planned_pairs else ""
    is_one = protocol.planned_pairs == 1 if planned else protocol.pairs == 1
    return f"{words}, {protocol.pairs}{planned} {'pair' if is_one else 'pairs'}."


def no_counted_run(protocol: ProtocolResult) -> str:
    """Why an arm has no figures."""
    return "No measured run yet." if describe_progress(protocol) else "No measured run."


def describe_replacements(summary: RunSummary) -> str:
    """The functions of Axolotl that were replaced; a dash where the record does not tell."""
    return "–" if summary.replacements is None else ", ".join(summary.replacements) or "none"


def find_alarms(summary: RunSummary, record: RunRecord | None) -> list[str]:
    """What must be told before any verdict: losses that are no numbers, a run that ended badly.

    One sentence each; none for a run that ended well. Losses are in the record alone, and a record
    that goes on looks like one cut off.
    """
    alarms = []
    logs = [] if record is None else record.find_losses()
    wrong = [line for line in logs if not math.isfinite(line.values["loss"])]
    if wrong:
        is_nan = {math.isnan(line.values["loss"]) for line in wrong}
        kind = "NaN or infinite" if len(is_nan) > 1 else "NaN" if True in is_nan else "infinite"
        first = wrong[0].step
        if len(wrong) == len(logs) - logs.index(wrong[0]):
            alarms.append(f"The loss is {kind} from step {first:,} on.")
        else:
            alarms.append(
                f"{len(wrong):,} of {len(logs):,} losses are {kind}, the first at step {first:,}."
            )
    after = format_duration(summary.duration_seconds)
    error = f" ({' '.join(summary.error.split())})" if summary.error else ""
    ends = {
        "exception": f"An error ended the run after {after}{error}",
        "interrupted": f"The run was interrupted after {after}",
        "cut off": f"The run stopped without a final record after {after}, or is still running",
    }
    if summary.end_reason in ends:
        alarms.append(f"{ends[summary.end_reason]}: the figures cover what was recorded.")
    return alarms
