"""Pack token sequences into rows of one fixed length.

Sequences are taken in order. A sequence that no longer fits into the open row closes it, the rest
of the closed row is padding, and the next row opens: nothing is reordered and no sequence is split
over two rows. One pass over the tokens, and one row open at a time.

It does not search for a tighter layout, and it does not mask attention between the sequences that
share a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fast_axolotl.errors import UsageError

__all__ = ["concatenate_and_pack", "pack_sequences"]

_NAMES = ("input_ids", "labels", "attention_mask")
_SEPARATORS = 2
"""Places that ``pack_sequences`` adds to each sequence: one EOS, one PAD."""

_Piece = tuple[Sequence[int], Sequence[int], Sequence[int]]
_Padding = tuple[int, int, int]


def pack_sequences(
    sequences: Iterable[Sequence[int]],
    max_length: int,
    pad_token_id: int,
    eos_token_id: int,
    label_pad_id: int = -100,
) -> dict[str, list[list[int]]]:
    """Pack sequences, each followed by one EOS (a label, attended) and one PAD (neither).

    Labels repeat the tokens. A sequence that leaves no room for its EOS and PAD is a
    ``UsageError``.
    """
    _require_room(max_length)
    pieces = _separated(sequences, max_length, pad_token_id, eos_token_id, label_pad_id)
    return _pack(pieces, max_length, (pad_token_id, label_pad_id, 0))


def concatenate_and_pack(
    input_ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    attention_masks: Sequence[Sequence[int]],
    max_length: int,
    pad_token_id: int,
    label_pad_id: int = -100,
) -> dict[str, list[list[int]]]:
    """Pack sequences that already carry their labels and masks, adding nothing between them.

    A sequence longer than ``max_length`` is cut to it; a row of padding alone precedes it at the
    start and after a full row. Columns that disagree on a length are a ``UsageError``.
    """
    _require_room(max_length)
    _require_equal_counts(input_ids, labels, attention_masks)
    pieces = _aligned(input_ids, labels, attention_masks)
    return _pack(pieces, max_length, (pad_token_id, label_pad_id, 0))


def _pack(
    pieces: Iterable[_Piece], max_length: int, padding: _Padding
) -> dict[str, list[list[int]]]:
    packed: dict[str, list[list[int]]] = {name: [] for name in _NAMES}
    row: list[list[int]] = [[], [], []]
    for piece in pieces:
        # A piece too long for any row closes the open one even where that is still empty. The
        # all-padding row is kept because the earlier package gives it, and row counts must agree;
        # for the same reason a full row is closed at once, and one too long is not cut before.
        if len(row[0]) + len(piece[0]) > max_length:
            row = _close(row, packed, max_length, padding)
        for column, values in zip(row, piece, strict=True):
            column.extend(values)
        if len(row[0]) == max_length:
            row = _close(row, packed, max_length, padding)
    if row[0]:
        _close(row, packed, max_length, padding)
    return packed


def _close(
    row: list[list[int]], packed: dict[str, list[list[int]]], max_length: int, padding: _Padding
) -> list[list[int]]:
    """Bring the row to its length, add it to the packed ones, and return the next, empty row."""
    missing = max_length - len(row[0])
    for name, column, pad in zip(_NAMES, row, padding, strict=True):
        column.extend([pad] * missing)
        packed[name].append(column[:max_length])
    return [[], [], []]


def _separated(
    sequences: Iterable[Sequence[int]], max_length: int, pad: int, eos: int, label_pad: int
) -> Iterator[_Piece]:
    for index, sequence in enumerate(sequences):
        needed = len(sequence) + _SEPARATORS
        if needed > max_length:
            raise UsageError(
                f"sequence {index} has {len(sequence)} tokens and needs {needed} places with its "
                f"EOS and PAD, but max_length is {max_length}: cut or split the sequence, or "
                f"raise max_length to at least {needed}"
            )
        mask = [1] * (len(sequence) + 1) + [0]
        yield [*sequence, eos, pad], [*sequence, eos, label_pad], mask


def _aligned(
    input_ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    attention_masks: Sequence[Sequence[int]],
) -> Iterator[_Piece]:
    for index, piece in enumerate(zip(input_ids, labels, attention_masks, strict=True)):
        for name, values in zip(("labels", "attention_masks"), piece[1:], strict=True):
            if len(values) != len(piece[0]):
                raise UsageError(
                    f"sequence {index} has {len(piece[0])} input_ids and {len(values)} {name}: "
                    "give every token one label and one mask value"
                )
        yield piece


def _require_equal_counts(
    input_ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    attention_masks: Sequence[Sequence[int]],
) -> None:
    for name, other in (("labels", labels), ("attention_masks", attention_masks)):
        if len(other) != len(input_ids):
            raise UsageError(
                f"input_ids has {len(input_ids)} sequences and {name} has {len(other)}, so index "
                f"{min(len(input_ids), len(other))} has no partner: pass lists of equal length"
            )


def _require_room(max_length: int) -> None:
    if max_length < 1:
        raise UsageError(f"max_length must be at least 1, not {max_length}")
