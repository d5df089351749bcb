"""The ready queue: how deep it is, whether it is emptying, and since when it has been empty.

A loader that is too slow is hidden for as long as its queue lasts: until then the stall says
nothing about the steady state, and for long after that the hidden part waters it down. So a queue
that is emptying holds the verdict back, and what came before it ran dry counts as warm-up once the
rest is long enough to be judged by itself.

How large the queue is does not matter: the batches it loses per fetch are the share of the demand
that the loader lacks, and that share is the stall once the queue is empty. Less than 5 % from the
first half of the steady phase to the second holds nothing back. A queue that is emptied now and
then and fills again has not run dry, nor has one after which nobody waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fast_axolotl.record import StepBlock, thresholds
from fast_axolotl.record.arithmetic import finite, ratio, total

Point = tuple[int, float, int]
"""Number of a block that tells of the queue, ready batches, fetches."""


class Drain(NamedTuple):
    """A ready queue that is emptying, or has become empty."""

    dry_step: int | None = None
    """The first step after it ran dry; ``None``: it has not."""
    first_block: int = 0
    """Which of the steady blocks that step begins."""
    is_over: bool = False
    """Whether what followed can be judged by itself."""


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
        (number, depth, block.fetches)
        for number, block in enumerate(blocks)
        if (depth := finite(block.queue_depth)) is not None
    ]


def mean_depth(points: Sequence[Point]) -> float | None:
    """Ready batches, mean over fetches; ``None`` where nothing was looked at."""
    weight = sum(fetches for _, _, fetches in points)
    return ratio(sum(depth * fetches for _, depth, fetches in points), weight)


def find_drain(blocks: Sequence[StepBlock], settings: Mapping[str, Any]) -> Drain | None:
    """How the queue drains over the blocks of the steady phase; ``None``: it does not, or what the
    loader lacks is too little to matter."""
    points = read_queue(blocks)
    if first := _find_dry(points, settings):
        since, before = blocks[first:], blocks[first - 1]
        wall = total(block.wall_seconds for block in since) or 0.0
        waited = total(
            block.host_wait_seconds
            if block.device_wait_seconds is None
            else block.device_wait_seconds
            for block in since
        )
        if (ratio(waited, wall) or 0.0) >= thresholds.FREE_STALL:
            is_over = thresholds.is_long_enough(sum(block.fetches for block in since), wall)
            return Drain(before.first_step + before.steps, first, is_over)
    half = len(points) // 2
    earlier, later = mean_depth(points[:half]), mean_depth(points[half:])
    if earlier is None or later is None:
        return None
    apart = sum(fetches for _, _, fetches in points) / 2
    least = max(thresholds.LEAST_FALL_BATCHES, thresholds.FREE_STALL * apart)
    return Drain() if earlier - later >= least else None


def _find_dry(points: Sequence[Point], settings: Mapping[str, Any]) -> int:
    """The first block after the queue was found empty, and stayed so but for little; 0 where it did
    not, or was empty all along."""
    capacity, workers = find_capacity(settings) or 0, number_of(settings, "num_workers")
    lying_about = min(thresholds.DRAINED_SHARE * capacity, workers or thresholds.DRAINED_BATCHES)
    level = max(thresholds.DRAINED_BATCHES, lying_about)
    most = min(4 * level, max(2.0, capacity / 2))
    for number, (block, depth, _) in enumerate(points):
        if depth < level:
            has_stayed = number > 0 and (mean_depth(points[number:]) or 0.0) < most
            return block + 1 if has_stayed else 0
    return 0


def number_of(settings: Mapping[str, Any], name: str) -> float | None:
    """A setting that is a number."""
    value = settings.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return finite(value) if is_number else None
