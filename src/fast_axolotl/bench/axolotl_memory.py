"""The peak of a process tree's memory, watched from outside.

The figure is PSS: a page that several processes share counts for each as its share, so the sum
over the tree counts it once. Anonymous PSS leaves mapped files out, which belong to the page cache.
It is sampled, so a short peak can be missed; a sample of a gigabyte takes the kernel some
milliseconds.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Sample", "TreeMemory"]

_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """The tree at one moment."""

    at: float
    """Seconds since the epoch."""
    pss_bytes: int
    anonymous_bytes: int


class TreeMemory:
    """``with TreeMemory(pid) as memory:`` and then ``memory.samples``; none without ``/proc``."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._proc = proc
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> Sample | None:
        """The tree now; ``None`` where nothing of it can be read."""
        found = [pss for pid in self._tree() if (pss := self._pss(pid)) is not None]
        if not found:
            return None
        total, anonymous = (sum(column) for column in zip(*found, strict=True))
        return Sample(time.time(), total, anonymous)

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            sample = self.take()
            if sample is not None:
                self.samples.append(sample)

    def _tree(self) -> list[int]:
        """The process and everything that descends from it."""
        children: dict[int, list[int]] = {}
        for status in self._proc.glob("[0-9]*/stat"):
            try:
                text = status.read_text()
            except OSError:
                continue
            # The name, in parentheses, may hold anything.
            parent = int(text.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
        found = [self._pid]
        for pid in found:
            found += children.get(pid, [])
        return found

    def _pss(self, pid: int) -> tuple[int, int] | None:
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            return None
        fields = {line.split(":")[0]: line.split() for line in lines if line.startswith("Pss")}
        if "Pss" not in fields:
            return None
        values = [int(fields[name][1]) * 1024 for name in ("Pss", "Pss_Anon") if name in fields]
        return values[0], values[-1]
