"""The process tree where there is no procfs, by psutil: resident size and processor time only.

Of ended processes the last processor time seen is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import psutil

from fast_axolotl.measure.process_tree import TreeSample
from fast_axolotl.measure.procfs import ProcessMemory

__all__ = ["PortableTree", "read_portable_swap_bytes"]


class PortableTree:
    """The tree below one process, the process included."""

    def __init__(self, root_pid: int, *, exclude_pids: Collection[int] = ()) -> None:
        self.root_pid = root_pid
        self.is_alive = False
        """Whether the root was alive at the last sample; a zombie is not."""
        self._excluded = frozenset(exclude_pids)
        self._members: dict[int, Any] = {}
        self._cpu_seconds: dict[tuple[int, float], float] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the last sample, the root first."""
        return tuple(self._members)

    def sample(self) -> TreeSample:
        """The tree of now."""
        self._refresh()
        rss_bytes = 0
        for process in self._members.values():
            with contextlib.suppress(psutil.Error), process.oneshot():
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                self._cpu_seconds[key] = times.user + times.system
        return TreeSample(
            processes=len(self._members),
            memory=ProcessMemory(rss_bytes=rss_bytes) if self.is_alive else None,
            cpu_seconds=sum(self._cpu_seconds.values()),
        )

    def read_pss_bytes(self) -> None:
        """Not to be had."""

    def _refresh(self) -> None:
        if not self._members and not self._cpu_seconds:
            with contextlib.suppress(psutil.Error):
                self._members[self.root_pid] = psutil.Process(self.root_pid)
        for pid, process in list(self._members.items()):
            if not process.is_running():
                del self._members[pid]
        for process in list(self._members.values()):
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    if child.pid not in self._excluded:
                        self._members.setdefault(child.pid, child)
        self.is_alive = _is_alive(self._members.get(self.root_pid))


def read_portable_swap_bytes() -> tuple[int, int] | None:
    """Counters of the machine: bytes swapped in, bytes swapped out."""
    try:
        found = psutil.swap_memory()
    except (OSError, RuntimeError, psutil.Error):
        return None
    return int(found.sin), int(found.sout)


def _is_alive(process: Any) -> bool:
    if process is None:
        return False
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
