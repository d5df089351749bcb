"""Rows of a batch, or of many batches, by their numbers.

pyarrow's ``take`` knows no text views and no run-end encoded columns, and on a column of many
chunks it may join them all, which fails past 2 GB. So rows are taken batch by batch, and a column
that ``take`` does not know is put together from slices, which every type has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["gather", "take_rows"]


def take_rows(batch: pa.RecordBatch, rows: Any) -> pa.RecordBatch:
    """The rows with these indices, an int64 array, in this order."""
    if len(rows) == batch.num_rows and (rows == np.arange(batch.num_rows)).all():
        return batch
    columns = [_take(column, rows) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def gather(batches: Sequence[pa.RecordBatch], rows: Any) -> pa.RecordBatch:
    """Rows counted over all the batches, in any order."""
    edges = np.cumsum([0, *(batch.num_rows for batch in batches)])
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    cuts = np.searchsorted(ranked, edges)
    taken = [
        take_rows(batch, ranked[start:stop] - edge)
        for batch, edge, start, stop in zip(batches, edges, cuts, cuts[1:], strict=False)
        if stop > start
    ]
    back = np.empty(len(rows), np.int64)
    back[order] = np.arange(len(rows))
    return take_rows(pa.concat_batches(taken), back)


def _take(column: pa.Array, rows: Any) -> pa.Array:
    try:
        return column.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(rows))
        runs = [
            column.slice(row, length) for row, length in zip(rows[starts], lengths, strict=True)
        ]
        return pa.concat_arrays(runs) if runs else column.slice(0, 0)
