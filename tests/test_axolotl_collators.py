"""Our collators and fetcher return what those of the real Axolotl return.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.integrations import axolotl_collators as ours
from fast_axolotl.integrations.patching import MARK, Unfamiliar
from fast_axolotl.measure.batch_counts import BatchCounter
from support.axolotl import AGAINST_AXOLOTL

pytestmark = AGAINST_AXOLOTL

PLAIN = "DataCollatorForSeq2Seq"
PACKS = "BatchSamplerDataCollatorForSeq2Seq"
V2 = "V2BatchSamplerDataCollatorForSeq2Seq"
PRETRAINING = "PretrainingBatchSamplerDataCollatorForSeq2Seq"
OURS = {
    PLAIN: ours.collate,
    PACKS: ours.collate_packs,
    V2: ours.collate_packs_v2,
    PRETRAINING: ours.collate_pretraining,
}


@pytest.fixture(scope="module")
def batching(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.collators.batching")


@functools.cache
def base_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<pad>": 9, "a": 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def tokenizer(**changes: Any) -> Any:
    changed = copy.deepcopy(base_tokenizer())
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


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
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.flags.owndata == expected.flags.owndata
        assert np.array_equal(found, expected)
    elif hasattr(expected, "keys"):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
        assert vars(found).keys() == vars(expected).keys() if hasattr(found, "data") else True
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def same(batching: Any, kind: str, features: Any, tokens: Any = None, **options: Any) -> None:
    """Axolotl's collator and ours return the same, and leave the features alike."""
    call = options.pop("call", {})
    collator = getattr(batching, kind)(tokens or tokenizer(), **options)
    theirs, mine = copy.deepcopy(features), copy.deepcopy(features)
    expected = collator(theirs, **call)
    found = OURS[kind](collator, mine, **call)
    assert_same(found, expected)
    assert_same(mine, theirs)


def example(kind: str, lengths: list[int], columns: tuple[str, ...] = ALL) -> Any:
    """Features of these lengths, in the shape that a collator takes."""
    features = [feature(length, columns, seed) for seed, length in enumerate(lengths)]
    if kind == PLAIN:
        return features
    if kind == PRETRAINING:
        return {name: [item[name] for item in features] for name in columns}
    return [features[:2], features[2:]] if len(features) > 2 else [features]


OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "multiple": {"pad_to_multiple_of": 16},
    "multiple of one": {"pad_to_multiple_of": 1},
    "longest": {"padding": "longest", "max_length": 3},
    "max_length": {"padding": "max_length", "max_length": 50},
    "max_length and multiple": {
        "padding": "max_length",
        "max_length": 50,
        "pad_to_multiple_of": 16,
    },
    "other labels": {"label_pad_token_id": -7},
    "numpy": {"return_tensors": "np"},
    "numpy asked": {"call": {"return_tensors": "np"}, "pad_to_multiple_of": 8},
    "a model that prepares nothing": {"model": object()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("is_array", [False, True])
def test_every_collator_returns_the_same_batch(
    batching: Any, kind: str, side: str, options: dict[str, Any], is_array: bool
) -> None:
    features = example(kind, [5, 9, 14])
    features = arrays(features) if is_array else features
    same(batching, kind, features, tokenizer(padding_side=side), **options)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "columns",
    [
        ("input_ids",),
        ("labels", "input_ids"),
        ("position_ids", "labels", "input_ids"),
        ("attention_mask", "input_ids"),
        ("input_ids", "token_type_ids", "attention_mask", "labels"),
    ],
)
def test_columns_keep_their_order_and_none_is_added(
    batching: Any, kind: str, columns: tuple[str, ...]
) -> None:
    same(batching, kind, example(kind, [5, 9, 14], columns), pad_to_multiple_of=8)


@pytest.mark.parametrize("kind", [PACKS, V2, PRETRAINING])
def test_lengths_are_left_out_of_packs(batching: Any, kind: str) -> None:
    features = example(kind, [5, 9, 14], (*ALL, "length"))
    same(batching, kind, features, pad_to_multiple_of=8)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [PACKS, V2])
def test_the_meter_counts_the_rows_inside_packs(batching: Any, kind: str, side: str) -> None:
    packs = example(kind, [5, 9, 14])
    for item in itertools.chain.from_iterable(packs):
        item["attention_mask"] = [1] * len(item["labels"])
    collator = getattr(batching, kind)(tokenizer(padding_side=side), pad_to_multiple_of=32)
    batch = collator(packs)
    counter = BatchCounter()
    assert counter.count(batch).rows == 3
    if side == "right":  # how Axolotl pads, and then it may leave the mask out
        del batch["attention_mask"]
        counter.pad_token_id = collator.tokenizer.pad_token_id
        assert counter.count(batch).rows == 3


