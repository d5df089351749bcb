"""``fast-axolotl prepare``: the result of ``axolotl preprocess``, made in parallel tasks.

    load, cut ── tokenise ── order, unique ── deal ── write ── rename
     (here)       (tasks)        (here)      (tasks)  (tasks)

The first rows of every dataset that are kept decide the types, as with ``Dataset.map``, and show a
wrong field before hours are spent. The order is Axolotl's: its ``merge_datasets`` runs on
row numbers in place of rows. Of repeated rows the first in that order stays.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any
from unittest import mock

import numpy as np

from fast_axolotl import system
from fast_axolotl.axolotl.data import count_shards, saved_notes
from fast_axolotl.cluster import shards
from fast_axolotl.cluster.engines import Answer
from fast_axolotl.cluster.job import Heard, Job, JobSummary, Output, find_repeated
from fast_axolotl.cluster.sources import Unit, cut, load
from fast_axolotl.cluster.stock import Pipeline, load_configuration, tokenizer_digest
from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.schema import schema_of, schema_text

MIB = 1024 * 1024
_HOST_BYTES = 768 * MIB
"""What a process takes that has imported Axolotl and done nothing."""
_LEAST_ROOM = 256 * MIB
_ROW_BYTES = 32
"""What the process that deals out the tasks holds of every row, as measured."""
_MOST_PIECE_BYTES = 128 * MIB
_PROBED_ROWS, _MOST_PROBED_ROWS = 1000, 100_000
_PASSING_KEYS = {"output_dir", "dataset_prepared_path"}
_PRELOAD = ("fast_axolotl.cluster.shards", "axolotl.utils.data.sft", "axolotl.utils.data.rl")


@dataclass(slots=True, kw_only=True)
class _Split:
    """One prepared dataset: ``datasets:``, or ``test_datasets:``."""

    name: str
    pipeline: Pipeline
    place: Output
    datasets: list[Any] = field(default_factory=list)
    """As they were loaded, with the types of all that is made of them in ``types``."""
    types: str = ""


def prepare(
    config: str,
    *,
    memory: int,
    output: str | None,
    work: str | None,
    heard: Heard,
    restart: bool = False,
    dry_run: bool = False,
    **engine: Any,
) -> JobSummary:
    """Writes the prepared dataset of a configuration where ``axolotl train`` looks for it.

    ``output`` stands in place of ``dataset_prepared_path``; the others are as for ``dedupe_on``.
    With ``dry_run``, it ends before any row but the first ones is tokenised.
    """
    room = memory - _HOST_BYTES
    if room < _LEAST_ROOM:
        least = (_HOST_BYTES + _LEAST_ROOM) // MIB
        raise UsageError(f"memory must be at least {least} MiB per worker; most is for Axolotl")
    cfg, tokenizer = load_configuration(config)
    from datasets import Dataset, Features

    # Keys that decide rows and order are more than those of the folder's name.
    about = {key: value for key, value in cfg.items() if key not in _PASSING_KEYS}
    about |= {"memory": memory, "tokenizer": tokenizer_digest(tokenizer)}
    with ExitStack() as held:
        splits = _find_splits(cfg, tokenizer, output, work)
        for split in splits:
            split.place.claim(held, {**about, "job": f"prepare, {split.name}"}, restart=restart)
        num_rows = sum(map(_look, splits))
        need, facts = num_rows * _ROW_BYTES, system.describe()
        there = min(facts.get("limit_bytes") or math.inf, facts["memory_bytes"])
        if need > there:
            raise UsageError(
                f"{num_rows:,} rows need {need / 1e9:,.1f} GB of memory on this machine, which has "
                f"{there / 1e9:,.1f} GB: it holds {_ROW_BYTES} bytes per row; start the job on a "
                "larger machine, or divide the datasets"
            )
        job = Job(heard, memory=memory, preload=_PRELOAD, **engine)
        held.callback(job.close)
        outputs = tuple(split.place.final.url for split in splits)
        num_bytes = sum(rows._estimate_nbytes() for split in splits for rows in split.datasets)
        if dry_run:
            for split in splits:
                if not split.place.work.sizes("tokenise"):
                    split.place.work.remove()
            splits = []
        written = [_prepare_split(job, split, room) for split in splits]
        # All of them first: a job that goes on would make one anew whose folder is gone.
        for split, files in zip(splits, written, strict=True):
            features = Features.from_arrow_schema(schema_of(split.types))
            empty = Dataset.from_dict({key: [] for key in features}, features=features)
            mark = f"{split.place.final.url} {split.place.work.read('types.json')!r}"
            empty._fingerprint = hashlib.sha256(mark.encode()).hexdigest()[:16]
            # The state comes last: it is what names the shards.
            split.place.publish(files, saved_notes(empty, [*files]))
        for split in splits:
            split.place.work.remove()
    totals = job.totals["tokenise"]
    return job.summary(
        outputs=outputs,
        rows_in=num_rows,
        dropped={"by Axolotl's filters": totals["dropped"]},
        duplicates=totals["kept"] - job.totals["deal"]["rows"],
        bytes_in=num_bytes,
    )


def _find_splits(cfg: Any, tokenizer: Any, output: str | None, work: str | None) -> list[_Split]:
    from axolotl.common.const import DEFAULT_DATASET_PREPARED_PATH
    from axolotl.utils.data.shared import (
        datasets_with_name_generator,
        generate_dataset_hash_from_config,
    )

    base = output or cfg.dataset_prepared_path or DEFAULT_DATASET_PREPARED_PATH
    base = Store(str(base).rstrip("/")).url
    beside = Store(work.rstrip("/")).url if work else base
    splits: dict[str, _Split] = {}  # of two with one folder, the later stays
    for name, datasets in (("train", cfg.datasets), ("test", cfg.test_datasets)):
        if datasets:
            named = generate_dataset_hash_from_config(cfg, datasets, tokenizer.name_or_path)
            final, folder = Store(f"{base}/{named}"), Store(f"{beside}/.{named}.work")
            place = Output(final, folder, is_ours=True)
            pipeline = Pipeline(cfg, tokenizer, list(datasets_with_name_generator(datasets)))
            splits[named] = _Split(name=name, pipeline=pipeline, place=place)
    return list(splits.values())


def _look(split: _Split) -> int:
    """Loads the datasets, counts their rows, and finds types by the first rows that are kept."""
    from datasets import Dataset, concatenate_datasets
    from datasets.table import InMemoryTable

    made = []
    for index, config in enumerate(split.pipeline.configs):
        dataset = load(config, split.pipeline.cfg, split.name)
        if not len(dataset):
            raise DataError(f"dataset {config.path} has no rows; check its path and split")
        split.datasets.append(dataset)
        make = partial(split.pipeline.make, index, split.name)
        metadata, unit = dataset.features.arrow_schema.metadata, Unit("", config.path, 0)
        for start in range(0, min(len(dataset), _MOST_PROBED_ROWS), _PROBED_ROWS):
            rows = dataset.with_format("arrow")[start : start + _PROBED_ROWS]
            rows = rows.replace_schema_metadata(metadata)
            found = shards.make_rows(make, rows, unit._replace(first=start))
            if found.table is not None:
                made.append(Dataset(InMemoryTable(found.table)))
                break
    if not made:
        raise DataError(
            f"all of the first {_MOST_PROBED_ROWS:,} rows are dropped; check "
            "sequence_len, roles_to_train and the fields of the datasets"
        )
    try:
        merged = concatenate_datasets(made) if len(made) > 1 else made[0]
    except ValueError as error:
        raise DataError(
            f"the datasets have different column types and cannot be merged: {error}"
        ) from None
    split.types = schema_text(merged.features.arrow_schema)
    return sum(map(len, split.datasets))


def _prepare_split(job: Job, split: _Split, room: int) -> dict[str, Answer]:
    """Makes the files of one prepared dataset, and gives what their tasks have answered."""
    store, cfg, configs = split.place.work, split.pipeline.cfg, split.pipeline.configs
    is_unique = bool(cfg.dataset_exact_deduplication)

    def cut_all() -> list[list[Unit]]:
        return [
            cut(rows, configs[index].path, room=room, store=store, name=f"{index:03d}")
            for index, rows in enumerate(split.datasets)
        ]

    units = cut_all()
    found = store.read_json("types.json") if store.exists("types.json") else {}
    types: dict[str, Any] = {
        "final": split.types,
        "units": [unit.name for some in units for unit in some],
        "processes": found.get("processes") or cfg.dataset_num_proc or os.cpu_count() or 1,
    }
    if found != types:
        store.remove("write")
        # As long as nothing is dealt, the tokens of units that have not changed are kept.
        if store.sizes("deal") or found.get("final") != split.types:
            store.remove("deal")
            store.remove("tokenise")
            units = cut_all()
        store.write_json("types.json", types)
    alike = {
        "pipeline": split.pipeline.to_text(),
        "split": split.name,
        "slice_bytes": max(MIB, room // 64),
        "secret": split.place.secret if is_unique else None,
    }
    tasks: dict[str, dict[str, Any]] = {
        unit.name: {"unit": unit, "index": index, **alike}
        for index, some in enumerate(units)
        for unit in some
    }
    answers = job.run(store, shards.tokenise, tasks)
    kept = {name: answer for name, answer in answers.items() if answer["kept"]}
    if not kept:
        raise DataError(
            "no row is left: all are too long, too short or have no trainable tokens; check "
            "sequence_len, train_on_inputs and roles_to_train"
        )
    store.remove("loaded")
    places = _order(store, cfg, units, answers)
    num_places = max(int(rows.max()) for rows in places.values()) + 1
    is_kept = np.zeros(num_places, bool)
    for rows in places.values():
        is_kept[rows] = True
    if is_unique:
        is_kept &= ~find_repeated(store, places.items(), num_places, room // 2)
    piece_bytes = min(_MOST_PIECE_BYTES, room // 8)
    edges, ranges = _cut(cfg, kept, places, is_kept, piece_bytes, types["processes"])
    for name, rows in places.items():
        store.write_array(f"places/{name}", rows.astype(np.int64))
    store.write_array("edges", edges)
    job.run(store, shards.deal, {name: {"unit": name} for name in kept})
    store.remove("tokens")
    store.write_json("dealt.json", list(kept))
    names = [f"data-{number:05d}-of-{len(ranges):05d}.arrow" for number in range(len(ranges))]
    split.place.forget_missing(names)
    target = split.place.parts.url
    tasks = {
        name: {"name": name, "pieces": pieces, "target": target}
        for name, pieces in zip(names, ranges, strict=True)
    }
    written = job.run(store, shards.write, tasks)
    count = sum(answer["rows"] for answer in written.values())
    if count != edges[-1]:
        raise DataError(f"{count:,} rows were written instead of {edges[-1]:,}; pass --restart")
    return written


class _Numbers:
    """Row numbers in place of the rows of a ``Dataset``, which takes 80 bytes for each of them."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def shuffle(self, seed: int) -> _Numbers:
        """The order of ``Dataset.shuffle``."""
        return _Numbers(np.random.default_rng(seed).permutation(self.rows))


