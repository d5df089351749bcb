"""What must be told before any verdict: a run that did not end well, and losses that are none."""

from __future__ import annotations

import math

from fast_axolotl.record import Log, RunRecord, RunSummary
from fast_axolotl.report.values import format_length

__all__ = ["find_alarms"]

_KEPT = "the figures are of what was recorded."


def find_alarms(summary: RunSummary, record: RunRecord | None) -> list[str]:
    """One sentence each; none for a run that ended well. Losses are in the record alone."""
    losses = "" if record is None else _losses(record)
    return [alarm for alarm in (losses, _ending(summary)) if alarm]


def _ending(summary: RunSummary) -> str:
    """How the run ended, unless it finished. A record that goes on looks like one cut off."""
    after = format_length(summary.duration_seconds)
    if summary.end_reason == "exception":
        error = f" ({' '.join(summary.error.split())})" if summary.error else ""
        return f"An error ended the run after {after}{error}: {_KEPT}"
    if summary.end_reason == "interrupted":
        return f"The run was interrupted after {after}: {_KEPT}"
    if summary.end_reason == "cut off":
        return f"The run was cut off after {after}, or still goes on: {_KEPT}"
    return ""


def _losses(record: RunRecord) -> str:
    """From which step on the trainer's losses are no numbers."""
    logs = record.find_losses()
    wrong = [line for line in logs if not math.isfinite(line.values["loss"])]
    if not wrong:
        return ""
    first = wrong[0].step
    kind = _kind(wrong)
    if len(wrong) == len(logs) - logs.index(wrong[0]):
        return f"The losses are {kind} from step {first:,} on."
    return f"{len(wrong):,} of {len(logs):,} losses are {kind}, the first at step {first:,}."


def _kind(logs: list[Log]) -> str:
    is_nan = {math.isnan(line.values["loss"]) for line in logs}
    return "NaN or infinite" if len(is_nan) > 1 else "NaN" if True in is_nan else "infinite"
