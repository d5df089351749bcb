"""Read rows by their number, in all formats.

Rows are numbered in the order of the files. The rows of every unit (``index``) tell where a row
lies. Rows of a mapped file are sliced out of it. Of other files only units with wanted rows are
read, once, up to the last of them: a row of a plain file costs the decoding of one unit, a row of a
compressed file that of all before it. Does not keep what was decoded for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.blocks import Dataset
from fast_axolotl.reading.columnar import MappedFile
from fast_axolotl.reading.index import unit_rows
from fast_axolotl.reading.rows import take
from fast_axolotl.reading.schema import conform
from fast_axolotl.reading.unify_types import Known


class Taker:
    """Takes rows of a dataset; where they lie is found once."""

    def __init__(self, dataset: Dataset, schema: pa.Schema) -> None:
        self._dataset, self._schema = dataset, schema
        self._batches: list[tuple[MappedFile, int]] = []
        """Those of all files, where all are mapped and have one schema."""
        mapped = [file for file in dataset.formats if isinstance(file, MappedFile)]
        if len(mapped) == len(dataset.formats) and all(
            file.schema.equals(schema, check_metadata=True) for file in mapped
        ):
            self._batches = [(file, index) for file in mapped for index in range(len(file.batches))]
            counts = [batch.num_rows for file in mapped for batch in file.batches]
        else:
            rows = unit_rows(dataset)
            self._units, counts = list(rows), list(rows.values())
        self._starts = np.array([0, *accumulate(counts)], dtype=np.int64)

    def take(self, indices: Sequence[int]) -> pa.Table:
        """The rows of these numbers, in this order, under the schema or a wider one."""
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (len(wanted) and wanted.dtype.kind not in "iu"):
            raise UsageError(f"indices must be a list of whole numbers, not {indices!r}")
        wanted, total = wanted.astype(np.int64), int(self._starts[-1])
        outside = wanted[(wanted < 0) | (wanted >= total)]
        if len(outside):
            raise UsageError(f"no row {outside[0]}: the data has {total:,} rows, counted from 0")
        if not self._batches:
            # Sorted, each row once, so that every part is read once.
            rows, order = np.unique(wanted, return_inverse=True)
            return take(self._read(rows), order)
        parts = self._starts.searchsorted(wanted, side="right") - 1
        pieces = []
        for part, row in zip(parts.tolist(), (wanted - self._starts[parts]).tolist(), strict=True):
            file, index = self._batches[part]
            pieces.append(file.batch(index).slice(row, 1))
        return pa.Table.from_batches(pieces, self._schema)

    def _read(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """The rows of these numbers, which ascend."""
        dataset, known = self._dataset, Known(self._schema)
        options, taken = dataset.options, list[pa.Table]()
        unit_of_row = self._starts.searchsorted(rows, side="right") - 1
        for number in np.unique(unit_of_row).tolist():
            unit, wanted = self._units[number], rows[unit_of_row == number] - self._starts[number]
            parts = (
                part.table
                for block in dataset.blocks(unit)
                for part in known.widen_all(known.decode(block, options)[0], block, options)
            )
            seen = num_taken = 0
            for part in parts:
                stop = int(wanted.searchsorted(seen + part.num_rows))
                taken.append(take(part, wanted[num_taken:stop] - seen))
                seen, num_taken = seen + part.num_rows, stop
                if stop == len(wanted):
                    break
            if num_taken < len(wanted):
                raise DataError(
                    f"{len(wanted) - num_taken:,} of the requested rows are missing: the file "
                    "changed after its rows were counted; open it again",
                    path=dataset.inputs[unit.file].source.path,
                )
        tables = [conform(table, known.schema) for table in taken] or [known.schema.empty_table()]
        return pa.concat_tables(tables).combine_chunks()
