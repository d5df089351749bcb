"""Axolotl's dedupe, its saving of prepared datasets and its lengths, on Arrow instead of on rows.

Each function takes the place of one of Axolotl's and gives what that gives. Stock turns every row
into Python objects; here the answers are read from Arrow's buffers:

- Two rows are repeated for stock when Python prints them alike. ``dedupe`` compares just that, for
  the types of ``is_comparable``; the rows kept go through the same ``Dataset.select``, so the
  fingerprint is the same too. 16 bytes a row, and the set of rows seen.
- Stock saves with ``save_to_disk(num_proc=…)``, whose spawned children import Axolotl again. Here
  the same shards go through the same ``ArrowWriter`` on threads of this process, byte for byte.
  They are written beside the folder, which appears only when all of them are complete: Axolotl
  takes any folder that is not empty for a prepared dataset. See ``save_folder``.
- A length is the difference of two offsets.

Where rows cannot be proven to come out alike (formats, decoded features, other kinds of datasets,
anything on which stock fails) ``Unfamiliar`` is raised before anything is done.

    python -m fast_axolotl.axolotl.data TRIAL.json RESULT.json

tries dedupe on its own: Axolotl's function and ours on the rows of a configuration, in one process.
The rows are those of the files, as Axolotl loads them, before they are tokenised. Which rows are
kept is compared first; then the two alternate, A B B A. It runs with ``FAST_AXOLOTL=0``, so that
Axolotl's function is its own; ours is called by name. The import of Axolotl is not timed.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.patching import Final, Unfamiliar
from fast_axolotl.axolotl.save_folder import folder_beside
from fast_axolotl.axolotl.tokenized_shards import note_saved
from fast_axolotl.dedupe import SeenRows
from fast_axolotl.dedupe.row_bytes import plain_type
from fast_axolotl.dedupe.rows import digest_batch
from fast_axolotl.kernels.threads import spread
from fast_axolotl.system import usable_cores

_NULL_ROW = -1
"""Stands for the length of a row that is null."""

_ROWS_AT_ONCE = 16_384
"""Rows looked at in one step: the temporaries of a step stay at a few times its values."""

_FEW = 8
"""Below one row in so many, rows are gathered instead of looking at the whole column."""

_LEAST_RUN = 4
"""Rows side by side, on average, from which on slices are faster than single rows."""

_MOST_INTEGER = 2**63 - 1
_MIN_ROWS_PER_PROCESS = 256
"""As in ``save_preprocessed_dataset`` of Axolotl."""

_TRIAL_ROWS = 100_000
"""Stock takes some 15 s for so many rows of chat, and its time grows with their number alone."""
_TRIAL_REPEATS = 5
_TRIAL_SECONDS = 120.0
"""After which no further turn of a trial is begun."""


class SeenHashes(set[str]):
    """The hashes that stock would have collected, made only when somebody looks at them.

    Axolotl hands this from one call of its dedupe to the next. As long as both are ours, ``rows``
    is all that is needed. Stock's own function finds a set of SHA-256 hashes in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: SeenRows | None = SeenRows()
        """``None`` once the hashes are there: from then on others may add to them."""
        self._datasets: list[Any] = []

    def remember(self, dataset: Any) -> None:
        # A copy, since a format set on the dataset later would change the rows it gives.
        self._datasets.append(copy.copy(dataset))

    def materialise(self) -> None:
        """Fills the set as stock does, at stock's cost."""
        if self.rows is None:
            return
        from axolotl.utils.data.utils import sha256

        self.rows = None
        for dataset in self._datasets:
            super().update(sha256(str(row)) for row in dataset)
        self._datasets.clear()

    def __contains__(self, item: object) -> bool:
        self.materialise()
        return super().__contains__(item)

    def __iter__(self) -> Iterator[str]:
        self.materialise()
        return super().__iter__()

    def __len__(self) -> int:
        self.materialise()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self.materialise()
        return super().__eq__(other)

    def __reduce__(self) -> Any:
        return set, (list(self),)


def _first_materialised(name: str) -> Any:
    operation = getattr(set, name)

    def operate(self: SeenHashes, *others: Any) -> Any:
        self.materialise()
        return operation(self, *others)

    return operate


