"""Arrays in, arrays out: packed rows filled by kernels, on every processor.

First a plan: one pass over the lengths gives the place where each sequence starts. Then every
column is filled from it, a block of sequences at a time. The columns are the only large
allocation; the plan takes eight bytes a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.sequences import Array, Flat

if TYPE_CHECKING:
    from fast_axolotl.kernels.fill import Layout

__all__ = ["Column", "fill_rows", "plan_rows", "split"]


class Column(NamedTuple):
    """What one column of the rows is made of."""

    tokens: Flat
    padding: int
    eos: int = 0
    """After each sequence, where the rows are closing."""


def split(tokens: Flat, width: int, separators: int = 0) -> Flat:
    """The same values with more offsets: sequences without room in a row in pieces of ``width``.

    As ``lists.split`` cuts them: the last piece is what is left, and an empty one follows where
    that has no room for its ``separators``.
    """
    starts, lengths = tokens.offsets[:-1], np.diff(tokens.offsets)
    is_long = lengths + separators > width
    if not is_long.any():
        return tokens
    pieces = np.where(is_long, -(-lengths // width), 1)
    pieces += is_long & (lengths - (pieces - 1) * width + separators > width)
    first = np.cumsum(pieces) - pieces
    nth = np.arange(pieces.sum()) - np.repeat(first, pieces)
    cuts = np.repeat(starts, pieces) + nth * width
    cuts = np.minimum(cuts, np.repeat(tokens.offsets[1:], pieces))
    return Flat(tokens.values, np.append(cuts, tokens.offsets[-1]))


def plan_rows(offsets: Array, width: int, limit: int, *, closing: bool) -> Layout:
    """Rows of ``width`` places for these sequences, each cut to ``limit`` tokens."""
    from fast_axolotl.kernels import fill

    targets = np.empty(len(offsets), np.int64)
    fill.place(offsets, limit, width, closing, targets)
    return fill.Layout(offsets, targets, limit, width, closing)


def fill_rows(
    layout: Layout,
    columns: Mapping[str, Column],
    dtype: str,
    num_threads: int,
    *,
    attention_mask: bool,
    position_ids: bool,
    cu_seqlens: bool,
) -> dict[str, Array]:
    """The columns by their names, then ``attention_mask``, ``position_ids`` and ``cu_seqlens``.

    ``OverflowError`` where ``dtype`` cannot hold a token.
    """
    from fast_axolotl.kernels import fill

    num_places = int(layout.targets[-1])
    boundaries = {"cu_seqlens": _boundaries(layout, num_places)} if cu_seqlens else {}
    result: dict[str, Array] = {}
    fillers: list[Callable[[int, int], Any]] = []

    def add(name: str, kernel: Callable[..., Any], *arguments: Any) -> None:
        out = np.empty(num_places, dtype)
        result[name] = out.reshape(-1, layout.width)
        fillers.append(partial(kernel, *arguments, out))

    for name, (tokens, padding, eos) in columns.items():
        own = layout._replace(offsets=tokens.offsets)
        add(name, fill.lay, tokens.values, *own, eos, padding)
    if attention_mask:
        add("attention_mask", fill.mark, *layout)
    if position_ids:
        add("position_ids", fill.positions, *layout)
    fill.fill(fillers, layout, num_threads)
    return result | boundaries


def _boundaries(layout: Layout, num_places: int) -> Array:
    from fast_axolotl.kernels import fill

    most = np.iinfo(np.int32).max
    if num_places > most:
        raise UsageError(
            f"cu_seqlens would count {num_places} places, and its 32 bits end at {most}: "
            "pack fewer sequences at a time"
        )
    out = np.empty(len(layout.targets) + num_places // layout.width, np.int32)
    found: Array = out[: fill.boundaries(*layout, out)].copy()
    return found
