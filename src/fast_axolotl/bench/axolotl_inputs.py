"""What a run of Axolotl needs, made on the spot: a tiny model, a tokenizer, data, configurations.

The words are drawn from a fixed generator, so files are the same every time, on every machine. The
model is a Llama of two layers of 64, the tokenizer a BPE that has seen those words, with a ChatML
template. Run as ``python -m fast_axolotl.bench.axolotl_inputs FOLDER`` this file makes the model;
that needs torch, tokenizers and transformers, which come with Axolotl. Nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fast_axolotl.bench.contest import peer_module

__all__ = [
    "DATASETS",
    "REPEATED_SHARE",
    "chat_rows",
    "conversation",
    "documents",
    "preprocess_config",
    "streaming_chat_config",
    "streaming_config",
    "train_config",
    "write_config",
    "write_documents",
    "write_model",
    "write_rows",
]

Row = dict[str, Any]
Config = dict[str, Any]

REPEATED_SHARE = 0.2
"""Of the rows that repeat an earlier one, so that dedupe has something to do."""
SEQUENCE_LENGTH = 2048
PREFERENCE_LENGTH = 160
"""``sequence_len`` of the preference data: about a tenth of the pairs is longer."""
TRAIN_STEPS = 20
PROCESSES = 2
"""``dataset_num_proc``."""

_VOCABULARY = 8000
_WORDS = 4000
_SENTENCES = 2000
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"


@cache
def _words() -> list[str]:
    rng = random.Random(0)
    made: dict[str, None] = {}
    while len(made) < _WORDS:
        syllables = (rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(4))
        made["".join(list(syllables)[: rng.randint(1, 4)])] = None
    return list(made)


def _text(rng: random.Random, least: int, most: int) -> str:
    """So many words."""
    return " ".join(rng.choices(_words(), k=rng.randint(least, most)))


def chat_rows(rng: random.Random) -> Iterator[Row]:
    """Two questions and answers: about 130 tokens with the template."""
    while True:
        yield {
            "messages": [
                {"role": role, "content": _text(rng, least, most)}
                for role, least, most in (("user", 5, 20), ("assistant", 12, 50)) * 2
            ]
        }


def conversation(rng: random.Random, turns: int) -> Row:
    """So many questions and answers of a few words each."""
    roles = ("user", "assistant") * turns
    return {"messages": [{"role": role, "content": _text(rng, 1, 3)} for role in roles]}


def _alpaca_rows(rng: random.Random) -> Iterator[Row]:
    while True:
        yield {
            "instruction": _text(rng, 5, 20),
            "input": _text(rng, 3, 20) if rng.random() < 0.5 else "",
            "output": _text(rng, 20, 80),
        }


def _completion_rows(rng: random.Random) -> Iterator[Row]:
    while True:
        yield {"text": _text(rng, 40, 220)}


def _preference_rows(rng: random.Random) -> Iterator[Row]:
    while True:
        yield {
            "prompt": _text(rng, 5, 60),
            "chosen": _text(rng, 10, 100),
            "rejected": _text(rng, 10, 100),
        }


DATASETS: Mapping[str, Callable[[random.Random], Iterator[Row]]] = {
    "chat": chat_rows,
    "alpaca": _alpaca_rows,
    "completion": _completion_rows,
    "dpo": _preference_rows,
}
"""Kind of dataset to its rows, without end; a test of each is in ``preprocess_config``."""


def write_rows(kind: str, path: Path, count: int) -> Path:
    """So many rows of a kind as JSON lines, a fifth of which repeat an earlier one."""
    rng = random.Random(count)
    rows = DATASETS[kind](rng)
    lines: list[str] = []
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            if lines and rng.random() < REPEATED_SHARE:
                line = rng.choice(lines)
            else:
                line = json.dumps(next(rows)) + "\n"
                lines.append(line)
            file.write(line)
    return path


def documents(count: int, num_bytes: int, seed: int = 0) -> Iterator[str]:
    """Texts of about so many bytes, each its own."""
    rng = random.Random(seed)
    sentences = [_text(rng, 30, 60) for _ in range(_SENTENCES)]
    mean = sum(map(len, sentences)) // len(sentences)
    for number in range(count):
        chosen = rng.choices(sentences, k=max(1, num_bytes // mean))
        yield f"{number} {'. '.join(chosen)}"


def write_documents(path: Path, num_bytes: int, document_bytes: int) -> Path:
    """A file of about so many bytes: JSON lines with a ``text``."""
    count = max(1, num_bytes // document_bytes)
    with path.open("w", encoding="utf-8") as file:
        for text in documents(count, document_bytes):
            file.write(f'{{"text": "{text}"}}\n')
    return path


def write_config(config: Config, path: Path) -> Path:
    """JSON, which is YAML."""
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def preprocess_config(kind: str, model: Path, data: Path, prepared: Path) -> Config:
    """``axolotl preprocess`` of one of the ``DATASETS``."""
    config = {
        **_common(model, prepared.with_name("output")),
        "datasets": [{"path": str(data), "ds_type": "json", **_TYPES[kind]}],
        "dataset_prepared_path": str(prepared),
        "dataset_exact_deduplication": True,
        "dataset_num_proc": PROCESSES,
        "sequence_len": SEQUENCE_LENGTH,
    }
    if kind == "dpo":
        return {**config, "rl": "dpo", "sequence_len": PREFERENCE_LENGTH}
    return {**config, "sample_packing": True, "pad_to_sequence_len": True}


_TYPES: Mapping[str, Mapping[str, str]] = {
    "chat": {"type": "chat_template", "field_messages": "messages"},
    "alpaca": {"type": "alpaca"},
    "completion": {"type": "completion", "field": "text"},
    "dpo": {"type": "chatml.default", "split": "train"},
}


def train_config(prepare: Config, output: Path, *, ranks: int = 1) -> Config:
    """``axolotl train`` on what a configuration has prepared, every loss logged and saved."""
    config = {
        **prepare,
        "output_dir": str(output),
        "max_steps": TRAIN_STEPS,
        "save_steps": TRAIN_STEPS,
    }
    if ranks > 1:
        # Axolotl gives every rank a device of its number, even without an accelerator; what is
        # worked out from this overrules that.
        config |= {"max_memory": {"cpu": "8GiB"}, "ddp_backend": "gloo"}
    return config


def streaming_config(
    model: Path, data: Path, output: Path, *, steps: int, buffer_rows: int, ours: bool
) -> Config:
    """``axolotl train`` on a stream; with our reader, or as Axolotl reads it."""
    config = {
        **_common(model, output),
        "pretraining_dataset": [
            {"path": "json", "data_files": str(data), "text_column": "text", "type": "pretrain"}
        ],
        "streaming": True,
        "streaming_multipack_buffer_size": buffer_rows,
        "shuffle_merged_datasets": False,
        "sample_packing": True,
        "sequence_len": SEQUENCE_LENGTH,
        "max_steps": steps,
        "save_strategy": "no",
    }
    if ours:
        keys = ("dataset_use_rust_streaming", "fast_axolotl_streaming_force")
        config |= {"plugins": [_PLUGIN], **dict.fromkeys(keys, True)}
    return config


def streaming_chat_config(
    model: Path, data: Path, output: Path, *, steps: int, buffer_rows: int
) -> Config:
    """``axolotl train`` on a stream of conversations, packed so many rows at a time."""
    source = {"path": "json", "data_files": str(data), "split": "train"}
    return {
        **_common(model, output),
        "datasets": [{**source, **_TYPES["chat"]}],
        "streaming": True,
        "streaming_multipack_buffer_size": buffer_rows,
        "shuffle_merged_datasets": False,
        "sample_packing": True,
        "sequence_len": 512,
        "max_steps": steps,
        "logging_steps": 10,
        "save_strategy": "no",
    }


def _common(model: Path, output: Path) -> Config:
    return {
        "base_model": str(model),
        "tokenizer_type": "AutoTokenizer",
        "chat_template": "tokenizer_default",
        "output_dir": str(output),
        "val_set_size": 0,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "attn_implementation": "sdpa",
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "learning_rate": 0.001,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "logging_steps": 1,
        "seed": 42,
    }


def write_model(folder: Path) -> None:
    """The model and its tokenizer, as ``from_pretrained`` finds them."""
    transformers, torch = peer_module("transformers"), peer_module("torch")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * SEQUENCE_LENGTH,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_tokenizer() -> Any:
    tokenizers = peer_module("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    tokenizer.train_from_iterator((_text(rng, 30, 60) for _ in range(_SENTENCES)), trainer)
    return tokenizer


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
