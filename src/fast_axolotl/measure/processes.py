"""Read process trees from ``/proc``: which processes belong to a run, and what they use.

Membership. A process is in the tree when its parent is; once in, it stays in for as long as it
lives, also when its parent has ended and it was handed to another. Every sample lists ``/proc`` and
looks only at members and at pids it has not seen before, so a machine full of other processes costs
one directory listing. Further roots can join: the other ranks of a node, which one launcher started
beside the first. A process below two roots counts once.

Counters. The kernel adds the counters of a child to those of the parent that waits for it (bytes
read as well as processor time), so the sum over the living holds what waited-for children did. Of a
process whose parent is outside of the tree, the last figures seen are kept, and the sums never go
down. What a child that nobody waits for did is known only until others have read as much.

Every function takes the root of procfs, so that a test can lay one out in a folder. A file that is
not there, may not be read or belongs to a process that has just ended gives ``None``. One call
takes 15 to 60 µs; ``smaps_rollup`` walks the page tables, 0.4 ms for 2 GB in huge pages, 19 ms in
small ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_axolotl.record import SystemSample
from fast_axolotl.system import PROC, read_bytes_of

_FORGET_EVERY = 60
"""Samples after which foreign pids are looked at anew: a pid may have been given out again."""

_MEMORY = {
    "rss_bytes": b"VmRSS",
    "anon_bytes": b"RssAnon",
    "shared_bytes": b"RssShmem",
    "hwm_bytes": b"VmHWM",
    "swap_bytes": b"VmSwap",
}
"""Field of a sample → line of ``status``."""

_PSS = {"pss_bytes": b"Pss", "pss_anon_bytes": b"Pss_Anon", "pss_shared_bytes": b"Pss_Shmem"}
"""Field of a sample → line of ``smaps_rollup``. A page that n processes share counts for one n-th
of it. Kernels before 5.3 do not divide the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """Who a process is and what it has computed."""

    pid: int
    parent_pid: int
    start_ticks: int
    """When it began; together with the pid it names a process for good."""
    cpu_ticks: int
    """Its own processor time, and that of the children it has waited for."""
    is_alive: bool
    """False for a zombie. A main thread that ended before its siblings is none."""


