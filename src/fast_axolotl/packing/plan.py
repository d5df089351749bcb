"""Decide which sequences share a row, from their lengths.

``first_fit`` gives the very packs of Axolotl's ``pack_parallel`` (0.19.0), group by group and in
the same order; ``sequential`` those of its ``allocate_sequentially`` for one rank. Like there, a
length above the capacity is not left out: it gets a pack to itself, and ``over_long`` names it.

Cost: O(n log n) time and O(n) memory, whatever the capacity; Axolotl's search is O(n · packs).
``sequential`` is O(n). ``first_fit_decreasing`` sorts first.

It does not touch tokens, and it does not shuffle or batch the packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fast_axolotl.errors import UsageError
from fast_axolotl.packing.sequences import integer, integers, untracked

if TYPE_CHECKING:
    import pyarrow as pa

Method = Literal["first_fit", "first_fit_decreasing", "sequential"]

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """Which lengths go into which pack; a sequence of arrays of indices, one per pack."""

    indices: _Integers
    """The indices of all lengths, pack after pack."""
    offsets: _Integers
    """Pack ``i`` is ``indices[offsets[i]:offsets[i + 1]]``; one longer than there are packs."""
    capacity: int
    """The most tokens of one pack; a longer sequence has a pack of its own."""
    method: Method
    """The method that made the plan."""
    over_long: _Integers
    """The indices of the lengths above the capacity, ascending; each is alone in its pack."""
    total_length: int
    """The sum of all lengths."""
    lower_bound: int
    """No plan has fewer packs: the sum of the lengths that fit ÷ the capacity, rounded up, and one
    pack for each longer one. It does not take ``max_rows`` and groups into account."""
    efficiency: float | None
    """The share of all places that is filled, from 0 to 1; an over-long length fills one pack.
    ``None`` where there are no packs."""

    def __len__(self) -> int:
        """The number of packs."""
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> _Integers:
        """The indices of one pack, as a view."""
        start = range(len(self))[pack]
        return self.indices[self.offsets[start] : self.offsets[start + 1]]

    def __iter__(self) -> Iterator[_Integers]:
        return (self[pack] for pack in range(len(self)))

    def tolist(self) -> list[list[int]]:
        """The packs as lists of ``int``, the form that Axolotl's sampler hands on."""
        return cut(self.indices, self.offsets)


def cut(values: npt.NDArray[np.integer[Any]], offsets: _Integers) -> list[list[int]]:
    """Lists of the ``int`` between each offset and the next."""
    flat = values.tolist()
    return untracked(flat[start:stop] for start, stop in pairwise(offsets.tolist()))


def plan_packs(
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]] | pa.Array | pa.ChunkedArray,
    capacity: int,
    *,
    max_rows: int | None = None,
    method: Method = "first_fit",
    group_size: int | None = None,
) -> PackPlan:
    """Assign lengths to packs of at most ``capacity`` tokens and ``max_rows`` sequences each.

    - ``first_fit``: each length, in order, into the first pack with room for it.
    - ``first_fit_decreasing``: the same, longest first; equal lengths in order of their index.
    - ``sequential``: one open pack at a time; a length that does not fit opens the next. Keeps the
      order.

    Packs are in the order in which they were opened, and their members in the order in which they
    were placed. ``group_size`` plans groups of this many lengths separately, as Axolotl does with
    100,000; ``None`` plans all together. A length that is not a non-negative integer raises.
    """
    if method not in get_args(Method):
        raise UsageError(f"method is {method!r}; pass one of {', '.join(get_args(Method))}")
    capacity = integer("capacity", capacity, least=1)
    values = integers(lengths, "lengths").astype(np.int64, copy=False)
    if len(values) and values.min() < 0:
        index = int(np.argmax(values < 0))
        raise UsageError(f"lengths[{index}] is {values[index]}; pass lengths from 0 to 2**63 - 1")
    from fast_axolotl.kernels import binpack

    # Beyond the number of lengths, a limit limits nothing; zero lengths still form one group.
    most = max(1, len(values))
    max_rows = most if max_rows is None else min(most, integer("max_rows", max_rows, least=1))
    group_size = most if group_size is None else integer("group_size", group_size, least=1)
    group_size = min(most, group_size)
    total_length = int(values.sum())
    if (total := float(values.sum(dtype=np.float64))) > np.iinfo(np.int64).max:
        raise UsageError(f"the lengths add up to {total:.4g}, above 2**63 - 1; check their unit")
    order, packs = np.empty(0, np.int64), values.copy()
    if method == "first_fit_decreasing":  # of equal lengths the first index first, group by group
        order = np.lexsort((-values, np.arange(len(values)) // group_size))
        packs = values[order]
    place = binpack.next_fit if method == "sequential" else binpack.first_fit
    num_packs = place(packs, group_size, capacity, max_rows)
    indices, offsets = np.empty_like(packs), np.zeros(num_packs + 1, np.int64)
    binpack.collect(packs, order, offsets, indices)
    over_long = np.flatnonzero(values > capacity)
    fitting = total_length - int(values[over_long].sum())
    slots = (len(offsets) - 1) * capacity
    return PackPlan(
        indices=indices,
        offsets=offsets,
        capacity=capacity,
        method=method,
        over_long=over_long,
        total_length=total_length,
        lower_bound=-(-fitting // capacity) + len(over_long),
        efficiency=(fitting + len(over_long) * capacity) / slots if slots else None,
    )
