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

import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCapacity:
    """What reading the data's own device reached."""

    bytes_per_second: float | None
    reason: str = ""
    """Why there is no figure."""
    device: str = ""
    """Source and filesystem, as mounted: ``/dev/nvme0n1p2 (ext4)``."""
    num_bytes: int = 0
    """What was read."""
    num_files: int = 0
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
        return DiskCapacity(bytes_per_second=None, reason="this system has no O_DIRECT")
    files, reason = choose_files(path, max_bytes)
    if not files:
        return DiskCapacity(bytes_per_second=None, reason=reason)
    device = find_device(files[0], proc=proc)
    counted = read_io("self", proc=proc)
    reading = _Reading(files=files, max_bytes=max_bytes, max_seconds=max_seconds, clock=clock)
    reading.run()
    counted_after = read_io("self", proc=proc)
    if counted is not None and counted_after is not None:
        reading.counted_bytes = counted_after.read_bytes - counted.read_bytes
    reason = reading.find_fault(str(path), device)
    return DiskCapacity(
        bytes_per_second=None if reason else reading.num_bytes / reading.seconds,
        reason=reason,
        device=device,
        num_bytes=reading.num_bytes,
        num_files=len(files),
        seconds=reading.seconds,
    )


def choose_files(path: str | Path, max_bytes: int) -> tuple[list[Path], str]:
    """The largest files, until they hold ``max_bytes``; none, and why."""
    if "://" in str(path):
        return [], f"{path} is not on a device of this machine"
    given = Path(path)
    if not given.exists():
        return [], f"there is no {path} on this machine"
    sizes = sorted(_sizes_below(given), key=lambda item: item[1], reverse=True)
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


def _sizes_below(given: Path) -> Iterator[tuple[Path, int]]:
    """Files with their sizes; those with holes are left out, as holes are read from nowhere."""
    for number, file in enumerate(_files_below(given)):
        if number >= _MOST_ENTRIES:
            return
        try:
            found = file.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_blocks * 512 >= found.st_size:
            yield file, found.st_size


def _files_below(given: Path) -> Iterator[Path]:
    if not given.is_dir():
        yield given
        return
    for folder, _, names in os.walk(given):
        for name in names:
            yield Path(folder, name)


@dataclass(slots=True)
class _Reading:
    """One pass over the files by several threads."""

    files: list[Path]
    max_bytes: int
    max_seconds: float
    clock: Callable[[], float]
    num_bytes: int = 0
    seconds: float = 0.0
    counted_bytes: int | None = None
    refusal: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        start = self.clock()
        blocks = self._blocks()
        threads = [
            threading.Thread(target=self._read, args=(blocks, start), daemon=True)
            for _ in range(_NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self.max_seconds + _GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def find_fault(self, path: str, device: str) -> str:
        """Why the pass gives no figure; empty when it does."""
        where = f"{path} on {device}" if device else path
        if self.refusal:
            return f"reading {where} with O_DIRECT was refused: {self.refusal}"
        if not self.num_bytes or self.seconds <= 0:
            return f"no read of {where} came back within {self.max_seconds:g} s"
        counted = self.counted_bytes
        if counted is not None and counted < _COUNTED_SHARE * self.num_bytes:
            return (
                f"reads of {where} do not count as device reads of the process, "
                "so there is nothing to compare with"
            )
        return ""

    def _blocks(self) -> Iterator[tuple[Path, int]]:
        left = self.max_bytes
        for file in self.files:
            for offset in range(0, file.stat().st_size, _BLOCK_BYTES):
                if left <= 0:
                    return
                left -= _BLOCK_BYTES
                yield file, offset

    def _read(self, blocks: Iterator[tuple[Path, int]], start: float) -> None:
        # Anonymous memory maps begin on a page, as O_DIRECT asks for.
        buffer = mmap.mmap(-1, _BLOCK_BYTES)
        opened: dict[Path, int] = {}
        try:
            while (block := self._next_block(blocks, start)) is not None:
                file, offset = block
                if file not in opened:
                    opened[file] = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                num_bytes = os.preadv(opened[file], [buffer], offset)
                with self._lock:
                    self.num_bytes += num_bytes
                    self.seconds = self.clock() - start
        except OSError as error:
            self.refusal = error.strerror or str(error)
        finally:
            for number in opened.values():
                os.close(number)

    def _next_block(
        self, blocks: Iterator[tuple[Path, int]], start: float
    ) -> tuple[Path, int] | None:
        if self.refusal or self.clock() - start >= self.max_seconds:
            return None
        with self._lock:
            return next(blocks, None)
