"""Axolotl's command line in a process of its own: as it is, and accelerated, by turns.

Both run the same command through ``axolotl_driver``. Stock has ``FAST_AXOLOTL=0`` in its
environment; accelerated stands behind ``fast-axolotl run --``. Each run has a folder of its own
with fresh caches of Hugging Face, so that none lives on what another left behind; numba's cache is
the benchmark's own, filled before. Turns go A B, B A, A B, and so on: what drifts on the machine
falls on both alike.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from fast_axolotl.bench.axolotl_driver import COMPILING, IMPORTS
from fast_axolotl.bench.axolotl_driver import __file__ as _DRIVER
from fast_axolotl.bench.axolotl_memory import Sample, TreeMemory

__all__ = [
    "OURS",
    "STOCK",
    "Ledgered",
    "Run",
    "RunError",
    "Runner",
    "by_turns",
    "child_environment",
    "last_line",
]

STOCK = "Axolotl"
OURS = "fast-axolotl"

_TIMEOUT_SECONDS = 3600
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")
_ENVIRONMENT = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",
}


class RunError(Exception):
    """A run ended badly; never leaves the benchmark."""


class Ledgered(TypedDict):
    """What ``axolotl_driver`` wrote."""

    started: float
    """Seconds since the epoch."""
    seconds: dict[str, float]
    """By name."""
    marks: dict[str, dict[str, float]]
    """By what happened, the seconds of every name until then."""
    compiling: float
    """Seconds of compilation in all threads together."""
    waits: list[float]
    """For each batch."""
    batches: list[str]
    """Their digests."""
    patches: list[dict[str, Any]]
    """What our package says of its replacements; none in a stock run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of Axolotl left behind."""

    arm: str
    """``STOCK`` or ``OURS``."""
    folder: Path
    wall_seconds: float
    """From the start of the process to its end."""
    ledgers: Sequence[Ledgered]
    """What ``axolotl_driver`` wrote, one for each rank."""
    memory: Sequence[Sample] = ()

    def seconds(self, name: str, since: str | None = None, until: str = "end") -> float:
        """Under one name, between two marks, of the slowest rank."""
        return max(
            ledger["marks"][until].get(name, 0.0) - _before(ledger, since).get(name, 0.0)
            for ledger in self.ledgers
        )

    def work_seconds(
        self, since: str | None = None, until: str = "end", apart: Sequence[str] = ()
    ) -> float:
        """Between two marks, of the slowest rank, less imports, compilation and ``apart``."""
        names = (IMPORTS, COMPILING, *apart)
        return max(
            sum(
                value - _before(ledger, since).get(name, 0.0)
                for name, value in ledger["marks"][until].items()
                if name not in names
            )
            for ledger in self.ledgers
        )

    def at(self, mark: str) -> float:
        """When the first rank met a mark, in seconds since the epoch."""
        ledger = self.ledgers[0]
        return ledger["started"] + sum(ledger["marks"][mark].values())

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by name, of the first rank."""
        return dict(self.ledgers[0]["marks"]["end"])


def _before(ledger: Ledgered, mark: str | None) -> Mapping[str, float]:
    empty: Mapping[str, float] = {}
    return empty if mark is None else ledger["marks"][mark]


def child_environment(folder: Path, cache: Path) -> dict[str, str]:
    """Of every process of this benchmark: offline, on the processor, with these caches."""
    inherited = {key: value for key, value in os.environ.items() if key != "FAST_AXOLOTL"}
    folders = {"HF_HOME": str(folder / "huggingface"), "NUMBA_CACHE_DIR": str(cache)}
    return {**inherited, **_ENVIRONMENT, **folders}


@dataclass(slots=True, kw_only=True)
class Runner:
    """Starts Axolotl, each time in a new folder."""

    folder: Path
    cache: Path
    """Of compiled kernels."""
    _count: int = field(default=0, init=False)

    def run(
        self,
        arm: str,
        command: Sequence[str],
        configure: Callable[[Path], Path],
        *,
        ranks: int = 1,
        watch_memory: bool = False,
        cache: Path | None = None,
    ) -> Run:
        """One run; ``configure`` writes the configuration into the folder it is given."""
        self._count += 1
        folder = self.folder / f"run-{self._count}"
        folder.mkdir()
        environment = child_environment(folder, cache or self.cache)
        if arm == STOCK:
            environment["FAST_AXOLOTL"] = "0"
        line = _command_line(arm, [*command, str(configure(folder))], folder, ranks)
        start = time.perf_counter()
        memory = _execute(line, environment, folder, watch_memory)
        wall = time.perf_counter() - start
        texts = [path.read_text() for path in sorted(folder.glob("ledger-*.json"))]
        if len(texts) != ranks:
            raise RunError(f"{arm}: {len(texts)} of {ranks} processes told of their time")
        return Run(
            arm=arm,
            folder=folder,
            wall_seconds=wall,
            ledgers=[json.loads(text) for text in texts],
            memory=memory,
        )


def _command_line(arm: str, command: Sequence[str], folder: Path, ranks: int) -> list[str]:
    driven = [_DRIVER, str(folder), *command]
    line = [sys.executable, *driven]
    if ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        line = [sys.executable, *launcher, *driven]
    if arm == OURS:
        line = [sys.executable, "-m", "fast_axolotl", "run", "--", *line]
    return line


def _execute(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, watch_memory: bool
) -> Sequence[Sample]:
    log = folder / "log.txt"
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_end, process)
        memory = TreeMemory(process.pid)
        if watch_memory:
            stack.enter_context(memory)
        try:
            code = process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(f"not done after {_TIMEOUT_SECONDS} s") from None
    if code:
        raise RunError(f"exit code {code}: {last_line(log)}")
    return memory.samples


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is not done, with its children: it has a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(log: Path) -> str:
    """Why a process failed: the last line that looks like an error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1][-200:]


def by_turns(repeats: int) -> list[tuple[str, int]]:
    """Arm and repeat: stock first, then ours first, and so on."""
    turns = []
    for repeat in range(repeats):
        arms = (STOCK, OURS) if repeat % 2 == 0 else (OURS, STOCK)
        turns += [(arm, repeat) for arm in arms]
    return turns
