"""Pack token sequences into rows of a fixed length.

Sequences are taken in order. A sequence that no longer fits into the open row closes it, the rest
of the closed row is padding, and the next row opens: nothing is reordered (``plan_packs`` does).
Lists that become lists are packed by list operations, a few for each sequence and none for each
token. Everything else goes through kernels on every processor: one pass over the lengths gives the
place of each sequence, eight bytes each, then every column is filled, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.packing.sequences import (
    Array,
    Flat,
    check_options,
    deliver,
    flatten,
    integer,
    lengths_of,
    plain_rows,
    read,
    require_fit,
    untrack,
)

_NAMES = ("input_ids", "labels", "attention_mask")
_SEPARATORS = 2
"""Places that ``pack_sequences`` adds to each sequence: one EOS, one PAD."""


def pack_sequences(
    sequences: Iterable[Any],
    max_length: int,
    pad_token_id: int,
    eos_token_id: int,
    label_pad_id: int = -100,
    *,
    output: str = "lists",
    too_long: str = "error",
    dtype: str = "int64",
    position_ids: bool = False,
    cu_seqlens: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Pack sequences, each followed by one EOS (a label, attended) and one PAD (neither).

    Labels equal the tokens. The rows equal those of Axolotl's ``encode_streaming``, including the
    padded last one. ``too_long`` decides about a sequence that leaves no room for its EOS and PAD:
    ``"error"`` raises; ``"truncate"`` keeps its first ``max_length - 2`` tokens; ``"split"`` starts
    a new row and cuts it every ``max_length`` tokens, with EOS and PAD only after the last piece
    (in the next row if there is no room for both). Other sequences may follow the last piece.

    The result has ``input_ids``, ``labels`` and ``attention_mask``: lists of rows, or with
    ``output="numpy"`` or ``"torch"`` arrays of ``dtype`` and shape (rows, max_length). Lists ignore
    ``dtype``. Optional columns:

    - ``position_ids``, like the others: counted from 0 for each sequence, its EOS and PAD included,
      for each piece of a split one, and for the padding at the end of a row.
    - ``cu_seqlens``, flat and of 32 bits, as flash-attention takes it: where those counts start
      in the concatenated rows, then the end. Padding is a separate segment.
    """
    return _pack(
        {"sequences": sequences},
        max_length,
        (pad_token_id, label_pad_id, eos_token_id),
        _SEPARATORS,
        output=output,
        too_long=too_long,
        dtype=dtype,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        num_threads=num_threads,
    )


