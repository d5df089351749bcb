"""A tiny model, its tokenizer and a file of conversations, made on the spot for the examples.

``python examples/tiny_model.py FOLDER`` writes them; nothing is downloaded. Replace them with your
own model and data. Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_conversations(path: Path, count: int = 400) -> None:
    """JSON lines with a question and an answer of random words each."""
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnop", k=5)) for _ in range(500)]
    with path.open("w") as file:
        for _ in range(count):
            texts = [" ".join(dice.choices(words, k=dice.randint(5, 60))) for _ in range(2)]
            roles = ("user", "assistant")
            pairs = zip(roles, texts, strict=True)
            messages = [{"role": role, "content": text} for role, text in pairs]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path) -> None:
    """A Llama of two layers and a byte-level tokenizer, as ``from_pretrained`` reads them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class ByteTokenizer:
    """A byte is a token: what torchtune asks of a tokenizer, and not more."""

    pad_id = 0

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """Tokens of the messages, and whether each is left out of the loss."""
        tokens: list[int] = []
        masked: list[bool] = []
        for message in sample.pop("messages"):
            text = message.text_content.encode()
            tokens += [3 + byte for byte in text]
            masked += [message.masked] * len(text)
        return {**sample, "tokens": tokens[:128], "mask": masked[:128]}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_model(target / "model")
    write_conversations(target / "conversations.jsonl")
