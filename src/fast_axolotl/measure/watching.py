"""What watching a process tree from outside came to.

Figures are those of ``system_figures`` over all the time watched. Samples are kept in bounded
memory: past 4,096 of them every other one is let go, the first and the last excepted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from fast_axolotl.errors import UsageError
from fast_axolotl.measure import procfs
from fast_axolotl.measure.system_figures import fold_system
from fast_axolotl.record import SystemRecord, SystemSample, SystemStart
from fast_axolotl.system import PROC

__all__ = ["UNKNOWN", "Watched", "check_process"]

UNKNOWN = {
    "stall": "who waits for whom is decided inside the process",
    "throughput": "rows, tokens and steps are counted inside the process",
    "mfu": "the model's shape is known inside the process",
}
"""What cannot be known from outside, and why."""

_MOST_SAMPLES = 4096
_MOST_NAMED = 3
_MOST_LETTERS = 60


class Watched:
    """Samples as they come, and the figures of all of them."""

    def __init__(self) -> None:
        self.samples: list[SystemSample] = []
        self.most_processes = 0
        self.pss_bytes: int | None = None
        """The latest that was measured."""

    def add(self, sample: SystemSample) -> None:
        """Take one sample in."""
        if len(self.samples) >= _MOST_SAMPLES:
            self.samples = [*self.samples[:-1:2], self.samples[-1]]
        self.samples.append(sample)
        self.most_processes = max(self.most_processes, sample.processes)
        self.pss_bytes = self.pss_bytes if sample.pss_bytes is None else sample.pss_bytes

    def figures(self, start: SystemStart) -> dict[str, Any]:
        """Figures by name, then ``reasons`` of those that are ``None``, then ``unknown``."""
        found = fold_system(SystemRecord(start=start, samples=self.samples))
        seconds = self.samples[-1].t - self.samples[0].t if self.samples else 0.0
        cores = self.rate("cpu_seconds", num_samples=len(self.samples))
        return {
            "root_pid": start.root_pid,
            "command": list(start.command),
            "seconds": seconds,
            "most_processes": self.most_processes,
            "cpu_cores": cores,
            **found.values,
            "memory_bytes": start.memory_bytes,
            "gpu_names": list(start.gpu_names),
            "reasons": dict(found.reasons),
            "unknown": UNKNOWN,
        }

    def rate(self, name: str, *, num_samples: int = 2) -> float | None:
        """Growth of a counter per second over the last samples; ``None`` before there are two."""
        chosen = self.samples[-num_samples:]
        if len(chosen) < 2:
            return None
        first, last = getattr(chosen[0], name), getattr(chosen[-1], name)
        seconds = chosen[-1].t - chosen[0].t
        if first is None or last is None or seconds <= 0:
            return None
        return float(last - first) / seconds


def check_process(pid: int, *, proc: Path = PROC) -> None:
    """Refuse what cannot be watched, and say what could be."""
    if not procfs.has_procfs(proc):
        if not psutil.pid_exists(pid):
            raise UsageError(f"there is no process {pid}{_suggest()}")
        return
    stat = procfs.read_stat(pid, proc=proc) if pid > 0 else None
    status = procfs.read_status(pid, proc=proc) if stat is not None else None
    if stat is None or status is None:
        raise UsageError(f"there is no process {pid}{_suggest()}")
    leader = int(status.get(b"Tgid", b"%d" % pid))
    if leader != pid:
        raise UsageError(f"{pid} is a thread of process {leader}: watch {leader}")
    if not stat.is_alive:
        raise UsageError(f"process {pid} has ended; its parent {stat.parent_pid} has yet to notice")


def _suggest() -> str:
    """The largest processes of this machine, so that the right one can be picked."""
    found = []
    for process in psutil.process_iter(["memory_info", "cmdline"]):
        memory, command = process.info["memory_info"], process.info["cmdline"]
        if memory is not None and command and process.pid != os.getpid():
            found.append((memory.rss, process.pid, " ".join(command)[:_MOST_LETTERS]))
    largest = sorted(found, reverse=True)[:_MOST_NAMED]
    named = "; ".join(f"{pid} ({command})" for _, pid, command in largest)
    return f"; the largest here are {named}" if named else ""
