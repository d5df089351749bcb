"""Axolotl's dedupe, saving of prepared datasets and lengths, on Arrow tables instead of rows.

Each function takes the place of one of Axolotl's and gives what that gives. Stock turns every row
into Python objects; here the answers are read from Arrow's buffers:

- Two rows are repeated for stock when Python prints them alike. ``dedupe`` compares just that, for
  the types of ``is_comparable``; the rows kept go through the same ``Dataset.select``, so the
  fingerprint is the same too. 16 bytes a row, and the set of rows seen.
- Stock saves with ``save_to_disk(num_proc=…)``, whose spawned children import Axolotl again. Here
  the same shards go through the same ``ArrowWriter`` on threads of this process, byte for byte.
  They are written beside the folder, which appears only when all of them are complete: Axolotl
  takes any folder that is not empty for a prepared dataset.
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

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.patching import LOG, Unfamiliar
from fast_axolotl.axolotl.tokenized_shards import note_saved
from fast_axolotl.dedupe import SeenRows
from fast_axolotl.dedupe.row_bytes import plain_type
from fast_axolotl.dedupe.rows import digest_batch
from fast_axolotl.kernels.threads import spread
from fast_axolotl.system import usable_cores

_NULL_ROW = -1
"""Stands for the length of a row that is null."""

ROWS_AT_ONCE = 16_384
"""Rows looked at in one step: the temporaries of a step stay at a few times its values."""

_LEAST_RUN = 4
"""Rows side by side, on average, from which on slices are faster than single rows."""

_MIN_ROWS_PER_PROCESS = 256
"""As in ``save_preprocessed_dataset`` of Axolotl."""

_KIND = "axolotl.datasets.TokenizedPromptDataset"
"""Of datasets that read their rows as the library's own do."""

_DEAD_SECONDS = 86_400.0

_TRIAL_ROWS = 100_000
"""Stock takes some 15 s for so many rows of chat, and its time grows with their number alone."""
_TRIAL_REPEATS = 5


def deduplicate_and_log_datasets(
    dataset: Any, other_dataset: Any = None, dataset_name: Any = "train", other_name: Any = "eval"
) -> tuple[Any, Any]:
    """For ``axolotl.utils.data.utils.deduplicate_and_log_datasets``."""
    from axolotl.utils.data import utils

    seen, lines = SeenRows(), []
    results: list[Any] = []
    for rows, name in ((dataset, dataset_name), (other_dataset, other_name)):
        if rows is None:
            results.append(None)
            continue
        digests = _digest_rows(rows, seen)
        numbers = seen.number(len(rows))
        kept = np.flatnonzero(seen.enter(digests, numbers) == numbers)
        results.append(rows.select(kept.tolist()))
        lines.append(f"Starting deduplication for {name} dataset. Original size: {len(rows)}")
        lines.append(f"Deduplication complete for {name} dataset. New size: {len(kept)}")
    for line in lines:
        utils.LOG.info(line)
    return results[0], results[1]


def get_dataset_lengths(dataset: Any, from_arrow: Any = False) -> Any:
    """For ``axolotl.utils.samplers.utils.get_dataset_lengths``."""

    def as_int64(array: pa.Array) -> Any:
        if not pa.types.is_integer(array.type) or pa.types.is_uint64(array.type):
            raise Unfamiliar(f"lengths have the type {array.type} instead of integers")
        return array.cast(pa.int64()).fill_null(_NULL_ROW).to_numpy()

    require_plain(dataset)
    if "length" in dataset.column_names:
        lengths = per_row(dataset, "length", as_int64)
    elif "position_ids" in dataset.column_names:
        raise Unfamiliar("there are position_ids without lengths")
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

    if cfg.push_dataset_to_hub:
        raise Unfamiliar("the dataset is pushed to a hub")
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
    with _folder_beside(target) as beside:
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


