"""What one pass over a file has told, kept for the next: rows of its units, CSV edges, the schema.

Parquet tells its number of rows. Others are counted once, in threads, at reading speed: JSON and
text by line ends or elements alone; CSV, Arrow, and anything under ``on_error="skip"`` by decoding,
since rejected rows do not count. Results lie in the user's cache folder, some kB for each file,
named by a hash of all that they depend on: path, size and version of the file, how it is cut, and
the options that change rows. Those not used for 90 days are removed.

Processes that need the same result at once wait for the one that builds it. A damaged one is built
again. Where the folder cannot be written, or a remote file has no version, results last as long as
the process; so does a count that lacks a part which could not be read. Does not notice a file that
changes and keeps both its size and its time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Dataset, InputFile, Unit, decode_or_reject
from fast_axolotl.reading.lines import Lines
from fast_axolotl.system import usable_cores

if TYPE_CHECKING:
    from fast_axolotl.reading.csv_files import CsvFile

__all__ = ["csv_edges", "known_schema", "unit_rows", "with_csv_edges"]

_VERSION = 1
"""Changes when an entry comes to mean something else."""

_KEEP_SECONDS = 90 * 86_400
_BLANK = re.compile(rb"[^\S\n]*(\n|\Z)")
_PASSING = "passing-"
"""Begins the name of what depends on a file without a version: it is kept in memory only."""

_Entry = dict[str, Any]
_memory: dict[str, _Entry] = {}


def unit_rows(
    dataset: Dataset, units: Sequence[Unit], *, index_dir: Path | None = None
) -> list[int]:
    """The number of rows of each unit, or span of neighbouring units.

    A file whose metadata does not tell is counted as a whole, unless its index exists.
    """
    from concurrent.futures import ThreadPoolExecutor  # most readers never count

    num_threads, options, stopped = min(8, usable_cores()), dataset.options, threading.Event()
    # What metadata tells includes rows that turn out to be damaged.
    is_told = options.on_error == "raise"
    files = sorted({unit.file for unit in units if unit.num_rows is None or not is_told})
    # Under "skip" a damaged column hides rows, but only where it is read.
    columns = options.columns if options.on_error == "skip" else None
    choices = (options.on_error, options.json_field, astuple(options.csv), columns)

    def index(file: int) -> tuple[list[int], list[int]]:
        cut = dataset.formats[file].units(file)

        def build() -> tuple[_Entry, bool]:
            with ThreadPoolExecutor(-(-num_threads // len(files))) as pool:
                counts = list(pool.map(lambda unit: _count(dataset, unit, stopped), cut))
            return {"rows": [rows for rows, _ in counts]}, all(final for _, final in counts)

        spans = [(unit.start, unit.stop) for unit in cut]
        name = _name("rows", [dataset.inputs[file]], choices, spans)
        entry = _built(name, build, index_dir)
        return [start for start, _ in spans], [0, *accumulate(entry["rows"])]

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            indices = dict(zip(files, pool.map(index, files), strict=True))
        finally:
            stopped.set()  # an error, or an interrupt, does not wait for the rest

    def rows_of(unit: Unit) -> int:
        starts, rows_before = indices[unit.file]
        first, last = (bisect_left(starts, edge) for edge in (unit.start, unit.stop))
        return rows_before[last] - rows_before[first]

    return [
        unit.num_rows if is_told and unit.num_rows is not None else rows_of(unit) for unit in units
    ]


def known_schema(
    dataset: Dataset,
    scan: Callable[[], pa.Schema] | None = None,
    *,
    index_dir: Path | None = None,
) -> pa.Schema | None:
    """The final schema of these files under these options: kept, or by ``scan`` where given."""
    name = _schema_name(dataset)
    entry = _load(name, index_dir)
    if scan is not None:

        def build() -> tuple[_Entry, bool]:
            return {"schema": b64encode(scan().serialize().to_pybytes()).decode()}, True

        entry = _built(name, build, index_dir)
    return entry and pa.ipc.read_schema(pa.py_buffer(b64decode(entry["schema"])))


def _schema_name(dataset: Dataset) -> str:
    options = dataset.options
    choices = (options.on_error, options.on_conflict, options.json_field, options.columns)
    return _name("schema", dataset.inputs, choices, astuple(options.csv), pa.__version__)


def csv_edges(file: CsvFile, *, index_dir: Path | None = None) -> list[int] | None:
    """``CsvFile.find_edges``, kept: where stretches begin; ``None`` where it cannot be cut."""
    if file.compression is not None or file.dialect.escape is not None:
        return None
    item = InputFile(source=file.source, format="csv", compression=None)
    name = _name("edges", [item], astuple(file.dialect), file.options.unit_bytes)
    entry = _built(name, lambda: ({"edges": file.find_edges()}, True), index_dir)
    return cast("list[int] | None", entry["edges"])


def with_csv_edges(
    dataset: Dataset, is_cut: bool = True, *, index_dir: Path | None = None
) -> Dataset:
    """The dataset with each plain CSV file that is larger than a unit cut into units, or none."""
    if all(item.format != "csv" for item in dataset.inputs):
        return dataset

    def cut(at: int) -> Any:
        file, source = cast(Any, dataset.formats[at]), dataset.inputs[at].source
        if not hasattr(file, "edges") or source.num_bytes <= dataset.options.unit_bytes:
            return file
        edges = None
        with suppress(*[DataError] * (dataset.options.on_error == "skip")):
            edges = csv_edges(file, index_dir=index_dir) if is_cut else None
        return replace(file, edges=None if edges is None else tuple(edges))

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(8, usable_cores())) as pool:
        return replace(dataset, formats=tuple(pool.map(cut, range(len(dataset.formats)))))


def _count(dataset: Dataset, unit: Unit, stopped: threading.Event) -> tuple[int, bool]:
    """The rows of a unit, and whether as many can be expected the next time."""
    options, rows, is_final = dataset.options, 0, True
    names = getattr(dataset.formats[unit.file], "names", ())
    parts: list[Iterator[Block]] = [dataset.blocks(unit)]
    while parts:
        block = next(parts[-1], None)
        if stopped.is_set():
            raise InterruptedError
        if block is None:
            parts.pop()
        elif options.on_error == "raise" and hasattr(block, "load") and not block.text_wins:
            rows += _count_text(block.load())
        else:
            # CSV is decoded as text, which spares the search for numbers.
            schema = pa.schema([(name, pa.string()) for name in names]) if block.text_wins else None
            decoded = decode_or_reject(block, schema, options)
            rows += decoded.table.num_rows
            is_final &= all(rejection.num_rows == 1 for rejection in decoded.rejections)
            parts.append(iter(decoded.more))
    return rows, is_final


def _count_text(rows: Any) -> int:
    """Lines of text, elements of a JSON document, or lines of JSON that are not blank."""
    if not isinstance(rows, Lines) and rows.count is not None:
        return int(rows.count)
    raw = np.frombuffer(rows.data, dtype=np.uint8)[rows.start : rows.stop]
    starts = np.append(0, np.flatnonzero(raw == ord("\n")) + 1)
    starts = starts[starts < len(raw)]
    if isinstance(rows, Lines):
        return len(starts)
    doubtful = (starts[raw[starts] <= ord(" ")] + rows.start).tolist()
    return len(starts) - sum(_BLANK.match(rows.data, at, rows.stop) is not None for at in doubtful)


def _name(kind: str, items: Sequence[InputFile], *depends_on: Any) -> str:
    files, is_passing = [], False
    for item in items:
        source, version = item.source, item.source.version
        path = source.identity
        if source.remote is None:
            path = os.path.abspath(path)  # noqa: PTH100 - as it is called
            with suppress(OSError):
                version += f" {Path(path).stat().st_mtime_ns}"
        is_passing |= not version
        files.append((path, source.num_bytes, version, item.format, item.compression))
    text = json.dumps((_VERSION, files, depends_on)).encode()
    return f"{_PASSING * is_passing}{kind}-{hashlib.sha256(text).hexdigest()[:32]}"


def _folder(index_dir: Path | None) -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    # Without a home this lies in the root, where only root can write.
    return index_dir or Path("/", caches, "fast-axolotl", "index")


def _built(name: str, build: Callable[[], tuple[_Entry, bool]], index_dir: Path | None) -> _Entry:
    """An entry, loaded where possible, else built by one process while others wait."""
    entry, lock = _load(name, index_dir), None
    if entry is not None:
        return entry
    path = _folder(index_dir) / f"{name}.lock"
    with suppress(ImportError, OSError):  # without locks every process builds for itself
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        entry = _load(name, index_dir)
        if entry is None:
            entry, is_final = build()
            _keep(name, entry, index_dir, is_final=is_final)
        return entry
    finally:
        if lock is not None:
            with suppress(OSError), lock:
                path.unlink(missing_ok=True)  # those who wait have it open
                # A child forked meanwhile has it open too: closing alone would not free it.
                fcntl.flock(lock, fcntl.LOCK_UN)


def _load(name: str, index_dir: Path | None) -> _Entry | None:
    path = _folder(index_dir) / name
    with suppress(OSError):
        if name not in _memory and not name.startswith(_PASSING):
            digest, _, text = path.read_bytes().partition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() == digest:
                _memory[name] = json.loads(text)
                os.utime(path)  # when it was last used
    return _memory.get(name)


def _keep(name: str, entry: _Entry, index_dir: Path | None, *, is_final: bool = True) -> None:
    """Keeps an entry in memory, and in the folder where that is possible."""
    _memory[name] = entry
    folder, text = _folder(index_dir), json.dumps(entry).encode()
    if is_final and not name.startswith(_PASSING):
        beside = folder / f"{name}.{secrets.token_hex(4)}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            beside.replace(folder / name)
            _prune(folder)


@cache
def _prune(folder: Path) -> None:
    """Removes what is old, once in a process."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEEP_SECONDS:
                path.unlink()
