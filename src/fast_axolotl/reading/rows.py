"""The rows of one shard: decoded ahead, shuffled in windows, and cut into batches.

``read_rows`` gives the tables of a sequence of pieces from a position on. Every table knows where
its first row stands, so that a position can be told after any row. ``shuffle_rows`` puts tables
together until they hold a window's worth of decoded bytes, and permutes the rows of each window.
``cut_batches`` cuts batches of a fixed number of rows, fewer where rows are very large.

A window's permutation is seeded with the place where the window begins, and its extent is part of
a position. So a resumed pass reads the same rows again and permutes them alike, whatever is known
of the types by then. The number of bytes a row takes is the mean over its block, so that batches,
too, are cut alike however the reader came to a position. Slices share memory with their block; a
batch is only copied where it joins two blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.reading.blocks import Block, Dataset, Rejection, value_bytes
from fast_axolotl.reading.order import Piece, Position
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

    def blocks() -> Iterator[tuple[Block, int, Piece]]:
        """Each with the number of its piece, and that piece or the part of a window."""
        for index in range(start.piece, len(pieces)):
            for part in pieces[index].window or (pieces[index],):
                for block in dataset.blocks(part.unit):
                    yield block, index, part

    decode = partial(known.decode, options=options)
    ahead = Prefetcher(blocks(), decode, num_threads=num_threads, budget=budget)
    running.enter_context(closing(ahead))
    last, row, seen, kept = Piece(), 0, 0, range(0)
    for (block, index, part), decoded in ahead:
        if part is not last:
            last, row, seen = part, start.row if index == start.piece else 0, 0
            kept = part.kept
            if row and part is pieces[index]:  # of a window, once it is permuted
                kept = kept[row:]
        weight = block.weight
        for found in known.widen_all(decoded, block, options):
            table, num_rows = _picked(found.table, seen, kept), max(1, found.table.num_rows)
            begin = Position(index, row)
            yield Rows(
                table=table,
                start=begin,
                after=begin.forward(table.num_rows),
                row_bytes=value_bytes(found.table) / num_rows,
                num_bytes=weight * table.num_rows // num_rows,
                # Of all shards and passes that read this, the one that has the first row tells.
                rejections=found.rejections if seen in kept else (),
            )
            weight = 0  # the block's counts once, with its first part
            row += table.num_rows
            seen += found.table.num_rows


def shuffle_rows(
    tables: Iterator[Rows],
    pieces: Sequence[Piece],
    start: Position,
    seed_of: Callable[[Position], tuple[int, ...]],
    window_bytes: int,
) -> Iterator[Rows]:
    """The same rows in permuted windows: first those that an earlier generation left, then tables,
    until they hold enough bytes.

    Where ``start`` is inside a window, that one comes first, as large as it was, without the rows
    that were taken of it.
    """
    end, taken = start[2:4] if start.taken else None, start.taken
    held: list[Rows] = []
    size = 0.0

    def window() -> Rows:
        rows = _permuted(held, seed_of(_first(held).start))
        return replace(rows, table=rows.table.slice(taken), start=start) if taken else rows

    for index, group in groupby(tables, lambda rows: rows.start.piece):
        if pieces[index].window:
            skipped = start.row if index == start.piece else 0
            yield _permuted([*group], pieces[index].seed, pieces[index].kept[skipped:], skipped)
            continue
        for rows in group:
            held.append(rows)
            size += rows.row_bytes * rows.table.num_rows
            if rows.after[:2] >= end if end else size >= window_bytes:
                rows, held, size, end = window(), [], 0.0, None
                taken = 0
                yield rows
    if held:
        yield window()


def _permuted(
    tables: list[Rows], seed: tuple[int, ...], kept: range | None = None, skipped: int = 0
) -> Rows:
    """A window. ``kept`` are the rows to keep where an earlier generation began it, behind those
    that a resumed pass has had: ``skipped`` ones."""
    first, last = _first(tables), tables[-1]
    schema = last.table.schema
    num_rows = sum(rows.table.num_rows for rows in tables)
    # Tables without columns lose their number of rows when they are put together.
    table = pa.Table.from_arrays([pa.nulls(num_rows)], [""]).select([])
    if schema.names:
        table = pa.concat_tables([conform(rows.table, schema) for rows in tables])
    table = take(table.combine_chunks(), np.random.default_rng(seed).permutation(num_rows))
    start, after = Position(*first.start[:2], *last.after[:2]), last.after
    if kept is not None:
        table = _picked(table, 0, kept)
        start = Position(first.start.piece, skipped)
        after = start.forward(table.num_rows)
    return Rows(
        table=table,
        start=start,
        after=after,
        # Not that of the tables: a resumed pass may know more columns when it reads them.
        row_bytes=value_bytes(table) / max(1, table.num_rows),
        num_bytes=sum(rows.num_bytes for rows in tables),
        rejections=tuple(item for rows in tables for item in rows.rejections if kept is None),
    )


def _first(tables: Sequence[Rows]) -> Rows:
    """The first table that has rows: what a resumed pass skips comes as a table without any."""
    return next((rows for rows in tables if rows.table.num_rows), tables[0])


Batch = tuple[pa.RecordBatch, list[tuple[int, Position]], Position, pa.Schema]
"""A batch; of its parts the rows and where the first of these stands; where the row behind the last
one stands; the types of the rows that come next, or else those of the last ones."""


def cut_batches(
    tables: Iterable[Rows], batch_size: Callable[[], int], most_bytes: int
) -> Iterator[Batch]:
    """Cuts tables into batches, and puts parts of neighbouring tables together in one."""
    taken: list[pa.RecordBatch] = []
    places: list[tuple[int, Position]] = []
    missing, room = 0, 0.0

    def batch(after: Position, next_schema: pa.Schema) -> Batch:
        schema, parts = taken[-1].schema, [*taken]
        for index, part in enumerate(parts):
            if not part.schema.equals(schema, check_metadata=True):
                table = conform(pa.Table.from_batches([part]), schema)
                (parts[index],) = table.to_batches()
        joined = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
        done = joined, [*places], after, next_schema
        taken.clear()
        places.clear()
        return done

    for rows in tables:
        left, position, schema = rows.table.num_rows, rows.start, rows.table.schema
        for part in rows.table.to_batches():
            at = 0
            while at < len(part):
                if not taken:
                    missing, room = batch_size(), float(most_bytes)
                fitting = int(room // rows.row_bytes) if rows.row_bytes else missing
                count = min(len(part) - at, missing, max(fitting, not taken))
                if count:
                    taken.append(part.slice(at, count))
                    places.append((count, position))
                    position = position.forward(count)
                    at, left, missing = at + count, left - count, missing - count
                    room -= count * rows.row_bytes
                if at < len(part) or not missing:
                    yield batch(position if left else rows.after, schema)
        if taken and room < most_bytes / 2 and missing * rows.row_bytes > room:
            yield batch(rows.after, schema)  # short anyway, and joining tables is a copy
    if taken:
        yield batch(rows.after, schema)


def _picked(table: pa.Table, begin: int, kept: range) -> pa.Table:
    """Those rows of a table that are kept; its first one is row ``begin`` of its piece."""
    kept = kept[bisect_left(kept, begin) : bisect_left(kept, begin + table.num_rows)]
    if len(kept) == table.num_rows:  # there may be thousands of columns to slice
        return table
    if kept.step == 1:
        return table.slice(max(0, kept.start - begin), len(kept))
    return take(table, np.arange(len(kept)) * kept.step + (kept.start - begin))


def take(table: pa.Table, indices: Any) -> pa.Table:
    """Rows by their numbers, an array of int64."""
    if table.num_columns == 0:
        return table.slice(0, len(indices))
    # pyarrow's own way to make an array imports pandas, 0.2 s where it is installed.
    return table.take(
        pa.Array.from_buffers(pa.int64(), len(indices), [None, pa.py_buffer(indices)])
    )