@dataclass(slots=True)
class _Member:
    stat: ProcessStat
    memory: dict[str, int]
    reads: tuple[int, int] = (0, 0)
    """The latest reading of both counters."""
    run_delay: float | None = None
    """Time that its main thread has waited for a processor, …"""
    new_delay: float | None = None
    """… and of that, since the sample before."""
    is_io_readable: bool = True

    @property
    def counters(self) -> Counter[str]:
        """What only grows; that of the children it has waited for is in it."""
        read_bytes, read_chars = self.reads
        return Counter(read_bytes=read_bytes, read_chars=read_chars, cpu_ticks=self.stat.cpu_ticks)


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
        self._ranks: set[int] = set()
        self._before = Counter[str]()
        """What processes that joined had counted before that: it is not of the time watched."""
        self._ended = Counter[str]()
        self._highest = Counter[str]()
        self._waited: float | None = None
        self._root_ticks: int | None = None
        self._samples = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the last sample, parents first."""
        return tuple(self._members)

    def add_root(self, pid: int) -> None:
        """Have a rank's process and its descendants in the tree from the next sample on."""
        self._ranks.add(pid)
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
                    self._ended += member.counters
        self._admit()
        self._samples += 1
        root = self._members.get(self.root_pid)
        self.is_alive = root is not None and root.stat.is_alive
        living = self._members.values()
        counted = sum((member.counters for member in living), self._ended)
        self._highest |= counted - self._before
        delays = [member.new_delay for member in living if member.new_delay is not None]
        if delays:
            self._waited = (self._waited or 0.0) + max(delays)
        is_readable = all(member.is_io_readable for member in living)
        memory: dict[str, Any] = {}
        if self.is_alive:
            memory = {name: sum(member.memory[name] for member in living) for name in _MEMORY}
            sizes = {pid: one.memory["anon_bytes"] for pid, one in self._members.items()}
            memory["largest_anon_bytes"] = max(sizes.values())
            if ranks := self._ranks & sizes.keys():
                memory["training_anon_bytes"] = sum(sizes[pid] for pid in ranks)
        return SystemSample(
            t=0.0,
            processes=sum(member.stat.is_alive for member in living),
            **memory,
            read_bytes=self._highest["read_bytes"] if is_readable else None,
            read_chars=self._highest["read_chars"] if is_readable else None,
            cpu_seconds=round(self._highest["cpu_ticks"] / os.sysconf("SC_CLK_TCK"), 2),
            cpu_wait_seconds=None if self._waited is None else round(self._waited, 3),
        )

    def read_pss(self) -> dict[str, Any] | None:
        """ΣPSS over the processes of the last sample; ``None`` when one of them may not be read."""
        found = []
        for pid, member in self._members.items():
            if not member.memory["rss_bytes"]:
                continue
            pss = read_pss(pid, proc=self._proc)
            if pss is not None:
                found.append(pss)
            elif read_stat(pid, proc=self._proc) is not None:
                return None
        sizes = {name: [pss[name] for pss in found] for name in _PSS}
        return {name: None if None in part else sum(part) for name, part in sizes.items()}

    def _read_member(self, member: _Member) -> bool:
        stat = read_stat(member.stat.pid, proc=self._proc)
        if stat is None or stat.start_ticks != member.stat.start_ticks:
            return False
        reads = read_io(stat.pid, proc=self._proc)
        member.stat, member.is_io_readable = stat, reads is not None
        member.reads = reads or member.reads
        earlier, now = member.run_delay, read_run_delay(stat.pid, proc=self._proc)
        member.new_delay = None if earlier is None or now is None else now - earlier
        member.run_delay = now
        member.memory = read_memory(stat.pid, proc=self._proc) or member.memory
        return True

    def _admit(self) -> None:
        """Takes new processes in."""
        listed: set[int] = set()
        with suppress(OSError):
            listed = {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208 - cheaper
        if self._samples % _FORGET_EVERY == 0:
            self._foreign = set()
        self._foreign &= listed
        new = listed - self._excluded - self._foreign - self._members.keys()
        found = (read_stat(pid, proc=self._proc) for pid in sorted(new))
        stats = {stat.pid: stat for stat in found if stat is not None}
        root = stats.get(self.root_pid)
        if root is not None and self._root_ticks in (None, root.start_ticks):
            self._root_ticks = root.start_ticks
            self._take_in(stats.pop(self.root_pid))
        self._take_in_children(stats)
        known = set(self._members)
        for pid in self._ranks & stats.keys():
            self._take_in(stats.pop(pid))
        self._take_in_children(stats)
        self._ranks &= self._members.keys()
        for pid in self._members.keys() - known:
            self._before += self._members[pid].counters
        # Listing is no moment: a parent may be missing whose child is there. Such a child is
        # looked at again next time.
        self._foreign |= {pid for pid, stat in stats.items() if stat.parent_pid in listed | {0}}

    def _take_in(self, stat: ProcessStat) -> None:
        member = _Member(stat, dict.fromkeys(_MEMORY, 0))
        if self._read_member(member):
            self._members[stat.pid] = member

    def _take_in_children(self, stats: dict[int, ProcessStat]) -> None:
        while children := [s for s in stats.values() if s.parent_pid in self._members]:
            for stat in children:
                self._take_in(stats.pop(stat.pid))


def read_memory(pid: int | str = "self", *, proc: Path = PROC) -> dict[str, int] | None:
    """Resident memory of one process by the fields of a sample; ``None`` when it is gone."""
    status = read_lines(f"{proc}/{pid}/status")
    if not status:
        return None
    # A zombie has none of these lines, and holds nothing.
    return {name: int(status.get(at, (b"0",))[0]) * 1024 for name, at in _MEMORY.items()}


def read_lines(path: str | Path) -> dict[bytes, list[bytes]]:
    """The lines of a file that begin with a name: the words behind it; none where it cannot be
    read."""
    lines = (line.split() for line in (read_bytes_of(path) or b"").splitlines())
    return {words[0].rstrip(b":"): words[1:] for words in lines if words}


def read_stat(pid: int | str, *, proc: Path = PROC) -> ProcessStat | None:
    """Identity, parent, state and processor time."""
    # The name in parentheses may hold blanks and parentheses itself.
    head, _, tail = (read_bytes_of(f"{proc}/{pid}/stat") or b"").rpartition(b")")
    fields = tail.split()
    try:
        return ProcessStat(
            pid=int(head.split(b" ", 1)[0]),
            parent_pid=int(fields[1]),
            start_ticks=int(fields[19]),
            cpu_ticks=sum(map(int, fields[11:15])),
            is_alive=fields[0] not in (b"Z", b"X") or int(fields[17]) > 1,
        )
    except (IndexError, ValueError):
        return None


def read_io(pid: int | str, *, proc: Path = PROC) -> tuple[int, int] | None:
    """Bytes fetched from a device, where the page cache did not hold them; and asked for by read
    calls, cached or not, but for mapped files. ``None`` for another user's process."""
    found = read_lines(f"{proc}/{pid}/io")
    with suppress(KeyError, IndexError, ValueError):
        return int(found[b"read_bytes"][0]), int(found[b"rchar"][0])
    return None


def read_pss(pid: int | str, *, proc: Path = PROC) -> dict[str, Any] | None:
    """Proportional set size of one process; ``None`` where it may not be read."""
    found = read_lines(f"{proc}/{pid}/smaps_rollup")
    if b"Pss" not in found:
        return None
    return {name: int(found[at][0]) * 1024 if at in found else None for name, at in _PSS.items()}


def read_run_delay(pid: int | str, *, proc: Path = PROC) -> float | None:
    """Counter: seconds in which the main thread of a process was ready and had no processor."""
    fields = (read_bytes_of(f"{proc}/{pid}/schedstat") or b"").split()
    # A kernel that does not count writes zeros, its processor time included.
    return int(fields[1]) / 1e9 if len(fields) == 3 and fields[0] != b"0" else None


def read_command(pid: int | str, *, proc: Path = PROC) -> tuple[str, ...]:
    """Program and arguments; empty for a kernel thread, a zombie and where it may not be read."""
    text = read_bytes_of(f"{proc}/{pid}/cmdline") or b""
    return tuple(text.rstrip(b"\0").decode(errors="replace").split("\0")) if text else ()


def read_vmstat(*, proc: Path = PROC) -> dict[str, int]:
    """Counters of the machine, by the fields of a sample: swapped bytes, processes killed."""
    lines, page = read_lines(f"{proc}/vmstat"), os.sysconf("SC_PAGE_SIZE")
    units = {
        "swap_in_bytes": (b"pswpin", page),
        "swap_out_bytes": (b"pswpout", page),
        "machine_oom_kills": (b"oom_kill", 1),
    }
    return {name: unit * int(lines[at][0]) for name, (at, unit) in units.items() if lines.get(at)}


def read_processors(pid: int) -> Collection[int] | None:
    """Numbers of the processors that a process may run on; ``None`` where nobody says."""
    with suppress(OSError, AttributeError):
        return os.sched_getaffinity(pid)
    return None


def read_usage(
    processors: Collection[int] | None = None, *, proc: Path = PROC
) -> tuple[float, float, int] | None:
    """Counters of some processors, or of all: seconds that programs and the kernel used, seconds
    that the hypervisor gave to others; and how many processors these are."""
    busy = steal = count = 0
    for name, fields in read_lines(f"{proc}/stat").items():
        number = name.removeprefix(b"cpu")
        if number.isdigit() and (not processors or int(number) in processors) and len(fields) > 7:
            user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
            busy += user + nice + system + irq + softirq
            steal += stolen
            count += 1
    ticks = os.sysconf("SC_CLK_TCK")
    return (busy / ticks, steal / ticks, count) if count else None


def read_pressure_seconds(path: str | Path) -> float | None:
    """Counter of a PSI file: seconds in which every task that wanted to run was held up."""
    total = b"".join(read_lines(path).get(b"full", [])[-1:]).removeprefix(b"total=")
    return int(total) / 1e6 if total.isdigit() else None
