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
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.data import count_shards, saved_notes
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.tokenized_shards import describe
from fast_axolotl.cluster.engines import open_engine
from fast_axolotl.cluster.first_rows import Part, find_repeated, load_array, write_array
from fast_axolotl.cluster.job import JobSummary, Ledger, lock_job, open_job
from fast_axolotl.cluster.shards import make_rows
from fast_axolotl.cluster.sources import Unit, find_units, read_tables
from fast_axolotl.cluster.stock import Pipeline, load_configuration
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Engine, Heard, Task, run_stage
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
    store: Store
    output: str
    sources: list[tuple[Unit, ...]]
    raw: list[pa.Schema] = field(default_factory=list)
    final: pa.Schema | None = None
    probed: list[dict[str, int]] = field(default_factory=list)

    @property
    def parts(self) -> Store:
        """Where its files are written: a local output gets its name when all of them are there."""
        output = Store(self.output)
        folder, _, name = self.output.rpartition("/")
        return Store(f"{folder}/.{name}.parts") if output.is_local else output

    @property
    def fingerprint(self) -> str:
        """Of the prepared dataset."""
        about = f"{self.output} {[name for _, name, _ in self.units]}"
        return hashlib.sha256(about.encode()).hexdigest()[:16]

    @property
    def units(self) -> Iterator[tuple[int, str, Unit]]:
        """All units with the number of their dataset and a name: another where a file changed."""
        for index, units in enumerate(self.sources):
            for number, unit in enumerate(units):
                stamp = hashlib.sha256(repr(unit).encode()).hexdigest()[:8]
                yield index, f"{index:03d}-{number:07d}-{stamp}", unit


