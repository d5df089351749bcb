"""Our collators return what those of the real Axolotl return."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.axolotl import collators as ours
from fast_axolotl.axolotl.patching import Unfamiliar
from support.axolotl import STOCK_AXOLOTL, word_tokenizer

pytestmark = STOCK_AXOLOTL

PACKS = "BatchSamplerDataCollatorForSeq2Seq"
V2 = "V2BatchSamplerDataCollatorForSeq2Seq"
PRETRAINING = "PretrainingBatchSamplerDataCollatorForSeq2Seq"
OURS = {
    PACKS: ours.collate_packs,
    V2: ours.collate_packs_v2,
    PRETRAINING: ours.collate_pretraining,
}


@functools.cache
def base_tokenizer() -> Any:
    return word_tokenizer(model_input_names=["input_ids", "attention_mask"])


def tokenizer(**changes: Any) -> Any:
    changed = copy.deepcopy(base_tokenizer())
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def collator(kind: str, tokens: Any = None, **options: Any) -> Any:
    from axolotl.utils.collators import batching

    return getattr(batching, kind)(tokens or tokenizer(), **options)


def feature(length: int, columns: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng([length, seed])
    values = {
        "input_ids": draw.integers(0, 50_000, length).tolist(),
        "labels": draw.integers(-100, 50_000, length).tolist(),
        "attention_mask": draw.integers(0, 2, length).tolist(),
        "position_ids": list(range(length)),
        "token_type_ids": draw.integers(0, 3, length).tolist(),
        "length": length,
    }
    return {name: values[name] for name in columns}


ALL = ("input_ids", "attention_mask", "labels", "position_ids")


def arrays(features: Any) -> Any:
    """The same features, with arrays in the place of lists of integers."""
    if isinstance(features, dict):
        return {name: arrays(value) for name, value in features.items()}
    if isinstance(features, list) and features and isinstance(features[0], int):
        return np.array(features)
    return [arrays(item) for item in features] if isinstance(features, list) else features


def assert_same(found: Any, expected: Any) -> None:
    """Two batches, or features left behind, are equal with all their types."""
    import torch

    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert found.untyped_storage().resizable() == expected.untyped_storage().resizable()
        assert torch.equal(found, expected)
    elif hasattr(expected, "keys"):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
        assert vars(found).keys() == vars(expected).keys() if hasattr(found, "data") else True
    else:
        assert repr(found) == repr(expected)


def same(kind: str, features: Any, tokens: Any = None, **options: Any) -> None:
    """Axolotl's collator and ours return the same, and leave the features alike."""
    own = collator(kind, tokens, **options)
    theirs, mine = copy.deepcopy(features), copy.deepcopy(features)
    expected = own(theirs)
    found = OURS[kind](own, mine)
    assert_same(found, expected)
    assert_same(mine, theirs)


def example(kind: str, lengths: list[int], columns: tuple[str, ...] = ALL) -> Any:
    """Features of these lengths, in the shape that a collator takes."""
    features = [feature(length, columns, seed) for seed, length in enumerate(lengths)]
    if kind == PRETRAINING:
        return {name: [item[name] for item in features] for name in columns}
    return [features[:2], features[2:]] if len(features) > 2 else [features]


def special_cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """A collator, features, changes of the tokenizer, and options."""
    for kind in OURS:
        yield kind, example(kind, [5, 9, 14]), {}, {"padding": "longest", "max_length": 3}
        # Lengths are left out of packs.
        yield kind, example(kind, [5, 9, 14], (*ALL, "length")), {}, {"pad_to_multiple_of": 8}
    for kind in (PACKS, V2):
        # One pack may come without a list around it.
        yield kind, [feature(length, ALL) for length in (3, 4)], {}, {"pad_to_multiple_of": 16}
    yield PRETRAINING, example(PRETRAINING, [5, 9]), {}, {"multipack_attn": False}
    # Rows of one length need no padding.
    yield PACKS, [example(PACKS, [length])[0] for length in (6, 6)], {}, {}
    # A mask that the tokenizer would add is taken out.
    unmasked = example(PACKS, [5, 9], ("input_ids", "labels"))
    yield PACKS, unmasked, {"model_input_names": ["input_ids"]}, {}
    yield PACKS, unmasked, {}, {}
    # Bools and numpy's integers count as Axolotl counts them.
    mixed = {"input_ids": [3, True, 5], "labels": [1, np.int32(4), np.int64(-100)]}
    yield V2, [[mixed, unmasked[0][0]]], {}, {}