for _name in (
    *("__ne__", "__repr__", "__le__", "__lt__", "__ge__", "__gt__", "__or__", "__and__"),
    *("__sub__", "__xor__", "__ror__", "__rand__", "__rsub__", "__rxor__", "__ior__"),
    *("add", "copy", "difference", "discard", "intersection", "isdisjoint", "issubset"),
    *("issuperset", "pop", "remove", "symmetric_difference", "union", "update"),
):
    # ``set(x)`` and ``list(x) + …`` aside, whatever is asked of the set finds stock's hashes in it.
    setattr(SeenHashes, _name, _first_materialised(_name))


def deduplicate_dataset(dataset: Any, seen_hashes: Any = None) -> tuple[Any, Any]:
    """For ``axolotl.utils.data.utils._deduplicate_dataset``."""
    seen = SeenHashes() if seen_hashes is None else seen_hashes
    if not isinstance(seen, SeenHashes) or seen.rows is None:
        raise Unfamiliar("seen_hashes was not made by this dedupe")
    rows = seen.rows
    try:
        digests = _digest_rows(dataset, rows)
    except Exception:
        # Stock goes on with this set, and some ways to read a set pass by its methods.
        seen.materialise()
        raise
    numbers = rows.number(len(dataset))
    kept = np.flatnonzero(rows.enter(digests, numbers) == numbers)
    seen.remember(dataset)
    return dataset.select(kept.tolist()), seen


def get_dataset_lengths(dataset: Any, from_arrow: Any = False) -> Any:
    """For ``axolotl.utils.samplers.utils.get_dataset_lengths``."""

    def as_int64(array: pa.Array) -> Any:
        _require_integer(array.type)
        return array.cast(pa.int64()).fill_null(_NULL_ROW).to_numpy()

    require_plain(dataset)
    if "length" in dataset.column_names:
        lengths = per_row(dataset, "length", as_int64)
    elif "position_ids" in dataset.column_names:
        lengths = per_row(dataset, "position_ids", _lasts) + 1
    elif from_arrow:
        # Stock reads the table itself here, whatever rows of it the dataset has.
        lengths = of_column(column_of(dataset, "input_ids"), list_lengths)
        if not len(lengths):
            raise Unfamiliar("the column is empty, on which stock fails")
    else:
        lengths = per_row(dataset, "input_ids", list_lengths)
    if not len(lengths):
        return np.array([])
    if lengths.min() < 0:
        raise Unfamiliar("a length is missing or negative")
    return lengths


def save_preprocessed_dataset(cfg: Any, dataset: Any, dataset_hash: str, split: str) -> None:
    """For ``axolotl.utils.data.shared.save_preprocessed_dataset``."""
    from axolotl.utils.data import shared

    require_known_kind(dataset)
    target = shared.get_prepared_dataset_path(cfg, dataset_hash)
    if any(mark in str(target) for mark in "~:"):
        raise Unfamiliar(f"{target} may not be a local path")
    folders = {Path(file["filename"]).resolve().parent for file in dataset.cache_files}
    if target.resolve() in folders:
        raise Unfamiliar("the dataset is already in its output folder")
    if not len(dataset):
        raise Unfamiliar("the dataset is empty")
    require_no_decoding(dataset)
    num_workers = cfg.dataset_num_proc or shared.get_default_process_count()
    num_shards = cfg.num_dataset_shards_to_save
    if type(num_workers) is not int or num_workers < 1:
        raise Unfamiliar(f"dataset_num_proc is {num_workers!r}")
    if num_shards is None:
        found = count_shards(len(dataset), dataset._estimate_nbytes(), num_workers)
        num_shards = min(len(dataset._data), found)
    if type(num_shards) is not int or not 1 <= num_shards <= len(dataset):
        raise Unfamiliar(f"{num_shards!r} shards of {len(dataset)} rows")
    names = [f"data-{index:05d}-of-{num_shards:05d}.arrow" for index in range(num_shards)]
    notes = saved_notes(dataset, names)
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(target) as beside:
        _write_shards(dataset, [beside / name for name in names])
        for name, text in notes.items():
            (beside / name).write_text(text, encoding="utf-8")
        if not os.path.lexists(target):
            beside.rename(target)
        else:
            # What others put there stays, as with stock.
            target.mkdir(exist_ok=True)
            # The state comes last: it is what names the shards.
            for name in [*names, *notes]:
                (beside / name).replace(target / name)
    note_saved()
    if cfg.push_dataset_to_hub:
        shared.LOG.info(
            "Pushing merged prepared dataset to Huggingface hub at "
            f"{cfg.push_dataset_to_hub} (version {dataset_hash})...",
            main_process_only=False,
        )
        try:
            dataset.push_to_hub(cfg.push_dataset_to_hub, dataset_hash, private=True)
        except Exception as error:
            # Saved, and perhaps pushed in part: not to be done twice.
            raise Final(error) from error


