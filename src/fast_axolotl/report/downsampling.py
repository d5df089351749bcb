"""Fewer points for a chart, with nothing that stands out lost.

``keep_extremes`` chooses points: of every stretch, the least and the largest of each column stay.
``merge_steps`` folds consecutive steps into points that carry their mean, least and largest.
``Windows`` spreads sums over stretches of equal time, for rates and shares. All are one pass in
plain Python, whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fast_axolotl.record.arithmetic import finite, ratio

__all__ = ["Column", "StepPoint", "Windows", "keep_extremes", "merge_steps", "round_figures"]

_FIGURES = 5
"""Significant figures of the numbers in a page: a pixel is a thousandth of a chart."""

Column = Sequence[float | None]


def round_figures(values: Iterable[float | None], figures: int = _FIGURES) -> list[float | None]:
    """Numbers as they stand in a page; what is not finite is ``None``."""
    rounded = [None if finite(one) is None else float(f"{one:.{figures}g}") for one in values]
    return [
        int(one) if one is not None and one.is_integer() and abs(one) < 1e15 else one
        for one in rounded
    ]


def keep_extremes(columns: Sequence[Column], limit: int) -> list[int]:
    """Which rows to keep, about ``limit`` at most: the first, the last and every extreme.

    The rows are cut into stretches of equal length; of each stretch and column, the rows of the
    least and the largest value stay. A missing value is no extreme.
    """
    length = len(columns[0]) if columns else 0
    if length <= limit:
        return list(range(length))
    stretches = max(1, limit // (2 * len(columns)))
    kept = {0, length - 1}
    for number in range(stretches):
        begin, end = number * length // stretches, (number + 1) * length // stretches
        for column in columns:
            known = [row for row in range(begin, end) if finite(column[row]) is not None]
            if known:
                kept.add(min(known, key=column.__getitem__))  # type: ignore[arg-type]
                kept.add(max(known, key=column.__getitem__))  # type: ignore[arg-type]
    return sorted(kept)


@dataclass(slots=True)
class StepPoint:
    """Consecutive steps of one phase as a point of a chart."""

    t: float
    """When the last of them ended."""
    phase: str
    first_step: int
    steps: int
    wall_seconds: float
    """Summed."""
    wait_seconds: float
    low: float
    """The shortest step."""
    high: float
    high_step: int | None
    """Number of the longest step; ``None`` where single steps are not known."""


def merge_steps(points: Iterable[StepPoint], steps: int) -> Iterator[StepPoint]:
    """Join consecutive points until each holds so many steps; phases stay apart."""
    pending: StepPoint | None = None
    for point in points:
        if pending is not None and (pending.steps >= steps or pending.phase != point.phase):
            yield pending
            pending = None
        if pending is None:
            pending = point
            continue
        pending.t = point.t
        pending.steps += point.steps
        pending.wall_seconds += point.wall_seconds
        pending.wait_seconds += point.wait_seconds
        pending.low = min(pending.low, point.low)
        if point.high > pending.high:
            pending.high, pending.high_step = point.high, point.high_step
    if pending is not None:
        yield pending


@dataclass(slots=True)
class Windows:
    """Sums over stretches of equal time."""

    begin: float
    width: float
    count: int
    sums: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def over(cls, begin: float, end: float, most: int) -> Windows:
        """A window for about every second, and no more than so many."""
        length = max(end - begin, 1e-9)
        count = max(1, min(most, round(length)))
        return cls(begin=begin, width=length / count, count=count)

    @property
    def times(self) -> list[float]:
        """The middle of every window."""
        return [self.begin + (number + 0.5) * self.width for number in range(self.count)]

    def spread(self, begin: float, end: float, **amounts: float | None) -> None:
        """Share amounts out over the windows that a stretch of time touches."""
        first, last = self._place(begin), self._place(end)
        length = end - begin
        for number in range(first, last + 1):
            share = 1.0
            if last > first:
                left = self.begin + number * self.width
                inside = min(end, left + self.width) - max(begin, left)
                share = max(0.0, inside) / length
            for name, amount in amounts.items():
                known = finite(amount)
                if known is not None:
                    sums = self.sums.get(name) or self.sums.setdefault(name, [0.0] * self.count)
                    sums[number] += share * known

    def ratio(self, above: str, below: str) -> list[float | None]:
        """One sum over another, window by window; ``None`` where there is nothing below."""
        if above not in self.sums or below not in self.sums:
            return [None] * self.count
        return list(map(ratio, self.sums[above], self.sums[below]))

    def _place(self, t: float) -> int:
        return min(self.count - 1, max(0, int((t - self.begin) / self.width)))
