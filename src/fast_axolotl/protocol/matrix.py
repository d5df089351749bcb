"""The figures of runs, and every figure over all arms beside the baseline's.

Figures are compared by the ratio of paired runs. One that can be 0 (stall, swap, reads) is compared
by its difference as soon as any run of either arm is near 0: a stall that goes from 0.01 % to
0.02 % has doubled, and nothing has happened. A difference below a tenth of what counts as near 0 is
no change at all, whatever its interval: the meter does not resolve it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.statistics import (
    Estimate,
    paired_difference,
    paired_ratio,
    unpaired_difference,
    unpaired_ratio,
)
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.catalogue import FIGURES, MATRIX, PRIMARY, Figure
from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow, Outcome
from fast_axolotl.record.run_folders import read_training

__all__ = [
    "RunFigures",
    "build_matrix",
    "compare_values",
    "find_cell",
    "make_row",
    "primary_name",
    "read_figures",
    "sum_up",
]

_NO_RUN = "no run of this arm counts"
_LATE = ("meter", "watch")
"""Who begins to sample when the process has already run for a while."""

_RESOLVED_SHARE = 0.1
"""Of what counts as near 0: less than that is not resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What one run gave."""

    summary: RunSummary
    values: Mapping[str, float | None]
    """By the name of a figure."""
    reasons: Mapping[str, str]
    """Why a value is missing."""
    losses: tuple[float, ...] = ()
    """As the trainer logged them."""

    @property
    def steps(self) -> int:
        """Recorded, warm-up included."""
        return self.summary.steps + self.summary.warmup_steps


def read_figures(folder: str | Path) -> RunFigures:
    """Reads a record and sums it up."""
    return sum_up(read_training(folder))


def sum_up(record: RunRecord) -> RunFigures:
    """All figures of a record."""
    summary = summarise(record)
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for figure in MATRIX:
        name = figure.name
        if name == "start_to_step_seconds":
            value, reason = _start_to_step(record)
        else:
            value = getattr(summary, name)
            reason = summary.reasons.get(name, "it was not recorded")
        if value is not None and math.isfinite(value):
            values[name] = float(value)
        else:
            values[name], reasons[name] = None, reason
    losses = tuple(line.values["loss"] for line in record.find_losses())
    return RunFigures(summary=summary, values=values, reasons=reasons, losses=losses)


def _start_to_step(record: RunRecord) -> tuple[float | None, str]:
    """From the start of the process: imports and prepared data come before the first fetch."""
    if record.system is None or record.system.start.source in _LATE:
        return None, FIGURES["start_to_step_seconds"].missing
    if not record.ranks:
        return None, "no training loop was seen in there"
    rank = record.ranks[min(record.ranks)]
    at = next((mark.t for mark in rank.marks if mark.name == "first_step"), None)
    if at is None:
        return None, "no step was recorded"
    seconds = rank.start.time + at - record.system.start.time
    return (seconds, "") if seconds > 0 else (None, "the wall clock was set during the run")


def build_matrix(arms: Mapping[str, Sequence[RunFigures | None]]) -> Matrix:
    """Every figure of the runs that count, one for each pair; the first arm is the baseline.

    A run is ``None`` where it failed or was not made.
    """
    rows = []
    for figure in MATRIX:
        columns = []
        for runs in arms.values():
            made = [run for run in runs if run is not None]
            told = (run.reasons.get(figure.name, "") for run in reversed(made))
            reason = next(filter(None, told), "" if made else _NO_RUN)
            values = [None if run is None else run.values[figure.name] for run in runs]
            columns.append((values, reason))
        rows.append(make_row(figure, columns))
    return Matrix(arms=tuple(arms), rows=tuple(rows))


def make_row(
    figure: Figure,
    columns: Sequence[tuple[Sequence[float | None], str]],
    *,
    is_paired: bool = True,
) -> MatrixRow:
    """One figure over all arms, the baseline first: the values of each, and why there are none."""
    (baseline, missing), *others = columns
    measured = tuple(value for value in baseline if value is not None)
    cells = [
        Cell(
            value=statistics.median(measured) if measured else None,
            values=measured,
            reason="" if measured else missing,
        )
    ]
    for values, reason in others:
        if all(value is None for value in values):
            cells.append(Cell(value=None, outcome="not compared", reason=reason))
        else:
            cells.append(compare_values(figure, baseline, values, is_paired=is_paired))
    return MatrixRow(
        name=figure.name,
        label=figure.label,
        unit=figure.unit,
        better=figure.better,
        cells=tuple(cells),
    )


def compare_values(
    figure: Figure,
    baseline: Sequence[float | None],
    arm: Sequence[float | None],
    *,
    is_paired: bool = True,
) -> Cell:
    """One figure of an arm beside the baseline's."""
    ratio = (paired_ratio if is_paired else unpaired_ratio)(baseline, arm)
    if ratio.low is not None and ratio.high is not None:
        # What the record does not resolve makes the interval wider.
        factor = 1.0 + figure.resolution
        ratio = replace(ratio, low=ratio.low / factor, high=ratio.high * factor)
    difference = None
    if figure.near_zero is not None:
        difference = (paired_difference if is_paired else unpaired_difference)(baseline, arm)
    measured = tuple(value for value in arm if value is not None)
    cell = Cell(value=statistics.median(measured) if measured else None, values=measured)
    if difference is not None:
        cell = replace(
            cell,
            difference=difference.value,
            difference_low=difference.low,
            difference_high=difference.high,
        )
        near = figure.near_zero or 0.0
        if any(value is not None and value < near for value in (*baseline, *arm)):
            if difference.low is None or difference.value is None:
                return replace(cell, outcome="not compared", reason=difference.reason)
            if abs(difference.value) < _RESOLVED_SHARE * near:
                reason = "the difference is as good as 0"
                return replace(cell, outcome="no detectable change", reason=reason)
            return replace(
                cell,
                outcome=_judge(difference, 0.0, figure.better),
                reason="compared by difference: a run is near 0, where ratios mean nothing",
            )
    return replace(
        cell,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        outcome=_judge(ratio, 1.0, figure.better),
        reason=ratio.reason,
    )


def find_cell(matrix: Matrix, name: str, arm: str) -> Cell | None:
    """The cell of a figure and an arm."""
    for row in matrix.rows:
        if row.name == name and arm in matrix.arms:
            return row.cells[matrix.arms.index(arm)]
    return None


def primary_name(matrix: Matrix, arm: str) -> str:
    """The figure that answers whether an arm is better than the baseline; empty: there is none."""
    known = set()
    for row in matrix.rows:
        cells = [find_cell(matrix, row.name, name) for name in (matrix.arms[0], arm)]
        if all(cell is not None and cell.value is not None for cell in cells):
            known.add(row.name)
    return next((name for name in PRIMARY if name in known), "")


def _judge(estimate: Estimate, unchanged: float, better: str) -> Outcome:
    if estimate.low is None or estimate.high is None:
        return "not compared"
    if estimate.low <= unchanged <= estimate.high:
        return "no detectable change"
    if not better:
        return "changed"
    is_higher = estimate.low > unchanged
    return "better" if is_higher == (better == "higher") else "worse"
