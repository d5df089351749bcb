"""What happens when the data is not what it should be: one clear error, or the right rows.

Every error in this file goes through ``assert_tells``, which wants the file, the place, and what to
do about it, on one line, and an exception that survives pickling.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import pickle
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fast_axolotl import Reader, open_dataset, streaming_dataset_reader
from fast_axolotl.errors import AccessError, DataError, FastAxolotlError, MissingFileError
from fast_axolotl.reading import storage
from support import files
from support.files import (
    COMPRESSIONS,
    SMALL_BUDGET,
    Rows,
    arrow_bytes,
    csv_bytes,
    feather_bytes,
    jsonl_bytes,
    parquet_bytes,
    read_rows,
    squeeze,
)
from support.golden import check_calls

CURES = (
    "again|check|convert|download|fix|make|must be|pass|re(ad|compress|move|name|place|write)|use"
)
"""One of these is in every message: the reader of it is told what to do."""


def assert_tells(error: BaseException | None, path: object = "", place: str = "") -> None:
    """The message names the file, the place and a cure; nothing else is printed last."""
    message = str(error)
    assert isinstance(error, FastAxolotlError)
    assert str(path) in message
    assert re.search(rf"\b({CURES})\b", message), f"no cure: {message}"
    assert "\n" not in message
    if place:
        assert place in message
        assert isinstance(error, DataError)
        assert place in error.place
    printed = "".join(traceback.format_exception(error)).rstrip().splitlines()[-1]
    assert printed == f"{type(error).__module__}.{type(error).__qualname__}: {message}"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), message)
    assert vars(again) == {name: value for name, value in vars(error).items() if name[0] != "_"}


@contextmanager
def refusal(
    kind: type[Exception], path: object = "", place: str = "", *, match: str = ""
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The error that must come, and what it must tell."""
    with pytest.raises(kind, match=match or None) as caught:
        yield caught
    assert_tells(caught.value, path, place)


def rows_in(reader: Reader) -> Rows:
    return [row for batch in reader for row in batch.to_pylist()]


read = partial(read_rows, num_threads=1)


def read_until_error(
    path: Any, batch_size: int = 1, after_first: Callable[[], object] | None = None, **options: Any
) -> tuple[Rows, DataError | None]:
    """The rows that came and the error that ended them; something may happen after a batch."""
    rows: Rows = []
    try:
        reader = open_dataset(path, num_threads=1, batch_size=batch_size, **options)
        for index, batch in enumerate(reader):
            rows += batch.to_pylist()
            if index == 0 and after_first is not None:
                after_first()
    except DataError as error:
        assert_tells(error, path)
        return rows, error
    return rows, None


def rows_of(count: int) -> Rows:
    return [{"id": index, "text": f"rów {index}"} for index in range(count)]


GOOD_LINES = jsonl_bytes(rows_of(3))


as_csv = partial(csv_bytes, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
as_parquet = partial(parquet_bytes, row_group_size=5)
as_stream = partial(arrow_bytes, form=pa.ipc.new_stream, batch_rows=5)

FORMATS: dict[str, tuple[str, Callable[[Rows], bytes]]] = {
    "parquet": ("parquet", as_parquet),
    "arrow-file": ("arrow", partial(arrow_bytes, batch_rows=5)),
    "arrow-stream": ("arrow", as_stream),
    "feather": ("feather", partial(feather_bytes, chunksize=5)),
    "json": ("json", lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode()),
    "jsonl": ("jsonl", jsonl_bytes),
    "csv": ("csv", as_csv),
    "text": ("txt", lambda rows: "".join(f"{row['text']}\n" for row in rows).encode()),
}


def write(folder: Path, name: str, rows: Rows, compression: str = "none") -> Path:
    ending, make = FORMATS[name]
    path = folder / f"rows.{ending}{COMPRESSIONS[compression]}"
    path.write_bytes(squeeze(make(rows), compression))
    return path


def expected(name: str, rows: Rows) -> Rows:
    return [{"text": row["text"]} for row in rows] if name == "text" else rows


# Files that are not there, or may not be read


def test_what_is_not_there_is_a_missing_file(tmp_path: Path) -> None:
    absent, link, empty = (tmp_path / name for name in ("absent.jsonl", "link.jsonl", "empty"))
    link.symlink_to(absent)
    empty.mkdir()
    for path in (absent, tmp_path / "*.parquet", tmp_path / "no" / "folder", empty):
        with refusal(MissingFileError, path) as caught:
            open_dataset(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, RuntimeError)
    with refusal(MissingFileError, link):
        open_dataset(link)
    with refusal(MissingFileError, absent):
        open_dataset([write(tmp_path, "jsonl", rows_of(2)), absent])


def test_a_file_without_permission_is_an_access_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "jsonl", rows_of(2))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # nothing is denied to the superuser
    with refusal(AccessError, path) as caught:
        open_dataset(path)
    assert isinstance(caught.value, PermissionError)


