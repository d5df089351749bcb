"""Axolotl's lengths, length filters and position ids, on Arrow buffers instead of rows.

Each public function of Axolotl's name takes the place of that one and gives what it gives. A length
is the difference of two offsets; whether a row has a token to train on is mostly answered by its
last label; position ids are one ``arange``. What to keep and what to write is then handed to the
library's own ``Dataset.map``, batch by batch, on a dataset of as many empty rows: it looks for a
cached result, writes into the same cache file and names it, so nothing stays in memory that stock
would have put on disk. Fingerprints are computed from stock's own functions and arguments: caches
made with and without this module serve both, and a prepared dataset names the same fingerprint.

Cost: one pass over offsets and labels, and one copy of the rows where stock makes one. No process
is started and no Python object is made per row, other than the number of a row that is kept.

Not done here: truncation, errors for long rows, PoSE (it draws random numbers), streamed datasets,
and everything on which stock fails. ``Unfamiliar`` is raised then, before anything is logged or
changed; a cache file may have been written by that time, which is the one that stock would write.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.data import (
    column_of,
    get_dataset_lengths,
    list_lengths,
    of_column,
    per_row,
    require_integers,
    require_no_decoding,
    require_plain,
    row_numbers,
    rows_between,
)
from fast_axolotl.axolotl.patching import Unfamiliar

_ROWS_AT_ONCE = 16_384
"""Rows of which the kept ones are written in one step."""

_IGNORED = -100
"""The label of a token that is not trained on."""

_MASKED, _TRAINABLE, _EMPTY, _ODD = 0, 1, 2, 3
"""What the labels of a row are; odd ones have nulls."""

_TOKENS = ("input_ids", "attention_mask", "labels", "position_ids")
"""Columns of a token each."""


def handle_long_seq_in_dataset(dataset: Any, sequence_len: int, cfg: Any) -> Any:
    """For ``axolotl.utils.data.utils.handle_long_seq_in_dataset``."""
    from axolotl.utils.data import utils as stock
    from axolotl.utils.trainer import filter_sequences_by_length

    require_plain(dataset)
    shortest, strategy = cfg.min_sample_len, (cfg.excess_length_strategy or "drop").lower()
    if type(sequence_len) is not int or sequence_len < 1 or type(shortest) not in (int, type(None)):
        raise Unfamiliar(f"lengths from {shortest!r} to {sequence_len!r}")
    if strategy != "drop":
        raise Unfamiliar(f"excess_length_strategy is {strategy}")
    lengths = _lengths_at_least(dataset, 0)
    logged = get_dataset_lengths(dataset, from_arrow=True)
    keeps = (lengths >= (shortest or 2)) & (lengths <= sequence_len)
    if not keeps.any():
        raise Unfamiliar("no row is left")
    function = partial(
        filter_sequences_by_length,
        sequence_len=sequence_len,
        min_sequence_len=shortest,
        raise_on_drop=False,
    )
    title = f"Dropping Invalid Sequences (<{shortest} or >{sequence_len})"
    result = _Run.of(cfg).filter(dataset, function, lambda: keeps, title)
    words = [f"min_input_len: {np.min(logged)}", f"max_input_len: {np.max(logged)}"]
    if dropped := len(keeps) - int(np.count_nonzero(keeps)):
        span = f"([{shortest}, {sequence_len}])"
        words.append(f"Dropped {dropped} sequences outside valid range {span}")
    for line in words:
        stock.LOG.info(line)
    return result


def process_datasets_for_packing(cfg: Any, train_dataset: Any, eval_dataset: Any) -> Any:
    """For ``axolotl.utils.trainer.process_datasets_for_packing``."""
    from axolotl.utils import trainer as stock

    if cfg.use_pose or cfg.group_by_length:
        raise Unfamiliar("PoSE draws random numbers, or rows are grouped by length")
    run = _Run.of(cfg)
    require_plain(train_dataset)
    if eval_dataset is not None:
        require_plain(eval_dataset)
    words: list[tuple[Callable[[str], None], str]] = []
    train = _without_columns(cfg, train_dataset, words, stock.LOG)
    evaluation = _without_columns(cfg, eval_dataset, [], stock.LOG) if eval_dataset else None
    # Stock defines this function anew at every call; ours is for its fingerprint alone.
    outer, name = inspect.unwrap(stock.process_datasets_for_packing), "drop_no_trainable_tokens"
    codes = [item for item in outer.__code__.co_consts if isinstance(item, CodeType)]
    code = next((item for item in codes if item.co_name == name), None)
    if code is None:
        raise Unfamiliar(f"stock Axolotl has no {name}")
    marked = FunctionType(code, outer.__globals__, name)
    train = _with_trainable_tokens(run, train, marked, words, stock.LOG, "")
    if evaluation is not None:
        evaluation = _with_trainable_tokens(
            run, evaluation, marked, words, stock.LOG, " from eval dataset", batched=False
        )
    if cfg.sample_packing:
        train = _with_positions(run, train, stock.add_position_ids)
        if cfg.eval_sample_packing and evaluation is not None:
            evaluation = _with_positions(run, evaluation, stock.add_position_ids, batched=False)
    for say, line in words:
        say(line)
    return train, eval_dataset if evaluation is None else evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """How Axolotl asks for its filters and maps."""

    num_proc: int | None
    load_from_cache_file: bool

    @classmethod
    def of(cls, cfg: Any) -> _Run:
        num_proc = cfg.dataset_num_proc
        if num_proc is not None and (type(num_proc) is not int or num_proc < 1):
            raise Unfamiliar(f"dataset_num_proc is {num_proc!r}")
        return cls(num_proc=num_proc, load_from_cache_file=not cfg.is_preprocess)

    def filter(
        self,
        dataset: Any,
        function: Callable[..., Any],
        keeps: Callable[[], Any],
        desc: str,
        batched: bool = True,
    ) -> Any:
        """What ``dataset.filter(function)`` gives, where ``keeps()`` says which rows it keeps."""
        from datasets import Features, Value

        given = {} if self.num_proc is None else {"num_proc": self.num_proc}
        transform = "datasets.arrow_dataset.Dataset.filter@2.0.1"
        fingerprint = stock_fingerprint(dataset, transform, function, batched, given)

        def build(start: int, stop: int) -> pa.Table:
            rows = np.flatnonzero(keeps()[start:stop]) + start
            if dataset._indices is not None:
                rows = row_numbers(dataset, start, stop)[rows - start]
            return pa.table({"indices": pa.array(rows, pa.uint64())})

        features = Features({"indices": Value("uint64")})
        indices = self._mapped(dataset, fingerprint, build, features, desc, _ROWS_AT_ONCE)
        result = copy.deepcopy(dataset)
        result._indices = indices.data
        result._fingerprint = fingerprint
        return result

    def map(
        self,
        dataset: Any,
        function: Callable[..., Any],
        change: Callable[[pa.Table], pa.Table],
        columns: dict[str, Any],
        desc: str,
        batched: bool = True,
    ) -> Any:
        """What ``dataset.map(function)`` gives, where ``change`` is the same for a table."""
        from datasets import Features, config
        from datasets.arrow_dataset import transmit_format

        require_unchanging(dataset, columns)
        transform = "datasets.arrow_dataset.Dataset._map_single"
        fingerprint = stock_fingerprint(dataset, transform, function, batched, {"fn_kwargs": {}})

        features = Features({**dataset.features, **columns})
        rows = config.DEFAULT_MAX_BATCH_SIZE

        def build(start: int, stop: int) -> pa.Table:
            return change(rows_between(dataset, start, stop).combine_chunks())

        def mapped(dataset: Any) -> Any:
            is_joined = min(self.num_proc or 1, len(dataset)) > 1
            if is_joined and self.load_from_cache_file and dataset.cache_files:
                is_joined = not Path(dataset._get_cache_file_path(fingerprint)).exists()
            result = self._mapped(dataset, fingerprint, build, features, desc, rows)
            if is_joined:
                # Joining what several processes made forgets the split, and names all columns
                # as formatted, in order, where some were named.
                result._split = None
                if dataset._format_columns is not None:
                    result._format_columns = result.column_names
            return result

        return transmit_format(mapped)(dataset)

    def _mapped(
        self,
        dataset: Any,
        fingerprint: str,
        build: Callable[[int, int], pa.Table],
        features: Any,
        desc: str,
        rows_at_once: int,
    ) -> Any:
        """A dataset of the tables that ``build`` makes, cached where that of stock would be."""
        from datasets import Dataset, Features, Value

        info = dataset.info.copy()
        info.features = Features({"row": Value("null")})
        rows = pa.table({"row": pa.nulls(len(dataset))})
        empty = Dataset(rows, info=info, split=dataset.split, fingerprint=dataset._fingerprint)
        has_files = bool(dataset.cache_files)
        result = empty.map(
            lambda _, numbers: build(numbers[0], numbers[-1] + 1),
            with_indices=True,
            batched=True,
            batch_size=rows_at_once,
            writer_batch_size=rows_at_once,
            remove_columns=["row"],
            features=features,
            new_fingerprint=fingerprint,
            cache_file_name=dataset._get_cache_file_path(fingerprint) if has_files else None,
            load_from_cache_file=self.load_from_cache_file,
            desc=desc,
        )
        if self.num_proc is not None:
            # So the library leaves the process that has forked; tokenizers look at it.
            os.putenv("TOKENIZERS_PARALLELISM", "false")
        return result


def _without_columns(
    cfg: Any, dataset: Any, words: list[tuple[Callable[[str], None], str]], log: Any
) -> Any:
    """Without what the model's type makes superfluous."""
    if cfg.model_config_type in ["mamba", "gemma3"]:
        words.append((log.info, "dropping attention_mask column"))
        if "attention_mask" not in dataset.column_names:
            raise Unfamiliar("there is no attention_mask to drop")
        dataset = dataset.remove_columns("attention_mask")
    if cfg.model_config_type in ["falcon", "mistral"]:
        words.append((log.info, "dropping token_type_ids column if it exists"))
        if "token_type_ids" in dataset.column_names:
            dataset = dataset.remove_columns("token_type_ids")
    return dataset


