"""The rows of an Arrow table that come for the first time.

Rows are told apart by a 128-bit digest over Arrow's buffers (``row_bytes``), entered into a set
(``seen``). Rows with the digest of an earlier row of the same table are then compared with it,
value by value: should they differ, which no one has seen happen, the table is hashed again under
another secret.

Cost: one pass over the bytes that are compared at some 5 GB/s and processor, and some 50 ns a row;
16 bytes a row for the digests and at most 40 more for the set. No Python object is made per row.

Rows are then taken batch by batch: pyarrow's ``take`` may join a column of many chunks, which fails
past 2 GB. It knows no text views and no run-end encoded columns either; those are put together from
slices, which every type has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.dedupe.row_bytes import Part, digests_of, parts_of, plain_type
from fast_axolotl.dedupe.seen import SeenRows, fresh_secret
from fast_axolotl.errors import UsageError
from fast_axolotl.kernels.threads import slices, spread
from fast_axolotl.reading import held_bytes
from fast_axolotl.system import usable_cores

_PAIRS_AT_ONCE = 16_384
_DECODED_BYTES = 32 * 1024 * 1024
"""What is taken apart or put together at a time, beside the table itself."""

_PAIRS_PER_THREAD = 32_768
_MOST_TRIES = 4


def unique_rows(
    table: pa.Table | pa.RecordBatch,
    columns: Sequence[str] | None = None,
    seen: SeenRows | None = None,
) -> Any:
    """The indices of the first row of each value, ascending, as an int64 array.

    Args:
        table: Any types, nested ones too; see ``row_bytes`` for which values are equal.
        columns: Compare only these columns; ``None`` compares whole rows.
        seen: Rows of earlier calls, which count as seen; the new rows are added to it.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise TypeError(
            f"table has the type {type(table).__name__}; pass a pyarrow Table or RecordBatch, for "
            "example pa.Table.from_pylist(rows)"
        )
    compared = table.select(_names(table, columns))
    for _ in range(_MOST_TRIES):
        numbers, firsts = _first_rows(compared, SeenRows() if seen is None else seen)
        if seen is None:
            repeats = np.flatnonzero(firsts != numbers)
            if not _all_equal(compared.to_batches(), repeats, firsts[repeats]):
                continue
        return np.flatnonzero(firsts == numbers)
    raise RuntimeError("four secrets in a row gave colliding digests: the hash is broken")


def _first_rows(table: pa.Table, seen: SeenRows) -> tuple[Any, Any]:
    """The number of every row, counting on from call to call, and that of the first row like it.

    On its own, so that the digests and a set of one call are gone before rows are compared.
    """
    types = [(field.name, plain_type(field.type)) for field in table.schema]
    if seen.types is None:
        seen.types = types
    if seen.types != types:
        known, here = (
            ", ".join(f"{name}: {kind}" for name, kind in some) for some in (seen.types, types)
        )
        raise UsageError(
            f"earlier tables have the columns {known}, and this one has {here}; cast it, or use "
            "another SeenRows"
        )
    digests = [digest_batch(batch, seen.secret) for batch in table.to_batches()]
    joined = digests[0] if len(digests) == 1 else np.concatenate([*digests, np.zeros(0, np.uint64)])
    numbers = seen.number(table.num_rows)
    return numbers, seen.enter(joined, numbers)


def digest_batch(batch: pa.RecordBatch, secret: Any, num_threads: int = 0) -> Any:
    """The digests of whole rows, two words each."""
    threads = num_threads or usable_cores()
    step = _rows_at_once(batch)
    if step >= batch.num_rows:
        return digests_of(_parts(batch, secret, threads), batch.num_rows, secret, threads)
    pieces = (batch.slice(start, step) for start in range(0, batch.num_rows, step))
    return np.concatenate([digest_batch(piece, secret, threads) for piece in pieces])


