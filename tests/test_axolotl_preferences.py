"""Preferences are transformed into the datasets that Axolotl makes of them, row for row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.preferences import map_dataset
from support.axolotl import STOCK_AXOLOTL, Later, byte_tokenizer, config

pytestmark = STOCK_AXOLOTL

rl = Later("axolotl.utils.data.rl")
TEXTS = ["hello world", " a ", "ünï 🙂 日本", "<|im_start|>user", "[[dummy_message]]", "a{b}%s"]


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversations(text: str) -> dict[str, Any]:
    turns = [say("user", text), say("assistant", text[::-1])]
    return {"chosen": turns, "rejected": [turns[0], say("assistant", text * 2)]}


ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "dpo.chat_template:default": lambda text: {
        "messages": [say("system", text), say("user", text[1:])],
        "chosen": say("assistant", text),
        "rejected": say("assistant", text[::-1]),
        "id": len(text),
    },
    "dpo.chat_template:argilla_chat": lambda text: {"kept": text, **conversations(text)},
    "orpo.chat_template:argilla": lambda text: {"system": text[3:], **conversations(text)},
    "dpo.chatml:default": lambda text: {
        "system": text[3:],
        "question": text,
        "chosen": text,
        "rejected": text[1:],
        "scores": [1.5, None],
    },
    "dpo.chatml:argilla_chat": conversations,
    "dpo.passthrough:default": lambda text: {"prompt": text, "chosen": text, "number": 1},
    "kto.chatml:argilla": lambda text: {"instruction": text, "completion": text, "label": True},
    "kto.llama3:argilla_chat": lambda text: {
        "completion": conversations(text)["chosen"],
        "label": False,
    },
}
"""A row for each transform, by its module and name."""


def transform_of(name: str, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    cfg = config(
        {"chat_template": "chatml", "sequence_len": 64, "datasets": [{"path": "x"}], **settings}
    )
    module, _, function = name.partition(":")
    made = getattr(Later(f"axolotl.prompt_strategies.{module}"), function)(cfg)
    transform, options = made if isinstance(made, tuple) else (made, {})
    return cfg, transform, options


def compare(name: str, rows: list[dict[str, Any]], **settings: Any) -> Any:
    """The stock dataset or error, once ours has been found equal to it."""
    from datasets import Dataset

    cfg, transform, options = transform_of(name, **settings)
    dataset, tokenizer = Dataset.from_list(rows), byte_tokenizer()
    outcomes: list[Any] = []
    for function in (rl._map_dataset, map_dataset):
        try:
            outcomes.append(function(cfg, dataset, transform, tokenizer, **options))
        except Exception as error:  # noqa: BLE001  which it is, is compared
            outcomes.append(error)
    want, got = outcomes
    if isinstance(want, Exception):
        assert isinstance(got, Exception)
        return want
    assert got.features == want.features
    assert got.column_names == want.column_names
    assert got.data.table.equals(want.data.table)
    assert got._fingerprint == want._fingerprint
    chunks = [column.num_chunks for column in want.data.table.columns]
    assert [column.num_chunks for column in got.data.table.columns] == chunks
    return want


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("processes", [None, 2])
def test_transformed_datasets_are_equal(name: str, processes: int | None) -> None:
    rows = [ROWS[name](text) for text in TEXTS]
    more = rows * 201 if processes is None else rows
    result = compare(name, more, dataset_num_proc=processes, is_preprocess=True)
    assert len(result) == len(more)


@pytest.mark.parametrize("name", ROWS)
def test_odd_rows_are_treated_as_stock_treats_them(name: str) -> None:
    rows = [ROWS[name](text) for text in TEXTS]
    for column in rows[0]:
        compare(name, [*rows, {**rows[0], column: None}, rows[1]])
        compare(name, [{key: row[key] for key in row if key != column} for row in rows])
        if isinstance(rows[0][column], list | dict):
            compare(name, [{**row, column: type(row[column])()} for row in rows])


def test_other_transforms_and_datasets_are_unfamiliar() -> None:
    from datasets import Dataset

    cfg, transform, options = transform_of("dpo.chat_template:default")
    plain = Dataset.from_list([ROWS["dpo.chat_template:default"]("a")])
    tokenizer = byte_tokenizer()
    assert "tokenizer" in inspect.signature(transform).parameters
    for dataset, function, given in (
        (plain, lambda sample: sample, tokenizer),
        (plain.with_format("numpy"), transform, tokenizer),
        (plain.select([]), transform, tokenizer),
        (plain.to_iterable_dataset(), transform, tokenizer),
    ):
        with pytest.raises(Unfamiliar):
            map_dataset(cfg, dataset, function, given, **options)
    with pytest.raises(Unfamiliar):
        map_dataset(cfg, plain, transform, tokenizer, batched=True)
