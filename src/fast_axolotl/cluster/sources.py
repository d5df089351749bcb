"""Cut the datasets of a configuration into units that tasks can read on their own.

Rows must be those that Hugging Face's loaders give Axolotl, so these loaders read them, one unit at
a time. JSON lines are cut where their loader cuts them anyway (every 10 MB, at the next line end),
Parquet by row groups; what cannot be cut is one unit a file. The first chunk of the first file
decides the types. What is no file or folder of these formats Axolotl loads as a whole where the job
was started; the rows then go into the job's folder, and on from there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError, FastAxolotlError

_KINDS = ("json", "parquet", "arrow", "csv", "text")
_LINE_BYTES = 64 * 1024
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
_LEAST_UNIT_BYTES, _MOST_UNIT_BYTES = 4 * 1024 * 1024, 64 * 1024 * 1024
_UNITS = 256
"""A dataset is cut into about so many, as long as they are not too small or too large."""
_UNIT_SHARE = 16
"""Of a task's memory, what a unit may have at most."""
_FEW_ROWS = 1000
"""As many as Hugging Face writes at a time: these decide the types of what a function returns."""

_OTHER_TYPE = "has rows with other column types than the first rows of the dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows that are read at once: a file, or a part of one."""

    kind: str
    """A loader of Hugging Face, or ``rows`` of a dataset in the job's folder."""
    path: str
    start: int = 0
    stop: int = -1
    """Bytes of JSON lines, row groups of Parquet, or rows; -1 stands for all of the file."""
    num_bytes: int = 0
    stamp: str = ""
    """What changes when the file does."""

    def __str__(self) -> str:
        if self.stop < 0:
            return self.path
        what = {"json": "bytes", "parquet": "row groups"}.get(self.kind, "rows")
        return f"{self.path} ({what} {self.start:,} to {self.stop:,})"

    def place(self, row: int) -> str:
        """Where people find one of its rows: its line, if these can be counted."""
        if self.kind != "json" or self.stop < 0:
            return f"{self}, row {row + 1:,}"
        with Path(self.path).open("rb") as file:
            blocks = iter(lambda: file.read(min(_LINE_BYTES, self.start - file.tell())), b"")
            before = sum(block.count(b"\n") for block in blocks)
        return f"{self.path}, line {before + row + 1:,}"


