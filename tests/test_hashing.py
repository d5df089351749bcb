"""Hashing equals hashlib, keeping the first of equal rows equals a dict; a bad row is named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import deduplicate_indices, parallel_hash_rows, unique_rows
from fast_axolotl.dedupe import hashing
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.kernels import sha256
from support.children import python_output
from support.golden import check_calls

pytestmark = pytest.mark.kernels

DIGEST = pa.binary(32)
MANY = hashing._FEW_ROWS
"""Rows from which on the kernel does the work."""
LONG = 16384
"""Rows past this many bytes go to hashlib on every processor."""
EDGES = [0, 1, 54, 55, 56, 57, 63, 64, 65, 118, 119, 120, 121, 127, 128, 129, 183, 184, 191, 192]
"""Lengths at which the padding or the number of blocks changes."""

utf8_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
any_row = utf8_text | st.binary(max_size=200) | st.integers(0, 3000).map(lambda n: b"x" * n)


def raw(row: str | bytes) -> bytes:
    return row.encode() if isinstance(row, str) else row


def expected(rows: Any) -> list[str]:
    return [hashlib.sha256(raw(row)).hexdigest() for row in rows]


def expected_column(values: list[Any]) -> list[bytes | None]:
    return [None if row is None else hashlib.sha256(raw(row)).digest() for row in values]


def random_rows(lengths: list[int], seed: int = 0) -> list[bytes]:
    generator = np.random.default_rng(seed)
    return [generator.bytes(length) for length in lengths]


def texts(count: int) -> list[str]:
    return [f"row {index} " + "é" * (index % 70) for index in range(count)]


def check(rows: list[Any], num_threads: int = 0) -> None:
    """As a list, and as a column where they are all text or all bytes."""
    assert parallel_hash_rows(rows, num_threads) == expected(rows)
    if len({type(row) for row in rows}) == 1:
        hashed = parallel_hash_rows(pa.array(rows), num_threads)
        assert hashed.to_pylist() == expected_column(rows)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred rows are many pieces and tasks."""
    monkeypatch.setattr(hashing, "_TASK_BYTES", 4096)


def test_every_length_is_hashed_right_also_as_the_last_row_and_beside_very_long_ones() -> None:
    lengths = [0, 3, 56, 1000, 2048, 2049, LONG, LONG + 1, 70_000]
    check(random_rows(np.random.default_rng(0).choice(lengths, 600).tolist()))
    rows = random_rows(list(range(301)))
    check(rows)
    check(rows[::-1])
    for length in EDGES:
        check(random_rows([1] * MANY + [length]))


@pytest.mark.parametrize("num_threads", [0, 1, 7])
@pytest.mark.usefixtures("small_pieces")
def test_threads_and_pieces_change_nothing(num_threads: int) -> None:
    rows = random_rows([*EDGES * 20, LONG + 5, 0, 0, 7])
    check(rows, num_threads)
    column = pa.array(rows)
    chunked = pa.chunked_array([column[:5], column[5:6], column[6:]])
    assert parallel_hash_rows(chunked, num_threads).to_pylist() == expected_column(rows)


def test_no_rows_give_no_hashes() -> None:
    known = parallel_hash_rows(texts(MANY))
    assert parallel_hash_rows([]) == parallel_hash_rows(iter(())) == []
    for rows in ([], pa.chunked_array([], pa.string())):
        assert deduplicate_indices(rows) == deduplicate_indices(rows, known) == ([], [])


