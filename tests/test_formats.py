"""What a file is: by name, by content, and what is said when the two disagree."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl import detect_format, open_dataset
from fast_axolotl.errors import DataError, MissingFileError, UsageError
from fast_axolotl.reading import FormatWarning
from support.files import (
    COMPRESSIONS,
    WRITERS,
    arrow_bytes,
    compress,
    flat_rows,
    make_rows,
    read_rows,
    squeeze,
    write_as,
    write_jsonl,
    write_parquet,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x.feather", ("feather", None)),
        ("x.tsv.gz", ("csv", "gzip")),
        ("x.json.gz", ("json", "gzip")),
        ("x.jsonl.zst", ("jsonl", "zstd")),
        ("x.ndjson.bz2", ("jsonl", "bz2")),
        ("x.text.xz", ("text", "xz")),
        ("x.parquet.lz4", ("parquet", "lz4")),
        ("X.JSONL.GZ", ("jsonl", "gzip")),
        ("a.b.c/x.v2.jsonl", ("jsonl", None)),
        ("s3://bucket/a.csv/x.parquet", ("parquet", None)),
        ("x.unknown", ("json", None)),
        ("x", ("json", None)),
        ("x.gz", ("json", "gzip")),
        ("", ("json", None)),
    ],
)
def test_names_tell_format_and_compression(name: str, expected: tuple[str, str | None]) -> None:
    assert detect_format(name) == expected


# Content decides.


@pytest.mark.parametrize(
    "kind", ["parquet, one row group", "arrow file", "arrow stream", "jsonl", "json array"]
)
@pytest.mark.parametrize(
    "named", ["rows.csv", "rows.parquet", "rows.jsonl", "rows.feather", "rows.json"]
)
def test_a_file_is_read_as_what_it_is(tmp_path: Path, kind: str, named: str) -> None:
    rows = make_rows(30)
    path = write_as(tmp_path, kind, rows).rename(tmp_path / named)
    real = {"parquet": "parquet", "arrow": "arrow", "jsonl": "jsonl", "json": "json"}[
        kind.split()[0].rstrip(",")
    ]
    says = named.split(".")[1]
    if says == "csv" and real in ("jsonl", "json"):
        return  # JSON is also valid CSV of one column: what the name says holds
    if says in ("parquet", "feather") and real in ("jsonl", "json"):
        with pytest.raises(DataError, match="corrupt"):
            read_rows(path)
        return
    if says == real or {says, real} == {"arrow", "feather"}:
        assert read_rows(path) == rows
        return

    with pytest.warns(FormatWarning, match=f"the file name says {says}, but the content is {real}"):
        assert read_rows(path) == rows


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "csv"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_file_without_an_ending_is_recognised(
    tmp_path: Path, kind: str, compression: str
) -> None:
    rows = make_rows(30)
    path = write_as(tmp_path, kind, rows, compression).rename(tmp_path / "data")

    assert read_rows(path) == rows


@pytest.mark.parametrize("compression", [name for name in COMPRESSIONS if name != "none"])
def test_concatenated_members_are_one_file(tmp_path: Path, compression: str) -> None:
    rows = make_rows(60)
    parts = [
        compress(write_jsonl(tmp_path / f"{i}.jsonl", rows[i * 20 : i * 20 + 20]), compression)
        for i in range(3)
    ]
    whole = tmp_path / f"whole.jsonl{COMPRESSIONS[compression]}"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))

    assert read_rows(whole) == rows


# Text.


PIECES = st.lists(st.sampled_from(["a", "é", "\n", "\r\n", "\r", " ", "xyz", "\x00"]), min_size=1)


def lines_of(text: str) -> list[str]:
    """The oracle: ``\\n`` ends a line, and one ``\\r`` before it belongs to that end."""
    *lines, last = text.split("\n")
    return [line.removesuffix("\r") for line in lines] + ([last] if last else [])


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, compression=st.sampled_from(["none", "none", "gzip"]))
def test_lines_equal_those_of_plain_python(pieces: list[str], compression: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.txt"
        path.write_bytes(squeeze("".join(pieces).encode(), compression))
        rows = read_rows(path, num_threads=1)
    assert [row["text"] for row in rows] == lines_of("".join(pieces))


# Columns, folders and splits.


def test_dictionary_columns_read_as_their_values(tmp_path: Path) -> None:
    values = ["x", "y", None, "x"]
    table = pa.table({"a": pa.array(values).dictionary_encode()})
    for form in (pa.ipc.new_file, pa.ipc.new_stream):
        path = tmp_path / "a.arrow"
        path.write_bytes(arrow_bytes(table, form))
        assert [row["a"] for row in read_rows(path)] == values


def test_columns_are_chosen_and_ordered_in_every_format(tmp_path: Path) -> None:
    for kind in WRITERS:
        rows = flat_rows(20) if kind == "csv" else make_rows(20)
        path = write_as(tmp_path, kind, rows)
        found = read_rows(path, columns=["score", "id"])
        assert [list(row.items()) for row in found] == [
            [("score", row["score"]), ("id", row["id"])] for row in rows
        ], kind


def test_clashing_parquet_files_are_an_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", [{"a": 1}])
    write_parquet(tmp_path / "2.parquet", [{"a": {"b": "x"}}])

    with pytest.raises(
        DataError, match=r"2\.parquet: column 'a' has the type int64 in earlier rows"
    ):
        open_dataset(tmp_path)


def test_a_folder_is_read_as_a_folder_whatever_it_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "rows.jsonl"
    folder.mkdir()
    (folder / "README.md").write_text("hello")
    with pytest.raises(MissingFileError, match="no data files in this folder"):
        open_dataset(folder)
    write_jsonl(folder / "my-rows.jsonl", make_rows(3))
    assert read_rows(folder) == make_rows(3)
    (tmp_path / "md").mkdir()
    (tmp_path / "md" / "README.md").write_text("hello")
    with pytest.raises(MissingFileError, match="no data files in this folder"):
        open_dataset(tmp_path / "md")


def test_a_single_file_of_another_split_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", make_rows(3))
    write_jsonl(tmp_path / "rows.jsonl", make_rows(3))
    for name, split in (("test", None), ("test", "test"), ("test", "eval"), ("test", "all")):
        assert read_rows(tmp_path / f"{name}.jsonl", split=split) == make_rows(3)
    assert read_rows(tmp_path / "rows.jsonl", split="train") == make_rows(3)
    with pytest.raises(UsageError, match="no split 'train'; it has: test"):
        open_dataset(tmp_path / "test.jsonl", split="train")
