"""Figures of single processes and of the machine, read from ``/proc``.

Every function takes the root of procfs, so that a test can lay one out in a folder. A file that is
not there, may not be read or belongs to a process that has just ended gives ``None``; nothing here
raises for it.

Cost of one call on a quiet core: ``status``, ``stat`` and ``io`` 15 to 60 µs each;
``smaps_rollup`` walks the page tables, 0.4 ms for 2 GB in huge pages, 19 ms for 2 GB in small ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fast_axolotl.system import PROC, read_bytes_of

_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process holds, in bytes."""

    rss_bytes: int = 0
    """Resident, shared pages counted in full."""
    anon_bytes: int = 0
    """Resident and owned by nobody else's file: heaps, stacks, copied pages."""
    file_bytes: int = 0
    """Resident from mapped files; the system may drop them."""
    shared_bytes: int = 0
    """Resident in shared memory, ``/dev/shm`` included."""
    hwm_bytes: int = 0
    """The highest resident size since the start."""
    swap_bytes: int = 0


class ProcessPss(NamedTuple):
    """Proportional set size: a page that n processes share counts for one n-th of it."""

    pss_bytes: int = 0
    pss_anon_bytes: int | None = 0
    """``None`` where the kernel (before 5.3) does not divide the total; so are the next two."""
    pss_file_bytes: int | None = 0
    pss_shared_bytes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """Who a process is and what it has computed."""

    pid: int
    parent_pid: int
    state: str
    """One letter: R running, S sleeping, D waiting for a device, Z ended and not yet waited for."""
    start_ticks: int
    """When it began; together with the pid it names a process for good."""
    cpu_seconds: float
    """Its own, and that of the children it has waited for."""
    num_threads: int

    @property
    def is_alive(self) -> bool:
        """False for a zombie. A main thread that ended before its siblings is none."""
        return self.state not in ("Z", "X") or self.num_threads > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIo:
    """Counters of a process; those of the children it has waited for are in them."""

    read_bytes: int
    """Fetched from a device: what the page cache held is not in it."""
    read_chars: int
    """Asked for by read calls, cached or not. Reads of mapped files are not in it."""


def has_procfs(proc: Path = PROC) -> bool:
    """Whether there is a procfs at all."""
    return (proc / "stat").exists()


def read_memory(pid: int | str = "self", *, proc: Path = PROC) -> ProcessMemory | None:
    """Resident memory of one process; ``None`` when it is gone."""
    status = read_status(pid, proc=proc)
    if status is None:
        return None
    # A zombie has none of these lines, and holds nothing.
    lines = (b"VmRSS", b"RssAnon", b"RssFile", b"RssShmem", b"VmHWM", b"VmSwap")
    return ProcessMemory(*(int(status.get(name, b"0").split()[0]) * 1024 for name in lines))


