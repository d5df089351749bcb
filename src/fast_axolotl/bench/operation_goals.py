"""The goals set for hashing, dedupe, packing and padding. Recorded, never asserted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fast_axolotl.bench.contest import AXOLOTL
from fast_axolotl.bench.earlier import EARLIER
from fast_axolotl.bench.goals import Ratio, most_goal, ratio_goal
from fast_axolotl.bench.matrix import Goal, PeerTiming
from fast_axolotl.bench.operation_result import OperationCase

__all__ = [
    "ARRAYS",
    "ARROW",
    "HASHLIB",
    "LISTS",
    "MOST_PEAK_OVER_OUTPUT",
    "OURS",
    "PLAIN",
    "PLAIN_TENSORS",
    "TENSORS",
    "TO_NUMPY",
    "growth_goal",
    "operation_goals",
]

OURS = "fast-axolotl"
ARRAYS = "fast-axolotl arrays"
ARROW = "fast-axolotl Arrow"
LISTS = "fast-axolotl lists"
TO_NUMPY = "fast-axolotl numpy"
TENSORS = "fast-axolotl torch"
PLAIN = "plain Python"
PLAIN_TENSORS = "plain + torch.tensor"
HASHLIB = "hashlib loop"

MOST_PEAK_OVER_OUTPUT = 2.0
MOST_GROWTH = 15.0
"""Of the time to plan ten million lengths over that for one."""


@dataclass(frozen=True, slots=True)
class _Target:
    ratio: Ratio
    sizes: tuple[int, ...] = ()
    """Where it was set; empty for every size."""


_ROWS_INTO_ARRAYS = (
    _Target(Ratio(LISTS, PLAIN, 1.0)),
    _Target(Ratio(TO_NUMPY, PLAIN_TENSORS, 4.0)),
    _Target(Ratio(TENSORS, PLAIN_TENSORS, 4.0)),
    _Target(Ratio(ARRAYS, PLAIN_TENSORS, 25.0)),
)

_TARGETS: dict[str, Sequence[_Target]] = {
    "hash": (
        _Target(Ratio(LISTS, HASHLIB, 2.0), (100_000,)),
        _Target(Ratio(LISTS, EARLIER, 1.5), (100_000,)),
        _Target(Ratio(ARROW, HASHLIB, 5.0), (1_000_000,)),
    ),
    "hash-4kb": (
        _Target(Ratio(LISTS, HASHLIB, 1.5)),
        _Target(Ratio(ARROW, HASHLIB, 1.5)),
    ),
    "tokens": (_Target(Ratio(OURS, AXOLOTL, 50.0)),),
    "pack": _ROWS_INTO_ARRAYS,
    "pad": _ROWS_INTO_ARRAYS,
    "plan": (_Target(Ratio(OURS, AXOLOTL, 30.0), (100_000,)),),
}


def operation_goals(kind: str, size: int, timings: Sequence[PeerTiming]) -> list[Goal]:
    """The goals of a case of this kind at this size."""
    by_name = {timing.name: timing for timing in timings}
    return [
        ratio_goal(target.ratio, by_name)
        for target in _TARGETS.get(kind, ())
        if not target.sizes or size in target.sizes
    ]


def growth_goal(small: OperationCase, large: OperationCase) -> Goal:
    """Ten times the input in at most fifteen times the time."""
    before, after = small.timing(OURS), large.timing(OURS)
    assert before is not None
    assert after is not None
    return most_goal(
        f"{OURS}, time over that of {small.rows:,} {small.unit}",
        MOST_GROWTH,
        "×",
        after.median_seconds / before.median_seconds,
    )
