"""Where the rows of a configuration come from, cut into units that anybody can read alone.

Rows must be those that Hugging Face's loaders give Axolotl, so these loaders read them, one unit at
a time. A file of JSON lines is cut where its loader cuts it anyway (every 10 MB, at the next line
end): each chunk is parsed on its own there, too. Parquet files are cut by row groups; whatever
cannot be cut is one unit a file, read as a stream. As with Hugging Face, the first chunk of the
first file decides the types.

What this does not know (names of the Hub, slices of splits, ``shards``) Axolotl loads as a whole on
the machine where the job was started; the rows then go into the job's folder, and on from there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError, FastAxolotlError

_KINDS = ("json", "parquet", "arrow", "csv", "text")
_LINE_BYTES = 64 * 1024
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.stop < 0:
            return self.path
        what = {"json": "bytes", "parquet": "row groups"}.get(self.kind, "rows")
        return f"{self.path} ({what} {self.start:,} to {self.stop:,})"

    def place(self, row: int) -> str:
        """Where people find one of its rows: its line, if these can be counted."""
        if self.kind != "json" or self.stop < 0 or "://" in self.path:
            return f"{self}, row {row + 1:,}"
        with Path(self.path).open("rb") as file:
            blocks = iter(lambda: file.read(min(_LINE_BYTES, self.start - file.tell())), b"")
            before = sum(block.count(b"\n") for block in blocks)
        return f"{self.path}, line {before + row + 1:,}"


def find_units(
    config: Any, cfg: Any, split: str, *, unit_bytes: int, store: Store, name: str
) -> tuple[Unit, ...]:
    """The units of a dataset, in the order of their rows."""
    # Of preferences, Axolotl takes what there is to train on, also for tests.
    split = "train" if cfg.rl else split
    try:
        found = None if config.shards else _find_files(config, config.split or split)
        if found is None:
            return _load_whole(config, cfg, split, store, name)
        kind, files = found
        with ThreadPoolExecutor(16) as pool:
            cut = pool.map(lambda path: _cut_file(kind, path, unit_bytes), files)
            return tuple(unit for units in cut for unit in units)
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

    path, options = str(config.path), {}
    if not split.isidentifier():
        return None  # a slice of a split
    kind, data_files = shared.get_dataset_type(config), path
    if path.startswith("s3://"):
        filesystem, options["storage_options"] = shared._get_remote_filesystem(path)
        if not filesystem.isfile(path):
            return None
    elif not Path(path).exists():
        return None
    elif Path(path).is_dir():
        data_files = config.data_files
        if not data_files:
            # The first two were written by save_to_disk; a README may configure how to load it.
            special = ("state.json", "dataset_dict.json", "README.md")
            if any(Path(path, name).exists() for name in special):
                return None
            kind = path
    builder = load_dataset_builder(kind, name=config.name, data_files=data_files, **options)
    kind = type(builder).__module__.rpartition(".")[2]
    by_split = builder.config.data_files or {}
    if kind not in _KINDS or split not in by_split:
        return None
    return kind, [str(file) for file in by_split[split]]


def _load_whole(config: Any, cfg: Any, split: str, store: Store, name: str) -> tuple[Unit, ...]:
    """Axolotl's own loading, with the rows written into the job's folder."""
    from axolotl.utils.data.shared import load_dataset_with_config
    from datasets import Dataset, DatasetDict

    folder = f"loaded/{name}"
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
    stamp = dataset._fingerprint
    known = store.exists(f"{folder}/units.json") and store.read_json(f"{folder}/units.json")
    if not known or known[0]["stamp"] != stamp:
        known = []
        step = max(1, len(dataset) // max(1, -(-dataset._estimate_nbytes() // (32 << 20))))
        rows = dataset.with_format("arrow")
        for start in range(0, len(dataset), step):
            part = f"{folder}/{start:012d}.arrow"
            table = rows[start : start + step]
            table = table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
            with store.writing(part) as path, pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, _FEW_ROWS)
            unit = Unit(kind="rows", path=part, num_bytes=table.nbytes, stamp=stamp)
            known.append(unit.to_json())
        store.write_json(f"{folder}/units.json", known)
    return tuple(Unit(**unit) for unit in known)


def _cut_file(kind: str, path: str, unit_bytes: int) -> list[Unit]:
    filesystem, plain = fsspec.core.url_to_fs(path)
    info = filesystem.info(plain)
    size = int(info["size"])
    stamp = str(info.get("ETag") or info.get("mtime") or info.get("LastModified") or size)
    whole = [Unit(kind=kind, path=path, num_bytes=size, stamp=stamp)]
    if size <= unit_bytes:
        return whole
    with filesystem.open(plain, "rb") as file:
        if kind == "parquet":
            units = _cut_groups(pq.ParquetFile(file).metadata, path, unit_bytes)
        elif kind != "json" or path.endswith(_COMPRESSED) or not file.read(1).startswith(b"{"):
            return whole
        else:
            units = _cut_lines(file, path, size, unit_bytes)
    return [replace(unit, stamp=stamp) for unit in units]


def _cut_groups(metadata: Any, path: str, unit_bytes: int) -> list[Unit]:
    units, start, held = [], 0, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= unit_bytes or group == metadata.num_row_groups - 1:
            units.append(
                Unit(kind="parquet", path=path, start=start, stop=group + 1, num_bytes=held)
            )
            start, held = group + 1, 0
    return units


def _cut_lines(file: Any, path: str, size: int, unit_bytes: int) -> list[Unit]:
    """Chunks as the loader makes them: so many bytes, and on to the end of the line."""
    from datasets.packaged_modules.json.json import JsonConfig

    chunk, units, start, position = min(JsonConfig().chunksize, unit_bytes), [], 0, 0
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
        if position - start + chunk > unit_bytes or position == size:
            held = position - start
            units.append(Unit(kind="json", path=path, start=start, stop=position, num_bytes=held))
            start = position
    return units


def read_tables(store: Store, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """The rows of a unit, chunk by chunk, under the types of the dataset's first rows."""
    from datasets.table import CastError, table_cast

    if unit.kind == "rows":
        with store.reading(unit.path) as path, pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                yield pa.Table.from_batches([reader.get_batch(index)])
        return
    with _fetched(unit) as path:
        for table in _load(unit, path, schema):
            try:
                yield table if schema is None else table_cast(table, schema)
            except (CastError, pa.ArrowInvalid, TypeError) as error:
                raise DataError(f"{unit} {_OTHER_TYPE}: {error}") from None