def _with_trainable_tokens(
    run: _Run,
    dataset: Any,
    function: Callable[..., Any],
    words: list[tuple[Callable[[str], None], str]],
    log: Any,
    where: str,
    batched: bool = True,
) -> Any:
    """The rows that stock keeps; asked one by one, it also keeps those without labels."""
    require_integers(column_of(dataset, "labels").type)
    if not len(dataset):
        raise Unfamiliar("the dataset is empty")
    # Until 0.18 it compared a whole list with -100 and so kept every row.
    keeps_all = function({"labels": [[_IGNORED]]})[0]

    @cache
    def keeps() -> Any:
        found = per_row(dataset, "labels", _judge_labels)
        if (found == _ODD).any():
            raise Unfamiliar("a label is null")
        if keeps_all:
            return np.ones(len(found), bool)
        return (found == _TRAINABLE) | ((found == _EMPTY) & (not batched))

    desc = "Drop Samples with Zero Trainable Tokens"
    result = run.filter(dataset, function, keeps, desc, batched)
    if not len(result):
        raise Unfamiliar("no row is left, which the stock function reports")
    if dropped := len(dataset) - len(result):
        words.append((log.warning, f"Dropped {dropped} samples with no trainable tokens{where}"))
    return result


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


def _with_positions(
    run: _Run, dataset: Any, function: Callable[..., Any], batched: bool = True
) -> Any:
    from datasets import List, Value

    # Where all of the first rows are empty, stock takes their positions for a column of nulls.
    _lengths_at_least(dataset, 1)
    title = "Add position_id column (Sample Packing)"
    new = {"position_ids": List(Value("int64")), "length": Value("int64")}

    def add_positions(table: pa.Table) -> pa.Table:
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

    return run.map(dataset, function, add_positions, new, title, batched)


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)


def _lengths_at_least(dataset: Any, least: int) -> Any:
    lengths = per_row(dataset, "input_ids", list_lengths)
    if not len(lengths) or lengths.min() < least:
        raise Unfamiliar("the dataset is empty, or has rows without tokens")
    return lengths


def require_unchanging(dataset: Any, columns: dict[str, Any]) -> None:
    """Raises where stock's way through Python objects could give a column another type."""
    from datasets.features.features import generate_from_arrow_type, get_nested_type

    require_no_decoding(dataset)
    for field in dataset._data.schema:
        if get_nested_type(generate_from_arrow_type(field.type)) != field.type:
            raise Unfamiliar(f"column {field.name!r} is of type {field.type}")
        if _is_fragile(field.type):
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


def stock_fingerprint(
    dataset: Any, transform: str, function: Callable[..., Any], batched: bool, given: dict[str, Any]
) -> str:
    """That of ``filter`` or ``map`` with stock's arguments, without those at their defaults."""
    from datasets.fingerprint import update_fingerprint

    given = {**given, "function": function, "fingerprint_name": "new_fingerprint"}
    if batched:
        given["batched"] = True
    return str(update_fingerprint(dataset._fingerprint, transform, given))