def test_special_rows_and_settings_give_the_same_batch() -> None:
    for kind, features, changes, options in special_cases():
        same(kind, features, tokenizer(**changes), **options)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_rows_and_settings_give_the_same_batch(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(OURS)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    others = ["labels", "attention_mask", "position_ids", "token_type_ids"]
    columns = data.draw(st.permutations(others))[: data.draw(st.integers(0, 4))]
    place = data.draw(st.integers(0, len(columns)))
    features = example(kind, lengths, (*columns[:place], "input_ids", *columns[place:]))
    features = arrays(features) if data.draw(st.booleans()) else features
    options: dict[str, Any] = {
        "pad_to_multiple_of": data.draw(st.none() | st.integers(1, 70)),
        "label_pad_token_id": data.draw(st.sampled_from([-100, -7])),
    }
    if kind == V2:
        options["squash_position_ids"] = data.draw(st.booleans())
    side = data.draw(st.sampled_from(["left", "right"]))
    same(kind, features, tokenizer(padding_side=side), **options)


def refused(kind: str, features: Any, tokens: Any = None, **options: Any) -> None:
    """Ours refuses, and has changed nothing."""
    own = collator(kind, tokens, **options)
    before = copy.deepcopy(features)
    with pytest.raises(Unfamiliar):
        OURS[kind](own, features)
    assert str(features) == str(before)


def odd_features() -> dict[str, Any]:
    import torch

    good = feature(4, ALL)
    return {
        "empty": [],
        "an empty row": [{name: [] for name in ALL}],
        "tensors": [{"input_ids": torch.tensor([1, 2])}],
        "floats": [{"input_ids": [1.0, 2.0]}],
        "none": [{"input_ids": [1, None]}],
        "too large": [{"input_ids": [2**64]}],
        "another column": [good | {"target_logprobs": [[0.1]] * 4}],
        "a string": [good | {"text": "abc"}],
        "columns differ": [good, {"input_ids": [1]}],
        "lengths differ": [good | {"labels": [1]}],
        "no input_ids": [{"labels": [1, 2]}],
        "inexact labels": [{"input_ids": [1], "labels": [2**53 + 1]}],
    }


def test_odd_features_are_left_to_axolotl() -> None:
    for name, features in odd_features().items():
        for kind in (PACKS, V2):
            refused(kind, features)
        if name in ("floats", "a string", "lengths differ"):
            columns = {key: [item.get(key) for item in features] for key in features[0]}
            refused(PRETRAINING, columns)


class Preparing:
    def prepare_decoder_input_ids_from_labels(self, labels: Any) -> Any:
        return labels


ODD_OPTIONS: list[dict[str, Any]] = [
    {"return_tensors": None},
    {"return_tensors": "np"},
    {"model": Preparing()},
    {"padding": True, "max_length": 90},
    {"pad_to_multiple_of": 0},
    {"padding": "max_length", "max_length": 3},
    {"padding": False},
    {"label_pad_token_id": 1.5},
]


def test_odd_settings_tokenizers_and_subclasses_are_left_to_axolotl() -> None:
    for options in ODD_OPTIONS:
        refused(V2, example(V2, [5, 9, 13]), **options)

    class Own(type(base_tokenizer())):  # type: ignore[misc]
        def _pad(self, *args: Any, **kwargs: Any) -> Any:
            return super()._pad(*args, **kwargs)

    other, main, maskless = (tokenizer() for _ in range(3))
    other.__class__ = Own
    main.model_input_names = ["input_values"]
    maskless.model_input_names = ["input_ids"]
    replaced = tokenizer(pad=lambda *_, **__: None)
    for tokens in (other, main, maskless, replaced):
        refused(V2, example(V2, [4, 5, 6]), tokens)
    for kind, function in OURS.items():

        class Subclass(type(collator(kind))):  # type: ignore[misc]
            pass

        with pytest.raises(Unfamiliar):
            function(Subclass(tokenizer()), example(kind, [4, 5]))
    with pytest.raises(ValueError, match="padding token"):
        ours.collate_packs_v2(collator(V2, tokenizer(pad_token=None)), example(V2, [4, 5, 6]))
