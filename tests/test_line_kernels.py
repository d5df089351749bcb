"""Kernels for lines and CSV equal plain Python, wherever chunks are cut; so do their readers."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.errors import DataError
from fast_axolotl.kernels import lines as kernels
from fast_axolotl.reading import lines as reading_lines
from fast_axolotl.reading import open_dataset
from fast_axolotl.reading.blocks import ReadOptions
from fast_axolotl.reading.csv_files import CsvFile
from fast_axolotl.reading.lines import TextFile
from fast_axolotl.reading.storage import Source
from support.children import python_output

pytestmark = pytest.mark.kernels

QUOTE, COMMA = ord('"'), ord(",")
SPARE = b"x" * kernels.PADDING
"""Kernels are given at least so much data."""

texts = st.lists(
    st.sampled_from(['"', '""', ",", "\n", "\r\n", "\r", "a", "bc", "é", "引", "\ufeff", "x" * 70]),
    max_size=60,
).map(lambda parts: "".join(parts).encode())
margins = st.integers(0, 130)
fields = st.text(st.sampled_from('ab",\né引'), max_size=90) | st.integers(-99, 10**6).map(str)
tables = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(fields, min_size=width, max_size=width), max_size=12)
)


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_lines._loader, "_turns", [])
    monkeypatch.setattr(reading_lines._loader, "kernels", kernels if way == "kernels" else None)


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def in_margins(text: bytes, before: int, after: int) -> tuple[np.ndarray, int, int]:
    data = b"\n" * before + text + SPARE[: max(after, kernels.PADDING - before - len(text))]
    return as_array(data), before, before + len(text)


@given(text=texts, before=margins, after=margins)
def test_counting_a_byte_equals_python(text: bytes, before: int, after: int) -> None:
    assert kernels.count_byte(*in_margins(text, before, after), COMMA) == text.count(b",")


@given(text=texts, before=margins, after=margins)
def test_copied_lines_are_those_of_python(text: bytes, before: int, after: int) -> None:
    out = np.zeros(len(text) + kernels.PADDING, dtype=np.uint8)
    offsets = np.zeros(text.count(b"\n") + 2, dtype=np.int32)
    count = kernels.copy_lines(*in_margins(text, before, after), out, offsets)
    *whole, last = text.split(b"\n")
    expected = [line.removesuffix(b"\r") for line in whole] + ([last] if last else [])
    edges = offsets[: count + 1].tolist()
    found = [out[a:b].tobytes() for a, b in pairwise(edges)]
    assert found == expected


def boundaries(text: bytes) -> tuple[list[int], bool, bool]:
    """Ends of lines outside quotes, whether one is open at the end, whether all are in place."""
    ends, is_open, is_regular = [], False, True
    for at, byte in enumerate(text):
        if byte == QUOTE:
            is_open = not is_open
            beside = text[max(0, at - 1) : at] if is_open else text[at + 1 : at + 2]
            is_regular &= beside in (b"", b",", b"\r", b"\n", b'"')
        elif byte == ord("\n") and not is_open:
            ends.append(at + 1)
    return ends, is_open, is_regular


@given(text=texts, before=margins, after=margins, target=margins, step=st.integers(1, 99))
def test_records_are_cut_where_a_loop_over_the_bytes_cuts_them(
    text: bytes, before: int, after: int, target: int, step: int
) -> None:
    data, start, stop = in_margins(text, before, after)
    edges = np.zeros(len(text) + 1, dtype=np.int64)
    found = kernels.cut_records(data, start, stop, QUOTE, COMMA, start + target, step, edges)
    ends, is_open, is_regular = boundaries(text)
    if not is_regular:
        assert found[0] == -1
        return
    expected, at = [], target
    for end in ends:
        if end > at:
            expected.append(start + end)
            at = end + step
    assert found == (start + (ends[-1] if ends else 0), is_open, len(expected))
    assert edges[: len(expected)].tolist() == expected


def split(text: bytes, width: int, before: int = 0, after: int = 0) -> list[list[bytes]] | None:
    data, start, stop = in_margins(text, before, after)
    starts, ends = (np.zeros(len(text) + 1, dtype=np.int32) for _ in range(2))
    sizes = np.zeros(width, dtype=np.int64)
    rows = kernels.find_fields(data, start, stop, QUOTE, COMMA, width, starts, ends, sizes)
    if rows < 0:
        return None
    columns = []
    for column in range(width):
        out = np.zeros(sizes[column] + kernels.PADDING, dtype=np.uint8)
        offsets = np.zeros(rows + 1, dtype=np.int32)
        kernels.copy_fields(data, starts, ends, column, width, rows, QUOTE, out, offsets)
        edges = offsets.tolist()
        columns.append([out[a:b].tobytes() for a, b in pairwise(edges)])
    return [list(row) for row in zip(*columns, strict=True)]


@given(
    rows=tables,
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    is_closed=st.booleans(),
    before=margins,
    after=margins,
)
def test_fields_are_what_was_written(
    rows: list[list[str]], ending: str, quoting: Any, is_closed: bool, before: int, after: int
) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator=ending, quoting=quoting).writerows(rows)
    text = written.getvalue().encode()
    text = text if is_closed else text.removesuffix(ending.encode())
    found = split(text, len(rows[0]) if rows else 1, before, after)
    assert found == [[field.encode() for field in row] for row in rows]


@given(text=texts, width=st.integers(1, 3), before=margins, after=margins)
def test_fields_of_any_text_are_those_of_the_csv_module_or_not_told(
    text: bytes, width: int, before: int, after: int
) -> None:
    _, is_open, is_regular = boundaries(text)
    records = csv.reader(io.StringIO(text.decode(), newline=""))
    expected = [[field.encode() for field in record] for record in records if record]
    outside = b"|".join(text.split(b'"')[::2]).replace(b"\r\n", b"\n")
    is_usual = is_regular and not is_open and b"\r" not in outside
    is_usual &= all(len(record) == width for record in expected)
    assert split(text, width, before, after) == (expected if is_usual else None)


def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for way in ("numpy", "kernels"):
        use(way, monkeypatch)
        yield way


@settings(max_examples=60)
@given(
    rows=tables.filter(len),
    ending=st.sampled_from(["\n", "\r\n"]),
    has_bom=st.booleans(),
    is_closed=st.booleans(),
    block=st.integers(64, 400),
)
def test_csv_files_read_alike_with_and_without_kernels_wherever_blocks_end(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[str]],
    ending: str,
    has_bom: bool,
    is_closed: bool,
    block: int,
) -> None:
    names = [f"c{index}" for index in range(len(rows[0]))]
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    text = written.getvalue() if is_closed else written.getvalue().removesuffix(ending)
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbf" * has_bom + text.encode())
    options = ReadOptions(block_bytes=block, unit_bytes=100)
    source = Source(path=str(path), num_bytes=path.stat().st_size)
    schema = pa.schema([(name, pa.string()) for name in names])
    with pytest.MonkeyPatch.context() as patch:
        for _ in ways(patch):
            file = CsvFile.open(source, None, options)
            blocks = [item for unit in file.units(0) for item in file.blocks(unit)]
            tables = [item.decode(schema).table for item in blocks if item.weight]
            found = [list(row.values()) for table in tables for row in table.to_pylist()]
            assert found == rows
    with pytest.MonkeyPatch.context() as patch:
        edges = [CsvFile.open(source, None, options).find_edges() for _ in ways(patch)]
    assert edges[0] == edges[1]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["rows.txt", "rows.txt.gz"])
def test_text_files_read_alike_with_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: bytes, name: str
) -> None:
    lines = ["", "é引" * 40, "a\rb", "x" * 200, "\ufeffy", ""] * 20
    data = b"\xef\xbb\xbf" + ending.join(line.encode() for line in lines) + b"end"
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source = Source(path=str(path), num_bytes=path.stat().st_size)
    compression = "gzip" if name.endswith("gz") else None
    lines[-1] += "end"
    for _ in ways(monkeypatch):
        for block in (64, 97, 1000, 100_000):
            options = ReadOptions(block_bytes=block, unit_bytes=500)
            file = TextFile(source=source, compression=compression, options=options)
            found = [
                row["text"]
                for unit in file.units(0)
                for item in file.blocks(unit)
                for row in item.decode(None).table.to_pylist()
            ]
            assert found == lines


@pytest.mark.parametrize(
    ("name", "row", "place"),
    [
        ("rows.csv", b"1,\xff\n", "line 102"),
        ("rows.csv", b"1,2,3\n", "line 102"),
        ("rows.csv", b'1,"a\n', "line 102"),
        ("rows.txt", b"\xe5\xbc\n", "line 102"),
    ],
)
def test_errors_name_the_same_place_with_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: bytes, place: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"a,b\n" + b'1,"x"\n' * 100 + row)
    errors = []
    for _ in ways(monkeypatch):
        with pytest.raises(DataError) as caught:
            list(open_dataset(path))
        errors.append(str(caught.value))
        assert caught.value.place == place
    assert errors[0] == errors[1]


def test_kernels_are_loaded_after_some_bytes_and_a_fork_meanwhile_waits_for_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n" + '1,"x, y"\n' * 10_000)
    code = (
        "import os, sys\n"
        "from fast_axolotl.reading import kernel_loader, lines, open_dataset\n"
        "kernel_loader._COMPILE_BYTES = lines._loader._wanted_bytes = 10_000\n"
        "def rows(): return sum(batch.num_rows for batch in open_dataset(sys.argv[1]))\n"
        "assert 'numba' not in sys.modules\n"
        "assert rows() == 10_000\n"
        "child = os.fork()\n"
        "assert None not in (lines._loader.kernels, kernel_loader._utf8.kernels)\n"
        "assert rows() == 10_000\n"
        "if child == 0: os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert python_output("-c", code, str(path)).strip() == "0"
