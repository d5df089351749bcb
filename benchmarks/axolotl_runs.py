"""Axolotl's command line in a process of its own, as it is and accelerated; and what it leaves.

Both run the same command through ``axolotl_driver``. Stock has ``FAST_AXOLOTL=0`` in its
environment; accelerated stands behind ``fast-axolotl run --``. Each run has a folder of its own
with fresh caches of Hugging Face, so that none lives on what another left behind; numba's cache is
the benchmark's own, filled before. The order is A B, B A, A B, and so on: what drifts on the
machine falls on both alike.

Whether two runs gave the same is said in one line. Of a prepared dataset everything counts but its
fingerprint, which datasets draws at random: rows, their order, shards, the schema with its
metadata, the features.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa

from benchmarks.axolotl_driver import COMPILING, IMPORTS
from benchmarks.axolotl_driver import __file__ as _DRIVER
from benchmarks.children import RunError, TreeMemory, TreeSample, last_error, offline_environment

STOCK = "Axolotl"
OURS = "fast-axolotl"

_TIMEOUT_SECONDS = 3600
_MOST_CHARACTERS = 200


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
    memory: Sequence[TreeSample] = ()

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
        environment = offline_environment(folder, cache or self.cache)
        if arm == STOCK:
            environment["FAST_AXOLOTL"] = "0"
        line = [_DRIVER, str(folder), *command, str(configure(folder))]
        if ranks > 1:
            launcher = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
            line = ["-m", *launcher, *line]
        line = [sys.executable, *line]
        if arm == OURS:
            line = [sys.executable, "-m", "fast_axolotl", "run", "--", *line]
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


def _execute(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, watch_memory: bool
) -> Sequence[TreeSample]:
    log = folder / "log.txt"
    with ExitStack() as stack:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=stack.enter_context(log.open("w")),
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
        raise RunError(f"exit code {code}: {last_error(log.read_text(errors='replace'))}")
    return memory.samples


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is not done, with its children: it has a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def by_turns(repeats: int) -> list[tuple[str, int]]:
    """Arm and repeat: stock first, then ours first, and so on."""
    turns = []
    for repeat in range(repeats):
        arms = (STOCK, OURS) if repeat % 2 == 0 else (OURS, STOCK)
        turns += [(arm, repeat) for arm in arms]
    return turns


def prepared_difference(stock: Path, ours: Path) -> str | None:
    """How the dataset that ours prepared differs from stock's; ``None`` where they are equal."""
    theirs, found = _files(stock), _files(ours)
    if not theirs:
        return "stock prepared nothing"
    if theirs != found:
        return f"files {sorted(found)} in place of {sorted(theirs)}"[:_MOST_CHARACTERS]
    for name in sorted(theirs):
        reason = _file_difference(stock / name, ours / name)
        if reason is not None:
            return f"{Path(name).name}: {reason}"[:_MOST_CHARACTERS]
    return _loaded_difference(stock, ours)


def _files(folder: Path) -> set[str]:
    """What datasets wrote; Axolotl's lock stays beside it."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".arrow", ".json"))
    return {str(path.relative_to(folder)) for path in paths}


def _file_difference(stock: Path, ours: Path) -> str | None:
    if stock.suffix == ".arrow":
        return _table_difference(*map(_read_table, (stock, ours)))
    theirs, found = json.loads(stock.read_text()), json.loads(ours.read_text())
    for content in (theirs, found):
        content.pop("_fingerprint", None)
    if theirs == found:
        return None
    keys = sorted(key for key in {*theirs, *found} if theirs.get(key) != found.get(key))
    return f"{', '.join(keys)}: {found.get(keys[0])} in place of {theirs.get(keys[0])}"


def _read_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def _table_difference(stock: pa.Table, ours: pa.Table) -> str | None:
    if not ours.schema.equals(stock.schema, check_metadata=True):
        return f"schema {ours.schema} in place of {stock.schema}"
    if ours.num_rows != stock.num_rows:
        return f"{ours.num_rows:,} rows in place of {stock.num_rows:,}"
    other = [name for name in stock.column_names if not ours[name].equals(stock[name])]
    return f"other values in {', '.join(other)}" if other else None


def _loaded_difference(stock: Path, ours: Path) -> str | None:
    """As Axolotl loads it for training."""
    from datasets import load_from_disk

    for state in stock.rglob("state.json"):
        folder = state.parent
        theirs = load_from_disk(str(folder))
        found = load_from_disk(str(ours / folder.relative_to(stock)))
        if (found.features, found.split) != (theirs.features, theirs.split):
            return f"loaded: {found.features} in place of {theirs.features}"[:_MOST_CHARACTERS]
        if len(found) != len(theirs):
            return f"loaded: {len(found):,} rows in place of {len(theirs):,}"
    return None


def logged_losses(run: Run) -> list[tuple[str, str]]:
    """Loss and norm of the gradient of every step, to the last digit."""
    states = sorted(run.folder.glob("output/checkpoint-*/trainer_state.json"))
    history: list[dict[str, Any]] = json.loads(states[-1].read_text())["log_history"]
    return [(repr(item["loss"]), repr(item["grad_norm"])) for item in history if "loss" in item]


def losses_difference(stock: Run, ours: Run) -> str | None:
    """The first step that differs; ``None`` where all are equal, and the batches too."""
    theirs, found = logged_losses(stock), logged_losses(ours)
    if len(theirs) != len(found):
        return f"{len(found)} logged steps in place of {len(theirs)}"
    for step, (expected, got) in enumerate(zip(theirs, found, strict=True), start=1):
        if expected != got:
            return f"step {step}: loss {got[0]} in place of {expected[0]}"
    return batches_difference(stock, ours)


def batches_difference(stock: Run, ours: Run) -> str | None:
    """The first batch that differs; ranks are compared whatever their processes' numbers."""
    theirs, found = (sorted(ledger["batches"] for ledger in run.ledgers) for run in (stock, ours))
    for expected, got in zip(theirs, found, strict=True):
        if len(expected) != len(got):
            return f"{len(got)} batches in place of {len(expected)}"
        pairs = enumerate(zip(expected, got, strict=True), start=1)
        other = [number for number, (first, second) in pairs if first != second]
        if other:
            return f"batch {other[0]} differs, and {len(other) - 1} more of {len(expected)}"
    return None
