"""The end of what a command printed, as lines that can be shown anywhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["read_last_lines"]

_TAIL_BYTES = 32_768
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
"""Colours, movements of the cursor, titles of the window: none of them is text."""


def read_last_lines(path: str | Path, most: int) -> list[str]:
    """The last lines that hold anything, of progress bars as they look now."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [_clean(line) for line in text.split("\n")]
    return [line for line in lines if line][-most:]


def _clean(line: str) -> str:
    # What stands before a return was written over.
    written = [part for part in _ESCAPES.sub("", line).split("\r") if part.strip()]
    shown = written[-1] if written else ""
    return "".join(one if one.isprintable() else " " for one in shown).rstrip()
