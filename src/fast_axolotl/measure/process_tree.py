"""Processes and all their descendants: who belongs to them, and their figures as sums.

Membership. A process is in the tree when its parent is; once in, it stays in for as long as it
lives, also when its parent has ended and it was handed to another. Every sample lists ``/proc`` and
looks only at members and at pids it has not seen before, so a machine full of other processes costs
one directory listing. Further roots can join: the other ranks of a node, which one launcher started
beside the first. A process below two roots counts once.

Counters. The kernel adds the counters of a child to those of the parent that waits for it (bytes
read as well as processor time), so the sum over the living holds what waited-for children did. Of a
process whose parent is outside of the tree, the last figures seen are kept, and the sums never go
down. What a child that nobody waits for did is known only until others have read as much.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from fast_axolotl.measure import procfs
from fast_axolotl.measure.procfs import ProcessMemory, ProcessPss, ProcessStat
from fast_axolotl.record import SystemSample
from fast_axolotl.system import PROC

_FORGET_EVERY = 60
"""Samples after which foreign pids are looked at anew: a pid may have been given out again."""


class _Counters(NamedTuple):
    read_bytes: float = 0
    read_chars: float = 0
    cpu_seconds: float = 0

    def plus(self, other: _Counters) -> _Counters:
        return _Counters(*map(operator.add, self, other))


@dataclass(slots=True)
class _Member:
    stat: ProcessStat
    memory: ProcessMemory
    counters: _Counters
    """The latest reading."""
    run_delay: float | None = None
    """Time that its main thread has waited for a processor, …"""
    new_delay: float | None = None
    """… and of that, since the sample before."""
    is_io_readable: bool = True


class ProcessTree:
    """The tree below one process, the process included, and below the roots that join it."""

    def __init__(
        self, root_pid: int, *, proc: Path = PROC, exclude_pids: Collection[int] = ()
    ) -> None:
        self.root_pid = root_pid
        self.is_alive = False
        """Whether the root was alive at the last sample; a zombie is not."""
        self._proc = proc
        self._excluded = frozenset(exclude_pids)
        self._members: dict[int, _Member] = {}
        self._foreign: set[int] = set()
        self._joining: set[int] = set()
        self._before = _Counters()
        """What processes that joined had counted before that: it is not of the time watched."""
        self._ended = _Counters()
        self._highest = _Counters()
        self._waited: float | None = None
        self._root_ticks: int | None = None
        self._samples = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the last sample, parents first."""
        return tuple(self._members)

    def add_root(self, pid: int) -> None:
        """Have another process and its descendants in the tree from the next sample on."""
        if pid not in self._members:
            self._joining.add(pid)
            self._foreign.clear()

    def sample(self) -> SystemSample:
        """Sums over the living processes, at ``t`` 0; counters hold what ended ones did, too.

        Zombies are not counted. There is no memory once the root has ended, and no bytes while a
        process may not be read. Of the waiting for a processor, that of the process that waited
        most between two samples.
        """
        for pid, member in (before := dict(self._members)).items():
            if not self._read_member(member):
                del self._members[pid]
                if member.stat.parent_pid not in before:
                    self._ended = self._ended.plus(member.counters)
        self._admit()
        self._samples += 1
        root = self._members.get(self.root_pid)
        self.is_alive = root is not None and root.stat.is_alive
        living = self._members.values()
        counters = self._ended
        for member in living:
            counters = counters.plus(member.counters)
        watched = map(operator.sub, counters, self._before)
        counters = self._highest = _Counters(*map(max, watched, self._highest))
        delays = [member.new_delay for member in living if member.new_delay is not None]
        if delays:
            self._waited = (self._waited or 0.0) + max(delays)
        is_readable = all(member.is_io_readable for member in living)
        memory: dict[str, Any] = {}
        if self.is_alive:
            names = [field.name for field in fields(ProcessMemory)]
            memory = {name: sum(getattr(m.memory, name) for m in living) for name in names}
            memory["largest_anon_bytes"] = max(member.memory.anon_bytes for member in living)
        return SystemSample(
            t=0.0,
            processes=sum(member.stat.is_alive for member in living),
            **memory,
            read_bytes=int(counters.read_bytes) if is_readable else None,
            read_chars=int(counters.read_chars) if is_readable else None,
            cpu_seconds=round(counters.cpu_seconds, 2),
            cpu_wait_seconds=None if self._waited is None else round(self._waited, 3),
        )

    def read_pss(self) -> ProcessPss | None:
        """ΣPSS over the processes of the last sample; ``None`` when one of them may not be read."""
        sizes = []
        for pid, member in self._members.items():
            if not member.memory.rss_bytes:
                continue
            pss = procfs.read_pss(pid, proc=self._proc)
            if pss is not None:
                sizes.append(pss)
            elif procfs.read_stat(pid, proc=self._proc) is not None:
                return None
        sums: list[Any] = [None if None in part else sum(part) for part in zip(*sizes, strict=True)]
        return ProcessPss(*sums)

    def _read_member(self, member: _Member) -> bool:
        stat = procfs.read_stat(member.stat.pid, proc=self._proc)
        if stat is None or stat.start_ticks != member.stat.start_ticks:
            return False
        io = procfs.read_io(stat.pid, proc=self._proc)
        known = member.counters if io is None else io
        member.stat, member.is_io_readable = stat, io is not None
        member.counters = _Counters(known.read_bytes, known.read_chars, stat.cpu_seconds)
        earlier, now = member.run_delay, procfs.read_run_delay(stat.pid, proc=self._proc)
        member.new_delay = None if earlier is None or now is None else now - earlier
        member.run_delay = now
        member.memory = procfs.read_memory(stat.pid, proc=self._proc) or member.memory
        return True

    def _admit(self) -> None:
        """Takes new processes in."""
        try:
            listed = {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208 - cheaper
        except OSError:
            listed = set()
        if self._samples % _FORGET_EVERY == 0:
            self._foreign = set()
        self._foreign &= listed
        new = listed - self._foreign - self._members.keys()
        found = (procfs.read_stat(pid, proc=self._proc) for pid in sorted(new))
        stats = {stat.pid: stat for stat in found if stat is not None}
        for pid in self._excluded & stats.keys():
            self._foreign.add(pid)
            del stats[pid]
        root = stats.get(self.root_pid)
        if root is not None and self._root_ticks in (None, root.start_ticks):
            self._root_ticks = root.start_ticks
            self._take_in(stats.pop(self.root_pid))
        self._take_in_children(stats)
        known = set(self._members)
        for pid in self._joining & stats.keys():
            self._take_in(stats.pop(pid))
        self._joining.clear()
        self._take_in_children(stats)
        for pid in self._members.keys() - known:
            self._before = self._before.plus(self._members[pid].counters)
        # Listing is no moment: a parent may be missing whose child is there. Such a child is
        # looked at again next time.
        self._foreign |= {pid for pid, stat in stats.items() if stat.parent_pid in listed | {0}}

    def _take_in(self, stat: ProcessStat) -> None:
        member = _Member(stat, ProcessMemory(), _Counters())
        if self._read_member(member):
            self._members[stat.pid] = member

    def _take_in_children(self, stats: dict[int, ProcessStat]) -> None:
        while children := [s for s in stats.values() if s.parent_pid in self._members]:
            for stat in children:
                self._take_in(stats.pop(stat.pid))
