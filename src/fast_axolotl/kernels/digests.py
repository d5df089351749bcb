"""A set of 128-bit digests that remembers where each was seen first.

Open addressing over ``slots``: 0 for an empty one, else 32 bits of the digest as a tag and the
number of the entry, counted from 1. The digests themselves lie densely in ``keys``, two words an
entry, and the row that brought each in ``rows``; so the slots can be thrown away and rebuilt, and a
search touches ``keys`` only where the tag agrees. Which bits serve what: the upper half of the low
word chooses the slot, the upper half of the high word is the tag, its lower half the region.

The caller sees to it that there is room: as many free entries as rows, and slots to spare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from fast_axolotl.kernels.jit import INT64, MUTABLE_INT64, MUTABLE_UINT64, UINT64, kernel

_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@kernel(
    types.int64(
        UINT64,
        INT64,
        types.int64,
        types.int64,
        MUTABLE_UINT64,
        MUTABLE_UINT64,
        MUTABLE_INT64,
        types.int64,
        MUTABLE_INT64,
    )
)
def insert(
    digests: Any,
    numbers: Any,
    region: int,
    num_regions: int,
    slots: Any,
    keys: Any,
    rows: Any,
    count: int,
    firsts: Any,
) -> int:
    """Enters the digests of one region that are new, and gives the new number of entries.

    ``numbers`` are the rows' numbers; ``firsts`` receives, for every row of the region, the number
    of the row that has its digest first, which is its own where it is new. ``num_regions`` is a
    power of two.
    """
    size = np.uint64(len(slots))
    for index in range(len(numbers)):
        low, high = digests[2 * index], digests[2 * index + 1]
        if high & np.uint64(num_regions - 1) != np.uint64(region):
            continue
        position = ((low >> _HALF) * size) >> _HALF  # the upper half, scaled to the table
        tag = high >> _HALF << _HALF
        while True:
            slot = slots[position]
            if slot == 0:
                keys[2 * count], keys[2 * count + 1] = low, high
                firsts[index] = rows[count] = numbers[index]
                count += 1
                slots[position] = tag | np.uint64(count)
                break
            if slot ^ tag <= _LOWER:
                entry = (slot & _LOWER) - _ONE
                if keys[entry + entry] == low and keys[entry + entry + _ONE] == high:
                    firsts[index] = rows[entry]
                    break
            position += _ONE
            if position == size:
                position = np.uint64(0)
    return count
