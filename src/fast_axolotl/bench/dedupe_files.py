"""``dedupe_files`` on a Parquet file of short rows, each run in a fresh process.

Once with room for everything, once with the least memory it takes, where a large input goes over
to disk. What it writes is compared with ``unique_rows`` over the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.bench.contest import Session
from fast_axolotl.bench.goals import most_goal
from fast_axolotl.bench.matrix import Goal
from fast_axolotl.bench.operation_result import Measurement, OperationCase
from fast_axolotl.bench.peaks import dedupe_in_child
from fast_axolotl.bench.sizes import size_name
from fast_axolotl.bench.workloads import short_texts

__all__ = ["files_case"]

MOST_STATE_BYTES = 40.0
"""For each different row."""
MOST_PEAK_MEGABYTES = 1000.0
_LEAST_STATE_ROWS = 100_000
"""The smallest set weighs more for a few rows."""
_LARGE_ROWS = 10_000_000
_MOST_REPEATS = 3
_BUDGETS = {"1 GB": 10**9, "192 MiB": 192 * 1024**2}
_ROW_GROUP_ROWS = 100_000


def files_case(size: int, session: Session) -> OperationCase:
    """Both budgets, some times."""
    name = f"files-{size_name(size)}"
    session.tell(f"{name}: writing the input")
    source = session.folder / "short.parquet"
    table = pa.table({"text": short_texts(size)})
    pq.write_table(table, source, row_group_size=_ROW_GROUP_ROWS)
    expected = _first_of_each(table)
    del table
    measurements = [
        _measure(source, expected, label, budget, session) for label, budget in _BUDGETS.items()
    ]
    source.unlink()
    return OperationCase(
        name=name,
        text=f"a Parquet file of {size:,} short rows, one in a hundred repeated",
        rows=size,
        unit="rows",
        measurements=tuple(measurements),
        goals=tuple(_goals(size, measurements[0])),
    )


def _first_of_each(table: pa.Table) -> pa.Table:
    from fast_axolotl.dedupe import unique_rows

    return table.take(unique_rows(table))


def _measure(
    source: Path, expected: pa.Table, label: str, budget: int, session: Session
) -> Measurement:
    name = f"budget {label}"
    runs: list[Mapping[str, Any]] = []
    is_equal = True
    for repeat in range(min(session.repeats, _MOST_REPEATS)):
        session.tell(f"{source.stem}, {name}: run {repeat + 1}")
        target = session.folder / f"unique-{budget}.parquet"
        found = dedupe_in_child(source, target, budget)
        if isinstance(found, str):
            return Measurement(name=name, values={}, reason=found)
        is_equal = is_equal and pq.read_table(target).equals(expected)
        target.unlink()
        runs.append(found)
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return Measurement(
        name=name,
        seconds=tuple(run["seconds"] for run in runs),
        values={
            "rows_per_second": round(median(run["rows_per_second"] for run in runs)),
            "kept_rows": runs[0]["rows_out"],
            "state_bytes": runs[0]["state_bytes"],
            "state_bytes_per_row": runs[0]["state_bytes"] / runs[0]["rows_out"],
            "spilled_bytes": runs[0]["spilled_bytes"],
            "peak_bytes": max(peaks, default=None),
            "equal": is_equal,
        },
        reason=runs[0]["reason"],
    )


def _goals(size: int, run: Measurement) -> list[Goal]:
    values, reason = run.values, run.reason
    state = values.get("state_bytes_per_row")
    goals = []
    if size >= _LEAST_STATE_ROWS:
        text = "set of rows seen, per kept row"
        goals.append(most_goal(text, MOST_STATE_BYTES, "bytes", state, reason))
    if size == _LARGE_ROWS:
        peak, spilled = values.get("peak_bytes"), values.get("spilled_bytes")
        megabytes = None if peak is None else peak / 1e6
        text = f"memory, {run.name}"
        goals.append(most_goal(text, MOST_PEAK_MEGABYTES, "MB", megabytes, reason))
        goals.append(most_goal(f"spilled, {run.name}", 0.0, "MB", spilled, reason))
    return goals
