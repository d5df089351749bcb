"""Runs that are made short of one thing, for real, and what the meter says of them.

``python -m benchmarks.meter_scenarios NAME FOLDER`` trains, in its way, under the meter, short of
processor time for the model or for tokens, of disk, of memory, or of a rank that keeps up. Limits
are control groups of Linux where this user may make them: a memory group with a swap file, a block
group that throttles the disk. Where they may not be made, the scenario is left out and says so.
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.children import offline_environment
from fast_axolotl.measure import measure
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run

_GROUPS = Path("/sys/fs/cgroup")
_DISK_BYTES_PER_SECOND = 50 << 20
_MEMORY_BYTES = 96 << 20
_SWAP_BYTES = 512 << 20
_SECONDS = 180
_BLOCK = 1 << 20
_FETCHES = 260


def run_scenario(name: str, folder: Path) -> dict[str, Any]:
    """Runs one and compares the verdict."""
    folder.mkdir(parents=True)
    expected = SCENARIOS[name][0]
    found: dict[str, Any] = {"name": name, "expected": expected, "verdict": None}
    command = [sys.executable, "-m", "benchmarks.meter_scenarios", name, str(folder)]
    if name.endswith("-rank"):
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    elif name == "refused":
        measured = ["-m", "fast_axolotl", "run", "--measure", "--output", str(folder / "run")]
        command = [sys.executable, *measured, "--", *command]
    with ExitStack() as stack:
        try:
            group = _limit(name, folder, stack)
        except OSError as error:
            note = f"left out: {error.strerror}: {error.filename}"
            return {**found, "right": None, "note": note}

        def join() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_SECONDS,
            check=False,
            preexec_fn=join,
            env={**offline_environment(folder, folder), "OMP_NUM_THREADS": "1"},
        )
    if done.returncode and not (folder / "run").exists():
        raise RuntimeError(done.stderr.strip().splitlines()[-1:])
    summary = summarise(read_run(folder / "run"))
    verdict = summary.verdict
    told = "/".join(filter(None, (verdict.kind, verdict.subtype)))
    if expected == "killed":
        right = done.returncode == -signal.SIGKILL and not summary.is_finished
        told = f"{told}, {summary.end_reason}"
    else:
        right = told in (expected, f"{expected}/near")
    return {
        **found,
        "verdict": told,
        "right": right,
        "note": "" if right else "NOT as made: " + verdict.headline,
        "headline": verdict.headline,
        "evidence": list(verdict.evidence),
        "action": verdict.action,
        "stall_fraction": summary.stall_fraction,
        "disk_share": summary.disk_share,
        "swap_in_bytes_per_second": summary.swap_in_bytes_per_second,
        "exposed_communication_fraction": summary.exposed_communication_fraction,
        "end_reason": summary.end_reason,
    }


def _limit(name: str, folder: Path, stack: ExitStack) -> Path | None:
    """The control group that a scenario runs in, made now and removed with the stack."""
    if name == "disk":
        device = folder.stat().st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {_DISK_BYTES_PER_SECOND}"
        values: dict[str, object] = {"blkio.throttle.read_bps_device": limit}
        controller = "blkio"
    elif name in ("swap", "refused"):
        values = {"memory.limit_in_bytes": _MEMORY_BYTES, "memory.swappiness": 100}
        controller = "memory"
    else:
        return None
    if name == "swap":
        path = folder / "swap"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _SWAP_BYTES)
        path.chmod(0o600)
        _call("mkswap", str(path))
        _call("swapon", str(path))
        stack.callback(_call, "swapoff", str(path))
    group = _GROUPS / controller / f"fast-axolotl-{os.getpid()}"
    group.mkdir()
    stack.callback(group.rmdir)
    for file_name, value in values.items():
        (group / file_name).write_text(str(value))
    return group


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise PermissionError(1, done.stderr.decode().strip() or "refused", command[0])


# The children.


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


def train_ranks(folder: Path, *, loader_seconds: float, model_seconds: float) -> None:
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


SCENARIOS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "compute": ("compute", compute),
    "tokenise": ("data/rate", tokenise),
    "tokenise-thread": ("inconclusive/contradiction", tokenise_thread),
    "disk": ("io", disk),
    "swap": ("swap", swap),
    "refused": ("killed", refused),
    # Of two ranks the second waits for its rows, and the first for the second.
    "slow-loader-rank": (
        "data/rate",
        partial(train_ranks, loader_seconds=0.02, model_seconds=0.0),
    ),
    # Of two ranks the second computes longer, and the first waits for its gradients.
    "slow-compute-rank": (
        "communication/skew",
        partial(train_ranks, loader_seconds=0.0, model_seconds=0.03),
    ),
}
"""What each is made to be, and the child that is."""


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]][1](Path(sys.argv[2]))
