"""Cut rows into batches, in the form that the caller wants.

``Batcher`` cuts batches of a fixed number of rows, fewer where rows are very large. The number of
bytes a row takes is the mean over its block, so the cut points are the same however the reader came
to a position. Slices share memory with their block; a batch is only copied where it joins two
blocks.

``convert`` makes Python lists, numpy arrays or torch tensors of a batch. Nested values arrive as
values. ``numpy`` and ``torch`` give flat values and offsets for list columns, so no token is ever a
Python object; text stays a list of ``str``. ``to_numpy`` of pyarrow is avoided where it can be: it
imports pandas, which takes longer than a small file.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError, MissingExtraError, UsageError
from fast_axolotl.reading.order import Position
from fast_axolotl.reading.rows import Rows
from fast_axolotl.reading.schema import MIXED, conform, is_number

OUTPUTS = ("python", "arrow", "numpy", "torch")

_NO_PYTHON_VALUE = (ArithmeticError, ValueError, pa.ArrowException)
"""Raised for dates past the year 9999, decimals past their precision, unknown time zones."""


class Batch(NamedTuple):
    """A batch, and what is known at its end."""

    rows: pa.RecordBatch
    places: list[tuple[int, Position]]
    """Its parts: their rows, and where the first of these stands."""
    after: Position
    """Where the row behind the last one stands."""
    next_schema: pa.Schema
    """The types of the rows that come next, or else those of the last ones."""


class Batcher:
    """Collects the rows of blocks and gives them back in batches with the position after each."""

    def __init__(self, batch_size: Callable[[], int], most_bytes: int) -> None:
        self._batch_size = batch_size
        self._most_bytes = most_bytes
        self._held: deque[tuple[pa.RecordBatch, Position, float]] = deque()
        """Rows not yet delivered, where the first of them stands, and the bytes of each."""
        self._rows = 0
        self._bytes = 0.0
        self._after, self._schema = Position(), pa.schema([])
        """What comes behind all that is held."""

    def add(self, rows: Rows) -> None:
        """Rows that come next."""
        position = rows.start
        for part in rows.table.to_batches():
            self._held.append((part, position, rows.row_bytes))
            position = position.forward(part.num_rows)
        self._rows += rows.table.num_rows
        self._bytes += rows.table.num_rows * rows.row_bytes
        self._after, self._schema = rows.after, rows.table.schema

    def cut(self, *, is_end: bool = False) -> Iterator[Batch]:
        """The batches that are complete; at the end also the last one."""
        while self._rows and (
            is_end or self._rows >= self._batch_size() or self._bytes >= self._most_bytes
        ):
            yield self._next()

    def _next(self) -> Batch:
        taken: list[pa.RecordBatch] = []
        places: list[tuple[int, Position]] = []
        missing, room = self._batch_size(), float(self._most_bytes)
        while self._held and missing:
            rows, position, row_bytes = self._held.popleft()
            fitting = int(room // row_bytes) if row_bytes else missing
            count = min(len(rows), missing, max(fitting, not taken))
            if count < len(rows):
                rest = rows.slice(count), position.forward(count), row_bytes
                self._held.appendleft(rest)
                if count == 0:
                    break
            taken.append(rows.slice(0, count))
            places.append((count, position))
            missing -= count
            room -= count * row_bytes
            self._rows -= count
            self._bytes -= count * row_bytes
        after, next_schema = self._after, self._schema
        if self._held:
            after, next_schema = self._held[0][1], self._held[0][0].schema
        schema, batch = taken[-1].schema, taken[0]
        if len(taken) > 1:
            tables = [conform(pa.Table.from_batches([part]), schema) for part in taken if len(part)]
            (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
        return Batch(batch, places, after, next_schema)


def convert(batch: pa.RecordBatch, output: str) -> Any:
    """A batch in one of the ``OUTPUTS``."""
    if output == "arrow":
        return batch
    if output not in OUTPUTS:
        raise UsageError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
    change = _values if output == "python" else _arrays
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = change(column)
        except _NO_PYTHON_VALUE as error:
            raise DataError(
                f"column {name!r} of type {column.type} has a value that Python cannot represent "
                f'({error}); pass output="arrow", or read only other columns'
            ) from error
    return _tensors(columns) if output == "torch" else columns


def _tensors(columns: dict[str, Any]) -> dict[str, Any]:
    """Tensors in place of arrays."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("the torch output needs PyTorch: pip install torch") from None

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tensors(item) for name, item in value.items()}
        if isinstance(value, np.ndarray) and value.dtype != object:
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        return value

    return {name: tensors(value) for name, value in columns.items()}


def _values(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    has_json = str(MIXED) in str(array.type)
    return [_parsed(value, array.type) for value in values] if has_json else values


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """The value of mixed types for the JSON text that stands for it, at any depth."""
    if value is None:
        return None
    if kind == MIXED:
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {field.name: _parsed(value[field.name], field.type) for field in kind}
    return [_parsed(item, kind.value_type) for item in value] if kind.num_fields == 1 else value


def _arrays(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _arrays(array.dictionary_decode())
    if is_number(kind) and array.null_count == 0:
        return np.from_dlpack(array)
    if pa.types.is_floating(kind) or (pa.types.is_boolean(kind) and array.null_count == 0):
        return array.to_numpy(zero_copy_only=False)
    inner = kind
    while pa.types.is_list(inner) or pa.types.is_large_list(inner):
        inner = inner.value_type
    is_flat = is_number(inner) or pa.types.is_boolean(inner)
    if is_flat and inner != kind and array.null_count == 0:
        offsets = np.zeros(1, np.int64)
        if len(array):
            offsets = np.from_dlpack(array.offsets).astype(np.int64)
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        return {"values": _arrays(values), "offsets": offsets - offsets[0]}
    return _values(array)
