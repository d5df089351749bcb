"""Read rows of mapped Arrow files by their number: slices of the mapping, nothing is decoded.

Rows are numbered in the order of the files. Does not take rows of other formats: there, every row
would cost the decoding of a whole unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import UsageError
from fast_axolotl.reading.blocks import Dataset
from fast_axolotl.reading.columnar import MappedFile


class Taker:
    """Takes rows of a dataset; where they lie is found once."""

    def __init__(self, dataset: Dataset, schema: pa.Schema) -> None:
        files: list[MappedFile] = []
        for item, file in zip(dataset.inputs, dataset.formats, strict=True):
            is_whole = not item.source.keys  # columns that folders tell are not in the file
            is_same = file.schema is not None and file.schema.equals(schema, check_metadata=True)
            if isinstance(file, MappedFile) and is_whole and is_same:
                files.append(file)
            else:
                raise UsageError(
                    f"take() cannot read {item.source.path}: it needs local Arrow files with the "
                    "same columns; convert the data to such files"
                )
        self._schema = schema
        self._batches = [(file, index) for file in files for index in range(len(file.batches))]
        counts = [batch.num_rows for file in files for batch in file.batches]
        self._starts = np.array([0, *accumulate(counts)], dtype=np.int64)

    def take(self, indices: Sequence[int]) -> pa.Table:
        """The rows of these numbers, in this order."""
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (len(wanted) and wanted.dtype.kind not in "iu"):
            raise UsageError(f"indices must be a list of whole numbers, not {indices!r}")
        wanted, total = wanted.astype(np.int64), int(self._starts[-1])
        outside = wanted[(wanted < 0) | (wanted >= total)]
        if len(outside):
            raise UsageError(f"no row {outside[0]}: the data has {total:,} rows, counted from 0")
        parts = self._starts.searchsorted(wanted, side="right") - 1
        pieces = []
        for part, row in zip(parts.tolist(), (wanted - self._starts[parts]).tolist(), strict=True):
            file, index = self._batches[part]
            pieces.append(file.batch(index).slice(row, 1))
        return pa.Table.from_batches(pieces, self._schema)
