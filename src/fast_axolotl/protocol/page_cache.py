"""The page cache before a run: dropped where that is asked for and allowed, noted in any case.

A first run that reads from the disk and a second one that finds everything in memory are two
different experiments. Linux only; elsewhere the state is unknown and says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["prepare_page_cache"]

_PROC = Path("/proc")


def prepare_page_cache(
    drop: bool, *, proc: Path = _PROC, flush: Callable[[], None] = os.sync
) -> str:
    """The state of the cache in a few words, after it was dropped if that was wanted."""
    if not drop:
        return _describe(proc, "as the last run left it")
    # What is not written yet would not be dropped.
    flush()
    try:
        (proc / "sys" / "vm" / "drop_caches").write_text("3\n")
    except OSError as error:
        reason = error.strerror or str(error)
        return _describe(proc, f"could not be dropped ({reason}), so as the last run left it")
    return _describe(proc, "dropped")


def _describe(proc: Path, state: str) -> str:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        pairs = (line.partition(":") for line in lines)
        cached = next(int(value.split()[0]) for name, _, value in pairs if name == "Cached")
    except (OSError, ValueError, StopIteration, IndexError):
        return f"{state}; its size is not told here"
    return f"{state}; {cached * 1024 / 1e9:,.2f} GB cached"
