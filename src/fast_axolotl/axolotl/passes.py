"""Passes of ``map`` and ``filter`` over a dataset, made from Arrow tables instead of rows.

Axolotl and TRL prepare a dataset in such passes. Their own function runs here as it is, with its
conditions, errors and log lines. Meanwhile ``map`` and ``filter`` of the library's datasets know
row functions by name, and give what the pass with one of them gives. A pass that is unknown, or
unfamiliar to ours, is the library's own, from its first row.

Three passes are Axolotl's. A length is the difference of two offsets; whether a row has a token to
train on is mostly answered by its last label; position ids are one ``arange``. What to keep and
what to write is handed to the library's ``Dataset.map``, batch by batch, on a dataset of as many
empty rows: it looks for a cached result, writes into the same cache file and names it, so nothing
stays in memory that stock would have put on disk. Fingerprints are computed from stock's own
functions and arguments: caches made with and without us serve both.

Cost: one pass over offsets and labels, and one copy of the rows where stock makes one. No process
is started and no Python object is made per row, other than the number of a row that is kept.
Truncation and PoSE (it draws random numbers) are passes of Axolotl's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.data import (
    ROWS_AT_ONCE,
    column_of,
    list_lengths,
    of_column,
    per_row,
    require_integers,
    require_no_decoding,
    require_plain,
    row_numbers,
    rows_between,
)
from fast_axolotl.axolotl.patching import MARK, Final, Unfamiliar, from_stock, tally

_IGNORED = -100
"""The label of a token that is not trained on."""

_MASKED, _TRAINABLE, _EMPTY, _ODD = 0, 1, 2, 3
"""What the labels of a row are; odd ones have nulls."""

_TOKENS = ("input_ids", "attention_mask", "labels", "position_ids")
"""Columns of a token each."""

Pass = Callable[..., Any]
"""Takes a dataset, ``map`` or ``filter``, a row function and options; gives the new dataset."""


def handle_long_seq_in_dataset(dataset: Any, sequence_len: int, cfg: Any) -> Any:
    """For ``axolotl.utils.data.utils.handle_long_seq_in_dataset``."""
    from axolotl.utils.data import utils

    require_plain(dataset)
    return run_with(_PASSES, "long", utils.handle_long_seq_in_dataset, dataset, sequence_len, cfg)


def process_datasets_for_packing(cfg: Any, train_dataset: Any, eval_dataset: Any) -> Any:
    """For ``axolotl.utils.trainer.process_datasets_for_packing``."""
    from axolotl.utils import trainer

    require_plain(train_dataset)
    if eval_dataset is not None:
        require_plain(eval_dataset)
    function = trainer.process_datasets_for_packing
    return run_with(_PASSES, "packing", function, cfg, train_dataset, eval_dataset)


def _keep_lengths(dataset: Any, name: str, function: Any, **options: Any) -> Any:
    """The filter for rows that are too short or too long."""
    given = function.keywords
    longest, shortest = given["sequence_len"], given["min_sequence_len"]
    if type(longest) is not int or type(shortest) not in (int, type(None)):
        raise Unfamiliar(f"lengths from {shortest!r} to {longest!r}")
    lengths = _lengths_at_least(dataset, 0)
    if given["raise_on_drop"] and (lengths > longest).any():
        raise Unfamiliar("a row is too long, which is an error")
    keeps = (lengths >= (shortest or 2)) & (lengths <= longest)
    return _filter(dataset, function, lambda: keeps, **options)


def _keep_trainable(dataset: Any, name: str, function: Any, **options: Any) -> Any:
    """The filter for tokens to train on; asked one by one, it keeps rows without labels."""
    require_integers(column_of(dataset, "labels").type)
    # Until 0.18 it compared a whole list with -100 and so kept every row.
    keeps_all = function({"labels": [[_IGNORED]]})[0]

    @cache
    def keeps() -> Any:
        found = per_row(dataset, "labels", _judge_labels)
        if (found == _ODD).any():
            raise Unfamiliar("a label is null")
        if keeps_all:
            return np.ones(len(found), bool)
        return (found == _TRAINABLE) | ((found == _EMPTY) & (not options.get("batched")))

    return _filter(dataset, function, keeps, **options)


def _judge_labels(array: pa.Array) -> Any:
    """Which of the four kinds the labels of every row are."""
    lengths, offsets = list_lengths(array), array.offsets.to_numpy()
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    if array.null_count or values.null_count:
        return np.full(len(array), _ODD)
    found = np.full(len(array), _EMPTY)
    filled = np.flatnonzero(lengths)
    labels, edges = values.to_numpy(), offsets - offsets[0]
    is_trained = labels[edges[filled + 1] - 1] != _IGNORED
    if not is_trained.all():
        is_trained = np.logical_or.reduceat(labels != _IGNORED, edges[filled])
    found[filled] = np.where(is_trained, _TRAINABLE, _MASKED)
    return found


def _add_positions(
    dataset: Any, name: str, function: Any, *, batched: bool = False, **shown: Any
) -> Any:
    """The map that numbers the tokens of a row, and adds their number."""
    from datasets import Features, List, Value, config
    from datasets.arrow_dataset import transmit_format

    # Where all of the first rows are empty, stock takes their positions for a column of nulls.
    _lengths_at_least(dataset, 1)
    columns = {"position_ids": List(Value("int64")), "length": Value("int64")}
    require_unchanging(dataset, columns)
    fingerprint = pass_fingerprint(dataset, name, function, batched, {"fn_kwargs": {}})
    features = Features({**dataset.features, **columns})
    rows_at_once = config.DEFAULT_MAX_BATCH_SIZE

    def build(start: int, stop: int) -> pa.Table:
        table = rows_between(dataset, start, stop).combine_chunks()
        tokens = table.column("input_ids")
        if any(chunk.flatten().null_count for chunk in tokens.chunks):
            raise Unfamiliar("a token is null")
        lengths = of_column(tokens, list_lengths)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        # Steps of one, and at every row a step back to 0: a third faster than an arange for each.
        memory = pa.allocate_buffer(8 * int(edges[-1]))  # from a pool, which numpy's is not
        positions = np.frombuffer(memory, np.int64)
        positions.fill(1)
        positions[0], positions[edges[1:-1]] = 0, 1 - lengths[:-1]
        np.cumsum(positions, out=positions)
        lists = pa.ListArray.from_arrays(pa.array(edges, pa.int32()), pa.array(positions))
        return set_column(set_column(table, "position_ids", lists), "length", pa.array(lengths))

    def mapped(dataset: Any) -> Any:
        is_joined = min(shown["num_proc"] or 1, len(dataset)) > 1
        if is_joined and shown["load_from_cache_file"] and dataset.cache_files:
            is_joined = not Path(dataset._get_cache_file_path(fingerprint)).exists()
        result = _map(dataset, fingerprint, build, features, rows_at_once, **shown)
        if is_joined:
            # Joining what several processes made forgets the split, and names all columns
            # as formatted, in order, where some were named.
            result._split = None
            if dataset._format_columns is not None:
                result._format_columns = result.column_names
        return result

    return transmit_format(mapped)(dataset)


_PASSES = {
    "filter_sequences_by_length": _keep_lengths,
    "process_datasets_for_packing.<locals>.drop_no_trainable_tokens": _keep_trainable,
    "add_position_ids": _add_positions,
}
"""Axolotl's row function, by its qualified name, to ours."""


