"""Packing and padding: rows of the earlier package and of Axolotl, the same in lists and arrays.

Two oracles in plain Python say what the rows are, token by token; every form of input and output,
every way with sequences too long, and both extra columns are held against them.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl import concatenate_and_pack, create_padding_mask, pack_sequences, pad_sequences
from fast_axolotl.errors import UsageError
from fast_axolotl.packing.sequences import flatten, plain_rows, read
from support.children import python_output
from support.golden import check_calls
from support.sequences import OUTPUTS, as_lists, flat, oracle_pad

pytestmark = pytest.mark.kernels

PAD, EOS, LABEL_PAD = 0, 1, -100
EXTRA: dict[str, Any] = {"position_ids": True, "cu_seqlens": True}
EMPTY: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}


# Tokens start at 2, so that PAD and EOS can be told from them.
def token_lists(most: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(2, most), max_size=30), max_size=20)


def test_each_sequence_is_followed_by_eos_and_pad_and_one_that_does_not_fit_opens_a_row() -> None:
    assert pack_sequences([[5, 6], [7], [8]], 7, PAD, EOS, **EXTRA) == {
        "input_ids": [[5, 6, EOS, PAD, 7, EOS, PAD], [8, EOS, PAD, PAD, PAD, PAD, PAD]],
        "labels": [[5, 6, EOS, -100, 7, EOS, -100], [8, EOS, -100, -100, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]],
        "cu_seqlens": [0, 4, 7, 10, 14],
    }


def test_rows_of_padding_precede_sequences_too_long_as_in_the_earlier_package() -> None:
    for lengths, used in (
        ([5], [0, 4]),
        ([4, 5], [4, 0, 4]),
        ([3, 5], [3, 4]),
        ([5, 0, 5], [0, 4, 0, 4]),
        ([2, 5, 4, 5, 1], [2, 4, 4, 0, 4, 1]),
    ):
        ids = [[7] * length for length in lengths]
        packed = concatenate_and_pack(ids, ids, [[1] * length for length in lengths], 4, PAD)
        assert [sum(mask) for mask in packed["attention_mask"]] == used


def oracle_pack(sequences: list[list[int]], width: int, too_long: str) -> dict[str, Any]:
    """Rows of (token, label, mask, position), made one sequence at a time."""
    rows: list[list[tuple[int, int, int, int]]] = [[]]
    for sequence in sequences:
        pieces = [sequence]
        if len(sequence) + 2 > width:
            assert too_long != "error"
            pieces = [sequence[: width - 2]]
            if too_long == "split":
                pieces = [sequence[at : at + width] for at in range(0, len(sequence), width)]
                pieces += [[]] if len(pieces[-1]) + 2 > width else []
        for piece in pieces:
            places = [(token, token, 1) for token in piece]
            if len(piece) + 2 <= width:
                places += [(EOS, EOS, 1), (PAD, LABEL_PAD, 0)]
            if len(rows[-1]) + len(places) > width:
                rows.append([])
            rows[-1] += [(*place, position) for position, place in enumerate(places)]
    return _oracle_columns([row for row in rows if row], width)


def oracle_concatenate(
    columns: tuple[list[list[int]], list[list[int]], list[list[int]]], width: int, too_long: str
) -> dict[str, Any]:
    """The loop of the earlier package, with every row kept longer than it will be."""
    rows: list[list[tuple[int, int, int, int]]] = []
    row: list[tuple[int, int, int, int]] = []
    for sequence in zip(*columns, strict=True):
        places = list(zip(*sequence, strict=True))
        step = width if too_long == "split" else max(1, len(places))
        for at in range(0, max(1, len(places)), step):
            piece = [(*place, n) for n, place in enumerate(places[at : at + step])]
            if len(row) + len(piece) > width:
                rows.append(row[:width])
                row = []
            row += piece
            if len(row) == width:
                rows.append(row)
                row = []
    return _oracle_columns([*rows, row[:width]] if row else rows, width)


def _oracle_columns(rows: list[list[tuple[int, int, int, int]]], width: int) -> dict[str, Any]:
    padded = [row + [(PAD, LABEL_PAD, 0, n) for n in range(width - len(row))] for row in rows]
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    columns: dict[str, Any] = {
        name: [[place[n] for place in row] for row in padded] for n, name in enumerate(names)
    }
    flat = [place[3] for row in padded for place in row]
    starts = [place for place, position in enumerate(flat) if position == 0]
    return {**columns, "cu_seqlens": [*starts, len(flat)]}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("too_long", ["truncate", "split"])
@settings(max_examples=60)
@given(
    sequences=token_lists(2**31 - 1),
    width=st.integers(2, 14),
    dtype=st.sampled_from(["int32", "int64"]),
)
def test_packed_rows_are_those_of_the_oracle(
    output: str, too_long: str, sequences: list[list[int]], width: int, dtype: str
) -> None:
    expected = oracle_pack(sequences, width, too_long)
    options: dict[str, Any] = {"output": output, "too_long": too_long, "dtype": dtype}
    for form in (sequences, flat(sequences), flat(sequences, "int32")):
        arrays = pack_sequences(form, width, PAD, EOS, **options | EXTRA)
        packed = as_lists(arrays)
        assert packed == expected
        if output != "lists":
            assert arrays.pop("cu_seqlens").shape == (len(expected["cu_seqlens"]),)
            shape = (len(expected["labels"]), width)
            assert {tuple(column.shape) for column in arrays.values()} == {shape}
            assert all(str(column.dtype).endswith(dtype) for column in arrays.values())
        assert list(packed) == list(expected)
        plain = as_lists(pack_sequences(form, width, PAD, EOS, **options))
        assert plain == {name: packed[name] for name in EMPTY}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("too_long", ["truncate", "split"])
@settings(max_examples=60)
@given(sequences=token_lists(2**31 - 1), width=st.integers(1, 14), data=st.data())
def test_concatenated_rows_are_those_of_the_oracle(
    output: str, too_long: str, sequences: list[list[int]], width: int, data: st.DataObject
) -> None:
    labels = [[data.draw(st.sampled_from([-100, token])) for token in row] for row in sequences]
    masks = [[token % 2 for token in row] for row in sequences]
    expected = oracle_concatenate((sequences, labels, masks), width, too_long)
    options: dict[str, Any] = {"output": output, "too_long": too_long}
    for columns in (
        (sequences, labels, masks),
        (flat(sequences, "int32"), labels, flat(masks, "int8")),
    ):
        packed = as_lists(concatenate_and_pack(*columns, width, PAD, **options | EXTRA))
        assert packed == expected
        assert list(packed) == list(expected)
        plain = as_lists(concatenate_and_pack(*columns, width, PAD, **options))
        assert plain == {name: packed[name] for name in EMPTY}


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_many_sequences_on_several_threads_give_the_same_rows(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fast_axolotl.kernels.fill._SMALL_PLACES", 0)
    chance = random.Random(0)
    rows = [
        [chance.randrange(2, 30_000) for _ in range(chance.randrange(120))] for _ in range(6000)
    ]
    expected = pack_sequences(rows, 128, PAD, EOS, **EXTRA)
    assert expected == oracle_pack(rows, 128, "error")
    options: dict[str, Any] = {"output": "numpy", "num_threads": num_threads}
    packed = pack_sequences(flat(rows), 128, PAD, EOS, **options | EXTRA)
    assert as_lists(packed) == expected
    assert packed["cu_seqlens"].dtype == np.int32
    for side in ("left", "right"):
        options |= {"padding_side": side, "attention_mask": True}
        padded, mask = pad_sequences(flat(rows), 64, **options)
        assert (padded.tolist(), mask.tolist()) == oracle_pad(rows, 64, 0, side)


def test_wrong_calls_and_sequences_too_long_are_named() -> None:
    check_calls("packing", flat=flat)


def test_lists_that_become_lists_load_nothing_beside_numpy() -> None:
    loaded = python_output(
        "-c",
        "import sys; from fast_axolotl import pack_sequences, concatenate_and_pack, pad_sequences\n"
        "pack_sequences([[5]], 8, 0, 1)\n"
        "concatenate_and_pack([[5]], [[5]], [[1]], 8, 0)\n"
        "pad_sequences([[5], [6, 7]], attention_mask=True)\n"
        "print([name for name in ('numba', 'pyarrow', 'torch') if name in sys.modules])",
    )
    assert loaded == "[]\n"


# Padding: one length for all, the caller's side and value, nothing lost but what is cut.


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


# Every form of input is the same tokens, and what is no token is named by its place.


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