def try_dedupe(
    trial: Mapping[str, Any], *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Rows, those kept, and the seconds of every turn; or the reason why there are none."""
    from axolotl.utils.data.shared import load_dataset_with_config
    from axolotl.utils.data.utils import _deduplicate_dataset
    from axolotl.utils.dict import DictDefault
    from datasets import DatasetDict, concatenate_datasets

    loaded = []
    for entry in trial["datasets"]:
        config = DictDefault({**entry, "split": entry.get("split") or "train"})
        rows = load_dataset_with_config(config, use_auth_token=False)
        loaded.append(next(iter(rows.values())) if isinstance(rows, DatasetDict) else rows)
    if not loaded:
        return {"reason": "the configuration lists no datasets to dedupe"}
    # All rows together, as far as their columns agree.
    alike = [rows for rows in loaded if rows.features == loaded[0].features]
    merged = concatenate_datasets(alike) if len(alike) > 1 else alike[0]
    dataset = merged.select(range(min(len(merged), _TRIAL_ROWS)))

    def kept(answer: tuple[Any, Any]) -> list[int]:
        chosen = answer[0]
        indices = chosen._indices
        return list(range(len(chosen))) if indices is None else indices.column(0).to_pylist()

    wanted = kept(_deduplicate_dataset(dataset))
    try:
        ours = kept(deduplicate_dataset(dataset))
    except Unfamiliar as error:
        return {
            "rows": len(dataset),
            "reason": f"the stock function is used here: {error}",
        }
    outcome: dict[str, Any] = {
        "rows": len(dataset),
        "is_cut": len(alike) < len(loaded) or len(merged) > _TRIAL_ROWS,
        "kept": len(wanted),
        "is_equal": ours == wanted,
    }
    if not outcome["is_equal"]:
        return {
            **outcome,
            "reason": "the results differ from stock Axolotl; nothing was timed",
        }
    functions = {"stock": _deduplicate_dataset, "ours": deduplicate_dataset}
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    begin = clock()
    for name in [*("stock", "ours", "ours", "stock") * _TRIAL_REPEATS][: 2 * _TRIAL_REPEATS]:
        if name == "stock" and clock() - begin > _TRIAL_SECONDS and len(seconds["ours"]) > 1:
            break
        start = clock()
        functions[name](dataset)
        seconds[name].append(clock() - start)
    return {**outcome, "stock_seconds": seconds["stock"], "our_seconds": seconds["ours"]}


def require_plain(dataset: Any) -> None:
    """Raises unless reading from the dataset gives what its Arrow table holds."""
    require_known_kind(dataset)
    # Joined datasets name all of their columns as formatted, which changes nothing.
    shown = dataset._format_columns
    if (
        dataset._format_type is not None
        or dataset._format_kwargs
        or dataset._output_all_columns
        or (shown is not None and sorted(shown) != sorted(dataset.column_names))
    ):
        raise Unfamiliar("the dataset has a format")


def row_numbers(dataset: Any, start: int = 0, stop: int | None = None) -> Any:
    """Which row of its table each row of a dataset with an indices mapping is, as int64."""
    stop = len(dataset) if stop is None else stop
    numbers = dataset._indices.fast_slice(start, stop - start).column(0)
    return numbers.to_numpy().astype(np.int64)


def rows_between(dataset: Any, start: int, stop: int) -> pa.Table:
    """Rows of the dataset, in its order; a view where they lie side by side."""
    table = dataset._data
    if dataset._indices is None:
        return table.fast_slice(start, stop - start)
    rows = row_numbers(dataset, start, stop)
    firsts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    if not len(rows) or len(rows) < _LEAST_RUN * len(firsts):
        return table.fast_gather(rows)
    lengths = np.diff(firsts, append=len(rows)).tolist()
    runs = zip(rows[firsts].tolist(), lengths, strict=True)
    return pa.concat_tables([table.fast_slice(first, length) for first, length in runs])


def per_row(dataset: Any, name: str, look: Callable[[pa.Array], Any]) -> Any:
    """What ``look`` finds in every row of a column, in the order of the dataset."""
    column = column_of(dataset, name)
    if dataset._indices is None:
        return of_column(column, look)
    rows = row_numbers(dataset)
    if len(rows) * _FEW >= len(column):
        return of_column(column, look)[rows]
    table = dataset._data.select([name])
    return _joined(
        [
            of_column(table.fast_gather(part).column(0).combine_chunks(), look)
            for part in _parts(rows)
        ]
    )


def list_lengths(array: pa.Array) -> Any:
    """The lengths of lists of integers, and ``_NULL_ROW`` for those that are null."""
    require_integers(array.type)
    lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return np.where(array.is_valid(), lengths, _NULL_ROW) if array.null_count else lengths


def require_integers(kind: pa.DataType) -> None:
    """Raises for anything but lists of integers that numpy and Python hold alike."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise Unfamiliar(f"a column has the type {kind} instead of lists of tokens")
    _require_integer(kind.value_type)


def _require_integer(kind: pa.DataType) -> None:
    if not pa.types.is_integer(kind) or pa.types.is_uint64(kind):
        raise Unfamiliar(f"values have the type {kind} instead of integers")


def _lasts(array: pa.Array) -> Any:
    """The last value of every list; below ``_NULL_ROW`` where there is none."""
    lengths = list_lengths(array)
    ends = array.offsets.to_numpy()[1:].astype(np.int64)
    found = np.full(len(array), _NULL_ROW - 1)
    has_last = np.flatnonzero(lengths > 0)
    lasts = array.values.take(pa.array(ends[has_last] - 1))
    found[has_last] = lasts.cast(pa.int64()).fill_null(_NULL_ROW - 1).to_numpy()
    if len(found) and found.max() == _MOST_INTEGER:
        raise Unfamiliar("a position does not fit in its integer type")
    return found


def column_of(dataset: Any, name: str) -> pa.ChunkedArray:
    if name not in dataset.column_names:
        raise Unfamiliar(f"the dataset has no column {name!r}")
    return dataset._data.column(name)


def of_column(column: pa.ChunkedArray | pa.Array, look: Callable[[pa.Array], Any]) -> Any:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    look(pa.array([], column.type))  # the type is refused also where there is no row
    return _joined(
        [
            look(chunk.slice(start, _ROWS_AT_ONCE))
            for chunk in chunks
            for start in range(0, len(chunk), _ROWS_AT_ONCE)
        ]
    )


def _joined(found: list[Any]) -> Any:
    # Its own memory: what a look returns may be a view of a mapped file.
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _parts(rows: Any) -> Iterator[Any]:
    return (rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE))


