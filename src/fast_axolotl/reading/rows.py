"""The rows of one shard: decoded ahead, shuffled in windows, and cut into batches.

``read_rows`` gives the tables of a sequence of pieces from a position on. Every table knows where
its first row stands, so that a position can be told after any row. ``shuffle_rows`` puts tables
together until they hold a window's worth of decoded bytes, and permutes the rows of each window
while the next one is read. ``Batcher`` cuts batches of a fixed number of rows, fewer where rows are
very large.

A window's permutation is seeded with the place where the window begins, and its extent is part of
a position. So a resumed pass reads the same rows again and permutes them alike, whatever is known
of the types by then. The number of bytes a row takes is the mean over its block, so that batches,
too, are cut alike however the reader came to a position. Slices share memory with their block; a
batch is only copied where it joins two blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.reading.blocks import Block, Dataset, Rejection, value_bytes
from fast_axolotl.reading.order import Piece, Position, Step
from fast_axolotl.reading.prefetch import Prefetcher
from fast_axolotl.reading.schema import conform
from fast_axolotl.reading.unify_types import Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows in the order of delivery."""

    table: pa.Table
    start: Position
    """Where the first row stands."""
    after: Position
    """Where the row behind the last one stands."""
    row_bytes: float
    """What a row takes in memory, the mean over the rows that were decoded with it."""
    num_bytes: int
    """Encoded bytes behind them."""
    rejections: tuple[Rejection, ...]
    """What was left out between them."""
    file: int
    """Index of the file that they, or the first of them, come from."""


class _Task(NamedTuple):
    """A block to decode, and the span that it belongs to."""

    block: Block
    piece: int
    span: int
    weight: int


class _Window(NamedTuple):
    """Tables whose rows are permuted together."""

    tables: list[Rows]
    seed: tuple[int, ...]
    left: tuple[Step, ...] = ()
    """What to keep of it, where an earlier generation began it."""
    skipped: int = 0
    """Rows of what is left that a resumed pass has had."""

    @property
    def weight(self) -> int:
        """Decoded bytes."""
        return int(sum(rows.row_bytes * rows.table.num_rows for rows in self.tables))

    def permute(self) -> Rows:
        first, last = _first(self.tables), self.tables[-1]
        schema = last.table.schema
        num_rows = sum(rows.table.num_rows for rows in self.tables)
        # Tables without columns lose their number of rows when they are put together.
        table = pa.table({"": pa.nulls(num_rows)}).select([])
        if schema.names:
            table = pa.concat_tables([conform(rows.table, schema) for rows in self.tables])
        order = np.random.default_rng(self.seed).permutation(num_rows)
        table = take(table.combine_chunks(), order)
        start = Position(*first.start[:2], *last.after[:2])
        after = last.after
        if self.left:
            table = _Picker((*self.left, Step("skip", self.skipped))).pick(table)
            start = Position(first.start.piece, self.skipped)
            after = start.forward(table.num_rows)
        return Rows(
            table=table,
            start=start,
            after=after,
            # Not that of the tables: a resumed pass may know more columns when it reads them.
            row_bytes=value_bytes(table) / max(1, table.num_rows),
            num_bytes=sum(rows.num_bytes for rows in self.tables),
            rejections=tuple(
                item for rows in self.tables for item in rows.rejections if not self.left
            ),
            file=first.file,
        )


def read_rows(
    dataset: Dataset,
    pieces: Sequence[Piece],
    start: Position,
    known: Known,
    num_threads: int,
    budget: int,
    running: ExitStack,
) -> Iterator[Rows]:
    """The rows of a sequence, from ``start.row`` of ``start.piece`` on.

    The threads stop when ``running`` is closed.
    """
    options = dataset.options

    def tasks() -> Iterator[_Task]:
        for index in range(start.piece, len(pieces)):
            for number, span in enumerate(pieces[index].spans):
                for block in dataset.blocks(span.unit):
                    yield _Task(block, index, number, block.weight)

    ahead = Prefetcher(
        tasks(),
        lambda task: known.decode(task.block, options),
        num_threads=num_threads,
        budget=budget,
    )
    running.enter_context(closing(ahead))
    at, span, row = -1, -1, 0
    of_piece = of_span = _Picker(())
    for task, decoded in ahead:
        if task.piece != at:
            at, span, row = task.piece, -1, 0
            steps = pieces[at].steps
            if at == start.piece and start.row:
                steps, row = (*steps, Step("skip", start.row)), start.row
            # What is left of a window can be told only when it was permuted.
            of_piece = _Picker(() if pieces[at].seed else steps)
        if task.span != span:
            span = task.span
            of_span = _Picker(pieces[at].spans[span].steps)
        weight = task.weight
        for part in known.widen_all(decoded, task.block, options):
            is_counted = of_span.counts_rejections and of_piece.counts_rejections
            table = of_piece.pick(of_span.pick(part.table))
            num_rows = max(1, part.table.num_rows)
            begin = Position(at, row)
            yield Rows(
                table=table,
                start=begin,
                after=begin.forward(table.num_rows),
                row_bytes=value_bytes(part.table) / num_rows,
                num_bytes=weight * table.num_rows // num_rows,
                rejections=part.rejections if is_counted else (),
                file=pieces[at].spans[span].units[0].file,
            )
            weight = 0  # the block's counts once, with its first part
            row += table.num_rows


