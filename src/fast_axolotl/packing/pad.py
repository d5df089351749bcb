"""Pad the sequences of a batch to one length.

Lists become lists by one concatenation a row; everything else is one pass of a kernel over the
output, on every processor. So the cost is one copy of the padded batch. The inputs are never
changed, and no row of the output shares its memory with them. It does not make labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.packing.sequences import (
    OUTPUTS,
    Rows,
    check_options,
    deliver,
    flatten,
    integer,
    lengths_of,
    option,
    plain_rows,
    read,
    require_fit,
    untracked,
)


def pad_sequences(
    sequences: Iterable[Any],
    target_length: int | None = None,
    pad_value: int = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    *,
    output: str = "lists",
    too_long: str = "truncate",
    dtype: str = "int64",
    attention_mask: bool = False,
    num_threads: int = 0,
) -> Any:
    """Pad every sequence to ``target_length``, or to the longest one if that is ``None``.

    The length is then rounded up to a multiple of ``pad_to_multiple_of``, unless that is ``None``
    or 0. A longer sequence keeps its first tokens for either padding side, or raises with
    ``too_long="error"``.

    The rows are lists, or with ``output="numpy"`` or ``"torch"`` one array of ``dtype``, which does
    not concern lists. With ``attention_mask`` the result is the pair of the rows and their mask: 1
    for tokens, 0 for padding.
    """
    option("padding_side", padding_side, ("right", "left"))
    check_options(output, too_long, ("truncate", "error"), dtype, num_threads)
    dtype = "int64" if output == "lists" else dtype
    padding = integer("pad_value", pad_value, dtype=dtype)
    rows = read(sequences)
    if isinstance(rows, list) and output == "lists":
        rows = plain_rows(rows)
    lengths = lengths_of(rows)
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if target_length is None else integer("target_length", target_length, least=0)
    multiple = 0 if pad_to_multiple_of is None else pad_to_multiple_of
    step = integer("pad_to_multiple_of", multiple, least=0)
    if step:
        width = -(-width // step) * step
    if too_long == "error" and longest > width:
        index = int(np.argmax(lengths > width))
        raise UsageError(
            f"sequence {index} has {lengths[index]} tokens, but target_length is {width}; raise "
            'target_length, or pass too_long="truncate"'
        )
    is_left = padding_side == "left"
    if isinstance(rows, list) and output == "lists":
        padded = _pad_lists(rows, width, padding, is_left)
        if not attention_mask:
            return padded
        ones: Rows = [[1] * length for length in np.minimum(lengths, width).tolist()]
        return padded, _pad_lists(ones, width, 0, is_left)
    if isinstance(rows, list) and longest > width:
        rows = [row[:width] for row in rows]

    from fast_axolotl.kernels import fill

    tokens = flatten(rows, dtype)
    targets = np.arange(len(tokens) + 1, dtype=np.int64) * width
    if is_left:
        targets[:-1] += width - np.minimum(lengths, width)
    layout = fill.Layout(tokens.offsets, targets, width, width, False)
    columns = [np.empty(len(tokens) * width, dtype) for _ in range(1 + attention_mask)]
    fillers = [partial(fill.lay, tokens.values, tuple(layout), 0, padding, columns[0])]
    if attention_mask:
        fillers.append(partial(fill.mark, tuple(layout), columns[1]))
    try:
        fill.fill(fillers, layout, num_threads)
    except OverflowError:
        require_fit(tokens, dtype, "sequences", width)
        raise
    results = [deliver(column.reshape(len(tokens), width), output) for column in columns]
    return tuple(results) if attention_mask else results[0]


def create_padding_mask(current_length: int, target_length: int, *, output: str = "lists") -> Any:
    """The position ids of the padding, ``[0, 1, …]``; empty if no padding is needed."""
    option("output", output, OUTPUTS)
    current = integer("current_length", current_length, least=0)
    missing = max(0, integer("target_length", target_length, least=0) - current)
    if output == "lists":
        return list(range(missing))
    return deliver(np.arange(missing, dtype=np.int64), output)


def _pad_lists(rows: Rows, width: int, padding: int, is_left: bool) -> list[list[int]]:
    """Each row beside the filler for its length, which is made once for all rows of that length."""
    cut = (row if type(row) is list and len(row) <= width else list(row[:width]) for row in rows)
    blank = [padding] * width
    fillers = {length: blank[length:] for length in {width, *map(len, rows)}}
    if is_left:
        return untracked(fillers[len(row)] + row for row in cut)
    return untracked(row + fillers[len(row)] for row in cut)
