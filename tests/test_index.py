"""Rows of units, kept in an index; rows by their number; CSV files cut into units."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_axolotl import CsvDialect, open_dataset
from fast_axolotl.errors import UsageError
from fast_axolotl.reading import index
from fast_axolotl.reading.blocks import Dataset, Unit, decode_or_reject
from fast_axolotl.reading.index import scanned_schema, unit_rows, with_csv_edges
from fast_axolotl.reading.reader import dataset_of
from fast_axolotl.reading.schema import MIXED
from support.files import (
    WRITERS,
    counted_bytes,
    rows_for,
    write_as,
)

QUICK = settings(max_examples=40, deadline=None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The index folder of a new user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index._memory.clear()
    yield tmp_path / "cache" / "fast-axolotl" / "index"
    index._memory.clear()


@pytest.fixture
def reads() -> Iterator[list[int]]:
    """The length of every read of a file."""
    with counted_bytes() as lengths:
        yield lengths


def open_as(path: Any, unit_bytes: int = 4096, **options: Any) -> Dataset:
    return dataset_of(open_dataset(path, **options)).with_options(unit_bytes=unit_bytes)


def total_rows(dataset: Dataset) -> int:
    return sum(unit_rows(dataset).values())


def write_kind(folder: Path, kind: str, compression: str = "none") -> tuple[Path, list[Any]]:
    rows = rows_for(kind, 700)
    return write_as(folder, kind, rows, compression), rows


def rows_in(dataset: Dataset, unit: Unit) -> list[Any]:
    """The rows of a unit as text, so that the types of other units do not matter."""
    names = getattr(dataset.files[0], "names", ())
    schema = pa.schema([(name, pa.string()) for name in names])
    blocks = [decode_or_reject(block, schema, dataset.options) for block in dataset.blocks(unit)]
    return [row for decoded in blocks for row in decoded.table.to_pylist()]


# Counts.


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("kind", WRITERS)
def test_units_have_the_rows_that_reading_them_gives(
    tmp_path: Path, kind: str, compression: str, on_error: str
) -> None:
    path, rows = write_kind(tmp_path, kind, compression)
    dataset = with_csv_edges(open_as([path, path], on_error=on_error))
    units = dataset.units()

    counts = list(unit_rows(dataset).values())

    decoded = [[block.decode(None).table for block in dataset.blocks(unit)] for unit in units]
    assert counts == [sum(map(len, tables)) for tables in decoded]
    assert sum(counts) == 2 * len(rows)
    if compression == "none" and kind in ("jsonl", "csv", "text"):
        assert len(units) > 2


LINE = st.sampled_from(['{"a": 1}', ' {"a": 2} ', "", " ", "\t \r", "\x0b", "{}", '{"b": "\\r"}'])


@QUICK
@given(st.lists(LINE), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(1, 40))
@example(["", "", ' {"a": 2} '], "\n", False, 1)
def test_blank_lines_of_json_are_no_rows(
    lines: list[str], end: str, is_open: bool, unit_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes((end.join(lines) + ("" if is_open else end)).encode())
        dataset = open_as(path, unit_bytes)
        units = dataset.units()

        assert unit_rows(dataset) == {unit: len(rows_in(dataset, unit)) for unit in units}


# The index.


@pytest.mark.parametrize("kind", ["text", "csv"])
@pytest.mark.parametrize(
    "change", ["nothing", "rewritten", "touched", "damaged", "emptied", "other cut"]
)
def test_the_index_is_used_where_it_fits_and_else_built_again(
    tmp_path: Path, folder: Path, reads: list[int], kind: str, change: str
) -> None:
    path, rows = write_kind(tmp_path, kind)
    assert total_rows(with_csv_edges(open_as(path))) == len(rows)
    index._memory.clear()
    if change == "rewritten":
        write_as(tmp_path, kind, rows_for(kind, 701))
    elif change == "touched":
        os.utime(path, (1, 1))
    for kept in folder.iterdir() if change in ("damaged", "emptied") else ():
        kept.write_bytes(kept.read_bytes()[:-3] if change == "damaged" else b"")
    dataset = open_as(path, 1000 if change == "other cut" else 4096)
    reads.clear()

    assert total_rows(with_csv_edges(dataset)) == len(rows) + (change == "rewritten")
    assert bool(reads) == (change != "nothing")


def test_a_schema_is_kept_for_the_same_files_and_options(tmp_path: Path) -> None:
    path, _ = write_kind(tmp_path, "jsonl")
    schema = pa.schema([pa.field("a", MIXED, metadata={"k": "v"}), ("b", pa.list_(pa.int8()))])
    other = pa.schema([("c", pa.int8())])
    scanned_schema(open_as(path), lambda: schema)
    index._memory.clear()

    assert scanned_schema(open_as(path), lambda: other).equals(schema, check_metadata=True)
    for options in ({"columns": ["id"]}, {"csv": CsvDialect(quote="'")}):
        assert scanned_schema(open_as(path, **options), lambda: other) == other
    assert scanned_schema(open_as([path, path]), lambda: other) == other
    os.utime(path, (1, 1))
    assert scanned_schema(open_as(path), lambda: other) == other


# Rows by their number.


@pytest.mark.parametrize("kind", ["arrow file", "arrow stream"])
def test_take_is_indexing_a_list(tmp_path: Path, kind: str) -> None:
    path, rows = write_kind(tmp_path, kind)
    reader, rows = open_dataset([path, path]), rows + rows
    random = np.random.default_rng(0)

    for wanted in (*(random.integers(0, 1400, size) for size in (0, 1, 60)), range(1400)[::-1]):
        table = reader.take(wanted)
        assert table.schema == reader.schema
        assert table.to_pylist() == [rows[number] for number in wanted]
    for wrong in (-1, 1400):
        with pytest.raises(UsageError, match=f"no row {wrong}: the data has 1,400 rows"):
            reader.take([0, wrong])
    for other in ([0.5], [True, False]):
        with pytest.raises(UsageError, match="whole numbers"):
            reader.take(other)  # type: ignore[arg-type]
    for other in ("parquet, small row groups", "jsonl"):
        path, _ = write_kind(tmp_path, other)
        with pytest.raises(UsageError, match=r"take\(\) cannot read .* needs local Arrow files"):
            open_dataset(path).take([0])


# CSV in units.


FIELD = st.text(st.sampled_from('ab,"\r\n é'), max_size=6)
END = st.sampled_from(["\n", "\r\n"])
SIZE = st.sampled_from([4, 7, 30, 100, 10_000])


@QUICK
@given(st.data(), st.lists(st.tuples(FIELD, FIELD), max_size=30), END, st.booleans())
def test_edges_part_the_rows_of_a_csv_file(
    data: st.DataObject, records: list[tuple[str, str]], end: str, quotes_all: bool
) -> None:
    text = data.draw(st.sampled_from(["", "\ufeff"]))
    for record in [("a", "b\n,"), *records]:
        quoted = ('"' + field.replace('"', '""') + '"' for field in record)
        fields = (
            each if quotes_all or set(field) & set(',"\r\n') else field
            for each, field in zip(quoted, record, strict=True)
        )
        text += end * data.draw(st.sampled_from([0, 0, 1, 2])) + ",".join(fields) + end
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_bytes(text.removesuffix(data.draw(st.sampled_from(["", end]))).encode())
        whole = open_as(path, data.draw(SIZE), csv=CsvDialect(delimiter=","))
        whole = whole.with_options(block_bytes=data.draw(SIZE))
        file: Any = whole.files[0]
        edges = file.find_edges()
        assert replace(file, options=replace(file.options, block_bytes=64)).find_edges() == edges
        cut = replace(whole, files=(replace(file, edges=tuple(edges)),))
        units = cut.units()
        at = data.draw(st.integers(0, len(units)))
        spans = [replace(s[0], stop=s[-1].stop) for s in (units[:at], units[at:]) if s]

        expected = rows_in(whole, whole.units()[0])

        assert len(expected) == len(records)
        for parts in (units, spans):
            assert [row for unit in parts for row in rows_in(cut, unit)] == expected
        assert sum(unit_rows(cut).values()) == len(expected)
