"""Rows of instructions and of plain text tokenised a batch at a time, and written as Arrow columns.

Axolotl maps an instruction dataset row by row, with two tokenizer calls each, and a completion
dataset in batches but with a call per text. All end in lists of Python integers, which HF datasets
walks again to find their type. ``process`` stands in for ``TokenizedPromptDataset.process``: it
makes the same ``map`` over batches of 1,000 rows (the size in which ``map`` writes rows to disk in
any case) with a function that gives a table of the types that HF datasets would have found: int32
for ids, int8 for the mask, int64 for labels. ``tokenized_shards`` makes that map continue after an
interruption.

Equal, because prompts are taken from rows and built by the strategy's own methods, in order, and
the texts go through the same Rust tokenizer in the same state (see ``tokenizers``). A row
whose prompt or answer is empty or no ``str`` goes through the strategy's own ``tokenize_prompt``;
a batch of conversations that is unfamiliar does so as a whole, so one odd row costs no more.

Unfamiliar are: strategies with a ``tokenize_prompt`` or ``_tokenize`` of their own, rows filtered
by the strategy, formatted or indexed datasets, and those with columns named like the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.axolotl.chat import chat_rows, check_chat
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.tokenized_shards import tokenize_in_shards
from fast_axolotl.axolotl.tokenizers import (
    check_tokenizer,
    encode_texts,
    is_set,
    set_truncation,
)

__all__ = [
    "chat_table",
    "completion_table",
    "instruction_table",
    "process",
    "tokenize_completions",
]

_IGNORED = -100
_TYPES = {"input_ids": np.int32, "labels": np.int64, "attention_mask": np.int8}
"""What HF datasets makes of these columns when they are lists of integers."""

Lists = list[list[int]]


def process(self: Any, dataset: Any) -> Any:
    """Stands in for ``TokenizedPromptDataset.process``."""
    from axolotl.prompt_strategies.alpaca_w_system import InstructionWSystemPromptTokenizingStrategy
    from axolotl.prompt_strategies.chat_template import ChatTemplateStrategy
    from axolotl.prompt_strategies.completion import CompletionPromptTokenizingStrategy
    from axolotl.prompt_tokenizers import InstructionPromptTokenizingStrategy
    from datasets import Dataset

    strategy = self.prompt_tokenizer
    to_table: Callable[..., Any]
    if type(strategy) is ChatTemplateStrategy:
        check_chat(strategy)
        to_table = chat_table
    elif type(strategy) is CompletionPromptTokenizingStrategy:
        _check_completion(strategy)
        to_table = completion_table
    else:
        owner = _owner(type(strategy), "tokenize_prompt")
        if owner not in (
            InstructionPromptTokenizingStrategy,
            InstructionWSystemPromptTokenizingStrategy,
        ):
            raise Unfamiliar(f"{type(strategy).__name__} is a strategy of its own")
        if strategy.supports_batched:
            raise Unfamiliar("the strategy takes batches")
        _check_tokenize(strategy)
        to_table = instruction_table
    if type(dataset) is not Dataset or not len(dataset):
        raise Unfamiliar("the dataset is empty or of another kind")
    if dataset._format_type is not None or dataset.list_indexes():
        raise Unfamiliar("the dataset is formatted or indexed")
    if not _TYPES.keys().isdisjoint(dataset.column_names):
        raise Unfamiliar("the dataset has a column named like a result")
    if getattr(strategy, "filter_rows", None):
        raise Unfamiliar("the strategy filters rows")
    return tokenize_in_shards(
        dataset,
        partial(to_table, strategy=strategy),
        num_proc=self.process_count,
        keep_in_memory=self.keep_in_memory,
    )


def chat_table(batch: Mapping[str, Any], strategy: Any) -> Any:
    """A batch of conversations, for ``map``."""
    try:
        ids, labels = chat_rows(strategy, batch)
    except Exception:  # noqa: BLE001  whatever it was, the strategy itself deals with it
        return strategy.tokenize_prompt(batch)
    return _table({"input_ids": ids, "labels": labels, "attention_mask": None})


def instruction_table(batch: Mapping[str, Any], strategy: Any) -> Any:
    """A batch of instructions and answers, for ``map``."""
    from axolotl.prompt_strategies.alpaca_w_system import InstructionWSystemPromptTokenizingStrategy

    with_system = isinstance(strategy, InstructionWSystemPromptTokenizingStrategy)
    rows = [_RowView(batch, index) for index in range(len(batch[next(iter(batch))]))]
    texts: list[str] = []
    is_plain = []
    for row in rows:
        if with_system:
            instruction, context, answer, system = strategy.parse_instruction_fields(row)
            prompts = strategy.prompter.build_prompt_w_system(system, instruction, context)
        else:
            instruction, context, answer = strategy.parse_instruction_fields(row)
            prompts = strategy.prompter.build_prompt(instruction, context)
        pair = next(iter(prompts)), answer
        is_plain.append(all(type(text) is str and text for text in pair))
        if is_plain[-1]:
            texts += pair
    encoded = iter(_encode(strategy, texts))
    bos, eos = _special_tokens(strategy, num_reads=len(texts))
    ids, labels = [], []
    for row, plain in zip(rows, is_plain, strict=True):
        prompt_ids, answer_ids = (next(encoded), next(encoded)) if plain else ([], [])
        if not prompt_ids or not answer_ids:
            result = strategy.tokenize_prompt(row)
            if list(result) != ["input_ids", "attention_mask", "labels"]:
                raise Unfamiliar("a row has other columns than the others")
            ids.append(result["input_ids"])
            labels.append(result["labels"])
            continue
        _end(strategy, answer_ids, eos)
        if answer_ids[0] == bos:
            del answer_ids[0]
        ids.append(prompt_ids + answer_ids)
        prompt_labels = prompt_ids if strategy.train_on_inputs else [_IGNORED] * len(prompt_ids)
        labels.append(prompt_labels + answer_ids)
    return _table({"input_ids": ids, "attention_mask": None, "labels": labels})


def completion_table(batch: Mapping[str, Any], strategy: Any) -> Any:
    """A batch of texts, for ``map``."""
    try:
        ids = _completions(strategy, batch)
    except Exception:  # noqa: BLE001  whatever it was, the strategy itself deals with it
        return strategy.tokenize_prompt(batch)
    return _table({"input_ids": ids, "attention_mask": None, "labels": ids})


def tokenize_completions(self: Any, prompt: Any) -> dict[str, Lists]:
    """Stands in for ``CompletionPromptTokenizingStrategy.tokenize_prompt``."""
    ids = _completions(self, prompt)
    return {
        "input_ids": ids,
        "attention_mask": [[1] * len(row) for row in ids],
        "labels": [row.copy() for row in ids],
    }


def _completions(strategy: Any, prompt: Any) -> Lists:
    """Ids of texts, each cut into pieces of the sequence length."""
    _check_completion(strategy)
    texts, length = prompt[strategy.field], strategy.sequence_len
    if len({len(values) for values in prompt.values()}) != 1:
        raise Unfamiliar("the columns of a batch have different lengths")
    if not all(type(text) is str and text for text in texts) or not texts:
        raise Unfamiliar("a text is empty or no str")
    encoded = _encode(strategy, texts)
    if not all(encoded):
        raise Unfamiliar("a text has no tokens")
    eos = _special_tokens(strategy, num_reads=len(texts))[1]
    pieces = []
    for ids in encoded:
        _end(strategy, ids, eos)
        pieces += [ids[start : start + length] for start in range(0, len(ids), length)]
    return pieces


def _end(strategy: Any, ids: list[int], eos: int) -> None:
    if ids[-1] != eos and len(ids) < strategy.max_length:
        ids.append(eos)


def _special_tokens(strategy: Any, num_reads: int) -> tuple[int | None, int]:
    """Ids of the first and the end token; each read of an id that is not set logs an error."""
    tokenizer, bos = strategy.tokenizer, None
    for _ in range(1 if is_set(tokenizer, "bos_token") else num_reads):
        bos = tokenizer.bos_token_id
    eos: int = tokenizer.eos_token_id
    return bos, eos


def _encode(strategy: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, as ``tokenizer(text, truncation=True, max_length=...)`` gives them."""
    set_truncation(strategy.tokenizer, strategy.max_length)
    backend = strategy.tokenizer._tokenizer
    return [encoding.ids for encoding in encode_texts(backend, texts, add_special_tokens=True)]


