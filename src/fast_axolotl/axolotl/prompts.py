"""Tokenise rows of prompts and preferences in batches, and write them as Arrow columns.

Axolotl maps an instruction dataset row by row, with two tokenizer calls each, and a completion
dataset in batches but with a call per text. All end in lists of Python integers, which HF datasets
walks again to find their type.
``process`` stands in for ``TokenizedPromptDataset.process``: it makes the same ``map`` over batches
of 1,000 rows (the size in which ``map`` writes rows to disk in any case) with a function that gives
a table of the types that HF datasets would have found: int32 for ids, int8 for the mask, int64 for
labels and for columns of other names. ``tokenized_shards`` makes that map continue after an
interruption.

A batch goes three steps: each row is *read* by the strategy's own methods into the texts it is made
of, all texts are tokenised in one call (see ``tokenizers``), and each row is *built* from its ids,
in order, as the strategy's ``tokenize_prompt`` would. Equal, because the texts go through the same
Rust tokenizer in the same state. A row that cannot be read or built goes through
``tokenize_prompt`` itself, at its place in the order, and is counted; so one odd row costs no more
than itself, and its error is stock's.

``map_dataset`` stands in for ``_map_dataset``, which brings the rows of a DPO, KTO or ORPO dataset
into shape one by one; most of the time goes into fetching a row from its Arrow table, column by
column. It is the same ``map`` over batches, in which Axolotl's own transform is called with row
after row. Rows (``_lazy_row``) are those that HF datasets would have made, but take their values
from columns that were fetched once.

Unfamiliar are: strategies of other kinds, or with a ``tokenize_prompt`` or ``_tokenize`` of their
own, transforms that are not Axolotl's, rows filtered by the strategy, formatted or indexed
datasets, and those with columns named like the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.chat import IGNORED, chat_rows, check_chat
from fast_axolotl.axolotl.data import list_column, require_plain
from fast_axolotl.axolotl.passes import pass_fingerprint
from fast_axolotl.axolotl.patching import Final, Unfamiliar, from_stock
from fast_axolotl.axolotl.tokenized_shards import BATCH_ROWS, tokenize_in_shards
from fast_axolotl.axolotl.tokenizers import check_tokenizer, encode_texts, tokenize_rows

Lists = list[list[int]]

_COLUMNS = {"input_ids", "attention_mask", "labels"}

_TRANSFORMS = tuple(f"axolotl.prompt_strategies.{name}." for name in ("dpo", "kto", "orpo"))


def process(self: Any, dataset: Any) -> Any:
    """Stands in for ``TokenizedPromptDataset.process``."""
    strategy = self.prompt_tokenizer
    to_table = _find_table(strategy)
    require_plain(dataset)
    if not len(dataset) or not _COLUMNS.isdisjoint(dataset.column_names):
        raise Unfamiliar("the dataset is empty, or already has one of the output columns")
    if getattr(strategy, "filter_rows", None):
        raise Unfamiliar("the strategy filters rows")
    return tokenize_in_shards(
        dataset,
        partial(to_table, strategy=strategy),
        num_proc=self.process_count,
        keep_in_memory=self.keep_in_memory,
    )


def map_dataset(
    cfg: Any,
    dataset: Any,
    ds_transform_fn: Callable[..., Any],
    tokenizer: Any | None = None,
    **map_kwargs: Any,
) -> Any:
    """Stands in for ``axolotl.utils.data.rl._map_dataset``."""
    from datasets import DatasetDict

    function = ds_transform_fn
    if type(function) is not FunctionType or not function.__module__.startswith(_TRANSFORMS):
        raise Unfamiliar("the transform is not one of Axolotl's")
    if "tokenizer" not in inspect.signature(function).parameters:
        tokenizer = None
    elif tokenizer:
        ds_transform_fn = partial(function, tokenizer=tokenizer)
    else:
        raise Unfamiliar("the tokenizer is still to be loaded")
    if isinstance(dataset, DatasetDict):
        dataset = dataset["train"]
    require_plain(dataset)
    if not len(dataset):
        raise Unfamiliar("the dataset is empty")
    if not map_kwargs.keys() <= {"remove_columns"} or (map_kwargs and tokenizer is None):
        raise Unfamiliar("the dataset is mapped with other options")
    # The fingerprint is that of the map which is not made, so a cache serves both.
    given = {"fn_kwargs": {}, **map_kwargs}
    return dataset.map(
        partial(transform_rows, function=function, tokenizer=tokenizer),
        num_proc=cfg.dataset_num_proc,
        load_from_cache_file=not cfg.is_preprocess,
        desc="Mapping RL Dataset",
        batched=True,
        batch_size=BATCH_ROWS,
        new_fingerprint=pass_fingerprint(dataset, "map", ds_transform_fn, False, given),
        **map_kwargs,
    )


def _find_table(strategy: Any) -> Callable[..., Any]:
    """What makes tables for a strategy; unfamiliar if nothing does."""
    from axolotl import prompt_tokenizers
    from axolotl.prompt_strategies import alpaca_w_system, completion

    kind, tokenizer = type(strategy), strategy.tokenizer
    if kind.__name__ == "ChatTemplateStrategy":
        check_chat(strategy)
        return partial(_batch_table, chat_rows, ends_with_mask=True)
    instructions = (
        prompt_tokenizers.InstructionPromptTokenizingStrategy,
        alpaca_w_system.InstructionWSystemPromptTokenizingStrategy,
    )
    is_completion = kind is completion.CompletionPromptTokenizingStrategy
    if is_completion:
        if type(strategy.prompter) is not completion.CompletionPrompter:
            raise Unfamiliar("the prompter is custom")
        if type(strategy.sequence_len) is not int or strategy.sequence_len <= 0:
            raise Unfamiliar("the sequence length is not a positive number")
    elif _owner(kind, "tokenize_prompt") not in instructions or strategy.supports_batched:
        raise Unfamiliar(f"{kind.__name__} is a custom strategy")
    # Whether ``strategy._tokenize`` does what ``_encode`` and ``_ended`` do.
    if _owner(kind, "_tokenize") is not prompt_tokenizers.PromptTokenizingStrategy:
        raise Unfamiliar(f"{kind.__name__} has a custom tokenise function")
    if kind.__module__.partition(".")[0] != "axolotl":
        raise Unfamiliar(f"{kind.__name__} is not an Axolotl strategy")
    if not {"tokenize_prompt", "_tokenize"}.isdisjoint(strategy.__dict__):
        raise Unfamiliar("the strategy was modified")
    check_tokenizer(tokenizer)
    if tokenizer.eos_token_id is None:
        raise Unfamiliar("the tokenizer has no EOS token")
    if set(tokenizer.model_input_names) != {"input_ids", "attention_mask"}:
        raise Unfamiliar("the tokenizer returns other columns than ids and mask")
    if type(strategy.max_length) is not int or strategy.max_length <= 0:
        raise Unfamiliar("the maximum length is not a positive number")
    return partial(_batch_table, _completions) if is_completion else instruction_table


def _batch_table(
    make: Callable[..., tuple[Lists, Lists]], batch: Mapping[str, Any], strategy: Any, **order: bool
) -> Any:
    """A batch of conversations or texts, for ``map``."""
    try:
        ids, labels = make(strategy, batch)
    except Final:
        raise
    except Exception:  # noqa: BLE001  whatever it was, the strategy itself deals with it
        return from_stock(strategy.tokenize_prompt, batch)
    return _table(ids, labels, **order)


def instruction_table(batch: Mapping[str, Any], strategy: Any) -> Any:
    """A batch of instructions and answers, for ``map``."""
    from axolotl.prompt_strategies.alpaca_w_system import InstructionWSystemPromptTokenizingStrategy

    with_system = isinstance(strategy, InstructionWSystemPromptTokenizingStrategy)
    bos, eos = strategy.tokenizer.bos_token_id, strategy.tokenizer.eos_token_id

    def read(row: Any) -> tuple[list[str], None]:
        if with_system:
            instruction, context, answer, system = strategy.parse_instruction_fields(row)
            prompts = strategy.prompter.build_prompt_w_system(system, instruction, context)
        else:
            instruction, context, answer = strategy.parse_instruction_fields(row)
            prompts = strategy.prompter.build_prompt(instruction, context)
        texts = [next(iter(prompts)), answer]
        if not all(type(text) is str and text for text in texts):
            raise Unfamiliar("a prompt or an answer is empty or not a str")
        return texts, None

    def build(encodings: list[Any], _: None) -> tuple[list[int], list[int]]:
        prompt, answer = (encoding.ids for encoding in encodings)
        if not prompt or not answer:
            raise Unfamiliar("a prompt or an answer has no tokens")
        answer = _ended(strategy, answer, eos)
        if answer[0] == bos:
            answer = answer[1:]
        before = prompt if strategy.train_on_inputs else [IGNORED] * len(prompt)
        return prompt + answer, before + answer

    def stock(row: Any) -> Any:
        result = strategy.tokenize_prompt(row)
        if result.keys() != _COLUMNS:
            raise Unfamiliar("rows differ in their columns")
        return result

    count = len(next(iter(batch.values())))
    ids, labels = tokenize_rows(
        "tokenize",
        count,
        partial(_lazy_row, batch),
        read,
        partial(_encode, strategy),
        build,
        stock,
    )
    return _table(ids, labels)


def _completions(strategy: Any, prompt: Any) -> tuple[Lists, Lists]:
    """Ids of texts, each cut into pieces of the sequence length; all of them are labels."""
    length, eos = strategy.sequence_len, strategy.tokenizer.eos_token_id
    count = len(prompt[strategy.field])
    if any(len(values) != count for values in prompt.values()):
        raise Unfamiliar("the columns of a batch have different lengths")

    def read(row: Any) -> tuple[list[str], None]:
        [text] = row[strategy.field]
        if type(text) is not str or not text:
            raise Unfamiliar("a text is empty or not a str")
        return [text], None

    def build(encodings: list[Any], _: None) -> tuple[Lists, Lists]:
        if not (ids := encodings[0].ids):
            raise Unfamiliar("a text has no tokens")
        ids = _ended(strategy, ids, eos)
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
        return pieces, pieces

    texts, _ = tokenize_rows(
        "tokenize",
        count,
        lambda index: {name: values[index : index + 1] for name, values in prompt.items()},
        read,
        partial(_encode, strategy),
        build,
        lambda row: {"input_ids": [], "labels": [], **strategy.tokenize_prompt(row)},
    )
    if not any(texts):
        raise Unfamiliar("no text of a batch has tokens")
    pieces = [*chain(*texts)]
    return pieces, pieces


def transform_rows(
    batch: Mapping[str, Any], function: Callable[..., Any], tokenizer: Any
) -> dict[str, list[Any]]:
    """A batch of rows transformed one after the other, for ``map``."""
    from datasets.formatting.formatting import LazyDict

    given = {} if tokenizer is None else {"tokenizer": tokenizer}
    results = []
    for index in range(len(next(iter(batch.values())))):
        result = from_stock(function, _lazy_row(batch, index), **given)
        if isinstance(result, LazyDict):
            untouched = result.keys_to_format
            result = {name: value for name, value in result.data.items() if name not in untouched}
        results.append(result)
    names = list(results[0])
    if any(list(result) != names for result in results):
        raise Unfamiliar("rows produce different columns")
    return {name: [result[name] for result in results] for name in names}


@dataclass(frozen=True, slots=True)
class _Cell:
    """One row's table and formatter, as a ``LazyRow`` asks them: a value is in its column."""

    batch: Mapping[str, Any]
    column_names: list[str]
    index: int

    def select(self, names: list[str]) -> list[str]:
        return names

    def format_column(self, names: list[str]) -> list[Any]:
        return [self.batch[names[0]][self.index]]