def require_known_kind(dataset: Any) -> None:
    """Raises for datasets that may read their rows in ways of their own."""
    from datasets import Dataset

    kind = type(dataset)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is not Dataset and name != "axolotl.datasets.TokenizedPromptDataset":
        raise Unfamiliar(f"the dataset has the type {name}")
    if dataset.list_indexes():
        raise Unfamiliar("the dataset has a search index")


def require_no_decoding(dataset: Any) -> None:
    from datasets.features.features import require_decoding

    for name, feature in dataset.features.items():
        if require_decoding(feature, ignore_decode_attribute=True):
            raise Unfamiliar(f"column {name!r} is decoded when it is read")


def _digest_rows(dataset: Any, seen: SeenRows) -> Any:
    """The digest of every row, in the order of the dataset."""
    require_plain(dataset)
    schema = dataset._data.schema
    require_no_decoding(dataset)
    for field in schema:
        if not is_comparable(field.type):
            raise Unfamiliar(f"column {field.name!r} is of type {field.type}")
    types = [(field.name, plain_type(field.type)) for field in schema]
    if not types or seen.types not in (None, types):
        raise Unfamiliar("earlier rows have other columns or types")
    has_text = _has_text(schema)

    def look(batch: pa.RecordBatch) -> Any:
        if has_text:
            batch.validate(full=True)  # stock fails on text that is not UTF-8
        return digest_batch(batch, seen.secret)

    table, indices = dataset._data, dataset._indices
    if indices is None or len(indices) * _FEW >= len(table):
        batches = table.table.to_batches(max_chunksize=_ROWS_AT_ONCE)
        digests = _joined([look(batch) for batch in batches]).reshape(-1, 2)
        digests = digests if indices is None else digests[row_numbers(dataset)]
    else:
        parts = _parts(row_numbers(dataset))
        gathered = (table.fast_gather(part).combine_chunks().to_batches()[0] for part in parts)
        digests = _joined([look(batch) for batch in gathered])
    seen.types = types
    return digests.reshape(-1).astype(np.uint64, copy=False)


