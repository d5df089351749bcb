"""Whether the stall of a run changed at its end: one that was fine for hours can be starved.

The steady time is cut into tenths. The last one is a change if it is long enough to be judged, and
its stall is five points above that of seven of the nine tenths before it, or below. One bad moment
is no change, and neither are waits that come and go. A change in the middle of a run weighs enough
in the figures of the whole.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.record import StepBlock, thresholds
from fast_axolotl.record.arithmetic import finite, ratio, total

_TENTHS = 10
_LEAST_APART = 7
"""Of the nine tenths before the last."""
_LEAST_CHANGE = 0.05
"""Points. Ours: the distance between free of a loss and bound by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateChange:
    """The stall of a run before its last tenth, and where that begins."""

    begin: float
    """Seconds since 1970."""
    first_step: int
    stall_before: float
    """Median of the tenths before."""


def find_late_change(ranks: Sequence[RankFigures], chosen: RankFigures | None) -> LateChange | None:
    """The change at the end of a run, by the rank that waits longest in each tenth."""
    if chosen is None or not chosen.steady.wall_seconds:
        return None
    if chosen.settings.get("dispatcher"):
        ranks = [chosen]
    tenths: list[list[StepBlock]] = [[] for _ in range(_TENTHS)]
    done = 0.0
    for block in chosen.steady_blocks:
        place = int(_TENTHS * done / chosen.steady.wall_seconds)
        tenths[min(place, _TENTHS - 1)].append(block)
        done += finite(block.wall_seconds) or 0.0
    *_, last = tenths
    fetches, seconds = sum(block.fetches for block in last), _wall_seconds(last)
    if not all(tenths) or not thresholds.is_long_enough(fetches, seconds):
        return None
    bounds = [tenth[0].first_step for tenth in tenths[1:]]
    is_device = chosen.steady.source == "device"
    waits = [0.0] * _TENTHS
    for rank in ranks:
        own = [0.0] * _TENTHS
        for block in rank.steady_blocks:
            waited = block.device_wait_seconds if is_device else block.host_wait_seconds
            own[bisect_right(bounds, block.first_step)] += finite(waited) or 0.0
        waits = list(map(max, waits, own))
    stalls = [
        ratio(waited, _wall_seconds(tenth)) or 0.0
        for waited, tenth in zip(waits, tenths, strict=True)
    ]
    *before, now = stalls
    above = sum(now - stall >= _LEAST_CHANGE for stall in before)
    below = sum(stall - now >= _LEAST_CHANGE for stall in before)
    if max(above, below) < _LEAST_APART:
        return None
    first = last[0]
    spans = total(first.spans.values()) or 0.0
    return LateChange(
        begin=chosen.record.start.time + first.t - first.wall_seconds - spans,
        first_step=first.first_step,
        stall_before=statistics.median(before),
    )


def _wall_seconds(blocks: Sequence[StepBlock]) -> float:
    return total(block.wall_seconds for block in blocks) or 0.0
