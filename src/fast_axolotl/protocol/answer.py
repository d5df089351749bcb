"""The answer of a protocol in plain words: does it help, why, and what to do.

Read as the five steps say: a stall that drops means that the data was the bottleneck; tokens that
do not move with a stall near 0 mean that the model's own work takes the time, and no reader helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fast_axolotl.protocol.matrix import find_cell, primary_name
from fast_axolotl.record.protocol_result import Arm, Cell, Matrix
from fast_axolotl.record.thresholds import DATA_STALL, FREE_STALL
from fast_axolotl.record.units import count_words, format_share

__all__ = ["describe_result", "find_missing", "label_of"]

_MOST_PERCENT = 2.0
"""A factor up to this is written as so many per cent more."""

_EFFECTS = {
    "start_to_step_seconds": "The first step comes after",
    "working_set_bytes": "The working set is",
}

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
    dedupe: Mapping[str, Any],
) -> str:
    """A line for each arm. That losses differ is told before it, wherever it is shown."""
    is_trusted = are_losses_equal is not False
    lines = [
        " ".join(_describe_arm(arms[0], arm, matrix, is_trusted=is_trusted)) for arm in arms[1:]
    ]
    if len(arms) == 1 and arms[0].headline:
        lines.append(f"{arms[0].name}: {arms[0].headline}")
    if dedupe:
        lines.append(dedupe["sentence"])
    return "\n".join(dict.fromkeys(lines))


def label_of(matrix: Matrix, name: str) -> str:
    """What a figure is called."""
    return next((row.label for row in matrix.rows if row.name == name), name)


def _describe_arm(baseline: Arm, arm: Arm, matrix: Matrix, *, is_trusted: bool) -> list[str]:
    missing = find_missing(baseline, arm)
    if missing:
        return [missing]
    name = primary_name(matrix, arm.name)
    cell = find_cell(matrix, name, arm.name)
    if cell is None or not cell.values:
        return [f"{arm.name}: no pair of runs counts yet."]
    if name == "duration_seconds" and (baseline.steps or 0) != (arm.steps or 0):
        less = min(baseline, arm, key=lambda one: one.steps or 0)
        first, second = (
            count_words(round(one.steps or 0), "training step") for one in (baseline, arm)
        )
        return [
            f"{baseline.name} recorded {first}, {arm.name} {second}: they have not done the same "
            f"work, so nothing is compared. {less.headline}"
        ]
    sentences = [_describe_speed(arm.name, label_of(matrix, name), cell)]
    if name == "duration_seconds":
        # Both arms train, and neither says how fast.
        early = ("inconclusive warming", "inconclusive short")
        unsure = next((one for one in (baseline, arm) if one.verdict in early), None)
        if unsure is not None:
            is_own = arm.name == "candidate"
            pinned = "DataLoader(prefetch_factor=2)" if is_own else "--pin prefetch_factor=2"
            sentences.append(
                f"Steps could not be compared: {unsure.headline} Give more steps, or make the "
                f"loader's queue shorter: {pinned}."
            )
        elif arm.headline:
            sentences.append(f"Steps could not be compared: {arm.headline}")
    is_relieved = False
    stall = _stall(matrix, arm.name)
    if stall is not None:
        before, after = stall
        is_relieved = before >= DATA_STALL and after < before / 2
        if arm.verdict.startswith("inconclusive"):
            why = ""
        elif is_relieved:
            why = ": the data was a bottleneck, and it is less of one now"
        elif after >= DATA_STALL:
            why = f": training {'still waits' if before >= DATA_STALL else 'waits'} for data"
        elif before < FREE_STALL and cell.outcome != "better":
            why = ": the model's own work takes the time, and no faster reader can help that"
        else:
            why = ": little of the time is waiting for data"
        sentences.append(f"Stall went from {format_share(before)} to {format_share(after)}{why}.")
    for effect, words in _EFFECTS.items():
        change = find_cell(matrix, effect, arm.name)
        if change is not None and change.outcome in ("better", "worse"):
            unit = "× the time" if effect.endswith("_seconds") else "× the baseline's"
            interval = f"({change.low:.2f} to {change.high:.2f})"
            sentences.append(f"{words} {change.ratio:.2f} {unit} {interval}.")
    if not is_trusted:
        return [*sentences, "Explain the losses first: the arms have not learned the same."]
    start = find_cell(matrix, "start_to_step_seconds", arm.name)
    return [*sentences, *_advise(baseline, arm, cell, start, is_relieved=is_relieved)]


def find_missing(baseline: Arm, arm: Arm) -> str:
    """Why the two cannot be compared, if they cannot."""
    both = (baseline, arm)
    waiting = [one.name for one in both if all(run.pair < 0 for run in one.runs)]
    if waiting:
        return f"{' and '.join(waiting)}: no run that counts yet."
    done = [
        {run.pair for run in one.runs if run.pair >= 0 and run.status == "done"} for one in both
    ]
    failed = " or ".join(one.name for one, pairs in zip(both, done, strict=True) if not pairs)
    if failed:
        return f"No run of {failed} that counts has succeeded: the end of the log tells why."
    return "" if done[0] & done[1] else f"{arm.name}: in no pair of runs have both arms succeeded."


def _describe_speed(arm: str, label: str, cell: Cell) -> str:
    if cell.ratio is None:
        return f"{arm}: {label} could not be compared ({cell.reason})."
    if cell.low is None:
        return (
            f"{arm}: {label} {cell.ratio:.2f} × the baseline in one pair of runs, which cannot "
            "tell a change from noise: give --pairs 5."
        )
    assert cell.high is not None
    interval = f"{cell.ratio:.3f} × the baseline, 95 % interval {cell.low:.3f} to {cell.high:.3f}"
    # The smallest change that would have shown: half of the interval.
    factor = cell.high / cell.ratio
    visible = f"{factor:.2g} times" if factor > _MOST_PERCENT else f"{100 * (factor - 1):.2g} %"
    words = {
        "better": f"{arm} is better: {label} {interval}.",
        "worse": f"{arm} is WORSE: {label} {interval}.",
        "no detectable change": f"{arm}: no detectable change in {label} ({interval}): these runs "
        f"could have shown one of {visible} or more.",
    }
    return words.get(cell.outcome, f"{arm}: {label} {interval}.")


def _stall(matrix: Matrix, arm: str) -> tuple[float, float] | None:
    """Of baseline and arm; by the device where that is known."""
    for name in ("device_stall_fraction", "host_stall_fraction"):
        cells = [find_cell(matrix, name, one) for one in (matrix.arms[0], arm)]
        values = [cell.value for cell in cells if cell is not None and cell.value is not None]
        if len(values) == 2:
            return values[0], values[1]
    return None


def _advise(
    baseline: Arm, arm: Arm, primary: Cell, start: Cell | None, *, is_relieved: bool
) -> list[str]:
    use = _USE.get(arm.name, f"Use {arm.name}.")
    if primary.outcome == "better":
        return [use, *_then("After that", arm)]
    if primary.outcome == "worse":
        return ["Keep the baseline.", *_then("Next", baseline)]
    advice = []
    if primary.outcome == "no detectable change":
        if start is not None and start.outcome == "better":
            gained = f"{use} What it gains is the time before the first step."
            return [gained, *_then("After that", arm)]
        if is_relieved:
            advice.append(
                "What the shorter waits gain does not stand out from the noise of these runs: give "
                "more pairs, or more steps."
            )
        else:
            advice.append("It makes no difference that could be seen here.")
    return [*advice, *_then("Next", arm)]


def _then(when: str, arm: Arm) -> list[str]:
    """What the verdict of an arm advises."""
    if not arm.action:
        return []
    is_open = arm.verdict.startswith("inconclusive")
    return [f"{f'To find out what bounds {arm.name}' if is_open else when}: {arm.action}"]
