"""``axolotl preprocess`` in units: the same rows in the same order, whoever makes them.

    find the units ── tokenise ── order ── split, unique ── deal ── write ── rename
                       (tasks)     (here)    (tasks, for dedupe)   (tasks)

The first rows of every dataset that are kept decide the types, as with ``Dataset.map``, and show a
wrong field before hours are spent. The order is Axolotl's: its ``merge_datasets`` runs on
row numbers in place of rows. Of repeated rows the first in that order stays.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.data import count_shards, saved_notes
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.tokenized_shards import describe
from fast_axolotl.cluster import shards
from fast_axolotl.cluster.engines import Answer
from fast_axolotl.cluster.first_rows import find_repeated, most_rows
from fast_axolotl.cluster.job import Heard, Job, JobSummary, Output
from fast_axolotl.cluster.sources import Unit, find_units, read_tables
from fast_axolotl.cluster.stock import Pipeline, load_configuration
from fast_axolotl.cluster.store import Store
from fast_axolotl.dedupe.seen import fresh_secret
from fast_axolotl.errors import DataError, UsageError

MIB = 1024 * 1024
_HOST_BYTES = 768 * MIB
"""What a process takes that has imported Axolotl and done nothing."""
_LEAST_ROOM = 256 * MIB
_CHUNK_BYTES = 10 * MIB
"""Of JSON lines, as Hugging Face parses them."""
_MOST_UNIT_BYTES = 64 * MIB
_MOST_PIECE_BYTES = 128 * MIB
_PROBED_ROWS, _MOST_PROBED_ROWS = 1000, 100_000
_PASSING_KEYS = {"output_dir", "dataset_prepared_path"}
_DISK_ROW_BYTES = 72
"""For the numbers, places and digests of a row."""
_PRELOAD = ("fast_axolotl.cluster.shards", "axolotl.utils.data.sft", "axolotl.utils.data.rl")


@dataclass(slots=True, kw_only=True)
class _Split:
    """One prepared dataset: ``datasets:``, or ``test_datasets:``."""

    name: str
    configs: list[Any]
    place: Output
    sources: list[tuple[Unit, ...]] = field(default_factory=list)
    raw: list[pa.Schema] = field(default_factory=list)
    final: Any = None
    needed_bytes: float = 0.0
    """On disk, as estimated from the first rows."""

    @property
    def units(self) -> Iterator[tuple[int, str, Unit]]:
        """All units with the number of their dataset and a name: another where a file changed."""
        for index, units in enumerate(self.sources):
            for number, unit in enumerate(units):
                stamp = hashlib.sha256(repr(unit).encode()).hexdigest()[:8]
                yield index, f"{index:03d}-{number:07d}-{stamp}", unit


def prepare(
    config: str,
    *,
    overrides: Mapping[str, Any],
    memory: int,
    output: str | None,
    work: str | None,
    heard: Heard,
    restart: bool = False,
    **engine: Any,
) -> JobSummary:
    """Writes the prepared dataset of a configuration where ``axolotl train`` looks for it.

    Args:
        config: Axolotl's YAML file.
        overrides: Keys of the configuration that are set otherwise, as on Axolotl's command line.
        memory: Bytes that a working process may hold.
        output: In place of the configuration's ``dataset_prepared_path``; a path or a URL.
        work: The folder for files between stages; beside the output by default. All nodes must see
            it under this name.
        heard: Told of stages and tasks.
        restart: Forget what an interrupted run has finished.
        engine: For ``Job``: engine, address, workers.
    """
    room = memory - _HOST_BYTES
    if room < _LEAST_ROOM:
        least = (_HOST_BYTES + _LEAST_ROOM) // MIB
        raise UsageError(f"memory must be at least {least} MiB per worker; most is for Axolotl")
    if not Path(config).is_file():
        raise UsageError(f"{config} is not a file; pass the YAML configuration of a training")
    cfg, tokenizer = load_configuration(config, dict(overrides))
    tokens = type(tokenizer).__name__
    with suppress(Unfamiliar):
        tokens = hashlib.sha256(describe(tokenizer).encode(errors="replace")).hexdigest()
    # Keys that decide rows and order are more than those of the folder's name.
    about = {key: value for key, value in cfg.items() if key not in _PASSING_KEYS}
    about |= {"memory": memory, "tokenizer": tokens}
    with ExitStack() as held:
        splits = _find_splits(cfg, tokenizer, output, work)
        for split in splits:
            split.place.claim(held, restart=restart)
            split.place.begin({**about, "job": f"prepare, {split.name}"})
            _look(split, cfg, tokenizer, room)
        needed = sum(split.needed_bytes for split in splits)
        place = splits[0].place.work
        free = place.free_bytes()
        if free is not None and needed > free:
            raise DataError(
                f"the disk is too small: this job needs about {needed / 1e9:,.1f} GB, and "
                f"{free / 1e9:,.1f} GB are free; pass --work and --output on a larger disk",
                path=place.url,
            )
        job = Job(heard, memory=memory, preload=_PRELOAD, **engine)
        held.callback(job.close)
        done = [_prepare_split(job, split, cfg, tokenizer, room) for split in splits]
        # All of them first: a job that goes on would make one anew whose folder is gone.
        for split, (names, _) in zip(splits, done, strict=True):
            _publish(split, names)
        for split in splits:
            split.place.work.remove()
    figures: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for _, counts in done:
        dropped.update(counts.pop("dropped"))
        figures.update(counts)
    outputs = tuple(split.place.final.url for split in splits)
    return job.summary(outputs=outputs, dropped=dict(dropped), **figures)


def _find_splits(cfg: Any, tokenizer: Any, output: str | None, work: str | None) -> list[_Split]:
    from axolotl.common.const import DEFAULT_DATASET_PREPARED_PATH
    from axolotl.utils.data.shared import (
        datasets_with_name_generator,
        generate_dataset_hash_from_config,
    )

    base = output or cfg.dataset_prepared_path or DEFAULT_DATASET_PREPARED_PATH
    base = Store(str(base).rstrip("/")).anchored().url
    beside = Store(work.rstrip("/")).anchored().url if work else base
    splits: dict[str, _Split] = {}  # of two with one folder, the later stays
    for name, datasets in (("train", cfg.datasets), ("test", cfg.test_datasets)):
        if datasets:
            named = generate_dataset_hash_from_config(cfg, datasets, tokenizer.name_or_path)
            final, folder = Store(f"{base}/{named}"), Store(f"{beside}/.{named}.work")
            place = Output(final, f"{base}/.{named}.parts", folder, is_ours=True)
            configs = list(datasets_with_name_generator(datasets))
            splits[named] = _Split(name=name, configs=configs, place=place)
    return list(splits.values())


def _look(split: _Split, cfg: Any, tokenizer: Any, room: int) -> None:
    """The units of every dataset and its first rows: their types, how many tokens they become."""
    from datasets import Dataset, concatenate_datasets
    from datasets.table import InMemoryTable

    store = split.place.work
    unit_bytes = max(_CHUNK_BYTES, min(_MOST_UNIT_BYTES, room // 16))
    pipeline = Pipeline(cfg, tokenizer, split.configs)
    results = []
    for index, config in enumerate(split.configs):
        units = find_units(
            config, cfg, split.name, unit_bytes=unit_bytes, store=store, name=f"{index:03d}"
        )
        split.sources.append(units)
        made = schema = None
        # The first that are kept decide the types; rows may be sorted by length.
        seen = 0
        for unit, first, rows in _slices_of(store, units):
            schema = rows.schema if schema is None else schema
            made = shards.make_rows(pipeline, index, rows, split.name, unit, first)
            seen += len(rows)
            if made.table is not None or seen >= _MOST_PROBED_ROWS:
                break
        if schema is None or made is None:
            raise DataError(f"dataset {config.path} has no rows; check its path and split")
        split.raw.append(schema)
        bytes_out = 0 if made.table is None else made.table.nbytes
        # Tokens are removed when they are dealt, so there are two copies at any time.
        share = sum(unit.num_bytes for unit in units) / max(1, rows.nbytes)
        split.needed_bytes += share * (2 * bytes_out + _DISK_ROW_BYTES * len(rows))
        if made.table is not None:
            results.append(Dataset(InMemoryTable(made.table)))
    if not results:
        raise DataError(
            f"all of the first {_MOST_PROBED_ROWS:,} rows are dropped; check "
            "sequence_len, roles_to_train and the fields of the datasets"
        )
    try:
        merged = concatenate_datasets(results) if len(results) > 1 else results[0]
    except ValueError as error:
        raise DataError(
            f"the datasets have different column types and cannot be merged: {error}"
        ) from None
    split.final = merged.features.arrow_schema


def _slices_of(store: Store, units: Sequence[Unit]) -> Iterator[tuple[Unit, int, pa.Table]]:
    """The rows of a dataset, some at a time, with their unit and the number of the first in it."""
    schema = None
    for unit in units:
        first = 0
        for table in read_tables(store, unit, schema):
            schema = table.schema if schema is None else schema
            for start in range(0, len(table), _PROBED_ROWS):
                yield unit, first + start, table.slice(start, _PROBED_ROWS)
            first += len(table)


def _prepare_split(
    job: Job, split: _Split, cfg: Any, tokenizer: Any, room: int
) -> tuple[list[str], dict[str, Any]]:
    """Makes the files of one prepared dataset; gives their names, and counts of rows."""
    store = split.place.work
    types = _write_types(split, cfg)
    secret = types["secret"]
    pipeline = pickle.dumps((cfg, tokenizer, split.configs))
    with store.writing("pipeline.pickle") as path:
        path.write_bytes(pipeline)
    alike = {
        "pipeline": hashlib.sha256(pipeline).hexdigest(),
        "split": split.name,
        "slice_bytes": max(MIB, room // 64),
        "secret": secret,
    }
    tasks = {
        name: {"name": name, "index": index, "unit": unit.to_json(), **alike}
        for index, name, unit in split.units
    }
    answers = job.run(store, shards.tokenise, tasks)
    kept = {name: answer for name, answer in answers.items() if answer["kept"]}
    if not kept:
        raise DataError(
            "no row is left: all are too long, too short or have no trainable tokens; check "
            "sequence_len, train_on_inputs and roles_to_train"
        )
    _order(split, cfg, answers)
    repeated = np.zeros(0, np.int64)
    if secret is not None:
        memory = room // 2
        groups: list[list[str]] = []
        count = 0
        for name, answer in kept.items():
            before, count = count, count + answer["kept"]
            if before // most_rows(memory) < count // most_rows(memory) or not groups:
                groups.append([])
            groups[-1].append(name)
        tasks = {f"split-{units[0]}": {"units": units, "memory": memory} for units in groups}
        tasks = {name: {"name": name, **task} for name, task in tasks.items()}
        dealt = job.run(store, shards.split, tasks)
        repeated = find_repeated(job, store, dealt, num_rows=count, memory=memory)
    piece_bytes = min(_MOST_PIECE_BYTES, room // 8)
    num_rows, edges, ranges = _place(store, kept, repeated, piece_bytes, cfg, types["processes"])
    store.write_array("edges", edges)
    job.run(store, shards.deal, {name: {"unit": name} for name in kept})
    store.remove("tokens")
    store.write_json("dealt.json", list(kept))
    names = [f"data-{number:05d}-of-{len(ranges):05d}.arrow" for number in range(len(ranges))]
    split.place.forget_missing("write", {name: name for name in names})
    target = split.place.parts.url
    tasks = {
        name: {"name": name, "pieces": [pieces.start, pieces.stop], "target": target}
        for name, pieces in zip(names, ranges, strict=True)
    }
    written = job.run(store, shards.write, tasks)
    count = sum(answer["rows"] for answer in written.values())
    if count != num_rows:
        raise DataError(f"{count:,} rows were written instead of {num_rows:,}; pass --restart")
    dropped: Counter[str] = Counter()
    for answer in answers.values():
        dropped.update(answer["dropped"])
    return names, {
        "rows_in": sum(answer["rows"] for answer in answers.values()),
        "dropped": dropped,
        "duplicates": len(repeated),
        "rows_out": num_rows,
        "tokens": sum(answer["tokens"] for answer in written.values()),
        "bytes_in": sum(answer["bytes_in"] for answer in answers.values()),
        "bytes_out": sum(answer["bytes_out"] for answer in written.values()),
    }


def _write_types(split: _Split, cfg: Any) -> dict[str, Any]:
    """What every task reads, the same whenever the job goes on; the secret of its digests.

    Where files have changed since, what was made of them is forgotten.
    """
    store = split.place.work
    types = {
        "raw": [schema.serialize().to_pybytes().hex() for schema in split.raw],
        "final": split.final.serialize().to_pybytes().hex(),
    }
    known: dict[str, Any] = {
        **types,
        "units": [name for _, name, _ in split.units],
        "processes": cfg.dataset_num_proc or os.cpu_count() or 1,
        "secret": fresh_secret().tolist() if cfg.dataset_exact_deduplication else None,
    }
    if store.exists("types.json"):
        found: dict[str, Any] = store.read_json("types.json")
        has_types = types.items() <= found.items()
        if has_types and found["units"] == known["units"]:
            return found
        stale = ["split", "unique", "deal", "write"]
        if has_types and not store.names("deal"):  # units of the other files are tokenised
            known["secret"] = found["secret"]
        else:
            stale.append("tokenise")
        for folder in stale:
            store.remove(folder)
    store.write_json("types.json", known)
    return known


def _order(split: _Split, cfg: Any, answers: Mapping[str, Answer]) -> None:
    """Writes down the place of every row among all rows that are merged, unit by unit."""
    from axolotl.utils.data.shared import merge_datasets
    from datasets import Dataset
    from datasets.table import InMemoryTable

    counts = [0] * len(split.sources)
    firsts = {}
    for index, name, _ in split.units:
        firsts[name] = counts[index]
        counts[index] += answers[name]["merged"]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    stand_ins = [
        Dataset(InMemoryTable(pa.table({"row": np.arange(start, start + count)})))
        for start, count in zip(offsets[:-1].tolist(), counts, strict=True)
        if count
    ]
    merged = merge_datasets(stand_ins, cfg)
    order = merged.data.column("row").to_numpy()
    if merged._indices is not None:
        # What the dataset itself would do, without 6 µs a row.
        order = order[merged._indices.column(0).to_numpy()]
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    for index, name, _ in split.units:
        first = int(offsets[index]) + firsts[name]
        numbers = split.place.work.read_array(f"numbers/{name}", "<i8")
        split.place.work.write_array(f"places/{name}", places[first + numbers])


def _place(
    store: Store,
    kept: Mapping[str, Answer],
    repeated: Any,
    piece_bytes: int,
    cfg: Any,
    num_processes: int,
) -> tuple[int, Any, list[range]]:
    """Where each row is in the output; its number of rows, the edges of its pieces, and which of
    these make each shard."""
    places = {name: store.read_array(f"places/{name}", "<i8") for name in kept}
    most = max(int(found.max()) for found in places.values()) + 1
    is_kept = np.zeros(most, np.bool_)
    weights = np.zeros(most, np.float32)
    for name, found in places.items():
        is_kept[found] = True
        weights[found] = kept[name]["bytes_out"] / kept[name]["kept"]
    is_kept[repeated] = False
    finals = np.cumsum(is_kept) - 1
    for name, found in places.items():
        store.write_array(f"finals/{name}", np.where(is_kept[found], finals[found], -1))
    weights = weights[is_kept]
    num_rows, num_bytes = len(weights), float(weights.sum(dtype=np.float64))
    count = cfg.num_dataset_shards_to_save or count_shards(num_rows, num_bytes, num_processes)
    count = min(count, num_rows)
    share, rest = divmod(num_rows, count)
    edges, ranges = [0], list[range]()
    for shard in range(count):
        stop = edges[-1] + share + (shard < rest)
        first = len(edges) - 1
        filled = np.cumsum(weights[edges[-1] : stop], dtype=np.float64)
        cuts = np.searchsorted(filled, np.arange(piece_bytes, filled[-1], piece_bytes))
        starts = edges[-1]
        edges += [int(cut) + starts for cut in np.unique(cuts) if 0 < cut < len(filled)]
        edges.append(stop)
        ranges.append(range(first, len(edges) - 1))
    return num_rows, np.array(edges, np.int64), ranges


def _publish(split: _Split, names: Sequence[str]) -> None:
    """The shards and their two notes under the name that Axolotl looks for, at once."""
    from datasets import Dataset, Features

    features = Features.from_arrow_schema(split.final)
    empty = Dataset.from_dict({key: [] for key in features}, features=features)
    about = f"{split.place.final.url} {[name for _, name, _ in split.units]}"
    empty._fingerprint = hashlib.sha256(about.encode()).hexdigest()[:16]
    # The state comes last: it is what names the shards.
    split.place.publish(dict.fromkeys(names), saved_notes(empty, names))