@contextmanager
def _fetched(unit: Unit) -> Iterator[Path]:
    """A file of this machine that holds the unit's bytes."""
    is_local = "://" not in unit.path
    is_plain = not any(mark in unit.path for mark in "*?[]")  # the loader would look for files
    if is_local and is_plain and (unit.stop < 0 or unit.kind == "parquet"):
        yield Path(unit.path)
        return
    filesystem, plain = fsspec.core.url_to_fs(unit.path)
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-") as folder:
        copy = Path(folder, f"rows{''.join(Path(plain).suffixes[-2:])}")
        if unit.stop < 0 or unit.kind == "parquet":
            filesystem.get_file(plain, str(copy))
        else:
            copy.write_bytes(filesystem.cat_file(plain, start=unit.start, end=unit.stop))
        yield copy


def _load(unit: Unit, path: Path, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """What the loader of Hugging Face makes of a file."""
    from datasets import DownloadConfig, DownloadManager, Features, load_dataset_builder

    if unit.kind == "parquet" and unit.stop >= 0:
        with pq.ParquetFile(path) as file:
            for group in range(unit.start, unit.stop):
                for batch in file.iter_batches(row_groups=[group]):
                    yield pa.Table.from_batches([batch])
        return
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-") as cache:
        files = {"train": [str(path)]}
        builder = load_dataset_builder(unit.kind, data_files=files, cache_dir=cache)
        if schema is not None:
            builder.info.features = Features.from_arrow_schema(schema)
        download = DownloadManager(download_config=DownloadConfig(cache_dir=cache))
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
