"""Conversations tokenised under each template that Axolotl ships: ``make bench-chat-templates``.

Each template meets conversations of several kinds: texts only, tools in one of a hundred rows,
tools in all rows (their names and parameters differ from row to row), thoughts inside the content,
thoughts that ``split_thinking`` takes out, thoughts of their own key, and training details. Answers
are compared value by value, then both are timed in alternating order, in seconds of the process on
one core, so that other work on the machine does not count; the tokenizer's threads are turned off.
The first batch of ours is timed apart: it makes the skeletons. A kind that a template raises an
error for is left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import fast_axolotl
from benchmarks.axolotl_inputs import random_text, write_model
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Case, Result, Timing
from fast_axolotl.axolotl import chat

STOCK, OURS, FIRST = "Axolotl", "fast-axolotl", "fast-axolotl first"
KINDS = ("clean", "tools in 1 %", "tools", "thinking", "split_thinking", "reasoning", "details")
LEAST = 1.5
"""The ratio that every case should reach."""
_ID = "123456789"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("chat-templates", __doc__)
    parser.add_argument("--rows", type=int, default=300, help="of a batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--templates", type=names, default=[], help="a,b; all of them if none")
    parser.add_argument("--kinds", type=names, default=[], help="a,b; all of them if none")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every template with every kind of conversation."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    module: Any = import_module("axolotl.prompt_strategies.chat_template")
    fast_axolotl.uninstall()
    logging.disable(logging.WARNING)
    write_model(folder / "model")
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(folder / "model")
    texts = {
        path.stem: path.read_text(encoding="utf-8")
        for path in (Path(module.__file__).parents[1] / "utils/chat_templates/templates").iterdir()
        if path.suffix == ".jinja"
    }
    cases = []
    for name in check_names("template", options.templates, sorted(texts)):
        for kind in check_names("kind of conversation", options.kinds, KINDS):
            prompter = module.ChatTemplatePrompter(
                tokenizer, texts[name], message_field_training_detail="detail"
            )
            strategy = module.ChatTemplateStrategy(
                prompter,
                tokenizer=tokenizer,
                train_on_inputs=False,
                sequence_len=2048,
                roles_to_train=["assistant"],
                train_on_eos="turn",
                split_thinking=kind == "split_thinking",
            )
            case = race(f"{name}: {kind}", strategy, batch(kind, options.rows), options.repeats)
            ratio = case.ratio(OURS, STOCK)
            tell(f"{case.name}: {'left out' if ratio is None else f'{ratio:.2f}×'}")
            cases.append(case)
    notes = ("seconds of the process on one core, not of the clock",)
    return Result(cases=cases, notes=notes)


def race(name: str, strategy: Any, rows: dict[str, list[Any]], repeats: int) -> Case:
    """Stock's and ours on a batch."""
    num_rows = len(rows["messages"])
    case = partial(Case, name=name, text=f"{num_rows} conversations", rows=num_rows)
    try:
        want = strategy.tokenize_prompt(rows)
    except Exception as error:  # noqa: BLE001  a template may refuse conversations
        return case(left_out={STOCK: f"{type(error).__name__}: {error}"[:80]})
    seconds: dict[str, list[float]] = {STOCK: [], OURS: [], FIRST: []}
    ours = partial(chat.tokenize_prompt, strategy, rows)
    got, taken = _timed(ours)
    seconds[FIRST].append(taken)
    for _ in range(repeats):
        seconds[STOCK].append(_timed(partial(strategy.tokenize_prompt, rows))[1])
        seconds[OURS].append(_timed(ours)[1])
    reason = None if got == want else "other tokens or labels"
    made = case(
        timings=[
            Timing(name=arm, rows=num_rows, seconds=tuple(found), reason=reason)
            for arm, found in seconds.items()
        ],
        rivals={STOCK: OURS},
    )
    return case(
        timings=made.timings, rivals=made.rivals, goals=[made.ratio_goal(OURS, STOCK, LEAST)]
    )


def _timed(call: Any) -> tuple[Any, float]:
    start = time.process_time()
    return call(), time.process_time() - start


def batch(kind: str, num_rows: int) -> dict[str, list[Any]]:
    """Conversations of one to three questions with answers of some 50 words."""
    rng = random.Random(0)
    rows: list[tuple[list[dict[str, Any]], Any]] = []
    for number in range(num_rows):
        if kind == "tools" or (kind == "tools in 1 %" and number % 100 == 50):
            rows.append(_with_tools(rng))
            continue
        turns = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            turns.append({"role": "user", "content": random_text(rng, 10, 40)})
            answer: dict[str, Any] = {"role": "assistant", "content": random_text(rng, 30, 80)}
            if kind in ("thinking", "split_thinking"):
                thought = random_text(rng, 20, 60)
                answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
            elif kind == "reasoning":
                answer["reasoning_content"] = random_text(rng, 20, 60)
            elif kind == "details":
                answer["detail"] = [
                    {"begin_offset": 0, "end_offset": 19, "train": True},
                    {"begin_offset": 20, "end_offset": 59, "train": False},
                ]
            turns.append(answer)
        rows.append((turns, None))
    return {"messages": [turns for turns, _ in rows], "tools": [tools for _, tools in rows]}


def _with_tools(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    words = random_text(rng, 12, 12).split()
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": {
                "name": f"{words[number]}_{number}",
                "description": random_text(rng, 5, 20),
                "parameters": {
                    "type": "object",
                    "properties": {
                        word: {"type": "string", "description": random_text(rng, 3, 10)}
                        for word in rng.sample(words, rng.randint(1, 3))
                    },
                    "required": [words[-1]],
                },
            },
        }
        for number in range(rng.randint(1, 3))
    ]
    arguments = {word: random_text(rng, 1, 5) for word in rng.sample(words, rng.randint(1, 3))}
    function: dict[str, Any] = {"name": tools[0]["function"]["name"], "arguments": arguments}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": random_text(rng, 10, 40)},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _ID, "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "tool_call_id": _ID,
            "name": function["name"],
            "content": random_text(rng, 5, 30),
        },
        {"role": "assistant", "content": random_text(rng, 30, 80)},
    ]
    return turns, tools


if __name__ == "__main__":
    main()
