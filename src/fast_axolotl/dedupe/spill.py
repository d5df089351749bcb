"""Which rows repeat which, for more rows than memory holds.

A record is a digest and the number of its row, 24 bytes. Records are dealt to partitions on disk by
bits of the digest that the set of seen rows does not use, so equal digests meet in one partition
and in the order of their rows. ``resolve`` then enters one partition after another into a set that
fits memory, dealing a partition out again where it does not. What it finds, pairs of a row and the
first row like it, goes to files by ranges of row numbers; ``firsts`` reads those range by range.

Disk: 24 bytes a row, plus 16 for each repeated row. Memory: the limit, and some MB of buffers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from fast_axolotl.dedupe.seen import SeenRows

__all__ = ["Spill"]

RECORD = np.dtype([("low", np.uint64), ("high", np.uint64), ("number", np.int64)])
PAIR = np.dtype([("number", np.int64), ("first", np.int64)])

_BITS = 6
"""A partition is dealt to 64 others."""

_MOST_DEPTH = 5
"""30 bits of a digest; a partition that is still too large then has more rows than memory has."""

_LEAST_LIMIT = 1024 * 1024
"""Smaller sets are mostly slots that wait for entries, and dealing out again would not help."""

_BUFFER_BYTES = 64 * 1024
_BLOCK_ROWS = 131_072


class Spill:
    """Records on disk, in a folder that ``close`` removes."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self._limit = max(limit, _LEAST_LIMIT)
        self._range_rows = max(1024, limit // 64)
        self._partitions = _Partitions(folder / "digests", depth=0)
        self._range: tuple[int, Any] = (-1, None)
        self.num_bytes = 0
        """Written to disk so far."""

    def add(self, digests: Any, numbers: Any) -> None:
        """Takes records in the order of their rows."""
        for start in range(0, len(numbers), _BLOCK_ROWS):
            rows = numbers[start : start + _BLOCK_ROWS]
            records = np.empty(len(rows), RECORD)
            records["low"] = digests[2 * start : 2 * (start + len(rows)) : 2]
            records["high"] = digests[2 * start + 1 : 2 * (start + len(rows)) : 2]
            records["number"] = rows
            self._partitions.add(records)
            self.num_bytes += records.nbytes

    def resolve(self) -> None:
        """Finds the first row of every digest; nothing can be added after."""
        with _Files(self.folder / "repeats") as ranges:
            for path in self._partitions.close():
                self._resolve(path, 0, ranges)

    def firsts(self, start: int, stop: int) -> Any:
        """For the rows ``start … stop``, the number of the first row like each; call in order."""
        size = self._range_rows
        pieces = [
            self._range_firsts(index)[max(0, start - index * size) : stop - index * size]
            for index in range(start // size, (stop - 1) // size + 1)
        ]
        return np.concatenate([*pieces, np.zeros(0, np.int64)])

    def close(self) -> None:
        """Removes everything; what a full disk still has to say about it is of no interest."""
        with suppress(OSError):
            self._partitions.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _resolve(self, path: Path, depth: int, ranges: _Files) -> None:
        if not self._enter(path, ranges, may_stop=depth < _MOST_DEPTH):
            for part in self._deal_again(path, depth + 1):
                self._resolve(part, depth + 1, ranges)
        path.unlink(missing_ok=True)

    def _deal_again(self, path: Path, depth: int) -> list[Path]:
        parts = _Partitions(path.with_suffix(".parts"), depth)
        try:
            for records in _blocks(path):
                parts.add(records)
        finally:
            paths = parts.close()
        return paths

    def _enter(self, path: Path, ranges: _Files, *, may_stop: bool) -> bool:
        """Whether the partition fitted; pairs that come again from its parts do no harm."""
        seen = SeenRows()
        for records in _blocks(path):
            digests = np.stack([records["low"], records["high"]], axis=1).ravel()
            numbers = np.ascontiguousarray(records["number"])
            firsts = seen.enter(digests, numbers)
            repeats = (firsts != numbers) & (numbers >= 0)
            pairs = np.empty(np.count_nonzero(repeats), PAIR)
            pairs["number"], pairs["first"] = numbers[repeats], firsts[repeats]
            ranges.deal(pairs, pairs["number"] // self._range_rows)
            self.num_bytes += pairs.nbytes
            if may_stop and seen.num_bytes > self._limit:
                return False
        return True

    def _range_firsts(self, index: int) -> Any:
        if self._range[0] != index:
            start = index * self._range_rows
            firsts = np.arange(start, start + self._range_rows)
            for pairs in _blocks(self.folder / "repeats" / str(index), PAIR):
                firsts[pairs["number"] - start] = pairs["first"]
            self._range = (index, firsts)
        return self._range[1]


class _Partitions:
    """Files of records, chosen by a few bits of the digest."""

    def __init__(self, folder: Path, depth: int) -> None:
        self._files = _Files(folder)
        self._shift = np.uint64(depth * _BITS)

    def add(self, records: Any) -> None:
        bits = (records["low"] >> self._shift) & np.uint64((1 << _BITS) - 1)
        self._files.deal(records, bits.astype(np.int64))

    def close(self) -> list[Path]:
        return self._files.close()


class _Files:
    """Numbered files in a folder, each made when something first goes there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open: dict[int, IO[bytes]] = {}
        self._paths: dict[int, Path] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deal(self, records: Any, indices: Any) -> None:
        """Appends every record to the file of its index, keeping their order."""
        order = np.argsort(indices, kind="stable")
        ranked, records = indices[order], records[order]
        edges = [*np.flatnonzero(np.diff(ranked, prepend=-1)), len(ranked)]
        for start, stop in pairwise(edges):
            self._file(int(ranked[start])).write(records[start:stop].tobytes())

    def close(self) -> list[Path]:
        for file in self._open.values():
            file.close()
        self._open = {}
        return [self._paths[index] for index in sorted(self._paths)]

    def _file(self, index: int) -> IO[bytes]:
        if index not in self._open:
            if len(self._open) >= 1 << _BITS:
                self._open.pop(next(iter(self._open))).close()
            self._paths[index] = self._folder / str(index)
            self._open[index] = self._paths[index].open("ab", buffering=_BUFFER_BYTES)
        return self._open[index]


def _blocks(path: Path, kind: Any = RECORD) -> Iterator[Any]:
    if path.exists():
        with path.open("rb") as file:
            while len(records := np.fromfile(file, kind, _BLOCK_ROWS)):
                yield records