def shuffle_rows(
    tables: Iterator[Rows],
    pieces: Sequence[Piece],
    start: Position,
    seed_of: Callable[[Position], tuple[int, ...]],
    window_bytes: int,
    running: ExitStack,
) -> Iterator[Rows]:
    """The same rows in permuted windows.

    Where ``start`` is inside a window, that one comes first, as large as it was, without the rows
    that were taken of it.
    """
    windows = Prefetcher(
        _windows(tables, pieces, start, seed_of, window_bytes),
        lambda window: (window.permute(), window.weight),
        num_threads=1,
        budget=2 * window_bytes,
    )
    running.enter_context(closing(windows))
    taken = start.taken
    for _, rows in windows:
        yield replace(rows, table=rows.table.slice(taken), start=start) if taken else rows
        taken = 0


def _windows(
    tables: Iterator[Rows],
    pieces: Sequence[Piece],
    start: Position,
    seed_of: Callable[[Position], tuple[int, ...]],
    window_bytes: int,
) -> Iterator[_Window]:
    """Windows that an earlier generation left; then tables, until they hold enough bytes."""
    end = start[2:4] if start.taken else None
    held: list[Rows] = []
    size = 0.0

    for index, group in groupby(tables, lambda rows: rows.start.piece):
        if seed := pieces[index].seed:
            skipped = start.row if index == start.piece else 0
            yield _Window([*group], seed, pieces[index].steps, skipped)
            continue
        for rows in group:
            held.append(rows)
            size += rows.row_bytes * rows.table.num_rows
            if rows.after[:2] >= end if end else size >= window_bytes:
                yield _Window(held, seed_of(_first(held).start))
                held, size, end = [], 0.0, None
    if held:
        yield _Window(held, seed_of(_first(held).start))


def _first(tables: Sequence[Rows]) -> Rows:
    """The first table that has rows: what a resumed pass skips comes as a table without any."""
    return next((rows for rows in tables if rows.table.num_rows), tables[0])


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
                tables = [
                    conform(pa.Table.from_batches([part]), schema) for part in taken if len(part)
                ]
                (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
            yield Batch(batch, places, after, next_schema)


class _Picker:
    """Applies steps to rows that come table by table."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._seen = [0] * len(steps)

    @property
    def counts_rejections(self) -> bool:
        """Whether what is left out now is reported here, and not by another shard or pass."""
        return all(
            {"part": step.index == 0, "head": seen < step.number, "skip": seen >= step.number}[
                step.kind
            ]
            for step, seen in zip(self._steps, self._seen, strict=True)
        )

    def pick(self, table: pa.Table) -> pa.Table:
        for place, step in enumerate(self._steps):
            seen, num_rows = self._seen[place], table.num_rows
            self._seen[place] += num_rows
            if step.kind == "part":
                first = (step.index - seen) % step.number
                table = take(table, np.arange(first, num_rows, step.number))
            elif step.kind == "skip":
                table = table.slice(min(num_rows, max(0, step.number - seen)))
            else:
                table = table.slice(0, max(0, step.number - seen))
        return table


def take(table: pa.Table, indices: Any) -> pa.Table:
    """Rows by their numbers."""
    if table.num_columns == 0:
        return table.slice(0, len(indices))
    picked = pa.array(indices)
    columns = [
        _take_lists(column.chunk(0), picked)
        if pa.types.is_list(column.type) and column.num_chunks == 1
        else column.take(picked)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _take_lists(lists: pa.ListArray, indices: pa.Array) -> pa.Array:
    """Lists of numbers as the bytes that they are: pyarrow takes lists value by value, which is
    8 times as slow for rows of 250 tokens."""
    values, kind = lists.values, lists.type.value_type
    is_plain = pa.types.is_primitive(kind) and kind.bit_width % 8 == 0
    if not is_plain or values.null_count or values.buffers()[1] is None:
        return lists.take(indices)
    width = kind.bit_width // 8
    places = (np.from_dlpack(lists.offsets).astype(np.int64) + values.offset) * width
    is_valid = lists.is_valid().buffers()[1] if lists.null_count else None
    buffers = [is_valid, pa.py_buffer(places), values.buffers()[1]]
    taken = pa.Array.from_buffers(pa.large_binary(), len(lists), buffers).take(indices)
    is_valid, places, data = taken.buffers()
    ends = np.frombuffer(places, dtype=np.int64)[: len(taken) + 1] // width
    if ends[-1] > np.iinfo(np.int32).max:
        return lists.take(indices)
    child = pa.Array.from_buffers(kind, int(ends[-1]), [None, data])
    buffers = [is_valid, pa.py_buffer(ends.astype(np.int32))]
    return pa.Array.from_buffers(lists.type, len(taken), buffers, children=[child])