@pytest.mark.parametrize("kind", [PACKS, V2])
def test_one_pack_may_come_without_a_list_around_it(batching: Any, kind: str) -> None:
    same(batching, kind, [feature(length, ALL) for length in (3, 4)], pad_to_multiple_of=16)


@pytest.mark.parametrize("multiple", [None, 32])
@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_can_be_squashed(batching: Any, multiple: int | None, side: str) -> None:
    same(
        batching,
        V2,
        example(V2, [5, 9, 14, 3]),
        tokenizer(padding_side=side),
        squash_position_ids=True,
        pad_to_multiple_of=multiple,
    )


def test_pretraining_may_leave_the_mask_unnumbered(batching: Any) -> None:
    same(batching, PRETRAINING, example(PRETRAINING, [5, 9]), multipack_attn=False)


def test_rows_of_one_length_need_no_padding(batching: Any) -> None:
    same(batching, PLAIN, example(PLAIN, [6, 6]), padding=False)
    same(batching, PLAIN, example(PLAIN, [6, 6]), padding="do_not_pad", pad_to_multiple_of=4)
    same(batching, PRETRAINING, example(PRETRAINING, [6, 7]), padding=False, pad_to_multiple_of=4)
    same(batching, PLAIN, example(PLAIN, [6, 6]), tokenizer(pad_token=None), padding=False)


def test_max_length_may_be_that_of_the_model(batching: Any) -> None:
    short = tokenizer(model_max_length=24)
    same(batching, PLAIN, example(PLAIN, [6, 9]), short, padding="max_length")
    same(batching, PRETRAINING, example(PRETRAINING, [6, 9]), padding="max_length")


def test_a_mask_that_the_tokenizer_would_add_is_taken_out(batching: Any) -> None:
    columns = ("input_ids", "labels")
    maskless = tokenizer(model_input_names=["input_ids"])
    same(batching, PLAIN, example(PLAIN, [5, 9], columns), maskless)
    same(batching, PLAIN, example(PLAIN, [5, 9], columns))


def test_the_same_feature_twice_is_padded_once(batching: Any) -> None:
    collator = batching.DataCollatorForSeq2Seq(tokenizer())
    results = []
    for call in (collator, functools.partial(ours.collate, collator)):
        once = feature(4, ALL)
        features = [once, feature(9, ALL), once]
        results.append((call(features), features))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])


def test_bools_and_numpy_integers_among_integers_count_as_axolotl_counts_them(
    batching: Any,
) -> None:
    mixed = {"input_ids": [3, True, 5], "labels": [1, np.int32(4), np.int64(-100)]}
    same(batching, PLAIN, [mixed, feature(5, ("input_ids", "labels"))])
    same(batching, V2, [[mixed, feature(5, ("input_ids", "labels"))]])


