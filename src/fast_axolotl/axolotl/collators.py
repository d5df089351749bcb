"""Axolotl's three collators for packed batches, on arrays instead of Python lists.

Axolotl hands rows to ``tokenizer.pad``, which makes lists of the arrays it is given, pads them one
by one, and then has every token flattened once more to see whether there are any. Here each column
is written straight into the tensor that is returned, whose widths, padding and order of columns
follow the same rules: every column is as wide as the longest row, to a multiple of
``pad_to_multiple_of``.

Cost of a pack of 4,096 tokens in four columns: 0.5 ms from lists, most of it to read them; 0.1 ms
from arrays. Memory: the tensors, and one array of each row.

Rows are read before anything is written. Subclasses (distillation has some), tokenizers that pad
in a way of their own, models that prepare decoder inputs, columns beside the five that Axolotl
makes, values that are not lists or arrays of int64, and rows that are empty or whose columns differ
in length are left to Axolotl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fast_axolotl.axolotl.patching import Unfamiliar

_Tokens = npt.NDArray[np.int64]
_Row = dict[str, _Tokens]
"""The columns of one row of the batch."""

_PADDED_FIRST = ("labels", "position_ids")
"""Columns that Axolotl pads itself, by their own length, before the tokenizer pads the others."""

_COLUMNS = ("input_ids", "attention_mask", "token_type_ids", *_PADDED_FIRST)

_EXACT = 2**53
"""Axolotl takes arrays of labels through float64 where no padding follows them."""


def collate_packs(self: Any, features: Any, return_tensors: Any = None) -> Any:
    """For ``BatchSamplerDataCollatorForSeq2Seq.__call__``: a row for each list of features."""
    _check_collator(self, "BatchSamplerDataCollatorForSeq2Seq", return_tensors)
    return _batch(self, [_row(pack) for pack in _packs(features)])


def collate_packs_v2(self: Any, features: Any, return_tensors: Any = None) -> Any:
    """For ``V2BatchSamplerDataCollatorForSeq2Seq.__call__``: its mask numbers the features."""
    _check_collator(self, "V2BatchSamplerDataCollatorForSeq2Seq", return_tensors)
    rows = [_row(pack, numbers_mask=True) for pack in _packs(features)]
    for row in rows:
        if self.squash_position_ids and "position_ids" in row:
            row["position_ids"] = np.arange(len(row["position_ids"]))
    return _batch(self, rows)


def collate_pretraining(self: Any, features: Any, return_tensors: Any = None) -> Any:
    """For ``PretrainingBatchSamplerDataCollatorForSeq2Seq.__call__``: one row from columns."""
    _check_collator(self, "PretrainingBatchSamplerDataCollatorForSeq2Seq", return_tensors)
    if type(features) is not dict:
        raise Unfamiliar(f"the features are a {type(features).__name__}, not a dict")
    row: _Row = {}
    for name, values in features.items():
        if name == "length":
            continue
        if type(values) is not list or not values:
            raise Unfamiliar(f"the column {name!r} is not a list of lists")
        row[name] = _join(name, values, numbers_mask=self.multipack_attn)
    return _batch(self, [row])


def _packs(features: Any) -> list[list[dict[str, Any]]]:
    if type(features) is not list or not features:
        raise Unfamiliar("the features are not a list")
    packs = features if isinstance(features[0], list) else [features]
    if not all(type(pack) is list and pack for pack in packs):
        raise Unfamiliar("a pack is not a list of features")
    return packs


def _row(features: Sequence[dict[str, Any]], *, numbers_mask: bool = False) -> _Row:
    """The columns of features that lie end to end."""
    if not all(type(feature) is dict for feature in features):
        raise Unfamiliar("a feature is not a dict")
    names = features[0].keys()
    if not all(feature.keys() == names for feature in features):
        raise Unfamiliar("features differ in their columns")
    return {
        name: _join(name, [feature[name] for feature in features], numbers_mask=numbers_mask)
        for name in names
        if name != "length"
    }


def _join(name: str, values: Sequence[Any], *, numbers_mask: bool) -> _Tokens:
    """A column of several features, one after the other; a mask may have their numbers."""
    if name not in _COLUMNS:
        raise Unfamiliar(f"the column {name!r} is not a column that Axolotl pads")
    parts = []
    for number, value in enumerate(values, 1):
        if type(value) not in (list, np.ndarray):
            raise Unfamiliar(f"{name!r} is a {type(value).__name__}, not a list or an array")
        part = np.asarray(value)
        if part.dtype != np.int64 or part.ndim != 1 or not part.size:
            raise Unfamiliar(f"{name!r} is empty, or not made of integers of 64 bits")
        parts.append(number * part if numbers_mask and name == "attention_mask" else part)
    return np.concatenate(parts)


def _batch(self: Any, rows: list[_Row]) -> Any:
    """The batch as ``tokenizer.pad`` returns it."""
    import torch
    from transformers import BatchEncoding

    tokenizer, names = self.tokenizer, rows[0].keys()
    knows_mask = "attention_mask" in tokenizer.model_input_names
    if "input_ids" not in names or ("attention_mask" in names and not knows_mask):
        raise Unfamiliar("input_ids are missing, or the tokenizer does not know the mask")
    lengths = [len(row["input_ids"]) for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        if row.keys() != names or any(len(tokens) != length for tokens in row.values()):
            raise Unfamiliar("rows differ in their columns, or columns in their lengths")
    multiple, is_left = self.pad_to_multiple_of or 1, tokenizer.padding_side == "left"
    width = -(-max(lengths) // multiple) * multiple
    fills = {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "labels": self.label_pad_token_id,
        "attention_mask": 0,
    }
    columns = {}
    for name in names:
        places = np.empty((len(rows), width), np.int64)
        for line, row, length in zip(places, rows, lengths, strict=True):
            start = width - length if is_left else 0
            padding = line[:start] if is_left else line[length:]
            line[start : start + length] = row[name]
            if len(padding):
                is_range = name == "position_ids"
                padding[:] = np.arange(len(padding)) if is_range else fills[name]
        if name in _PADDED_FIRST and not -_EXACT <= places.min() <= places.max() <= _EXACT:
            raise Unfamiliar(f"{name!r} has values that do not fit in float64")
        # A tensor that owns its memory, as Axolotl's do: a few microseconds for the copy.
        columns[name] = torch.from_numpy(places).clone()
    return BatchEncoding(columns)


def _check_collator(self: Any, kind: str, return_tensors: Any) -> None:
    """Raises unless all that the collator and its tokenizer say about padding is usual."""
    import torch
    from axolotl.utils.collators import batching
    from transformers import PreTrainedTokenizerBase

    if type(self) is not getattr(batching, kind):
        raise Unfamiliar(f"the collator is a {type(self).__name__}")
    tensors = self.return_tensors if return_tensors is None else return_tensors
    if self.model is not None and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
        raise Unfamiliar("the model prepares decoder_input_ids")
    if tensors != "pt" or torch.get_default_device().type != "cpu":
        raise Unfamiliar(f"return_tensors is {tensors!r}, or the default device is not the CPU")
    is_longest = self.padding is True or self.padding == "longest"
    if not is_longest or (self.padding is True and self.max_length is not None):
        raise Unfamiliar("rows are not padded to the longest of them")
    for name, least in (("pad_to_multiple_of", 1), ("label_pad_token_id", -_EXACT)):
        value = getattr(self, name)
        if value is not None and (type(value) is not int or not least <= value <= _EXACT):
            raise Unfamiliar(f"{name} is {value!r}")
    tokenizer, base = self.tokenizer, PreTrainedTokenizerBase
    owner, own = type(tokenizer), vars(tokenizer)
    for name in ("pad", "_pad", "_get_padding_truncation_strategies"):
        if getattr(owner, name, None) is not getattr(base, name) or name in own:
            raise Unfamiliar(f"the tokenizer {owner.__name__} has its own {name}")
    if tokenizer.model_input_names[0] != "input_ids":
        raise Unfamiliar(f"the tokenizer's main input is {tokenizer.model_input_names[0]}")
    if tokenizer.padding_side not in ("left", "right"):
        raise Unfamiliar(f"padding_side is {tokenizer.padding_side!r}")
    # What the tokenizer says of its settings, it says here, too.
    tokenizer._get_padding_truncation_strategies(
        padding=self.padding, max_length=self.max_length, verbose=True
    )