def find_units(
    config: Any, cfg: Any, split: str, *, room: int, store: Store, name: str
) -> tuple[Unit, ...]:
    """The units of a dataset, in the order of their rows; ``room`` is the memory of a task."""
    most = min(_MOST_UNIT_BYTES, room // _UNIT_SHARE)

    def size_of(num_bytes: int) -> int:
        return min(most, max(_LEAST_UNIT_BYTES, num_bytes // _UNITS))

    # Of preferences, Axolotl takes what there is to train on, also for tests.
    split = "train" if cfg.rl else split
    try:
        found = None if config.shards else _find_files(config, config.split or split)
        if found is None:
            return _load_whole(config, cfg, split, store, name, size_of)
        kind, files = found
        unit_bytes = size_of(sum(Path(path).stat().st_size for path in files))
        return tuple(unit for path in files for unit in _cut_file(kind, path, unit_bytes, most))
    except FastAxolotlError:
        raise
    except Exception as error:  # noqa: BLE001  Hugging Face and its libraries raise what they like
        raise DataError(
            f"dataset {config.path} cannot be loaded: {error}; check path, ds_type, split and name"
        ) from None


def _find_files(config: Any, split: str) -> tuple[str, list[str]] | None:
    """The loader and the files that Axolotl would give it; ``None`` where that is not known."""
    from axolotl.utils.data import shared
    from datasets import load_dataset_builder

    path = str(config.path)
    if not split.isidentifier() or not Path(path).exists():
        return None  # a slice of a split, or no local file
    kind, data_files = shared.get_dataset_type(config), path
    if Path(path).is_dir():
        data_files = config.data_files
        if not data_files:
            # The first two were written by save_to_disk; a README may configure how to load it.
            special = ("state.json", "dataset_dict.json", "README.md")
            if any(Path(path, name).exists() for name in special):
                return None
            kind = path
    builder = load_dataset_builder(kind, name=config.name, data_files=data_files)
    kind = type(builder).__module__.rpartition(".")[2]
    by_split = builder.config.data_files or {}
    files = [str(file) for file in by_split.get(split, ())]
    is_known = kind in _KINDS and all(Path(file).is_file() for file in files)
    return (kind, files) if files and is_known else None


def _load_whole(
    config: Any, cfg: Any, split: str, store: Store, name: str, unit_bytes: Callable[[int], int]
) -> tuple[Unit, ...]:
    """Axolotl's own loading, with the rows written into the job's folder."""
    from axolotl.utils.data.shared import load_dataset_with_config
    from datasets import Dataset, DatasetDict

    dataset = load_dataset_with_config(config, cfg.hf_use_auth_token, streaming=False)
    if isinstance(dataset, DatasetDict):
        chosen = config.split if config.split in dataset and not cfg.rl else split
        if chosen not in dataset:
            raise DataError(f"dataset {config.path} has no split {split}; set another split:")
        dataset = dataset[chosen]
    if config.shards:
        index = config.get("shards_idx", 0)
        dataset = dataset.shuffle(seed=cfg.seed).shard(num_shards=config.shards, index=index)
    if not isinstance(dataset, Dataset):
        raise DataError(f"dataset {config.path} loads as {type(dataset).__name__}, not Dataset")
    num_bytes = dataset._estimate_nbytes()
    num_units = max(1, -(-num_bytes // unit_bytes(num_bytes)))
    step = max(1, -(-len(dataset) // num_units))
    rows, units = dataset.with_format("arrow"), []
    for start in range(0, len(dataset), step):
        part = f"loaded/{name}-{dataset._fingerprint}-{start:012d}.arrow"
        if not store.exists(part):
            table = rows[start : start + step]
            table = table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
            with store.writing(part) as path, pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, _FEW_ROWS)
        units.append(Unit(kind="rows", path=part, num_bytes=num_bytes // num_units))
    return tuple(units)


def _cut_file(kind: str, path: str, unit_bytes: int, most: int) -> list[Unit]:
    found = Path(path).stat()
    size, stamp = found.st_size, str(found.st_mtime)
    whole = [Unit(kind=kind, path=path, num_bytes=size, stamp=stamp)]
    if size <= unit_bytes:
        return whole
    if kind not in ("json", "parquet") or path.endswith(_COMPRESSED):
        return whole
    with Path(path).open("rb") as file:
        if kind == "json":
            if file.read(1) != b"{":
                return whole
            edges = _line_edges(file, size, unit_bytes, most)
            sizes = [stop - start for start, stop in pairwise(edges)]
        else:
            metadata = pq.ParquetFile(file).metadata
            edges, sizes, held = [0], [], 0
            for group in range(metadata.num_row_groups):
                held += metadata.row_group(group).total_byte_size
                if held >= unit_bytes or group == metadata.num_row_groups - 1:
                    edges.append(group + 1)
                    sizes.append(held)
                    held = 0
    return [
        replace(whole[0], start=start, stop=stop, num_bytes=held)
        for (start, stop), held in zip(pairwise(edges), sizes, strict=True)
    ]


def _line_edges(file: Any, size: int, unit_bytes: int, most: int) -> list[int]:
    """Where the loader's chunks begin: so many bytes, and on to the end of the line."""
    from datasets.packaged_modules.json.json import JsonConfig

    chunk, edges, position = min(JsonConfig().chunksize, most), [0], 0
    while position < size:
        position += chunk
        file.seek(position)
        while position < size:
            data = file.read(_LINE_BYTES)
            end = data.find(b"\n")
            position += len(data) if end < 0 else end + 1
            if end >= 0 or not data:
                break
        position = min(position, size)
        if position - edges[-1] + chunk > unit_bytes or position == size:
            edges.append(position)
    return edges


def read_tables(
    store: Store, unit: Unit, schema: pa.Schema | None
) -> Iterator[tuple[int, pa.Table]]:
    """The rows of a unit, chunk by chunk, under the types of the dataset's first rows.

    Each with the number of its first row.
    """
    from datasets.table import CastError, table_cast

    tables: Iterable[pa.Table] = _load(unit, schema)
    if unit.kind == "rows":
        file = pa.ipc.open_file(store.read(unit.path))
        batches = map(file.get_batch, range(file.num_record_batches))
        tables = (pa.Table.from_batches([batch]) for batch in batches)
    first = 0
    for table in tables:
        schema = table.schema if schema is None else schema
        try:
            yield first, table_cast(table, schema)
        except (CastError, pa.ArrowInvalid, TypeError) as error:
            raise DataError(f"{unit} {_OTHER_TYPE}: {error}") from None
        first += len(table)


def _load(unit: Unit, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """What the loader of Hugging Face makes of a file, or of some lines of one."""
    from datasets import DownloadConfig, DownloadManager, Features, load_dataset_builder

    if unit.kind == "parquet" and unit.stop >= 0:
        groups = range(unit.start, unit.stop)
        for batch in pq.ParquetFile(unit.path).iter_batches(row_groups=groups):
            yield pa.Table.from_batches([batch])
        return
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-") as folder:
        path = Path(unit.path)
        if unit.stop >= 0 or any(mark in unit.path for mark in "*?[]"):  # it would look for files
            with path.open("rb") as file:
                file.seek(unit.start)
                data = file.read(unit.stop - unit.start if unit.stop >= 0 else -1)
            path = Path(folder, f"rows{''.join(path.suffixes[-2:])}")
            path.write_bytes(data)
        files = {"train": [str(path)]}
        builder = load_dataset_builder(unit.kind, data_files=files, cache_dir=folder)
        if schema is not None:
            builder.info.features = Features.from_arrow_schema(schema)
        download = DownloadManager(download_config=DownloadConfig(cache_dir=folder))
        try:
            try:
                [split] = builder._split_generators(download)
            except StopIteration:
                return  # an empty file
            for _, table in builder._generate_tables(**split.gen_kwargs):
                yield table
        except (pa.ArrowInvalid, ValueError, TypeError, OSError, EOFError) as error:
            why = _OTHER_TYPE if isinstance(error, TypeError) else "cannot be read"
            raise DataError(f"{unit} {why}: {error}") from None
