"""The folder that a prepared dataset is written into before it gets its name.

It lies beside the dataset, hidden, and is as large. A save that is killed leaves it behind; a later
save removes what nothing has changed in for a day, which no running save leaves alone for so long.
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

LOG = logging.getLogger("fast_axolotl")

_OURS = re.compile(r"\..+\.[0-9a-f]{32}")
_CONTENT = re.compile(r"data-\d{5}-of-\d{5}\.arrow|state\.json|dataset_info\.json")
_DEAD_SECONDS = 86_400.0


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """An empty folder beside the target, for one save; removed at the end unless renamed."""
    for left in target.parent.iterdir():
        # What another process removes, or may not be read, is left to others.
        with suppress(OSError):
            inside = [*left.iterdir()] if _OURS.fullmatch(left.name) and left.is_dir() else None
            if inside is None or not all(_CONTENT.fullmatch(item.name) for item in inside):
                continue
            if time.time() - max(p.stat().st_mtime for p in (left, *inside)) > _DEAD_SECONDS:
                LOG.warning("fast-axolotl: removing %s, left by a save that was killed", left)
                shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