# Files that are empty, cut off or misnamed


@pytest.mark.parametrize("is_whole", [False, True], ids=["no bytes", "compressed nothing"])
@pytest.mark.parametrize("compression", ["none", "gzip", "xz"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_file(tmp_path: Path, name: str, compression: str, is_whole: bool) -> None:
    path = write(tmp_path, name, [{"id": 0, "text": ""}], compression)
    path.write_bytes(squeeze(b"", compression) if is_whole else b"")
    if name in ("jsonl", "text") and (is_whole or compression == "none"):
        assert read(path) == []
        return
    with refusal(DataError, path, "byte 0"):
        read(path)


def cuts(size: int) -> list[int]:
    """Every byte of the magic, then every tenth."""
    return sorted({*range(min(size, 12)), *range(0, size, 10), size - 1})


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore::fast_axolotl.reading.FormatWarning")
def test_a_file_cut_anywhere_gives_an_error_and_no_wrong_row(
    tmp_path: Path, name: str, compression: str
) -> None:
    rows = rows_of(9)
    path = write(tmp_path, name, rows, compression)
    data, whole = path.read_bytes(), expected(name, rows)
    for cut in cuts(len(data)):
        path.write_bytes(data[:cut])
        found, error = read_until_error(path)
        may_be_whole = compression == "none" and name in ("jsonl", "csv", "text")
        if error is None:
            assert may_be_whole, f"cut at byte {cut} of {len(data)}: no error, {len(found)} rows"
        if name in ("csv", "text") and may_be_whole and found and found[-1] not in whole:
            # A last line that is cut inside its last value cannot be told from a whole one.
            for key, value in found.pop().items():
                assert str(whole[len(found)][key]).startswith(str(value or ""))
        assert found == whole[: len(found)], f"cut at byte {cut} of {len(data)}"


def test_content_that_is_refused_is_named_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def read_as(name: str, content: str | bytes) -> Rows:
        files.lay_out(tmp_path, {name: content})
        return read(name)

    check_calls("contents", read=read_as, good=GOOD_LINES, parquet_bytes=parquet_bytes)
    assert csv.field_size_limit() == 128 * 1024  # which is one for the whole process


# Damage inside binary files

PLAIN_PAGES = {"compression": "none", "use_dictionary": False, "write_statistics": False}
LENGTH_AND_TEXT = b"\x07\x00\x00\x00r\xc3\xb3w 12"
BAD_TEXT = ("rów 12".encode(), b"r\xff\xffw 12", "UTF")


@pytest.mark.parametrize(
    ("name", "place", "old", "new", "reason"),
    [
        ("parquet", "row group 2", LENGTH_AND_TEXT, b"\xff\xff\xff\x7f" + b"\xff" * 7, "corrupt"),
        ("parquet", "row group 2", *BAD_TEXT),
        ("arrow-file", "record batch 2", *BAD_TEXT),
        ("arrow-stream", "record batch 2", *BAD_TEXT),
    ],
)
def test_a_damaged_part_of_a_binary_file_is_named_and_can_be_skipped(
    tmp_path: Path, name: str, place: str, old: bytes, new: bytes, reason: str
) -> None:
    path = write(tmp_path, name, rows_of(20))
    if name == "parquet":
        path.write_bytes(as_parquet(rows_of(20), **PLAIN_PAGES))
    path.write_bytes(path.read_bytes().replace(old, new))
    rows, error = read_until_error(path)
    assert rows == rows_of(20)[: len(rows)]
    assert_tells(error, path, place)
    assert reason in str(error)
    if name != "parquet":
        return  # so few rows of an Arrow file are read, and skipped, together
    reader = open_dataset(path, on_error="skip")
    assert rows_in(reader) == rows_of(10) + rows_of(20)[15:]
    (rejection,) = reader.stats.rejections
    assert (rejection.path, rejection.place) == (str(path), place)
    assert rejection.num_rows == reader.stats.rejected_rows == 5
    assert reason in rejection.reason


def test_a_damaged_footer_does_not_abort_the_process(tmp_path: Path) -> None:
    """Where levels and histograms disagree, an accessor of pyarrow lets a C++ exception pass."""
    path = tmp_path / "rows.parquet"
    data = as_parquet([{"ids": [1]}, {"ids": [2, 3]}])
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    outcomes = set()
    for place in range(footer, len(data) - 8):
        path.write_bytes(data[:place] + b"\x16" + data[place + 1 :])
        rows, error = read_until_error(path)
        outcomes.add(len(rows) if error is None else "error")
    assert outcomes >= {2, "error"}


def test_a_compressed_record_batch_past_the_budget_is_named_with_its_size(tmp_path: Path) -> None:
    path, table = tmp_path / "rows.arrow", pa.table({"text": ["x" * 1000] * 20_000})
    for batch_rows in (20_000, 1000):
        path.write_bytes(arrow_bytes(table, batch_rows=batch_rows, compression="zstd"))
        told = pytest.warns(UserWarning, match=r"rows\.arrow: record batch 0 takes 19 MiB.*fewer")
        with told if batch_rows == 20_000 else nullcontext():
            assert len(read_rows(path, memory_budget=SMALL_BUDGET)) == 20_000


def test_an_arrow_stream_without_its_end_is_an_error_after_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "arrow-stream", rows_of(20))
    path.write_bytes(path.read_bytes()[:-8])
    rows, error = read_until_error(path)
    assert rows == rows_of(20)
    assert_tells(error, path, "after record batch")
    reader = open_dataset(path, on_error="skip")
    assert rows_in(reader) == rows_of(20)
    assert len(reader.stats.rejections) == 1


# Damage inside text files


def with_bad_line(name: str, rows: Rows, index: int, line: bytes) -> tuple[bytes, int]:
    """The file with one line put before a row, and the number of that line."""
    lines = FORMATS[name][1](rows).splitlines(keepends=True)
    header = 1 if name == "csv" else 0
    lines.insert(index + header, line)
    return b"".join(lines), index + header + 1


BAD_UTF8 = {"jsonl": b'{"id": 1, "text": "\xff"}\n', "csv": b'1,"a\xff"\n', "text": b"a\xffb\n"}

BAD_LINES = [
    *(("jsonl", line, "malformed") for line in (b'{"id": 1, "text": }\n', b"plain words\n")),
    *(("jsonl", line, "malformed") for line in (b'{"id": 1, "text": "a"\n', b"{'id': 1}\n")),
    ("jsonl", b'{"id": 1} {"id": 2}\n', "malformed JSON: Extra data"),
    *(("jsonl", line, "expected a JSON object") for line in (b"[1, 2]\n", b"7\n", b"null\n")),
    ("jsonl", b'{"text": "\\ud800"}\n', "surrogate without its other half"),
    *(("jsonl", line, "too large") for line in (b'{"id": 1e999}\n', b'{"id": -1e999}\n')),
    *(("csv", line, "expected 2 fields") for line in (b"1\n", b"1,a,b\n", b'1,"a","b",c\n')),
    *((name, line, "invalid UTF-8") for name, line in BAD_UTF8.items()),
]


@pytest.mark.parametrize(("name", "line", "reason"), BAD_LINES, ids=repr)
def test_a_bad_line_is_named_and_can_be_skipped(
    tmp_path: Path, name: str, line: bytes, reason: str
) -> None:
    rows, compression = rows_of(30), "gzip" if line.startswith((b"7", b"1,a", b"a")) else "none"
    path = write(tmp_path, name, rows, compression)
    # The first line of JSON lines may be cut, too: it says nothing about the format.
    data, number = with_bad_line(name, rows, 0 if line.endswith(b'"a"\n') else 17, line)
    path.write_bytes(squeeze(data, compression))
    with refusal(DataError, path, f"line {number}", match=reason):
        read(path)
    reader = open_dataset(path, on_error="skip")
    assert rows_in(reader) == expected(name, rows)
    (rejection,) = reader.stats.rejections
    assert (rejection.path, rejection.place) == (str(path), f"line {number}")
    assert reason in rejection.reason
    assert rejection.num_rows == reader.stats.rejected_rows == 1


# Damage to compressed streams


@pytest.mark.parametrize(
    ("name", "compression"), [("jsonl", "xz"), ("csv", "gzip"), ("text", "zstd"), ("json", "gzip")]
)
def test_a_cut_compressed_stream_gives_its_whole_blocks_and_a_rejection(
    tmp_path: Path, name: str, compression: str
) -> None:
    """Several blocks, so that some of them come before the damage."""
    rows = [{"id": index, "text": f"{index * 7919 % 65536:x} " * 40} for index in range(8000)]
    path = write(tmp_path, name, rows, compression)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 9 // 10])
    found, error = read_until_error(path, 1000, memory_budget=SMALL_BUDGET)
    assert_tells(error, path)
    assert "corrupt or truncated" in str(error)
    reader = open_dataset(path, on_error="skip", memory_budget=SMALL_BUDGET)
    kept = rows_in(reader)
    assert kept == expected(name, rows)[: len(kept)]
    assert len(kept) >= len(found)
    assert len(kept) > 1000
    assert [item.num_rows for item in reader.stats.rejections] == [None]
    assert reader.stats.rejected_files == {reader.stats.rejections[0].path} == {str(path)}


# Files that change while they are read

CHANGING = ["jsonl", "parquet", "arrow-file", "arrow-stream", "csv", "text"]


def large_file(folder: Path, name: str) -> tuple[Path, Rows]:
    """More than is read ahead under the least budget, so that the change meets unread bytes."""
    rows = [{"id": index, "text": f"{index:08}" + "x" * 40_000} for index in range(800)]
    ending, make = FORMATS[name]
    if name == "parquet":
        make = partial(parquet_bytes, row_group_size=20, **PLAIN_PAGES)
    elif name.startswith("arrow"):
        make = partial(make, batch_rows=20)
    path = folder / f"rows.{ending}"
    path.write_bytes(make(rows))
    return path, rows


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name in CHANGING
        for change in ("shrinks", "is replaced", "grows")
        if change != "shrinks" or "arrow" not in name  # which ends the process
    ],
)
def test_a_file_that_changes_while_it_is_read_gives_no_wrong_row(
    tmp_path: Path, name: str, change: str
) -> None:
    path, rows = large_file(tmp_path, name)
    shorter = tmp_path / "shorter"
    shorter.write_bytes(path.read_bytes()[: 1000 * 1000])

    def grow() -> None:
        with path.open("ab") as file:
            file.write(b"more" * 1000)

    changes: dict[str, Callable[[], object]] = {
        "shrinks": lambda: os.truncate(path, path.stat().st_size // 2),
        "is replaced": lambda: shorter.replace(path),
        "grows": grow,
    }
    found, error = read_until_error(path, 10, changes[change], memory_budget=SMALL_BUDGET)
    assert found == expected(name, rows)[: len(found)]
    assert len(found) >= 10
    if error is None:
        assert change == "grows" or name in ("arrow-file", "arrow-stream", "csv")
        assert len(found) == len(rows), "the old file stays open, and is read to its end"


# Copies on disk


def test_a_copy_on_disk_has_no_name_and_is_read_in_forked_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet.gz"
    path.write_bytes(squeeze(parquet_bytes(rows_of(9)), "gzip"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    reader = open_dataset(path)
    assert list(temporary.iterdir()) == []
    for _ in range(2):
        assert rows_in(reader) == rows_of(9)
    child = multiprocessing.get_context("fork").Process(target=rows_in, args=(reader,))
    child.start()
    child.join(30)
    assert child.exitcode == 0


@pytest.mark.parametrize("ending", ["jsonl", "json.gz", "csv.gz"])
def test_a_record_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Before it fills the memory, and before it is decompressed to its end."""
    monkeypatch.setattr(storage, "MOST_RECORD_BYTES", 4 * 1024**2)
    start = {"jsonl": b'{"a": 1}\n{"a": "', "json": b'[{"a": "', "csv": b'a,b\n1,"'}
    data = start[ending.partition(".")[0]] + b"x" * (40 * 1024**2)
    compression = {"zst": "zstd", "gz": "gzip"}.get(ending.partition(".")[2])
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(data if compression is None else squeeze(data, compression))
    with refusal(DataError, path, "byte", match="one row has more than 4,194,304 bytes"):
        read(path, memory_budget=SMALL_BUDGET)


# Folders written by save_to_disk


def saved_dataset(folder: Path) -> Path:
    name = "data-00000-of-00001.arrow"
    state = json.dumps({"_data_files": [{"filename": name}], "_split": "train"})
    of_rows = {name: as_stream(rows_of(9))}
    files.lay_out(folder, of_rows | {"state.json": state, "dataset_info.json": "{}"})
    return folder


def test_a_saved_dataset_may_name_only_files_and_folders_of_its_own(tmp_path: Path) -> None:
    """Whoever made the folder chooses which files are read: never those of the reader."""
    folder = saved_dataset(tmp_path / "saved")
    saved_dataset(tmp_path / "other")
    (tmp_path / "secret.arrow").write_bytes(as_stream(rows_of(3)))

    def check(index: str, content: Any, match: str) -> None:
        (folder / index).write_text(json.dumps(content))
        with refusal(DataError, folder, match=match):
            read(folder)

    for name in ("../secret.arrow", "sub/../../secret.arrow", str(tmp_path / "secret.arrow")):
        check("state.json", {"_data_files": [{"filename": name}]}, re.escape(repr(name)))
    mapping = {"_indices_data_files": [{"filename": "indices.arrow"}]}
    files = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    check("state.json", {**files, **mapping}, "flatten_indices")
    lists = (None, [{}], ["data.arrow"], [{"filename": 7}])
    for state in ("", [], 7, *({"_data_files": names} for names in lists)):
        check("state.json", state, r"state\.json.*corrupt")
    (folder / "state.json").write_bytes(b"\xff")
    with refusal(DataError, folder / "state.json", match="corrupt"):
        read(folder)
    for name in ("..", "../other", "/etc", "a/b", ""):
        check("dataset_dict.json", {"splits": [name]}, re.escape(repr(name)))


# Values


def test_a_date_that_python_cannot_express_is_refused_as_python(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet_bytes(pa.table({"when": pa.array([2**30], pa.date32())})))
    with refusal(DataError, match=r"'when'.*output=.arrow"):
        list(streaming_dataset_reader(str(path), "parquet"))
    (batch,) = streaming_dataset_reader(str(path), "parquet", output="arrow")
    assert batch.num_rows == 1


def test_types_that_pyarrow_cannot_handle_are_refused_when_opening(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", "b"]))
    kinds = pa.array([0, 0, 1], pa.int8())
    union = pa.UnionArray.from_sparse(kinds, [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])])
    path = tmp_path / "rows.arrow"
    for values in (runs, union):
        path.write_bytes(as_stream(pa.table({"odd": values})))
        with refusal(DataError, path, "schema", match="'odd'"):
            open_dataset(path)


def test_views_and_dictionaries_can_be_shuffled(tmp_path: Path) -> None:
    """Polars writes its text columns so, and pyarrow has no kernel to take from views."""
    words = [f"a text that is longer than twelve bytes {index}" for index in range(50)]
    table = pa.table(
        {
            "text": pa.array(words, pa.string_view()),
            "list": pa.array([[word] for word in words], pa.list_(pa.string_view())),
            "kind": pa.array(["x", "y", None, "x", None] * 10).dictionary_encode(),
        }
    )
    path = tmp_path / "rows.arrow"
    for form in (pa.ipc.new_file, pa.ipc.new_stream):
        path.write_bytes(arrow_bytes(table, form))
        rows = read(path, shuffle=1)
        assert rows != table.to_pylist() == read(path)
        assert sorted(rows, key=lambda row: words.index(row["text"])) == table.to_pylist()
