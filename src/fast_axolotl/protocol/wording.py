"""The answer of a protocol in plain words: does it help, why, and what to do.

Read as the five steps say: a stall that drops means that the data was the bottleneck; tokens that
do not move with a stall near 0 mean that the model's own work takes the time, and no reader helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fast_axolotl.protocol.matrix import find_cell, primary_name
from fast_axolotl.record.comparison import Arm, Cell, Matrix

__all__ = ["describe_result", "label_of"]

_COMPUTE_BOUND = 0.05
_DATA_BOUND = 0.10
"""Stall fractions of the verdict: below, the model decides; from here on, the data."""

_USE = {
    "drop-in": "Use it: start Axolotl behind fast-axolotl run --, or add its plugin to the YAML.",
    "streaming": "Use it: set streaming: true and dataset_use_rust_streaming: true in the YAML.",
    "candidate": "Use the candidate.",
}


def describe_result(
    arms: Sequence[Arm],
    matrix: Matrix,
    *,
    are_losses_equal: bool | None,
    losses: str,
    dedupe: Mapping[str, Any],
) -> str:
    """One paragraph."""
    sentences = [losses] if are_losses_equal is False else []
    for arm in arms[1:]:
        sentences += _describe_arm(arms[0], arm, matrix)
    if len(arms) == 1 and arms[0].headline:
        sentences.append(f"{arms[0].name}: {arms[0].headline}")
    if dedupe:
        sentences.append(dedupe["sentence"])
    return " ".join(dict.fromkeys(sentences))


def label_of(matrix: Matrix, name: str) -> str:
    """What a figure is called."""
    return next((row.label for row in matrix.rows if row.name == name), name)


def _describe_arm(baseline: Arm, arm: Arm, matrix: Matrix) -> list[str]:
    for one in (baseline, arm):
        if not any(run.status == "done" for run in one.runs):
            return [f"{one.name} has no run that counts: the end of its log tells why."]
    name = primary_name(matrix, arm.name)
    cell = find_cell(matrix, name, arm.name)
    if cell is None:
        return [f"{arm.name}: no pair of runs counts yet."]
    sentences = [_speed(arm.name, label_of(matrix, name), cell)]
    if name == "duration_seconds" and arm.headline:
        sentences.append(
            f"Steps could not be compared: {arm.headline}{_MORE_STEPS[_is_short(arm)]}"
        )
    stall = _stall(matrix, arm.name)
    if stall is not None:
        sentences.append(_describe_stall(*stall, is_faster=cell.outcome == "better"))
    sentences += _side_effects(matrix, arm.name)
    sentences += _advise(arm, cell, find_cell(matrix, "start_to_step_seconds", arm.name))
    return sentences


_MORE_STEPS = {
    True: " Give more steps, or make the loader's queue shorter: --pin prefetch_factor=2.",
    False: "",
}


def _is_short(arm: Arm) -> bool:
    return arm.verdict in ("inconclusive warming", "inconclusive short")


def _speed(arm: str, label: str, cell: Cell) -> str:
    if cell.ratio is None:
        return f"{arm}: {label} could not be compared ({cell.reason})."
    if cell.low is None:
        return (
            f"{arm}: {label} {cell.ratio:.2f} × the baseline in one pair of runs, which cannot "
            "tell a change from noise: give --pairs 5."
        )
    interval = f"{cell.ratio:.3f} × the baseline, 95 % interval {cell.low:.3f} to {cell.high:.3f}"
    words = {
        "better": f"{arm} is better: {label} {interval}.",
        "worse": f"{arm} is WORSE: {label} {interval}.",
        "no detectable change": f"{arm}: no detectable change in {label} ({interval}): these runs "
        f"could have shown one of {_visible(cell)} or more.",
    }
    return words.get(cell.outcome, f"{arm}: {label} {interval}.")


def _visible(cell: Cell) -> str:
    """The change that half an interval is."""
    assert cell.ratio is not None
    assert cell.high is not None
    return f"{100 * (cell.high / cell.ratio - 1):.2g} %"


def _stall(matrix: Matrix, arm: str) -> tuple[float, float] | None:
    """Of baseline and arm; by the device where that is known."""
    for name in ("device_stall_fraction", "host_stall_fraction"):
        cells = [find_cell(matrix, name, one) for one in (matrix.arms[0], arm)]
        values = [cell.value for cell in cells if cell is not None and cell.value is not None]
        if len(values) == 2:
            return values[0], values[1]
    return None


def _describe_stall(before: float, after: float, *, is_faster: bool) -> str:
    change = f"Stall went from {100 * before:.1f} % to {100 * after:.1f} %"
    if before >= _DATA_BOUND and after < before / 2:
        why = "the data was a bottleneck, and it is less of one now"
    elif after >= _DATA_BOUND:
        why = "training still waits for data"
    elif before < _COMPUTE_BOUND and not is_faster:
        why = "the model's own work takes the time, and no faster reader can help that"
    else:
        why = "little of the time is waiting for data"
    return f"{change}: {why}."


_EFFECTS = {
    "start_to_step_seconds": "The first step comes after",
    "working_set_bytes": "The working set is",
}


def _side_effects(matrix: Matrix, arm: str) -> list[str]:
    found = []
    for name, words in _EFFECTS.items():
        cell = find_cell(matrix, name, arm)
        if cell is not None and cell.outcome in ("better", "worse"):
            unit = "× the time" if name.endswith("_seconds") else "× the baseline's"
            found.append(f"{words} {cell.ratio:.2f} {unit} ({cell.low:.2f} to {cell.high:.2f}).")
    return found


def _advise(arm: Arm, primary: Cell, start: Cell | None) -> list[str]:
    advice = []
    use = _USE.get(arm.name, f"Use {arm.name}.")
    if primary.outcome == "better":
        advice.append(use)
    elif primary.outcome == "worse":
        advice.append("Keep the baseline.")
    elif primary.outcome == "no detectable change" and start is not None:
        if start.outcome == "better":
            advice.append(f"{use} What it gains is the time before the first step.")
        else:
            advice.append("It makes no difference that could be seen here.")
    if arm.action:
        advice.append(f"Next: {arm.action}")
    return advice