def read_status(pid: int | str, *, proc: Path = PROC) -> dict[bytes, bytes] | None:
    """The lines of ``status`` by their names."""
    text = read_bytes_of(f"{proc}/{pid}/status")
    if not text:
        return None
    pairs = (line.partition(b":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def read_stat(pid: int | str, *, proc: Path = PROC) -> ProcessStat | None:
    """Identity, parent, state and processor time."""
    text = read_bytes_of(f"{proc}/{pid}/stat")
    if not text:
        return None
    # The name in parentheses may hold blanks and parentheses itself.
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    try:
        ticks = sum(int(value) for value in fields[11:15])
        return ProcessStat(
            pid=int(head.split(b" ", 1)[0]),
            parent_pid=int(fields[1]),
            state=fields[0].decode(),
            start_ticks=int(fields[19]),
            cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
            num_threads=int(fields[17]),
        )
    except (IndexError, ValueError):
        return None


def read_io(pid: int | str, *, proc: Path = PROC) -> ProcessIo | None:
    """Counters of reading; ``None`` for another user's process."""
    text = read_bytes_of(f"{proc}/{pid}/io")
    if not text:
        return None
    found = dict(line.split(b": ", 1) for line in text.splitlines() if b": " in line)
    try:
        return ProcessIo(read_bytes=int(found[b"read_bytes"]), read_chars=int(found[b"rchar"]))
    except (KeyError, ValueError):
        return None


def read_pss(pid: int | str, *, proc: Path = PROC) -> ProcessPss | None:
    """Proportional set size of one process; ``None`` where it may not be read."""
    found: dict[bytes, int] = {}
    for line in (read_bytes_of(f"{proc}/{pid}/smaps_rollup") or b"").splitlines():
        if line.startswith(b"Pss"):
            name, size = line.split()[:2]
            found[name] = int(size) * 1024
    if b"Pss:" not in found:
        return None
    parts = (found.get(name) for name in (b"Pss_Anon:", b"Pss_File:", b"Pss_Shmem:"))
    return ProcessPss(found[b"Pss:"], *parts)


def read_run_delay(pid: int | str, *, proc: Path = PROC) -> float | None:
    """Counter: seconds in which the main thread of a process was ready and had no processor."""
    fields = (read_bytes_of(f"{proc}/{pid}/schedstat") or b"").split()
    # A kernel that does not count writes zeros, its processor time included.
    return int(fields[1]) / 1e9 if len(fields) == 3 and fields[0] != b"0" else None


def read_command(pid: int | str, *, proc: Path = PROC) -> tuple[str, ...]:
    """Program and arguments; empty for a kernel thread, a zombie and where it may not be read."""
    text = read_bytes_of(f"{proc}/{pid}/cmdline") or b""
    return tuple(text.rstrip(b"\0").decode(errors="replace").split("\0")) if text else ()


def read_vmstat(*, proc: Path = PROC) -> dict[bytes, int]:
    """Counters of the machine: ``pswpin`` and ``pswpout`` in bytes, ``oom_kill`` in processes."""
    found = {}
    for line in (read_bytes_of(f"{proc}/vmstat") or b"").splitlines():
        if line.startswith((b"pswpin ", b"pswpout ", b"oom_kill ")):
            name, value = line.split()
            unit = 1 if name == b"oom_kill" else os.sysconf("SC_PAGE_SIZE")
            found[name] = int(value) * unit
    return found


def read_processors(pid: int | str, *, proc: Path = PROC) -> frozenset[int] | None:
    """Numbers of the processors that a process may run on, by its affinity."""
    text = (read_status(pid, proc=proc) or {}).get(b"Cpus_allowed_list", b"")
    ranges = [part.partition(b"-") for part in text.split(b",") if part.strip()]
    try:
        return frozenset(
            number
            for first, _, last in ranges
            for number in range(int(first), int(last or first) + 1)
        )
    except ValueError:
        return None


def read_usage(
    processors: Collection[int] | None = None, *, proc: Path = PROC
) -> tuple[float, float, int] | None:
    """Counters of some processors, or of all: seconds that programs and the kernel used, seconds
    that the hypervisor gave to others; and how many processors these are."""
    busy = steal = count = 0
    for line in (read_bytes_of(f"{proc}/stat") or b"").splitlines():
        name, *fields = line.split()
        if not name.startswith(b"cpu"):
            break
        number = name[3:]
        if number.isdigit() and (not processors or int(number) in processors) and len(fields) > 7:
            user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
            busy += user + nice + system + irq + softirq
            steal += stolen
            count += 1
    ticks = os.sysconf("SC_CLK_TCK")
    return (busy / ticks, steal / ticks, count) if count else None


def read_pressure_seconds(path: str | Path, who: Literal["full", "some"] = "full") -> float | None:
    """Counter of a PSI file: seconds in which every task that wanted to run was held up (full), or
    at least one was (some)."""
    for line in (read_bytes_of(path) or b"").splitlines():
        if line.startswith(who.encode()):
            total = line.rpartition(b"total=")[2]
            return int(total) / _MICROSECONDS if total.isdigit() else None
    return None
