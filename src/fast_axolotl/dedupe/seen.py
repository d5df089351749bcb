"""The rows seen so far, in memory as a set of digests, and on disk for more than memory holds.

``SeenRows`` is the set. An entry takes 24 bytes, the digest and the number of its row, plus 10 to
13.3 bytes of slots: the table is never emptier than 60 % nor fuller than 80 % once it has a few
thousand entries. Growing throws the slots away before it makes new ones, and lets the system extend
the entries in place, so there is no moment with two tables. The digests are dealt to regions by
their last bits, one for each thread.

``Spill`` finds the same answer on disk. A record is a digest and the number of its row, 24 bytes.
Records are dealt to partitions by bits of the digest that the set does not use, so equal digests
meet in one partition and in the order of their rows. ``resolve`` then enters one partition after
another into a set that fits memory, dealing a partition out again where it does not. What it finds,
pairs of a row and the first row like it, goes to files by ranges of row numbers; ``firsts`` reads
those range by range. Disk: 24 bytes a row, plus 16 for each repeated row. Memory: the limit, and
some MB of buffers.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.kernels.threads import slices, spread
from fast_axolotl.system import usable_cores

_MOST_LOAD = 0.8
_LOAD_AFTER_GROWTH = 0.6
_ENTRY_GROWTH = 16
"""Entries grow by one part in so many: each growth is one call to the system."""

_LEAST_SLOTS = 4096
_LEAST_ENTRIES = 1024
_ENTER_ROWS = 65_536
"""Rows entered at a time; room is made for all of them, though they may all be known."""

_ROWS_PER_THREAD = 20_000
_MOST_REGIONS = 16

_RECORD = np.dtype([("low", np.uint64), ("high", np.uint64), ("number", np.int64)])
_PAIR = np.dtype([("number", np.int64), ("first", np.int64)])
_BITS = 6
"""A partition is dealt to 64 others."""

_MOST_DEPTH = 5
"""30 bits of a digest; a partition that is still too large then has more rows than memory has."""

_LEAST_LIMIT = 1024 * 1024
"""Smaller sets are mostly slots that wait for entries, and dealing out again would not help."""

_BUFFER_BYTES = 64 * 1024
_RECORD_ROWS = 131_072
"""Records written or read at a time."""


class SeenRows:
    """The rows of earlier tables, so that ``unique_rows`` drops them from later ones.

    Pass the same object to every call. Rows of earlier calls are known by their digest alone: 128
    bits under a secret drawn when the object is made.
    """

    def __init__(self, num_threads: int = 0) -> None:
        if num_threads < 0:
            raise UsageError(f"num_threads must be 0 (all processors) or more, not {num_threads}")
        self._threads = num_threads or usable_cores()
        num_regions = min(_MOST_REGIONS, 1 << (self._threads - 1).bit_length())
        self._regions = [_Region(index, num_regions) for index in range(num_regions)]
        self._lock = threading.Lock()
        self.secret = fresh_secret()
        """The key of the hash."""
        self.next_number = 0
        """The number that the next row gets."""
        self.types: Any = None
        """The types of the columns compared, set by the first table."""

    def __len__(self) -> int:
        """Different rows seen."""
        return sum(region.count for region in self._regions)

    @property
    def num_bytes(self) -> int:
        """Memory that the set holds."""
        return sum(region.num_bytes for region in self._regions)

    def number(self, count: int) -> Any:
        """The numbers of the next ``count`` rows."""
        with self._lock:
            first, self.next_number = self.next_number, self.next_number + count
        return np.arange(first, first + count)

    def enter(self, digests: Any, numbers: Any) -> Any:
        """For each digest, two words a row, the number of the row that had it first."""
        firsts = np.empty(len(numbers), np.int64)
        threads = min(self._threads, 1 + len(numbers) // _ROWS_PER_THREAD)

        def fill(start: int, stop: int) -> None:
            for region in self._regions[start:stop]:
                region.enter(digests, numbers, firsts)

        with self._lock:
            spread(fill, slices(len(self._regions), threads), threads)
        return firsts

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Digests, two words a row, and the numbers of their rows, region by region."""
        for region in self._regions:
            yield region.keys[: 2 * region.count], region.rows[: region.count]


