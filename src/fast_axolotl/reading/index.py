"""Cache what a pass over a file has found: row counts, CSV record edges, the schema.

Parquet tells its number of rows. Others are counted once, in threads, at reading speed: JSON and
text by line ends or elements alone; CSV, Arrow, and anything under ``on_error="skip"`` by decoding,
since rejected rows do not count. Results lie in the user's cache folder, some kB for each file,
named by a hash of all that they depend on: path, size and version of the file, how it is cut, and
the options that change rows. Nothing is removed: the folder may be deleted at any time.

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
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Dataset, InputFile, Unit, decode_or_reject
from fast_axolotl.system import usable_cores

_VERSION = 2
"""Changes when an entry comes to mean something else."""

_PASSING = "passing-"
"""Begins the name of what depends on a file without a version: it is kept in memory only."""

_Entry = dict[str, Any]
_Result = TypeVar("_Result")
_memory: dict[str, _Entry] = {}


def unit_rows(dataset: Dataset) -> dict[Unit, int]:
    """The number of rows of each unit; units whose files do not tell it are counted together."""
    options = dataset.options
    # What metadata tells includes rows that turn out to be damaged.
    is_told = options.on_error == "raise"
    # Under "skip" a damaged column hides rows, but only where it is read.
    choices = (options.on_error, astuple(options.csv), None if is_told else options.columns)
    rows: dict[Unit, int] = {}
    uncounted: list[tuple[str, list[Unit]]] = []
    for index, (item, file) in enumerate(zip(dataset.inputs, dataset.formats, strict=True)):
        units = file.units(index)
        rows |= {unit: unit.num_rows or 0 for unit in units}
        if is_told and all(unit.num_rows is not None for unit in units):
            continue
        name = _name("rows", [item], choices, [(unit.start, unit.stop) for unit in units])
        entry = _load(name)
        if entry is None:
            uncounted.append((name, units))
        else:
            rows |= dict(zip(units, entry["rows"], strict=True))
    todo = [unit for _, units in uncounted for unit in units]
    counts = dict(zip(todo, _in_threads(partial(_count, dataset), todo), strict=True))
    for name, units in uncounted:
        of_file = [counts[unit][0] for unit in units]
        _store(name, {"rows": of_file}, is_final=all(counts[unit][1] for unit in units))
        rows |= dict(zip(units, of_file, strict=True))
    return rows


def scanned_schema(dataset: Dataset, scan: Callable[[], pa.Schema]) -> pa.Schema:
    """The schema that a scan of these files under these options finds: kept, or found now."""
    options = dataset.options
    choices = (options.on_error, options.columns)
    name = _name("schema", dataset.inputs, choices, astuple(options.csv), pa.__version__)
    entry = _load(name)
    if entry is None:
        entry = {"schema": b64encode(scan().serialize().to_pybytes()).decode()}
        _store(name, entry)
    return pa.ipc.read_schema(pa.py_buffer(b64decode(entry["schema"])))


def with_csv_edges(dataset: Dataset, is_cut: bool = True) -> Dataset:
    """The dataset with each plain CSV file that is larger than a unit cut into units, or none."""
    if all(item.format != "csv" for item in dataset.inputs):
        return dataset
    options = dataset.options

    def cut(item: InputFile, file: Any) -> Any:
        if not hasattr(file, "edges") or item.source.num_bytes <= options.unit_bytes:
            return file
        if not is_cut or file.compression is not None:
            return replace(file, edges=None)
        name = _name("edges", [item], astuple(file.dialect), options.unit_bytes)
        entry = _load(name)
        if entry is None:
            try:
                entry = {"edges": file.find_edges()}
            except DataError:
                if options.on_error == "raise":
                    raise
                return replace(file, edges=None)
            _store(name, entry)
        return replace(file, edges=entry["edges"] and tuple(entry["edges"]))

    formats = _in_threads(cut, dataset.inputs, dataset.formats)
    return replace(dataset, formats=tuple(formats))


def _in_threads(function: Callable[..., _Result], *arguments: Sequence[Any]) -> list[_Result]:
    from concurrent.futures import ThreadPoolExecutor  # most readers never count

    if not arguments[0]:
        return []
    with ThreadPoolExecutor(min(8, usable_cores())) as pool:
        return list(pool.map(function, *arguments))


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


def _load(name: str) -> _Entry | None:
    if name not in _memory and not name.startswith(_PASSING):
        with suppress(OSError, ValueError):
            _memory[name] = json.loads((_folder() / name).read_bytes())
    return _memory.get(name)


def _store(name: str, entry: _Entry, *, is_final: bool = True) -> None:
    _memory[name] = entry
    if not is_final or name.startswith(_PASSING):
        return
    with suppress(OSError):  # it is not kept then
        _folder().mkdir(parents=True, exist_ok=True)
        part = _folder() / f"{name}.{os.getpid()}-{threading.get_ident()}.part"
        part.write_text(json.dumps(entry), encoding="utf-8")
        part.replace(_folder() / name)


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # noqa: PTH117 - the rule for this variable
        caches = os.path.expanduser("~/.cache")  # noqa: PTH111
    # Without a home this lies in the root, where only root can write.
    return Path("/", caches, "fast-axolotl", "index")
