"""One protocol at a time in a folder.

The lock is a file that is held open, by this process and by the runs that it starts: a run that
outlives a protocol which was killed keeps the next one from being measured beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fast_axolotl.errors import DataError, UsageError

__all__ = ["LOCK_FILE", "hold", "read_holder"]

LOCK_FILE = ".lock"


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
            raise UsageError(
                f"{folder} is in use: process {read_holder(folder) or 'unknown'}, or a run that it "
                "has started, is still at work; wait for it, or end it"
            )
        os.ftruncate(opened, 0)
        os.pwrite(opened, str(os.getpid()).encode(), 0)
        try:
            yield (opened,)
        finally:
            os.ftruncate(opened, 0)
    finally:
        os.close(opened)


def read_holder(folder: Path) -> int | None:
    """The process that has locked a folder; one that was killed is told still."""
    try:
        return int((folder / LOCK_FILE).read_text())
    except (OSError, ValueError):
        return None


def _lock(opened: int) -> bool:
    try:
        import fcntl
    except ImportError:
        raise UsageError("a protocol needs Linux or macOS: this system has no locks") from None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system that cannot lock, as some over a network.
        return True
    return True
