"""Lists in, lists out: packed rows built by Python's own list operations.

A row is extended by every sequence as a whole. The other columns of ``pack`` are copies: labels are
the row with the separators changed, the mask a row of ones with zeros written in. So a row takes a
few list operations for each sequence and none for each token. Nothing is shared between rows, or
with the input.

``PackedLists.starts`` says where sequences and padding begin; ``positions`` and ``boundaries``
follow from it alone. Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from fast_axolotl.packing.outputs import untracked

SEPARATORS = 2
"""Places that ``pack`` adds to each sequence: one EOS, one PAD."""

_Row = list[int]
_Piece = tuple[Sequence[int], Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class PackedLists:
    """Finished rows, column by column."""

    input_ids: list[_Row] = field(default_factory=list)
    labels: list[_Row] = field(default_factory=list)
    attention_mask: list[_Row] = field(default_factory=list)
    edges: list[tuple[_Row, int]] = field(default_factory=list)
    """For each row, where its sequences begin or end, and how many of its places are taken."""

    def add(self, ids: _Row, labels: _Row, mask: _Row, edges: _Row, used: int) -> None:
        """One more row."""
        untracked([ids, labels, mask])
        self.input_ids.append(ids)
        self.labels.append(labels)
        self.attention_mask.append(mask)
        self.edges.append((edges, used))

    def starts(self, width: int) -> list[_Row]:
        """For each row, where its sequences begin, and its padding where it has some."""
        return [sorted({0, *edges, min(used, width)} - {width}) for edges, used in self.edges]


def pack(
    sequences: Iterable[Sequence[int]], width: int, pad: int, eos: int, label_pad: int
) -> PackedLists:
    """Rows of sequences, each followed by EOS and PAD, for which each has room in a row."""
    packed = PackedLists()
    blank, blank_labels, ones, zeros = ([value] * width for value in (pad, label_pad, 1, 0))
    ends: _Row = []
    ids: _Row = []

    def close() -> None:
        used = len(ids)
        labels, mask = ids[:], ones[:used]
        for end in ends:
            labels[end - 1] = label_pad
            mask[end - 1] = 0
        for row, padding in ((ids, blank), (labels, blank_labels), (mask, zeros)):
            row += padding[used:]
        packed.add(ids, labels, mask, ends, used)

    for sequence in sequences:
        if len(ids) + len(sequence) + SEPARATORS > width:
            close()
            ids, ends = [], []
        ids += sequence
        ids += (eos, pad)
        ends.append(len(ids))
    if ids:
        close()
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
