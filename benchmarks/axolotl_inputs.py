"""Inputs of the races with the real Axolotl, beside those of the demo: more datasets, streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.axolotl_model import (
    CHAT,
    SEQUENCE_LENGTH,
    Config,
    Row,
    chat_rows,
    common_config,
    preprocess_config,
    random_text,
)

PREFERENCE_LENGTH = 160
"""``sequence_len`` of the preference data: about a tenth of the pairs is longer."""
_SENTENCES = 2000
_PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"


def _alpaca_rows(rng: random.Random) -> Iterator[Row]:
    while True:
        yield {
            "instruction": random_text(rng, 5, 20),
            "input": random_text(rng, 3, 20) if rng.random() < 0.5 else "",
            "output": random_text(rng, 20, 80),
        }


def _completion_rows(rng: random.Random) -> Iterator[Row]:
    while True:
        yield {"text": random_text(rng, 40, 220)}


def preference_rows(rng: random.Random) -> Iterator[Row]:
    """Pairs of answers to a prompt."""
    while True:
        yield {
            "prompt": random_text(rng, 5, 60),
            "chosen": random_text(rng, 10, 100),
            "rejected": random_text(rng, 10, 100),
        }


DATASETS: Mapping[str, tuple[Callable[[random.Random], Iterator[Row]], Mapping[str, str]]] = {
    "chat": (chat_rows, CHAT),
    "alpaca": (_alpaca_rows, {"type": "alpaca"}),
    "completion": (_completion_rows, {"type": "completion", "field": "text"}),
    "dpo": (preference_rows, {"type": "chatml.default", "split": "train"}),
}
"""Kind of dataset to its rows, without end, and the keys of its configuration."""


def dataset_config(kind: str, model: Path, data: Path, prepared: Path) -> Config:
    """``axolotl preprocess`` of one of the ``DATASETS``."""
    config = preprocess_config(model, data, prepared)
    config["datasets"] = [{"path": str(data), "ds_type": "json", **DATASETS[kind][1]}]
    if kind == "dpo":
        del config["sample_packing"], config["pad_to_sequence_len"]
        config |= {"rl": "dpo", "sequence_len": PREFERENCE_LENGTH}
    return config


def conversation(rng: random.Random, turns: int) -> Row:
    """So many questions and answers of a few words each."""
    roles = ("user", "assistant") * turns
    return {"messages": [{"role": role, "content": random_text(rng, 1, 3)} for role in roles]}


def documents(count: int, num_bytes: int) -> Iterator[str]:
    """Texts of about so many bytes, each its own."""
    rng = random.Random(0)
    sentences = [random_text(rng, 30, 60) for _ in range(_SENTENCES)]
    mean = sum(map(len, sentences)) // len(sentences)
    for number in range(count):
        chosen = rng.choices(sentences, k=max(1, num_bytes // mean))
        yield f"{number} {'. '.join(chosen)}"


def stream_config(model: Path, output: Path, *, steps: int, buffer_rows: int) -> Config:
    """``axolotl train`` on a stream, packed so many rows at a time; the source is to be added."""
    return {
        **common_config(model, output),
        "streaming": True,
        "streaming_multipack_buffer_size": buffer_rows,
        "shuffle_merged_datasets": False,
        "sample_packing": True,
        "sequence_len": SEQUENCE_LENGTH,
        "max_steps": steps,
        "save_strategy": "no",
    }


def text_stream(data: Path, *, ours: bool) -> Config:
    """A stream of documents, read as Axolotl does or with our reader."""
    source = {"path": "json", "data_files": str(data), "text_column": "text", "type": "pretrain"}
    config: Config = {"pretraining_dataset": [source]}
    if ours:
        keys = ("dataset_use_rust_streaming", "fast_axolotl_streaming_force")
        config |= {"plugins": [_PLUGIN], **dict.fromkeys(keys, True)}
    return config


def chat_stream(data: Path) -> Config:
    """A stream of conversations."""
    source = {"path": "json", "data_files": str(data), "split": "train"}
    return {"datasets": [{**source, **CHAT}], "sequence_len": 512, "logging_steps": 10}
