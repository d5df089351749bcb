"""What a file is: by name, by content, and what is said when the two disagree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl import detect_format, open_dataset
from fast_axolotl.errors import DataError, MissingFileError, UsageError
from fast_axolotl.reading import FormatWarning
from support.children import python_output
from support.files import (
    Rows,
    compress,
    flat_rows,
    jsonl_bytes,
    make_rows,
    read_rows,
    squeeze,
    write_as,
    write_csv,
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
    ("kind", "content"),
    [
        ("parquet, one row group", "parquet"),
        ("arrow file", "arrow"),
        ("arrow stream", "arrow"),
        ("jsonl", "jsonl"),
        ("json array", "json"),
    ],
)
def test_a_file_is_read_as_what_it_is(tmp_path: Path, kind: str, content: str) -> None:
    rows = make_rows(30)
    path = write_as(tmp_path, kind, rows)
    for says in ("csv", "parquet", "feather", "jsonl", "json"):
        path = path.rename(tmp_path / f"rows.{says}")
        is_json = content in ("jsonl", "json")
        if is_json and says == "csv":
            continue  # JSON is also valid CSV of one column: what the name says holds
        told = f"the file name says {says}, but the content is {content}"
        if is_json and says in ("parquet", "feather"):
            with pytest.raises(DataError, match="corrupt"):
                read_rows(path)
        elif says == content or {says, content} == {"arrow", "feather"}:
            assert read_rows(path) == rows
        else:
            with pytest.warns(FormatWarning, match=told):
                assert read_rows(path) == rows


def test_a_stream_may_begin_with_a_frame_without_data(tmp_path: Path) -> None:
    """As pzstd writes it before each of its frames."""
    for number, compression in ((0x50, "zstd"), (0x5F, "zstd"), (0x5A, "lz4")):
        path = tmp_path / f"rows.jsonl.{'zst' if compression == 'zstd' else compression}"
        frames = [squeeze(jsonl_bytes([row]), compression) for row in make_rows(3)]
        skipped = bytes([number]) + b"\x2a\x4d\x18" + bytes([4, 0, 0, 0]) + b"size"
        path.write_bytes(b"".join(skipped + frame for frame in frames))
        assert read_rows(path) == make_rows(3)


# Text.


PIECES = st.lists(
    st.sampled_from(["a", "é引", "\n", "\r\n", "\r", " ", "xyz" * 20, "\x00", "\ufeff"]), min_size=1
)


def lines_of(text: str) -> list[str]:
    """The oracle: ``\\n`` ends a line, and one ``\\r`` before it belongs to that end."""
    *lines, last = text.removeprefix("\ufeff").split("\n")
    return [line.removesuffix("\r") for line in lines] + ([last] if last else [])


@settings(max_examples=200, deadline=None)
@given(PIECES, st.sampled_from(["none", "none", "gzip"]), st.booleans())
def test_lines_equal_those_of_plain_python(
    pieces: list[str], compression: str, tiny_blocks: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if tiny_blocks:
            patch.setattr("fast_axolotl.reading.reader.MIB", 8)
        path = Path(folder) / "rows.txt"
        path.write_bytes(squeeze("".join(pieces).encode(), compression))
        rows = read_rows(path, num_threads=1)
    assert [row["text"] for row in rows] == lines_of("".join(pieces))


# Columns, folders and splits.


def test_a_folder_is_read_as_a_folder_whatever_it_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "rows.jsonl"
    folder.mkdir()
    (folder / "README.md").write_text("hello")
    for name in ("rows.jsonl", "md"):
        folder = folder.rename(tmp_path / name)
        with pytest.raises(MissingFileError, match="no data files in this folder"):
            open_dataset(folder)
    folder = folder.rename(tmp_path / "rows.jsonl")
    write_jsonl(folder / "my-rows.jsonl", make_rows(3))
    assert read_rows(folder) == make_rows(3)


def test_folders_through_links_are_read_and_their_names_are_columns(tmp_path: Path) -> None:
    for number, (lang, day) in enumerate([("de", "1"), ("en", "__HIVE_DEFAULT_PARTITION__")]):
        folder = tmp_path / "far" / f"lang={lang}" / f"day={day}"
        folder.mkdir(parents=True)
        write_as(folder, "parquet, one row group", [{"id": number, "lang": "its own"}])
        write_jsonl(folder / "b.jsonl", [{"id": 10 + number, "day": "its own"}])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "up").symlink_to(tmp_path / "data")

    reader = open_dataset(tmp_path / "data")
    rows = [tuple(row.values()) for batch in reader for row in batch.to_pylist()]

    assert reader.schema.names == ["id", "lang", "day"]
    assert sorted(rows) == [(0, "de", 1), (1, "en", None), (10, "de", 1), (11, "en", None)]
    assert reader.stats.ignored_files == (str(tmp_path / "data" / "link" / "up"),)
    for path in (tmp_path / "far", tmp_path / "far" / "lang=*" / "*" / "*.*"):
        assert read_rows(path, columns=["day", "id"], shuffle=1, infer="scan", on_error="skip")
        days = [tuple(row.values()) for row in read_rows(path, columns=["day"])]
        assert sorted(map(str, days)) == ["(1,)", "(1,)", "(None,)", "(None,)"]


@pytest.mark.filterwarnings("ignore::fast_axolotl.reading.FormatWarning")
@pytest.mark.parametrize("kind", ["an array", "an array on lines", "gzip"])
def test_many_small_files_that_hold_something_else_are_read_as_what_they_are(
    tmp_path: Path, kind: str
) -> None:
    for number in range(20):
        rows: Any = [{"id": number}, {"id": number}]
        text = json.dumps(rows, indent=1 if kind == "an array on lines" else None).encode()
        content = squeeze(jsonl_bytes(rows), "gzip") if kind == "gzip" else text
        (tmp_path / f"{number:02}.jsonl").write_bytes(content)
    rows = read_rows(tmp_path, on_error="skip")
    assert [row["id"] for row in rows] == [number // 2 for number in range(40)]


@pytest.mark.parametrize("size", [10, 9000], ids=["short", "long"])
def test_many_small_files_are_read_together_and_told_apart_in_errors(
    tmp_path: Path, size: int
) -> None:
    texts = [{"id": number, "t": "x" * size} for number in range(90)]
    for number in range(0, 90, 3):
        path = write_jsonl(tmp_path / f"{number:02}.jsonl", texts[number : number + 3])
        data = path.read_bytes()
        data = data if number % 5 else data.removesuffix(b"\n")
        path.write_bytes(data if number % 2 else b"\xef\xbb\xbf" + data)
    (tmp_path / "31.jsonl").touch()
    options: dict[str, Any] = {"batch_size": 7, "shuffle": None}

    assert read_rows(tmp_path) == texts
    reader = open_dataset(tmp_path, **options)
    assert reader.num_rows == 90
    batches = iter(reader)
    first = next(batches).to_pylist() + next(batches).to_pylist()
    again = open_dataset(tmp_path, **options)
    again.load_state_dict(reader.state_dict())
    assert first + [row for batch in again for row in batch.to_pylist()] == texts
    for shuffle in (None, 1):
        shards = [read_rows(tmp_path, shard=(n, 4), shuffle=shuffle) for n in range(4)]
        assert sorted(row["id"] for shard in shards for row in shard) == list(range(90))
        assert all(shards)

    path = tmp_path / "30.jsonl"
    path.write_text('{"id": 30, "t": "x"}\n\n{"id": 31, "t":\n')
    with pytest.raises(DataError, match="malformed") as caught:
        read_rows(tmp_path)
    assert (caught.value.path, caught.value.place) == (str(path), "line 3")
    reader = open_dataset(tmp_path, on_error="skip")
    assert (reader.num_rows, reader.num_rows) == (88, sum(batch.num_rows for batch in reader))
    (item,) = reader.stats.rejections
    assert (item.path, item.place) == (str(path), "line 3")
    if size > 10:
        reader = open_dataset(tmp_path, on_error="skip")
        (tmp_path / "00.jsonl").unlink()
        assert sum(batch.num_rows for batch in reader) == 85
        assert reader.stats.rejected_files == {str(tmp_path / "00.jsonl")}


def test_a_single_file_of_another_split_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", make_rows(3))
    write_jsonl(tmp_path / "rows.jsonl", make_rows(3))
    for name, split in (("test", None), ("test", "test"), ("test", "eval"), ("test", "all")):
        assert read_rows(tmp_path / f"{name}.jsonl", split=split) == make_rows(3)
    assert read_rows(tmp_path / "rows.jsonl", split="train") == make_rows(3)
    with pytest.raises(UsageError, match="no split 'train'; it has: test"):
        open_dataset(tmp_path / "test.jsonl", split="train")


# Folders: Hugging Face's two kinds, globs, lists, and what is left aside.


def ids_of(path: Any, **options: Any) -> list[int]:
    return [row["id"] for row in read_rows(path, **options)]


# save_to_disk


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("datasets")


def test_a_saved_dataset_reads_in_the_order_of_its_index(hf: Any, tmp_path: Path) -> None:
    rows = make_rows(1200)
    folder = tmp_path / "saved"
    hf.Dataset.from_list(rows).save_to_disk(folder, num_shards=12)

    assert detect_format(str(folder)) == ("hf_dataset", None)
    assert read_rows(folder) == rows
    assert read_rows(folder, format="hf_dataset") == rows
    assert read_rows(str(folder), columns=["id"]) == [{"id": index} for index in range(1200)]


# Folders as on the Hub


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    rows = make_rows(40)
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", rows[:10])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", rows[10:30])
    (folder / "README.md").write_text("# A dataset\n")
    (folder / "LICENSE").write_text("MIT\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / ".cache").mkdir()
    write_jsonl(folder / ".cache" / "left.jsonl", rows[:1])
    return folder


def test_a_hub_folder_reads_in_order_and_leaves_other_files_aside(hub: Path) -> None:
    reader = open_dataset(hub)

    assert [row["id"] for batch in reader for row in batch.to_pylist()] == list(range(30))
    ignored = {Path(name).name for name in reader.stats.ignored_files}
    assert {"README.md", "LICENSE", ".gitattributes", "dataset_infos.json"} <= ignored


@pytest.mark.parametrize("kind", ["saved", "hub"])
def test_one_of_several_splits_must_be_named(hf: Any, tmp_path: Path, hub: Path, kind: str) -> None:
    rows, folder = make_rows(40), hub
    write_parquet(hub / "data" / "test-00000-of-00001.parquet", rows[30:])
    if kind == "saved":
        folder = tmp_path / "saved"
        parts = {"train": hf.Dataset.from_list(rows[:30]), "test": hf.Dataset.from_list(rows[30:])}
        hf.DatasetDict(parts).save_to_disk(folder)
        assert detect_format(str(folder)) == ("hf_dataset", None)
        assert read_rows(folder / "test") == rows[30:]

    names = "test, train" if kind == "hub" else "train, test"
    with pytest.raises(UsageError, match=f'{names}; pass split="'):
        open_dataset(folder)
    assert read_rows(folder, split="train") == rows[:30]
    assert read_rows(folder, split="test") == rows[30:]
    assert sorted(ids_of(folder, split="all")) == list(range(40))
    with pytest.raises(UsageError, match=f"no split 'validation'; it has: {names}"):
        open_dataset(folder, split="validation")


def test_a_split_goes_by_any_of_its_names_and_a_folder_above_says_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "train"
    folder.mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", make_rows(3))
    assert ids_of(folder) == [0, 1, 2]
    write_jsonl(folder / "train.jsonl", make_rows(3))
    write_jsonl(folder / "dev.jsonl", make_rows(5)[3:])

    assert ids_of(folder, split="validation") == ids_of(folder, split="val") == [3, 4]


# Folders, globs, lists


def test_a_folder_may_mix_formats(tmp_path: Path) -> None:
    rows: Rows = [{"id": index, "text": str(index) + "x"} for index in range(9)]
    write_parquet(tmp_path / "1.parquet", rows[:2])
    compress(write_jsonl(tmp_path / "2.jsonl", rows[2:4]), "gzip")
    (tmp_path / "2.jsonl").unlink()
    write_csv(tmp_path / "3.csv", rows[4:6])
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "4.json").write_text(json.dumps(rows[6:]))

    assert read_rows(tmp_path) == rows


def test_globs_of_any_name_are_sorted_and_names_like_globs_are_names(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        write_jsonl(tmp_path / f"part-{index}.jsonl", [make_rows(3)[index]])
    for pattern in ("part-[0-9].jsonl", "**/part-*"):
        assert ids_of(str(tmp_path / pattern)) == [0, 1, 2]

    first = write_jsonl(tmp_path / "a.data", make_rows(2))
    write_jsonl(tmp_path / "b.data", make_rows(4)[2:])
    second = write_parquet(tmp_path / "b[1]*.parquet", make_rows(4)[2:])

    assert ids_of(str(tmp_path / "*.data")) == [0, 1, 2, 3]
    assert ids_of(second) == [2, 3]
    assert ids_of([second, str(first), first]) == [2, 3, 0, 1, 0, 1]


# A small file is read at once: what its format does not need is not imported.


ELSEWHERE = (
    *("fsspec", "concurrent.futures", "importlib.metadata", "asyncio", "numba"),
    *("csv", "pyarrow.csv", "pyarrow.dataset"),
)
"""What only remote files, CSV, many files or other parts of the package use."""


@pytest.mark.parametrize(
    ("kind", "unused"),
    [
        ("parquet, one row group", ("pyarrow.json", "pyarrow.compute")),
        ("arrow file", ("pyarrow.json", "pyarrow.compute")),
        ("jsonl", ("pyarrow.parquet", "pyarrow.fs")),
    ],
)
def test_a_format_imports_only_what_it_needs(
    tmp_path: Path, kind: str, unused: tuple[str, ...]
) -> None:
    path = write_as(tmp_path, kind, flat_rows(9))
    program = (
        "import sys, json; from fast_axolotl import open_dataset\n"
        f"assert next(iter(open_dataset({str(path)!r}))).num_rows == 9\n"
        f"print(json.dumps([name for name in {(*ELSEWHERE, *unused)!r} if name in sys.modules]))"
    )

    assert json.loads(python_output("-c", program)) == []
