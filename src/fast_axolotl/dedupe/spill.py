"""Find duplicate rows on disk, when there are more than fit into memory.

A record is the digest of a row and its number, 24 bytes. A *run* is a file with as many records as
fit in memory, ordered by bucket: some bits of the digest, so equal rows meet in one bucket whatever
run they are in. ``resolve`` takes bucket after bucket into a set of rows seen; one with too many
different digests for memory is read several times, for some of them each time.

What it finds, pairs of a row and the first row like it, goes into files, in the order in which rows
came, so that a second pass over the rows reads each in order. Disk: 24 bytes a row, plus 16 for
each repeated row.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class _Run(NamedTuple):
    path: Path
    edges: Any
    """Which of its records begins each bucket."""
    distinct: Any
    """How many different digests each bucket has in it."""


class Spill:
    """Records on disk, in a folder of their own below another, which ``close`` removes."""

    def __init__(self, below: Path, *, limit: int) -> None:
        self.folder = below / f".fast-axolotl-{uuid.uuid4().hex}"
        self._most_rows = max(_LEAST_ROWS, limit // _ROW_BYTES)
        self._run_rows = max(_LEAST_ROWS, self._most_rows // _RUN_SHARE)
        self._held: list[Any] = []
        self._num_held = 0
        self._runs: list[_Run] = []
        self._pairs: list[Any] = []
        """Repeated rows, and the first row like each."""
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
        for bucket in range(_NUM_BUCKETS):
            distinct = sum(int(run.distinct[bucket]) for run in self._runs)
            passes = 1 << (distinct // self._most_rows).bit_length()
            for index in range(passes):
                seen = SeenRows(num_threads=1)
                found: list[Any] = []
                for run in self._runs:
                    start, stop = run.edges[bucket : bucket + 2].tolist()
                    offset = start * _RECORD.itemsize
                    records = np.fromfile(run.path, _RECORD, count=stop - start, offset=offset)
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
                    path = self.folder / f"pairs-{len(self._pairs)}"
                    with path.open("wb") as file:
                        file.writelines(pair[side].data for side in (0, 1) for pair in found)
                    self._pairs.append(np.memmap(path, np.int64, "r", shape=(2, count)))
                    self.num_bytes += self._pairs[-1].nbytes

    def firsts(self, start: int, stop: int) -> Any:
        """For the rows ``start … stop``, the number of the first row like each."""
        firsts = np.arange(start, stop)
        for numbers, first_of_each in self._pairs:
            some = slice(*np.searchsorted(numbers, [start, stop]))
            firsts[numbers[some] - start] = first_of_each[some]
        return firsts

    def repeated(self) -> Iterator[Any]:
        """The numbers of rows that repeat one of a smaller number, in no order."""
        return (pairs[0] for pairs in self._pairs)

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _flush(self) -> None:
        if not self._held:
            return
        self.folder.mkdir(exist_ok=True)
        records = np.concatenate(self._held)
        self._held, self._num_held = [], 0
        keys = (records["low"] & np.uint64(_NUM_BUCKETS - 1)).astype(np.int64)
        numbers, firsts = _enter(SeenRows(num_threads=1), records)
        run = _Run(
            self.folder / f"run-{len(self._runs)}",
            np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=_NUM_BUCKETS))]),
            np.bincount(keys[firsts == numbers], minlength=_NUM_BUCKETS),
        )
        run.path.write_bytes(records[np.argsort(keys, kind="stable")].data)
        self._runs.append(run)
        self.num_bytes += records.nbytes


def _enter(seen: SeenRows, records: Any) -> tuple[Any, Any]:
    """The numbers of some records, and for each that of the first like it."""
    digests = np.stack([records["low"], records["high"]], axis=1).ravel()
    numbers = np.ascontiguousarray(records["number"])
    return numbers, seen.enter(digests, numbers)
