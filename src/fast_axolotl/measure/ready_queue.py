"""The ready queue over time: whether it falls, and since when it has been empty.

A loader that is too slow is hidden for as long as its queue lasts: Q batches cover a deficit for
Q ÷ (demand − supply) steps. Until then the stall says nothing about the steady state, and for long
after that the hidden part waters it down. So the queue's fall is found (a line through its depth,
two standard errors), and the moment it has run dry for good; what came before counts as warm-up
once the rest is long enough to be judged by itself.

How large the queue is does not matter, nor how far it has fallen: the batches it loses per fetch
are the share of the demand that the loader lacks, and that share is the stall once the queue is
empty. A fall that would end in a stall of less than 5 % holds nothing back.

A queue that is emptied now and then and fills again is none of this, nor is one that has settled at
a lower level. One pass over the blocks, and three lines fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fast_axolotl.record import StepBlock, thresholds
from fast_axolotl.record.arithmetic import finite, fit_slope, ratio, total

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
        return is_dry and thresholds.is_long_enough(self.fetches_since, self.seconds_since)


def find_capacity(settings: Mapping[str, Any]) -> int | None:
    """Batches that the loader's workers may have ready."""
    capacity = number_of(settings, "queue_capacity")
    if capacity is not None:
        return round(capacity)
    workers, prefetch = number_of(settings, "num_workers"), number_of(settings, "prefetch_factor")
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


def find_drain(blocks: Sequence[StepBlock], settings: Mapping[str, Any]) -> Drain | None:
    """How the queue drains over the blocks of the steady phase; ``None``: it does not, or what the
    loader lacks is too little to matter."""
    told = [number for number, block in enumerate(blocks) if finite(block.queue_depth) is not None]
    points = read_queue(blocks)
    dry = _find_dry(points, settings)
    falling = points if dry is None else points[: dry + 1]
    drift, error = fit_slope(falling) or (0.0, 0.0)
    if drift >= 0 or -drift < 2 * error:
        return None
    fitted = -drift * (falling[-1][0] - falling[0][0])
    seen = falling[0][1] - falling[-1][1]
    if fitted < max(thresholds.LEAST_FALL_BATCHES, _LEAST_FITTED * seen):
        return None
    if dry is None:
        per_step = ratio(sum(block.fetches for block in blocks), sum(b.steps for b in blocks))
        if (ratio(-drift, per_step) or 0.0) < thresholds.FREE_STALL:
            return None
        half = falling[len(falling) // 2 :]
        line = fit_slope(half) if len(half) >= _LEAST_HALF else None
        if line is not None and line[0] > _SETTLED * drift:
            return None
        # Where the line is at the last step; one batch at least, since it is not dry.
        weight = sum(fetches for _, _, fetches in falling)
        middle = ratio(sum(step * fetches for step, _, fetches in falling), weight) or 0.0
        behind = blocks[-1].first_step + blocks[-1].steps - middle
        return Drain(
            batches_per_step=-drift, left=max(1.0, (mean_depth(falling) or 0.0) + drift * behind)
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


def mean_depth(points: Sequence[Point]) -> float | None:
    """Ready batches, mean over fetches; ``None`` where nothing was looked at."""
    weight = sum(fetches for _, _, fetches in points)
    return ratio(sum(depth * fetches for _, depth, fetches in points), weight)


def number_of(settings: Mapping[str, Any], name: str) -> float | None:
    """A setting that is a number."""
    value = settings.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return finite(value) if is_number else None


def _find_dry(points: Sequence[Point], settings: Mapping[str, Any]) -> int | None:
    """The first point from which on the queue is empty, and stays so but for little."""
    capacity, workers = find_capacity(settings) or 0, number_of(settings, "num_workers")
    lying_about = min(thresholds.DRAINED_SHARE * capacity, workers or thresholds.DRAINED_BATCHES)
    level = max(thresholds.DRAINED_BATCHES, lying_about)
    most = max(2 * level, min(thresholds.REFILLED_SHARE * capacity, 4 * level))
    for number, (_, depth, _) in enumerate(points):
        if depth < level:
            return number if (mean_depth(points[number:]) or 0.0) < most else None
    return None
