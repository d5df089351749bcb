"""Looks at the stacks of a loader's worker processes.

A worker looks at its own main thread and writes what it saw into ``RUN/workers/RANK-PID.json``:
after a second, then ever more rarely, and as it ends. It is killed without notice, so nothing is
left for its end. The training process adds up what is new in these files and removes those of
workers that are gone. A worker that cannot write, loses its looks alone.

Workers start in three ways (fork, forkserver, spawn), so what they are told travels as an object
that can be pickled, in the place of the loader's ``worker_init_fn``, which it calls.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil

from fast_axolotl.measure.stacks import (
    LOADING,
    WORKER,
    Key,
    Looks,
    StackSampler,
    largest_lines,
)
from fast_axolotl.record import StackLine
from fast_axolotl.record.codec import to_plain

_LEAST_SECONDS, _MOST_SECONDS = 1.0, 15.0
"""Between two writes; in between a tenth of the worker's age."""
_MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Called in a worker before it loads: starts the looks, then does what the loader wanted."""

    folder: str
    rank: int
    original: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        """Worker ``number`` starts."""
        with suppress(Exception):  # whatever it is, the worker has to load
            own = _WorkerLooks(Path(self.folder) / f"{self.rank}-{os.getpid()}.json")
            Finalize(None, own.write, exitpriority=10)
        if self.original is not None:
            self.original(number)


class _WorkerLooks:
    """Looks at the main thread of this process, and writes what they add up to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looks = Looks()
        self._begin = time.monotonic()
        self._due = self._begin + _LEAST_SECONDS
        StackSampler(self._looks, lambda: WORKER, self._write_when_due).start()

    def _write_when_due(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            age = now - self._begin
            self._due = now + min(max(_LEAST_SECONDS, age / 10), _MOST_SECONDS)
            self.write()

    def write(self) -> None:
        """Write all that was seen so far."""
        with suppress(OSError):  # the run has ended, or its disk is full
            beside = self._path.with_suffix(f".{threading.get_ident()}")
            lines = largest_lines(dict(self._looks.lines), _MOST_LINES)
            seconds = self._looks.phases.get(LOADING, 0.0)
            beside.write_text(json.dumps({"seconds": seconds, "lines": list(map(to_plain, lines))}))
            beside.replace(self._path)


class WorkerLines:
    """Adds up, in the training process, what its workers have written."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.folder = run_dir / "workers"
        self._rank = rank
        self._told: dict[str, dict[Key, float]] = {}
        self._told_seconds: dict[str, float] = {}

    def start_before(self, original: Callable[[int], Any] | None) -> WorkerStart:
        """What a loader of this process has its workers call first."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        return WorkerStart(str(self.folder), self._rank, original)

    def take(self, most: int = 8) -> tuple[float, tuple[StackLine, ...]]:
        """Seconds of loading, and its lines, since the last call."""
        new: dict[Key, float] = {}
        new_seconds = 0.0
        for path in self.folder.glob(f"{self._rank}-*.json"):
            with suppress(OSError, ValueError):
                data = json.loads(path.read_text())
                told = self._told.setdefault(path.name, {})
                for line in data["lines"]:
                    *where, seconds = line.values()
                    key: Key = tuple(where)
                    new[key] = new.get(key, 0.0) + max(0.0, seconds - told.get(key, 0.0))
                    told[key] = seconds
                new_seconds += data["seconds"] - self._told_seconds.get(path.name, 0.0)
                self._told_seconds[path.name] = data["seconds"]
                if not psutil.pid_exists(int(path.stem.partition("-")[2])):
                    path.unlink()
                    del self._told[path.name], self._told_seconds[path.name]
        return new_seconds, largest_lines(new, most)

    def close(self) -> None:
        """Remove what is left of this rank's workers."""
        with suppress(OSError):
            for path in self.folder.glob(f"{self._rank}-*"):
                path.unlink()
            self.folder.rmdir()  # of the last rank
