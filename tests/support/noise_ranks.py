"""A quadratic in several layouts, with and without our norms; as a program, one rank of two.

A sample's gradient is w − x with x ~ N(μ, I), so the noise scale is DIMENSIONS ÷ |w − μ|². Run as
``python noise_ranks.py FOLDER RANK`` it records each layout into ``FOLDER/LAYOUT`` and writes
``FOLDER/weights-RANK.json``: layout → weights after some steps with the norms, and without.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fast_axolotl.integrations.torch_meter import TorchWatch
from fast_axolotl.measure import measure

DIMENSIONS, DISTANCE, BATCH, STEPS = 41, 2.0, 2, 300
LAYOUTS = {
    f"{kind}-{how}": (passes, STEPS if kind == "ddp" else 80)
    for kind in ("ddp", "fsdp")
    for how, passes in (("local", 3), ("reduced", 3), ("single", 1))
    if kind == "ddp" or how == "reduced"
}
"""Layout → backward passes of a step, and steps."""


class Part(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count))

    def forward(self, rows: Any) -> Any:
        return 0.5 * (self.weight - rows).square().sum(1)


class Quadratic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(20), Part(DIMENSIONS - 20)

    def forward(self, rows: Any) -> Any:
        return (self.first(rows[:, :20]) + self.second(rows[:, 20:])).mean()


def train(
    layout: str, steps: int, rate: float, folder: Path | None, *, passes: int, **change: Any
) -> list[float]:
    """The weights at the end; with a folder, measured into ``FOLDER/LAYOUT``."""
    backwards = change.get("backwards", 1)
    kind, _, how = layout.partition("-")
    rank, count = (0, 1) if kind == "alone" else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(7 + rank)
    rows = torch.randn(max(steps, STEPS) * passes * BATCH, DIMENSIONS)[: steps * passes * BATCH]
    rows[:, 0] += DISTANCE
    model: Any = Quadratic()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (count,))
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh)
    if change.get("is_flattened"):
        model.first.weight._fsdp_flattened = True
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    is_scaled = how == "scaled"
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=200, enabled=is_scaled)
    watch = None
    if folder is not None:
        place = {"rank": rank, "world_size": count, "sample_system": False}
        watch = TorchWatch(measure(folder / layout, **place), gradient_noise=True)  # type: ignore[arg-type]
        watch.start()
    for number, (batch,) in enumerate(DataLoader(TensorDataset(rows), batch_size=BATCH), 1):
        is_last = number % passes == 0
        is_quiet = how == "local" and not is_last
        if kind == "fsdp":
            model.set_requires_gradient_sync(not is_quiet)
        with model.no_sync() if kind == "ddp" and is_quiet else nullcontext():
            loss = scaler.scale(model(batch) / passes)
            for _ in range(backwards):
                loss.backward(retain_graph=backwards > 1)
        if is_last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=how not in ("zeroed", "local"))
    assert not is_scaled or scaler.get_scale() > 2.0**10
    if watch is not None and watch.meter is not None:
        watch.stop()
        watch.meter.close()
    found = [getattr(item, "full_tensor", lambda item=item: item)() for item in model.parameters()]
    return [value for item in found for value in item.tolist()]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    weights = {}
    for layout, (passes, steps) in LAYOUTS.items():
        train(layout, steps, 0.0, folder, passes=passes)
        folders = (folder / "short", None)
        weights[layout] = [train(layout, 20, 0.1, one, passes=passes) for one in folders]
    Path(folder, f"weights-{rank}.json").write_text(json.dumps(weights))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