class _Region:
    """One share of the digests."""

    def __init__(self, index: int, num_regions: int) -> None:
        self.index = index
        self.num_regions = num_regions
        self.count = 0
        self.keys = np.empty(0, np.uint64)
        self.rows = np.empty(0, np.int64)
        self.slots = np.zeros(0, np.uint64)

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.rows.nbytes + self.slots.nbytes)

    def enter(self, digests: Any, numbers: Any, firsts: Any) -> None:
        from fast_axolotl.kernels.digests import insert, place

        for start in range(0, len(numbers), _ENTER_ROWS):
            stop = min(start + _ENTER_ROWS, len(numbers))
            block = digests[2 * start : 2 * stop]
            # Room for the block's own rows, and for a region's share of all that are to come.
            last_bits = block[1::2] & np.uint64(self.num_regions - 1)
            needed = self.count + int(np.count_nonzero(last_bits == self.index))
            likely = max(needed, self.count + (len(numbers) - start) // self.num_regions)
            if needed > len(self.rows):
                grown = len(self.rows) + len(self.rows) // _ENTRY_GROWTH
                capacity = max(likely, grown, _LEAST_ENTRIES)
                self.keys.resize(2 * capacity, refcheck=False)
                self.rows.resize(capacity, refcheck=False)
            if needed > _MOST_LOAD * len(self.slots):
                num_slots = max(_LEAST_SLOTS, int(likely / _LOAD_AFTER_GROWTH))
                self.slots = np.zeros(0, np.uint64)
                self.slots = np.zeros(num_slots, np.uint64)
                place(self.keys, self.count, self.slots)
            self.count = insert(
                block,
                numbers[start:stop],
                self.index,
                self.num_regions,
                self.slots,
                self.keys,
                self.rows,
                self.count,
                firsts[start:stop],
            )


def fresh_secret() -> Any:
    """Four odd words that nobody can foresee."""
    return np.array([secrets.randbits(64) | 1 for _ in range(4)], np.uint64)


class Spill:
    """Records on disk, in a folder that ``close`` removes."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self._limit = max(limit, _LEAST_LIMIT)
        self._range_rows = max(1024, limit // 64)
        self._partitions = _Files(folder / "digests")
        self._range: tuple[int, Any] = (-1, None)
        """The number of the range read last, and the first row like each of its rows."""
        self.num_bytes = 0
        """Written to disk so far."""

    def add(self, digests: Any, numbers: Any) -> None:
        """Takes records in the order of their rows."""
        for start in range(0, len(numbers), _RECORD_ROWS):
            rows = numbers[start : start + _RECORD_ROWS]
            records = np.empty(len(rows), _RECORD)
            records["low"] = digests[2 * start : 2 * (start + len(rows)) : 2]
            records["high"] = digests[2 * start + 1 : 2 * (start + len(rows)) : 2]
            records["number"] = rows
            self._partitions.deal(records, _partition_of(records, depth=0))
            self.num_bytes += records.nbytes

    def resolve(self) -> None:
        """Finds the first row of every digest; nothing can be added after."""
        with closing(_Files(self.folder / "repeats")) as ranges:
            for path in self._partitions.close():
                self._resolve(path, 0, ranges)

    def firsts(self, start: int, stop: int) -> Any:
        """For the rows ``start … stop``, the number of the first row like each; call in order."""
        size = self._range_rows
        pieces = [np.zeros(0, np.int64)]
        for index in range(start // size, (stop - 1) // size + 1):
            edge = index * size
            if self._range[0] != index:
                firsts = np.arange(edge, edge + size)
                for pairs in _blocks(self.folder / "repeats" / str(index), _PAIR):
                    firsts[pairs["number"] - edge] = pairs["first"]
                self._range = (index, firsts)
            pieces.append(self._range[1][max(0, start - edge) : stop - edge])
        return np.concatenate(pieces)

    def close(self) -> None:
        """Removes everything; what a full disk still has to say about it is of no interest."""
        with suppress(OSError):
            self._partitions.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _resolve(self, path: Path, depth: int, ranges: _Files) -> None:
        if not self._fits(path, ranges, may_stop=depth < _MOST_DEPTH):
            with closing(_Files(path.with_suffix(".parts"))) as parts:
                for records in _blocks(path, _RECORD):
                    parts.deal(records, _partition_of(records, depth + 1))
            for part in parts.close():
                self._resolve(part, depth + 1, ranges)
        path.unlink(missing_ok=True)

    def _fits(self, path: Path, ranges: _Files, *, may_stop: bool) -> bool:
        """Whether a set of the partition fits memory.

        Its pairs are written on the way; those that come again from its parts do no harm.
        """
        seen = SeenRows()
        for records in _blocks(path, _RECORD):
            digests = np.stack([records["low"], records["high"]], axis=1).ravel()
            numbers = np.ascontiguousarray(records["number"])
            firsts = seen.enter(digests, numbers)
            repeats = (firsts != numbers) & (numbers >= 0)
            pairs = np.empty(np.count_nonzero(repeats), _PAIR)
            pairs["number"], pairs["first"] = numbers[repeats], firsts[repeats]
            ranges.deal(pairs, pairs["number"] // self._range_rows)
            self.num_bytes += pairs.nbytes
            if may_stop and seen.num_bytes > self._limit:
                return False
        return True


class _Files:
    """Numbered files in a folder, each made when something first goes there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open: dict[int, IO[bytes]] = {}
        self._paths: dict[int, Path] = {}

    def deal(self, records: Any, indices: Any) -> None:
        """Appends every record to the file of its index, keeping their order."""
        order = np.argsort(indices, kind="stable")
        ranked, records = indices[order], records[order]
        edges = [*np.flatnonzero(np.diff(ranked, prepend=-1)), len(ranked)]
        for start, stop in pairwise(edges):
            index = int(ranked[start])
            if index not in self._open:
                if len(self._open) >= 1 << _BITS:
                    self._open.pop(next(iter(self._open))).close()
                self._paths[index] = self._folder / str(index)
                self._open[index] = self._paths[index].open("ab", buffering=_BUFFER_BYTES)
            self._open[index].write(records[start:stop].tobytes())

    def close(self) -> list[Path]:
        """Everything is on disk after this; the files in the order of their numbers."""
        for file in self._open.values():
            file.close()
        self._open = {}
        return [self._paths[index] for index in sorted(self._paths)]


def _partition_of(records: Any, depth: int) -> Any:
    """A few bits of the digest, others at each depth."""
    bits = (records["low"] >> np.uint64(depth * _BITS)) & np.uint64((1 << _BITS) - 1)
    return bits.astype(np.int64)


def _blocks(path: Path, kind: Any) -> Iterator[Any]:
    if path.exists():
        with path.open("rb") as file:
            while len(records := np.fromfile(file, kind, _RECORD_ROWS)):
                yield records
