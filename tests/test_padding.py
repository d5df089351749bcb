"""Padding: one length for all, the caller's side and value, nothing lost but what is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import create_padding_mask, pad_sequences
from fast_axolotl.errors import UsageError
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
    for name, lengths in (("current_length", (-1, 3)), ("target_length", (0, -3))):
        with pytest.raises(UsageError, match=f"{name} must be 0 or more"):
            create_padding_mask(*lengths)


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


@pytest.mark.parametrize("form", [list, flat])
def test_a_longer_sequence_is_an_error_when_asked(form: Any) -> None:
    rows = form([[1], [1, 2, 3]])
    with pytest.raises(UsageError, match="sequence 1 has 3 tokens, but target_length is 2"):
        pad_sequences(rows, 2, too_long="error")
    assert pad_sequences(rows, 3, too_long="error") == [[1, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "list"}, "output must be 'lists' or 'numpy' or 'torch', not 'list'"),
        ({"too_long": "split"}, "too_long must be 'truncate' or 'error', not 'split'"),
        ({"dtype": "int16"}, "dtype must be 'int64' or 'int32', not 'int16'"),
        ({"num_threads": -2}, "num_threads must be 0"),
        ({"pad_value": 0.0}, r"pad_value must be an integer, not 0.0 \(float\)"),
        (
            {"pad_value": 2**31, "dtype": "int32", "output": "numpy"},
            f"pad_value is {2**31}, which does not fit in int32",
        ),
        ({"padding_side": "top"}, "padding_side must be 'right' or 'left', not 'top'"),
        ({"dtype": np.dtype("int32"), "output": "numpy"}, "dtype must be"),
        ({"pad_to_multiple_of": ""}, "pad_to_multiple_of must be an integer"),
        ({"pad_to_multiple_of": 0.0}, "pad_to_multiple_of must be an integer"),
        ({"pad_to_multiple_of": []}, "pad_to_multiple_of must be an integer"),
        ({"target_length": 2.5}, "target_length must be an integer, not 2.5"),
        ({"target_length": -1}, "target_length must be 0 or more, not -1"),
        ({"pad_to_multiple_of": -4}, "pad_to_multiple_of must be 0 or more, not -4"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    for sequences in ([], [[1]]):
        with pytest.raises(UsageError, match=message):
            pad_sequences(sequences, **options)
