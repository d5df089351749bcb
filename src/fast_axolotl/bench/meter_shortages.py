"""Children of ``meter_scenarios``: ``python -m fast_axolotl.bench.meter_shortages NAME FOLDER``.

Each trains, in its way, under the meter, short of one thing: processor time for the model or for
tokens, disk, memory, or a rank that keeps up.
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fast_axolotl.measure import measure

__all__ = [
    "compute",
    "disk",
    "main",
    "refused",
    "slow_compute_rank",
    "slow_loader_rank",
    "swap",
    "tokenise",
    "tokenise_thread",
]

_BLOCK = 1 << 20
_FETCHES = 260


def main() -> None:
    """Runs the scenario of the first argument in the folder of the second."""
    _SHORTAGES[sys.argv[1]](Path(sys.argv[2]))


def compute(folder: Path) -> None:
    """A model that takes 20 ms of a processor, rows that take nothing."""
    with measure(folder / "run") as meter:
        for _ in meter.watch(range(_FETCHES)):
            _work(0.02)


def tokenise(folder: Path) -> None:
    """The loop itself tokenises, in Python, before every step."""
    with measure(folder / "run") as meter:
        for _ in meter.watch(_tokenised()):
            time.sleep(0.002)


def tokenise_thread(folder: Path) -> None:
    """A thread tokenises ahead: batches are ready, but the model's thread waits for the lock of the
    interpreter in the middle of its step. Only a replayed batch, without the reading, shows it."""
    ready: queue.Queue[list[int] | None] = queue.Queue(4)

    def read() -> None:
        for tokens in _tokenised():
            ready.put(tokens)
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    with measure(folder / "run") as meter:
        for _ in meter.watch(iter(ready.get, None), replay=100):
            for _ in range(5):
                time.sleep(0.002)


def _tokenised() -> Iterator[list[int]]:
    words = re.compile(r"\w+|\W")
    text = "Some words, and others; again and again. " * 3000
    known: dict[str, int] = {}
    for _ in range(_FETCHES):
        yield [known.setdefault(word, len(known)) for word in words.findall(text)][:2048]


def disk(folder: Path) -> None:
    """Reads past the cache, as fast as the disk goes, and does little with it."""
    path = folder / "data.bin"
    with path.open("wb") as file:
        block = os.urandom(_BLOCK)
        for _ in range(2 * _FETCHES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())

    def blocks() -> Iterator[int]:
        buffer = mmap.mmap(-1, _BLOCK)
        opened = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while count := os.readv(opened, [buffer]):
            yield count
        os.close(opened)

    with measure(folder / "run", data_paths=[path]) as meter:
        for _ in meter.watch(blocks()):
            time.sleep(0.001)


def swap(folder: Path) -> None:
    """A loader whose buffer of 200 MB does not fit: pages come back from swap at random."""
    size = 200 << 20
    buffer = bytearray(size)
    pages = size // mmap.PAGESIZE

    def batches() -> Iterator[int]:
        chosen = random.Random(0)
        for _ in range(_FETCHES):
            for _ in range(500):
                buffer[chosen.randrange(pages) * mmap.PAGESIZE] = 1
            yield 500

    with measure(folder / "run") as meter:
        for _ in meter.watch(batches()):
            _work(0.01)


def refused(folder: Path) -> None:
    """Holds on to every batch until the machine refuses."""
    held = []
    for _ in range(4000):
        held.append(bytearray(b"x" * _BLOCK))
        time.sleep(0.01)


def slow_loader_rank(folder: Path) -> None:
    """Of two ranks the second waits for its rows, and the first for the second."""
    _train_ranks(folder, loader_seconds=0.02, model_seconds=0.0)


def slow_compute_rank(folder: Path) -> None:
    """Of two ranks the second computes longer, and the first waits for its gradients."""
    _train_ranks(folder, loader_seconds=0.0, model_seconds=0.03)


def _train_ranks(folder: Path, *, loader_seconds: float, model_seconds: float) -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from fast_axolotl.integrations.torch_meter import watch_torch

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [torch.ones(64)] * (8 * _FETCHES)

    def collate(batch: list[Any]) -> Any:
        time.sleep(loader_seconds * rank)
        return torch.stack(batch)

    loader = DataLoader(rows, batch_size=8, collate_fn=collate)
    options = {"rank": rank, "world_size": 2, "sample_system": rank == 0}
    with measure(folder / "run", **options) as meter, watch_torch(meter, profile_steps=20):
        for batch in loader:
            _work(0.005)
            time.sleep(model_seconds * rank)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    distributed.destroy_process_group()


def _work(seconds: float) -> None:
    """Keeps a processor busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


_SHORTAGES: Mapping[str, Callable[[Path], None]] = {
    "compute": compute,
    "tokenise": tokenise,
    "tokenise-thread": tokenise_thread,
    "disk": disk,
    "swap": swap,
    "refused": refused,
    "slow-loader-rank": slow_loader_rank,
    "slow-compute-rank": slow_compute_rank,
}


if __name__ == "__main__":
    main()
