"""Axolotl's two encoders for streamed rows, with list and array operations in place of tensors.

``encode_streaming`` calls the tokenizer exactly as Axolotl does and packs its lists with
``packing.lists``, which writes the same rows. Axolotl builds a tensor for each document and appends
it to a growing one: a copy of the open row for each document. An empty document is a tensor of
floats there, and turns the row it lands in to floats; so it does here.

``encode_packed_streaming`` lets Axolotl's wrapper tokenise, and then does on the Arrow columns what
Axolotl does by filter, map, sampler, lookup and collator: drop what is shorter than two tokens or
longer than the limit, shuffle by one ``RandomSampler`` (one draw from torch's global generator),
first fit into bins, and one tensor per column and bin. Cost: two passes over the tokens, one copy.

What was tokenised is not tokenised again. Where its result is unusual, Axolotl's own function is
called with the result in place of the tokenizer or wrapper (``_Answered``); where the arguments
are, ``Unfamiliar`` is raised before anything is called.

Neither draws Axolotl's progress bars for its inner filter and map, or collects garbage for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.packing import plan_packs
from fast_axolotl.packing.lists import SEPARATORS, pack

LABEL_PAD = -100
"""What both encoders write where there is nothing to learn."""

SHORTEST = 2
"""The least tokens of a row that ``filter_sequences_by_length`` keeps by default."""

GROUP_SIZE = 100_000
"""Rows that the sampler packs together by default."""

_INT64 = np.iinfo(np.int64)
_UNUSED = {"num_truncated_tokens", "overflow_to_sample_mapping"}
_KNOWN = {"input_ids", "attention_mask", "labels"}

_Integers = npt.NDArray[np.int64]
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


def encode_packed_streaming(
    collate_fn: Any,
    ds_wrapper: Callable[..., Any],
    examples: dict[str, list[Any]],
    bin_size: int,
    max_seq_length: int = 2048,
    batch_size: int = 4,
    multipack_attn: bool | None = True,
) -> dict[str, list[Any]]:
    """Tokenise rows, drop those outside the limits, shuffle, pack and collate the rest."""
    if isinstance(ds_wrapper, _Answered):
        raise Unfamiliar(ds_wrapper.reason)
    for name, size, least in (
        ("max_seq_length", max_seq_length, 1),
        ("batch_size", batch_size, 1),
        ("bin_size", 0 if bin_size is None else bin_size, 0),
    ):
        if type(size) is not int or not least <= size < 2**31:
            raise Unfamiliar(f"{name} is {size!r}")
    padding = _padding_of(collate_fn)

    import torch
    from axolotl.utils.data import streaming
    from axolotl.utils.samplers import multipack
    from torch.utils.data import RandomSampler

    dataset = ds_wrapper(dataset=streaming.Dataset.from_dict(examples))[0]
    rows = _token_rows(dataset, max_seq_length, bool(multipack_attn))
    if isinstance(rows, str):
        answered = _Answered((dataset,), rows)
        options = (bin_size, max_seq_length, batch_size, multipack_attn)
        fallen: dict[str, list[Any]] = streaming.encode_packed_streaming(
            collate_fn, answered, examples, *options
        )
        return fallen
    # The bins that ``MultipackBatchSampler`` makes of a ``RandomSampler``, bin after bin.
    capacity, num_rows = batch_size * max_seq_length, len(rows.lengths)
    state = torch.get_rng_state()
    try:
        drawn = np.fromiter(RandomSampler(range(num_rows)), np.int64, num_rows)
        multipack.LOG.debug("Using single process for pack_parallel, running sequentially.")
        plan = plan_packs(
            rows.lengths[drawn], capacity, max_rows=bin_size or capacity, group_size=GROUP_SIZE
        )
    except BaseException:
        torch.set_rng_state(state)
        raise
    ordered = rows.ordered(drawn[plan.indices])
    return _collate(ordered, plan.offsets, padding, collate_fn.multipack_attn)


@dataclass(frozen=True, slots=True)
class _Answered:
    """Stands for a tokenizer or wrapper that was called already: gives that answer again."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Padding:
    """How the collator fills a bin up."""

    multiple: int
    values: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenRows:
    """The kept rows of a dataset as flat columns: the result's, in its order."""

    names: list[str]
    columns: dict[str, _Integers]
    starts: _Integers
    lengths: _Integers

    def ordered(self, indices: _Integers) -> _TokenRows:
        """The rows in another order, end to end."""
        starts, lengths = self.starts[indices], self.lengths[indices]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        columns = {name: values[places] for name, values in self.columns.items()}
        return _TokenRows(names=self.names, columns=columns, starts=ends - lengths, lengths=lengths)


