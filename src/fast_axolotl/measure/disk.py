"""Measure how fast the disk with the data can be read, by O_DIRECT reads of the data's files.

O_DIRECT goes past the page cache, so a file that is cached is read from its device all the same,
and reading it evicts nothing. The largest files are read in order, a MiB at a time. The whole takes
at most ``max_seconds``. What a device gives in small requests at random places is many times less,
and is not looked at: a run that reads so has no capacity to be compared with.

The kernel must count the reads as device reads of this process, because ``read_bytes`` of the run
is what the capacity is compared with. Where it does not, there is no figure: tmpfs is memory, and
FUSE reads belong to another process.

Blind spots: a cache below the kernel (of the host of a virtual machine, of the drive) makes the
device look faster; other readers at the same time make it look slower.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fast_axolotl.measure.processes import read_io
from fast_axolotl.system import PROC, read_bytes_of

_MEBIBYTE = 1 << 20
_NUM_THREADS = 16
"""Requests under way at a time, as from many workers whose page faults wait one by one."""
_LEAST_BYTES = 8 * _MEBIBYTE
"""Less than this says more about the first request than about the device."""
_MOST_FILES = 64
_MOST_ENTRIES = 20_000
"""Of a folder, so many files are looked at for the largest."""
_COUNTED_SHARE = 0.5
"""The kernel must have counted at least this part of what was read."""
_GRACE_SECONDS = 1.0
"""For reads under way when the time is up; a network share that hangs is left behind."""
_SECTOR_BYTES = 512
"""The unit of ``/proc/diskstats``, whatever the device's own."""


def probe_capacity(
    path: str | Path,
    *,
    max_bytes: int = 256 * _MEBIBYTE,
    max_seconds: float = 2.0,
    proc: Path = PROC,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float | None, str]:
    """Bytes per second of the file, or of the largest files of the folder, past the page cache; or
    ``None`` and why."""
    if not hasattr(os, "O_DIRECT"):
        return None, "this system has no O_DIRECT"
    files, reason = choose_files(path, max_bytes)
    if not files:
        return None, reason
    places = ((file, at) for file in files for at in range(0, file.stat().st_size, _MEBIBYTE))
    blocks = list(itertools.islice(places, max_bytes // _MEBIBYTE))
    done: list[tuple[int, float]] = []
    before, start = read_io("self", proc=proc), clock()

    def read(own: list[tuple[Path, int]]) -> None:
        nonlocal reason
        # Anonymous memory maps begin on a page, as O_DIRECT asks for.
        buffer = mmap.mmap(-1, _MEBIBYTE)
        try:
            for file, offset in own:
                if reason or clock() - start >= max_seconds:
                    return
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    num_bytes = os.preadv(descriptor, [buffer], offset)
                finally:
                    os.close(descriptor)
                done.append((num_bytes, clock() - start))
        except OSError as error:
            reason = f"the system refused to read {path} with O_DIRECT: {error.strerror or error}"

    parts = [blocks[number::_NUM_THREADS] for number in range(_NUM_THREADS)]
    threads = [threading.Thread(target=read, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + max_seconds + _GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    after = read_io("self", proc=proc)
    read_bytes = sum(num_bytes for num_bytes, _ in done)
    last = max((end for _, end in done), default=0.0)
    if not reason and (not read_bytes or last <= 0):
        reason = f"no read of {path} returned within {max_seconds:g} s"
    elif not reason and before and after and after[0] - before[0] < _COUNTED_SHARE * read_bytes:
        reason = (
            f"reads of {path} do not count as disk reads of the process, so there is nothing to "
            "compare with"
        )
    return (None, reason) if reason else (read_bytes / last, "")


def choose_files(path: str | Path, max_bytes: int) -> tuple[list[Path], str]:
    """The largest files; none, and why, where they hold too little."""
    if "://" in str(path):
        return [], f"{path} is not on a disk of this machine"
    given = Path(path)
    if not given.exists():
        return [], f"there is no {path} on this machine"
    below = (Path(folder, name) for folder, _, names in os.walk(given) for name in names)
    sizes = []
    for file in itertools.islice(below, _MOST_ENTRIES) if given.is_dir() else [given]:
        with suppress(OSError):
            info = file.stat()
            # Files with holes are left out, as holes are read from nowhere.
            if stat.S_ISREG(info.st_mode) and info.st_blocks * 512 >= info.st_size:
                sizes.append((file, info.st_size))
    chosen = sorted(sizes, key=lambda item: item[1], reverse=True)[:_MOST_FILES]
    total = sum(num_bytes for _, num_bytes in chosen)
    if total < min(_LEAST_BYTES, max_bytes):
        return [], (
            f"{path} holds {total / 1e6:.1f} MB in files without holes or compression, too little "
            "to measure the disk"
        )
    return [file for file, _ in chosen], ""


def find_numbers(path: str | Path, *, proc: Path = PROC) -> tuple[int, int] | None:
    """Major and minor number of the block device that holds a path; ``None`` where that is no
    block device (overlays, network shares, memory) or several (btrfs)."""
    try:
        device = Path(path).stat().st_dev
    except OSError:
        return None
    numbers = os.major(device), os.minor(device)
    return None if read_requests(numbers, proc=proc) is None else numbers


def read_requests(numbers: tuple[int, int], *, proc: Path = PROC) -> tuple[int, int] | None:
    """Counters of a block device: read requests it has served, and their bytes."""
    head = b"%d %d" % numbers
    for line in (read_bytes_of(proc / "diskstats") or b"").splitlines():
        fields = line.split()
        if b" ".join(fields[:2]) == head and len(fields) > 5:
            return int(fields[3]), int(fields[5]) * _SECTOR_BYTES
    return None
