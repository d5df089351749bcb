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
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from benchmarks.axolotl_driver import COMPILING, IMPORTS
from benchmarks.axolotl_driver import __file__ as _DRIVER
from benchmarks.axolotl_inputs import Config, write_config
from benchmarks.children import RunError, last_error, offline_environment, run_child
from benchmarks.command import Tell
from benchmarks.result import Measurement, Timing
from fast_axolotl.system import PROC

STOCK = "Axolotl"
OURS = "fast-axolotl"
ANSWERED = "calls that fast-axolotl answered"
"""The measurement that counts them, by replacement."""
COLD = "fast-axolotl, no kernel compiled before"
"""The measurement of a run that had to compile."""

_TIMEOUT_SECONDS = 3600
_TREE_SECONDS = 0.1
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class TreeSample:
    """A process and its descendants at one moment."""

    at: float
    """Seconds since the epoch."""
    pss_bytes: int
    largest_bytes: int = 0
    """PSS of the largest process."""


def sample_tree(pid: int) -> TreeSample | None:
    """A process and its descendants now; ``None`` where nothing of them can be read.

    The figure is PSS: a page that several processes share counts for each as its share, so the sum
    over the tree counts it once.
    """
    tree = [pid]
    with suppress(psutil.Error):
        tree += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    total = largest = 0
    for process in tree:
        try:
            lines = (PROC / str(process) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        fields = {line.split(":")[0]: line.split() for line in lines if line.startswith("Pss")}
        if "Pss" in fields:
            found = int(fields["Pss"][1]) * 1024
            total, largest = total + found, max(largest, found)
    return TreeSample(time.time(), total, largest) if total else None


@contextmanager
def watch_tree(pid: int) -> Iterator[list[TreeSample]]:
    """Samples until the block is left; a short peak can be missed."""
    samples: list[TreeSample] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_TREE_SECONDS):
            sample = sample_tree(pid)
            if sample is not None:
                samples.append(sample)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def run_watched(
    command: Sequence[str], *, env: Mapping[str, str], folder: Path, is_watched: bool = True
) -> tuple[float, list[TreeSample], str]:
    """Seconds, memory and output of a command that runs in a folder; raises ``RunError``."""
    log = folder / "log.txt"
    start = time.perf_counter()
    with ExitStack() as stack:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdout=stack.enter_context(log.open("w")),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_end, process)
        samples = stack.enter_context(watch_tree(process.pid)) if is_watched else []
        try:
            code = process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(f"not done after {_TIMEOUT_SECONDS} s") from None
        wall = time.perf_counter() - start
    text = log.read_text(errors="replace")
    if code:
        raise RunError(f"exit code {code}: {last_error(text)}")
    return wall, samples, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of Axolotl left behind."""

    folder: Path
    wall_seconds: float
    """From the start of the process to its end."""
    ledgers: Sequence[Mapping[str, Any]]
    """What ``axolotl_driver`` wrote, one for each rank."""
    memory: Sequence[TreeSample] = ()

    def work_seconds(
        self, since: str | None = None, until: str = "end", apart: Sequence[str] = ()
    ) -> float:
        """Between two marks, of the slowest rank, less imports, compilation and ``apart``."""

        def work(marks: Mapping[str, Mapping[str, float]]) -> float:
            before = marks[since] if since else {}
            return sum(
                value - before.get(name, 0.0)
                for name, value in marks[until].items()
                if name not in (IMPORTS, COMPILING, *apart)
            )

        return max(work(ledger["marks"]) for ledger in self.ledgers)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by name, of the first rank."""
        return dict(self.ledgers[0]["marks"]["end"])

    @property
    def peaks(self) -> dict[str, int]:
        """Greatest memory of the process tree by phase of the first rank, where it was sampled."""
        found = {}
        for name, (begun, ended) in self.ledgers[0]["spans"].items():
            during = [item.pss_bytes for item in self.memory if begun <= item.at <= ended]
            if during:
                found[name] = max(during)
        return found


