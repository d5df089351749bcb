"""Bring the sequences of one batch to one length.

Each output row is built once, so the cost is one copy of the padded batch. The inputs are never
changed, and no row of the output shares its list with them.

It does not build attention masks or labels, and it does not make tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from fast_axolotl.errors import UsageError

__all__ = ["create_padding_mask", "pad_sequences"]


def pad_sequences(
    sequences: Sequence[Sequence[int]],
    target_length: int | None = None,
    pad_value: int = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> list[list[int]]:
    """Pad every sequence to ``target_length``, or to the longest one where that is ``None``.

    The length is then rounded up to ``pad_to_multiple_of``; ``None`` and 0 leave it. A longer
    sequence keeps its first tokens, whichever the padding side.
    """
    if padding_side not in ("right", "left"):
        raise UsageError(f"padding_side must be 'right' or 'left', not {padding_side!r}")
    length = max(map(len, sequences), default=0) if target_length is None else target_length
    _require_length("target_length", length)
    length = _round_up(length, pad_to_multiple_of or 0)
    if padding_side == "right":
        return [[*row[:length], *_missing(row, length, pad_value)] for row in sequences]
    return [[*_missing(row, length, pad_value), *row[:length]] for row in sequences]


def create_padding_mask(current_length: int, target_length: int) -> list[int]:
    """The position ids of the padding, ``[0, 1, …]``: empty where nothing is missing."""
    _require_length("current_length", current_length)
    _require_length("target_length", target_length)
    return list(range(target_length - current_length))


def _missing(row: Sequence[int], length: int, pad_value: int) -> list[int]:
    return [pad_value] * (length - len(row))


def _round_up(length: int, multiple: int) -> int:
    _require_length("pad_to_multiple_of", multiple)
    return -(-length // multiple) * multiple if multiple else length


def _require_length(name: str, value: int) -> None:
    if value < 0:
        raise UsageError(f"{name} must not be negative, and it is {value}")
