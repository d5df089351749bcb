"""Every figure over all arms, each beside the baseline's.

Figures are compared by the ratio of paired runs. One that can be 0 (stall, swap, reads) is compared
by its difference as soon as any run of either arm is near 0: a stall that goes from 0.01 % to
0.02 % has doubled, and nothing has happened. A difference below a tenth of what counts as near 0 is
no change at all, whatever its interval: the meter does not resolve it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fast_axolotl.protocol.figures import FIGURES, Figure, RunFigures, choose_primary
from fast_axolotl.protocol.statistics import (
    Estimate,
    paired_difference,
    paired_ratio,
    unpaired_difference,
    unpaired_ratio,
)
from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow

__all__ = ["ArmFigures", "build_matrix", "compare_values", "find_cell", "make_row", "primary_name"]

Outcome = Literal["better", "worse", "changed", "no detectable change", "not compared", ""]

NO_RUN = "no run of this arm counts"

_RESOLVED_SHARE = 0.1
"""Of what counts as near 0: less than that is not resolved."""


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
    rows = tuple(_row(figure, arms) for figure in FIGURES)
    return Matrix(arms=tuple(arm.name for arm in arms), rows=rows)


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
    ratio = _blurred((paired_ratio if is_paired else unpaired_ratio)(baseline, arm), figure)
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
        if _is_near_zero(figure, [*baseline, *arm]):
            outcome, reason = _judge_difference(figure, difference)
            return replace(cell, outcome=outcome, reason=reason)
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
    base = matrix.arms[0]
    both = {
        row.name
        for row in matrix.rows
        if all(_has_value(matrix, row.name, one) for one in (base, arm))
    }
    return choose_primary(both)


def _has_value(matrix: Matrix, name: str, arm: str) -> bool:
    cell = find_cell(matrix, name, arm)
    return cell is not None and cell.value is not None


def _row(figure: Figure, arms: Sequence[ArmFigures]) -> MatrixRow:
    base = arms[0]
    cells = [_cell(figure, base, arm) for arm in arms[1:]]
    return make_row(figure, base.values(figure.name), base.reason(figure.name), cells)


def _cell(figure: Figure, base: ArmFigures, arm: ArmFigures) -> Cell:
    values = arm.values(figure.name)
    if all(value is None for value in values):
        return Cell(value=None, outcome="not compared", reason=arm.reason(figure.name))
    return compare_values(figure, base.values(figure.name), values)


def _blurred(ratio: Estimate, figure: Figure) -> Estimate:
    """The interval, wider by what the record does not resolve."""
    if ratio.low is None or ratio.high is None or not figure.resolution:
        return ratio
    factor = 1.0 + figure.resolution
    return replace(ratio, low=ratio.low / factor, high=ratio.high * factor)


def _is_near_zero(figure: Figure, values: Sequence[float | None]) -> bool:
    limit = figure.near_zero
    return limit is not None and any(value is not None and value < limit for value in values)


def _judge(estimate: Estimate, unchanged: float, better: str) -> Outcome:
    if estimate.low is None or estimate.high is None:
        return "not compared"
    if estimate.low <= unchanged <= estimate.high:
        return "no detectable change"
    if not better:
        return "changed"
    is_higher = estimate.low > unchanged
    return "better" if is_higher == (better == "higher") else "worse"


def _judge_difference(figure: Figure, difference: Estimate) -> tuple[Outcome, str]:
    if difference.low is None or difference.value is None:
        return "not compared", difference.reason
    assert figure.near_zero is not None
    if abs(difference.value) < _RESOLVED_SHARE * figure.near_zero:
        return "no detectable change", "the difference is as good as 0"
    outcome = _judge(difference, 0.0, figure.better)
    return outcome, "compared by difference: a run is near 0, where ratios mean nothing"
