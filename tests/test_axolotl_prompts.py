"""Tokenised datasets and preferences are the tables that Axolotl makes of them, row for row."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.axolotl import prompts as prompts_module
from fast_axolotl.axolotl.patching import Final, Unfamiliar
from fast_axolotl.axolotl.prompts import map_dataset, process
from support.axolotl import (
    STOCK_AXOLOTL,
    Later,
    byte_tokenizer,
    config,
    log_lines,
    needs,
)

pytestmark = [*STOCK_AXOLOTL, needs("tokenize")]

INSTRUCTIONS = [
    {"instruction": "say hello", "input": "world", "output": "hello world", "system": "be good"},
    {"instruction": "say", "input": "", "output": "what a day it is " * 4, "system": ""},
    {"instruction": "ünï 🙂", "input": "日本", "output": "<s>hello</s>", "system": "x"},
    {"instruction": "", "input": "", "output": "a", "system": "y"},
]
TEXTS = ["hello world " * 9, "a", "ünï 🙂 日本", "<s>day</s>", "what a day it is"]


prompt_tokenizers = Later("axolotl.prompt_tokenizers")
prompters = Later("axolotl.prompters")
with_system = Later("axolotl.prompt_strategies.alpaca_w_system")
completion = Later("axolotl.prompt_strategies.completion")
chat = Later("axolotl.prompt_strategies.chat_template")
rl = Later("axolotl.utils.data.rl")


def conversations(tokenizer: Any, length: int) -> Any:
    template = "{% for m in messages %}{{ m.role + ' ' + m.content + '</s>' }}{% endfor %}"
    prompter = chat.ChatTemplatePrompter(tokenizer, template)
    return chat.ChatTemplateStrategy(prompter, tokenizer, False, length, ["assistant"], "turn")


def alpaca(tokenizer: Any, length: int | None, on_inputs: bool = False) -> Any:
    return prompt_tokenizers.AlpacaPromptTokenizingStrategy(
        prompters.AlpacaPrompter("instruct"), tokenizer, on_inputs, length
    )


STRATEGIES: dict[str, Callable[[Any, Any], Any]] = {
    "completion": lambda tokenizer, length: completion.CompletionPromptTokenizingStrategy(
        completion.CompletionPrompter(), tokenizer, False, length, max_length=64
    ),
    "chat": conversations,
    "alpaca": alpaca,
    "trains on inputs": lambda tokenizer, length: alpaca(tokenizer, length, True),
    "with system": lambda tokenizer, length: with_system.InstructionWSystemPromptTokenizingStrategy(
        with_system.SystemDataPrompter("chat"), tokenizer, False, length
    ),
}
"""A maker of each strategy, from a tokenizer and a length."""

KINDS = ("completion", "chat", "alpaca", "with system")
"""One strategy of each class: how rows are dealt out does not depend on its options."""


def settings_of(length: int, **more: Any) -> Any:
    choice = "jinja" if "chat_template_jinja" in more else "chatml"
    return config({"sequence_len": length, "reward_model": True, "chat_template": choice, **more})


def rows_for(name: str) -> list[dict[str, Any]]:
    if name == "chat":
        talks = [(("user", text), ("assistant", text[::-1])) for text in TEXTS]
        return [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in talks]
    return [{"text": text} for text in TEXTS] if name == "completion" else INSTRUCTIONS


def compare(
    strategy: Any, rows: list[dict[str, Any]], *, may_refuse: bool = False, **options: Any
) -> Any:
    """What stock does, once ours has been found to do the same: a table, or an error."""
    from datasets import Dataset

    dataset = Dataset.from_list(rows)
    options = {"process_count": None, "keep_in_memory": False, **options}
    settings = SimpleNamespace(prompt_tokenizer=strategy, **options)
    stock = Later("axolotl.datasets").TokenizedPromptDataset.process
    outcomes = []
    for function in (stock, process):
        with log_lines("axolotl") as lines:
            try:
                result = function(settings, dataset)
            except Exception as error:  # noqa: BLE001  which it is, is compared
                result = error.error if isinstance(error, Final) else error
        # Written once in a process.
        lines = [line for line in lines if "Empty text requested" not in line[1]]
        outcomes.append((result, rust_state(strategy), lines))
    (want, *others), (got, *our_others) = outcomes
    if may_refuse and isinstance(got, Unfamiliar):
        return want
    assert our_others == others
    assert type(got) is type(want)
    if isinstance(want, Exception):
        assert str(got) == str(want)
        return want
    assert_same_table(got, want)
    return want


def assert_same_table(got: Any, want: Any) -> None:
    """With its chunks."""
    assert got.features == want.features
    assert got.column_names == want.column_names
    assert got.data.table.equals(want.data.table)
    chunks = [column.num_chunks for column in want.data.table.columns]
    assert [column.num_chunks for column in got.data.table.columns] == chunks


def rust_state(strategy: Any) -> tuple[Any, ...]:
    rust = strategy.tokenizer._tokenizer
    return rust.truncation, rust.padding, rust.encode_special_tokens


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("length", [4, 9, 2048])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_tables_are_equal(name: str, length: int, adds_bos: bool) -> None:
    strategy = STRATEGIES[name](byte_tokenizer(adds_bos=adds_bos), length)
    assert len(compare(strategy, rows_for(name)))


@pytest.mark.parametrize("name", KINDS)
def test_tables_of_two_processes_and_several_batches_are_equal(name: str) -> None:
    strategy = STRATEGIES[name](byte_tokenizer(adds_bos=True), 64)
    rows = rows_for(name) * 501
    if name == "chat":  # an odd row goes through the strategy itself
        rows = [{**row, "tools": None} for row in rows]
        rows[1200]["tools"] = [{"type": "function"}]
    compare(strategy, rows, process_count=2)
    compare(strategy, rows, keep_in_memory=True)


ODD = {
    "alpaca": [{"output": ""}, {"output": None}, {"instruction": None}, {"input": None}],
    "with system": [{"system": None}, {"output": None}],
    "completion": [{"text": ""}, {"text": None}],
}
"""What is changed in a row, for each strategy."""


@pytest.mark.parametrize("name", ODD)
def test_an_odd_row_goes_through_the_strategy_itself(name: str) -> None:
    strategy = STRATEGIES[name](byte_tokenizer(adds_bos=True), 64)
    rows = [{"id": 1, **row} for row in rows_for(name)]
    for change in ODD[name]:
        compare(strategy, [*rows, {**rows[1], **change}, *rows])
        # Where no value tells the type of a column, stock makes all of it.
        compare(strategy, [{**row, **change} for row in rows_for(name)], may_refuse=True)
    compare(strategy, [*rows, {**rows[1], **ODD[name][0]}, *rows], process_count=2)
    for missing in rows[0]:
        compare(strategy, [{k: v for k, v in row.items() if k != missing} for row in rows])


def documented() -> dict[str, bool]:
    """The strategies that docs/axolotl.md names, and whether they are said to be accelerated."""
    text = (Path(__file__).parents[1] / "docs" / "axolotl.md").read_text(encoding="utf-8")
    table = text.partition("## Which strategies")[2].partition("With `rl:`")[0]
    rows = re.findall(r"^\| (.*?) \| (accelerated|row by row) \|", table, re.MULTILINE)
    return {
        name: way == "accelerated" for names, way in rows for name in re.findall("`(.+?)`", names)
    }


def load_strategy(name: str, tokenizer: Any) -> Any:
    """As ``get_dataset_wrapper`` finds it."""
    cfg = settings_of(64, pretraining_dataset=[{"text_column": "text"}])
    wrappers = Later("axolotl.utils.data.wrappers")
    if name.startswith("bradley_terry."):
        return wrappers.bradley_terry_load(name.partition(".")[2], tokenizer, cfg, config({}))
    source = {} if name == "user_defined" else config({"type": name})
    strategy = wrappers.load(name, tokenizer, cfg, source)
    if strategy is not None or name not in wrappers.DATASET_HANDLERS:
        return strategy
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("axolotl.utils.data.wrappers")
        patch.setattr(module, "wrap_dataset_for_tokenized_prompt", lambda found, *_, **__: found)
        return wrappers.DATASET_HANDLERS[name](None, tokenizer, cfg, None, {})[0]


def test_the_documentation_names_every_strategy_and_says_how_it_runs() -> None:
    package = Path(importlib.import_module("axolotl.prompt_strategies").__file__ or "").parent
    ways = documented()
    for path in package.glob("*.py"):
        loads = re.findall(r"^def (load\w*)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        names = {path.stem if load == "load" else f"{path.stem}.{load}" for load in loads}
        assert path.stem in ("__init__", "base") or names <= ways.keys() | {"_synthetic"}
    for name in ways.keys() - {"type:", "pretrain", "messages", "_synthetic"}:
        tokenizer = byte_tokenizer(pad_token="<s>", adds_bos=True)
        tokenizer.chat_template = "{{ messages }}</s>"
        strategy = load_strategy(name, tokenizer)
        if ways[name]:
            prompts_module._find_table(strategy)
        elif strategy is not None:
            with pytest.raises(Unfamiliar):
                prompts_module._find_table(strategy)


def test_odd_strategies_and_datasets_are_unfamiliar() -> None:
    from datasets import Dataset

    tokenizer = byte_tokenizer(adds_bos=True)
    plain, alpaca = Dataset.from_list(INSTRUCTIONS), STRATEGIES["alpaca"](tokenizer, 64)

    class Mine(type(alpaca)):  # type: ignore[misc]
        def _tokenize(self, *args: Any, **kwargs: Any) -> Any:
            return super()._tokenize(*args, **kwargs)

    filters = STRATEGIES["alpaca"](tokenizer, 64)
    reflection = prompt_tokenizers.AlpacaReflectionPTStrategy(
        prompters.ReflectAlpacaPrompter("instruct"), tokenizer, False, 64
    )
    filters.filter_rows = bool
    odd = [
        (reflection, plain),
        (Mine(alpaca.prompter, tokenizer, False, 64), plain),
        (filters, plain),
        (STRATEGIES["alpaca"](byte_tokenizer(adds_bos=True, eos_token=None), 64), plain),
        (STRATEGIES["alpaca"](tokenizer, None), plain),
        (alpaca, plain.with_format("numpy")),
        (alpaca, plain.select([])),
        (alpaca, plain.add_column("labels", [1] * len(plain))),
        (alpaca, plain.to_iterable_dataset()),
    ]
    for strategy, dataset in odd:
        settings = SimpleNamespace(
            prompt_tokenizer=strategy, process_count=None, keep_in_memory=False
        )
        with pytest.raises(Unfamiliar):
            process(settings, dataset)
    assert tokenizer._tokenizer.truncation is None


# Preferences.

WORDS = ["hello world", " a ", "ünï 🙂 日本", "<|im_start|>user", "[[dummy_message]]", "a{b}%s"]


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def talks(text: str) -> dict[str, Any]:
    turns = [say("user", text), say("assistant", text[::-1])]
    return {"chosen": turns, "rejected": [turns[0], say("assistant", text * 2)]}


PREFERENCES: dict[str, Callable[[str], dict[str, Any]]] = {
    "dpo.chat_template:default": lambda text: {
        "messages": [say("system", text), say("user", text[1:])],
        "chosen": say("assistant", text),
        "rejected": say("assistant", text[::-1]),
        "id": len(text),
    },
    "dpo.chat_template:argilla_chat": lambda text: {"kept": text, **talks(text)},
    "orpo.chat_template:argilla": lambda text: {"system": text[3:], **talks(text)},
    "dpo.chatml:default": lambda text: {
        "system": text[3:],
        "question": text,
        "chosen": text,
        "rejected": text[1:],
        "scores": [1.5, None],
    },
    "dpo.chatml:argilla_chat": talks,
    "dpo.passthrough:default": lambda text: {"prompt": text, "chosen": text, "number": 1},
    "kto.chatml:argilla": lambda text: {"instruction": text, "completion": text, "label": True},
    "kto.llama3:argilla_chat": lambda text: {
        "completion": talks(text)["chosen"],
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


def compare_preferences(name: str, rows: list[dict[str, Any]], **settings: Any) -> Any:
    """The stock dataset or error, once ours has been found equal to it."""
    from datasets import Dataset

    cfg, transform, options = transform_of(name, **settings)
    dataset, tokenizer = Dataset.from_list(rows), byte_tokenizer()
    outcomes: list[Any] = []
    for function in (rl._map_dataset, map_dataset):
        try:
            outcomes.append(function(cfg, dataset, transform, tokenizer, **options))
        except Exception as error:  # noqa: BLE001  which it is, is compared
            outcomes.append(error.error if isinstance(error, Final) else error)
    want, got = outcomes
    if isinstance(want, Exception):
        assert isinstance(got, Unfamiliar) or repr(got) == repr(want)
        return want
    assert_same_table(got, want)
    assert got._fingerprint == want._fingerprint
    return want


@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("processes", [None, 2])
def test_transformed_datasets_are_equal(name: str, processes: int | None) -> None:
    rows = [PREFERENCES[name](text) for text in WORDS]
    more = rows * 201 if processes is None else rows
    result = compare_preferences(name, more, dataset_num_proc=processes, is_preprocess=True)
    assert len(result) == len(more)


@pytest.mark.parametrize("name", PREFERENCES)
def test_odd_rows_are_treated_as_stock_treats_them(name: str) -> None:
    rows = [PREFERENCES[name](text) for text in WORDS]
    for column in rows[0]:
        compare_preferences(name, [*rows, {**rows[0], column: None}, rows[1]])
        compare_preferences(name, [{key: row[key] for key in row if key != column} for row in rows])
        if isinstance(rows[0][column], list | dict):
            compare_preferences(name, [{**row, column: type(row[column])()} for row in rows])


def test_other_transforms_and_datasets_are_unfamiliar() -> None:
    from datasets import Dataset

    cfg, transform, options = transform_of("dpo.chat_template:default")
    plain = Dataset.from_list([PREFERENCES["dpo.chat_template:default"]("a")])
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
    with pytest.raises(Unfamiliar, match="still to be loaded"):
        map_dataset(cfg, plain, transform)


@pytest.mark.parametrize("repeats", [2, 1100])
def test_an_error_of_a_row_is_raised_once_and_stock_does_not_start_again(
    repeats: int, caplog: pytest.LogCaptureFixture
) -> None:
    from datasets import Dataset

    rows = [*rows_for("chat") * repeats, {"messages": [{"role": "user", "content": None}]}]
    strategy = STRATEGIES["chat"](byte_tokenizer(), 64)
    settings = SimpleNamespace(prompt_tokenizer=strategy, process_count=2, keep_in_memory=False)
    fast_axolotl.install()
    try:
        with pytest.raises(Exception, match=r"'content'|concatenate"):
            Later("axolotl.datasets").TokenizedPromptDataset.process(
                settings, Dataset.from_list(rows)
            )
        told = {reason for patch in fast_axolotl.status().patches for reason, _ in patch.fallbacks}
    finally:
        fast_axolotl.uninstall()
    # An unknown release is compared first, and stock runs where it fails then.
    assert told <= {"it cannot be compared: stock fails on rows of this call"}
    assert caplog.text.count("instead") == len(told)
