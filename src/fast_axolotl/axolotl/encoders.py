"""Axolotl's encoder for streamed rows, with list operations in place of tensors.

``encode_streaming`` calls the tokenizer exactly as Axolotl does and packs its lists with
``packing.lists``, which writes the same rows. Axolotl builds a tensor for each document and appends
it to a growing one: a copy of the open row for each document. An empty document is a tensor of
floats there, and turns the row it lands in to floats; so it does here.

What was tokenised is not tokenised again. Where its result is unusual, Axolotl's own function is
called with the result in place of the tokenizer (``_Answered``); where the arguments are,
``Unfamiliar`` is raised before anything is called.

Axolotl's other encoder, for packed streams, is fast with our sampler and collators in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.packing.lists import SEPARATORS, pack

LABEL_PAD = -100
"""What is written where there is nothing to learn."""

_INT64 = np.iinfo(np.int64)
_Rows = list[list[int]]


def encode_streaming(
    examples: dict[str, list[Any]],
    tokenizer: Any,
    max_tokens: int,
    text_column: str = "text",
    concatenate: bool = True,
) -> dict[str, list[Any]]:
    """Tokenise texts and, with ``concatenate``, pack them into rows of ``max_tokens``."""
    if isinstance(tokenizer, _Answered):
        raise Unfamiliar(tokenizer.reason)
    eos = pad = 0
    if concatenate:
        if type(max_tokens) is not int or max_tokens <= SEPARATORS:
            raise Unfamiliar(f"max_tokens is {max_tokens!r}")
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        for name, token in (("EOS", eos), ("PAD", pad)):
            if type(token) is not int or not _INT64.min <= token <= _INT64.max:
                raise Unfamiliar(f"the {name} token is {token!r}")
    answer = tokenizer(
        examples[text_column],
        truncation=True,
        max_length=max_tokens - SEPARATORS,
        add_special_tokens=True,
    )
    from axolotl.utils.data import streaming

    rows, masks = answer["input_ids"], answer["attention_mask"]
    odd = _unusual(tokenizer, rows, masks, max_tokens if concatenate else None)
    if odd:
        answered = _Answered(answer, odd, tokenizer)
        return dict(
            streaming.encode_streaming(examples, answered, max_tokens, text_column, concatenate)
        )
    if not concatenate:
        return {
            "input_ids": [row[:] for row in rows],
            "labels": [row[:] for row in rows],
            "attention_mask": [row[:] for row in masks],
        }
    packed = pack(rows, max_tokens, pad, eos, LABEL_PAD)
    columns = {
        "input_ids": packed.input_ids,
        "labels": packed.labels,
        "attention_mask": packed.attention_mask,
    }
    if not all(rows):
        # A row with an empty document holds floats of 32 bits, in every column.
        place = 0
        for number, (edges, _) in enumerate(packed.edges):
            members = rows[place : place + len(edges)]
            place += len(edges)
            if not all(members):
                for column in columns.values():
                    column[number] = np.array(column[number], np.float32).tolist()
    streaming.LOG.debug(len(packed.input_ids))
    return columns


@dataclass(frozen=True, slots=True)
class _Answered:
    """Stands for a tokenizer that was called already: gives that answer again."""

    answer: Any
    reason: str
    original: Any = None

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.answer

    @property
    def eos_token_id(self) -> Any:
        return self.original.eos_token_id

    @property
    def pad_token_id(self) -> Any:
        return self.original.pad_token_id


def _unusual(tokenizer: Any, rows: Any, masks: Any, width: int | None) -> str:
    """Why these are not lists of lists of ``int`` beside masks of ones; empty where they are."""
    import torch
    from transformers import PreTrainedTokenizerFast

    if type(rows) is not list or type(masks) is not list:
        return "the tokenizer did not return lists"
    if {*map(type, rows), *map(type, masks)} - {list}:
        return "the tokenizer did not return lists of lists"
    if list(map(len, rows)) != list(map(len, masks)):
        return "tokens and attention masks differ in length"
    if any(mask.count(1) != len(mask) for mask in masks):
        return "the attention mask is not all ones"
    # The lists of a fast tokenizer come out of the Rust library as they are: unsigned integers of
    # 32 bits. Looking at every type and value would take as long as packing them.
    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus", "_convert_encoding")
    )
    if not is_plain and not (_are_integers(rows) and _are_integers(masks)):
        return "a token or a mask is not a 64-bit int"
    if width is None:
        return ""
    if max(map(len, rows), default=0) + SEPARATORS > width:
        return "a text is longer than max_tokens"
    # An empty text makes floats of torch's default type; only one of them rounds as numpy does.
    if not all(rows) and torch.get_default_dtype() is not torch.float32:
        return "a text is empty and torch's default is not float32"
    return ""


def _are_integers(rows: _Rows) -> bool:
    if set(map(type, chain.from_iterable(rows))) - {int}:
        return False
    filled = [row for row in rows if row]
    least, most = min(map(min, filled), default=0), max(map(max, filled), default=0)
    return bool(_INT64.min <= least and most <= _INT64.max)
