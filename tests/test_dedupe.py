"""Keeping the first of equal rows equals a dict, for lists and Arrow columns, few rows and many."""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import deduplicate_indices, parallel_hash_rows
from fast_axolotl.errors import UsageError

MANY = 300
"""More rows than are left to plain Python."""


def first_of_each(rows: list[str], known: list[str]) -> tuple[list[int], list[str]]:
    """The oracle."""
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        if row not in known:
            first.setdefault(row, index)
    return list(first.values()), [hashlib.sha256(row.encode()).hexdigest() for row in first]


def test_the_first_of_equal_rows_is_kept() -> None:
    indices, hashes = deduplicate_indices(["a", "b", "a", "c", "b"])
    assert indices == [0, 1, 3]
    assert hashes == parallel_hash_rows(["a", "b", "c"])


def test_text_and_its_utf8_are_one_row() -> None:
    assert deduplicate_indices(["é", "é".encode(), b"e"] * MANY)[0] == [0, 2]


def test_existing_hashes_are_hashes_and_not_rows() -> None:
    _, seen = deduplicate_indices(["a", "b"])
    assert deduplicate_indices(["b", "c", "a", "d"], existing_hashes=seen)[0] == [1, 3]
    assert deduplicate_indices(["b", "c"], existing_hashes=["b"])[0] == [0, 1]


@pytest.mark.parametrize("count", [1, MANY])
def test_an_existing_hash_written_otherwise_matches_nothing(count: int) -> None:
    rows = [f"{index}" for index in range(count)]
    hashes = parallel_hash_rows(rows)
    others = [
        hashes[0].upper(),
        f" {hashes[0]}",
        hashes[0][:-1] + "g",
        hashes[0][:-1] + "é",
        hashes[0][:-1] + " ",
        hashes[0].encode(),
        None,
        7,
    ]
    assert deduplicate_indices(rows, existing_hashes=others) == (list(range(count)), hashes)
    assert deduplicate_indices(rows, existing_hashes=iter([*others, *hashes])) == ([], [])


def test_no_rows_give_no_hashes() -> None:
    assert deduplicate_indices([]) == ([], [])
    assert deduplicate_indices([], ["x"]) == ([], [])
    assert deduplicate_indices(pa.chunked_array([], pa.string())) == ([], [])
    assert deduplicate_indices([], parallel_hash_rows([f"{index}" for index in range(MANY)])) == (
        [],
        [],
    )


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="row 0 holds"):
        deduplicate_indices(["\udfff"])
    with pytest.raises(TypeError, match="row 1 is of type int"):
        deduplicate_indices(["a", 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="rows is one str"):
        deduplicate_indices("ab")
    with pytest.raises(TypeError, match="existing_hashes is one str"):
        deduplicate_indices(["a"], existing_hashes=parallel_hash_rows(["a"])[0])
    with pytest.raises(TypeError, match="unhashable"):
        deduplicate_indices(["a"], existing_hashes=[["a"]])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="num_threads"):
        deduplicate_indices([], num_threads=-2)


@pytest.mark.parametrize("count", [1, MANY])
def test_a_null_in_a_column_is_refused_with_its_index(count: int) -> None:
    column = pa.array(["a"] * count + [None], pa.string())
    for rows in (column, pa.chunked_array([column]), column.dictionary_encode()):
        with pytest.raises(TypeError, match=f"row {count} is null"):
            deduplicate_indices(rows)


@given(
    st.lists(st.sampled_from("abcdefgh")),
    st.lists(st.sampled_from("abcd")),
    st.sampled_from([1, MANY]),
)
def test_dedupe_equals_a_dict(rows: list[str], known: list[str], times: int) -> None:
    many = rows * times
    expected = first_of_each(many, known)
    known_hashes = parallel_hash_rows(known)
    column = pa.array(many, pa.string())
    given_rows: list[Any] = [many, column, pa.chunked_array([column[:3], column[3:]])]
    for some in given_rows:
        assert deduplicate_indices(some, known_hashes) == expected


def test_many_different_rows_are_all_kept() -> None:
    rows = [f"{index % 7000}" for index in range(20_000)]
    known = [f"{index}" for index in range(100, 1000)]
    assert deduplicate_indices(rows, parallel_hash_rows(known)) == first_of_each(rows, known)
