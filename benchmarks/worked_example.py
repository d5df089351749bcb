"""The worked example of docs/scale.md: a short run on one GPU, and the plan made from it.

``PYTHONPATH=src:. python -m benchmarks.worked_example --folder example``: a Llama of 1.2 B
parameters with random weights is trained by HF ``Trainer`` on rows that have something to learn,
under ``fast-axolotl measure``; then ``show`` and ``plan`` print what stands in the documentation.
Needs a GPU, torch, transformers and accelerate; two minutes.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.memory_gpu import LLAMAS, llama_config


def main(arguments: Sequence[str] | None = None) -> None:
    """Every command of the example, with what it prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", default="1.2B", choices=LLAMAS)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(options)
        return
    given = ["--folder", str(options.folder), "--size", options.size, "--steps", str(options.steps)]
    child = ["-m", "benchmarks.worked_example", "--tokens", str(options.tokens), "--train", *given]
    record = str(options.folder / "run")
    wanted = ["--gpus", "1,8,64,512", "--tokens", "10B", "--price", "2.5/h"]
    commands = [
        ["measure", "--quiet", "--profile-steps", "5", "--output", record],
        ["show", record],
        ["plan", record, *wanted],
        ["plan", record, "--gpu", "H100-SXM,B200", "--gpus", "8,64", "--tokens", "10B"],
    ]
    commands[0] += ["--", sys.executable, *child]
    for words in commands:
        shown = shlex.join(words).replace(sys.executable, "python")
        print(f"\n$ fast-axolotl {shown}", flush=True)
        subprocess.run([sys.executable, "-m", "fast_axolotl", *words], check=True)


def train(options: argparse.Namespace) -> None:
    """What a user would write: HF Trainer, micro-batches of 4, two of them a step."""
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = llama_config(options.size)
    vocabulary, rows = min(1000, config.vocab_size), 2 * options.steps
    # A token is most likely followed by one fixed other, so there is something to learn.
    follower = torch.randperm(vocabulary)
    ids = torch.empty(rows, options.tokens, dtype=torch.long)
    ids[:, 0] = torch.randint(0, vocabulary, (rows,))
    noise = torch.randint(0, vocabulary, ids.shape)
    is_noise = torch.rand(ids.shape) < 0.3
    for place in range(1, options.tokens):
        known = follower[ids[:, place - 1]]
        ids[:, place] = torch.where(is_noise[:, place], noise[:, place], known)
    data = [{"input_ids": row, "labels": row} for row in ids]
    has_gpu = torch.cuda.is_available()
    with torch.device("cuda" if has_gpu else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    Trainer(
        model=model,
        train_dataset=data,
        args=TrainingArguments(
            output_dir=str(options.folder / "trainer"),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=options.steps,
            learning_rate=1e-4,
            warmup_steps=10,
            disable_tqdm=True,
            bf16=has_gpu,
            use_cpu=not has_gpu,
            dataloader_num_workers=2,
            save_strategy="no",
            report_to=[],
            logging_steps=100,
        ),
    ).train()


if __name__ == "__main__":
    main()
