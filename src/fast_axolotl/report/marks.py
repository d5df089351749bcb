"""Small pictures of one line: a row of marks over time, and a bar against a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["draw_bar", "find_ceiling", "mark_of"]

_LEVELS = "▁▂▃▄▅▆▇█"
_CEILINGS = (0.1, 0.25, 0.5, 1.0)


def mark_of(share: float | None, ceiling: float = 1.0) -> str:
    """One mark as high as its share of the ceiling; a blank for what is not known."""
    if share is None or not math.isfinite(share):
        return " "
    level = math.ceil(share / ceiling * len(_LEVELS)) - 1
    return _LEVELS[min(max(level, 0), len(_LEVELS) - 1)]


def find_ceiling(shares: Iterable[float | None]) -> float:
    """The least of 10, 25, 50 and 100 % that holds them all."""
    known = [one for one in shares if one is not None and math.isfinite(one)]
    highest = max(known, default=0.0)
    return next((one for one in _CEILINGS if highest <= one), 1.0)


def draw_bar(share: float | None, width: int) -> str:
    """Filled up to the share; empty where it is not known."""
    known = share if share is not None and math.isfinite(share) else 0.0
    filled = round(min(max(known, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
