"""Packing: the rows of the earlier package, no token lost, and errors that name the place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import concatenate_and_pack, pack_sequences
from fast_axolotl.errors import UsageError

PAD, EOS, LABEL_PAD = 0, 1, -100
EMPTY: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}

# Tokens start at 2, so that PAD and EOS can be told from them.
sequences_of_tokens = st.lists(st.lists(st.integers(2, 2**40), max_size=9), max_size=20)


def test_each_sequence_is_followed_by_eos_and_pad() -> None:
    assert pack_sequences([[5, 6], [7]], 7, PAD, EOS) == {
        "input_ids": [[5, 6, EOS, PAD, 7, EOS, PAD]],
        "labels": [[5, 6, EOS, LABEL_PAD, 7, EOS, LABEL_PAD]],
        "attention_mask": [[1, 1, 1, 0, 1, 1, 0]],
    }


def test_a_sequence_that_does_not_fit_opens_a_new_row() -> None:
    assert pack_sequences([[5, 6], [7], [8, 9, 10]], 6, PAD, EOS) == {
        "input_ids": [[5, 6, 1, 0, 0, 0], [7, 1, 0, 0, 0, 0], [8, 9, 10, 1, 0, 0]],
        "labels": [
            [5, 6, 1, -100, -100, -100],
            [7, 1, -100, -100, -100, -100],
            [8, 9, 10, 1, -100, -100],
        ],
        "attention_mask": [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    }


def test_the_ids_of_padding_are_the_callers() -> None:
    assert pack_sequences([[-1]], 4, -5, -9, -7) == {
        "input_ids": [[-1, -9, -5, -5]],
        "labels": [[-1, -9, -7, -7]],
        "attention_mask": [[1, 1, 0, 0]],
    }


def test_an_empty_sequence_still_gives_its_eos() -> None:
    assert pack_sequences([[], []], 4, PAD, EOS)["input_ids"] == [[EOS, PAD, EOS, PAD]]


def test_packing_nothing_gives_three_empty_columns() -> None:
    assert pack_sequences([], 8, PAD, EOS) == EMPTY
    assert concatenate_and_pack([], [], [], 8, PAD) == EMPTY
    assert concatenate_and_pack([[]], [[]], [[]], 8, PAD) == EMPTY


def test_a_sequence_without_room_for_eos_and_pad_is_named_with_the_cure() -> None:
    assert pack_sequences([[2, 3, 4, 5]], 6, PAD, EOS)["input_ids"] == [[2, 3, 4, 5, 1, 0]]
    with pytest.raises(UsageError, match=r"sequence 1 has 5 tokens.*at least 7"):
        pack_sequences([[2], [2, 3, 4, 5, 6]], 6, PAD, EOS)


@pytest.mark.parametrize("max_length", [0, -1])
def test_a_row_needs_at_least_one_place(max_length: int) -> None:
    with pytest.raises(UsageError, match=f"max_length must be at least 1, not {max_length}"):
        pack_sequences([], max_length, PAD, EOS)
    with pytest.raises(UsageError, match=f"max_length must be at least 1, not {max_length}"):
        concatenate_and_pack([], [], [], max_length, PAD)


def test_concatenating_adds_nothing_between_sequences() -> None:
    packed = concatenate_and_pack(
        [[5, 6], [7], [8, 9]], [[-100, 6], [7], [8, 9]], [[0, 1], [1], [1, 1]], 4, PAD
    )
    assert packed == {
        "input_ids": [[5, 6, 7, 0], [8, 9, 0, 0]],
        "labels": [[-100, 6, 7, -100], [8, 9, -100, -100]],
        "attention_mask": [[0, 1, 1, 0], [1, 1, 0, 0]],
    }


def test_concatenating_cuts_a_sequence_that_is_too_long() -> None:
    ids = [[5], [6, 7, 8, 9, 10], [11]]
    packed = concatenate_and_pack(ids, ids, [[1], [1] * 5, [1]], 4, PAD)
    assert packed["input_ids"] == [[5, 0, 0, 0], [6, 7, 8, 9], [11, 0, 0, 0]]
    assert packed["attention_mask"] == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("lengths", "used"),
    [
        ([5], [0, 4]),
        ([4, 5], [4, 0, 4]),
        ([2, 2, 5], [4, 0, 4]),
        ([3, 5], [3, 4]),
        ([5, 5], [0, 4, 4]),
        ([5, 0, 5], [0, 4, 0, 4]),
        ([2, 5, 4, 5, 1], [2, 4, 4, 0, 4, 1]),
    ],
)
def test_rows_of_padding_precede_sequences_too_long_as_in_the_earlier_package(
    lengths: list[int], used: list[int]
) -> None:
    ids = [[7] * length for length in lengths]
    packed = concatenate_and_pack(ids, ids, [[1] * length for length in lengths], 4, PAD)
    assert [sum(mask) for mask in packed["attention_mask"]] == used
    _assert_well_formed(packed, 4)


def test_columns_with_different_counts_are_refused_with_index_and_lengths() -> None:
    with pytest.raises(UsageError, match=r"input_ids has 2 .* labels has 1, so index 1 "):
        concatenate_and_pack([[5], [6]], [[5]], [[1], [1]], 4, PAD)
    with pytest.raises(UsageError, match=r"input_ids has 1 .* attention_masks has 2, so index 1 "):
        concatenate_and_pack([[5]], [[5]], [[1], [1]], 4, PAD)


def test_a_sequence_with_unequal_columns_is_refused_with_index_and_lengths() -> None:
    with pytest.raises(UsageError, match="sequence 1 has 2 input_ids and 1 labels"):
        concatenate_and_pack([[5], [6, 7]], [[5], [6]], [[1], [1, 1]], 4, PAD)
    with pytest.raises(UsageError, match="sequence 0 has 1 input_ids and 2 attention_masks"):
        concatenate_and_pack([[5]], [[5]], [[1, 1]], 4, PAD)


def test_the_inputs_are_left_unchanged() -> None:
    ids = [[5, 6], [7]]
    pack_sequences(ids, 8, PAD, EOS)
    concatenate_and_pack(ids, ids, [[1, 1], [1]], 8, PAD)
    assert ids == [[5, 6], [7]]


@given(sequences_of_tokens, st.integers(11, 40))
def test_packing_loses_duplicates_and_reorders_no_token(
    sequences: list[list[int]], max_length: int
) -> None:
    packed = pack_sequences(sequences, max_length, PAD, EOS)
    assert _attended(packed, "input_ids") == [t for s in sequences for t in [*s, EOS]]
    assert _attended(packed, "labels") == _attended(packed, "input_ids")
    _assert_well_formed(packed, max_length)


@given(sequences_of_tokens, st.integers(9, 40))
def test_concatenating_loses_duplicates_and_reorders_no_token(
    sequences: list[list[int]], max_length: int
) -> None:
    masks = [[1] * len(sequence) for sequence in sequences]
    packed = concatenate_and_pack(sequences, sequences, masks, max_length, PAD)
    assert _attended(packed, "input_ids") == [token for s in sequences for token in s]
    _assert_well_formed(packed, max_length)


@given(sequences_of_tokens, st.integers(9, 40))
def test_no_two_neighbouring_rows_could_have_shared_one(
    sequences: list[list[int]], max_length: int
) -> None:
    masks = [[1] * len(sequence) for sequence in sequences]
    packed = concatenate_and_pack(sequences, sequences, masks, max_length, PAD)
    used = [sum(mask) for mask in packed["attention_mask"]]
    assert all(a + b > max_length for a, b in pairwise(used))


def _attended(packed: dict[str, list[list[int]]], name: str) -> list[int]:
    rows = zip(packed[name], packed["attention_mask"], strict=True)
    return [v for row, mask in rows for v, seen in zip(row, mask, strict=True) if seen]


def _assert_well_formed(packed: dict[str, list[list[int]]], max_length: int) -> None:
    assert all(len(row) == max_length for rows in packed.values() for row in rows)
    for ids, labels, mask in zip(*packed.values(), strict=True):
        unseen = [(i, lab) for i, lab, m in zip(ids, labels, mask, strict=True) if not m]
        assert set(unseen) <= {(PAD, LABEL_PAD)}
