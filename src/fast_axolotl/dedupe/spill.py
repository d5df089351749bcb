"""Which rows repeat an earlier one, for more rows than memory holds: records in files, by key.

A record is the digest of a row and its number, 24 bytes. A *run* is a file with as many records as
fit in memory, ordered by a small key, behind a table of where each key begins; who wants one key
reads one range out of every run. The key of a record is a bucket, some bits of its digest, so equal
rows meet in one bucket whatever run they are in. ``repeats_in`` takes one bucket after another into
a set of rows seen; a bucket too large for memory is read several times, for some of its digests
each time.

``Spill`` does this for one process; ``cluster.first_rows`` does it in tasks. What ``Spill`` finds,
pairs of a row and the first row like it, goes into runs again, by ranges of row numbers, so that a
second pass over the rows reads it in order. Disk: 24 bytes a row, plus 16 for each repeated row.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fast_axolotl.dedupe.seen import SeenRows

RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("number", "<i8")])
_PAIR = np.dtype([("number", "<i8"), ("first", "<i8")])
ROW_BYTES = 128
"""What one row takes while its bucket is decided: its record, its place in the set, and copies."""

_RUN_SHARE = 8
"""A run is collected while the set of rows seen is still in memory, so it gets a part of its own:
one in so many of the rows that a bucket may have."""

_LEAST_ROWS = 1024
_BUCKET_BITS = 8

ReadRange = Callable[[int, int], bytes]
"""Reads some bytes of a run: from, to."""


def make_records(digests: Any, numbers: Any) -> Any:
    """Records of rows from their digests, two words each, and their numbers."""
    records = np.empty(len(numbers), RECORD)
    pairs = digests.reshape(-1, 2)
    records["low"], records["high"], records["number"] = pairs[:, 0], pairs[:, 1], numbers
    return records


def write_run(path: Path, records: Any, keys: Any, num_keys: int) -> None:
    """Writes records in the order of their keys, which are below ``num_keys``."""
    starts = np.zeros(num_keys + 1, "<i8")
    np.cumsum(np.bincount(keys, minlength=num_keys), out=starts[1:])
    with path.open("wb") as file:
        starts.tofile(file)
        records[np.argsort(keys, kind="stable")].tofile(file)


def write_buckets(path: Path, records: Any, bits: int) -> None:
    """A run of records by their buckets, ``2 ** bits`` of them."""
    keys = records["low"] & np.uint64((1 << bits) - 1)
    write_run(path, records, keys.astype(np.int64), 1 << bits)


def repeats_in(
    runs: Sequence[ReadRange], bucket: int, bits: int, most_rows: int
) -> Iterator[tuple[Any, Any]]:
    """The numbers of repeated rows of a bucket, and those of the first rows like them."""
    ranges = [(read, *_range_of(read, bucket, 1 << bits, RECORD)) for read in runs]
    total = sum(stop - start for _, start, stop in ranges) // RECORD.itemsize
    passes = 1 << (total // most_rows).bit_length()
    for index in range(passes):
        parts = [np.empty(0, RECORD)]
        for read, start, stop in ranges:
            if stop > start:
                records = np.frombuffer(read(start, stop), RECORD)
                values = (records["low"] >> np.uint64(bits)) & np.uint64(passes - 1)
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
        self._range_rows = max(_LEAST_ROWS, limit // 64)
        self._held: list[Any] = []
        self._num_held = self._num_ranges = 0
        self._runs: list[Path] = []
        self._pairs: list[Path] = []
        self._range: tuple[int, Any] = (-1, None)
        """The number of the range read last, and the first row like each of its rows."""
        self.num_bytes = 0
        """Written to disk so far."""

    def add(self, digests: Any, numbers: Any) -> None:
        """Takes rows in any order; each number is one row."""
        step = max(1, self._most_rows // _RUN_SHARE)
        for start in range(0, len(numbers), step):
            stop = start + step
            self._held.append(make_records(digests[2 * start : 2 * stop], numbers[start:stop]))
            self._num_held += len(self._held[-1])
            if self._num_held >= step:
                self._flush()
        last = int(numbers.max(initial=-1))
        self._num_ranges = max(self._num_ranges, last // self._range_rows + 1)

    def _flush(self) -> None:
        records = np.concatenate(self._held)
        self._held, self._num_held = [], 0
        self._runs.append(self.folder / f"run-{len(self._runs)}")
        write_buckets(self._runs[-1], records, _BUCKET_BITS)
        self.num_bytes += records.nbytes

    def resolve(self) -> None:
        """Finds the first row of every digest; nothing can be added after."""
        if self._held:
            self._flush()
        runs = [_reader(path) for path in self._runs]
        for bucket in range(1 << _BUCKET_BITS):
            for numbers, firsts in repeats_in(runs, bucket, _BUCKET_BITS, self._most_rows):
                is_asked = numbers >= 0  # nobody asks for the rows of other data
                pairs = np.empty(np.count_nonzero(is_asked), _PAIR)
                pairs["number"], pairs["first"] = numbers[is_asked], firsts[is_asked]
                if len(pairs):
                    path = self.folder / f"pairs-{len(self._pairs)}"
                    write_run(path, pairs, pairs["number"] // self._range_rows, self._num_ranges)
                    self._pairs.append(path)
                    self.num_bytes += pairs.nbytes

    def firsts(self, start: int, stop: int) -> Any:
        """For the rows ``start … stop``, the number of the first row like each; call in order."""
        size = self._range_rows
        pieces = [np.zeros(0, np.int64)]
        for index in range(start // size, (stop - 1) // size + 1):
            edge = index * size
            if self._range[0] != index:
                firsts = np.arange(edge, edge + size)
                for path in self._pairs:
                    read = _reader(path)
                    first, last = _range_of(read, index, self._num_ranges, _PAIR)
                    if last > first:
                        pairs = np.frombuffer(read(first, last), _PAIR)
                        firsts[pairs["number"] - edge] = pairs["first"]
                self._range = (index, firsts)
            pieces.append(self._range[1][max(0, start - edge) : stop - edge])
        return np.concatenate(pieces)

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _range_of(read: ReadRange, key: int, num_keys: int, kind: Any) -> tuple[int, int]:
    """Where the records of a key begin and end in a run, in bytes."""
    start, stop = np.frombuffer(read(8 * key, 8 * key + 16), "<i8").tolist()
    head = 8 * (num_keys + 1)
    return head + start * kind.itemsize, head + stop * kind.itemsize


def _reader(path: Path) -> ReadRange:
    def read(start: int, stop: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    return read