def _padding_of(collate_fn: Any) -> _Padding:
    """What the collator pads with, where it is Axolotl's own with the settings it gives it."""
    from axolotl.utils.collators import PretrainingBatchSamplerDataCollatorForSeq2Seq
    from transformers import PreTrainedTokenizerBase

    if type(collate_fn) is not PretrainingBatchSamplerDataCollatorForSeq2Seq:
        raise Unfamiliar(f"the collator is a {type(collate_fn).__name__}")
    usual = collate_fn.model is None and collate_fn.max_length is None
    usual &= collate_fn.padding is True and collate_fn.return_tensors == "pt"
    multiple = 1 if collate_fn.pad_to_multiple_of is None else collate_fn.pad_to_multiple_of
    if not usual or type(multiple) is not int or multiple < 1:
        raise Unfamiliar("the collator has unusual settings")
    tokenizer = collate_fn.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or "pad" in vars(tokenizer):
        raise Unfamiliar("the tokenizer is not one of transformers")
    kind, base = type(tokenizer), PreTrainedTokenizerBase
    usual = kind.pad is base.pad and kind._pad is base._pad and tokenizer.padding_side == "right"
    names = tokenizer.model_input_names
    usual &= names[0] == "input_ids" and "attention_mask" in names
    pad, label_pad = tokenizer.pad_token_id, collate_fn.label_pad_token_id
    usual &= type(pad) is int and 0 <= pad <= _INT64.max and type(label_pad) is int
    if not usual:
        raise Unfamiliar("the tokenizer has custom padding")
    values = {"input_ids": pad, "labels": label_pad, "attention_mask": 0}
    return _Padding(multiple=multiple, values=values)


def _token_rows(dataset: Any, longest: int, isolated: bool) -> _TokenRows | str:
    """The rows within the limits; or what about the dataset is unusual."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or dataset._indices is not None:
        return "the wrapper did not return a plain dataset"
    if dataset._format_type is not None or dataset._format_columns is not None:
        return "the wrapper returned a dataset with a format"
    names = [name for name in dataset.column_names if name not in _UNUSED]
    if set(names) - _KNOWN or "input_ids" not in names:
        return f"the wrapper returned the columns {', '.join(names)}"
    if isolated and "attention_mask" not in names:
        return "there is no attention_mask to drop"
    flat = {}
    for name in names:
        column = _flat(dataset.data.column(name))
        if column is None:
            return f"{name} has values other than lists of integers"
        flat[name] = column
    offsets = flat["input_ids"][1]
    if any(not np.array_equal(offsets, other) for _, other in flat.values()):
        return "columns of a row differ in length"
    lengths = np.diff(offsets)
    kept = np.flatnonzero((lengths >= SHORTEST) & (lengths <= longest))
    if not len(kept):
        return "no row is within the limits"
    if isolated:
        names = [*(name for name in names if name != "attention_mask"), "position_ids"]
    if "labels" not in names:
        names.append("labels")
    columns = {name: flat[name][0] for name in names if name in flat}
    return _TokenRows(
        names=names, columns=columns, starts=offsets[:-1][kept], lengths=lengths[kept]
    )


def _flat(column: Any) -> tuple[_Integers, _Integers] | None:
    """Values and offsets of a column of lists; ``None`` where it is no such column."""
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type) or column.null_count:
        return None
    if kind.value_type == pa.uint64():
        return None
    values, lengths = [np.empty(0, np.int64)], [np.zeros(1, np.int64)]
    for chunk in column.chunks:
        inner = chunk.flatten()
        if inner.null_count:
            return None
        values.append(inner.to_numpy(zero_copy_only=False))
        lengths.append(pc.list_value_length(chunk).to_numpy(zero_copy_only=False))
    offsets = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    return np.concatenate(values, dtype=np.int64), offsets


def _collate(
    rows: _TokenRows, offsets: _Integers, padding: _Padding, numbered: bool
) -> dict[str, list[Any]]:
    """A tensor for each column and bin, padded to the multiple; padding has its own positions."""
    import torch

    columns = dict(rows.columns)
    columns.setdefault("labels", columns["input_ids"])
    columns["position_ids"] = np.arange(rows.lengths.sum()) - np.repeat(rows.starts, rows.lengths)
    if numbered and "attention_mask" in columns:
        within = np.arange(len(rows.lengths)) - np.repeat(offsets[:-1], np.diff(offsets))
        columns["attention_mask"] = columns["attention_mask"] * np.repeat(within + 1, rows.lengths)
    edges = np.append(rows.starts, len(columns["input_ids"]))[offsets].tolist()
    result: dict[str, list[Any]] = defaultdict(list)
    for start, stop in pairwise(edges):
        places = -(-(stop - start) // padding.multiple) * padding.multiple
        for name in rows.names:
            values, filling = columns[name][start:stop], padding.values.get(name)
            # A tensor of its own memory; positions in the padding are counted from 0.
            tensor = torch.empty(places, dtype=torch.int64)
            array = tensor.numpy()
            array[: len(values)] = values
            array[len(values) :] = np.arange(places - len(values)) if filling is None else filling
            result[name].append(tensor)
    return result