def _lazy_row(batch: Mapping[str, Any], index: int) -> Any:
    """A row of a batch, as ``map`` would hand it over."""
    from datasets.formatting.formatting import LazyRow

    cell = _Cell(batch, list(batch), index)
    return LazyRow(cell, cell)


def _ended(strategy: Any, ids: list[int], eos: int) -> list[int]:
    return [*ids, eos] if ids[-1] != eos and len(ids) < strategy.max_length else ids


def _encode(strategy: Any, texts: Sequence[str]) -> Iterator[Any]:
    length = strategy.max_length
    return encode_texts(strategy.tokenizer, texts, add_special_tokens=True, max_length=length)


def _table(ids: Lists, labels: Lists, *, ends_with_mask: bool = False) -> pa.Table:
    """The columns of a strategy, of which only the order differs."""
    lists = list_column(ids, np.int32)
    ones = pa.array(np.ones(len(lists.values), np.int8))
    mask = {"attention_mask": pa.ListArray.from_arrays(lists.offsets, ones)}
    trained = {"labels": list_column(labels, np.int64)}
    rest = {**trained, **mask} if ends_with_mask else {**mask, **trained}
    return pa.table({"input_ids": lists, **rest})


def _owner(kind: type, name: str) -> type:
    """The class that defines a method; unlike the method, it is the same when wrapped."""
    return next(base for base in kind.__mro__ if name in vars(base))
