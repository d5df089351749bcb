"""The tables of ``bench axolotl``: what differs first, then the figures, then the goals.

The result itself has the shape of the other operations' (``operation_result``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from fast_axolotl.bench.axolotl_driver import COMPILING, IMPORTS
from fast_axolotl.bench.axolotl_runs import OURS, STOCK
from fast_axolotl.bench.matrix import Table, show_ratio, show_time
from fast_axolotl.bench.operation_result import (
    Measurement,
    OperationCase,
    OperationResult,
    operation_tables,
)

__all__ = ["ANSWERED", "COLD", "FUNCTION", "axolotl_tables"]

FUNCTION = "functions: "
"""How the name of a case begins that is one function."""
ANSWERED = "calls that fast-axolotl answered"
"""The measurement that counts them, by replacement."""
COLD = "fast-axolotl, no kernel compiled before"
"""The measurement of a run that had to compile."""

_FIRST_PHASES = ("whole process", IMPORTS, COMPILING)
_LEAST_SHOWN_SECONDS = 0.005


def axolotl_tables(result: OperationResult) -> list[Table]:
    """What is wrong, the runs with their phases, the functions, the goals."""
    functions = [case for case in result.cases if case.name.startswith(FUNCTION)]
    tables = _wrong_tables(result)
    for case in result.cases:
        if case not in functions:
            tables += _case_tables(result, case)
    tables += [_function_table(result, functions)] if functions else []
    return [*tables, operation_tables(result)[-1]]


def _case_tables(result: OperationResult, case: OperationCase) -> list[Table]:
    phases = [item for item in case.measurements if _is_phase(item)]
    told = [item for item in case.measurements if item.name in (ANSWERED, COLD)]
    rest = tuple(item for item in case.measurements if item not in (*phases, *told))
    apart = (
        replace(case, measurements=()),
        replace(case, name=f"{case.name}, run by run", timings=(), measurements=rest),
    )
    tables = operation_tables(replace(result, cases=apart))[:-1]
    tables += [_phase_table(result, case, phases)] if phases else []
    if tables:
        notes = (note for item in told for note in _notes(item))
        tables[-1] = replace(tables[-1], notes=(*tables[-1].notes, *notes))
    return tables


def _notes(item: Measurement) -> list[str]:
    if item.name == COLD:
        compiling = item.values["compiling_seconds"] or 0.0
        whole = show_time(median(item.seconds))
        return [f"{COLD}: {whole}, {show_time(compiling)} of compiling, all threads"]
    calls = ", ".join(f"{name} ×{count}" for name, count in item.values.items() if count)
    lines = [f"{ANSWERED}, forked workers apart: {calls or 'none'}"]
    return [*lines, item.reason] if item.reason else lines


def _wrong_tables(result: OperationResult) -> list[Table]:
    rows = tuple(
        (case.name, timing.reason or "")
        for case in result.cases
        for timing in case.timings
        if not timing.equal
    )
    if not rows:
        return []
    return [
        Table(
            title=f"{result.title}: INVALID, results differ from stock's",
            header=("case", "difference"),
            rows=rows,
            notes=("a case whose results differ has no speed: its goals are not met",),
        )
    ]


def _is_phase(item: Measurement) -> bool:
    return bool(item.seconds) and item.name.startswith((f"{STOCK}: ", f"{OURS}: "))


def _phase_table(
    result: OperationResult, case: OperationCase, phases: Sequence[Measurement]
) -> Table:
    """Phases in the order in which they come, stock beside ours."""
    seconds: dict[str, dict[str, float]] = {}
    for item in phases:
        arm, _, phase = item.name.partition(": ")
        seconds.setdefault(phase, {})[arm] = median(item.seconds)
    names = [*_FIRST_PHASES, *(name for name in seconds if name not in _FIRST_PHASES)]
    shown = [
        name
        for name in names
        if max(seconds.get(name, {"": 0.0}).values(), default=0.0) >= _LEAST_SHOWN_SECONDS
    ]
    return Table(
        title=f"{result.title}: {case.name}: where the time goes, medians",
        header=("", STOCK, OURS, "ratio"),
        rows=tuple(_phase_row(name, seconds[name]) for name in shown),
        notes=(),
    )


def _phase_row(name: str, seconds: dict[str, float]) -> tuple[str, ...]:
    stock, ours = seconds.get(STOCK), seconds.get(OURS)
    ratio = stock / ours if stock and ours else None
    times = ("–" if value is None else show_time(value) for value in (stock, ours))
    return name, *times, show_ratio(ratio)


def _function_table(result: OperationResult, cases: Sequence[OperationCase]) -> Table:
    rows, notes = [], []
    for case in cases:
        cells = [_spread(case, arm) for arm in (STOCK, OURS)]
        timing = case.timing(OURS)
        is_equal = "–" if timing is None else "yes" if timing.equal else "no"
        ratio = show_ratio(case.ratio(OURS, STOCK))
        name = case.name.removeprefix(FUNCTION)
        rows.append((f"{name}: {case.rows:,} {case.unit}", *cells, ratio, is_equal))
        notes += [f"{name}: {item.reason}" for item in case.measurements if item.reason]
    return Table(
        title=f"{result.title}: function by function, medians and spread",
        header=("", STOCK, OURS, "ratio", "equal"),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _spread(case: OperationCase, arm: str) -> str:
    timing = case.timing(arm)
    if timing is None:
        return "–"
    low, high = min(timing.seconds), max(timing.seconds)
    return f"{show_time(timing.median_seconds)} ({show_time(low)} – {show_time(high)})"
