"""Load the datasets of a configuration, and cut them into units that tasks can tokenise.

Axolotl itself loads a dataset, where the job was started, so rows and types are those of ``axolotl
preprocess``: of files, of the Hub, of object stores, of parts of a split. The rows go into the
job's folder, an Arrow file for each unit. How large a unit is follows from the data and the memory
of a task, never from the number of workers. Its name has a digest of its bytes: where a row is
corrected after an error, the tokens of other units are kept.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from itertools import chain
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError

_UNITS = 256
"""A dataset is cut into about so many, as long as they are not too small or too large."""
_LEAST_UNIT_BYTES, _MOST_UNIT_BYTES = 1024 * 1024, 64 * 1024 * 1024
"""The least are about a second of tokenising."""
_UNIT_SHARE = 16
"""Of a task's memory, what a unit may have at most."""
_FEW_ROWS = 64


class Unit(NamedTuple):
    """Rows that are read at once."""

    name: str
    dataset: str
    """Its path in the configuration."""
    first: int
    """The number of its first row in the dataset."""

    def read(self, store: Store) -> pa.Table:
        return pa.ipc.open_file(store.read(f"loaded/{self.name}")).read_all()


def load(config: Any, cfg: Any, split: str) -> Any:
    """A dataset as Axolotl would take it from there."""
    from axolotl.utils.data.shared import load_dataset_with_config
    from datasets import Dataset, DatasetDict

    # Of preferences, Axolotl takes what there is to train on, also for tests.
    split = "train" if cfg.rl else split
    try:
        dataset = load_dataset_with_config(config, cfg.hf_use_auth_token, streaming=False)
    except Exception as error:  # noqa: BLE001  Hugging Face and its libraries raise what they like
        place = ""
        with suppress(OSError, UnicodeError), Path(config.path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    json.loads(line)
                except ValueError:
                    place = f", line {number:,}," if number > 1 else ""  # or it has no lines
                    break
        raise DataError(
            f"dataset {config.path}{place} cannot be loaded: {error.__cause__ or error}; check "
            "path, ds_type, split, name and the rows"
        ) from None
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
    return dataset


def cut(dataset: Any, path: str, *, room: int, store: Store, name: str) -> list[Unit]:
    """The units of a dataset in the order of their rows; ``room`` is the memory of a task.

    A unit ends at a multiple of a power of two, so that one row more bytes moves few edges. Those
    that are tokenised already are not written again.
    """
    num_bytes = max(1, dataset._estimate_nbytes())
    most = max(1, min(_MOST_UNIT_BYTES, room // _UNIT_SHARE))
    unit_bytes = min(max(_LEAST_UNIT_BYTES, num_bytes // _UNITS), most)
    step = 1 << int(log2(max(1.0, unit_bytes * len(dataset) / num_bytes)))
    metadata = dataset.features.arrow_schema.metadata
    there, done = store.sizes("loaded"), store.sizes("tokenise")
    units, held, size, first, row = list[Unit](), list[pa.Table](), 0, 0, 0
    for table in chain(dataset.with_format("arrow").iter(min(step, _FEW_ROWS)), [None]):
        if held and (table is None or row % step == 0 or size >= most):
            rows = pa.concat_tables(held).combine_chunks().replace_schema_metadata(metadata)
            with pa.BufferOutputStream() as sink:
                with pa.ipc.new_file(sink, rows.schema) as writer:
                    writer.write_table(rows)
                data = sink.getvalue()
            digest = hashlib.sha256(data).hexdigest()[:12]
            unit = Unit(f"{name}-{len(units):07d}-{digest}", path, first)
            if unit.name not in there and f"{unit.name}.json" not in done:
                with store.writing(f"loaded/{unit.name}") as beside:
                    beside.write_bytes(data)
            units.append(unit)
            held, size, first = [], 0, row
        if table is not None:
            held.append(table)
            size += table.nbytes
            row += len(table)
    return units
