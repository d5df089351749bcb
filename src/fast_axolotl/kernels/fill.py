"""Write sequences into rows of one width, with masks and positions.

Sequences are flat: sequence ``i`` is ``values[offsets[i]:offsets[i + 1]]``, of which the first
``limit`` are used. Rows are flat too, end to end: ``targets[i]`` is the place in them where
sequence ``i`` starts, and ``targets[-1]`` the end of the last row. A sequence owns the places from
its target to the next one: its tokens, one EOS where ``closing`` asks for it, then padding. The
first one owns the padding before it as well. So the filling kernels take any run of sequences,
share no place, and run on several processors.

Cost: one pass over the lengths for ``place`` (5 ns a sequence), then one write of every place of a
column. The loops run over views, not over computed indices, since only those become SIMD code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from numba import types

from fast_axolotl.kernels.jit import INT32, INT64, MUTABLE_INT32, MUTABLE_INT64, inlined, kernel
from fast_axolotl.kernels.threads import slices, spread
from fast_axolotl.system import usable_cores

SEPARATORS = 2
"""Places that a closed sequence takes beside its tokens: one EOS, one of padding."""

_BLOCK_PLACES = 32 * 1024
"""Places for which all columns are filled before the next block: tokens are read from cache."""

_SMALL_PLACES = 1024 * 1024
"""Below this many places, two milliseconds of work, a second thread costs more than it saves."""

_SLICES_PER_THREAD = 8
"""Several, so that a thread whose sequences are long leaves some of its share to the others."""

Layout: TypeAlias = tuple[Any, Any, int, int, bool]
"""Where sequences lie in rows: what all filling kernels share."""

_LAYOUT = types.Tuple(
    (
        INT64,  # where each sequence starts among the values, and the end of the last
        INT64,  # where each sequence starts among the places, and the end of the last row
        types.int64,  # tokens of a sequence that are used, at most
        types.int64,  # places of a row
        types.boolean,  # whether EOS and one place of padding follow each sequence
    )
)

_RUN = (types.int64, types.int64)
"""``start, stop`` of the sequences to fill."""


def fill(
    columns: Sequence[Callable[[int, int], bool | None]], layout: Layout, num_threads: int
) -> None:
    """Calls every column's ``(start, stop)`` filler over all sequences, block by block.

    ``num_threads`` of 0 means every processor. A filler that returns ``False`` had a token that
    its output cannot hold: ``OverflowError``.
    """
    num_sequences, num_places = len(layout[0]) - 1, int(layout[1][-1])
    threads = 1 if num_places < _SMALL_PLACES else num_threads or usable_cores()
    block = max(1, _BLOCK_PLACES * num_sequences // max(1, num_places))

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, block):
            for column in columns:
                if column(first, min(first + block, stop)) is False:
                    raise OverflowError

    spread(work, slices(num_sequences, threads * _SLICES_PER_THREAD), threads)


@kernel(types.int64(INT64, types.int64, types.int64, types.boolean, MUTABLE_INT64))
def place(offsets: Any, limit: int, width: int, closing: bool, targets: Any) -> int:
    """Fill ``targets``: in order, into the open row where it fits, else into the next; the end.

    Where they are ``closing``, one that has no room for its separators in any row goes without: it
    is a piece of a longer one. Where not, one that is longer than a row closes even an empty row,
    and leaves a row more than full, which whatever comes next closes: the earlier package gives
    these rows of padding, and row counts must agree.
    """
    row = used = 0
    for index in range(len(offsets) - 1):
        need = offsets[index + 1] - offsets[index]
        if closing:
            need = min(need, limit)
            if need + SEPARATORS <= width:
                need += SEPARATORS
        if used + need > width:
            row += width
            used = 0
        targets[index] = row + used
        used += need
        if used == width:
            row += width
            used = 0
    end = row + width if used else row
    targets[len(offsets) - 1] = end
    return end


@inlined
def _extent(layout: Layout, index: int) -> tuple[int, bool]:
    """How many tokens a sequence has, and whether its separators follow in the same row."""
    offsets, targets, limit, width, closing = layout
    length = min(offsets[index + 1] - offsets[index], limit)
    if not closing:
        return length, False
    start = targets[index]
    return length, start - start % width + width - start - length >= SEPARATORS


@kernel(
    *(
        types.boolean(values, _LAYOUT, types.int64, types.int64, out, *_RUN)
        for values in (INT32, INT64)
        for out in (MUTABLE_INT32, MUTABLE_INT64)
    )
)
def lay(values: Any, layout: Layout, eos: int, pad: int, out: Any, start: int, stop: int) -> bool:
    """Copy the tokens of a run, with EOS and padding; whether every token fits into ``out``."""
    offsets, targets, fits = layout[0], layout[1], True
    for index in range(start, stop):
        if index == 0:
            out[: targets[0]] = pad
        length, closed = _extent(layout, index)
        tokens = values[offsets[index] : offsets[index] + length]
        places = out[targets[index] : targets[index + 1]]
        for i in range(len(tokens)):
            places[i] = tokens[i]
            fits &= places[i] == tokens[i]
        if closed:
            places[length] = eos
            length += 1
        places[length:] = pad
    return fits


@kernel(*(types.void(_LAYOUT, out, *_RUN) for out in (MUTABLE_INT32, MUTABLE_INT64)))
def mark(layout: Layout, out: Any, start: int, stop: int) -> None:
    """Write 1 for each token and EOS of a run, and 0 for its padding."""
    targets = layout[1]
    for index in range(start, stop):
        if index == 0:
            out[: targets[0]] = 0
        length, closed = _extent(layout, index)
        length += closed
        places = out[targets[index] : targets[index + 1]]
        places[:length] = 1
        places[length:] = 0


@inlined
def _count_padding(out: Any, start: int, stop: int, width: int) -> None:
    """Number the places of padding from 0, and from 0 again in each row."""
    while start < stop:
        end = min(stop, start - start % width + width)
        places = out[start:end]
        for i in range(len(places)):
            places[i] = i
        start = end


@kernel(*(types.void(_LAYOUT, out, *_RUN) for out in (MUTABLE_INT32, MUTABLE_INT64)))
def positions(layout: Layout, out: Any, start: int, stop: int) -> None:
    """Number the places of each sequence of a run from 0, separators included; padding as well."""
    targets, width = layout[1], layout[3]
    for index in range(start, stop):
        if index == 0:
            _count_padding(out, 0, targets[0], width)
        length, closed = _extent(layout, index)
        length += SEPARATORS * closed
        places = out[targets[index] : targets[index] + length]
        for i in range(len(places)):
            places[i] = i
        _count_padding(out, targets[index] + length, targets[index + 1], width)
