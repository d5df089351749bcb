"""Write a file that appears complete or not at all.

Rows go to a hidden file beside the target, which is renamed over it at the end. It is removed after
an error, an interrupt or SIGTERM, and by the next writer of that target if its process was killed.
Parquet, Arrow (the file form) and JSON lines, the last also with gzip or zstd around it.

JSON lines are made by Python and are the slow one. Dates, times and decimals become text there;
bytes have no form in JSON and are refused. Dictionary columns are written as plain ones, since an
Arrow file holds one dictionary for each and no more.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.errors import DataError, MissingFileError, UsageError
from fast_axolotl.reading import convert, format_of_name

GROUP_BYTES = 32 * 1024 * 1024
"""A Parquet row group is written when so much has come together; writing holds about twice that."""

_ENDINGS = ".parquet, .arrow, .feather, .jsonl, .jsonl.gz or .jsonl.zst"


def check_target(path: Path, *, overwrite: bool) -> None:
    """Everything about a target that can be known before the work begins."""
    if ":/" in str(path):
        raise UsageError(f"output {path} is not a local path; write to a local file, then copy it")
    _writer_for(path)
    if path.is_dir():
        raise UsageError(f"output {path} is a folder; pass a file name that ends in {_ENDINGS}")
    if path.exists() and not overwrite:
        raise UsageError(
            f"output {path} already exists; pass overwrite=True (--overwrite) to replace it, or "
            "choose another name"
        )
    if not path.parent.is_dir():
        raise MissingFileError("the output folder does not exist; create it", path=str(path))


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What a full disk, or a format that lacks a type, says: as an error that names the file."""
    try:
        yield
    except DataError:  # a missing file is an OSError too
        raise
    except OSError as error:
        raise DataError(
            f"writing failed ({error.strerror or error}); free disk space or choose another disk, "
            "and run the same again",
            path=str(path),
        ) from error
    except pa.ArrowException as error:
        raise DataError(
            f"this file format cannot store the columns ({error}); choose another file ending, or "
            "other columns",
            path=str(path),
        ) from error


@contextlib.contextmanager
def whole_file(
    path: Path, schema: pa.Schema, group_bytes: int
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """A function that writes batches to a file, which is there at the end of the block."""
    stem = f".{path.name}.{platform.node()}."
    beside = path.with_name(f"{stem}{os.getpid()}.partial")
    for other in path.parent.glob(f"{glob.escape(stem)}*.partial"):
        with contextlib.suppress(OSError, ValueError, OverflowError):
            try:
                os.kill(int(other.name[len(stem) :].removesuffix(".partial")), 0)
            except ProcessLookupError:
                other.unlink()
    is_main = threading.current_thread() is threading.main_thread()
    # Else somebody decides what it does.
    is_default = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_default:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    ]
    plain = pa.schema(fields, metadata=schema.metadata)
    try:
        with disk_errors(path):
            writer = _writer_for(path, group_bytes)(beside, plain)

        def write(batch: pa.RecordBatch) -> None:
            columns = [
                column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
                for column in batch.columns
            ]
            with disk_errors(path):
                writer.write(pa.RecordBatch.from_arrays(columns, schema=plain))

        try:
            yield write
        except BaseException:
            with contextlib.suppress(OSError, pa.ArrowException):
                writer.close()
            raise
        with disk_errors(path):
            writer.close()
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
        if is_default:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _writer_for(path: Path, group_bytes: int = GROUP_BYTES) -> Callable[[Path, pa.Schema], Any]:
    """What makes a writer of batches, with ``write`` and ``close``, for a path and a schema."""
    kind, compression = format_of_name(path.name)
    if kind == "jsonl" and compression in (None, "gzip", "zstd"):
        return lambda target, _: _JsonLines(target, compression)
    if kind == "parquet" and compression is None:
        return lambda target, schema: ParquetWriter(target, schema, group_bytes)
    if kind in ("arrow", "feather") and compression is None:
        return lambda target, schema: pa.ipc.new_file(str(target), schema)
    raise UsageError(f"output {path} has an unknown file ending; use {_ENDINGS}")


class ParquetWriter:
    """A Parquet file with row groups of about so many bytes, however small the batches are."""

    def __init__(self, path: Path, schema: pa.Schema, group_bytes: int = GROUP_BYTES) -> None:
        self._group_bytes = group_bytes
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= self._group_bytes:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting)
            self._waiting, self._waiting_bytes = [], 0
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))


class _JsonLines:
    def __init__(self, path: Path, compression: str | None) -> None:
        self._file = pa.output_stream(str(path), compression=compression)
        self._encode = json.JSONEncoder(ensure_ascii=False, default=_as_text).encode

    def write(self, batch: pa.RecordBatch) -> None:
        columns = convert(batch, "python")
        rows = zip(*columns.values(), strict=True)
        lines = [self._encode(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
        self._file.write("".join(lines).encode())

    def close(self) -> None:
        self._file.close()


def _as_text(value: Any) -> str:
    """What JSON has no form for."""
    if isinstance(value, bytes):
        raise UsageError(
            f"a row holds bytes ({value[:20]!r}), which JSON cannot store; write .parquet or "
            ".arrow instead"
        )
    return str(value)
