"""``unique_rows`` keeps what ``str(row)`` tells apart, for every Arrow type and layout."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl import SeenRows, unique_rows
from fast_axolotl.dedupe import row_bytes
from fast_axolotl.errors import UsageError
from support.arrays import ARRAYS
from support.golden import check_calls

pytestmark = pytest.mark.kernels


def oracle(table: pa.Table) -> list[int]:
    """What Axolotl keeps: the first row of each ``str``."""
    found: dict[str, int] = {}
    for index, row in enumerate(table.to_pylist()):
        found.setdefault(str(row), index)
    return sorted(found.values())


def check(table: pa.Table) -> None:
    assert unique_rows(table).tolist() == oracle(table)


NAN = float("nan")
OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0123))[0]

COLUMNS: dict[str, pa.Array] = {
    "bytes views": pa.array([b"\xff", b"", b"\xff", None] * 2, pa.binary_view()),
    "fixed bytes": pa.array([b"abc", b"abd", None, b"abc"] * 2, pa.binary(3)),
    "float64": pa.array([0.0, -0.0, NAN, OTHER_NAN, -NAN, math.inf, None, 0.0]),
    "float32": pa.array([0.0, -0.0, NAN, 1.5, NAN, math.inf, None, 0.0], pa.float32()),
    "float16": pa.array(np.array([0, -0.0, NAN, 1, NAN, 2, 2, 0], np.float16)),
    "times": pa.array([0, 1, 0, None], pa.timestamp("us", "UTC")),
    "durations": pa.array([0, 1, 0, None], pa.duration("s")),
    "run ends": pc.run_end_encode(pa.array([1, 1, 2, 2, 1, 1])),
    "lists of floats": pa.array([[0.0], [-0.0], [NAN], [OTHER_NAN], [], None, [0.0], [NAN, 1]]),
    "lists of text": pa.array([["a", "b"], ["ab"], ["", "ab"], ["ab", ""], ["a", "b"], [None], []]),
    "views of lists": pa.array([[1, 2], [1], None, [], [1, 2], []], pa.list_view(pa.int32())),
    "empty fixed lists": pa.array([[], None, []], pa.list_(pa.int64(), 0)),
    "messages": pa.array(
        [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
            [None],
            [{"role": "userhi", "content": ""}],
        ]
    ),
    "lists behind a null": pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()),
        pa.array([1, None, 1, 2, 3]),
        mask=pa.array([True, True, False]),
    ),
    "lists of lists of nulls": pa.array([[[None]]] * 9, pa.list_(pa.list_(pa.null()))).slice(3),
    "structs behind a null": pa.array(
        [None, {"d": None}, {"d": [None, None]}, None],
        pa.struct([("d", pa.list_(pa.dictionary(pa.int8(), pa.string()), 2))]),
    ),
    "json": pa.array(["[1]", "[2]", None, "[1]"], pa.json_()),
    "unions": pa.UnionArray.from_dense(
        pa.array([0, 1, 0, 1], pa.int8()),
        pa.array([0, 0, 1, 1], pa.int32()),
        [pa.array([1, 1]), pa.array(["1", "1"])],
    ),
}
"""What no property below makes."""


def check_column(column: pa.Array) -> None:
    """Whole, in slices and chunks, and in later tables."""
    check(pa.table({"x": column.slice(1, max(0, len(column) - 2))}))
    chunks = [column.slice(1), column, column.slice(2, 1), column.slice(0, 0)]
    check(pa.table({"x": pa.chunked_array(chunks)}))
    check(pa.table({"x": pa.chunked_array([], column.type)}))
    table, known = pa.table({"x": column}), SeenRows()
    assert unique_rows(table, seen=known).tolist() == unique_rows(table).tolist() == oracle(table)
    assert unique_rows(table, seen=known).tolist() == []
    assert len(known) == len(oracle(table))


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_are_equal_where_python_prints_them_alike(name: str) -> None:
    check_column(COLUMNS[name])


@settings(max_examples=200)
@given(ARRAYS)
def test_rows_of_any_type_are_equal_where_python_prints_them_alike(column: pa.Array) -> None:
    check_column(column)


def test_layouts_of_the_same_values_are_alike_across_tables_and_other_types_are_refused() -> None:
    known = SeenRows()
    plain = pa.array(["a", "b", None, "a"])
    unique_rows(pa.table({"x": plain}), seen=known)
    casts = (plain.cast(kind) for kind in (pa.large_string(), "string_view"))
    for other in (plain.dictionary_encode(), *casts):
        assert unique_rows(pa.table({"x": other}), seen=known).tolist() == []
    with pytest.raises(UsageError, match="x: large_string, and this one has x: double"):
        unique_rows(pa.table({"x": [1.0]}), seen=known)


def test_columns_do_not_run_into_one_another_and_chosen_ones_alone_decide() -> None:
    check(pa.table({"x": ["ab", "a", "", "abc"], "y": ["c", "bc", "abc", ""]}))
    check(pa.table({"x": [None, "", None], "y": ["", None, ""]}))
    table = pa.table({"id": [1, 2, 3], "text": ["a", "b", "a"]})
    assert unique_rows(table.to_batches()[0], columns=["text"]).tolist() == [0, 1]
    assert unique_rows(table).tolist() == [0, 1, 2]


def test_what_cannot_be_compared_is_named() -> None:
    check_calls("unique_rows")


def test_buffers_off_their_alignment_are_read() -> None:
    raw = bytearray(1) + np.array([0, 1, 3, 4], np.int64).tobytes()
    offsets = pa.py_buffer(memoryview(raw)[1:])
    array = pa.Array.from_buffers(pa.large_string(), 3, [None, offsets, pa.py_buffer(b"abba")])
    check(pa.table({"x": array}))
    values = pa.py_buffer(memoryview(bytearray(1) + np.array([1.0, NAN, 1.0]).tobytes())[1:])
    check(pa.table({"x": pa.Array.from_buffers(pa.float64(), 3, [None, values])}))


def test_the_set_stays_within_its_bytes_while_it_grows() -> None:
    known = SeenRows(num_threads=2)
    rng = np.random.default_rng(1)
    for start in range(0, 600_000, 10_000):
        digests = rng.integers(0, 2**64, 20_000, np.uint64)
        numbers = np.arange(start, start + 10_000)
        assert (known.enter(digests, numbers) == numbers).all()
        assert (known.enter(digests, numbers + 10**9) == numbers).all()
        if len(known) >= 200_000:
            assert known.num_bytes <= 40 * len(known)


def test_digests_that_share_their_slot_and_tag_are_kept_apart_also_at_the_end_of_the_table() -> (
    None
):
    known = SeenRows(num_threads=1)
    low, high = np.uint64(0xFFFF_FFFF_0000_0000), np.uint64(5 << 32)
    digests = np.array([low, high, low + np.uint64(1), high, low, high + np.uint64(1)], np.uint64)
    crowded = np.full(2 * 2000, 2**64 - 1, np.uint64)
    crowded[1::2] = np.arange(2000)
    for some in (digests, crowded):
        numbers = np.arange(len(some) // 2)
        known = SeenRows(num_threads=1)
        assert known.enter(some, numbers).tolist() == numbers.tolist()
        assert known.enter(some, numbers + len(numbers)).tolist() == numbers.tolist()


def digests_of(values: list[bytes]) -> Any:
    column, secret = pa.array(values, pa.large_binary()), SeenRows().secret
    parts = row_bytes.parts_of(column, secret)
    return row_bytes.digests_of(parts, len(values), secret, num_threads=1).reshape(-1, 2)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=70), min_size=1, max_size=30))
def test_digests_differ_exactly_where_the_bytes_do(values: list[bytes]) -> None:
    assert len({tuple(pair) for pair in digests_of(values).tolist()}) == len(set(values))


def test_every_single_bit_changes_both_words_of_a_digest() -> None:
    for length in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100):
        base = bytes(length)
        flipped = [
            base[:at] + bytes([1 << bit]) + base[at + 1 :]
            for at in range(length)
            for bit in range(8)
        ]
        for words in digests_of([base, *flipped]).T:
            assert len(set(words.tolist())) == 1 + 8 * length


def test_nulls_in_one_list_are_not_taken_for_those_of_the_next() -> None:
    for kind, some, none in ((pa.bool_(), True, False), (pa.int8(), 1, 0)):
        columns = {"a": [[some, None], [some, none]], "b": [[some, none], [some, None]]}
        arrays = {name: pa.array(values, pa.list_(kind)) for name, values in columns.items()}
        check(pa.table(arrays))
        assert len(unique_rows(pa.table(arrays), seen=SeenRows())) == 2


def test_threads_may_share_the_rows_seen() -> None:
    known = SeenRows(num_threads=2)
    tables = [
        pa.table({"x": np.arange(start, start + 60_000)}) for start in range(0, 400_000, 40_000)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda table: unique_rows(table, seen=known), tables))
    assert len(known) == 420_000
