"""Lists in, lists out: packed rows built by Python's own list operations.

A row starts as a copy of a row of padding, and every sequence is written over it as one slice. The
other columns of ``pack`` are copies too: labels are the row with the separators changed, the mask a
row of ones with zeros written in. So a row takes a few list operations for each sequence, none for
each token, and no list is grown. Nothing is shared between rows, or with the input.

``PackedLists.starts`` says where sequences and padding begin; ``positions`` and ``boundaries``
follow from it alone. Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from fast_axolotl.packing.outputs import untracked, untracker

SEPARATORS = 2
"""Places that ``pack`` adds to each sequence: one EOS, one PAD."""

_Row = list[int]
_Piece = tuple[Sequence[int], Sequence[int], Sequence[int]]


class PackedLists:
    """Finished rows, column by column."""

    def __init__(self) -> None:
        self.input_ids: list[_Row] = []
        self.labels: list[_Row] = []
        self.attention_mask: list[_Row] = []
        self.edges: list[tuple[_Row, int]] = []
        """For each row, where its sequences begin or end, and how many of its places are taken."""
        self._untrack = untracker()

    def add(self, ids: _Row, labels: _Row, mask: _Row, edges: _Row, used: int) -> None:
        """One more row."""
        for row in (ids, labels, mask):
            self._untrack(row)
        self.input_ids.append(ids)
        self.labels.append(labels)
        self.attention_mask.append(mask)
        self.edges.append((edges, used))

    def starts(self, width: int) -> list[_Row]:
        """For each row, where its sequences begin, and its padding where it has some."""
        return [sorted({0, *edges, min(used, width)} - {width}) for edges, used in self.edges]


def pack(
    pieces: Iterable[Sequence[int]], width: int, pad: int, eos: int, label_pad: int
) -> PackedLists:
    """Rows of sequences, each followed by EOS and PAD.

    A piece without room for them in any row is a part of a longer sequence (see ``split``): it has
    a row for itself, and they come after its last part.
    """
    packed = PackedLists()
    blank, blank_labels, ones, zeros = ([value] * width for value in (pad, label_pad, 1, 0))

    def close(ids: _Row, ends: _Row, used: int) -> None:
        labels, mask = ids[:], ones[:]
        for end in ends:
            labels[end - 1] = label_pad
            mask[end - 1] = 0
        labels[used:] = blank_labels[used:]
        mask[used:] = zeros[used:]
        packed.add(ids, labels, mask, ends, used)

    ids, ends, used = blank[:], list[int](), 0
    for piece in pieces:
        stop = used + len(piece)
        if stop + SEPARATORS > width:
            if used:
                close(ids, ends, used)
                ids, ends, used = blank[:], [], 0
                stop = len(piece)
            if stop + SEPARATORS > width:
                ids[:stop] = piece
                used = stop
                continue
        ids[used:stop] = piece
        ids[stop] = eos
        used = stop + SEPARATORS
        ends.append(used)
    if used:
        close(ids, ends, used)
    return packed


def concatenate(pieces: Iterable[_Piece], width: int, pad: int, label_pad: int) -> PackedLists:
    """Rows of (tokens, labels, mask) with nothing between them; what is longer than a row is cut.

    A piece too long for any row closes the open one even where that is still empty, and leaves a
    row that is more than full, so that it is closed by whatever comes next, not at once as a full
    one is. The rows of padding alone that follow from this are kept because the earlier package
    gives them, and row counts must agree.
    """
    packed = PackedLists()
    blanks = [pad] * width, [label_pad] * width, [0] * width
    (ids, labels, mask), starts, used = map(list, blanks), list[int](), 0
    for piece in pieces:
        length = len(piece[0])
        if used + length > width:
            packed.add(ids, labels, mask, starts, used)
            (ids, labels, mask), starts, used = map(list, blanks), [], 0
            if length > width:
                piece = piece[0][:width], piece[1][:width], piece[2][:width]
        if not length:
            continue
        starts.append(used)
        stop = min(used + length, width)
        ids[used:stop], labels[used:stop], mask[used:stop] = piece
        used += length
        if used == width:
            packed.add(ids, labels, mask, starts, used)
            (ids, labels, mask), starts, used = map(list, blanks), [], 0
    if used:
        packed.add(ids, labels, mask, starts, used)
    return packed


def split(
    rows: Iterable[Sequence[int]], width: int, separators: int = 0
) -> Iterator[Sequence[int]]:
    """Sequences as they are, those without room in a row in pieces of ``width``.

    The last piece is what is left. Where that has no room for its ``separators``, an empty piece
    comes after it, which has.
    """
    for row in rows:
        if len(row) + separators <= width:
            yield row
            continue
        for start in range(0, len(row), width):
            yield row[start : start + width]
        if (len(row) - 1) % width + 1 + separators > width:
            yield row[:0]


def positions(starts: Iterable[_Row], width: int) -> list[_Row]:
    """For each row, the distance of every place from the start before it."""
    counts = list(range(width))
    return untracked(
        list(chain.from_iterable(counts[: b - a] for a, b in pairwise([*row, width])))
        for row in starts
    )


def boundaries(starts: Sequence[_Row], width: int) -> _Row:
    """All starts, as places in the rows end to end, and the end."""
    edges = [index * width + start for index, row in enumerate(starts) for start in row]
    return [*edges, len(starts) * width]
