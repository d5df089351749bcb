"""Rows in, batches out: a fixed number of rows each, fewer where rows are very large.

The number of bytes a row takes is the mean over its block, so the cut points are the same however
the reader came to a position. Slices share memory with their block; a batch is only copied where
it joins two blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.reading.order import Position
from fast_axolotl.reading.schema import conform
from fast_axolotl.reading.settle import is_joinable

__all__ = ["Batcher", "held_bytes", "value_bytes"]

_OFFSET_BYTES = 4


@dataclass(slots=True)
class _Piece:
    rows: pa.RecordBatch
    schema: pa.Schema
    start: int
    left: int
    """``rows[start : start + left]`` are not yet delivered."""
    position: Position
    """Where the first of them stands."""
    row_bytes: float


class Batcher:
    """Collects the rows of blocks and gives them back in batches with the position after each."""

    def __init__(self, batch_size: int, most_bytes: int) -> None:
        self._batch_size = batch_size
        self._most_bytes = most_bytes
        self._pieces: deque[_Piece] = deque()
        self._rows = 0
        self._bytes = 0.0
        self._after = Position()

    def add(self, table: pa.Table, start: Position, after: Position, row_bytes: float) -> None:
        """Rows that begin at ``start``; ``after`` is the position behind the last."""
        position = start
        for rows in table.to_batches():
            self._pieces.append(_Piece(rows, table.schema, 0, rows.num_rows, position, row_bytes))
            position = position.forward(rows.num_rows)
        self._rows += table.num_rows
        self._bytes += table.num_rows * row_bytes
        self._after = after

    @property
    def next_schema(self) -> pa.Schema | None:
        """The types of the rows that come next, where some are waiting."""
        return self._pieces[0].schema if self._pieces else None

    def full(self) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """The batches that are complete."""
        while self._rows >= self._batch_size or (self._rows and self._bytes >= self._most_bytes):
            yield self._next()

    def rest(self) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """What is left at the end."""
        while self._rows:
            yield self._next()

    def _next(self) -> tuple[pa.RecordBatch, Position]:
        taken: list[pa.RecordBatch] = []
        rows, room = 0, float(self._most_bytes)
        while self._pieces and rows < self._batch_size:
            piece = self._pieces[0]
            fitting = int(room // piece.row_bytes) if piece.row_bytes else self._batch_size
            count = min(piece.left, self._batch_size - rows, max(fitting, not taken))
            if (count == 0 and piece.left) or not _go_together(taken, piece.rows):
                break
            taken.append(piece.rows.slice(piece.start, count))
            rows += count
            room -= count * piece.row_bytes
            self._drop(piece, count)
        following = self._pieces[0].position if self._pieces else self._after
        return _joined(taken), following

    def _drop(self, piece: _Piece, count: int) -> None:
        self._rows -= count
        self._bytes -= count * piece.row_bytes
        piece.start += count
        piece.left -= count
        piece.position = piece.position.forward(count)
        if piece.left == 0:
            self._pieces.popleft()


def _go_together(pieces: list[pa.RecordBatch], following: pa.RecordBatch) -> bool:
    """Whether the values read so far fit the types that came to be known after them."""
    if not pieces or pieces[-1].schema.equals(following.schema, check_metadata=True):
        return True
    return all(is_joinable(pa.Table.from_batches([piece]), following.schema) for piece in pieces)


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch; pieces read before the schema widened are brought to the last one's."""
    if len(pieces) == 1:
        return pieces[0]
    schema = pieces[-1].schema
    tables = [conform(pa.Table.from_batches([piece]), schema) for piece in pieces if len(piece)]
    (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
    return batch


def value_bytes(table: pa.Table) -> int:
    """The size of the values alone: buffers also hold what depends on how a block was decoded."""
    return sum(_array_bytes(chunk) for column in table.columns for chunk in column.chunks)


def held_bytes(data: pa.Table | pa.RecordBatch | pa.Array) -> int:
    """What the data takes in memory."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:  # pyarrow 21 cannot tell the share of a slice in its views
        return int(data.get_total_buffer_size())


def _array_bytes(array: pa.Array) -> int:
    """Constant time a column: the first and the last offset say how much lies between."""
    kind, types = array.type, pa.types
    if isinstance(array, pa.ExtensionArray):
        return _array_bytes(array.storage)
    if types.is_struct(kind):
        return sum(_array_bytes(array.field(index)) for index in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind):
        first, last = (array.offsets[index].as_py() for index in (0, -1))
        inner = array.values.slice(first, last - first)
        return _OFFSET_BYTES * len(array) + _array_bytes(inner)
    if types.is_string(kind) or types.is_binary(kind):
        return _OFFSET_BYTES * len(array) + _text_bytes(array, np.int32)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return _OFFSET_BYTES * len(array) + _text_bytes(array, np.int64)
    if types.is_primitive(kind) or types.is_boolean(kind):
        return int(kind.bit_width) * len(array) // 8
    return 0 if types.is_null(kind) else held_bytes(array)


def _text_bytes(array: pa.Array, width: type[np.signedinteger[Any]]) -> int:
    if len(array) == 0:
        return 0
    offsets = np.frombuffer(array.buffers()[1], dtype=width)
    return int(offsets[array.offset + len(array)] - offsets[array.offset])