class _Job:
    """What is known of a configuration before work begins."""

    def __init__(
        self,
        config: str,
        overrides: Mapping[str, Any],
        memory: int,
        output: str | None,
        work: str | None,
        held: ExitStack,
        *,
        restart: bool,
    ) -> None:
        self.room = memory - _HOST_BYTES
        if self.room < _LEAST_ROOM:
            least = (_HOST_BYTES + _LEAST_ROOM) // MIB
            raise UsageError(f"memory must be at least {least} MiB per worker; most is for Axolotl")
        if not Path(config).is_file():
            raise UsageError(f"{config} is not a file; pass the YAML configuration of a training")
        self.cfg, self.tokenizer = load_configuration(config, dict(overrides))
        self.unit_bytes = max(_CHUNK_BYTES, min(_MOST_UNIT_BYTES, self.room // 16))
        self.slice_bytes = max(MIB, self.room // 64)
        self.piece_bytes = min(_MOST_PIECE_BYTES, self.room // 8)
        self.num_processes = self.cfg.dataset_num_proc or os.cpu_count() or 1
        self.splits = list(self._find(memory, output, work, held, restart=restart))

    def _find(
        self, memory: int, output: str | None, work: str | None, held: ExitStack, *, restart: bool
    ) -> Iterator[_Split]:
        from axolotl.common.const import DEFAULT_DATASET_PREPARED_PATH
        from axolotl.utils.data.shared import (
            datasets_with_name_generator,
            generate_dataset_hash_from_config,
        )

        base = output or self.cfg.dataset_prepared_path or DEFAULT_DATASET_PREPARED_PATH
        base = Store(str(base).rstrip("/")).anchored().url
        named_splits: dict[str, tuple[str, Any]] = {}
        for split, datasets in (("train", self.cfg.datasets), ("test", self.cfg.test_datasets)):
            if datasets:
                tokenizer = self.tokenizer.name_or_path
                named = generate_dataset_hash_from_config(self.cfg, datasets, tokenizer)
                named_splits[named] = split, datasets  # of two with one folder, the later stays
        for named, (split, datasets) in named_splits.items():
            beside = Store(work.rstrip("/")).anchored().url if work else base
            folder = f"{beside}/.{named}.work"
            configs = list(datasets_with_name_generator(datasets))
            found = _Split(
                name=split,
                configs=configs,
                store=Store(folder),
                output=f"{base}/{named}",
                sources=[],
            )
            tokens = type(self.tokenizer).__name__
            with suppress(Unfamiliar):
                tokens = hashlib.sha256(
                    describe(self.tokenizer).encode(errors="replace")
                ).hexdigest()
            # Keys that decide rows and order are more than those of the folder's name.
            keys = {key: value for key, value in self.cfg.items() if key not in _PASSING_KEYS}
            ours = {"job": f"prepare, {split}", "memory": memory, "tokenizer": tokens}
            held.enter_context(lock_job(folder))
            # Without its description, it is what was left when a removal was interrupted.
            is_new = restart or not found.store.exists("job.json")
            found.store = open_job(folder, {**keys, **ours}, restart=is_new)
            for number, config in enumerate(configs):
                units = find_units(
                    config,
                    self.cfg,
                    split,
                    unit_bytes=self.unit_bytes,
                    store=found.store,
                    name=f"{number:03d}",
                )
                if not units:
                    raise DataError(f"dataset {config.path} has no rows; check its path and split")
                found.sources.append(units)
            self._look(found)
            yield found

    def _look(self, split: _Split) -> None:
        """The first rows of every dataset: their types, and how many tokens they become."""
        from datasets import Dataset, concatenate_datasets
        from datasets.table import InMemoryTable

        pipeline = Pipeline(self.cfg, self.tokenizer, split.configs)
        results = []
        for index, (config, units) in enumerate(zip(split.configs, split.sources, strict=True)):
            made = schema = None
            # The first that are kept decide the types; rows may be sorted by length.
            seen = 0
            for unit, first, rows in _slices_of(split.store, units):
                schema = rows.schema if schema is None else schema
                made = make_rows(pipeline, index, rows, split.name, unit, first)
                seen += len(rows)
                if made.table is not None or seen >= _MOST_PROBED_ROWS:
                    break
            if schema is None or made is None:
                raise DataError(f"dataset {config.path} has no rows; check its path and split")
            split.raw.append(schema)
            split.probed.append(
                {
                    "rows": len(rows),
                    "bytes": max(1, rows.nbytes),
                    "bytes_out": 0 if made.table is None else made.table.nbytes,
                }
            )
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

    def require_disk(self) -> None:
        """Raises where the disk cannot hold what the job needs, estimated from the first rows."""
        rows = out = 0.0
        for split in self.splits:
            for units, probe in zip(split.sources, split.probed, strict=True):
                share = sum(unit.num_bytes for unit in units) / probe["bytes"]
                rows += probe["rows"] * share
                out += probe["bytes_out"] * share
        # Tokens are removed when they are dealt, so there are two copies at any time.
        needed = 2 * out + _DISK_ROW_BYTES * rows
        store = self.splits[0].store
        free = store.free_bytes()
        if free is not None and needed > free:
            raise DataError(
                f"the disk is too small: this job needs about {needed / 1e9:,.1f} GB, and "
                f"{free / 1e9:,.1f} GB are free; pass --work and --output on a larger disk",
                path=store.url,
            )


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


def prepare(
    config: str,
    *,
    overrides: Mapping[str, Any],
    engine: str,
    address: str,
    workers: int,
    memory: int,
    output: str | None,
    work: str | None,
    heard: Heard,
    restart: bool = False,
) -> JobSummary:
    """Writes the prepared dataset of a configuration where ``axolotl train`` looks for it.

    Args:
        config: Axolotl's YAML file.
        overrides: Keys of the configuration that are set otherwise, as on Axolotl's command line.
        engine: ``local`` or ``ray``.
        address: Of the Ray cluster: ``auto`` or ``HOST:PORT``.
        workers: Tasks at a time; 0 takes all cores of this machine or of the cluster.
        memory: Bytes that a working process may hold.
        output: In place of the configuration's ``dataset_prepared_path``; a path or a URL.
        work: The folder for files between stages; beside the output by default. All nodes must see
            it under this name.
        heard: Told of stages and tasks.
        restart: Forget what an interrupted run has finished.
    """
    with ExitStack() as held:
        job = _Job(config, overrides, memory, output, work, held, restart=restart)
        job.require_disk()
        ledger, totals = Ledger(heard), _Totals()
        crew = open_engine(
            engine, address=address, workers=workers, memory=memory, preload=_PRELOAD
        )
        held.callback(crew.close)
        shards = [_prepare_split(job, split, crew, ledger.hear, totals) for split in job.splits]
        # All of them first: a job that goes on would make one anew whose folder is gone.
        for split, names in zip(job.splits, shards, strict=True):
            _publish(split, names)
        for split in job.splits:
            split.store.remove()
    outputs = tuple(split.output for split in job.splits)
    return ledger.summary(outputs=outputs, extra={}, **asdict(totals))


@dataclass(slots=True)
class _Totals:
    rows_in: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0
    rows_out: int = 0
    tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def _prepare_split(
    job: _Job, split: _Split, crew: Engine, heard: Heard, totals: _Totals
) -> list[str]:
    """Makes the files of one prepared dataset, and gives their names."""
    store = split.store
    secret = _write_types(job, split)

    def stage(name: str, tasks: Mapping[str, dict[str, Any]]) -> dict[str, Answer]:
        function = f"fast_axolotl.cluster.shards:{name}"
        made = [
            Task(stage=name, name=task, function=function, arguments=arguments)
            for task, arguments in tasks.items()
        ]
        return run_stage(crew, store, name, made, heard)

    pipeline = pickle.dumps((job.cfg, job.tokenizer, split.configs))
    with store.writing("pipeline.pickle") as path:
        path.write_bytes(pipeline)
    alike = {
        "pipeline": hashlib.sha256(pipeline).hexdigest(),
        "split": split.name,
        "slice_bytes": job.slice_bytes,
        "secret": secret,
    }
    answers = stage(
        "tokenise",
        {
            name: {"name": name, "index": index, "unit": unit.to_json(), **alike}
            for index, name, unit in split.units
        },
    )
    for answer in answers.values():
        totals.rows_in += answer["rows"]
        totals.bytes_in += answer["bytes_in"]
        for reason, count in answer["dropped"].items():
            totals.dropped[reason] = totals.dropped.get(reason, 0) + count
    kept = {name: answer for name, answer in answers.items() if answer["kept"]}
    if not kept:
        raise DataError(
            "no row is left: all are too long, too short or have no trainable tokens; check "
            "sequence_len, train_on_inputs and roles_to_train"
        )
    _order(job, split, answers)
    repeated = np.zeros(0, np.int64)
    if secret is not None:
        units = [
            Part(name=name, num_rows=answer["kept"], first_place=None)
            for name, answer in kept.items()
        ]
        repeated = find_repeated(crew, store, units, memory=job.room // 2, heard=heard)
    num_rows, edges, shards = _place(job, store, kept, repeated)
    write_array(store, "edges.npy", edges)
    stage("deal", {name: {"unit": name} for name in kept})
    store.remove("tokens")
    store.write_json("dealt.json", list(kept))
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    if not _is_published(split, names):
        there = split.parts.names("")
        for name in names:
            if name not in there:  # an answer does not outlive its file
                store.remove(f"write/{name}.json")
        if not store.names("write"):
            split.parts.remove()  # of another job
    written = stage(
        "write",
        {
            name: {
                "name": name,
                "pieces": [pieces.start, pieces.stop],
                "target": split.parts.url,
            }
            for name, pieces in zip(names, shards, strict=True)
        },
    )
    count = sum(answer["rows"] for answer in written.values())
    if count != num_rows:
        raise DataError(f"{count:,} rows were written instead of {num_rows:,}; pass --restart")
    totals.rows_out += num_rows
    totals.duplicates += len(repeated)
    totals.tokens += sum(answer["tokens"] for answer in written.values())
    totals.bytes_out += sum(answer["bytes_out"] for answer in written.values())
    store.remove("dealt")
    return names


def _write_types(job: _Job, split: _Split) -> list[int] | None:
    """What every task reads, the same whenever the job goes on; the secret of its digests.

    Where files have changed since, what was made of them is forgotten.
    """
    assert split.final is not None
    store = split.store
    types = {
        "raw": [schema.serialize().to_pybytes().hex() for schema in split.raw],
        "final": split.final.serialize().to_pybytes().hex(),
    }
    units = [name for _, name, _ in split.units]
    secret = fresh_secret().tolist() if job.cfg.dataset_exact_deduplication else None
    if store.exists("types.json"):
        found = store.read_json("types.json")
        has_types = types.items() <= found.items()
        if has_types and found["units"] == units:
            job.num_processes = found["processes"]
            return found["secret"]  # type: ignore[no-any-return]
        stale = ["split", "unique", "deal", "write"]
        if has_types and not store.names("deal"):  # units of the other files are tokenised
            secret = found["secret"]
        else:
            stale.append("tokenise")
        for folder in stale:
            store.remove(folder)
    known = {**types, "units": units, "processes": job.num_processes, "secret": secret}
    store.write_json("types.json", known)
    return secret


def _order(job: _Job, split: _Split, answers: Mapping[str, Answer]) -> None:
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
    merged = merge_datasets(stand_ins, job.cfg)
    order = merged.data.column("row").to_numpy()
    if merged._indices is not None:
        # What the dataset itself would do, without 6 µs a row.
        order = order[merged._indices.column(0).to_numpy()]
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    for index, name, _ in split.units:
        first = int(offsets[index]) + firsts[name]
        numbers = load_array(split.store, f"numbers/{name}.npy")
        write_array(split.store, f"places/{name}.npy", places[first + numbers])


def _place(
    job: _Job, store: Store, kept: Mapping[str, Answer], repeated: Any
) -> tuple[int, Any, list[range]]:
    """Where each row is in the output; its number of rows, the edges of its pieces, and which of
    these make each shard."""
    places = {name: load_array(store, f"places/{name}.npy") for name in kept}
    most = max(int(found.max()) for found in places.values()) + 1
    is_kept = np.zeros(most, np.bool_)
    weights = np.zeros(most, np.float32)
    for name, found in places.items():
        is_kept[found] = True
        weights[found] = kept[name]["bytes_out"] / kept[name]["kept"]
    is_kept[repeated] = False
    finals = np.cumsum(is_kept) - 1
    for name, found in places.items():
        write_array(store, f"finals/{name}.npy", np.where(is_kept[found], finals[found], -1))
    weights = weights[is_kept]
    num_rows, num_bytes = len(weights), float(weights.sum(dtype=np.float64))
    count = job.cfg.num_dataset_shards_to_save or count_shards(
        num_rows, num_bytes, job.num_processes
    )
    count = min(count, num_rows)
    share, rest = divmod(num_rows, count)
    edges, shards = [0], []
    for shard in range(count):
        stop = edges[-1] + share + (shard < rest)
        first = len(edges) - 1
        filled = np.cumsum(weights[edges[-1] : stop], dtype=np.float64)
        cuts = np.searchsorted(filled, np.arange(job.piece_bytes, filled[-1], job.piece_bytes))
        starts = edges[-1]
        edges += [int(cut) + starts for cut in np.unique(cuts) if 0 < cut < len(filled)]
        edges.append(stop)
        shards.append(range(first, len(edges) - 1))
    return num_rows, np.array(edges, np.int64), shards


def _is_published(split: _Split, names: Sequence[str]) -> bool:
    """Whether a run that was interrupted after it has given the output its name."""
    target, parts = Store(split.output), split.parts
    return (
        split.store.names("write") >= {f"{name}.json" for name in names}
        and not (parts.is_local and parts.names(""))
        and target.names("") >= {*names, "state.json"}
        and target.read_json("state.json")["_fingerprint"] == split.fingerprint
    )


def _publish(split: _Split, names: Sequence[str]) -> None:
    """The shards and their two notes under the name that Axolotl looks for, at once."""
    from datasets import Dataset, Features

    if _is_published(split, names):
        return
    parts = split.parts
    if not parts.names("") >= {*names}:
        raise DataError(f"files of the prepared dataset are missing in {parts.url}; pass --restart")
    features = Features.from_arrow_schema(split.final)
    empty = Dataset.from_dict({key: [] for key in features}, features=features)
    empty._fingerprint = split.fingerprint
    # The state comes last: it is what names the shards.
    for name, text in saved_notes(empty, names).items():
        with parts.writing(name) as path:
            path.write_text(text, encoding="utf-8")
    if not parts.is_local:
        return
    folder, made = Path(split.output), Path(parts.path(""))
    for left in made.glob(".*"):  # by processes that were killed
        left.unlink()
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
