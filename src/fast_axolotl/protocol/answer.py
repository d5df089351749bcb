"""The answer of a protocol in words: does it help, by how much, and what to do.

What bounds each arm, and so whether a reader can help at all, its own verdict says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fast_axolotl.protocol.matrix import primary_name
from fast_axolotl.record.protocol_result import Arm, Matrix, MatrixRow
from fast_axolotl.record.units import count_words, format_share, format_value

_MOST_PERCENT = 2.0
"""A factor up to this is written as so many per cent more."""

_WORDS = {
    "duration_seconds": ("the whole run", "longer", "shorter", "long"),
    "start_to_step_seconds": ("the time to first step", "longer", "shorter", "long"),
    "working_set_bytes": ("the working set", "larger", "smaller", "large"),
}
"""What a figure is called in a sentence, and its comparatives; all others are rates."""
_RATE = ("training", "faster", "slower", "fast")
_FOUND = ("better", "worse")

_USE = {
    "drop-in": "Use it: start Axolotl with fast-axolotl run --, or add its plugin to the YAML.",
    "streaming": "Use it: set streaming: true and dataset_use_rust_streaming: true in the YAML.",
    "candidate": "Use the candidate.",
}


def describe_result(
    arms: Sequence[Arm], matrix: Matrix, *, are_losses_equal: bool | None, dedupe: Mapping[str, Any]
) -> str:
    """For each arm one line to repeat, then one with the figures and what to do.

    That losses differ is told before it, wherever it is shown.
    """
    is_trusted = are_losses_equal is not False
    lines = []
    for arm in arms[1:]:
        headline, *rest = _describe_arm(arms[0], arm, matrix, is_trusted=is_trusted)
        lines += [headline, *filter(None, [" ".join(filter(None, rest))])]
    if dedupe:
        lines.append(dedupe["sentence"])
    return "\n".join(dict.fromkeys(lines))


def _describe_arm(baseline: Arm, arm: Arm, matrix: Matrix, *, is_trusted: bool) -> list[str]:
    if missing := find_missing(baseline, arm):
        return [missing]
    name = primary_name(matrix, arm.name)
    if not name:
        return [f"{arm.name}: no complete pair of runs yet."]
    if name == "duration_seconds" and (baseline.steps or 0) != (arm.steps or 0):
        return [f"{arm.name} did not do the baseline's work, so nothing is compared."]
    at = matrix.arms.index(arm.name)
    # From the last row to the first: the time saved comes before the speed.
    deciding = [row for row in reversed(matrix.rows) if row.cells[at].is_deciding]
    outcomes = {row.name: row.cells[at].outcome for row in deciding}
    sentences = _describe_speed(arm.name, deciding, at)
    [stall] = (row.cells for row in matrix.rows if row.name == "stall_fraction")
    if stall[0].value is not None and stall[at].value is not None:
        ends = format_share(stall[0].value), format_share(stall[at].value)
        sentences.append(f"Stall: {' → '.join(ends)}.")
    for row in matrix.rows:
        if row.name in _WORDS and row not in deciding and row.cells[at].outcome in _FOUND:
            change = _describe_change(row, at)
            sentences.append(f"{change[0].upper()}{change[1:]}.")
    if not is_trusted:
        return [
            *sentences,
            "Explain the different losses first: the variants did not learn the same.",
        ]
    found = set(outcomes.values()) & set(_FOUND)
    if outcomes.get("duration_seconds") in _FOUND:
        # Whatever gained or lost the time: the whole run is what a person waits for.
        found = {outcomes["duration_seconds"]}
    if found == {"better"}:
        return [*sentences, _USE.get(arm.name, f"Use {arm.name}."), _advise("After that", arm)]
    if found == {"worse"}:
        return [*sentences, "Keep the baseline.", _advise("Next", baseline)]
    if found:
        starts_sooner = outcomes.get("start_to_step_seconds") == "better"
        sentences.append(f"It pays off only in {'short' if starts_sooner else 'long'} runs.")
    return [*sentences, _advise("Next", arm)]


def find_missing(baseline: Arm, arm: Arm) -> str:
    """Why the two cannot be compared, if they cannot."""
    done = {}
    for one in (baseline, arm):
        counted = [run for run in one.runs if run.pair >= 0]
        done[one.name] = {run.pair for run in counted if run.status == "done"}
        if not counted:
            return f"{one.name}: no counted run yet."
    if failed := [name for name, pairs in done.items() if not pairs]:
        return f"No counted run of {' or '.join(failed)} succeeded: see the end of the log."
    if done[baseline.name].isdisjoint(done[arm.name]):
        return f"{arm.name}: there is no pair in which both variants succeeded."
    return ""


def _describe_speed(arm: str, rows: Sequence[MatrixRow], at: int) -> list[str]:
    """One line that a person can repeat, then what these runs could have shown."""
    known = [row for row in rows if row.cells[at].ratio is not None]
    if not known:
        return [f"{arm}: {rows[0].label} could not be compared ({rows[0].cells[at].reason})."]
    tested = [row for row in known if row.cells[at].low is not None]
    if not tested:
        return [
            f"{arm}: {_describe_change(known[0], at, verb='was')} in one pair of runs, which "
            "cannot tell a change from noise: pass --pairs 10."
        ]
    found = [row for row in tested if row.cells[at].outcome in _FOUND]
    unclear = [row for row in tested if row.cells[at].outcome == "no clear change"]
    speed = tested[-1]
    parts = [_describe_change(row, at) for row in found]
    if not found:
        parts = ["no clear change" if unclear else "no change that matters"]
    elif speed not in found and speed.name not in _WORDS:
        parts.append(f"training speed {'shows no clear change' if unclear else 'is unchanged'}")
    sentences = [f"{arm}: {'; '.join(parts)}."]
    if unclear:
        row = speed if speed in unclear else unclear[0]
        cell = row.cells[at]
        if cell.detectable is not None:
            pairs = count_words(min(len(row.cells[0].values), len(cell.values)), "pair")
            name = _WORDS[row.name][0] if row.name in _WORDS else "training speed"
            least = f"a change in {name} of {_percent(cell.detectable)} or more"
            if cell.detectable >= 1:
                least = f"a factor in {name} of {1 + cell.detectable:.2g} or more"
            sentences.append(f"With {pairs}, {least} would show in at least 80 % of protocols.")
        reasons = {row.label: row.cells[at].reason for row in unclear}
        sentences += [f"{label}: {reason}." for label, reason in reasons.items() if reason]
    for row in tested:
        low, mean, high = (getattr(row.cells[at], name) for name in ("low", "mean_ratio", "high"))
        if mean is not None and not low <= mean <= high:
            sentences.append(f"{row.label}: outliers move the mean of all pairs to {mean:.3f}.")
    return sentences


def _describe_change(row: MatrixRow, at: int, verb: str = "is") -> str:
    """``the whole run is 29 % shorter (61.3 → 43.3 s, 95 % interval 0.698× to 0.716×)``."""
    subject, more, less, times = _WORDS.get(row.name, _RATE)
    cell = row.cells[at]
    ratio, ends = cell.ratio, (row.cells[0].value, cell.value)
    assert ratio is not None
    if ratio >= _MOST_PERCENT:
        size = f"{ratio:.2g} times as {times}"
    else:
        size = f"{_percent(abs(ratio - 1))} {more if ratio > 1 else less}"
    first, second = (format_value(end, row.unit) for end in ends)
    interval = "" if cell.low is None else f", 95 % interval {cell.low:.3f}× to {cell.high:.3f}×"
    return f"{subject} {verb} {size} ({first} → {second}{interval})"


def _percent(share: float) -> str:
    """``9.1 %``, ``29 %``."""
    return format_share(share, decimals=int(share < 0.0995))


def _advise(when: str, arm: Arm) -> str:
    """What the verdict of an arm advises; empty where it advises nothing."""
    return f"{when}: {arm.action}" if arm.action else ""
