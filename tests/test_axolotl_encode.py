"""Our encoder gives what that of the real Axolotl gives, floats included."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.axolotl import encoders
from fast_axolotl.axolotl.patching import Unfamiliar
from support.axolotl import EQUAL_TO_STOCK, STOCK_AXOLOTL, Later, word_tokenizer

pytestmark = STOCK_AXOLOTL


theirs = Later("axolotl.utils.data.streaming")


def test_stock_is_the_released_one() -> None:
    assert "/axolotl/utils/data/" in theirs.encode_streaming.__code__.co_filename
    assert not hasattr(theirs.encode_streaming, "__wrapped__")


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


fast = functools.cache(word_tokenizer)


def test_a_real_tokenizer_gives_the_same_rows() -> None:
    texts = [" ".join(f"w{n % 50}" for n in range(count)) for count in (0, 3, 40, 9, 0, 1)]
    rows = [repr(m.encode_streaming({"text": texts}, fast(), 16)) for m in (theirs, encoders)]
    assert rows[0] == rows[1]
