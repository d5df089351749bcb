"""A fine-tune as people write it: conversations are tokenised when the loader asks for them.

``python -m benchmarks.finetune --workers 1``. A small Llama of the HF Trainer, made on the spot. To
train on the answers alone, every turn is rendered with the chat template and tokenised with all
that comes before it: the usual way, and slow. Nothing sleeps. ``make example-gpu`` measures it,
follows the advice, and compares both.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.axolotl_inputs import SEQUENCE_LENGTH, random_text, write_model

_ROWS_OF_A_BATCH = 16
_CONVERSATIONS = 512
_TURNS = 12
"""Of the user and of the assistant together: about 2,000 tokens."""


def main() -> None:
    """Train so many steps."""
    parser = argparse.ArgumentParser(prog="finetune", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="processes of the DataLoader")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    rng = random.Random(0)
    roles = ("user", "assistant") * (_TURNS // 2)
    conversations = [
        [{"role": role, "content": random_text(rng, 40, 120)} for role in roles]
        for _ in range(_CONVERSATIONS)
    ]

    class Conversations(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return _ROWS_OF_A_BATCH * options.steps

        def __getitem__(self, index: int) -> dict[str, Any]:
            return tokenize(tokenizer, conversations[index % _CONVERSATIONS])

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sizes = {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
        is_gpu = torch.cuda.is_available()
        config = AutoConfig.from_pretrained(folder, **(sizes | heads if is_gpu else {}))
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=_ROWS_OF_A_BATCH,
            max_steps=options.steps,
            dataloader_num_workers=options.workers,
            bf16=is_gpu,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(
            model=AutoModelForCausalLM.from_config(config),
            args=arguments,
            train_dataset=Conversations(),
            data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64),
        ).train()


def tokenize(tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """The ids of a conversation, and labels for what the assistant says."""
    ids: list[int] = []
    labels: list[int] = []
    for number, message in enumerate(messages):
        text = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        new = tokenizer(text, add_special_tokens=False)["input_ids"][len(ids) :]
        ids += new
        labels += new if message["role"] == "assistant" else [-100] * len(new)
    length = SEQUENCE_LENGTH
    return {
        "input_ids": ids[:length],
        "attention_mask": [1] * len(ids[:length]),
        "labels": labels[:length],
    }


if __name__ == "__main__":
    main()
