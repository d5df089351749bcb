"""The ready queue over time: whether it falls, and since when it has been empty.

A loader that is too slow is hidden for as long as its queue lasts: Q batches cover a deficit for
Q ÷ (demand − supply) steps. Until then the stall says nothing about the steady state, and for long
after that the hidden part waters it down. So the queue's fall is found (a line through its depth,
two standard errors), and the moment it has run dry for good; what came before counts as warm-up
once the rest is long enough to be judged by itself.

A queue that is emptied now and then and fills again is none of this, nor is one that has settled at
a lower level. One pass over the blocks, and three lines fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fast_axolotl.record import StepBlock
from fast_axolotl.record.arithmetic import finite, fit_slope, ratio, total
from fast_axolotl.record.thresholds import (
    DRAINED_BATCHES,
    DRAINED_SHARE,
    LEAST_FALL_BATCHES,
    LEAST_FALL_SHARE,
    is_long_enough,
)

__all__ = ["Drain", "Point", "find_capacity", "find_drain", "find_drift", "read_queue"]

Point = tuple[float, float, float]
"""Step, ready batches, fetches: of a block that tells."""

_SETTLED = 0.25
"""Of the whole fall's slope: a second half that is flatter has settled."""
_LEAST_HALF = 3
_LEAST_FITTED = 0.5
"""Of the observed fall, that a straight line must explain; a sudden dip is no drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A ready queue that falls, or has fallen until it was empty."""

    batches_per_step: float
    """By how many it falls."""
    left: float
    """Ready batches at the end; nothing where it ran dry."""
    dry_step: int | None = None
    """The first step after it ran dry; ``None``: it has not."""
    first_block: int = 0
    """Which of the steady blocks that step begins."""
    fetches_since: int = 0
    seconds_since: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether what followed can be judged by itself."""
        is_dry = self.dry_step is not None
        return is_dry and is_long_enough(self.fetches_since, self.seconds_since)


def find_capacity(settings: Mapping[str, Any]) -> int | None:
    """Batches that the loader's workers may have ready."""
    given = _number(settings, "queue_capacity")
    if given is not None:
        return round(given)
    workers, prefetch = _number(settings, "num_workers"), _number(settings, "prefetch_factor")
    if workers is None or (prefetch is None and workers):
        return None
    return round(workers * (prefetch or 0))


def read_queue(blocks: Sequence[StepBlock]) -> list[Point]:
    """What the blocks tell of the queue."""
    return [
        (block.first_step + block.steps / 2, depth, float(block.fetches))
        for block in blocks
        if (depth := finite(block.queue_depth)) is not None
    ]


def find_drift(points: Sequence[Point]) -> float | None:
    """Batches a step that the queue grows by; 0 where that is not told from noise."""
    line = fit_slope(points)
    if line is None:
        return None
    slope, error = line
    return slope if abs(slope) >= 2 * error else 0.0


def find_drain(blocks: Sequence[StepBlock], capacity: int | None) -> Drain | None:
    """How the queue drains over the blocks of the steady phase; ``None``: it does not."""
    told = [number for number, block in enumerate(blocks) if finite(block.queue_depth) is not None]
    points = read_queue(blocks)
    dry = _find_dry(points, capacity or 0)
    falling = points if dry is None else points[: dry + 1]
    drift = find_drift(falling)
    if drift is None or drift >= 0 or not _is_a_fall(falling, drift, capacity or 0):
        return None
    if dry is None:
        if _has_settled(falling, drift):
            return None
        last = blocks[-1]
        return Drain(
            batches_per_step=-drift, left=_depth_at(falling, drift, last.first_step + last.steps)
        )
    first = told[dry] + 1
    since, before = blocks[first:], blocks[first - 1]
    return Drain(
        batches_per_step=-drift,
        left=0.0,
        dry_step=before.first_step + before.steps,
        first_block=first,
        fetches_since=sum(block.fetches for block in since),
        seconds_since=total(block.wall_seconds for block in since) or 0.0,
    )


def _find_dry(points: Sequence[Point], capacity: int) -> int | None:
    """The first point from which on the queue is empty, and stays so but for little."""
    level = max(DRAINED_BATCHES, DRAINED_SHARE * capacity)
    for number, (_, depth, _) in enumerate(points):
        if depth < level:
            later = _mean_depth(points[number:])
            return number if later < max(2 * level, LEAST_FALL_SHARE * capacity) else None
    return None


def _is_a_fall(points: Sequence[Point], drift: float, capacity: int) -> bool:
    fitted = -drift * (points[-1][0] - points[0][0])
    seen = points[0][1] - points[-1][1]
    least = max(LEAST_FALL_BATCHES, LEAST_FALL_SHARE * capacity)
    return fitted >= least and fitted >= _LEAST_FITTED * seen


def _has_settled(points: Sequence[Point], drift: float) -> bool:
    half = points[len(points) // 2 :]
    if len(half) < _LEAST_HALF:
        return False
    line = fit_slope(half)
    return line is not None and line[0] > _SETTLED * drift


def _depth_at(points: Sequence[Point], drift: float, step: float) -> float:
    """Where the line through the points is at a step; one batch at least, since it is not dry."""
    weight = sum(fetches for _, _, fetches in points)
    middle = (ratio(sum(at * fetches for at, _, fetches in points), weight)) or 0.0
    return max(1.0, _mean_depth(points) + drift * (step - middle))


def _mean_depth(points: Sequence[Point]) -> float:
    weight = sum(fetches for _, _, fetches in points)
    return ratio(sum(depth * fetches for _, depth, fetches in points), weight) or 0.0


def _number(settings: Mapping[str, Any], name: str) -> float | None:
    value = settings.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return finite(value) if is_number else None
