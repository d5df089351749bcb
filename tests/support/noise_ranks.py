"""One rank of two: the same quadratic trained in every layout, with and without our norms.

Run as ``python noise_ranks.py FOLDER RANK``. A sample's gradient is w − x with x ~ N(μ, I), so the
noise scale is DIMENSIONS ÷ |w − μ|². Records each layout into ``FOLDER/LAYOUT`` and writes
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

from fast_axolotl.integrations import noise_scale
from fast_axolotl.integrations.torch_meter import watch_torch
from fast_axolotl.measure import measure

DIMENSIONS, DISTANCE, BATCH, STEPS = 41, 2.0, 2, 300
LAYOUTS = {
    f"{kind}-{how}": (kind, passes, how == "local")
    for kind in ("ddp", "fsdp")
    for how, passes in (("local", 3), ("reduced", 3), ("single", 1))
}


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


def train(layout: str, steps: int, rate: float, folder: Path | None, rank: int) -> list[float]:
    kind, passes, is_local = LAYOUTS[layout]
    torch.manual_seed(7 + rank)
    rows = torch.randn(STEPS * passes * BATCH, DIMENSIONS)[: steps * passes * BATCH]
    rows[:, 0] += DISTANCE
    model: Any = Quadratic()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH)
    meter = None if folder is None else measure(folder / layout, sample_system=False, rank=rank,
                                                world_size=dist.get_world_size())  # fmt: skip
    with nullcontext() if meter is None else watch_torch(meter, gradient_noise=True):
        for number, (batch,) in enumerate(loader, 1):
            is_last = number % passes == 0
            is_quiet = is_local and not is_last
            if kind == "fsdp":
                model.set_requires_gradient_sync(not is_quiet)
            with model.no_sync() if kind == "ddp" and is_quiet else nullcontext():
                (model(batch) / passes).backward()
            if is_last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad(set_to_none=layout != "ddp-local")
    if meter is not None:
        meter.close()
    found = [getattr(item, "full_tensor", lambda item=item: item)() for item in model.parameters()]
    return [value for item in found for value in item.tolist()]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    noise_scale.MOST_COST = 1e9
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    weights = {}
    for layout in LAYOUTS:
        train(layout, STEPS if LAYOUTS[layout][0] == "ddp" else 80, 0.0, folder, rank)
        weights[layout] = [
            train(layout, 20, 0.1, None if bare else folder / "short", rank) for bare in (0, 1)
        ]
    Path(folder, f"weights-{rank}.json").write_text(json.dumps(weights))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
