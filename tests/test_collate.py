"""Padding: one length for all, the caller's side and value, nothing lost but what is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import create_padding_mask, pad_sequences
from fast_axolotl.errors import UsageError

sequences_of_tokens = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=9), max_size=12)


def test_sequences_are_padded_to_the_longest() -> None:
    assert pad_sequences([[1, 2], [3], []]) == [[1, 2], [3, 0], [0, 0]]


def test_padding_goes_to_the_left_when_asked() -> None:
    assert pad_sequences([[1, 2], [3]], 3, 7, "left") == [[7, 1, 2], [7, 7, 3]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_longer_sequence_keeps_its_first_tokens(side: str) -> None:
    assert pad_sequences([[1, 2, 3]], 2, padding_side=side) == [[1, 2]]
    assert pad_sequences([[1]], 0, padding_side=side) == [[]]


@pytest.mark.parametrize(
    ("target_length", "multiple", "length"),
    [(None, 4, 4), (2, 4, 4), (5, 4, 8), (8, 4, 8), (5, 0, 5), (5, None, 5), (0, 4, 0)],
)
def test_the_length_is_rounded_up_to_the_multiple(
    target_length: int | None, multiple: int | None, length: int
) -> None:
    padded = pad_sequences([[1, 2, 3]], target_length, pad_to_multiple_of=multiple)
    assert padded == [[1, 2, 3, 0, 0, 0, 0, 0][:length]]


def test_padding_nothing_gives_nothing() -> None:
    assert pad_sequences([]) == []
    assert pad_sequences([], 5) == []
    assert pad_sequences([[]], pad_to_multiple_of=4) == [[]]


@pytest.mark.parametrize("sequences", [[], [[1]]])
def test_a_wrong_side_is_named(sequences: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="padding_side must be 'right' or 'left', not 'top'"):
        pad_sequences(sequences, padding_side="top")


def test_negative_lengths_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="target_length must not be negative, and it is -1"):
        pad_sequences([[1]], -1)
    with pytest.raises(UsageError, match="pad_to_multiple_of must not be negative"):
        pad_sequences([[1]], pad_to_multiple_of=-4)
    with pytest.raises(UsageError, match="current_length must not be negative"):
        create_padding_mask(-1, 3)
    with pytest.raises(UsageError, match="target_length must not be negative"):
        create_padding_mask(0, -3)


def test_the_output_shares_no_list_with_the_input() -> None:
    sequences = [[1, 2], [3, 4]]
    padded = pad_sequences(sequences)
    padded[0].append(9)
    assert sequences == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("current", "target", "mask"),
    [(3, 8, [0, 1, 2, 3, 4]), (3, 3, []), (5, 3, []), (0, 2, [0, 1]), (0, 0, [])],
)
def test_the_padding_mask_counts_the_missing_positions(
    current: int, target: int, mask: list[int]
) -> None:
    assert create_padding_mask(current, target) == mask


@given(sequences_of_tokens, st.sampled_from(["right", "left"]), st.integers(0, 8))
def test_removing_the_padding_gives_the_sequences_back(
    sequences: list[list[int]], side: str, multiple: int
) -> None:
    padded = pad_sequences(sequences, None, 0, side, multiple)
    longest = max(map(len, sequences), default=0)
    for sequence, row in zip(sequences, padded, strict=True):
        cut = len(row) - len(sequence)
        kept, filler = (row[: len(sequence)], row[len(sequence) :])
        if side == "left":
            kept, filler = row[cut:], row[:cut]
        assert (kept, filler) == (sequence, [0] * cut)
        assert longest <= len(row) < longest + max(multiple, 1)
        assert multiple == 0 or len(row) % multiple == 0
