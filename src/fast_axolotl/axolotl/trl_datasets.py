"""TRL's preparation of datasets, a table at a time instead of a row at a time.

``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer`` prepare a dataset in up to six
passes of ``map`` and ``filter`` over rows. Here their ``_prepare_dataset`` runs whole, with its
conditions, errors and warnings; the row functions it defines are answered by ours, which take 1,000
rows as an Arrow table (see ``passes``).

Tokenising is TRL's own function, called twice for each row with a ``_Recorder`` in place of the
tokenizer: the first time it notes the texts, which then go to the Rust tokenizer together (see
``tokenizers``); the second time it gives their tokens. So prompts, masks and warnings are TRL's.
The rest is arithmetic on columns. Passes, progress bars, processes and cache files stay what they
are, and fingerprints are those of stock's arguments: either finds what the other has cached.

A pass that is unfamiliar is TRL's own, from its first row: datasets that are streamed, formatted or
hold images, tokenizers with methods of their own, masks of assistants, texts beside conversations,
nulls, and batches without a token, whose type is not known. So is the extraction of prompts. Costs
the tokenizer's own time, a render for each conversation and some 30 µs a row.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.axolotl.data import (
    list_column,
    list_lengths,
    require_integers,
    require_plain,
)
from fast_axolotl.axolotl.passes import (
    pass_fingerprint,
    require_unchanging,
    run_with,
    set_column,
)
from fast_axolotl.axolotl.patching import Unfamiliar, from_stock
from fast_axolotl.axolotl.tokenized_shards import BATCH_ROWS
from fast_axolotl.axolotl.tokenizers import check_tokenizer, encode_texts

_IGNORED = -100
_PAIR = ("chosen", "rejected")

Columns = dict[str, pa.Array]


def prepare_dataset(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``_prepare_dataset`` of four trainers, which runs with passes of ours."""
    from datasets import Dataset

    if type(dataset) is not Dataset:
        raise Unfamiliar("the dataset is streamed or not a plain dataset")
    trainer = next(
        kind
        for kind in type(self).__mro__
        if kind.__module__.startswith("trl.trainer.") and "_prepare_dataset" in vars(kind)
    )
    switch = f"trl-{trainer.__name__.removesuffix('Trainer').lower()}"
    prepare = vars(trainer)["_prepare_dataset"]
    return run_with(_PASSES, switch, prepare, self, dataset, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows, and the function that stock would call with each of them."""

    table: pa.Table
    function: Callable[..., Any]
    options: Mapping[str, Any]
    """Further arguments of the function."""

    def column(self, name: str) -> pa.Array:
        """A column without nulls."""
        array = self.table.column(name).combine_chunks()
        if isinstance(array, pa.ChunkedArray) or array.null_count:
            raise Unfamiliar(f"a row has no {name}, or the column is too large for one array")
        return array

    def integers(self, name: str) -> tuple[Any, Any]:
        """The values of a column of lists, all rows together, and where each row begins."""
        array = self.column(name)
        require_integers(array.type)
        values = array.flatten()
        if values.null_count:
            raise Unfamiliar("a token is null")
        return values.to_numpy(), np.concatenate([[0], np.cumsum(list_lengths(array))])


Change = Callable[[_Batch], Columns]
"""What a row function does, for a batch: the columns that are new or other than before."""


def _run(
    change: Change,
    dataset: Any,
    name: str,
    function: Callable[..., Any],
    *,
    fn_kwargs: Mapping[str, Any] | None = None,
    remove_columns: str | Sequence[str] | None = None,
    **shown: Any,
) -> Any:
    """What ``map`` or ``filter`` with ``function`` gives, where ``change`` is that for a batch."""
    require_plain(dataset)
    if not len(dataset):
        raise Unfamiliar("the dataset is empty")
    require_unchanging(dataset, {})
    removed = [remove_columns] if isinstance(remove_columns, str) else remove_columns
    hashed: dict[str, Any] = {"num_proc": shown.get("num_proc")}
    if name == "map":
        hashed = {"fn_kwargs": fn_kwargs or {}, "remove_columns": removed}
    hashed = {key: value for key, value in hashed.items() if value is not None}
    fingerprint = pass_fingerprint(dataset, name, function, False, hashed)

    def changed(table: pa.Table) -> Any:
        columns = change(_Batch(table, function, fn_kwargs or {}))
        if name == "filter":
            return columns["keeps"]
        table = table.drop_columns([name for name in removed or () if name not in columns])
        for column, array in columns.items():
            table = set_column(table, column, array)
        return table

    source = copy.copy(dataset)
    source._format_type = "arrow"
    ours = {"batched": True, "batch_size": BATCH_ROWS, "writer_batch_size": BATCH_ROWS, **shown}
    result = getattr(source, name)(changed, **ours, new_fingerprint=fingerprint)
    result._format_type, result._fingerprint = None, fingerprint
    return result


class _Recorder:
    """In place of a tokenizer: notes the texts at first, and then gives the tokens of each."""

    def __init__(self, tokenizer: Any) -> None:
        check_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        parameters = {*inspect.signature(tokenizer.apply_chat_template).parameters}
        self._refused = parameters - {"add_generation_prompt", "chat_template", "tools", "kwargs"}
        self._texts: list[str] = []
        self._kinds: set[bool] = set()
        self._tokens: Iterator[Any] | None = None

    def __call__(self, *, text: str) -> dict[str, list[int]]:
        if type(text) is not str:
            raise Unfamiliar("a text is not a str")
        return self._answer(text, is_chat=False)

    def apply_chat_template(
        self,
        conversation: list[Any],
        *,
        tokenize: bool,
        return_dict: bool,
        return_assistant_tokens_mask: bool = False,
        **options: Any,
    ) -> dict[str, list[int]]:
        if return_assistant_tokens_mask or not self._refused.isdisjoint(options):
            raise Unfamiliar("masks of assistants, or other options of the chat template, are set")
        text = ""
        if self._tokens is None:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        return self._answer(text, is_chat=True)

    def tokenize(self) -> None:
        """Tokenise what was noted; from now on, tokens are given in the same order."""
        if len(self._kinds) != 1:
            raise Unfamiliar("some columns hold text and some hold conversations")
        adds = self._kinds == {False}
        self._tokens = encode_texts(self._tokenizer, self._texts, add_special_tokens=adds)

    def _answer(self, text: str, *, is_chat: bool) -> dict[str, list[int]]:
        if self._tokens is None:
            self._texts.append(text)
            self._kinds.add(is_chat)
            return {"input_ids": []}
        ids: list[int] = next(self._tokens).ids
        self._tokenizer._eventual_warn_about_too_long_sequence(ids, None, True)
        return {"input_ids": ids}


def _tokenize(batch: _Batch) -> Columns:
    """``tokenize_fn`` of all four trainers: what it gives for each row, as columns."""
    rows = batch.table.to_pylist()
    recorder = _Recorder(batch.options["processing_class"])
    options = {**batch.options, "processing_class": recorder}
    for row in rows:
        try:
            batch.function(dict(row), **options)
        except Exception:
            from_stock(batch.function, dict(row), **batch.options)
            raise
    recorder.tokenize()
    changed = [dict(row) for row in rows]
    results = [batch.function(row, **options) for row in changed]
    names = list(results[0])
    if any(list(result) != names for result in results):
        raise Unfamiliar("rows differ in their columns")
    # What a function writes into a row that it is given becomes part of it, too.
    written = {
        name
        for one, other in zip(rows, changed, strict=True)
        for name in one
        if one[name] is not other[name]
    }
    columns = {
        name: pa.array([row[name] for row in changed], batch.table.schema.field(name).type)
        for name in batch.table.column_names
        if name in written
    }
    return columns | {
        name: list_column(
            [result[name] for result in results], np.int32 if name == "input_ids" else np.int64
        )
        for name in names
    }


def _build_labels(batch: _Batch) -> Columns:
    """``build_labels``: ids, and -100 where a mask says so."""
    ids, edges = batch.integers("input_ids")
    labels = ids.astype(np.int64)
    for name in batch.options["mask_columns"]:
        mask, ends = batch.integers(name)
        lengths = np.diff(edges)
        if (np.diff(ends) < lengths).any():
            raise Unfamiliar("a mask is shorter than its input_ids")
        mask = mask[np.arange(edges[-1]) + np.repeat(ends[:-1] - edges[:-1], lengths)]
        labels = np.where(mask != 0, labels, _IGNORED)
    if not len(labels):
        raise Unfamiliar("a batch has no tokens, so its types are unknown")
    return {"labels": pa.ListArray.from_arrays(pa.array(edges, pa.int32()), labels)}


def _truncate(batch: _Batch) -> Columns:
    """``truncate``: the beginning of ids and labels."""
    limit = batch.options["sl"].stop
    if not limit:
        raise Unfamiliar("truncation keeps the end of sequences")
    columns = {name: batch.column(name) for name in ("input_ids", "labels")}
    return {
        name: pc.list_slice(array, 0, limit).cast(array.type) for name, array in columns.items()
    }


def _keep_labelled(batch: _Batch) -> Columns:
    """The filter of supervised fine-tuning: rows with a token to train on."""
    labels, edges = batch.integers("labels")
    before = np.concatenate([[0], np.cumsum(labels != _IGNORED)])[edges]
    return {"keeps": pa.array(np.diff(before) > 0)}


def _keep_short(batch: _Batch, names: Sequence[str], beyond: int) -> Columns:
    """The filters of the preference trainers: rows whose sequences are within the limit."""
    limit = inspect.getclosurevars(batch.function).nonlocals["args"].max_length + beyond
    longest = np.maximum.reduce([list_lengths(batch.column(f"{name}_ids")) for name in names])
    return {"keeps": pa.array(longest < limit)}


_PASSES = {
    f"{trainer}Trainer._prepare_dataset.<locals>.{name}": partial(_run, change)
    for trainer, name, change in (
        ("SFT", "tokenize_fn", _tokenize),
        ("SFT", "build_labels", _build_labels),
        ("SFT", "truncate", _truncate),
        ("SFT", "<lambda>", _keep_labelled),
        ("DPO", "tokenize_fn", _tokenize),
        ("DPO", "<lambda>", partial(_keep_short, names=["prompt"], beyond=0)),
        ("KTO", "tokenize_fn", _tokenize),
        ("KTO", "<lambda>", partial(_keep_short, names=["prompt"], beyond=0)),
        ("Reward", "tokenize_fn", _tokenize),
        ("Reward", "<lambda>", partial(_keep_short, names=_PAIR, beyond=1)),
    )
}
"""TRL's row function, by its qualified name, to ours."""
