"""A histogram of durations in constant memory, with quantiles exact to 1 %.

Bin ``i`` holds durations up to ``1 µs · 1.02**i``; anything shorter is in bin 0. It is kept and
written sparsely, as ``{"bin": count}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

_LEAST = 1e-6
_LOG_GROWTH = math.log(1.02)


class Histogram(Counter[int]):
    """Counts of durations by the number of their logarithmic bin."""

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration, once or several times."""
        index = 0
        if seconds > _LEAST:
            index = math.ceil(math.log(seconds / _LEAST) / _LOG_GROWTH)
        self[index] += count

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another one, as written."""
        for key, count in counts.items():
            self[int(key)] += count

    def written(self) -> dict[str, int]:
        """The counts as they are written."""
        return {str(index): count for index, count in sorted(self.items())}

    def durations(self) -> Iterator[tuple[float, int]]:
        """A duration in the middle of each bin, and how many there are."""
        return ((_middle(index), count) for index, count in self.items())

    def quantile(self, share: float) -> float | None:
        """The duration below which a share of them lies; ``None`` of an empty one."""
        left = share * self.total()
        for index in sorted(self):
            left -= self[index]
            if left <= 1e-9:
                return _middle(index)
        return _middle(max(self)) if self else None


def _middle(index: int) -> float:
    return 0.0 if index == 0 else _LEAST * math.exp((index - 0.5) * _LOG_GROWTH)