def take_rows(batch: pa.RecordBatch, rows: Any) -> pa.RecordBatch:
    """The rows with these indices, an int64 array, in this order."""
    if len(rows) == batch.num_rows and (rows == np.arange(batch.num_rows)).all():
        return batch
    columns = []
    for column in batch.columns:
        try:
            columns.append(column.take(pa.array(rows)))
        except pa.ArrowNotImplementedError:
            starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
            lengths = np.diff(starts, append=len(rows))
            runs = [
                column.slice(row, length) for row, length in zip(rows[starts], lengths, strict=True)
            ]
            columns.append(pa.concat_arrays(runs) if runs else column.slice(0, 0))
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _gather(batches: Sequence[pa.RecordBatch], rows: Any) -> pa.RecordBatch:
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


def _rows_at_once(batch: pa.RecordBatch) -> int:
    """How many rows may be decoded at a time.

    A dictionary holds each value once, and the decoded column as often as it comes.
    """
    dictionaries = [
        column.dictionary
        for column in batch.columns
        if isinstance(column, pa.DictionaryArray) and len(column.dictionary)
    ]
    row_bytes = sum(held_bytes(values) / len(values) for values in dictionaries)
    return max(1, int(_DECODED_BYTES / row_bytes)) if row_bytes else max(1, batch.num_rows)


def _parts(batch: pa.RecordBatch, secret: Any, num_threads: int) -> list[Part]:
    return [part for column in batch.columns for part in parts_of(column, secret, num_threads)]


def _all_equal(batches: Sequence[pa.RecordBatch], lefts: Any, rights: Any) -> bool:
    """Whether row ``lefts[i]`` equals row ``rights[i]``, for all of them."""
    secret = fresh_secret()
    if len(batches) == 1 and _rows_at_once(batches[0]) >= batches[0].num_rows:
        return _batch_agrees(batches[0], lefts, rights, secret)
    num_rows = sum(batch.num_rows for batch in batches)
    row_bytes = 1 + sum(map(held_bytes, batches)) // max(1, num_rows)
    rows = min([_PAIRS_AT_ONCE, *map(_rows_at_once, batches)])
    step = max(1, min(rows // 2, _DECODED_BYTES // row_bytes))
    return all(
        _gathered_agree(batches, lefts[start : start + step], rights[start : start + step], secret)
        for start in range(0, len(lefts), step)
    )


def _gathered_agree(
    batches: Sequence[pa.RecordBatch], lefts: Any, rights: Any, secret: Any
) -> bool:
    try:
        gathered = _gather(batches, np.concatenate([lefts, rights]))
    except pa.ArrowInvalid:
        # Too much text for the 32 bits of its offsets, or dictionaries that do not fit together.
        half = len(lefts) // 2
        return not half or all(
            _gathered_agree(batches, lefts[part], rights[part], secret)
            for part in (slice(half), slice(half, None))
        )
    count = len(lefts)
    return _batch_agrees(gathered, np.arange(count), np.arange(count, 2 * count), secret)


def _batch_agrees(batch: pa.RecordBatch, lefts: Any, rights: Any, secret: Any) -> bool:
    from fast_axolotl.kernels.rowhash import differing_rows

    differs = np.zeros(len(lefts), np.bool_)
    if not len(lefts):
        return True
    threads = min(usable_cores(), 1 + len(lefts) // _PAIRS_PER_THREAD)
    parts = _parts(batch, secret, threads)

    def compare(first: int, last: int) -> None:
        for part in parts:
            differing_rows(part.data, part.offsets, part.valid, lefts, rights, differs, first, last)

    spread(compare, slices(len(lefts), 4 * threads), threads)
    return not differs.any()


def _names(table: pa.Table, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return _distinct(table.schema.names)
    if isinstance(columns, str) or not columns:
        raise UsageError(f"columns must be a list of column names, not {columns!r}")
    missing = [name for name in columns if name not in table.schema.names]
    if missing:
        raise UsageError(
            f"there is no column {missing[0]!r}; the table has {', '.join(table.schema.names)}"
        )
    _distinct([name for name in table.schema.names if name in columns])
    return _distinct(columns)


def _distinct(names: Sequence[str]) -> list[str]:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"two columns have the name {repeated[0]!r}; rename or drop one")
    return list(names)