def test_a_batch_survives_pickling_and_can_be_changed(batching: Any) -> None:
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer())
    batch = ours.collate_packs_v2(collator, example(V2, [5, 9]))
    assert_same(pickle.loads(pickle.dumps(batch)).data, batch.data)
    batch["labels"].resize_(3, 40)
    assert batch["input_ids"].is_contiguous()


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_rows_and_settings_give_the_same_batch(batching: Any, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(OURS)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    columns = data.draw(st.permutations(["labels", "attention_mask", "position_ids"]))
    count = data.draw(st.integers(0, 3))
    features = example(kind, lengths, ("input_ids", *columns[:count]))
    features = arrays(features) if data.draw(st.booleans()) else features
    options: dict[str, Any] = {
        "pad_to_multiple_of": data.draw(st.none() | st.integers(1, 70)),
        "return_tensors": data.draw(st.sampled_from(["pt", "np"])),
    }
    if kind == V2:
        options["squash_position_ids"] = data.draw(st.booleans())
    side = data.draw(st.sampled_from(["left", "right"]))
    same(batching, kind, features, tokenizer(padding_side=side), **options)


def refused(batching: Any, kind: str, features: Any, tokens: Any = None, **options: Any) -> None:
    """Ours refuses, and has changed nothing."""
    collator = getattr(batching, kind)(tokens or tokenizer(), **options)
    before = copy.deepcopy(features)
    with pytest.raises(Unfamiliar):
        OURS[kind](collator, features)
    assert str(features) == str(before)


def odd_features() -> dict[str, Any]:
    import torch

    good = feature(4, ALL)
    return {
        "empty": [],
        "a tuple": (good,),
        "an empty row": [{name: [] for name in ALL}],
        "tensors": [{"input_ids": torch.tensor([1, 2])}],
        "floats": [{"input_ids": [1.0, 2.0]}],
        "bools": [{"input_ids": [True, False]}],
        "none": [{"input_ids": [1, None]}],
        "nested": [{"input_ids": [[1, 2], [3, 4]]}],
        "too large": [{"input_ids": [2**64]}],
        "small arrays": [{"input_ids": np.array([1, 2], np.int32)}],
        "another column": [good | {"target_logprobs": [[0.1]] * 4}],
        "a string": [good | {"text": "abc"}],
        "columns differ": [good, {"input_ids": [1]}],
        "lengths differ": [good | {"labels": [1]}],
        "no input_ids": [{"labels": [1, 2]}],
        "inexact labels": [{"input_ids": [1], "labels": [2**53 + 1]}],
    }


@pytest.mark.parametrize("name", [
    "empty", "a tuple", "an empty row", "tensors", "floats", "bools", "none", "nested",
    "too large", "small arrays", "another column", "a string", "columns differ",
    "lengths differ", "no input_ids", "inexact labels",
])  # fmt: skip
@pytest.mark.parametrize("kind", [PLAIN, PACKS, V2])
def test_odd_features_are_left_to_axolotl(batching: Any, kind: str, name: str) -> None:
    features = odd_features()[name]
    refused(batching, kind, features)
    if name in ("floats", "nested", "a string", "lengths differ"):
        columns = {key: [item.get(key) for item in features] for key in features[0]}
        refused(batching, PRETRAINING, columns)


def test_a_length_beside_the_columns_and_mixed_kinds_are_left_to_axolotl(batching: Any) -> None:
    refused(batching, PLAIN, [feature(4, (*ALL, "length"))])
    refused(batching, PLAIN, [{"input_ids": [1, 2], "labels": np.array([1, 2])}])
    refused(batching, PLAIN, [{"input_ids": [np.int64(1), 2]}])


class Preparing:
    def prepare_decoder_input_ids_from_labels(self, labels: Any) -> Any:
        return labels


@pytest.mark.parametrize(
    "options",
    [
        {"return_tensors": None},
        {"return_tensors": "tf"},
        {"model": Preparing()},
        {"padding": True, "max_length": 90},
        {"pad_to_multiple_of": 0},
        {"padding": "max_length", "max_length": 3},
        {"padding": False},
        {"label_pad_token_id": 1.5},
    ],
)
@pytest.mark.parametrize("kind", [PLAIN, V2])
def test_odd_settings_are_left_to_axolotl(
    batching: Any, kind: str, options: dict[str, Any]
) -> None:
    refused(batching, kind, example(kind, [5, 9, 13]), **options)


def test_odd_tokenizers_are_left_to_axolotl(batching: Any) -> None:
    class Own(type(base_tokenizer())):  # type: ignore[misc]
        def _pad(self, *args: Any, **kwargs: Any) -> Any:
            return super()._pad(*args, **kwargs)

    other, main, maskless = (tokenizer() for _ in range(3))
    other.__class__ = Own
    main.model_input_names = ["input_values"]
    maskless.model_input_names = ["input_ids"]
    replaced = tokenizer(pad=lambda *_, **__: None)
    for tokens in (other, main, maskless, replaced):
        refused(batching, PLAIN, example(PLAIN, [4, 5]), tokens)
    collator = batching.DataCollatorForSeq2Seq(tokenizer(pad_token=None))
    with pytest.raises(ValueError, match="padding token"):
        ours.collate(collator, example(PLAIN, [4, 5]))


def test_subclasses_are_left_to_axolotl(batching: Any) -> None:
    for kind, function in OURS.items():

        class Own(getattr(batching, kind)):  # type: ignore[misc]
            pass

        with pytest.raises(Unfamiliar):
            function(Own(tokenizer()), example(kind, [4, 5]))


@pytest.fixture
def installed(batching: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ours in the place of Axolotl's collators, and whether Axolotl's own was called."""
    for kind, function in OURS.items():
        setattr(function, MARK, "collators")
        monkeypatch.setattr(getattr(batching, kind), "__call__", function)
    yield
    for function in OURS.values():
        delattr(function, MARK)


def fetchers(stock: Callable[[str], Any], dataset: Any, collator: Any) -> Any:
    module = stock("axolotl.monkeypatch.data.batch_dataset_fetcher")
    return module._MapDatasetFetcher(dataset, True, collator, False)


def rows_dataset(count: int = 30, columns: tuple[str, ...] = ALL, **extra: Any) -> Any:
    import datasets

    rows = [feature(3 + index % 7, columns, index) for index in range(count)]
    table = {name: [row[name] for row in rows] for name in columns}
    return datasets.Dataset.from_dict(table | extra)


def typed(dataset: Any, **types: Any) -> Any:
    import datasets

    features = dataset.features.copy()
    for name, kind in types.items():
        features[name] = datasets.List(datasets.Value(kind))
    return dataset.cast(features)


def datasets_of_every_shape() -> dict[str, Any]:
    import datasets

    plain = rows_dataset()
    parts = [plain.select(range(9)), plain.select(range(9, 30))]
    large = plain.features | {"labels": datasets.LargeList(datasets.Value("int64"))}
    return {
        "plain": plain,
        "shuffled": plain.shuffle(seed=3),
        "joined": datasets.concatenate_datasets([part.flatten_indices() for part in parts]),
        "small integers": typed(plain, input_ids="int32", attention_mask="int8", labels="uint16"),
        "large lists": plain.cast(datasets.Features(large)),
        "with length": rows_dataset(columns=(*ALL, "length")),
        "column removed": rows_dataset(columns=(*ALL, "length")).remove_columns(["length"]),
    }


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", [PLAIN, PACKS, V2])
@pytest.mark.parametrize("name", [
    "plain", "shuffled", "joined", "small integers", "large lists", "with length",
    "column removed",
])  # fmt: skip
@pytest.mark.parametrize("index", [[[0, 29, 5], [7, 7]], [[4]], [3, 17, 9]], ids=repr)
def test_fetching_gives_the_batch_of_axolotl(
    stock: Any, batching: Any, kind: str, name: str, index: Any
) -> None:
    if (kind == PLAIN) == isinstance(index[0], list) or (kind == PLAIN and name == "with length"):
        return
    dataset = datasets_of_every_shape()[name]
    collator = getattr(batching, kind)(tokenizer(), pad_to_multiple_of=16)
    fetcher = fetchers(stock, dataset, collator)
    expected = type(fetcher).fetch(fetcher, copy.deepcopy(index))
    assert_same(ours.fetch(fetcher, index), expected)


def odd_datasets() -> dict[str, Any]:
    import datasets

    return {
        "a string": rows_dataset(text=["a"] * 30),
        "a number": rows_dataset(score=list(range(30))),
        "floats": typed(rows_dataset(), labels="float32"),
        "a format": rows_dataset().with_format("numpy"),
        "some columns": rows_dataset().with_format(None, columns=["input_ids"]),
        "nulls": rows_dataset(columns=("input_ids",), labels=[None] + [[1]] * 29),
        "null tokens": rows_dataset(columns=("input_ids",), labels=[[None]] + [[1]] * 29),
        "empty rows": rows_dataset(columns=("input_ids",), labels=[[]] + [[1]] * 29),
        "inexact": rows_dataset(columns=("input_ids",), labels=[[2**60 + 1]] + [[1]] * 29),
        "a list": [feature(4, ALL)] * 30,
        "nested": rows_dataset(columns=("input_ids",), labels=[[[1]]] * 30),
        "fixed": rows_dataset(columns=("input_ids",)).cast(
            datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
        ).add_column("labels", [[1]] * 30).cast_column(
            "labels", datasets.List(datasets.Value("int64"), length=1)
        ),
    }  # fmt: skip


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [
    "a string", "a number", "floats", "a format", "some columns", "nulls", "null tokens",
    "empty rows", "inexact", "a list", "nested", "fixed",
])  # fmt: skip
def test_odd_datasets_are_left_to_axolotl(stock: Any, batching: Any, name: str) -> None:
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer())
    fetcher = fetchers(stock, odd_datasets()[name], collator)
    with pytest.raises(Unfamiliar):
        ours.fetch(fetcher, [[0, 1]])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "index", [[], [[]], [[30]], [[-1]], [["a"]], [[True]], [[0], 1], (0, 1)], ids=repr
)
def test_odd_indices_are_left_to_axolotl(stock: Any, batching: Any, index: Any) -> None:
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer())
    fetcher = fetchers(stock, rows_dataset(), collator)
    with pytest.raises(Unfamiliar):
        ours.fetch(fetcher, index)


@pytest.mark.usefixtures("installed")
def test_other_collators_and_fetchers_are_left_to_axolotl(stock: Any, batching: Any) -> None:
    class Own(batching.V2BatchSamplerDataCollatorForSeq2Seq):  # type: ignore[misc]
        pass

    for collator in (
        list,
        Own(tokenizer()),
        batching.DataCollatorForSeq2Seq(tokenizer(), padding=3),
    ):
        with pytest.raises((Unfamiliar, ValueError)):
            ours.fetch(fetchers(stock, rows_dataset(), collator), [[0, 1]])
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer())
    fetcher = fetchers(stock, rows_dataset(), collator)
    fetcher.auto_collation = False
    with pytest.raises(Unfamiliar):
        ours.fetch(fetcher, [[0, 1]])


def test_without_our_collators_the_fetcher_leaves_rows_to_axolotl(
    stock: Any, batching: Any
) -> None:
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer())
    with pytest.raises(Unfamiliar, match="takes arrays"):
        ours.fetch(fetchers(stock, rows_dataset(), collator), [[0, 1]])