def try_dedupe(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Rows, those kept, and the seconds of every turn; or the reason why there are none."""
    from axolotl.utils.data.shared import load_dataset_with_config
    from axolotl.utils.data.utils import deduplicate_and_log_datasets as stock
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
    merged = concatenate_datasets([rows for rows in loaded if rows.features == loaded[0].features])
    dataset = merged.select(range(min(len(merged), _TRIAL_ROWS)))
    functions = {"stock_seconds": stock, "our_seconds": deduplicate_and_log_datasets}
    try:
        kept, ours = (function(dataset)[0] for function in functions.values())
    except Unfamiliar as error:
        return {"reason": f"the stock function is used here: {error}"}
    # It names the rows that were selected.
    if ours._fingerprint != kept._fingerprint:
        return {"reason": "the results differ from stock Axolotl; nothing was timed"}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(_TRIAL_REPEATS):
        for name in list(functions)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            functions[name](dataset)
            seconds[name].append(time.perf_counter() - start)
    return {"rows": len(dataset), "kept": len(kept), **seconds}


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
    return of_column(column, look)[row_numbers(dataset)]


def list_lengths(array: pa.Array) -> Any:
    """The lengths of lists of integers, and ``_NULL_ROW`` for those that are null."""
    require_integers(array.type)
    lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return np.where(array.is_valid(), lengths, _NULL_ROW) if array.null_count else lengths


def list_column(rows: Sequence[Sequence[int]], kind: Any) -> pa.Array:
    """Rows of integers as an Arrow column, of the type that ``datasets`` would have found."""
    edges = np.fromiter(accumulate(map(len, rows), initial=0), np.int32, len(rows) + 1)
    if not edges[-1]:
        raise Unfamiliar("a batch has no tokens, so its types are unknown")
    values = np.fromiter(chain.from_iterable(rows), kind, int(edges[-1]))
    return pa.ListArray.from_arrays(pa.array(edges), pa.array(values))


def require_integers(kind: pa.DataType) -> None:
    """Raises for anything but lists of integers that numpy and Python hold alike."""
    values = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    if values is kind or not pa.types.is_integer(values) or pa.types.is_uint64(values):
        raise Unfamiliar(f"a column has the type {kind} instead of lists of tokens")


def column_of(dataset: Any, name: str) -> pa.ChunkedArray:
    if name not in dataset.column_names:
        raise Unfamiliar(f"the dataset has no column {name!r}")
    return dataset._data.column(name)


def of_column(column: pa.ChunkedArray, look: Callable[[pa.Array], Any]) -> Any:
    look(pa.array([], column.type))  # the type is refused also where there is no row
    return _joined(
        [
            look(chunk.slice(start, ROWS_AT_ONCE))
            for chunk in column.chunks
            for start in range(0, len(chunk), ROWS_AT_ONCE)
        ]
    )


def _joined(found: list[Any]) -> Any:
    # Its own memory: what a look returns may be a view of a mapped file.
    return np.concatenate(found) if found else np.empty(0, np.int64)


def require_known_kind(dataset: Any) -> None:
    """Raises for datasets that may read their rows in ways of their own."""
    from datasets import Dataset

    kind = type(dataset)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is not Dataset and name != _KIND:
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
    batches = dataset._data.table.to_batches(max_chunksize=ROWS_AT_ONCE)
    digests = _joined([digest_batch(batch, seen.secret) for batch in batches]).reshape(-1, 2)
    digests = digests if dataset._indices is None else digests[row_numbers(dataset)]
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
    others = ("null", "bool", "float", "double", "string", "large_string", "binary", "large_binary")
    return types.is_integer(kind) or str(kind) in others


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


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """An empty folder beside the target, for one save; removed at the end unless renamed.

    A save that is killed leaves it behind, hidden and as large as the dataset. A later save of the
    same dataset removes what nothing has changed in for a day, which no running save does.
    """
    for left in target.parent.glob(f".{target.name}.{'[0-9a-f]' * 32}"):
        with suppress(OSError):  # another process removes it, or it may not be read
            changed = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - changed > _DEAD_SECONDS:
                LOG.warning("fast-axolotl: removing %s, left by a save that was killed", left)
                shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
