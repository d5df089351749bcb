"""Rows, and files that hold them in every format and compression."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from fast_axolotl import open_dataset
from fast_axolotl.reading.remote import SourceFile
from fast_axolotl.reading.storage import Source

Rows = list[dict[str, Any]]

SMALL_BUDGET = 16 * 1024 * 1024
"""The least memory budget: blocks of 512 KiB, so that files of a few MB have several."""

COMPRESSIONS = {
    "none": "",
    "gzip": ".gz",
    "zstd": ".zst",
    "bz2": ".bz2",
    "xz": ".xz",
    "lz4": ".lz4",
}


def make_rows(count: int, text_bytes: int = 40) -> Rows:
    """Rows with text, numbers and nested values, all different."""
    filler = 'wörd, "quoted" and\nnew line; ' * (text_bytes // 28 + 1)
    return [
        {
            "id": index,
            "text": f"{index} {filler[index % 13 :][:text_bytes]}",
            "score": index / 8,
            "good": index % 3 == 0,
            "messages": [
                {"role": role, "content": f"{role} says {index}"}
                for role in ("user", "assistant")[: index % 3]
            ],
            "tokens": list(range(index % 5)),
        }
        for index in range(count)
    ]


def flat_rows(count: int, text_bytes: int = 40) -> Rows:
    """The columns of ``make_rows`` that a CSV file can hold."""
    return [
        {name: row[name] for name in ("id", "text", "score")}
        for row in make_rows(count, text_bytes)
    ]


def read_rows(path: Any, **options: Any) -> Rows:
    """All rows of a dataset."""
    return [row for batch in open_dataset(path, **options) for row in batch.to_pylist()]


def parquet_bytes(rows: Rows | pa.Table, **settings: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(_table(rows), sink, **settings)
    return sink.getvalue()


def arrow_bytes(
    rows: Rows | pa.Table,
    form: Callable[..., Any] = pa.ipc.new_file,
    batch_rows: int = 700,
    compression: str | None = None,
) -> bytes:
    sink, table = io.BytesIO(), _table(rows)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with form(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue()


def feather_bytes(rows: Rows | pa.Table, compression: str = "lz4", **settings: Any) -> bytes:
    sink = io.BytesIO()
    pa.feather.write_feather(_table(rows), sink, compression=compression, **settings)
    return sink.getvalue()


def jsonl_bytes(rows: Sequence[Any], *, ensure_ascii: bool = False) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=ensure_ascii).encode() + b"\n" for row in rows)


def _table(rows: Rows | pa.Table) -> pa.Table:
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)


def lay_out(root: Path, files: Mapping[str, str | bytes]) -> None:
    """Files below a folder, by their paths."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The lengths of all that is read from files while it lasts, also by pyarrow itself."""
    lengths: list[int] = []
    read_at, open_arrow, lock = Source.read_at, Source.open_arrow, threading.Lock()

    def counted(source: Source, offset: int, length: int) -> bytes:
        data = read_at(source, offset, length)
        with lock:
            lengths.append(len(data))
        return data

    def opened(source: Source, ahead: int = 0, *, is_mapped: bool = False) -> pa.NativeFile:
        if is_mapped or source.content is not None:
            return open_arrow(source, ahead, is_mapped=is_mapped)
        return pa.PythonFile(SourceFile(source), "r")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "read_at", counted)
        patch.setattr(Source, "open_arrow", opened)
        yield lengths


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_bytes(jsonl_bytes(rows, ensure_ascii=True))
    return path


def csv_bytes(rows: Rows, **dialect: Any) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, **dialect)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return sink.getvalue().encode()


def write_csv(path: Path, rows: Rows, **dialect: Any) -> Path:
    path.write_bytes(csv_bytes(rows, **dialect))
    return path


def write_parquet(path: Path, rows: Rows, row_group_size: int | None = None) -> Path:
    path.write_bytes(parquet_bytes(rows, row_group_size=row_group_size))
    return path


def write_arrow(path: Path, rows: Rows, form: Callable[..., Any], batch_rows: int = 700) -> Path:
    path.write_bytes(arrow_bytes(rows, form, batch_rows))
    return path


WRITERS: dict[str, tuple[str, Callable[[Rows], bytes]]] = {
    "parquet, small row groups": (".parquet", partial(parquet_bytes, row_group_size=300)),
    "parquet, one row group": (".parquet", parquet_bytes),
    "arrow file": (".arrow", arrow_bytes),
    "arrow stream": (".arrow", partial(arrow_bytes, form=pa.ipc.new_stream)),
    "feather lz4": (".feather", feather_bytes),
    "json array": (".json", lambda rows: json.dumps(rows, indent=1).encode()),
    "json objects": (
        ".json",
        lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows).encode(),
    ),
    "jsonl": (".jsonl", partial(jsonl_bytes, ensure_ascii=True)),
    "csv": (".csv", csv_bytes),
    "text": (".txt", lambda rows: "\n".join(row["text"] for row in rows).encode()),
}
"""Format to its suffix and its writer."""


def rows_for(kind: str, count: int) -> Rows:
    """Rows that a file of this kind can hold."""
    if kind == "text":
        return [{"text": f"line {number}"} for number in range(count)]
    return flat_rows(count) if kind == "csv" else make_rows(count)


def write_as(folder: Path, kind: str, rows: Rows, compression: str = "none") -> Path:
    """Rows in one of the ``WRITERS``' formats, compressed as a whole."""
    suffix, make = WRITERS[kind]
    path = folder / f"rows{suffix}"
    path.write_bytes(make(rows))
    return compress(path, compression)


def compress(path: Path, compression: str) -> Path:
    """The file compressed beside itself, in two members as ``cat`` would join them."""
    if compression == "none":
        return path
    target, data = path.with_name(path.name + COMPRESSIONS[compression]), path.read_bytes()
    half = len(data) // 2
    target.write_bytes(squeeze(data[:half], compression) + squeeze(data[half:], compression))
    return target


def squeeze(data: bytes, compression: str) -> bytes:
    if compression == "none":
        return data
    if compression == "gzip":
        return gzip.compress(data, mtime=0)
    if compression in ("bz2", "xz"):
        return bz2.compress(data) if compression == "bz2" else lzma.compress(data)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, compression) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()
