"""Fine-tune a small Llama with HF Trainer on conversations that are tokenised while it trains.

fast-axolotl measure -- python examples/chat_training.py work
fast-axolotl measure -- python examples/chat_training.py work --workers 4

As in many scripts, each assistant's turn is found by rendering the conversation up to it. That is
slow, and without workers the GPU waits for it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tiny_model import write_conversations, write_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TOKENS = 1024
JOINED = 4
"""Conversations of the file that make one of the training."""


class Conversations(torch.utils.data.Dataset):
    """Rows are tokenised when they are asked for."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.rows) // JOINED

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        rows = self.rows[at * JOINED : (at + 1) * JOINED]
        messages = [message for row in rows for message in row]
        ids: list[int] = []
        labels: list[int] = []
        for turn, message in enumerate(messages, 1):
            text = self.tokenizer.apply_chat_template(messages[:turn], tokenize=False)
            whole = self.tokenizer(text)["input_ids"]
            new = whole[len(ids) :]
            labels += new if message["role"] == "assistant" else [-100] * len(new)
            ids = whole
        padding = max(0, TOKENS - len(ids))
        return {
            "input_ids": torch.tensor(ids[:TOKENS] + [0] * padding),
            "attention_mask": torch.tensor([1] * len(ids[:TOKENS]) + [0] * padding),
            "labels": torch.tensor(labels[:TOKENS] + [-100] * padding),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    data, made = options.work / "chats.jsonl", options.work / "model"
    if not made.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        write_conversations(data, count=20_000)
        write_model(made)
    has_gpu = torch.cuda.is_available()
    size, layers = (1024, 12) if has_gpu else (64, 2)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size,
            intermediate_size=4 * size,
            num_hidden_layers=layers,
            num_attention_heads=size // 64 or 1,
            num_key_value_heads=size // 64 or 1,
        )
    )
    arguments = TrainingArguments(
        output_dir=str(options.work / "output"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        dataloader_num_workers=options.workers,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=has_gpu,
        full_determinism=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Conversations(data, tokenizer)).train()


if __name__ == "__main__":
    main()
