"""The table of all figures over all variants.

Figures are compared by the ratio of paired runs. One that can be 0 (stall, swap, reads) is compared
by its difference as soon as any run of either arm is near 0: a stall that goes from 0.01 % to
0.02 % has doubled, and nothing has happened. A difference below a tenth of what counts as near 0 is
no change at all, whatever its interval: the meter does not resolve it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fast_axolotl.protocol.statistics import (
    LEVEL,
    Estimate,
    adjust_by_holm,
    bound_spread,
    compare_runs,
    detectable_change,
)
from fast_axolotl.record import RunSummary
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.catalogue import FIGURES, MATRIX, PRIMARY, Figure
from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow, Outcome

_NO_RUN = "no run of this variant counts"

_RESOLVED_SHARE = 0.1
"""Of what counts as near 0: less than that is not resolved."""


def count_steps(summary: RunSummary) -> int:
    """Recorded steps, warm-up included."""
    return summary.steps + summary.warmup_steps


def build_matrix(arms: Mapping[str, Sequence[RunSummary | None]], spend: float = 1.0) -> Matrix:
    """Every figure of the runs that count, one for each pair; the first arm is the baseline.

    A run is ``None`` where it failed or was not made. For ``spend`` see ``statistics.spend_at``.
    """
    rows = []
    for figure in MATRIX:
        columns = []
        for runs in arms.values():
            values = [None if run is None else finite(run.figures[figure.name]) for run in runs]
            made = [run for run in runs if run is not None]
            reason = made[-1].reasons.get(figure.name, "not recorded") if made else _NO_RUN
            columns.append((values, reason))
        rows.append(make_row(figure, columns, spend=spend))
    return Matrix(arms=tuple(arms), rows=tuple(rows), spend=spend)


def make_row(
    figure: Figure, columns: Sequence[tuple[Sequence[float | None], str]], **options: Any
) -> MatrixRow:
    """One figure over all arms, not judged yet: the values of each, and why there are none.

    The first is the baseline, beside which the others are compared; ``options`` are of
    ``compare_runs``.
    """
    baseline = columns[0][0]
    cells: list[Cell] = []
    for values, missing in columns:
        measured = tuple(float(value) for value in values if value is not None)
        cell = Cell(
            value=statistics.median(measured) if measured else None,
            values=measured,
            reason="" if measured else missing,
        )
        if cells and not measured:
            cell = replace(cell, outcome="not compared")
        elif cells:
            ratio = compare_runs(baseline, values, resolution=figure.resolution, **options)
            change, tested, reason = Estimate(value=None), ratio, ratio.reason
            if figure.near_zero is not None:
                change = compare_runs(baseline, values, is_ratio=False, **options)
                both = (one for one in (*baseline, *values) if one is not None)
                if any(one < figure.near_zero for one in both):
                    near = "compared by difference, because a run is near 0, where ratios mean"
                    ratio, tested = Estimate(value=None), change
                    reason = change.reason or f"{near} nothing"
            cell = replace(
                cell,
                ratio=ratio.value,
                mean_ratio=ratio.mean,
                low=ratio.low,
                high=ratio.high,
                difference=change.value,
                difference_low=change.low,
                difference_high=change.high,
                p_value=tested.p_value,
                error=tested.error,
                degrees=tested.degrees,
                outcome="not compared" if tested.low is None else "",
                reason=reason,
            )
        cells.append(cell)
    names = {"name": figure.name, "label": figure.label, "unit": figure.unit}
    return MatrixRow(**names, better=figure.better, cells=tuple(cells))


def judge_matrix(
    matrix: Matrix, *, matters: float, times: Mapping[str, Collection[str]] | None = None
) -> Matrix:
    """What every change is called, and how small a change of the deciding figures would show.

    Of each arm ``primary_name`` decides, and ``times`` beside it. Figures that decide are tested
    among themselves, all others among themselves: Holm's correction keeps the probability that
    chance makes one of them better or worse at 5 % for either group.
    """
    columns = [[row.cells[0] for row in matrix.rows]]
    for at, arm in enumerate(matrix.arms[1:], 1):
        deciding = {primary_name(matrix, arm), *(times or {}).get(arm, ())}
        column = [
            replace(row.cells[at], is_deciding=row.name in deciding, p_adjusted=None)
            for row in matrix.rows
        ]
        for group in (True, False):
            tested = {
                number: cell.p_value
                for number, cell in enumerate(column)
                if cell.is_deciding is group
                if cell.p_value is not None and cell.p_adjusted is None
            }
            adjusted = adjust_by_holm(list(tested.values()))
            for number, p_adjusted in zip(tested, adjusted, strict=True):
                cell, size = column[number], None
                if group and cell.ratio and cell.error is not None and cell.degrees is not None:
                    # By the smallest of Holm's thresholds. A lucky protocol has a small error.
                    level, least = LEVEL * matrix.spend / len(tested), math.log1p(matters)
                    error = cell.error * bound_spread(cell.degrees)
                    change = detectable_change(error, cell.degrees, level, least)
                    size = math.expm1(min(change, 700.0))
                column[number] = replace(cell, p_adjusted=p_adjusted, detectable=size)
        columns.append(
            [_judge(row, cell, matters) for row, cell in zip(matrix.rows, column, strict=True)]
        )
    rows = tuple(
        replace(row, cells=cells)
        for row, cells in zip(matrix.rows, zip(*columns, strict=True), strict=True)
    )
    return replace(matrix, rows=rows, matters=matters)


def _judge(row: MatrixRow, cell: Cell, matters: float) -> Cell:
    """What a change is called; one of shares is also measured in points."""
    scales = []
    if cell.ratio is not None and cell.low is not None and cell.high is not None:
        scales.append((cell.ratio - 1, cell.low - 1, cell.high - 1, matters))
    if cell.difference_low is not None and cell.difference_high is not None:
        assert cell.difference is not None
        unresolved = _RESOLVED_SHARE * (FIGURES[row.name].near_zero or 0.0)
        least = max(unresolved, matters if row.unit == "share" else 0.0)
        scales.append((cell.difference, cell.difference_low, cell.difference_high, least))
    if not scales or (cell.ratio is not None and cell.low is None):
        return replace(cell, outcome="not compared")
    value, low, high, _ = scales[0]
    is_beyond = low > 0 or high < 0
    # An earlier version has kept no probability.
    is_found = is_beyond if cell.p_adjusted is None else cell.p_adjusted <= LEVEL
    is_small = any(abs(one) < least for one, _, _, least in scales)
    is_inside = any(-least <= begin and end <= least for _, begin, end, least in scales)
    outcome: Outcome = "no clear change"
    reason = cell.reason
    if is_inside or (is_found and is_small):
        outcome = "no change that matters"
    elif is_found:
        outcome = "changed"
        if row.better:
            outcome = "better" if (value > 0) == (row.better == "higher") else "worse"
    elif is_beyond:
        reason = f"its interval excludes 1, but p = {cell.p_adjusted:.2g} after Holm's correction"
    return replace(cell, outcome=outcome, reason=reason)


def describe_judgement(matrix: Matrix) -> str:
    """Which figures decide, and when another row is called better or worse; empty: none does."""
    deciding = [
        row.label
        for row in matrix.rows
        if any(cell.is_deciding and cell.p_value is not None for cell in row.cells)
    ]
    if not deciding:
        return ""
    return (
        f"Primary metrics: {', '.join(deciding)}. Any other row counts as better or worse only "
        "after Holm's correction for the number of rows (p), even if its interval excludes 1. A "
        f"change below {100 * matrix.matters:g} % does not matter (--matters)."
    )


def primary_name(matrix: Matrix, arm: str) -> str:
    """The figure that answers whether an arm is better than the baseline; empty: there is none."""
    at = matrix.arms.index(arm)
    both = {row.name: (row.cells[0].value, row.cells[at].value) for row in matrix.rows}
    known = {name for name, values in both.items() if None not in values}
    return next((name for name in PRIMARY if name in known), "")
