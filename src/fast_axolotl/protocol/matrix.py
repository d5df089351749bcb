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
from typing import Literal

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
from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow
from fast_axolotl.record.run_folders import read_training

__all__ = [
    "ArmFigures",
    "RunFigures",
    "build_matrix",
    "compare_values",
    "find_cell",
    "make_row",
    "primary_name",
    "read_figures",
    "sum_up",
]

Outcome = Literal["better", "worse", "changed", "no detectable change", "not compared", ""]

NO_RUN = "no run of this arm counts"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """The runs of an arm that count, one for each pair."""

    name: str
    runs: tuple[RunFigures | None, ...]
    """``None``: that pair's run failed or was not made."""

    def values(self, name: str) -> list[float | None]:
        """One figure, in the order of the pairs."""
        return [None if run is None else run.values[name] for run in self.runs]

    def reason(self, name: str) -> str:
        """Why a figure is missing."""
        told = (run.reasons.get(name, "") for run in reversed(self.runs) if run is not None)
        return next(filter(None, told), "" if any(self.runs) else NO_RUN)


def build_matrix(arms: Sequence[ArmFigures]) -> Matrix:
    """All figures; the first arm is the baseline."""
    base = arms[0]
    rows = []
    for figure in MATRIX:
        cells = []
        for arm in arms[1:]:
            values = arm.values(figure.name)
            if all(value is None for value in values):
                reason = arm.reason(figure.name)
                cells.append(Cell(value=None, outcome="not compared", reason=reason))
            else:
                cells.append(compare_values(figure, base.values(figure.name), values))
        reason = base.reason(figure.name)
        rows.append(make_row(figure, base.values(figure.name), reason, cells))
    return Matrix(arms=tuple(arm.name for arm in arms), rows=tuple(rows))


def make_row(
    figure: Figure, baseline: Sequence[float | None], reason: str, cells: Sequence[Cell]
) -> MatrixRow:
    """One figure: the baseline's own values, why there are none, and the other arms beside it."""
    measured = tuple(value for value in baseline if value is not None)
    first = Cell(
        value=statistics.median(measured) if measured else None,
        values=measured,
        reason="" if measured else reason,
    )
    return MatrixRow(
        name=figure.name,
        label=figure.label,
        unit=figure.unit,
        better=figure.better,
        cells=(first, *cells),
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
