"""TRL's trainers prepare the same datasets, and train to the same losses, with ours and without."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.axolotl_inputs import preprocess_config, write_config, write_model, write_rows
from support.axolotl import (
    STOCK_AXOLOTL,
    Later,
    assert_same_dataset,
    byte_tokenizer,
    log_lines,
    run_child,
)

pytestmark = STOCK_AXOLOTL

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
DATED = "{{ strftime_now('%Y') }}" + CHATML

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
    "from and value": lambda n: {
        "conversations": [{"from": m["role"], "value": m["content"]} for m in user(n)]
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
    ("SFT", "text", "", {"packing": True}),
    ("SFT", "text", "", {"packing": True, "packing_strategy": "wrapped", "shuffle_dataset": True}),
    ("SFT", "text", "", {"max_length": None, "dataset_num_proc": 2}),
    ("SFT", "prompt", "", {"truncation_mode": "keep_end"}),
    ("SFT", "prompt", "", {"max_length": 3}),
    ("SFT", "chat", CHATML, {}),
    ("SFT", "chat", LOOKING, {"dataset_num_proc": 2}),
    ("SFT", "chat", DATED, {}),
    ("SFT", "chat", MASKED, {"assistant_only_loss": True}),
    ("SFT", "prompt chat", MASKED, {"assistant_only_loss": True, "max_length": 100}),
    ("SFT", "prompt chat", CHATML, {"packing": True, "max_length": 64}),
    ("SFT", "chat", CHATML, {"chat_template": LOOKING}),
    ("SFT", "tools", TOOLS, {"max_length": 99}),
    ("SFT", "from and value", CHATML, {}),
    ("SFT", "ids", "", {"max_length": 7}),
    ("DPO", "pairs", "", {}),
    ("DPO", "pairs", "", {"max_length": 5, "dataset_num_proc": 2}),
    ("DPO", "pairs, implicit", "", {"max_length": None}),
    ("DPO", "pair chats", CHATML, {}),
    ("DPO", "pair chats", LOOKING, {"truncation_mode": "keep_end"}),
    ("DPO", "pair chats, implicit", CHATML, {"max_length": 60}),
    ("DPO", "tools as text", TOOLS, {"max_length": 90}),
    ("KTO", "labelled", "", {"per_device_train_batch_size": 3}),
    ("KTO", "labelled chats", CHATML, {"max_length": 60}),
    ("KTO", "pairs", "", {"per_device_train_batch_size": 5, "dataset_num_proc": 2}),
    ("Reward", "pairs", "", {"max_length": 30}),
    ("Reward", "pairs, implicit", "", {"dataset_num_proc": 2}),
    ("Reward", "pair chats", CHATML, {"max_length": 60}),
    ("Reward", "pair chats, implicit", LOOKING, {}),
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Passes that went to TRL. Batches are small, so that there are several."""
    found: list[tuple[str, str, int]] = []
    monkeypatch.setattr(ours, "tally", lambda *told: found.append(told))
    monkeypatch.setattr(ours, "_BATCH_ROWS", 16)
    return found


def both(trainer: str, dataset: Any, tokenizer: Any, **options: Any) -> list[Any]:
    """What TRL prepares, or its error, and what it says, twice: alone, and with ours."""
    theirs = inspect.unwrap(vars(getattr(trl, f"{trainer}Trainer"))["_prepare_dataset"])
    results = []
    for prepare in (theirs, ours.prepare_dataset):
        tokenizer.deprecation_warnings.clear()
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
    # The end of sequences is deprecated; only supervised fine-tuning cuts here.
    is_cut_by_trl = trainer == "SFT" and options.get("truncation_mode") == "keep_end"
    told = [("trl-sft", "truncate: the end of sequences is kept", len(theirs))]
    assert refused == told * is_cut_by_trl
