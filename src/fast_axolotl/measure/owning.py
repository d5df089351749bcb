"""Whose record a file is, while it is written: a child process must not take its parent's away.

A script that trains may start another that reads a loader, too, and inherits the order to record.
The file belongs to the process that its first line names, until that has ended, or the record has.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import psutil

from fast_axolotl.record import Start
from fast_axolotl.record.folder import parse_line

__all__ = ["find_owner"]

_CLOCKS_DIFFER_SECONDS = 2.0
"""A process that began so long after the record is another one with the same number."""

_LAST_LINE_BYTES = 4096


def find_owner(path: Path) -> int | None:
    """The number of the other process that is writing this file; ``None``: nobody is."""
    try:
        with path.open("rb") as opened:
            start = parse_line(json.loads(opened.readline()))
            opened.seek(max(0, path.stat().st_size - _LAST_LINE_BYTES))
            last = opened.read().splitlines()[-1:]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    if not isinstance(start, Start) or start.pid == os.getpid() or start.host != platform.node():
        return None
    is_ended = bool(last) and last[0].startswith(b'{"kind":"end"')
    return None if is_ended or not _is_writing(start) else start.pid


def _is_writing(start: Start) -> bool:
    try:
        process = psutil.Process(start.pid)
        is_older = process.create_time() <= start.time + _CLOCKS_DIFFER_SECONDS
        return bool(is_older and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
