"""One protocol at a time in a folder.

The lock is a file that is held open, by this process and by the runs that it starts: a run that
outlives a protocol which was killed keeps the next one from being measured beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fast_axolotl.errors import DataError, UsageError

__all__ = ["LOCK_FILE", "hold", "is_held"]

LOCK_FILE = ".lock"

_TRIES = 5
_BETWEEN_SECONDS = 0.05
"""Whoever asks whether a folder is locked has it for a moment."""


@contextmanager
def hold(folder: Path) -> Iterator[tuple[int, ...]]:
    """Locks a folder, which is made if need be; what a run has to inherit to keep it locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"cannot be the folder of a protocol: {error.strerror or error}; give another --output",
            path=str(folder),
        ) from error
    try:
        if not _lock(opened):
            holder = os.pread(opened, 32, 0).decode(errors="replace").strip()
            raise UsageError(
                f"{folder} is in use: process {holder or 'unknown'}, or a run that it has started, "
                "is still at work; wait for it, or end it"
            )
        os.ftruncate(opened, 0)
        os.pwrite(opened, str(os.getpid()).encode(), 0)
        yield (opened,)
    finally:
        os.close(opened)


def is_held(folder: Path) -> bool:
    """Whether a protocol is at work in a folder; one on another machine may not be seen."""
    try:
        opened = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try(opened, is_shared=True)
    finally:
        os.close(opened)


def _lock(opened: int) -> bool:
    for _ in range(_TRIES):
        if _try(opened):
            return True
        time.sleep(_BETWEEN_SECONDS)
    return False


def _try(opened: int, *, is_shared: bool = False) -> bool:
    try:
        import fcntl
    except ImportError:
        raise UsageError("a protocol needs Linux or macOS: this system has no locks") from None
    try:
        fcntl.flock(opened, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system that cannot lock, as some over a network.
        return True
    return True
