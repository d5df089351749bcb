"""Cache what a pass over a file has found: row counts, CSV record edges, the schema.

Parquet tells its number of rows. Others are counted once, in threads, at reading speed: JSON and
text by line ends or elements alone; CSV, Arrow, and anything under ``on_error="skip"`` by decoding,
since rejected rows do not count. Results lie in the user's cache folder, some kB for each file,
named by a hash of all that they depend on: path, size and version of the file, how it is cut, and
the options that change rows. Nothing is removed: the folder may be deleted at any time.

Processes that need the same result at once each build it. A damaged one is built again. Where the
folder cannot be written, or a remote file has no version, results last as long as the process; so
do counts under ``on_error="skip"``. Does not notice a file that changes and keeps both its size and
its time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Dataset, InputFile, Unit, decode_or_reject
from fast_axolotl.reading.schema import schema_of, schema_text
from fast_axolotl.system import usable_cores

_VERSION = 4
"""Changes when an entry comes to mean something else."""

_memory: dict[str, Any] = {}


def unit_rows(dataset: Dataset) -> dict[Unit, int]:
    """The number of rows of each unit; units whose files do not tell it are counted together."""
    options = dataset.options
    # What metadata tells includes rows that turn out to be damaged.
    is_told = options.on_error == "raise"
    # Under "skip" a damaged column hides rows, but only where it is read.
    choices = (options.on_error, astuple(options.csv), None if is_told else options.columns)

    def count_file(index: int) -> list[tuple[Unit, int]]:
        units = dataset.formats[index].units(index)
        if is_told and all(unit.num_rows is not None for unit in units):
            return [(unit, unit.num_rows or 0) for unit in units]
        cuts = [(unit.start, unit.stop) for unit in units]
        counts = _kept(
            ("rows", choices, cuts),
            [dataset.inputs[index]],
            lambda: list(of_units.map(partial(_count, dataset), units)),
            may_last=is_told,
        )
        return list(zip(units, counts, strict=True))

    # Files wait for their units, so these need threads of their own.
    with _threads() as of_files, _threads() as of_units:
        counted = of_files.map(count_file, range(len(dataset.inputs)))
        return dict(pair for of_file in counted for pair in of_file)


def scanned_schema(dataset: Dataset, scan: Callable[[], pa.Schema]) -> pa.Schema:
    """The schema that a scan of these files under these options finds: kept, or found now."""
    options = dataset.options
    depends_on = ("schema", options.on_error, options.columns, astuple(options.csv), pa.__version__)
    text = _kept(depends_on, dataset.inputs, lambda: schema_text(scan()))
    return schema_of(text)


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
        depends_on = ("edges", astuple(file.dialect), options.unit_bytes)
        try:
            edges = _kept(depends_on, [item], file.find_edges)
        except DataError:
            if options.on_error == "raise":
                raise
            edges = None
        return replace(file, edges=edges and tuple(edges))

    with _threads() as threads:
        formats = tuple(threads.map(cut, dataset.inputs, dataset.formats))
    return replace(dataset, formats=formats)


def _threads() -> Any:
    from concurrent.futures import ThreadPoolExecutor  # most readers never count

    return ThreadPoolExecutor(min(8, usable_cores()))


def _count(dataset: Dataset, unit: Unit) -> int:
    """The rows of a unit."""
    options = dataset.options

    def count(block: Block) -> int:
        if options.on_error == "raise" and block.count is not None:
            return block.count()
        decoded = decode_or_reject(block, None, options)
        rows, more = int(decoded.table.num_rows), decoded.more
        del decoded  # or a part would be held while the next ones are decoded
        return rows + sum(map(count, more))

    return sum(map(count, dataset.blocks(unit)))


def _kept(
    depends_on: Any,
    items: Sequence[InputFile],
    make: Callable[[], Any],
    may_last: bool = True,
) -> Any:
    """What was found before for these files and options, or is found now: plain JSON."""
    files, sources = [], [(item, part) for item in items for part in item.source.parts]
    for item, source in sources:
        # A relative path means another file elsewhere. Links are not followed.
        path = os.path.abspath(source.path) if source.is_local else source.identity  # noqa: PTH100
        version = f"{source.version} {source.keys}" if source.keys else source.version
        files.append((path, source.num_bytes, version, item.format, item.compression))
    text = json.dumps((_VERSION, files, depends_on)).encode()
    name = f"{depends_on[0]}-{hashlib.sha256(text).hexdigest()[:32]}"
    can_be_kept = may_last and all(source.version for _, source in sources)
    if name not in _memory and can_be_kept:
        with suppress(OSError, ValueError):
            _memory[name] = json.loads((_folder() / name).read_bytes())
    if name not in _memory:
        entry = _memory[name] = make()
        if can_be_kept:
            with suppress(OSError):  # it is not kept then
                _folder().mkdir(parents=True, exist_ok=True)
                part = _folder() / f"{name}.{os.getpid()}-{threading.get_ident()}.part"
                part.write_text(json.dumps(entry), encoding="utf-8")
                part.replace(_folder() / name)
    return _memory[name]


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # noqa: PTH117 - the rule for this variable
        caches = os.path.expanduser("~/.cache")  # noqa: PTH111
    # Without a home this lies in the root, where only root can write.
    return Path("/", caches, "fast-axolotl", "index")
