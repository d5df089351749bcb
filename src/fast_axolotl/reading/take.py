"""Rows by their number, in files of every format.

Rows are numbered in the order of the files. The rows of every unit (``index``) tell where a row
lies; only units with wanted rows are read, once, up to the last of them. So a row of a plain file
costs the decoding of one unit, a row of a compressed file that of all before it. Does not keep what
was decoded for the next call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.blocks import Block, Dataset
from fast_axolotl.reading.index import unit_rows
from fast_axolotl.reading.prefetch import Prefetcher
from fast_axolotl.reading.rows import take
from fast_axolotl.reading.schema import conform
from fast_axolotl.reading.unify_types import Known
from fast_axolotl.system import usable_cores

_AHEAD_BLOCKS = 8


def take_rows(dataset: Dataset, schema: pa.Schema, indices: Sequence[int]) -> pa.Table:
    """The rows of these numbers, in this order, under ``schema`` or a wider one."""
    wanted = np.asarray(indices)
    if wanted.ndim != 1 or (len(wanted) and wanted.dtype.kind not in "iu"):
        raise UsageError(f"indices must be a list of whole numbers, not {indices!r}")
    units, options, known = dataset.units(), dataset.options, Known(schema)
    counts = np.array(unit_rows(dataset, units), dtype=np.int64)
    ends, total = np.cumsum(counts), int(counts.sum())
    outside = wanted[(wanted < 0) | (wanted >= total)]
    if len(outside):
        raise UsageError(f"no row {outside[0]}: the data has {total:,} rows, counted from 0")
    rows, order = np.unique(wanted.astype(np.int64), return_inverse=True)
    unit_of_row = np.searchsorted(ends, rows, side="right")
    numbers, taken, num_taken = deque[int](), list[pa.Table](), 0

    def blocks() -> Iterator[Block]:
        for number in np.unique(unit_of_row).tolist():
            last = int(np.searchsorted(unit_of_row, number, side="right"))
            for block in dataset.blocks(units[number]):
                if num_taken == last:
                    break
                numbers.append(number)
                yield block

    number, position = -1, 0
    decode, num_threads = partial(known.decode, options=options), min(8, usable_cores())
    budget = _AHEAD_BLOCKS * options.block_bytes
    with closing(Prefetcher(blocks(), decode, num_threads=num_threads, budget=budget)) as ahead:
        for block, decoded in ahead:
            if (following := numbers.popleft()) != number:
                number, position = following, int(ends[following] - counts[following])
            for part in known.widen_all(decoded, block, options):
                stop = min(position + part.table.num_rows, int(ends[number]))
                left, right = np.searchsorted(rows, (position, stop))
                if right > left:
                    taken.append(take(part.table, rows[left:right] - position))
                    num_taken += int(right - left)
                position = stop
    if num_taken < len(rows):
        raise DataError(
            f"{len(rows) - num_taken:,} of the requested rows are missing: the file changed after "
            "its rows were counted; open it again",
            path=dataset.inputs[units[number].file].source.path,
        )
    tables = [conform(table, known.schema) for table in taken] or [known.schema.empty_table()]
    return take(pa.concat_tables(tables).combine_chunks(), order)
