"""TRL's trainers prepare the same datasets, and train to the same losses, with ours and without."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from support.axolotl import (
    STOCK_AXOLOTL,
    Later,
    assert_same_dataset,
    byte_tokenizer,
    log_lines,
    needs,
)

pytestmark = [*STOCK_AXOLOTL, needs("trl-sft")]

ours = Later("fast_axolotl.axolotl.trl_datasets")
trl = Later("trl")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood or '' }}" + CHATML
MASKED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
INVITING = CHATML.replace("assistant\n{% endif", "assistant\n<think></think>{% endif")

TEXTS = [
    "hello world",
    "",
    " what a day",
    "ünï 🙂 日本",
    "<s>day</s>",
    "it is ",
    "a</think>b",
    "</s>",
]


def text(number: int, salt: int = 0) -> str:
    return TEXTS[(number * 7 + salt * 3) % len(TEXTS)] + " day" * ((number + salt) % 9)


def turn(role: str, number: int, salt: int = 0) -> dict[str, str]:
    return {"role": role, "content": text(number, salt)}


def user(n: int) -> list[dict[str, str]]:
    return [turn("system", n, 5), turn("user", n)] if n % 3 else [turn("user", n)]


def answer(n: int, salt: int) -> list[dict[str, str]]:
    return [turn("assistant", n, salt)]


Row = Callable[[int], dict[str, Any]]
ROWS: dict[str, Row] = {
    "text": lambda n: {"text": text(n) + " hello", "id": n},
    "prompt": lambda n: {"prompt": text(n), "completion": "x" + text(n, 1)},
    "chat": lambda n: {"messages": user(n) + answer(n, 2) + answer(n, 3)},
    "prompt chat": lambda n: {"prompt": user(n), "completion": answer(n, 1)},
    "pairs": lambda n: {"prompt": text(n), "chosen": "x" + text(n, 1), "rejected": text(n, 2)},
    "pairs, implicit": lambda n: {
        "chosen": f"{text(n)} day x{text(n, 1)}",
        "rejected": f"{text(n)} day y{text(n, 2)}",
        "score": n / 7,
    },
    "pair chats": lambda n: {"prompt": user(n), "chosen": answer(n, 1), "rejected": answer(n, 2)},
    "pair chats, implicit": lambda n: {
        "chosen": [*user(n), {"role": "assistant", "content": f"a{n}"}],
        "rejected": [*user(n), {"role": "assistant", "content": f"b{n}"}],
    },
    "merging pairs": lambda n: {
        "prompt": "hello world"[: n % 11 + 1],
        "chosen": "hello world"[n % 11 + 1 :] + " day",
        "rejected": text(n, 2) + "!",
    },
    "labelled": lambda n: {"prompt": text(n), "completion": text(n, 1) + "!", "label": n % 3 == 0},
    "labelled chats": lambda n: {**ROWS["prompt chat"](n), "label": n % 2 == 0},
    "tools": lambda n: {
        "messages": [{**m, "tool_calls": None} for m in user(n) + answer(n, 2)],
        "tools": [{"name": f"f{n}"}] if n % 4 == 0 else None,
        "chat_template_kwargs": {"mood": text(n)},
    },
    "tools as text": lambda n: {
        **ROWS["pair chats"](n),
        "tools": json.dumps([{"name": f"f{n}"}]) if n % 5 == 0 else None,
    },
    "ids": lambda n: {"input_ids": [*range(n % 13 + 1)], "completion_mask": [n % 2] * (n % 13 + 1)},
}


def call(
    trainer: str, prepare: Callable[..., Any], dataset: Any, tokenizer: Any, **options: Any
) -> Any:
    """A trainer's ``_prepare_dataset``, without the trainer."""
    kind = getattr(trl, f"{trainer}Trainer")
    me = kind.__new__(kind)
    vars(me).update(
        _tokenizer=tokenizer,
        chat_template=options.pop("chat_template", None),
        completion_only_loss="text" not in dataset.column_names,
        calculate_KL=True,
        desirable_weight=1.0,
        undesirable_weight=1.0,
    )
    config = getattr(trl, f"{trainer}Config")
    usual = {"output_dir": "unused", "report_to": [], "use_cpu": True, "bf16": False}
    args = config(**{**usual, "max_length": 24, **options})
    packing = [args.packing, options.get("formatting_func")] if trainer == "SFT" else []
    return prepare(me, dataset, tokenizer, args, *packing, "train")


CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("SFT", "text", "", {}),
    ("SFT", "text", "", {"max_length": None, "dataset_num_proc": 2}),
    ("SFT", "prompt", "", {"truncation_mode": "keep_end"}),
    ("SFT", "chat", CHATML, {}),
    ("SFT", "chat", LOOKING, {"dataset_num_proc": 2}),
    ("SFT", "chat", MASKED, {"assistant_only_loss": True}),
    ("SFT", "prompt chat", CHATML, {"packing": True, "max_length": 64}),
    ("SFT", "tools", TOOLS, {"max_length": 99}),
    ("SFT", "ids", "", {"max_length": 7}),
    ("DPO", "pairs", "", {"max_length": 5, "dataset_num_proc": 2}),
    ("DPO", "pairs, implicit", "", {"max_length": None}),
    ("DPO", "pair chats", CHATML, {}),
    ("DPO", "tools as text", TOOLS, {"max_length": 90}),
    ("KTO", "labelled", "", {"per_device_train_batch_size": 3}),
    ("KTO", "labelled chats", CHATML, {"max_length": 60}),
    ("SFT", "prompt chat", INVITING, {"max_length": 80}),
    ("DPO", "merging pairs", "", {}),
    ("Reward", "pairs", "", {"max_length": 30}),
    ("Reward", "pair chats, implicit", LOOKING, {}),
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Passes that went to TRL. Batches are small, so that there are several."""
    found: list[tuple[str, str, int]] = []
    monkeypatch.setattr("fast_axolotl.axolotl.passes.tally", lambda *told: found.append(told))
    monkeypatch.setattr(importlib.import_module(ours.__name__), "BATCH_ROWS", 16)
    return found


def both(trainer: str, dataset: Any, tokenizer: Any, **options: Any) -> list[Any]:
    """What TRL prepares, or its error, and what it says, twice: alone, and with ours."""
    theirs = inspect.unwrap(vars(getattr(trl, f"{trainer}Trainer"))["_prepare_dataset"])
    results = []
    for prepare in (theirs, ours.prepare_dataset):
        tokenizer.deprecation_warnings.clear()
        # What has been said once in this process is to be said again.
        Later("accelerate.logging").MultiProcessAdapter.warning_once.cache_clear()
        Later("transformers.utils.logging").warning_once.cache_clear()
        with log_lines("trl", "transformers", "datasets") as lines:
            try:
                found = call(trainer, prepare, dataset, tokenizer, **options)
            except Exception as error:  # noqa: BLE001
                error = getattr(error, "error", error)
                found = f"{type(error).__name__}: {error}"
        results.append((found, lines))
    return results


def make(rows: str, count: int = 40) -> Any:
    from datasets import Dataset

    return Dataset.from_list([ROWS[rows](number) for number in range(count)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, (*case[:2], case[3]))))
def test_prepared_datasets_are_those_of_trl(
    case: tuple[str, str, str, dict[str, Any]], refused: list[Any]
) -> None:
    trainer, rows, template, options = case
    tokenizer = byte_tokenizer(adds_bos=len(rows) % 2 == 0, model_max_length=50)
    tokenizer.chat_template = template or None
    (theirs, lines), (found, own_lines) = both(trainer, make(rows), tokenizer, **options)
    assert not isinstance(theirs, str), theirs
    assert len(theirs)
    assert_same_dataset(found, theirs)
    assert own_lines == lines
    assert ("merging" in rows or template == INVITING) <= any("rompt" in line for _, line in lines)
    left = {text.partition(":")[0] for _, text, _ in refused}
    if options.get("assistant_only_loss"):
        assert left == {"tokenize_fn"}
    else:
        # The end of sequences is deprecated; only supervised fine-tuning cuts here.
        is_cut_by_trl = trainer == "SFT" and options.get("truncation_mode") == "keep_end"
        assert left == ({"truncate"} if is_cut_by_trl else set())


ODD: dict[str, tuple[str, Callable[[], Any], str, dict[str, Any]]] = {
    "no answer to train on": ("SFT", lambda: make("chat"), CHATML, {"assistant_only_loss": True}),
    "no chat template": ("DPO", lambda: make("pair chats"), "", {}),
    "no such field": ("SFT", lambda: make("text"), "", {"dataset_text_field": "content"}),
    "a null": ("DPO", lambda: with_last("pairs", chosen=None), "", {}),
    "an empty conversation": ("SFT", lambda: with_last("chat", messages=[]), CHATML, {}),
    "answers that are alike": (
        "DPO",
        lambda: with_last("pairs, implicit", chosen="same", rejected="same"),
        "",
        {},
    ),
    "arguments of the tokenizer": (
        "SFT",
        lambda: with_last("tools", chat_template_kwargs={"mood": "x", "max_length": 3}),
        TOOLS,
        {},
    ),
    "a transform": ("SFT", lambda: make("text").with_transform(lambda rows: rows), "", {}),
    "no token in a column": (
        "DPO",
        lambda: make("pairs").remove_columns("prompt").add_column("prompt", [""] * 40),
        "",
        {},
    ),
    "no rows": ("DPO", lambda: make("pairs").select([]), "", {}),
    "shuffled": ("KTO", lambda: make("labelled").shuffle(seed=3), "", {}),
    "joined": ("DPO", lambda: joined(make("pairs")), "", {}),
}


def with_last(rows: str, **values: Any) -> Any:
    from datasets import Dataset

    listed = make(rows).to_list()
    return Dataset.from_list([*listed, {**listed[-1], **values}])


def joined(dataset: Any) -> Any:
    from datasets import concatenate_datasets

    return concatenate_datasets([dataset, dataset.select(range(7))])


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_as_in_trl(name: str, refused: list[Any]) -> None:
    trainer, make_dataset, template, options = ODD[name]
    tokenizer = byte_tokenizer(model_max_length=9)
    tokenizer.chat_template = template or None
    (theirs, lines), (found, own_lines) = both(trainer, make_dataset(), tokenizer, **options)
    assert own_lines == lines
    if isinstance(theirs, str):
        assert found == theirs
    else:
        assert_same_dataset(found, theirs)


def test_a_pass_that_is_not_ours_is_counted_with_its_reason(refused: list[Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__dict__["_encode_plus"] = tokenizer._encode_plus
    both("DPO", make("pairs"), tokenizer)
    assert refused == [("trl-dpo", "tokenize_fn: the tokenizer was modified", 40)]


def test_ours_finds_what_stock_has_cached(tmp_path: Path) -> None:
    from datasets import load_from_disk

    make("pairs").save_to_disk(str(tmp_path / "rows"))
    tokenizer = byte_tokenizer()
    theirs = inspect.unwrap(trl.DPOTrainer._prepare_dataset)
    first = call("DPO", theirs, load_from_disk(str(tmp_path / "rows")), tokenizer)
    files = sorted(tmp_path.rglob("*.arrow"))
    second = call("DPO", ours.prepare_dataset, load_from_disk(str(tmp_path / "rows")), tokenizer)
    assert_same_dataset(first, second)
    assert sorted(tmp_path.rglob("*.arrow")) == files
    assert len(files) > 2


def test_the_trainers_of_axolotl_prepare_by_these_functions() -> None:
    """The rows are those of stock, by the tests above; that losses are, too, is in the matrix."""
    for module, name in (("dpo.trainer", "AxolotlDPOTrainer"), ("trl", "AxolotlKTOTrainer")):
        kind = getattr(Later(f"axolotl.core.trainers.{module}"), name)
        [owner] = [base for base in kind.__mro__ if "_prepare_dataset" in vars(base)][:1]
        assert owner.__module__.startswith("trl.trainer.")


def test_the_replacements_are_those_of_four_trainers() -> None:
    ready = {patch.name: patch for patch in fast_axolotl.axolotl.check()}
    for name in ("trl-sft", "trl-dpo", "trl-kto", "trl-reward"):
        assert ready[name].state in ("ready", "check")
