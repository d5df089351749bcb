"""Sequences: every form of input is the same tokens, and what is no token is named by its place."""

from __future__ import annotations

from array import array
from collections import deque
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import concatenate_and_pack, pack_sequences, pad_sequences
from fast_axolotl.errors import UsageError
from fast_axolotl.packing.sequences import flatten, plain_rows, read
from support.golden import check_calls

pytestmark = pytest.mark.kernels

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
ROWS = [[3, 1], [], [4, 1, 5], [9]]


def tokens_of(given_as: Any) -> list[list[int]]:
    flat = flatten(read(given_as), "int64")
    assert flat.values.dtype in (np.int32, np.int64)
    assert flat.values.flags.c_contiguous
    assert flat.offsets.dtype == np.int64
    edges = zip(flat.offsets[:-1], flat.offsets[1:], strict=True)
    return [flat.values[start:stop].tolist() for start, stop in edges]


def both(given_as: Any) -> list[list[int]]:
    """The tokens, by way of lists and by way of arrays."""
    padded, mask = pad_sequences(given_as, 9, attention_mask=True)
    rows = [row[: sum(seen)] for row, seen in zip(padded, mask, strict=True)]
    assert rows == tokens_of(given_as)
    return rows


@pytest.mark.parametrize(
    "given_as",
    [
        ROWS,
        tuple(ROWS),
        [tuple(row) for row in ROWS],
        [ROWS[0], tuple(ROWS[1]), *ROWS[2:]],
        [np.array(row, np.int64) for row in ROWS],
        [np.array(row) for row in ROWS],  # The empty one is of floats.
        [ROWS[0], np.array([], np.int32), np.array(ROWS[2], np.uint8), deque(ROWS[3])],
        [array("q", row) for row in ROWS],
        np.array([np.array(row, np.int64) for row in ROWS] + [None], object)[:-1],
        pa.array(ROWS),
        pa.array(ROWS, pa.large_list(pa.uint16())),
        pa.array(ROWS, pa.list_view(pa.int64())),
        pa.array(ROWS, pa.large_list_view(pa.int32())),
        pa.chunked_array([ROWS[:1], [], ROWS[1:]], pa.list_(pa.int32())),
        pa.array([[7], *ROWS, [8]]).slice(1, 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_form_gives_the_same_tokens(given_as: Any) -> None:
    assert both(given_as) == ROWS


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_kind_of_integer_is_taken_with_its_largest_value(dtype: str) -> None:
    most = min(np.iinfo(dtype).max, 2**63 - 1)
    least = int(np.iinfo(dtype).min)
    expected = [[most, least], [1, 2]]
    matrix = np.array(expected, dtype)
    assert both(matrix) == expected
    assert both(matrix.astype(matrix.dtype.newbyteorder())) == expected
    assert both(np.asfortranarray(matrix)) == expected
    assert both(list(matrix)) == expected
    kind = getattr(pa, dtype)()
    for arrow in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, 2)):
        assert both(pa.array(expected, arrow)) == expected
        assert both(pa.array([[0, 0], *expected], arrow)[1:]) == expected
        assert both(pa.chunked_array([expected[:1], expected[1:]], arrow)) == expected


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint8", "bool"])
def test_torch_tensors_are_taken(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rows = [torch.tensor(row, dtype=getattr(torch, dtype)) for row in ([1, 0], [1], [])]
    assert both(rows) == [[1, 0], [1], []]
    assert both([rows[0], [7]]) == [[1, 0], [7]]
    assert both(torch.stack([rows[0], rows[0]])) == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [np.array([2**63 - 1], np.uint64), np.array([-1], np.int8), np.array([2**40])],
            [[2**63 - 1], [-1], [2**40]],
        ),
        ([[True, 7], [False]], [[1, 7], [0]]),
        (np.array([[True, False]]), [[1, 0]]),
        (pa.array([[True, False], [True]]), [[1, 0], [1]]),
        ([list(np.array([100] * 3, np.int8)), [np.int64(2**62)] * 3], [[100] * 3, [2**62] * 3]),
        ([[300, np.uint8(1)], [np.int8(1)]], [[300, 1], [1]]),
        ([[1, np.int32(2**31 - 1), np.int32(5)]], [[1, 2**31 - 1, 5]]),
        ([[np.int64(3), 5]], [[3, 5]]),
        ([pa.array([1, 2])], [[1, 2]]),
    ],
)
def test_integers_of_any_kind_become_plain_ones_without_loss(
    rows: Any, expected: list[list[int]]
) -> None:
    assert both(rows) == expected
    padded, packed = pad_sequences(rows), pack_sequences(rows, 8, 0, 2)["input_ids"]
    assert {type(token) for row in [*padded, *packed] for token in row} == {int}


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**70])
def test_a_token_that_the_dtype_cannot_hold_is_named_and_never_cut(bad: int) -> None:
    rows = [[5], [6, bad]]
    forms: list[Any] = [rows]
    if abs(bad) < 2**40:
        forms.append([np.array(row) for row in rows])
    message = rf"\[1\]\[1\] is {bad}, which does not fit in int32"
    asked: dict[str, Any] = {"output": "numpy", "dtype": "int32"}
    fine = [[1], [1, 1]]
    for form in forms:
        for width, too_long in ((9, "error"), (2, "split")):
            with pytest.raises(UsageError, match="sequences" + message):
                pack_sequences(form, width, 0, 1, too_long=too_long, **asked)
        with pytest.raises(UsageError, match="sequences" + message):
            pad_sequences(form, **asked)
        with pytest.raises(UsageError, match="labels" + message):
            concatenate_and_pack(fine, form, fine, 9, 0, **asked)
    if abs(bad) >= 2**63:
        with pytest.raises(UsageError, match=rf"\[1\]\[1\] is {bad}, which does not fit in int64"):
            pad_sequences(rows, output="numpy")


def test_what_is_no_sequence_and_no_integer_is_named_by_its_place() -> None:
    check_calls("sequences", Fraction=Fraction)


any_token = st.integers(-(2**70), 2**70) | st.booleans() | st.floats() | st.none() | st.text()


@given(st.lists(st.lists(any_token, max_size=4), max_size=6))
def test_the_quick_checks_and_a_slow_one_agree(rows: list[list[Any]]) -> None:
    is_fine = all(isinstance(token, int) for row in rows for token in row)
    fits = is_fine and all(-(2**63) <= token < 2**63 for row in rows for token in row)
    for check, expected in ((plain_rows, is_fine), (lambda r: flatten(r, "int64"), fits)):
        try:
            check(rows)
        except UsageError:
            assert not expected
        else:
            assert expected
