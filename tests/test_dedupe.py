"""Hashing equals hashlib, dedupe equals a dict, and a bad row is named."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import deduplicate_indices, parallel_hash_rows
from fast_axolotl.errors import UsageError

utf8_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


def test_the_hash_of_a_row_is_its_sha256_in_hex() -> None:
    assert parallel_hash_rows(["a", "é", b"a", ""]) == [
        "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
        "4a99557e4033c3539de2eb65472017cad5f9557f7a0625a09f1c3f6e2ba69c4c",
        "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ]


def test_the_first_of_equal_rows_is_kept() -> None:
    indices, hashes = deduplicate_indices(["a", "b", "a", "c", "b"])
    assert indices == [0, 1, 3]
    assert hashes == parallel_hash_rows(["a", "b", "c"])


def test_existing_hashes_are_hashes_and_not_rows() -> None:
    _, seen = deduplicate_indices(["a", "b"])
    assert deduplicate_indices(["b", "c", "a", "d"], existing_hashes=seen)[0] == [1, 3]
    assert deduplicate_indices(["b", "c"], existing_hashes=["b"])[0] == [0, 1]


def test_no_rows_give_no_hashes() -> None:
    assert parallel_hash_rows([]) == []
    assert deduplicate_indices([]) == ([], [])
    assert deduplicate_indices([], ["x"]) == ([], [])


def test_a_lone_surrogate_is_refused_with_its_index() -> None:
    with pytest.raises(UsageError, match=r"row 1 holds the lone surrogate '\\ud800' at char.* 2"):
        parallel_hash_rows(["a", "xy\ud800"])
    with pytest.raises(UsageError, match="row 0 holds"):
        deduplicate_indices(["\udfff"])


@pytest.mark.parametrize(("row", "kind"), [(3, "int"), (None, "NoneType"), (["a"], "list")])
def test_a_row_of_another_type_is_refused_with_index_and_type(row: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"row 1 is of type {kind}"):
        parallel_hash_rows(["a", row])


def test_one_string_is_not_taken_for_a_list_of_them() -> None:
    with pytest.raises(TypeError, match="rows is one str"):
        parallel_hash_rows("ab")
    with pytest.raises(TypeError, match="existing_hashes is one str"):
        deduplicate_indices(["a"], existing_hashes=parallel_hash_rows(["a"])[0])


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(UsageError, match=r"num_threads must be 0 .* not -1"):
        parallel_hash_rows(["a"], num_threads=-1)
    with pytest.raises(UsageError, match="num_threads"):
        deduplicate_indices([], num_threads=-2)


@given(st.lists(utf8_text | st.binary(max_size=4)), st.integers(0, 4))
def test_hashing_equals_hashlib(rows: list[str | bytes], num_threads: int) -> None:
    raw = [row.encode() if isinstance(row, str) else row for row in rows]
    expected = [hashlib.sha256(row).hexdigest() for row in raw]
    assert parallel_hash_rows(rows, num_threads) == expected


@given(st.lists(st.sampled_from("abcdefgh")), st.lists(st.sampled_from("abcd")))
def test_dedupe_equals_a_dict(rows: list[str], known: list[str]) -> None:
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        if row not in known:
            first.setdefault(row, index)
    indices, hashes = deduplicate_indices(rows, parallel_hash_rows(known))
    assert indices == list(first.values())
    assert hashes == parallel_hash_rows(list(first))