def _filter(
    dataset: Any,
    function: Callable[..., Any],
    keeps: Callable[[], Any],
    *,
    batched: bool = False,
    **shown: Any,
) -> Any:
    """What ``dataset.filter(function)`` gives, where ``keeps()`` says which rows it keeps."""
    from datasets import Features, Value

    if not len(dataset):
        raise Unfamiliar("the dataset is empty")
    given = {} if shown["num_proc"] is None else {"num_proc": shown["num_proc"]}
    fingerprint = pass_fingerprint(dataset, "filter", function, batched, given)

    def build(start: int, stop: int) -> pa.Table:
        rows = np.flatnonzero(keeps()[start:stop]) + start
        if dataset._indices is not None:
            rows = row_numbers(dataset, start, stop)[rows - start]
        return pa.table({"indices": pa.array(rows, pa.uint64())})

    features = Features({"indices": Value("uint64")})
    indices = _map(dataset, fingerprint, build, features, ROWS_AT_ONCE, **shown)
    result = copy.deepcopy(dataset)
    result._indices = indices.data
    result._fingerprint = fingerprint
    return result


def _map(
    dataset: Any,
    fingerprint: str,
    build: Callable[[int, int], pa.Table],
    features: Any,
    rows_at_once: int,
    *,
    num_proc: int | None,
    load_from_cache_file: bool,
    desc: str,
) -> Any:
    """A dataset of the tables that ``build`` makes, cached where that of stock would be."""
    from datasets import Dataset, Features, Value

    if num_proc is not None and num_proc < 1:
        raise Unfamiliar(f"num_proc is {num_proc}")
    info = dataset.info.copy()
    info.features = Features({"row": Value("null")})
    rows = pa.table({"row": pa.nulls(len(dataset))})
    empty = Dataset(rows, info=info, split=dataset.split, fingerprint=dataset._fingerprint)
    has_files = bool(dataset.cache_files)
    return empty.map(
        lambda _, numbers: build(numbers[0], numbers[-1] + 1),
        with_indices=True,
        batched=True,
        batch_size=rows_at_once,
        writer_batch_size=rows_at_once,
        remove_columns=["row"],
        features=features,
        new_fingerprint=fingerprint,
        cache_file_name=dataset._get_cache_file_path(fingerprint) if has_files else None,
        load_from_cache_file=load_from_cache_file,
        desc=desc,
    )


