"""Cache what a pass over files has found: row counts, CSV record edges, the schema.

Parquet tells its number of rows. Others are counted once, in threads, at reading speed: JSON and
text by line ends or elements alone; CSV, Arrow, and anything under ``on_error="skip"`` by decoding,
since rejected rows do not count. Results lie in the user's cache folder, some kB for each dataset,
named by a hash of all that they depend on: path, size and version of each file, and the options.
Nothing is removed: the folder may be deleted at any time.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Dataset, Unit, decode_or_reject
from fast_axolotl.reading.schema import schema_of, schema_text
from fast_axolotl.system import usable_cores

_VERSION = 5
"""Changes when an entry comes to mean something else."""

_memory: dict[str, Any] = {}


def unit_rows(dataset: Dataset) -> dict[Unit, int]:
    """The number of rows of each unit; units whose files do not tell it are counted together."""
    # What metadata tells includes rows that turn out to be damaged.
    is_told = dataset.options.on_error == "raise"
    rows = {unit: unit.num_rows if is_told else None for unit in dataset.units()}
    if unknown := [unit for unit, num_rows in rows.items() if num_rows is None]:
        cuts = [(unit.file, unit.start, unit.stop) for unit in unknown]
        count = partial(_count, dataset)
        counts = _kept(["rows", cuts], dataset, lambda: _in_threads(count, unknown), is_told)
        rows.update(zip(unknown, counts, strict=True))
    return rows  # type: ignore[return-value]


def scanned_schema(dataset: Dataset, scan: Callable[[], pa.Schema]) -> pa.Schema:
    """The schema that a scan of these files under these options finds: kept, or found now."""
    return schema_of(_kept(["schema"], dataset, lambda: schema_text(scan())))


def with_csv_edges(dataset: Dataset, is_cut: bool = True) -> Dataset:
    """The dataset with each plain CSV file that is larger than a unit cut into units, or none."""
    options = dataset.options

    def edges_of(file: Any) -> list[int]:
        edges: list[int] = []
        is_plain = hasattr(file, "edges") and file.compression is None
        if is_plain and file.source.num_bytes > options.unit_bytes:
            with suppress(*[DataError] if options.on_error == "skip" else []):
                edges = file.find_edges()
        return edges

    if all(file.format != "csv" for file in dataset.files):
        return dataset
    files: list[Any] = list(dataset.files)
    found: list[list[int]] = [[]] * len(files)
    if is_cut:
        found = _kept(["edges"], dataset, lambda: _in_threads(edges_of, files))
    for index, edges in enumerate(found):
        if hasattr(files[index], "edges"):
            files[index] = replace(files[index], edges=tuple(edges) or None)
    return replace(dataset, files=tuple(files))


def _in_threads(call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor  # most readers never count

    with ThreadPoolExecutor(min(8, usable_cores())) as threads:
        return list(threads.map(call, items))


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


def _kept(what: list[Any], dataset: Dataset, make: Callable[[], Any], may_last: bool = True) -> Any:
    """What was found before for these files and options, or is found now: plain JSON."""
    sources = [source for file in dataset.files for source in file.sources]
    # A relative path means another file elsewhere. Links are not followed.
    paths = [os.path.abspath(s.path) if s.is_local else s.identity for s in sources]  # noqa: PTH100
    files = [(path, s.num_bytes, s.version, s.keys) for path, s in zip(paths, sources, strict=True)]
    formats = [file.format for file in dataset.files]
    depends_on = (_VERSION, pa.__version__, what, dataset.options, files, formats)
    name = f"{what[0]}-{hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]}"
    may_last &= all(each.version for each in sources)
    if name not in _memory and may_last:
        with suppress(OSError, ValueError):
            _memory[name] = json.loads((_folder() / name).read_bytes())
    if name not in _memory:
        entry = _memory[name] = make()
        if may_last:
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
