"""What one pass over a file has told, kept for the next: rows of its units, CSV edges, the schema.

Parquet tells its number of rows. Others are counted once, in threads, at reading speed: JSON and
text by line ends or elements alone; CSV, Arrow, and anything under ``on_error="skip"`` by decoding,
since rejected rows do not count. Results lie in the user's cache folder, some kB for each file,
named by a hash of all that they depend on: path, size and version of the file, how it is cut, and
the options that change rows. What was not used for ``_KEPT_DAYS`` is removed.

Processes that need the same result at once each build it. A damaged one is built again. Where the
folder cannot be written, or a remote file has no version, results last as long as the process; so
does a count that lacks a part which could not be read. Does not notice a file that changes and
keeps both its size and its time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Dataset, InputFile, Unit, decode_or_reject
from fast_axolotl.system import usable_cores

_VERSION = 2
"""Changes when an entry comes to mean something else."""

_KEPT_DAYS = 30
_PASSING = "passing-"
"""Begins the name of what depends on a file without a version: it is kept in memory only."""

_Entry = dict[str, Any]
_memory: dict[str, _Entry] = {}


def unit_rows(dataset: Dataset, units: Sequence[Unit]) -> list[int]:
    """The number of rows of each unit, or span of neighbouring units.

    A file whose metadata does not tell is counted as a whole, unless its index exists.
    """
    from concurrent.futures import ThreadPoolExecutor  # most readers never count

    num_threads, options = min(8, usable_cores()), dataset.options
    # What metadata tells includes rows that turn out to be damaged.
    is_told = options.on_error == "raise"
    files = sorted({unit.file for unit in units if unit.num_rows is None or not is_told})
    # Under "skip" a damaged column hides rows, but only where it is read.
    columns = options.columns if options.on_error == "skip" else None
    choices = (options.on_error, astuple(options.csv), columns)

    def index(file: int) -> tuple[list[int], list[int]]:
        cut = dataset.formats[file].units(file)

        def build() -> tuple[_Entry, bool]:
            with ThreadPoolExecutor(-(-num_threads // len(files))) as pool:
                counts = list(pool.map(lambda unit: _count(dataset, unit), cut))
            return {"rows": [rows for rows, _ in counts]}, all(final for _, final in counts)

        spans = [(unit.start, unit.stop) for unit in cut]
        name = _name("rows", [dataset.inputs[file]], choices, spans)
        return [start for start, _ in spans], [0, *accumulate(_built(name, build)["rows"])]

    with ThreadPoolExecutor(num_threads) as pool:
        indices = dict(zip(files, pool.map(index, files), strict=True))

    def rows_of(unit: Unit) -> int:
        starts, rows_before = indices[unit.file]
        first, last = (bisect_left(starts, edge) for edge in (unit.start, unit.stop))
        return rows_before[last] - rows_before[first]

    return [
        unit.num_rows if is_told and unit.num_rows is not None else rows_of(unit) for unit in units
    ]


def known_schema(dataset: Dataset, scan: Callable[[], pa.Schema] | None = None) -> pa.Schema | None:
    """The final schema of these files under these options: kept, or by ``scan`` where given."""
    options = dataset.options
    choices = (options.on_error, options.columns)
    name = _name("schema", dataset.inputs, choices, astuple(options.csv), pa.__version__)
    if scan is None:
        entry = _load(name)
    else:
        entry = _built(
            name, lambda: ({"schema": b64encode(scan().serialize().to_pybytes()).decode()}, True)
        )
    return entry and pa.ipc.read_schema(pa.py_buffer(b64decode(entry["schema"])))


def with_csv_edges(dataset: Dataset, is_cut: bool = True) -> Dataset:
    """The dataset with each plain CSV file that is larger than a unit cut into units, or none."""
    if all(item.format != "csv" for item in dataset.inputs):
        return dataset
    options = dataset.options

    def cut(item: InputFile, file: Any) -> Any:
        if not hasattr(file, "edges") or item.source.num_bytes <= options.unit_bytes:
            return file
        edges = None
        if is_cut and file.compression is None:
            name = _name("edges", [item], astuple(file.dialect), options.unit_bytes)
            try:
                edges = _built(name, lambda: ({"edges": file.find_edges()}, True))["edges"]
            except DataError:
                if options.on_error == "raise":
                    raise
        return replace(file, edges=None if edges is None else tuple(edges))

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(8, usable_cores())) as pool:
        return replace(dataset, formats=tuple(pool.map(cut, dataset.inputs, dataset.formats)))


def _count(dataset: Dataset, unit: Unit) -> tuple[int, bool]:
    """The rows of a unit, and whether as many can be expected the next time."""
    options, is_final = dataset.options, True
    names = getattr(dataset.formats[unit.file], "names", ())
    # CSV is decoded as text, which spares the search for numbers.
    texts = pa.schema([(name, pa.string()) for name in names])

    def count(block: Block) -> int:
        nonlocal is_final
        if options.on_error == "raise" and block.count is not None:
            return block.count()
        decoded = decode_or_reject(block, texts if block.text_wins else None, options)
        is_final &= all(rejection.num_rows == 1 for rejection in decoded.rejections)
        rows, more = int(decoded.table.num_rows), decoded.more
        del decoded  # or a part would be held while the next ones are decoded
        return rows + sum(map(count, more))

    return sum(map(count, dataset.blocks(unit))), is_final


def _name(kind: str, items: Sequence[InputFile], *depends_on: Any) -> str:
    files, is_passing = [], False
    for item in items:
        source = item.source
        # A relative path means another file elsewhere. Links are not followed.
        path = os.path.abspath(source.path) if source.is_local else source.identity  # noqa: PTH100
        is_passing |= not source.version
        files.append((path, source.num_bytes, source.version, item.format, item.compression))
    text = json.dumps((_VERSION, files, depends_on)).encode()
    return f"{_PASSING * is_passing}{kind}-{hashlib.sha256(text).hexdigest()[:32]}"


def _built(name: str, build: Callable[[], tuple[_Entry, bool]]) -> _Entry:
    """An entry, loaded where possible."""
    entry = _load(name)
    if entry is None:
        entry, is_final = build()
        _memory[name] = entry
        if is_final and not name.startswith(_PASSING):
            with suppress(OSError):  # it is not kept then
                _keep(_folder() / name, entry)
    return entry


def _load(name: str) -> _Entry | None:
    if name not in _memory and not name.startswith(_PASSING):
        with suppress(OSError, ValueError):
            _memory[name] = json.loads((_folder() / name).read_bytes())
            os.utime(_folder() / name)
    return _memory.get(name)


def _keep(path: Path, entry: _Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.write_text(json.dumps(entry), encoding="utf-8")
    part.replace(path)
    for other in path.parent.iterdir():
        with suppress(OSError):  # another process was faster
            if other.stat().st_mtime < time.time() - _KEPT_DAYS * 86_400:
                other.unlink()


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # noqa: PTH117 - the rule for this variable
        caches = os.path.expanduser("~/.cache")  # noqa: PTH111
    # Without a home this lies in the root, where only root can write.
    return Path("/", caches, "fast-axolotl", "index")
