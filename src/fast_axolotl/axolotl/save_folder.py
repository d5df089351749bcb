"""The folder that a prepared dataset is written into before it gets its name.

It lies beside the dataset, hidden, and is as large. A save that is killed leaves it behind, so the
next save removes it. Never that of a running one: a save holds a lock on a file of the same name
with ``.lock`` behind it, from before the folder is made until after it is gone. A folder goes where

- its lock can be had, and was made on this machine since it booted, or
- nothing has changed for a day, and nobody here has the lock: saves of other machines, whose locks
  may not reach this one, and those on file systems without locks.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fast_axolotl.system import node_name, pid_namespace

LOG = logging.getLogger("fast_axolotl")

_OURS = re.compile(r"\..+\.[0-9a-f]{32}")
_CONTENT = re.compile(r"data-\d{5}-of-\d{5}\.arrow|state\.json|dataset_info\.json")
_DEAD_SECONDS = 86_400.0


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """An empty folder beside the target, for one save; removed at the end unless renamed."""
    remove_leftovers(target.parent)
    lock = None
    while lock is None:
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        mark = folder.with_name(f"{folder.name}.lock")
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.write(lock, _machine().encode())
        if take_lock(lock, mark) is False:
            # Somebody took it for a leftover in between.
            os.close(lock)
            lock = None
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        mark.unlink(missing_ok=True)
        os.close(lock)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves have left in a folder of prepared datasets."""
    names = {item.name.removesuffix(".lock") for item in parent.iterdir()}
    for folder in (parent / name for name in sorted(names) if _OURS.fullmatch(name)):
        mark, lock = folder.with_name(f"{folder.name}.lock"), None
        # What another process removes, or may not be read, is left to others.
        with suppress(OSError):
            inside = list(folder.iterdir()) if folder.exists() else []
            if not all(_CONTENT.fullmatch(item.name) for item in inside):
                continue
            there = [path for path in (folder, mark, *inside) if path.exists()]
            is_dead = time.time() - max(path.stat().st_mtime for path in there) > _DEAD_SECONDS
            if mark.exists():
                lock = os.open(mark, os.O_RDWR)
                is_free = take_lock(lock, mark)
                is_from_here = os.read(lock, 99) == _machine().encode()
                is_dead = (is_dead and is_free is not False) or (is_from_here and is_free is True)
            if is_dead:
                LOG.warning("fast-axolotl: removing %s, left by a save that was killed", folder)
                shutil.rmtree(folder, ignore_errors=True)
                mark.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def take_lock(lock: int, mark: Path) -> bool | None:
    """Lock an open file; ``False``: another has it, or removed it; ``None``: there are no locks."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return mark.exists() and os.path.samestat(os.fstat(lock), mark.stat())


def _machine() -> str:
    """Where a lock of this process is seen by all others: the machine since it booted."""
    return pid_namespace().partition(" ")[0] or node_name()
