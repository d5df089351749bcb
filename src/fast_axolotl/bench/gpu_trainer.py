"""A small Llama trained by HF ``Trainer`` on made-up tokens, from a loader that waits.

``python -m fast_axolotl.bench.gpu_trainer WAIT STEPS FOLDER`` trains with so many seconds of wait a
batch: an arm of a protocol on a machine with a GPU. ``bench meter-gpu`` calls ``train``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "train"]

_BATCH_ROWS = 8
_ROW_TOKENS = 2048
_VOCABULARY = 32000


def main() -> None:
    """Trains as the arguments say."""
    wait, steps, folder = sys.argv[1:]
    train(float(wait), int(steps), Path(folder))


def train(wait: float, steps: int, folder: Path, callbacks: Sequence[Any] = ()) -> None:
    """So many steps, each batch after a wait of so many seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=_ROW_TOKENS,
        use_cache=False,
    )
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=_BATCH_ROWS,
        max_steps=steps,
        bf16=True,
        logging_steps=50,
        # On by default, it looks at every loss and so waits for the device at every step.
        logging_nan_inf_filter=False,
        # So does the copy of every batch to the device.
        accelerator_config={"non_blocking": True},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=_SlowRows(wait / _BATCH_ROWS, _BATCH_ROWS * steps, torch),
        callbacks=list(callbacks),
    ).train()


class _SlowRows:
    """Rows of tokens, each after a wait."""

    def __init__(self, seconds: float, count: int, torch: Any) -> None:
        self.seconds = seconds
        self.count = count
        self.tokens = torch.randint(0, _VOCABULARY, (_ROW_TOKENS,))
        self.mask = torch.ones(_ROW_TOKENS, dtype=torch.long)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return {"input_ids": self.tokens, "attention_mask": self.mask, "labels": self.tokens}


if __name__ == "__main__":
    main()
