"""Looks at the stacks of a loader's worker processes.

A worker looks at its own main thread and appends what it saw to ``RUN/workers/RANK-PID.jsonl``:
after a second, then ever more rarely, and as it ends. It is killed without notice, so nothing is
left for its end. The training process takes these files away and adds them up. A worker that cannot
write, loses its looks alone.

Workers start in three ways (fork, forkserver, spawn), so what they are told travels as an object
that can be pickled, in the place of the loader's ``worker_init_fn``, which it calls.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from fast_axolotl.measure.stacks import (
    LOADING,
    WORKER,
    Key,
    Looks,
    StackSampler,
    largest_lines,
)
from fast_axolotl.record import StackLine

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
            own = _WorkerLooks(Path(self.folder) / f"{self.rank}-{os.getpid()}.jsonl")
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
        """Append what was seen since the last time."""
        lines = list(map(astuple, self._looks.take_lines(_MOST_LINES)))
        seen = {"seconds": self._looks.take_phases().get(LOADING, 0.0), "lines": lines}
        with suppress(OSError), self._path.open("a") as file:  # the run has ended, or a full disk
            file.write(json.dumps(seen) + "\n")


class WorkerLines:
    """Adds up, in the training process, what its workers have written."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.folder = run_dir / "workers"
        self._rank = rank

    def start_before(self, original: Callable[[int], Any] | None) -> WorkerStart:
        """What a loader of this process has its workers call first."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        return WorkerStart(str(self.folder), self._rank, original)

    def take(self, most: int = 8) -> tuple[float, tuple[StackLine, ...]]:
        """Seconds of loading, and its lines, since the last call."""
        new: dict[Key, float] = {}
        new_seconds = 0.0
        for path in self.folder.glob(f"{self._rank}-*.jsonl"):
            with suppress(OSError, ValueError):
                taken = path.replace(path.with_suffix(".taken"))
                for text in taken.read_text().splitlines():
                    data = json.loads(text)
                    new_seconds += data["seconds"]
                    for *where, seconds in data["lines"]:
                        key: Key = tuple(where)
                        new[key] = new.get(key, 0.0) + seconds
                taken.unlink()
        return new_seconds, largest_lines(new, most)

    def close(self) -> None:
        """Remove what is left of this rank's workers."""
        with suppress(OSError):
            for path in self.folder.glob(f"{self._rank}-*"):
                path.unlink()
            self.folder.rmdir()  # of the last rank
