"""Assign lengths to packs: first-fit and next-fit.

Every kernel takes lengths in the order of placement and works through them group by group; packs
never cross groups. It writes the pack of each length over the length, since at ten million of them
fresh pages for another array cost 0.15 s, and returns how many packs there are. Packs are numbered
as they open. A length above the capacity gets a pack to itself, into which nothing else goes, be it
of length zero. ``collect`` then turns packs of lengths into members of packs.

Cost, for n lengths and p packs, whatever the capacity: ``next_fit`` O(n); ``first_fit`` O(n log p),
by a tree of the largest free space below each node. Memory beside the arrays passed in: O(p).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from fast_axolotl.kernels import jit

_CLOSED = -1
"""Free space of a pack that takes nothing more: too little even for a length of zero."""

_FANOUT = 4
"""Children of a node of the tree, as ``_set_free`` spells out. Searching 4 one by one takes half as
long as a tree of 2, and half as long as searching 4 without branches; 8 gain nothing more."""

_SIGNATURE = types.int64(
    jit.MUTABLE_INT64,  # lengths, none negative, that add up to less than 2**63; becomes packs
    types.int64,  # lengths per group, at least 1
    types.int64,  # capacity, at least 1
    types.int64,  # most lengths in a pack, at least 1
)


@jit.kernel(_SIGNATURE)
def first_fit(values: Any, group_size: int, capacity: int, max_rows: int) -> int:
    """Puts each length into the first pack with room for it."""
    opened_before = 0
    tree, rows = np.empty(0, np.int64), np.empty(0, np.int64)
    for start in range(0, values.size, group_size):
        group = values[start : start + group_size]
        # Two packs that are not full by rows hold more than one capacity together, or the later one
        # would not have been opened: so no array has to grow.
        filled = min(group.size, group.sum() // capacity)
        most = min(group.size, 2 * filled + 2 + group.size // max_rows)
        leaves = 1
        while leaves < most:
            leaves *= _FANOUT
        first = leaves // (_FANOUT - 1)  # where the lowest level begins; the root is node 0
        if rows.size < most:
            tree, rows = np.empty(_FANOUT * first + 1, np.int64), np.empty(most, np.int64)
        # All space is free, in each level no further than the packs can come.
        level, width = first, most
        while level:
            width = (width + _FANOUT - 1) // _FANOUT
            tree[level : level + _FANOUT * width] = capacity
            level = (level - 1) // _FANOUT
        tree[0] = capacity
        opened = 0
        for index in range(group.size):
            length = group[index]
            pack = opened
            if length <= capacity:
                # A pack not yet opened is a leaf with all its space free: every search finds one.
                node = 0
                while node < first:
                    node = _FANOUT * node + 1
                    while tree[node] < length:
                        node += 1
                pack = node - first
            if pack == opened:
                rows[pack] = 0
                opened += 1
            rows[pack] += 1
            is_closed = rows[pack] == max_rows or length > capacity
            _set_free(tree, first + pack, _CLOSED if is_closed else tree[first + pack] - length)
            group[index] = opened_before + pack
        opened_before += opened
    return opened_before


@jit.kernel(_SIGNATURE)
def next_fit(values: Any, group_size: int, capacity: int, max_rows: int) -> int:
    """Fills one pack at a time: what does not fit closes it and opens the next."""
    pack, free, rows = -1, _CLOSED, 0
    for index in range(values.size):
        length = values[index]
        if length > free or rows == max_rows or index % group_size == 0:
            pack, free, rows = pack + 1, capacity, 0
        free -= length
        rows += 1
        values[index] = pack
    return pack + 1


@jit.kernel(types.void(jit.INT64, jit.INT64, jit.MUTABLE_INT64, jit.MUTABLE_INT64))
def collect(keys: Any, order: Any, offsets: Any, indices: Any) -> None:
    """Sorts by counting, stably: what has key 0, then what has key 1, …; O(n + keys).

    ``order`` holds the index that each key stands for; empty, it means 0, 1, …. ``offsets`` has one
    element more than there are keys, all zero; it becomes where each key begins in ``indices``.
    """
    for key in keys:
        offsets[key] += 1
    total = 0
    for key in range(offsets.size):
        count = offsets[key]
        offsets[key] = total
        total += count
    for position in range(keys.size):
        key = keys[position]
        indices[offsets[key]] = order[position] if order.size else position
        offsets[key] += 1
    # Each offset now stands where the next one belongs.
    for key in range(offsets.size - 1, 0, -1):
        offsets[key] = offsets[key - 1]
    offsets[0] = 0


@jit.inlined
def _set_free(tree: Any, node: int, free: int) -> None:
    """Sets a leaf and the nodes above it, up to the first that stays as it is."""
    tree[node] = free
    while node:
        node = (node - 1) // _FANOUT
        child = _FANOUT * node + 1
        free = max(max(tree[child], tree[child + 1]), max(tree[child + 2], tree[child + 3]))
        if tree[node] == free:
            return
        tree[node] = free
