"""Packing: the rows of the earlier package and of Axolotl, the same in lists and arrays.

Two oracles in plain Python say what the rows are, token by token; every form of input and output,
every way with sequences too long, and both extra columns are held against them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl import concatenate_and_pack, pack_sequences, pad_sequences
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
