"""JSON whose types drift, clash or surprise: the rows are always those of ``json.loads``."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fast_axolotl import open_dataset
from fast_axolotl.errors import ConflictError, DataError
from fast_axolotl.reading import convert
from fast_axolotl.reading.blocks import ReadOptions
from fast_axolotl.reading.json_lines import json_block
from fast_axolotl.reading.lines import Lines
from support.files import (
    SMALL_BUDGET,
    compress,
    counted_bytes,
    jsonl_bytes,
    read_rows,
    write_jsonl,
    write_parquet,
)

FILLER = "x" * 400


def python_rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows as the ``python`` output gives them."""
    rows: list[dict[str, Any]] = []
    for batch in open_dataset(path, **options):
        columns = convert(batch, "python")
        rows += [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
    return rows


def without_nulls(value: Any) -> Any:
    """Missing keys and nulls are the same in Arrow."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# Promotions.


@pytest.mark.parametrize(
    ("first", "then"),
    [
        *((None, then) for then in ({"a": 1}, [1], True, "x")),
        *(([], then) for then in ([{"a": 1}], ["x"])),
        (1.5, 1),
        ([None], [{"a": 1}]),
        ({}, {"a": 1}),
        ({"a": 1}, {"a": 1, "b": "x"}),
        ({"a": {"b": None}}, {"a": {"b": {"c": 1}}}),
        ([{"a": None}], [{"a": [1]}, {"b": "x"}]),
        ({"a": [None]}, {"a": [None], "b": 1}),
    ],
)
@pytest.mark.parametrize("far", [False, True], ids=["same block", "later block"])
def test_a_type_may_grow_at_any_time(tmp_path: Path, first: Any, then: Any, far: bool) -> None:
    between = 2500 if far else 1
    values = [first] * between + [then] + [first] * between
    rows = [{"v": value, "t": FILLER} for value in values]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    found = read_rows(path, memory_budget=SMALL_BUDGET, num_threads=2)

    assert without_nulls(found) == without_nulls(rows)


LATE: list[tuple[Any, Any, str, str]] = [
    (1, 1.5, "v", "int64 in earlier rows and double here"),
    ([1], [2.5], "v[]", "int64 in earlier rows and double here"),
    ({"a": 1}, {"a": 1.5}, "v.a", "int64 in earlier rows and double"),
    ([1], [1, "x"], "v", "and an array of mixed types, or an integer past 64 bits, here"),
    (2**53 + 1, 0.5, "v", "int64 in earlier rows"),
]


@pytest.mark.parametrize(("first", "then", "column", "message"), LATE)
@pytest.mark.parametrize(("shuffle", "compression"), [(None, "zstd"), (3, "none")])
def test_a_type_that_would_change_past_the_sample_is_an_error_or_known_by_a_scan(
    tmp_path: Path,
    first: Any,
    then: Any,
    column: str,
    message: str,
    shuffle: int | None,
    compression: str,
) -> None:
    noise = Random(0)
    rows = [{"v": first, "t": noise.randbytes(200).hex()} for _ in range(2500)]
    rows += [{"v": then, "t": ""}, {"v": first, "t": "end"}]
    path = compress(write_jsonl(tmp_path / "late.jsonl", rows), compression)
    options: dict[str, Any] = {"memory_budget": SMALL_BUDGET, "shuffle": shuffle}

    with pytest.raises(ConflictError, match=r'pass infer="scan"') as caught:
        read_rows(path, **options)
    found = python_rows(path, infer="scan", **options)

    assert (caught.value.path, caught.value.place) == (str(path), "line 2501")
    assert f"column {column!r}" in caught.value.message
    assert message in caught.value.message
    # What the scan has found is kept for the next one.
    assert len({batch.schema for batch in open_dataset(path, infer="scan", **options)}) == 1
    if shuffle is None:
        assert found == rows
        if not isinstance(first, list) or then != [2.5]:
            values = [repr(row["v"]) for row in found]
            assert values[2500:] == [repr(then), repr(found[0]["v"])]


def test_every_shard_begins_with_the_same_types_for_a_few_bytes(tmp_path: Path) -> None:
    rows = [{"n": index, "t": FILLER} for index in range(3000)]
    for name in ("1.jsonl", "2.jsonl"):
        write_jsonl(tmp_path / name, [*rows, {"n": 0, "t": "", "late": 1}])
    write_jsonl(tmp_path / "3.jsonl", [{"n": 0.5, "k": [None]}])

    with counted_bytes() as lengths:
        schemas = {open_dataset(tmp_path, shard=(index, 8)).schema for index in range(8)}

    assert schemas == {
        pa.schema([("n", pa.float64()), ("t", pa.string()), ("k", pa.list_(pa.null()))])
    }
    assert sum(lengths) <= 8 * 100 * 1024


# Conflicts.


@pytest.mark.parametrize(
    ("first", "then", "column", "types"),
    [
        (1, "x", "v", ("int64", "string")),
        ("x", 1, "v", ("string", "int64")),
        ({"a": 1}, "x", "v", ("struct<a: int64>", "string")),
        ([1], {"a": 1}, "v", ("list<item: int64>", "struct<a: int64>")),
        ({"a": {"b": 1}}, {"a": {"b": "x"}}, "v.a.b", ("int64", "string")),
        ([{"b": 1}], [{"b": [1]}], "v[].b", ("int64", "list<item: int64>")),
        (True, 1, "v", ("bool", "int64")),
    ],
)
@pytest.mark.parametrize("where", ["near", "far, in gzip", "far, in a document", "far, shuffled"])
def test_a_conflict_names_file_line_column_and_both_types(
    tmp_path: Path, first: Any, then: Any, column: str, types: tuple[str, str], where: str
) -> None:
    between = 3 if where == "near" else 2500
    rows = [{"v": first, "t": FILLER}] * between + [{"v": then}]
    path = write_jsonl(tmp_path / "clash.jsonl", rows)
    if where.endswith("document"):
        path = tmp_path / "clash.json"
        path.write_text("[" + ",\n".join(map(json.dumps, rows)) + "]")
    path = compress(path, "gzip" if where.endswith("gzip") else "none")
    shuffle = 3 if where.endswith("shuffled") else None

    with pytest.raises(ConflictError) as caught:
        read_rows(path, memory_budget=SMALL_BUDGET, num_threads=2, shuffle=shuffle)

    assert caught.value.path == str(path)
    noun = "row" if path.suffix == ".json" else "line"
    assert caught.value.place.startswith(f"{noun} ")
    if shuffle is not None:
        return  # it is found in whichever of the rows comes later
    assert caught.value.place == f"{noun} {between + 1}"
    message = str(caught.value)
    assert (
        f"column {column!r} has the type {types[0]} in earlier rows and {types[1]} here" in message
    )
    assert "read only other columns" in message


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_conflict_between_files_names_the_later_one(tmp_path: Path, on_error: str) -> None:
    """It is no bad row, which could be skipped."""
    write_jsonl(tmp_path / "1.jsonl", [{"a": 1}])
    write_jsonl(tmp_path / "2.jsonl", [{"a": 2}, {"a": "x"}])
    write_parquet(tmp_path / "1.parquet", [{"a": 1}])
    write_parquet(tmp_path / "2.parquet", [{"a": {"b": "x"}}])

    for ending, place in (("jsonl", ", line 2"), ("parquet", "")):
        told = f"2.{ending}{place}: column 'a' has the type int64 in earlier rows"
        with pytest.raises(ConflictError, match=told):
            read_rows(str(tmp_path / f"*.{ending}"), on_error=on_error)


# What pyarrow would get wrong.


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([{"b": [{"c": [1, "x"]}]}, {"b": [{"c": [2]}]}], id="mixed deep inside"),
        pytest.param([[1, "x", None, {"a": [True]}], [], None, [[1], 2.5]], id="mixed"),
        [math.nan, math.inf, -math.inf],
        *([1, n, None, -5] for n in (2**63, -(2**63) - 1, 2**64, 10**40, 2**63 - 1, -(2**63))),
        pytest.param([2**53 + 1, 0.5], id="no float holds both"),
        *(
            [text, text, text]
            for text in ("2024-01-31", "2024-01-31T10:00:00", "2024-01-31 10:00:00Z")
        ),
        pytest.param([{"l": ["2024-01-31"]}] * 3, id="nested text that looks like a date"),
        *(
            lists * 50
            for lists in (
                [[1, None, 2], [3, 4]],
                [[None], [1]],
                [[{"a": 1}, None, {"a": 2}], [{"a": 3}]],
                [[[1, None], None], [[2]]],
                [[None, None], []],
                [None, [None, "x"]],
            )
        ),
        pytest.param(["[{" * 50_000, "]}" * 50_000], id="text full of brackets is no nesting"),
    ],
)
def test_values_arrive_as_they_are(tmp_path: Path, values: list[Any]) -> None:
    rows = [{"v": value} for value in values]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    assert list(map(repr, python_rows(path))) == list(map(repr, rows))


@pytest.mark.parametrize("depth", [64, 66, 5000, 100_000])
@pytest.mark.parametrize("shape", ["[]", "{}"])
@pytest.mark.parametrize("line", [1, 2])
def test_nesting_of_64_levels_is_values_and_deeper_an_error(
    tmp_path: Path, depth: int, shape: str, line: int
) -> None:
    nested = "[" * depth + "]" * depth if shape == "[]" else '{"a":' * depth + "1" + "}" * depth
    lines = ['{"v": 1}', f'{{"w": {nested}}}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines if line == 2 else reversed(lines)))

    try:
        found = read_rows(path)
    except DataError as error:
        assert depth > 64
        assert error.place == f"line {line}"  # noqa: PT017
    else:
        assert (len(found), depth) == (2, 64)


# Shapes of files.


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("a.jsonl", b'\r\n\n{"a": 1}\r\n\n   \n\t\n{"a": 2}', [1, 2]),
        ("a.jsonl", b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', [1, 2]),
        ("a.json", b'\xef\xbb\xbf[{"a": 1},{"a": 2}]', [1, 2]),
        ("a.json", b'{\n  "a": {\n    "c": [1, 2]\n  }\n}', [{"c": [1, 2]}]),
        *(("a.json", text, []) for text in (b"[]", b"[ ]\n", b" [\n]")),
        ("a.json", b'[{"a": 1},, {"a": 2},]', [1, 2]),
        ("a.json", b'{\n"a": "x\\\\"}{"a": "\\"}\\\\\\"{"}', ["x\\", '"}\\"{']),
        ("a.jsonl", b'{"a": 1, "a": 3}\n{"a": 4}', [3, 4]),
        ("a.jsonl", b'{"a": {"c": 1, "c": 2}}', [{"c": 2}]),
    ],
)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_white_space_and_marks_do_not_matter_and_of_duplicate_keys_the_last_wins(
    tmp_path: Path, name: str, content: bytes, values: list[Any], compression: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    assert [row["a"] for row in read_rows(compress(path, compression))] == values


# Any rows: ours are those of json.loads.

KEYS = st.sampled_from(["a", "b", "c"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(["2024-01-01", "1", "", "null", "\u2028", "\\", '"']),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=6), st.booleans())
def test_any_rows_read_as_json_loads_reads_them(rows: list[dict[str, Any]], document: bool) -> None:
    text = json.dumps(rows) if document else "\n".join(map(json.dumps, rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{'json' if document else 'jsonl'}"
        path.write_text(text)
        try:
            found = python_rows(path, num_threads=1)
        except ConflictError:
            assume(False)
    if any(rows):
        assert without_nulls(found) == without_nulls(rows)
    else:
        assert found == []


@pytest.mark.parametrize("shuffle", [None, 3])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.lists(VALUES, min_size=2, max_size=5), length=st.integers(5, 60))
def test_types_that_drift_over_many_blocks_read_as_json_loads_reads_them(
    shuffle: int | None, values: list[Any], length: int
) -> None:
    """Blocks of a few hundred bytes, so that every drift crosses one."""
    rows = [
        {"id": index, "v": value, "t": "x" * 20}
        for index, value in enumerate(value for value in values for _ in range(length))
    ]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fast_axolotl.reading.reader.MIB", 256)
        patch.setattr("fast_axolotl.reading.unify_types._SAMPLE_BYTES", 300)
        path = write_jsonl(Path(folder) / "rows.jsonl", rows)
        try:
            found = python_rows(path, num_threads=2, batch_size=7, shuffle=shuffle)
        except ConflictError as error:
            clash = error
        else:
            found.sort(key=lambda row: row["id"])
            assert without_nulls(found) == without_nulls(rows)
            return
    assert clash.place.startswith("line ")
    assert "'v" in clash.message


@pytest.mark.parametrize(("keys", "of_row", "is_cut"), [(100, 100, False), (3000, 1, True)])
def test_only_rows_that_share_few_keys_are_parsed_in_pieces(
    keys: int, of_row: int, is_cut: bool
) -> None:
    rows = ({f"k{(row + key) % keys}": key for key in range(of_row)} for row in range(3000))
    data = jsonl_bytes(list(rows))
    lines = Lines(data=data, stop=len(data), place=lambda _: ("", ""))
    assert bool(json_block(len(data), lambda: lines, ReadOptions()).decode(None).more) is is_cut
