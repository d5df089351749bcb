"""What a run of Axolotl needs, made on the spot: a tiny model, a tokenizer, data, configurations.

The words are drawn from a fixed generator, so files are the same every time, on every machine. The
model is a Llama of two layers of 64, the tokenizer a BPE that has seen those words, with a ChatML
template. ``write_model`` needs torch, tokenizers and transformers, which come with Axolotl. Nothing
is downloaded.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Config = dict[str, Any]

SEQUENCE_LENGTH = 2048
PREFERENCE_LENGTH = 160
"""``sequence_len`` of the preference data: about a tenth of the pairs is longer."""
TRAIN_STEPS = 20
PROCESSES = 2
"""``dataset_num_proc``."""
CHAT = {"type": "chat_template", "field_messages": "messages"}
"""The keys of a dataset of conversations."""
_PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"
_REPEATED_SHARE = 0.2
"""Of the rows that repeat an earlier one, so that dedupe has something to do."""
_VOCABULARY = 8000
_WORDS = 4000
_SENTENCES = 2000
"""That the tokenizer is trained on, and documents consist of."""
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def _words() -> list[str]:
    rng = random.Random(0)
    made: dict[str, None] = {}
    while len(made) < _WORDS:
        syllables = (rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(4))
        made["".join(list(syllables)[: rng.randint(1, 4)])] = None
    return list(made)


def random_text(rng: random.Random, least: int, most: int) -> str:
    """So many words."""
    return " ".join(rng.choices(_words(), k=rng.randint(least, most)))


def chat_rows(rng: random.Random) -> Iterator[Row]:
    """Two questions and answers: about 130 tokens with the template."""
    while True:
        yield {
            "messages": [
                {"role": role, "content": random_text(rng, least, most)}
                for role, least, most in (("user", 5, 20), ("assistant", 12, 50)) * 2
            ]
        }


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


def write_rows(path: Path, count: int, kind: str = "chat") -> Path:
    """So many rows of a dataset as JSON lines, a fifth of which repeat an earlier one."""
    rng = random.Random(count)
    rows = DATASETS[kind][0](rng)
    lines: list[str] = []
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            if lines and rng.random() < _REPEATED_SHARE:
                line = rng.choice(lines)
            else:
                line = json.dumps(next(rows)) + "\n"
                lines.append(line)
            file.write(line)
    return path


def documents(count: int, num_bytes: int) -> Iterator[str]:
    """Texts of about so many bytes, each its own."""
    rng = random.Random(0)
    sentences = [random_text(rng, 30, 60) for _ in range(_SENTENCES)]
    mean = sum(map(len, sentences)) // len(sentences)
    for number in range(count):
        chosen = rng.choices(sentences, k=max(1, num_bytes // mean))
        yield f"{number} {'. '.join(chosen)}"


def write_config(config: Config, path: Path) -> Path:
    """JSON, which is YAML."""
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def common_config(model: Path, output: Path) -> Config:
    """The keys that every run has: the model, on the processor, a batch of one."""
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


def preprocess_config(model: Path, data: Path, prepared: Path, kind: str = "chat") -> Config:
    """``axolotl preprocess`` of one of the ``DATASETS``, with dedupe and, but for DPO, packing."""
    config = {
        **common_config(model, prepared.with_name("output")),
        "datasets": [{"path": str(data), "ds_type": "json", **DATASETS[kind][1]}],
        "dataset_prepared_path": str(prepared),
        "dataset_exact_deduplication": True,
        "dataset_num_proc": PROCESSES,
        "sequence_len": SEQUENCE_LENGTH,
    }
    if kind == "dpo":
        return {**config, "rl": "dpo", "sequence_len": PREFERENCE_LENGTH}
    return {**config, "sample_packing": True, "pad_to_sequence_len": True}


def train_config(prepare: Config, output: Path) -> Config:
    """``axolotl train`` on what a configuration has prepared, every loss logged and saved."""
    steps = {"max_steps": TRAIN_STEPS, "save_steps": TRAIN_STEPS}
    return {**prepare, "output_dir": str(output), **steps}


def stream_config(
    model: Path, output: Path, data: Path, *, steps: int, buffer_rows: int, ours: bool
) -> Config:
    """``axolotl train`` on a stream of documents, so many packed at a time, by ours or not."""
    source = {"path": "json", "data_files": str(data), "text_column": "text", "type": "pretrain"}
    return {
        **common_config(model, output),
        "streaming": True,
        "streaming_multipack_buffer_size": buffer_rows,
        "shuffle_merged_datasets": False,
        "sample_packing": True,
        "sequence_len": SEQUENCE_LENGTH,
        "max_steps": steps,
        "save_strategy": "no",
        "pretraining_dataset": [source],
        **({"plugins": [_PLUGIN], "dataset_use_rust_streaming": True} if ours else {}),
    }


def write_model(folder: Path) -> None:
    """The model and its tokenizer, as ``from_pretrained`` finds them."""
    tokenizers, transformers, torch = map(
        importlib.import_module, ("tokenizers", "transformers", "torch")
    )
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    bpe.train_from_iterator((random_text(rng, 30, 60) for _ in range(_SENTENCES)), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
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
