"""Sums and ratios that survive what was not measured: ``None``, NaN, and division by nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def finite(value: float | None) -> float | None:
    """The value, unless it is missing or no number."""
    return value if value is not None and math.isfinite(value) else None


def total(values: Iterable[float | None]) -> float | None:
    """The sum of those that were measured; ``None`` where none was."""
    found = [value for value in values if finite(value) is not None]
    return sum(found) if found else None  # type: ignore[arg-type]


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
    found = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(found) if found else None


def fit_slope(points: Iterable[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Slope of a straight line through ``(x, y, weight)``, and its standard error."""
    found = [point for point in points if point[2] > 0 and all(map(math.isfinite, point))]
    weight = sum(one[2] for one in found)
    if len(found) < 3 or weight <= 0:
        return None
    mean_x = sum(x * w for x, _, w in found) / weight
    mean_y = sum(y * w for _, y, w in found) / weight
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in found)
    if spread <= 0:
        return None
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in found) / spread
    left = sum(w * (y - mean_y - slope * (x - mean_x)) ** 2 for x, y, w in found)
    return slope, math.sqrt(left / (len(found) - 2) / spread)