def is_comparable(kind: pa.DataType) -> bool:
    """Whether values of this type are alike for ``dedupe`` just when Python prints them alike."""
    types = pa.types
    if types.is_struct(kind):
        names = [field.name for field in kind]
        return len(set(names)) == len(names) and all(is_comparable(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return is_comparable(kind.value_type)
    return bool(
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or _is_text(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _has_text(types: Any) -> bool:
    """Whether a schema, a struct or a list has text in it, however deep."""
    if isinstance(types, pa.Schema | pa.StructType):
        return any(_has_text(field.type) for field in types)
    return _is_text(types) or (hasattr(types, "value_type") and _has_text(types.value_type))


def count_shards(num_rows: int, num_bytes: float, num_workers: int) -> int:
    """As many as ``save_to_disk`` makes with the number of processes that Axolotl gives it."""
    from datasets import config
    from datasets.utils.py_utils import convert_file_size_to_int

    by_size = int(num_bytes / convert_file_size_to_int(config.MAX_SHARD_SIZE)) + 1
    return max(by_size, min(max(1, num_rows // _MIN_ROWS_PER_PROCESS), num_workers))


def saved_notes(dataset: Any, names: Sequence[str]) -> dict[str, str]:
    """The two JSON files beside the shards, as ``save_to_disk`` writes them."""
    from datasets import config
    from datasets.utils.py_utils import asdict

    kept = ("_fingerprint", "_format_columns", "_format_kwargs", "_format_type")
    state = {key: dataset.__dict__[key] for key in (*kept, "_output_all_columns")}
    state["_split"] = None if dataset.split is None else str(dataset.split)
    state["_data_files"] = [{"filename": name} for name in names]
    info = asdict(dataset._info)
    in_order = {key: info[key] for key in sorted(info)}
    return {
        config.DATASET_INFO_FILENAME: json.dumps(in_order, indent=2),
        config.DATASET_STATE_JSON_FILENAME: json.dumps(state, indent=2, sort_keys=True),
    }


def _write_shards(dataset: Any, paths: list[Path]) -> None:
    from datasets import Dataset, config
    from datasets.arrow_writer import ArrowWriter, get_writer_batch_size_from_data_size
    from datasets.utils import tqdm

    features, num_rows, count = dataset.features, len(dataset), len(paths)
    share, rest = divmod(num_rows, count)
    edges = [share * index + min(index, rest) for index in range(count + 1)]
    # The rows of a record batch are stock's, so that the files are.
    step = config.DEFAULT_MAX_BATCH_SIZE
    if "writer_batch_size" in Dataset._save_to_disk_single.__code__.co_varnames:  # datasets 5
        num_bytes = dataset._estimate_nbytes()
        if num_bytes > 0:
            step = min(step, get_writer_batch_size_from_data_size(num_rows, num_bytes))
    with tqdm(unit=" examples", total=num_rows, desc=f"Saving the dataset ({count} shards)") as bar:

        def write(first: int, last: int) -> None:
            for index in range(first, last):
                path, stop = str(paths[index]), edges[index + 1]
                with ArrowWriter(features=features, path=path, embed_local_files=True) as writer:
                    for row in range(edges[index], stop, step):
                        table = rows_between(dataset, row, min(row + step, stop))
                        writer.write_table(table)
                        bar.update(len(table))
                    writer.finalize()

        spread(write, [(index, index + 1) for index in range(count)], usable_cores())


if __name__ == "__main__":
    _, trial_path, result_path = sys.argv
    outcome = try_dedupe(json.loads(Path(trial_path).read_text(encoding="utf-8")))
    Path(result_path).write_text(json.dumps(outcome), encoding="utf-8")
