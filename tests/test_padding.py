"""Padding: one length for all, the caller's side and value, nothing lost but what is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import create_padding_mask, pad_sequences
from support.golden import check_calls
from support.sequences import OUTPUTS, as_lists, flat, oracle_pad

pytestmark = pytest.mark.kernels

SIDES = ["right", "left"]


def test_the_length_is_rounded_up_to_the_multiple() -> None:
    for target, multiple, length in (
        *((None, 4, 4), (2, 4, 4), (5, 4, 8), (8, 4, 8), (5, 0, 5), (5, None, 5), (0, 4, 0)),
    ):
        padded = pad_sequences([[1, 2, 3]], target, pad_to_multiple_of=multiple)
        assert padded == [[1, 2, 3, 0, 0, 0, 0, 0][:length]]


def test_the_output_shares_no_list_with_the_input_nor_rows_with_each_other() -> None:
    sequences = [[1], [2]]
    padded, mask = pad_sequences(sequences, attention_mask=True)
    padded[0][0] = mask[0][0] = 9
    assert (sequences, padded, mask) == ([[1], [2]], [[9], [2]], [[9], [1]])


def test_the_padding_mask_counts_the_missing_positions() -> None:
    for current, target, mask in ((3, 6, [0, 1, 2]), (3, 3, []), (5, 3, []), (0, 2, [0, 1])):
        assert create_padding_mask(current, target) == mask


@pytest.mark.parametrize("output", OUTPUTS)
@given(
    sequences=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), max_size=12),
    width=st.integers(0, 12),
    side=st.sampled_from(SIDES),
    dtype=st.sampled_from(["int32", "int64"]),
)
def test_rows_and_masks_are_those_of_the_oracle_pad(
    output: str, sequences: list[list[int]], width: int, side: str, dtype: str
) -> None:
    options: dict[str, Any] = {"padding_side": side, "output": output, "dtype": dtype}
    expected = oracle_pad(sequences, width, -7, side)
    tuples = tuple(map(tuple, sequences))
    for given_as in (sequences, tuples, flat(sequences), flat(sequences, "int32")):
        padded, mask = pad_sequences(given_as, width, -7, attention_mask=True, **options)
        assert (as_lists(padded), as_lists(mask)) == expected
        assert as_lists(pad_sequences(given_as, width, -7, **options)) == expected[0]
        if output != "lists":
            assert tuple(padded.shape) == tuple(mask.shape) == (len(sequences), width)
            assert str(padded.dtype).endswith(dtype)


def test_a_sequence_is_too_long_only_past_the_length_and_wrong_calls_are_named() -> None:
    for rows in ([[1], [1, 2, 3]], flat([[1], [1, 2, 3]])):
        assert pad_sequences(rows, 3, too_long="error") == [[1, 0, 0], [1, 2, 3]]
    check_calls("padding", flat=flat)
