"""Phrases that several commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["count", "rejected"]

_MOST_SHOWN = 20


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rejected(num_rows: int, rejections: Sequence[Mapping[str, Any]]) -> str:
    """How many rows could not be read, then where and why, line by line."""
    lines = [f"{num_rows:,}"]
    lines += [
        f"{item['path']}, {item['place']}: {item['reason']}" for item in rejections[:_MOST_SHOWN]
    ]
    if len(rejections) > _MOST_SHOWN:
        lines.append(f"… {len(rejections) - _MOST_SHOWN} more; --json lists them")
    return "\n".join(lines)
