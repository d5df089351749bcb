"""How fast the device that holds the data can be read: O_DIRECT reads of the data's own files.

O_DIRECT goes past the page cache, so a file that is cached is read from its device all the same,
and reading it evicts nothing. Four threads read blocks of 1 MiB one after the other, so that the
device has several requests at hand, as it has from a training run with workers; the probe ends
after ``max_bytes`` or ``max_seconds``.

The kernel must count the reads as device reads of this process, because ``read_bytes`` of the run
is what the capacity is compared with. Where it does not, there is no figure: tmpfs is memory, and
FUSE reads belong to another process.

Blind spots: a cache below the kernel (of the host of a virtual machine, of the drive) makes the
device look faster; other readers at the same time make it look slower.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fast_axolotl.measure.procfs import read_io
from fast_axolotl.system import PROC, read_bytes_of

__all__ = ["DiskCapacity", "choose_files", "find_device", "probe_capacity"]

_MEBIBYTE = 1 << 20
_BLOCK_BYTES = _MEBIBYTE
_NUM_THREADS = 4
_LEAST_BYTES = 8 * _MEBIBYTE
"""Less than this says more about the first request than about the device."""
_MOST_FILES = 64
_MOST_ENTRIES = 20_000
"""Of a folder, so many files are looked at for the largest."""
_COUNTED_SHARE = 0.5
"""The kernel must have counted at least this part of what was read."""
_GRACE_SECONDS = 1.0
"""For reads under way when the time is up; a network share that hangs is left behind."""


@dataclass(slots=True, kw_only=True)
class DiskCapacity:
    """What reading the data's own device reached."""

    bytes_per_second: float | None = None
    reason: str = ""
    """Why there is no figure."""
    device: str = ""
    """Source and filesystem, as mounted: ``/dev/nvme0n1p2 (ext4)``."""
    num_bytes: int = 0
    """What was read."""
    seconds: float = 0.0


def probe_capacity(
    path: str | Path,
    *,
    max_bytes: int = 256 * _MEBIBYTE,
    max_seconds: float = 2.0,
    proc: Path = PROC,
    clock: Callable[[], float] = time.perf_counter,
) -> DiskCapacity:
    """Read the file, or the largest files of the folder, past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return DiskCapacity(reason="this system has no O_DIRECT")
    files, reason = choose_files(path, max_bytes)
    if not files:
        return DiskCapacity(reason=reason)
    found = DiskCapacity(device=find_device(files[0], proc=proc))
    offsets = ((f, offset) for f in files for offset in range(0, f.stat().st_size, _BLOCK_BYTES))
    blocks = itertools.islice(offsets, math.ceil(max_bytes / _BLOCK_BYTES))
    lock = threading.Lock()
    refusals: list[str] = []
    counted = read_io("self", proc=proc)
    start = clock()

    def read() -> None:
        # Anonymous memory maps begin on a page, as O_DIRECT asks for.
        buffer = mmap.mmap(-1, _BLOCK_BYTES)
        opened: dict[Path, int] = {}
        try:
            while not refusals and clock() - start < max_seconds:
                with lock:
                    block = next(blocks, None)
                if block is None:
                    break
                file, offset = block
                if file not in opened:
                    opened[file] = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                num_bytes = os.preadv(opened[file], [buffer], offset)
                with lock:
                    found.num_bytes += num_bytes
                    found.seconds = clock() - start
        except OSError as error:
            refusals.append(error.strerror or str(error))
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + max_seconds + _GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    counted_after = read_io("self", proc=proc)
    share = 1.0
    if counted is not None and counted_after is not None and found.num_bytes:
        share = (counted_after.read_bytes - counted.read_bytes) / found.num_bytes
    where = f"{path} on {found.device}" if found.device else str(path)
    if refusals:
        found.reason = f"reading {where} with O_DIRECT was refused: {refusals[0]}"
    elif not found.num_bytes or found.seconds <= 0:
        found.reason = f"no read of {where} came back within {max_seconds:g} s"
    elif share < _COUNTED_SHARE:
        found.reason = (
            f"reads of {where} do not count as device reads of the process, "
            "so there is nothing to compare with"
        )
    else:
        found.bytes_per_second = found.num_bytes / found.seconds
    return found


def choose_files(path: str | Path, max_bytes: int) -> tuple[list[Path], str]:
    """The largest files, until they hold ``max_bytes``; none, and why."""
    if "://" in str(path):
        return [], f"{path} is not on a device of this machine"
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
    sizes.sort(key=lambda item: item[1], reverse=True)
    chosen: list[Path] = []
    total = 0
    for file, num_bytes in sizes[:_MOST_FILES]:
        if total >= max_bytes:
            break
        chosen.append(file)
        total += num_bytes
    if total < min(_LEAST_BYTES, max_bytes):
        return [], (
            f"{path} holds {total / 1e6:.1f} MB in files without holes or compression, "
            "too little to measure a device with"
        )
    return chosen, ""


def find_device(path: str | Path, *, proc: Path = PROC) -> str:
    """Source and filesystem of the mount that holds a path; empty where it is not known."""
    text = (read_bytes_of(proc / "self" / "mountinfo") or b"").decode(errors="replace")
    whole = os.path.realpath(path)
    best, found = -1, ""
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        mount = head.split()[4].replace("\\040", " ") if len(head.split()) > 4 else ""
        words = tail.split()
        is_above = whole == mount or whole.startswith(mount.rstrip("/") + "/")
        # Of two mounts on one folder the later one hides the earlier.
        if len(words) > 1 and is_above and len(mount) >= best:
            best, found = len(mount), f"{words[1]} ({words[0]})"
    return found
