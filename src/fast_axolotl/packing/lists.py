"""Lists in, lists out: packed rows built by Python's own list operations.

A row is extended by every sequence as a whole. The other columns of ``pack`` are copies: labels are
the row with the separators changed, the mask a row of ones with zeros written in. So a row takes a
few list operations for each sequence and none for each token. Nothing is shared between rows, or
with the input. Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fast_axolotl.packing.sequences import untrack

SEPARATORS = 2
"""Places that ``pack`` adds to each sequence: one EOS, one PAD."""

_Row = list[int]
_Piece = tuple[Sequence[int], Sequence[int], Sequence[int]]
_Columns = tuple[list[_Row], list[_Row], list[_Row]]
"""Rows of tokens, of labels and of masks."""


def pack(
    sequences: Iterable[Sequence[int]], width: int, pad: int, eos: int, label_pad: int
) -> _Columns:
    """Rows of sequences, each followed by EOS and PAD, for which each has room in a row."""
    columns: _Columns = [], [], []
    blank, blank_labels, ones, zeros = ([value] * width for value in (pad, label_pad, 1, 0))
    ends: _Row = []
    ids: _Row = []

    def close() -> None:
        used = len(ids)
        labels, mask = ids[:], ones[:used]
        for end in ends:
            labels[end - 1] = label_pad
            mask[end - 1] = 0
        rows = ((ids, blank), (labels, blank_labels), (mask, zeros))
        for column, (row, padding) in zip(columns, rows, strict=True):
            row += padding[used:]
            untrack(row)
            column.append(row)

    for sequence in sequences:
        if len(ids) + len(sequence) + SEPARATORS > width:
            close()
            ids, ends = [], []
        ids += sequence
        ids += (eos, pad)
        ends.append(len(ids))
    if ids:
        close()
    return columns


def concatenate(pieces: Iterable[_Piece], width: int, pad: int, label_pad: int) -> _Columns:
    """Rows of (tokens, labels, mask) with nothing between them; what is longer than a row is cut.

    A piece too long for any row closes the open one even where that is still empty, and leaves a
    row that is more than full, so that it is closed by whatever comes next, not at once as a full
    one is. The rows of padding alone that follow from this are kept because the earlier package
    gives them, and row counts must agree.
    """
    columns: _Columns = [], [], []
    blanks = [pad] * width, [label_pad] * width, [0] * width
    rows: tuple[_Row, _Row, _Row] = [], [], []
    used = 0

    def close() -> None:
        for column, row, blank in zip(columns, rows, blanks, strict=True):
            row += blank[len(row) :]
            untrack(row)
            column.append(row)

    for piece in pieces:
        length = len(piece[0])
        if used + length > width:
            close()
            rows, used = ([], [], []), 0
            if length > width:
                piece = piece[0][:width], piece[1][:width], piece[2][:width]
        for row, part in zip(rows, piece, strict=True):
            row += part
        used += length
        if used == width:
            close()
            rows, used = ([], [], []), 0
    if used:
        close()
    return columns
