"""Sums and ratios where values may be missing: ``None``, NaN and division by zero."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def finite(value: float | None) -> float | None:
    """The value, unless it is missing or no number."""
    return value if value is not None and math.isfinite(value) else None


def known(values: Iterable[float | None]) -> list[float]:
    """Those that were measured."""
    return [value for value in values if value is not None and math.isfinite(value)]


def total(values: Iterable[float | None]) -> float | None:
    """The sum of those that were measured; ``None`` where none was."""
    found = known(values)
    return sum(found) if found else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part ÷ whole``; ``None`` where either is missing or the whole is nothing."""
    if part is None or whole is None or not 0 < whole < math.inf:
        return None
    return finite(part / whole)


def times(one: float | None, other: float | None) -> float | None:
    """The product; ``None`` where either is missing."""
    return None if one is None or other is None else one * other


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that were measured."""
    found = known(values)
    return statistics.median(found) if found else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that were measured."""
    found = known(values)
    return statistics.fmean(found) if found else None
