"""Our encoders give what those of the real Axolotl give, floats and random states included."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.axolotl import encoders
from fast_axolotl.axolotl.patching import Unfamiliar
from support.axolotl import EQUAL_TO_STOCK, STOCK_AXOLOTL, Later, word_tokenizer

pytestmark = STOCK_AXOLOTL


theirs = Later("axolotl.utils.data.streaming")


def test_stock_is_the_released_one() -> None:
    for function in (theirs.encode_streaming, theirs.encode_packed_streaming):
        assert "/axolotl/utils/data/" in function.__code__.co_filename
        assert not hasattr(function, "__wrapped__")


class Tokenizer:
    """Texts are lists of tokens; counts its calls."""

    def __init__(self, eos: Any = 1, pad: Any = 0, cut: bool = True) -> None:
        self.eos_token_id, self.pad_token_id = eos, pad
        self.cut, self.calls = cut, list[Any]()

    def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
        self.calls.append(options)
        rows = [text[: options["max_length"]] if self.cut else text for text in texts]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


def same(rows: Any, width: int, make: Any = Tokenizer, **options: Any) -> Any:
    """Our columns, found equal down to the types of the numbers: 1 and 1.0 differ."""
    found = []
    for module in (theirs, encoders):
        tokenizer = make()
        found.append(
            module.encode_streaming({"text": copy.deepcopy(rows)}, tokenizer, width, **options)
        )
        assert tokenizer.calls == [
            {"truncation": True, "max_length": width - 2, "add_special_tokens": True}
        ]
    assert list(found[1]) == list(found[0])
    assert repr(found[1]) == repr(found[0])
    return found[1]


@given(
    rows=st.lists(st.lists(st.integers(0, 2**31), max_size=12), max_size=25),
    width=st.integers(3, 20),
    concatenate=st.booleans(),
)
@EQUAL_TO_STOCK
def test_rows_are_those_of_axolotl_empty_texts_included(
    rows: list[list[int]], width: int, concatenate: bool
) -> None:
    same(rows, width, concatenate=concatenate)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[]],
        [[], []],
        [[5]],
        [[], [16_777_217]],
        [[7] * 6, [], [8]],
        [[-3, 2**62]],
        [[2] * 6] * 3,
    ],
)
def test_edges(rows: list[list[int]]) -> None:
    same(rows, 8)


def test_columns_of_a_row_share_no_list() -> None:
    mine = same([[4, 5], [6]], 8, concatenate=False)
    assert mine["input_ids"][0] is not mine["labels"][0]


def test_another_default_type_of_torch_is_honoured() -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        same([[], [16_777_217]], 8)
    finally:
        torch.set_default_dtype(torch.float32)


class Odd(Tokenizer):
    """Gives something that is not lists of ints beside ones."""

    def __init__(self, change: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.change = change

    def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
        answer = super().__call__(texts, **options)
        self.change(answer)
        return answer


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "floats": lambda a: a.update(input_ids=[[1.5, 2.0], [3.0]]),
    "a bool": lambda a: a["input_ids"][0].__setitem__(1, True),
    "a mask of zeros": lambda a: a.update(attention_mask=[[1, 0], [1]]),
    "a mask of bools": lambda a: a.update(attention_mask=[[True, True], [True]]),
    "tuples": lambda a: a.update(input_ids=[(4, 5), (6,)]),
}


@pytest.mark.parametrize("concatenate", [True, False])
@pytest.mark.parametrize("name", ODD)
def test_odd_answers_are_axolotls_to_deal_with_without_a_second_call(
    name: str, concatenate: bool
) -> None:
    make = functools.partial(Odd, ODD[name])
    same([[4, 5], [6]], 8, make, concatenate=concatenate)


def test_a_text_longer_than_a_row_fails_as_in_axolotl() -> None:
    errors = []
    for function in (theirs.encode_streaming, encoders.encode_streaming):
        with pytest.raises(RuntimeError) as caught:
            function({"text": [[5] * 20, [6]]}, Tokenizer(cut=False), 8)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("tokenizer", "width"),
    [
        (Tokenizer(eos=None), 8),
        (Tokenizer(pad=None), 8),
        (Tokenizer(eos=[1, 2]), 8),
        (Tokenizer(eos=True), 8),
        (Tokenizer(), 2),
        (Tokenizer(), 8.0),
    ],
)
def test_odd_arguments_are_refused_before_the_tokenizer_is_called(
    tokenizer: Tokenizer, width: Any
) -> None:
    with pytest.raises(Unfamiliar):
        encoders.encode_streaming({"text": [[5]]}, tokenizer, width)
    assert not tokenizer.calls


# encode_packed_streaming


fast = functools.cache(word_tokenizer)


def test_a_real_tokenizer_gives_the_same_rows() -> None:
    texts = [" ".join(f"w{n % 50}" for n in range(count)) for count in (0, 3, 40, 9, 0, 1)]
    rows = [repr(m.encode_streaming({"text": texts}, fast(), 16)) for m in (theirs, encoders)]
    assert rows[0] == rows[1]


def collator(tokenizer: Any = None, **options: Any) -> Any:
    from axolotl.utils.collators import PretrainingBatchSamplerDataCollatorForSeq2Seq

    usual = {"return_tensors": "pt", "padding": True, "pad_to_multiple_of": 16}
    return PretrainingBatchSamplerDataCollatorForSeq2Seq(
        tokenizer or fast(), **{**usual, **options}
    )


class Wrapper:
    """Gives columns that were made beforehand; counts its calls."""

    def __init__(self, columns: dict[str, Any], change: Callable[[Any], Any] = lambda d: d) -> None:
        self.columns, self.change, self.calls = columns, change, 0

    def __call__(self, dataset: Any) -> tuple[Any, None]:
        from datasets import Dataset

        self.calls += 1
        return self.change(Dataset.from_dict(self.columns)), None


def columns_of(rows: list[list[int]], labels: bool = False) -> dict[str, Any]:
    masks = [[1] * len(row) for row in rows]
    found: dict[str, Any] = {"input_ids": rows, "attention_mask": masks}
    if labels:
        found["labels"] = [[-100, *row[1:]][: len(row)] for row in rows]
    return {**found, "overflow_to_sample_mapping": list(range(len(rows)))}


USUAL = {"bin_size": 200, "max_seq_length": 16, "batch_size": 2}


def packed(function: Any, collate: Any, wrapper: Any, **options: Any) -> Any:
    import torch

    torch.manual_seed(5)
    try:
        result = function(collate, wrapper, {"text": ["x"]}, **{**USUAL, **options})
    except Exception as error:  # noqa: BLE001
        result = f"{type(error).__name__}: {error}"
    return result, torch.get_rng_state().tolist(), wrapper.calls


def same_packed(make: Callable[[], Any], collate: Any, **options: Any) -> None:
    functions = (theirs.encode_packed_streaming, encoders.encode_packed_streaming)
    (expected, *rest), (mine, *our_rest) = (
        packed(function, collate, make(), **options) for function in functions
    )
    assert our_rest == rest
    assert type(mine) is type(expected)
    if isinstance(expected, str):
        assert mine == expected
        return
    assert mine.default_factory is expected.default_factory
    assert list(mine) == list(expected)
    for name in expected:
        seen = [
            [(t.dtype, t.shape, t.is_contiguous(), t.tolist()) for t in columns[name]]
            for columns in (mine, expected)
        ]
        assert seen[0] == seen[1]


@given(
    rows=st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=30),
    labels=st.booleans(),
    isolated=st.sampled_from([True, False, None]),
    bin_size=st.sampled_from([1, 3, 200]),
    batch_size=st.integers(1, 3),
)
@settings(EQUAL_TO_STOCK, max_examples=20)  # each takes a second
def test_packed_tensors_are_those_of_axolotl(
    rows: list[list[int]],
    labels: bool,
    isolated: bool | None,
    bin_size: int,
    batch_size: int,
) -> None:
    collate = collator(multipack_attn=isolated)
    make = functools.partial(Wrapper, columns_of(rows, labels))
    options = {"multipack_attn": isolated, "bin_size": bin_size, "batch_size": batch_size}
    same_packed(make, collate, **options)


ROWS = [[n + 4] * (n % 7 + 2) for n in range(20)]
UNUSUAL: dict[str, Callable[[], Wrapper]] = {
    "another column": lambda: Wrapper({**columns_of(ROWS), "kind": ROWS}),
    "token types": lambda: Wrapper({**columns_of(ROWS), "token_type_ids": ROWS}),
    "a length": lambda: Wrapper({**columns_of(ROWS), "length": [len(r) for r in ROWS]}),
    "indices": lambda: Wrapper(columns_of(ROWS), lambda d: d.select([3, 1, 2, 9])),
    "a slice": lambda: Wrapper(columns_of(ROWS), lambda d: d.select(range(4, 12))),
    "labels of another length": lambda: Wrapper(
        {**columns_of(ROWS), "labels": [r[1:] for r in ROWS]}
    ),
    "a row that is null": lambda: Wrapper({**columns_of(ROWS), "labels": [None, *ROWS[1:]]}),
    "nothing within the limits": lambda: Wrapper(columns_of([[5], [6] * 99])),
    "no attention mask": lambda: Wrapper({"input_ids": ROWS}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_dataset_goes_on_as_in_axolotl_without_a_second_call(name: str) -> None:
    same_packed(UNUSUAL[name], collator())


def test_a_collator_that_numbers_masks_may_meet_a_map_that_keeps_them() -> None:
    make = functools.partial(Wrapper, columns_of(ROWS))
    same_packed(make, collator(multipack_attn=True), multipack_attn=False)


def test_no_multiple_pads_nothing() -> None:
    make = functools.partial(Wrapper, columns_of(ROWS))
    same_packed(make, collator(pad_to_multiple_of=None))


def _left() -> Any:
    other = copy.copy(fast())
    other.padding_side = "left"
    return collator(other)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "another collator": (lambda: lambda rows: rows, {}),
    "padding on the left": (_left, {}),
    "padding to a length": (lambda: collator(padding="max_length"), {}),
    "arrays": (lambda: collator(return_tensors="np"), {}),
    "a model": (lambda: collator(model=object()), {}),
    "a fraction for a size": (collator, {"max_seq_length": 16.0}),
    "no batch": (collator, {"batch_size": 0}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusual_settings_are_refused_before_anything_is_called_or_drawn(name: str) -> None:
    import torch

    make, options = REFUSED[name]
    wrapper, before = Wrapper(columns_of(ROWS)), torch.get_rng_state()
    with pytest.raises(Unfamiliar):
        encoders.encode_packed_streaming(make(), wrapper, {"text": ["x"]}, **{**USUAL, **options})
    assert wrapper.calls == 0
    assert torch.equal(torch.get_rng_state(), before)
