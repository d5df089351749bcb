"""The set of rows seen so far, by digest.

An entry takes 24 bytes, the digest and the number of its row, plus 10 to
13.3 bytes of slots: the table is never emptier than 60 % nor fuller than 80 % once it has a few
thousand entries. Growing throws the slots away before it makes new ones, and lets the system extend
the entries in place, so there is no moment with two tables. The digests are dealt to regions by
their last bits, one for each thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

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


class SeenRows:
    """The rows of earlier tables, so that ``unique_rows`` drops them from later ones.

    Pass the same object to every call. Rows of earlier calls are known by their digest alone: 128
    bits under a secret drawn when the object is made.
    """

    def __init__(self, num_threads: int = 0) -> None:
        require_threads(num_threads)
        self._threads = num_threads or usable_cores()
        num_regions = min(_MOST_REGIONS, 1 << (self._threads - 1).bit_length())
        self._regions = [_Region(index, num_regions) for index in range(num_regions)]
        self._lock = threading.Lock()
        self.secret = np.array([secrets.randbits(64) | 1 for _ in range(4)], np.uint64)
        """The key of the hash: four odd words that nobody can foresee."""
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
        from fast_axolotl.kernels.digests import insert

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
                # The entries are entered anew, each in its own place.
                known, rows = self.keys[: 2 * self.count], self.rows[: self.count]
                insert(known, rows, 0, 1, self.slots, self.keys, self.rows, 0, self.rows)
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


def require_threads(num_threads: int) -> None:
    if num_threads < 0:
        raise UsageError(f"num_threads must be 0 (all processors) or more, not {num_threads}")
