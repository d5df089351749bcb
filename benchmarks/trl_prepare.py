"""What TRL's trainers do to a dataset before training, with ours and without: ``trl-prepare``.

Rows of each kind that ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer`` take go
through their ``_prepare_dataset``, called as the trainers call it, alternately by TRL alone and
with ``fast_axolotl`` installed. Both datasets are compared first: columns, types, every value, and
the fingerprint. Caching is off. Wall time depends on what else the machine does, so the processor
time of the whole process, all threads, is told beside it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import fast_axolotl
from benchmarks.axolotl_inputs import random_text, write_model
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Case, Measurement, Result, Timing

STOCK, OURS = "TRL", "fast-axolotl"
_MASKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Row = dict[str, Any]


def _text(rng: random.Random) -> str:
    return random_text(rng, 20, 80)


def _turns(rng: random.Random, *roles: str) -> list[Row]:
    return [{"role": role, "content": _text(rng)} for role in roles]


def _pair(rng: random.Random) -> Row:
    return {"prompt": _text(rng), "chosen": f" {_text(rng)}", "rejected": f" {_text(rng)}"}


def _chat_pair(rng: random.Random) -> Row:
    answers = (_turns(rng, "assistant") for _ in range(2))
    return {
        "prompt": _turns(rng, "user"),
        **dict(zip(("chosen", "rejected"), answers, strict=True)),
    }


def _whole_pair(rng: random.Random) -> Row:
    pair = _chat_pair(rng)
    return {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}


def _chat(rng: random.Random) -> Row:
    return {"messages": _turns(rng, "user", "assistant", "user", "assistant")}


CASES: Mapping[str, tuple[str, Callable[[random.Random], Row], dict[str, Any]]] = {
    "sft": ("SFT", lambda rng: {"text": _text(rng) + _text(rng)}, {}),
    "sft-packed": ("SFT", lambda rng: {"text": _text(rng) + _text(rng)}, {"packing": True}),
    "sft-prompt": (
        "SFT",
        lambda rng: {"prompt": _text(rng), "completion": f" {_text(rng)}"},
        {},
    ),
    "sft-chat": ("SFT", _chat, {}),
    "sft-chat-packed": ("SFT", _chat, {"packing": True}),
    "sft-chat-masked": ("SFT", _chat, {"assistant_only_loss": True}),
    "dpo": ("DPO", _pair, {}),
    "dpo-chat": ("DPO", _chat_pair, {}),
    "dpo-implicit": ("DPO", _whole_pair, {}),
    "kto": (
        "KTO",
        lambda rng: {
            "prompt": _text(rng),
            "completion": f" {_text(rng)}",
            "label": rng.random() < 0.5,
        },
        {},
    ),
    "reward": ("Reward", _pair, {}),
    "reward-chat": ("Reward", _whole_pair, {}),
}
"""The trainer, its rows, and options of its configuration."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("trl-prepare", __doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=names, default=[], help=f"of {', '.join(CASES)}")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every case, or those that are named."""
    logging.disable(logging.WARNING)
    datasets, transformers = import_module("datasets"), import_module("transformers")
    datasets.disable_caching()
    datasets.disable_progress_bars()
    write_model(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "model"))
    cases = []
    for name in check_names("case", options.cases, list(CASES)):
        tell(name)
        cases.append(_race(name, tokenizer, folder, options.rows, options.repeats))
    return Result(cases=cases, notes=["median of alternating repeats; both in one process"])


def _race(name: str, tokenizer: Any, folder: Path, rows: int, repeats: int) -> Case:
    datasets, trl = import_module("datasets"), import_module("trl")
    trainer, row, options = CASES[name]
    rng = random.Random(0)
    dataset = datasets.Dataset.from_list([row(rng) for _ in range(rows)])
    args = getattr(trl, f"{trainer}Config")(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, max_length=512, **options
    )
    kind = getattr(trl, f"{trainer}Trainer")
    me = kind.__new__(kind)
    template = _MASKED if "assistant_only_loss" in options else None
    vars(me).update(_tokenizer=tokenizer, chat_template=template, completion_only_loss=True)
    vars(me).update(calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0)
    further = [args.packing, None] if trainer == "SFT" else []
    arms = {STOCK: fast_axolotl.uninstall, OURS: fast_axolotl.install}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    processor: dict[str, list[float]] = {arm: [] for arm in arms}
    results: dict[str, Any] = {}
    for number in range(repeats + 1):
        for arm in arms if number % 2 else reversed(arms):
            arms[arm]()
            gc.collect()
            started, used = time.perf_counter(), time.process_time()
            result = me._prepare_dataset(dataset, tokenizer, args, *further, "train")
            if number:
                seconds[arm].append(time.perf_counter() - started)
                processor[arm].append(time.process_time() - used)
            else:
                results[arm] = result
    reason = _difference(results[OURS], results[STOCK])
    case = Case(
        name=name,
        text=f"{trainer}Trainer, {', '.join(row(rng))}, {options or 'defaults'}",
        rows=rows,
        timings=[
            Timing(name=STOCK, version=trl.__version__, rows=rows, seconds=tuple(seconds[STOCK])),
            Timing(name=OURS, rows=rows, seconds=tuple(seconds[OURS]), reason=reason),
        ],
        rivals={STOCK: OURS},
        measurements=[
            Measurement(name=f"{arm}, processor time", seconds=tuple(processor[arm]))
            for arm in arms
        ],
    )
    least = 2.0 if name.startswith("sft") else 2.5
    return replace(case, goals=[case.ratio_goal(OURS, STOCK, least)])


def _difference(ours: Any, theirs: Any) -> str | None:
    """How two datasets differ, if they do."""
    if ours.features != theirs.features or list(ours.features) != list(theirs.features):
        return f"{ours.features} and {theirs.features}"
    if ours._fingerprint != theirs._fingerprint:
        return "other fingerprints"
    left, right = (item.with_format("arrow")[:] for item in (ours, theirs))
    return None if left.equals(right) else "other values"


if __name__ == "__main__":
    main()
