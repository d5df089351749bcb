"""Find duplicate rows on disk, when there are more than fit into memory.

A record is the digest of a row and its number, 24 bytes. A *run* is as many records as fit in
memory, ordered by bucket: some bits of the digest, so equal rows meet in one bucket whatever run
they are in. ``resolve`` takes bucket after bucket into a set of rows seen; one with too many
different digests for memory is read several times, for some of them each time.

What it finds, pairs of a row and the first row like it, is written behind the runs, in the order in
which rows came, so that a second pass over the rows reads each bucket's in order. Disk: 24 bytes a
row, plus 16 for each repeated row, in a file without a name: it goes when the process ends, however
it does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fast_axolotl.dedupe.seen import SeenRows

_RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("number", "<i8")])
_ROW_BYTES = 128
"""What one row takes while its bucket is decided: its record, its place in the set, and copies."""

_RUN_SHARE = 8
"""A run is collected while the set of rows seen is still in memory, so it gets a part of its own:
one in so many of the rows that a bucket may have."""

_LEAST_ROWS = 1024
_BUCKET_BITS = 8
_NUM_BUCKETS = 1 << _BUCKET_BITS


class Spill:
    """Records in a file on the disk of a folder, which ``close`` removes."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._most_rows = max(_LEAST_ROWS, limit // _ROW_BYTES)
        self._run_rows = max(_LEAST_ROWS, self._most_rows // _RUN_SHARE)
        self._held: list[Any] = []
        self._num_held = 0
        self._edges: list[Any] = []
        """Of each run, which record of the file begins each bucket."""
        self._distinct = np.zeros(_NUM_BUCKETS, np.int64)
        """How many different digests the runs have in each bucket, added up."""
        self.pairs: list[Any] = []
        """Repeated rows, and the first row like each, once they are resolved."""
        self.num_bytes = 0
        """Written to disk so far."""

    def add(self, digests: Any, numbers: Any) -> None:
        """Takes rows by their digests, two words each; of equal ones, the least number is first."""
        pairs = digests.reshape(-1, 2)
        for start in range(0, len(numbers), self._run_rows):
            stop = min(len(numbers), start + self._run_rows)
            records = np.empty(stop - start, _RECORD)
            records["low"], records["high"] = pairs[start:stop, 0], pairs[start:stop, 1]
            records["number"] = numbers[start:stop]
            self._held.append(records)
            self._num_held += len(records)
            if self._num_held >= self._run_rows:
                self._flush()

    def resolve(self) -> None:
        """Finds the first row of every digest; nothing can be added after."""
        self._flush()
        places: list[tuple[int, int]] = []
        for bucket, distinct in enumerate(self._distinct.tolist()):
            passes = 1 << (distinct // self._most_rows).bit_length()
            for index in range(passes):
                seen = SeenRows(num_threads=1)
                found: list[Any] = []
                for edges in self._edges:
                    start, stop = edges[bucket : bucket + 2].tolist()
                    self._file.seek(start * _RECORD.itemsize)
                    records = np.fromfile(self._file, _RECORD, count=stop - start)
                    if passes > 1:
                        part = (records["low"] >> np.uint64(_BUCKET_BITS)) & np.uint64(passes - 1)
                        records = records[part == index]
                    numbers, firsts = _enter(seen, records)
                    repeated = (firsts != numbers) & (numbers >= 0)  # those of the input
                    found.append(np.stack([numbers[repeated], firsts[repeated]]))
                if any((pair[0] < pair[1]).any() for pair in found):
                    # They did not come in the order of their numbers: the least becomes the first.
                    known = np.unique(np.concatenate([pair[1] for pair in found]))
                    least = known.copy()
                    for numbers, firsts in found:
                        np.minimum.at(least, np.searchsorted(known, firsts), numbers)
                    for pair in found:
                        best = least[np.searchsorted(known, pair[1])]
                        pair[:] = np.where(pair[0] == best, pair[1], pair[0]), best
                if count := sum(pair.shape[1] for pair in found):
                    start = self._append(pair[side] for side in (0, 1) for pair in found)
                    places.append((start // 8, count))
        if places:
            words = np.memmap(self._file, np.int64, "r")
            self.pairs = [words[at : at + 2 * count].reshape(2, count) for at, count in places]

    def firsts(self, start: int, stop: int) -> Any:
        """For the rows ``start … stop``, the number of the first row like each."""
        firsts = np.arange(start, stop)
        for numbers, first_of_each in self.pairs:
            some = slice(*np.searchsorted(numbers, [start, stop]))
            firsts[numbers[some] - start] = first_of_each[some]
        return firsts

    def close(self) -> None:
        """Removes the file."""
        with suppress(OSError):  # of what a full disk had no room for
            self._file.close()

    def _flush(self) -> None:
        if not self._held:
            return
        records = np.concatenate(self._held)
        self._held, self._num_held = [], 0
        keys = (records["low"] & np.uint64(_NUM_BUCKETS - 1)).astype(np.int64)
        numbers, firsts = _enter(SeenRows(num_threads=1), records)
        start = self._append([records[np.argsort(keys, kind="stable")]]) // _RECORD.itemsize
        counts = np.bincount(keys, minlength=_NUM_BUCKETS)
        self._edges.append(start + np.concatenate([[0], np.cumsum(counts)]))
        self._distinct += np.bincount(keys[firsts == numbers], minlength=_NUM_BUCKETS)

    def _append(self, arrays: Iterable[Any]) -> int:
        """Writes arrays at the end of the file, and gives where they begin."""
        start = self._file.seek(0, os.SEEK_END)
        self._file.writelines(array.data for array in arrays)
        self._file.flush()
        self.num_bytes = self._file.tell()
        return start


def _enter(seen: SeenRows, records: Any) -> tuple[Any, Any]:
    """The numbers of some records, and for each that of the first like it."""
    digests = np.stack([records["low"], records["high"]], axis=1).ravel()
    numbers = np.ascontiguousarray(records["number"])
    return numbers, seen.enter(digests, numbers)
