"""What the norms for the gradient noise scale cost on a GPU, and that they change nothing.

    python -m benchmarks.noise_gpu --size 1e9 --tokens 4096

A stack of that many bf16 weights is trained with four accumulated micro-batches: bare, measured,
and with ``gradient_noise``, in alternating order. Printed: seconds of a step, the share that the
norms take of a measured one (with every step looked at, and as it adapts), whether the weights are
equal, the noise scale, synchronisations that torch warned of, and peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from fast_axolotl.integrations import noise_scale
from fast_axolotl.integrations.torch_meter import TorchWatch
from fast_axolotl.measure import measure
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run

PASSES, WIDTH = 4, 2048


def train(args: Any, device: str, folder: Path | None, most_cost: float) -> dict[str, Any]:
    """Seconds of a step and the weights' digest; with a folder, measured into it."""
    noise_scale.MOST_COST = most_cost
    torch.manual_seed(0)
    width = args.width
    layers = max(1, int(args.size) // (width * width))
    stack = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(*stack).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(256, width)
    found: dict[str, Any] = {}
    watch = None
    if folder is not None:
        watch = TorchWatch(measure(folder, sample_system=False), gradient_noise=most_cost > 0)
        watch.start()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, step = [], 0
    for epoch in range(10**9):
        torch.manual_seed(epoch)
        for number, (batch,) in enumerate(DataLoader(TensorDataset(rows), batch_size=2), 1):
            tokens = batch.repeat(args.tokens // 2, 1).to(device, torch.bfloat16, non_blocking=True)
            (model(tokens).float().square().mean() / PASSES).backward()
            if number % PASSES:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:  # in steady state nothing else waits for the device
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode(0)
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter())
                if device == "cuda" and step >= 20:
                    torch.cuda.set_sync_debug_mode("warn")
            if step == args.steps:
                break
        if step == args.steps:
            break
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(0)
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["step_seconds"] = statistics.median(
        (end - begin) / 10 for begin, end in itertools.pairwise(seconds)
    )
    if watch is not None and watch.meter is not None and folder is not None:
        watch.stop()
        watch.meter.close()
        record = read_run(folder)
        found["looked_at"] = len(record.ranks[0].gradients)
        summary = summarise(record)
        found["noise_scale"] = summary.gradient_noise_scale
        found["reason"] = summary.reasons.get("gradient_noise_scale", "")
    found["weights"] = sum(item.detach().double().sum().item() for item in model.parameters())
    found["first"] = next(model.parameters()).detach().flatten()[:4].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=float, default=1e9)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=WIDTH)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: dict[str, list[dict[str, Any]]] = {
        "bare": [],
        "meter": [],
        "every step": [],
        "adapting": [],
    }
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        for turn in range(2):
            order = list(runs) if turn == 0 else list(runs)[::-1]
            for name in order:
                before = len(caught)
                place = None if name == "bare" else Path(folder, f"{name}-{turn}")
                cost = {"meter": 0.0, "every step": 1e9}.get(name, 0.01)
                runs[name].append(train(args, device, place, cost))
                texts = [str(one.message) for one in caught[before:]]
                runs[name][-1]["syncs"] = sum("synchroniz" in text for text in texts)
    print(json.dumps(runs, indent=1))
    bare = statistics.median(one["step_seconds"] for one in runs["meter"])
    for name in ("every step", "adapting"):
        own = statistics.median(one["step_seconds"] for one in runs[name])
        print(f"{name}: {100 * (own / bare - 1):+.2f} % of {1e3 * bare:.2f} ms a step")
    digests = {(one["weights"], tuple(one["first"])) for own in runs.values() for one in own}
    print("weights:", "equal in all runs" if len(digests) == 1 else f"{len(digests)} DIFFERENT")


if __name__ == "__main__":
    main()