@dataclass(slots=True, kw_only=True)
class AxolotlSession:
    """What the cases share."""

    folder: Path
    cache: Path
    """Of compiled kernels."""
    model: Path
    rows: int
    repeats: int
    tell: Tell
    prepared: Config | None = None
    """A configuration whose chat dataset stock has prepared."""
    numbers: Iterator[int] = field(default_factory=count)
    """Of the runs: each has a folder of its own."""


def open_axolotl_session(folder: Path, rows: int, repeats: int, tell: Tell) -> AxolotlSession:
    """Compiles the kernels, and makes the model and its tokenizer."""
    cache, model = folder / "kernels", folder / "model"
    environment = offline_environment(folder, cache)
    tell("compiling kernels, making the model and its tokenizer")
    run_child("fast_axolotl", "warmup", env=environment)
    run_child("benchmarks.axolotl", "--model", str(model), env=environment)
    return AxolotlSession(
        folder=folder, cache=cache, model=model, rows=rows, repeats=repeats, tell=tell
    )


@dataclass(slots=True, kw_only=True)
class Race:
    """The runs of one case."""

    name: str
    command: Sequence[str]
    """Module and first arguments; the configuration is the last."""
    configure: Callable[[str, Path], Config]
    """The configuration of an arm that runs in a folder."""
    difference: Callable[[Run, Run], str | None]
    session: AxolotlSession
    ranks: int = 1
    watch_memory: bool = False
    runs: dict[str, list[Run]] = field(default_factory=lambda: {STOCK: [], OURS: []})
    reason: str | None = None
    """How ours differs from stock, of the first pair that does."""

    def run(self, arm: str, cache: Path | None = None) -> Run:
        """One run, in a new folder."""
        folder = self.session.folder / f"run-{next(self.session.numbers)}"
        folder.mkdir()
        environment = offline_environment(folder, cache or self.session.cache)
        config = write_config(self.configure(arm, folder), folder / "config.yml")
        line = [_DRIVER, str(folder), *self.command, str(config)]
        if self.ranks > 1:
            launcher = ("torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}")
            line = ["-m", *launcher, *line]
        line = [sys.executable, *line]
        if arm == STOCK:
            environment["FAST_AXOLOTL"] = "0"
        else:
            line = [sys.executable, "-m", "fast_axolotl", "run", "--", *line]
        wall, memory, _ = run_watched(
            line, env=environment, folder=folder, is_watched=self.watch_memory
        )
        ledgers = [json.loads(path.read_text()) for path in sorted(folder.glob("ledger-*.json"))]
        if len(ledgers) != self.ranks:
            raise RunError(f"{arm}: {len(ledgers)} of {self.ranks} processes told of their time")
        return Run(folder=folder, wall_seconds=wall, ledgers=ledgers, memory=memory)

    def race(self, *, keep: bool = False) -> Path:
        """One run of each, compared, not counted; then the repeats, in turn.

        Gives the folder of stock's first run, if it is to be kept.
        """
        tell = self.session.tell
        tell(f"{self.name}: checking that the results are equal")
        stock, ours = self.run(STOCK), self.run(OURS)
        self.reason = self.difference(stock, ours)
        if self.reason is not None:
            tell(f"{self.name}: DIFFERENT RESULTS: {self.reason}")
        shutil.rmtree(ours.folder)
        if not keep:
            shutil.rmtree(stock.folder)
        self.repeat()
        return stock.folder

    def repeat(self) -> None:
        """The repeats that count: stock first, then ours first; each pair is compared."""
        for repeat in range(self.session.repeats):
            pair: dict[str, Run] = {}
            for arm in (OURS, STOCK) if repeat % 2 else (STOCK, OURS):
                run = pair[arm] = self.run(arm)
                wall = run.wall_seconds
                self.session.tell(f"{self.name}: repeat {repeat + 1}, {arm}: {wall:.1f} s")
                self.runs[arm].append(run)
            self.reason = self.reason or self.difference(pair[STOCK], pair[OURS])
            for run in pair.values():
                shutil.rmtree(run.folder)

    def timings(self, rows: int, gives: str, seconds: Callable[[Run], float]) -> tuple[Timing, ...]:
        """Ours, which is compared, and stock."""
        return tuple(
            Timing(
                name=arm,
                output=gives,
                rows=rows,
                seconds=tuple(seconds(run) for run in self.runs[arm]),
                reason=None if arm == STOCK else self.reason,
            )
            for arm in (OURS, STOCK)
        )

    def phases(self) -> list[Measurement]:
        """Where the time went: every name of the ledgers, and the whole."""
        found = []
        for arm, runs in self.runs.items():
            whole = {"whole process": [run.wall_seconds for run in runs]}
            names = dict.fromkeys(name for run in runs for name in run.phases)
            parts = {name: [run.phases.get(name, 0.0) for run in runs] for name in names}
            for name, values in {**whole, **parts}.items():
                peaks = [run.peaks[name] for run in runs if name in run.peaks]
                found.append(
                    Measurement(
                        name=f"{arm}: {name}",
                        seconds=tuple(values),
                        values={"peak_bytes": max(peaks)} if peaks else {},
                    )
                )
        return [*found, self.answered()]

    def cold(self, seconds: Callable[[Run], float]) -> Measurement:
        """Ours once more with an empty cache of kernels: what the first run of all pays."""
        self.session.tell(f"{self.name}: once with no kernel compiled before")
        run = self.run(OURS, cache=self.session.folder / f"cold-{self.name}")
        shutil.rmtree(run.folder)
        compiling = max(ledger["marks"]["end"].get(COMPILING, 0.0) for ledger in run.ledgers)
        return Measurement(
            name=COLD,
            seconds=(seconds(run) + compiling,),
            values={"compiling_seconds": max(ledger["compiling"] for ledger in run.ledgers)},
        )

    def answered(self) -> Measurement:
        """Which of Axolotl's functions ours answered for, and which calls it left to them."""
        patches = [item for run in self.runs[OURS][:1] for item in run.ledgers[0]["patches"]]
        calls: dict[str, float | int | bool | None] = {}
        for item in patches:
            calls[item["name"]] = int(calls.get(item["name"]) or 0) + item["calls"]
        left = [
            f"{item['name']} ×{count}: {reason}"
            for item in patches
            for reason, count in item["fallbacks"]
        ]
        left += [f"{item['name']}: {item['reason']}" for item in patches if item["reason"]]
        return Measurement(
            name=ANSWERED,
            values=calls,
            reason=f"left to Axolotl: {'; '.join(left)}" if left else None,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is not done, with its children: it has a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepared_difference(stock: Path, ours: Path) -> str | None:
    """How the dataset that ours prepared differs from stock's; ``None`` where they are equal."""
    theirs, found = _files(stock), _files(ours)
    if not theirs:
        return "stock prepared nothing"
    if theirs != found:
        return f"files {sorted(found)} in place of {sorted(theirs)}"[:_MOST_CHARACTERS]
    for name in sorted(theirs):
        compare = table_difference if name.endswith(".arrow") else _json_difference
        reason = compare(*(_read(folder / name) for folder in (stock, ours)))
        if reason is not None:
            return f"{Path(name).name}: {reason}"[:_MOST_CHARACTERS]
    return None


def _files(folder: Path) -> set[str]:
    """What datasets wrote; Axolotl's lock stays beside it."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".arrow", ".json"))
    return {str(path.relative_to(folder)) for path in paths}


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return {**json.loads(path.read_text()), "_fingerprint": None}
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def _json_difference(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    keys = sorted(key for key in {*stock, *ours} if stock.get(key) != ours.get(key))
    if not keys:
        return None
    return f"{', '.join(keys)}: {ours.get(keys[0])} in place of {stock.get(keys[0])}"


def table_difference(stock: pa.Table, ours: pa.Table) -> str | None:
    """By schema, with its metadata, number of rows, and values."""
    if not ours.schema.equals(stock.schema, check_metadata=True):
        return f"schema {ours.schema} in place of {stock.schema}"
    if ours.num_rows != stock.num_rows:
        return f"{ours.num_rows:,} rows in place of {stock.num_rows:,}"
    other = [name for name in stock.column_names if not ours[name].equals(stock[name])]
    return f"other values in {', '.join(other)}" if other else None


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