def _lengths_at_least(dataset: Any, least: int) -> Any:
    lengths = per_row(dataset, "input_ids", list_lengths)
    if not len(lengths) or lengths.min() < least:
        raise Unfamiliar("the dataset is empty, or has rows without tokens")
    return lengths


_RUNNING = RLock()
"""Of several threads, one has datasets answer with ours, and puts back what it found."""


def run_with(
    passes: Mapping[str, Pass], switch: str, function: Any, *args: Any, **kwargs: Any
) -> Any:
    """What a function of the host gives, where ``passes`` by the names of row functions are ours.

    Rows of the host's own passes are counted under ``switch``.
    """
    from datasets import Dataset

    with _RUNNING, ExitStack() as undo:
        for name in ("map", "filter"):
            original = getattr(Dataset, name)
            undo.callback(setattr, Dataset, name, original)
            setattr(Dataset, name, _answer(original, name, passes, switch))
        # A pass that could not be ours was the host's by then, and so is an error.
        return from_stock(inspect.unwrap(function), *args, **kwargs)


def _answer(original: Pass, name: str, passes: Mapping[str, Pass], switch: str) -> Pass:
    """The library's ``map`` or ``filter``, which is ours for row functions that ours knows."""

    @wraps(original)
    def call(dataset: Any, function: Any = None, *args: Any, **options: Any) -> Any:
        inner = function.func if isinstance(function, partial) else function
        ours = passes.get(getattr(inner, "__qualname__", ""))
        if ours is not None:
            try:
                return ours(dataset, name, function, *args, **options)
            except Final as final:
                raise final.error from None
            except Exception as error:  # noqa: BLE001  whatever it was, the host's own pass decides
                kind = "" if isinstance(error, Unfamiliar) else f"{type(error).__name__}: "
                tally(switch, f"{inner.__name__}: {kind}{error}", len(dataset))
        return original(dataset, function, *args, **options)

    setattr(call, MARK, switch)
    return call


def pass_fingerprint(
    dataset: Any, name: str, function: Callable[..., Any], batched: bool, given: dict[str, Any]
) -> str:
    """That of ``map`` or ``filter`` with stock's arguments, without those at their defaults."""
    from datasets.fingerprint import update_fingerprint

    transform = "datasets.arrow_dataset.Dataset."
    transform += "_map_single" if name == "map" else "filter@2.0.1"
    given = {**given, "function": function, "fingerprint_name": "new_fingerprint"}
    if batched:
        given["batched"] = True
    return str(update_fingerprint(dataset._fingerprint, transform, given))


def require_unchanging(dataset: Any, columns: dict[str, Any]) -> None:
    """Raises where stock's way through Python objects could give a column another type."""
    from datasets.features.features import generate_from_arrow_type, get_nested_type

    require_no_decoding(dataset)
    for field in dataset._data.schema:
        if _is_fragile(field.type) or (
            get_nested_type(generate_from_arrow_type(field.type)) != field.type
        ):
            raise Unfamiliar(f"column {field.name!r} is of type {field.type}")
        if field.name in columns and dataset.features[field.name] != columns[field.name]:
            raise Unfamiliar(f"column {field.name!r} already exists with type {field.type}")
    for name in _TOKENS:
        if name in dataset.column_names:
            require_integers(column_of(dataset, name).type)


def _is_fragile(kind: pa.DataType) -> bool:
    """Times, dates and decimals, which may lose something on stock's way through Python."""
    if isinstance(kind, pa.StructType):
        return any(_is_fragile(field.type) for field in kind)
    if hasattr(kind, "value_type"):
        return _is_fragile(kind.value_type)
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """A table with a column, in its place if there is one of this name."""
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)
