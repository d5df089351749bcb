"""Which rows repeat an earlier one, for more rows than memory holds: records in files, by key.

A record is the digest of a row and its number, 24 bytes. A *run* is a file with as many records as
fit in memory, ordered by bucket, behind a table of where each bucket begins; who wants some buckets
reads one range out of every run. The bucket of a record is some bits of its digest, so equal rows
meet in one bucket whatever run they are in. ``repeats_in`` takes some buckets into a set of
rows seen; what is too large for memory is read several times, for some of its digests each time.

``Spill`` does this for one process; ``cluster.first_rows`` does it in tasks. What ``Spill`` finds,
pairs of a row and the first row like it, goes into files ordered by row, so that a second pass over
the rows reads each in order. Disk: 24 bytes a row, plus 16 for each repeated row.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fast_axolotl.dedupe.seen import SeenRows

RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("number", "<i8")])
ROW_BYTES = 128
"""What one row takes while its bucket is decided: its record, its place in the set, and copies."""

_RUN_SHARE = 8
"""A run is collected while the set of rows seen is still in memory, so it gets a part of its own:
one in so many of the rows that a bucket may have."""

_LEAST_ROWS = 1024
_BUCKET_BITS = 8
NUM_BUCKETS = 1 << _BUCKET_BITS

ReadRange = Callable[[int, int], bytes]
"""Reads some bytes of a run: from, to."""


class Records:
    """Collects records, and hands them on whenever they are ``most_rows``, and what is left."""

    def __init__(self, most_rows: int, write: Callable[[Any], None]) -> None:
        self._most_rows, self._write = max(_LEAST_ROWS, most_rows), write
        self._held: list[Any] = []
        self._num_held = 0

    def add(self, digests: Any, numbers: Any) -> None:
        """Takes rows by their digests, two words each, in any order; each number is one row."""
        pairs = digests.reshape(-1, 2)
        for start in range(0, len(numbers), self._most_rows):
            stop = min(len(numbers), start + self._most_rows)
            records = np.empty(stop - start, RECORD)
            records["low"], records["high"] = pairs[start:stop, 0], pairs[start:stop, 1]
            records["number"] = numbers[start:stop]
            self._held.append(records)
            self._num_held += len(records)
            if self._num_held >= self._most_rows:
                self.flush()

    def flush(self) -> None:
        if self._held:
            records = np.concatenate(self._held)
            self._held, self._num_held = [], 0
            self._write(records)


def write_buckets(path: Path, records: Any) -> None:
    """A run of records by their buckets."""
    keys = (records["low"] & np.uint64(NUM_BUCKETS - 1)).astype(np.int64)
    starts = np.zeros(NUM_BUCKETS + 1, "<i8")
    np.cumsum(np.bincount(keys, minlength=NUM_BUCKETS), out=starts[1:])
    with path.open("wb") as file:
        starts.tofile(file)
        records[np.argsort(keys, kind="stable")].tofile(file)


def repeats_in(
    runs: Sequence[ReadRange], start: int, stop: int, most_rows: int
) -> Iterator[tuple[Any, Any]]:
    """The numbers of repeated rows of some buckets, and those of the first rows like them."""
    ranges = [(read, *_range_of(read, start, stop)) for read in runs]
    total = sum(last - first for _, first, last in ranges) // RECORD.itemsize
    passes = 1 << (total // most_rows).bit_length()
    for index in range(passes):
        parts = [np.empty(0, RECORD)]
        for read, first, last in ranges:
            if last > first:
                records = np.frombuffer(read(first, last), RECORD)
                values = (records["low"] >> np.uint64(_BUCKET_BITS)) & np.uint64(passes - 1)
                parts.append(records[values == index])
        records = np.concatenate(parts)
        del parts
        yield find_repeats(records)


def find_repeats(records: Any) -> tuple[Any, Any]:
    """The numbers of records with the digest of a smaller number, and the smallest such number."""
    records = records[np.argsort(records["number"], kind="stable")]
    digests = np.stack([records["low"], records["high"]], axis=1).ravel()
    numbers = np.ascontiguousarray(records["number"])
    firsts = SeenRows(num_threads=1).enter(digests, numbers)
    repeated = firsts != numbers
    return numbers[repeated], firsts[repeated]


class Spill:
    """Records on disk, in a folder that ``close`` removes."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self._most_rows = max(_LEAST_ROWS, limit // ROW_BYTES)
        self._records = Records(self._most_rows // _RUN_SHARE, self._write)
        self.add = self._records.add
        """Takes rows in any order; each number is one row."""
        self._runs: list[Path] = []
        self._pairs: list[Any] = []
        """Repeated rows in order, and the first row like each."""
        self.num_bytes = 0
        """Written to disk so far."""

    def _write(self, records: Any) -> None:
        self._runs.append(self.folder / f"run-{len(self._runs)}")
        write_buckets(self._runs[-1], records)
        self.num_bytes += records.nbytes

    def resolve(self) -> None:
        """Finds the first row of every digest; nothing can be added after."""
        self._records.flush()
        runs = [partial(_read, path) for path in self._runs]
        for bucket in range(NUM_BUCKETS):
            for numbers, firsts in repeats_in(runs, bucket, bucket + 1, self._most_rows):
                is_asked = numbers >= 0  # nobody asks for the rows of other data
                pairs = np.stack([numbers[is_asked], firsts[is_asked]])
                if pairs.size:
                    path = self.folder / f"pairs-{len(self._pairs)}"
                    pairs.tofile(path)
                    self._pairs.append(np.memmap(path, np.int64, "r", shape=pairs.shape))
                    self.num_bytes += pairs.nbytes

    def firsts(self, start: int, stop: int) -> Any:
        """For the rows ``start … stop``, the number of the first row like each."""
        firsts = np.arange(start, stop)
        for numbers, first_of_each in self._pairs:
            some = slice(*np.searchsorted(numbers, [start, stop]))
            firsts[numbers[some] - start] = first_of_each[some]
        return firsts

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _range_of(read: ReadRange, first: int, last: int) -> tuple[int, int]:
    """Where the records of the buckets ``first … last`` begin and end in a run, in bytes."""
    starts = np.frombuffer(read(8 * first, 8 * (last + 1)), "<i8")
    head = 8 * (NUM_BUCKETS + 1)
    return head + int(starts[0]) * RECORD.itemsize, head + int(starts[-1]) * RECORD.itemsize


def _read(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