def _table(columns: dict[str, Lists | None]) -> pa.Table:
    """Lists of integers as Arrow columns; None stands for ones in the place of the ids."""
    ids = columns["input_ids"]
    assert ids is not None
    arrays = {}
    for name, rows in columns.items():
        ends = np.fromiter(accumulate(map(len, rows or ids)), np.int32, len(ids))
        offsets = np.concatenate([np.zeros(1, np.int32), ends])
        values = (
            np.ones(int(ends[-1]), np.int8)
            if rows is None
            else np.fromiter(chain.from_iterable(rows), _TYPES[name], int(ends[-1]))
        )
        arrays[name] = pa.ListArray.from_arrays(offsets, values)
    if not len(arrays["input_ids"].values) or not len(arrays["labels"].values):
        raise Unfamiliar("a batch has no tokens, so its types are not known")
    return pa.table(arrays)


class _RowView(Mapping[str, Any]):
    """One row of a batch whose columns are read when they are asked for."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Mapping[str, Any], index: int) -> None:
        self._batch = batch
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._batch[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)

    def __contains__(self, name: object) -> bool:
        return name in self._batch


def _check_completion(strategy: Any) -> None:
    from axolotl.prompt_strategies.completion import (
        CompletionPrompter,
        CompletionPromptTokenizingStrategy,
    )

    if type(strategy) is not CompletionPromptTokenizingStrategy:
        raise Unfamiliar(f"{type(strategy).__name__} is a strategy of its own")
    if type(strategy.prompter) is not CompletionPrompter:
        raise Unfamiliar("the prompter is one of its own")
    if type(strategy.sequence_len) is not int or strategy.sequence_len <= 0:
        raise Unfamiliar("the sequence length is no positive number")
    _check_tokenize(strategy)


def _check_tokenize(strategy: Any) -> None:
    """Whether ``strategy._tokenize`` does what ``_encode`` and ``_end`` do."""
    from axolotl.prompt_tokenizers import PromptTokenizingStrategy

    kind, tokenizer = type(strategy), strategy.tokenizer
    if _owner(kind, "_tokenize") is not PromptTokenizingStrategy:
        raise Unfamiliar(f"{kind.__name__} tokenises in a way of its own")
    if kind.__module__.partition(".")[0] != "axolotl":
        raise Unfamiliar(f"{kind.__name__} is no strategy of Axolotl's")
    if not {"tokenize_prompt", "_tokenize"}.isdisjoint(strategy.__dict__):
        raise Unfamiliar("the strategy has been altered")
    check_tokenizer(tokenizer)
    if not is_set(tokenizer, "eos_token"):
        raise Unfamiliar("the tokenizer has no end token")
    if set(tokenizer.model_input_names) != {"input_ids", "attention_mask"}:
        raise Unfamiliar("the tokenizer gives other columns than ids and mask")
    if type(strategy.max_length) is not int or strategy.max_length <= 0:
        raise Unfamiliar("the greatest length is no positive number")


def _owner(kind: type, name: str) -> type:
    """The class that defines a method; unlike the method, it is the same when wrapped."""
    return next(base for base in kind.__mro__ if name in vars(base))
