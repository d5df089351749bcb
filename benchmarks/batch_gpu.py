"""Does ``fast-axolotl batch`` find the knee and the boundary on a real GPU, with torch's own peaks?

``PYTHONPATH=src:. python -m benchmarks.batch_gpu``: a Llama of 1.2 B parameters with random weights
is trained for some steps at micro-batches that double until memory runs out; the boundary is then
halved. Every run also asks torch for its peak and times its own steps, synchronised. Ours must have
the same peak, and the same tokens/s within 5 %. Needs torch, transformers, typer, rich and psutil;
from the source tree, in about four minutes. ``--size tiny`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, execute, race_parser
from benchmarks.memory_gpu import LLAMAS, llama_config
from benchmarks.result import Case, Goal, Measurement, Result
from fast_axolotl.errors import DataError

_WARMUP = 5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("batch-gpu", __doc__)
    parser.add_argument("--size", default="1.2B", choices=LLAMAS)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--micro-batches")
    parser.add_argument("--trial", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.trial is not None:
        _train(options)
    else:
        execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """The sweep, beside what its runs say of themselves."""
    own = [sys.executable, "-m", "benchmarks.batch_gpu", "--size", options.size]
    own += ["--tokens", str(options.tokens), "--work-dir", str(folder)]
    command = f"{shlex.join(own)} --steps {{steps}} --trial {{micro_batch}}"
    words = [sys.executable, "-m", "fast_axolotl", "batch", "--json", "--command", command]
    words += ["--steps", str(options.steps), "--output", str(folder / "sweep")]
    words += ["--micro-batches", options.micro_batches] if options.micro_batches else []
    begin = time.monotonic()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - begin
    if done.returncode:
        raise DataError("the sweep failed; what it said stands above", path=str(folder))
    found = json.loads(done.stdout)
    advice, measurements, peaks, rates = found["advice"], [], [], []
    for trial in found["trials"]:
        values: dict[str, Any] = {"ours_tokens_per_s": trial["rate"]}
        if trial["outcome"] == "ran":
            theirs = json.loads((folder / f"{trial['micro_batch']}.json").read_text())
            values |= {"loop_tokens_per_s": theirs["rate"], "step_s": trial["step_seconds"]}
            values |= {name: trial[name] for name in ("peak_bytes", "held_bytes")}
            values["torch_peak_bytes"] = theirs["peak"]
            rates.append(abs(100 * (trial["rate"] / theirs["rate"] - 1)))
            if theirs["peak"]:
                peaks.append(abs(100 * (trial["peak_bytes"] / theirs["peak"] - 1)))
        name = f"micro-batch {trial['micro_batch']}, {trial['outcome']}"
        measurements.append(Measurement(name=name, values=values))
    low, high = advice["largest_ran"], advice["smallest_out_of_memory"]
    goals = [
        Goal("peak off torch's own", 0.1, "%", max(peaks, default=None)),
        Goal("tokens/s off the loop's own", 5.0, "%", max(rates, default=None)),
        Goal("smallest that does not fit over largest that ran", 9 / 8, "×", high and high / low),
    ]
    notes = [*advice["sentences"], *advice["warnings"], f"The sweep took {seconds:.0f} s."]
    case = Case(
        name="sweep",
        text=f"{options.size}, rows of {options.tokens:,} tokens, {options.steps} steps a run",
        rows=len(found["trials"]),
        measurements=measurements,
        goals=goals,
    )
    return Result(cases=[case], notes=notes, facts={"sweep": found, "seconds": seconds})


def _train(options: argparse.Namespace) -> None:
    """One run: what the sweep starts. Its own peak and tokens/s go into a file."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = llama_config(options.size)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    ids = torch.randint(0, config.vocab_size, (options.steps * options.trial, options.tokens))
    rows, begin = [{"input_ids": row} for row in ids], 0.0
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for number, batch in enumerate(DataLoader(rows, batch_size=options.trial)):
        if number == _WARMUP:
            wait()
            begin = time.perf_counter()
        tokens = batch["input_ids"].to(device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wait()
    seconds = time.perf_counter() - begin
    rate = (options.steps - _WARMUP) * options.trial * options.tokens / seconds
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    path = options.work_dir / f"{options.trial}.json"
    path.write_text(json.dumps({"rate": rate, "peak": peak}))


if __name__ == "__main__":
    main()