@given(st.lists(any_row, min_size=1, max_size=30), st.integers(0, 4))
def test_hashing_equals_hashlib_with_the_kernel_and_without(
    rows: list[str | bytes], num_threads: int
) -> None:
    for some in (rows, rows * (MANY // len(rows) + 1)):
        assert parallel_hash_rows(some, num_threads) == expected(some)


# Arrow columns


TYPES = [
    pa.string(),
    pa.binary(),
    pa.large_string(),
    pa.large_binary(),
    pa.string_view(),
    pa.binary_view(),
    pa.binary(3),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.uint32(), pa.large_binary()),
]


def columns(kind: pa.DataType, count: int) -> Iterator[tuple[pa.Array, list[Any]]]:
    """A column of a type whole, cut at both ends, without nulls, of nothing else, and of none."""
    values = [None if index % 7 == 3 else f"é{index % 10}" for index in range(count)]
    for some in (values, [value or "abc" for value in values], [None] * count, []):
        column = pa.array(some, pa.string())
        column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
        column = column.cast(kind)
        yield column, some
        yield column[5:-3], some[5:-3]


@pytest.mark.parametrize("count", [40, MANY + 20])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_column_gives_a_column_of_32_bytes_in_the_same_chunks(
    kind: pa.DataType, count: int
) -> None:
    for column, values in columns(kind, count):
        hashed = parallel_hash_rows(column)
        assert isinstance(hashed, pa.FixedSizeBinaryArray)
        assert hashed.type == DIGEST
        hashed.validate(full=True)
        assert hashed.to_pylist() == expected_column(values)
        chunks = [column[:7], column[7:7], column[7:30], column[30:]]
        hashed = parallel_hash_rows(pa.chunked_array(chunks))
        assert [len(chunk) for chunk in hashed.chunks] == [len(chunk) for chunk in chunks]
        assert (hashed.type, hashed.to_pylist()) == (DIGEST, expected_column(values))


def test_chunks_may_have_dictionaries_of_their_own() -> None:
    first = pa.DictionaryArray.from_arrays([0, 1, None, 0], ["a", "b"])
    second = pa.DictionaryArray.from_arrays([1, 0, 1], ["c", None])
    hashed = parallel_hash_rows(pa.chunked_array([first, first[1:], second]))
    rows = ["a", "b", None, "a", "b", None, "a", None, "c", None]
    assert hashed.to_pylist() == expected_column(rows)


@pytest.mark.parametrize("offsets", [[0, 9, 4], [0, -5, 4]])
def test_offsets_outside_the_data_are_refused(offsets: list[int]) -> None:
    numbers = np.array(offsets + offsets[-1:] * MANY, np.int32)
    buffers = [None, pa.py_buffer(numbers), pa.py_buffer(b"abcdefgh")]
    column = pa.Array.from_buffers(pa.binary(), len(numbers) - 1, buffers)
    for call in (parallel_hash_rows, lambda rows: unique_rows(pa.table({"x": rows}))):
        with pytest.raises(DataError, match="unsorted offsets"):
            call(column)


# What is refused


@pytest.mark.parametrize("count", [1, 3 * MANY])
@pytest.mark.parametrize("row", ["xy\ud800", "xy\ud800" + "z" * LONG, 3, None, {}, ["a"] * LONG])
def test_a_row_that_is_no_text_is_refused_with_its_index(
    row: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_BATCH_ROWS", MANY)
    kind, message = TypeError, f"row {count} has the type {type(row).__name__}"
    if isinstance(row, str):
        kind, message = UsageError, rf"row {count} has the lone surrogate '\\ud800' at char.* 2"
    for first in ("a", b"a"):
        rows: list[Any] = [first] * count + [row] + ["b", None] * count
        for given_rows in (rows, iter(rows)):
            with pytest.raises(kind, match=message):
                parallel_hash_rows(given_rows)


def test_bad_arguments_are_named() -> None:
    check_calls("hashing", many=MANY)


# The first of equal rows


def first_of_each(rows: list[str], known: list[str]) -> tuple[list[int], list[str]]:
    """The oracle."""
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        if row not in known:
            first.setdefault(row, index)
    return list(first.values()), expected(first)


@pytest.mark.parametrize("count", [1, MANY])
def test_an_existing_hash_is_a_hash_as_it_is_written_and_no_row(count: int) -> None:
    rows = texts(count)
    hashes = expected(rows)
    first = hashes[0]
    others = [first.upper(), f" {first}", *(first[:-1] + end for end in "gé "), first.encode()]
    others += [None, 7, rows[0]]
    assert deduplicate_indices(rows, existing_hashes=others) == (list(range(count)), hashes)
    assert deduplicate_indices(rows, existing_hashes=iter([*others, *hashes])) == ([], [])


@given(
    st.lists(st.sampled_from("abcdefgh")),
    st.lists(st.sampled_from("abcd")),
    st.sampled_from([1, 2 * MANY]),
)
def test_dedupe_equals_a_dict(rows: list[str], known: list[str], times: int) -> None:
    many = rows * times
    column = pa.array(many, pa.string())
    for some in (many, column, pa.chunked_array([column[:3], column[3:]])):
        assert deduplicate_indices(some, expected(known)) == first_of_each(many, known)


# The kernel


def test_the_lanes_fit_the_processor() -> None:
    for names, settings in (
        ("avx512f avx2 sha", (16, 16384)),
        ("avx2 sha", (8, 2048)),
        ("avx2", (8, 16384)),
        ("neon sha2", (4, 2048)),
        ("", (4, 16384)),
    ):
        assert sha256.lane_settings(dict.fromkeys(names.split(), True)) == settings


BOUNDS_CHECKED = """
import hashlib, sys
import numpy as np
import pyarrow as pa
from fast_axolotl import deduplicate_indices, parallel_hash_rows
from fast_axolotl.kernels import sha256
sha256.LANES = int(sys.argv[1])
sha256.LONGEST_BYTES = 16384 if sha256.LANES == 16 else 2048
lengths = [*range(301), 5000, 20000, *range(140)]
rows = [np.random.default_rng(0).bytes(length) for length in lengths]
want = [hashlib.sha256(row).hexdigest() for row in rows]
assert parallel_hash_rows(rows) == want
assert [digest.hex() for digest in parallel_hash_rows(pa.array(rows)[1:]).to_pylist()] == want[1:]
assert deduplicate_indices(rows + rows)[1] == list(dict.fromkeys(want))
"""


@pytest.mark.skipif("NUMBA_BOUNDSCHECK" in os.environ, reason="it checks by itself")
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_access_is_in_bounds_with_any_number_of_lanes(lanes: int, tmp_path: Path) -> None:
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    python_output("-c", BOUNDS_CHECKED, str(lanes), **checks)