def concatenate_and_pack(
    input_ids: Iterable[Any],
    labels: Iterable[Any],
    attention_masks: Iterable[Any],
    max_length: int,
    pad_token_id: int,
    label_pad_id: int = -100,
    *,
    output: str = "lists",
    too_long: str = "truncate",
    dtype: str = "int64",
    position_ids: bool = False,
    cu_seqlens: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Pack sequences that already have labels and masks, without separators between them.

    Columns that disagree on a length are a ``UsageError``. A sequence longer than ``max_length`` is
    cut to it (``too_long="truncate"``), and a row of padding alone precedes it at the start and
    after a full row, as in the earlier package; or it is an error (``"error"``); or it is continued
    in the following rows (``"split"``), where its last piece may be followed by others.

    The result is that of ``pack_sequences``, ``position_ids`` and ``cu_seqlens`` included. An empty
    sequence takes no place and has no boundary.
    """
    return _pack(
        {"input_ids": input_ids, "labels": labels, "attention_masks": attention_masks},
        max_length,
        (pad_token_id, label_pad_id, 0),
        0,
        output=output,
        too_long=too_long,
        dtype=dtype,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        num_threads=num_threads,
    )


def _pack(
    passed: Mapping[str, Iterable[Any]],
    max_length: int,
    ids: tuple[int, int, int],
    separators: int,
    *,
    output: str,
    too_long: str,
    dtype: str,
    position_ids: bool,
    cu_seqlens: bool,
    num_threads: int,
) -> dict[str, Any]:
    """Both functions: ``ids`` are padding, padding of labels and EOS, and ``separators`` the places
    that each sequence needs beside its tokens."""
    width = integer("max_length", max_length, least=1)
    check_options(output, too_long, ("error", "truncate", "split"), dtype, num_threads)
    # The type of lists is not chosen.
    dtype = "int64" if output == "lists" else dtype
    names = ("pad_token_id", "label_pad_id", "eos_token_id")
    pad, label_pad, eos = (
        integer(name, value, dtype=dtype) for name, value in zip(names, ids, strict=True)
    )
    rows = {name: read(column, name) for name, column in passed.items()}
    first, *others = rows
    lengths = lengths_of(rows[first])
    for other in others:
        theirs = lengths_of(rows[other])
        if len(theirs) != len(lengths):
            raise UsageError(
                f"{first} has {len(lengths)} sequences and {other} has {len(theirs)}; pass columns "
                "of equal length"
            )
        if (lengths != theirs).any():
            index = int(np.argmax(lengths != theirs))
            raise UsageError(
                f"sequence {index} has {lengths[index]} {first} and {theirs[index]} {other}; "
                "pass one label and one mask value per token"
            )
    room = width - separators
    if len(lengths) and lengths.max() > room and (too_long == "error" or room < 0):
        index = int(np.argmax(lengths > room))
        needed = int(lengths[index]) + separators
        with_separators = f", {needed} with EOS and PAD" if separators else ""
        raise UsageError(
            f"sequence {index} has {lengths[index]} tokens{with_separators}, but max_length is "
            f"{width}; raise max_length to at least {needed}, or pass "
            'too_long="truncate" or too_long="split", which need a max_length of at least '
            f"{separators or 1}"
        )
    # The most tokens of one piece.
    limit = width if too_long == "split" else max(0, room)
    plain = {name: column for name, column in rows.items() if isinstance(column, list)}
    has_more = too_long == "split" or position_ids or cu_seqlens
    if output == "lists" and len(plain) == len(rows) and not has_more:
        checked = [plain_rows(column, name) for name, column in plain.items()]
        parts: Iterable[Sequence[Sequence[int]]] = zip(*checked, strict=True)
        if separators:
            parts = ((row if len(row) <= limit else row[:limit],) for row in checked[0])
        tail = (eos, pad)[:separators]
        packed = _pack_lists(parts, tail, [[n] * width for n in (pad, label_pad, 0)], width)
        return dict(zip(_NAMES, packed, strict=True))
    from fast_axolotl.kernels import fill

    flat = {name: flatten(column, dtype, name) for name, column in rows.items()}
    pieces = [*flat.values()]
    if too_long == "split":
        pieces = [_split(column, width, separators) for column in pieces]
    offsets, targets = pieces[0].offsets, np.empty(len(pieces[0].offsets), np.int64)
    num_places = fill.place(offsets, limit, width, separators > 0, targets)
    if cu_seqlens and num_places > np.iinfo(np.int32).max:
        raise UsageError(
            f"cu_seqlens would reach {num_places}, beyond 32 bits; pack less at a time"
        )
    layout = fill.Layout(offsets, targets, limit, width, separators > 0)
    filled: dict[str, Array] = {}
    fillers: list[Callable[[int, int], Any]] = []

    def add(name: str, kernel: Callable[..., Any], *arguments: Any) -> None:
        out = np.empty(num_places, dtype)
        filled[name] = out.reshape(-1, width)
        fillers.append(partial(kernel, *arguments, out))

    # Without labels and masks of their own, these follow from the tokens.
    columns = pieces if len(pieces) > 1 else pieces * 2
    for name, tokens, padding in zip(_NAMES, columns, (pad, label_pad, 0), strict=False):
        own = tuple(layout._replace(offsets=tokens.offsets))
        add(name, fill.lay, tokens.values, own, eos, padding)
    if len(pieces) == 1:
        add("attention_mask", fill.mark, tuple(layout))
    if position_ids or cu_seqlens:
        add("position_ids", fill.positions, tuple(layout))
    try:
        fill.fill(fillers, layout, num_threads)
    except OverflowError:
        for name, tokens in flat.items():
            require_fit(tokens, dtype, name, len(tokens.values) if too_long == "split" else limit)
        raise
    if cu_seqlens:
        starts = np.flatnonzero(filled["position_ids"] == 0)
        filled["cu_seqlens"] = np.append(starts, num_places).astype(np.int32)
    if not position_ids:
        filled.pop("position_ids", None)
    return {name: deliver(column, output) for name, column in filled.items()}


def _split(tokens: Flat, width: int, separators: int) -> Flat:
    """The sequences, those that are too long in pieces of a row, which only adds offsets.

    The last piece is what is left. Where that has no room for its separators, an empty piece comes
    after it, which has.
    """
    lengths = lengths_of(tokens)
    is_long = lengths + separators > width
    pieces = np.where(is_long, -(-lengths // width), 1)
    rest = lengths - (pieces - 1) * width
    pieces += is_long & (rest + separators > width)
    first = np.cumsum(pieces) - pieces
    nth = np.arange(pieces.sum()) - np.repeat(first, pieces)
    cuts = np.repeat(tokens.offsets[:-1], pieces) + nth * width
    cuts = np.minimum(cuts, np.repeat(tokens.offsets[1:], pieces))
    return Flat(tokens.values, np.append(cuts, tokens.offsets[-1]))


def _pack_lists(
    pieces: Iterable[Sequence[Sequence[int]]],
    tail: Sequence[int],
    blanks: Sequence[list[int]],
    width: int,
) -> list[list[list[int]]]:
    """Rows of tokens, labels and mask, which ``blanks`` fill up.

    Pieces with a ``tail`` have tokens alone. A row is extended by each as a whole; labels and mask
    are copies of it and of a row of ones, with the last of each tail changed.

    A piece too long for any row closes the open one even where that is still empty, and leaves a
    row that is more than full, so that it is closed by whatever comes next, not at once as a full
    one is. The rows of padding alone that follow from this are kept because the earlier package
    gives them, and row counts must agree.
    """
    columns: list[list[list[int]]] = [[] for _ in blanks]
    rows: list[list[int]] = [[] for _ in blanks]
    ends: list[int] = []
    used = 0

    def close() -> None:
        if tail:
            rows[1:] = rows[0][:], [1] * used
            for end in ends:
                rows[1][end], rows[2][end] = blanks[1][0], 0
            ends.clear()
        for row, blank, column in zip(rows, blanks, columns, strict=True):
            row += blank[len(row) :]
            untrack(row)
            column.append(row)
        rows[:] = [[] for _ in blanks]

    for piece in pieces:
        need = len(piece[0]) + len(tail)
        if used + need > width:
            close()
            used = 0
            if need > width:
                piece = [part[:width] for part in piece]
        used += need
        if tail:
            rows[0] += piece[0]
            rows[0] += tail
            ends.append(used - 1)
        else:
            for row, part in zip(rows, piece, strict=True):
                row += part
        if used == width:
            close()
            used = 0
    if used:
        close()
    return columns
