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
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError, MissingExtraError, UsageError
from fast_axolotl.reading.order import Position
from fast_axolotl.reading.schema import MIXED, conform, is_number

OUTPUTS = ("python", "arrow", "numpy", "torch")

_NO_PYTHON_VALUE = (ArithmeticError, ValueError, pa.ArrowException)
"""Raised for dates past the year 9999, decimals past their precision, unknown time zones."""


@dataclass(slots=True)
class _Held:
    rows: pa.RecordBatch
    """Those that are not yet delivered."""
    position: Position
    """Where the first of them stands."""
    row_bytes: float


class Batcher:
    """Collects the rows of blocks and gives them back in batches with the position after each."""

    def __init__(self, batch_size: Callable[[], int], most_bytes: int) -> None:
        self._batch_size = batch_size
        self._most_bytes = most_bytes
        self._held: deque[_Held] = deque()
        self._rows = 0
        self._bytes = 0.0
        self._after = Position()
        self._last_schema = pa.schema([])
        self.places: list[tuple[int, Position]] = []
        """The parts of the last batch: their rows, and where the first of these stands."""

    def add(self, table: pa.Table, start: Position, after: Position, row_bytes: float) -> None:
        """Rows that begin at ``start``; ``after`` is the position behind the last."""
        position = start
        for rows in table.to_batches():
            self._held.append(_Held(rows, position, row_bytes))
            position = position.forward(rows.num_rows)
        self._rows += table.num_rows
        self._bytes += table.num_rows * row_bytes
        self._after, self._last_schema = after, table.schema

    @property
    def next_schema(self) -> pa.Schema:
        """The types of the rows that come next, or else those of the last ones."""
        return self._held[0].rows.schema if self._held else self._last_schema

    def full(self) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """The batches that are complete."""
        while self._rows >= self._batch_size() or (self._rows and self._bytes >= self._most_bytes):
            yield self._next()

    def rest(self) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """What is left at the end."""
        while self._rows:
            yield self._next()

    def _next(self) -> tuple[pa.RecordBatch, Position]:
        taken: list[pa.RecordBatch] = []
        self.places = []
        num_rows, room, most = 0, float(self._most_bytes), self._batch_size()
        while self._held and num_rows < most:
            held = self._held[0]
            fitting = int(room // held.row_bytes) if held.row_bytes else most
            count = min(len(held.rows), most - num_rows, max(fitting, not taken))
            if count == 0 and len(held.rows):
                break
            taken.append(held.rows.slice(0, count))
            self.places.append((count, held.position))
            num_rows += count
            room -= count * held.row_bytes
            self._rows -= count
            self._bytes -= count * held.row_bytes
            held.rows, held.position = held.rows.slice(count), held.position.forward(count)
            if not len(held.rows):
                self._held.popleft()
        following = self._held[0].position if self._held else self._after
        if len(taken) == 1:
            return taken[0], following
        schema = taken[-1].schema
        tables = [conform(pa.Table.from_batches([batch]), schema) for batch in taken if len(batch)]
        (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
        return batch, following


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


def _numbers(array: pa.Array) -> np.ndarray[Any, Any]:
    """The numbers of an array without nulls, which share its memory and so cannot be written to."""
    kind = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, kind)
    data = np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize)
    data.flags.writeable = False
    return data


def _arrays(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _arrays(array.dictionary_decode())
    if is_number(kind) and array.null_count == 0:
        return _numbers(array)
    if pa.types.is_floating(kind) or (pa.types.is_boolean(kind) and array.null_count == 0):
        return array.to_numpy(zero_copy_only=False)
    inner = kind
    while pa.types.is_list(inner) or pa.types.is_large_list(inner):
        inner = inner.value_type
    is_flat = is_number(inner) or pa.types.is_boolean(inner)
    if is_flat and inner != kind and array.null_count == 0:
        offsets = np.zeros(1, np.int64)
        if len(array):
            offsets = _numbers(array.offsets).astype(np.int64)
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        return {"values": _arrays(values), "offsets": offsets - offsets[0]}
    return _values(array)