def _order(
    store: Store, cfg: Any, units: Sequence[Sequence[Unit]], answers: Mapping[str, Answer]
) -> dict[str, Any]:
    """The place of every row that is kept among all rows that are merged, unit by unit."""
    from axolotl.utils.data import shared

    counts = [sum(answers[unit.name]["merged"] for unit in some) for some in units]
    kind = np.int32 if sum(counts) < 2**31 else np.int64  # all that is held counts
    numbers = [
        _Numbers(np.arange(stop - count, stop, dtype=kind))
        for count, stop in zip(counts, accumulate(counts), strict=True)
        if count
    ]

    def concatenate(parts: Sequence[_Numbers]) -> _Numbers:
        return _Numbers(np.concatenate([part.rows for part in parts]))

    with mock.patch.object(shared, "concatenate_datasets", concatenate):
        order = shared.merge_datasets(numbers, cfg).rows
    del numbers
    places = np.empty(len(order), kind)
    places[order] = np.arange(len(order), dtype=kind)
    del order
    kept, start = {}, 0
    for unit in chain(*units):
        if answers[unit.name]["kept"]:
            kept[unit.name] = places[start + store.read_array(f"numbers/{unit.name}", "<i8")]
        start += answers[unit.name]["merged"]
    return kept


def _cut(
    cfg: Any,
    kept: Mapping[str, Answer],
    places: Mapping[str, Any],
    is_kept: Any,
    piece_bytes: int,
    num_processes: int,
) -> tuple[Any, list[range]]:
    """Closes the gaps between places, -1 for rows that go; edges of pieces, pieces of shards."""
    weights = np.zeros(len(is_kept))
    for name, rows in places.items():
        weights[rows] = kept[name]["bytes_out"] / kept[name]["kept"]
    finals = np.cumsum(is_kept, dtype=next(iter(places.values())).dtype)
    for rows in places.values():
        rows[:] = np.where(is_kept[rows], finals[rows] - 1, -1)
    del finals
    weights = weights[is_kept]
    filled = np.cumsum(weights, out=weights)  # in place: all that is held counts
    num_rows, num_bytes = len(filled), float(filled[-1])
    count = cfg.num_dataset_shards_to_save
    count = min(count or count_shards(num_rows, num_bytes, num_processes), num_rows)
    share, rest = divmod(num_rows, count)
    bounds = [number * share + min(number, rest) for number in range(count + 1)]
    edges = np.union1d(
        bounds, np.searchsorted(filled, np.arange(piece_bytes, filled[-1], piece_bytes))
    )
    ranges = pairwise(np.searchsorted(edges, bounds).tolist())
    return edges, [range(*edge_numbers) for edge_numbers in ranges]
