"""Whether two arms have learned the same: their losses, as the trainer logged them, one by one.

Equal means equal to the last digit. On a device whose sums are not reproducible, runs of one and
the same arm differ, too; then the larger spread among the runs of either arm is what the distance
of the arms is held against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

Losses = Sequence[float]

_MOST_SPREADS = 2.0
"""Arms further from each other than twice their own spread are different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """What a comparison of losses found."""

    is_equal: bool | None
    """``None``: cannot be told."""
    sentence: str


def compare_losses(baseline: Sequence[Losses], arm: Sequence[Losses], name: str) -> LossCheck:
    """The losses of the runs of two arms."""
    first, second = [run for run in baseline if run], [run for run in arm if run]
    if not first or not second:
        who = (
            "neither variant logged any"
            if not first and not second
            else ("one variant logged none")
        )
        return LossCheck(is_equal=None, sentence=f"Losses: {who}.")
    # Of each arm, which logged loss is the first that is not a finite number, from 1.
    broken = [
        min(
            (at for run in runs for at, loss in enumerate(run, 1) if not math.isfinite(loss)),
            default=None,
        )
        for runs in (first, second)
    ]
    if all(broken):
        return LossCheck(
            is_equal=None,
            sentence="Losses: both variants logged NaN or infinite losses, first at logged loss "
            f"{min(filter(None, broken))}: fix that first.",
        )
    if any(broken):
        who = name if broken[1] else "the baseline"
        return LossCheck(
            is_equal=False,
            sentence=f"DIFFERENT losses: {who} logged NaN or infinite losses, first at logged "
            f"loss {broken[0] or broken[1]}, and the other variant did not.",
        )
    counts = {len(run) for run in (*first, *second)}
    runs = len(first) + len(second)
    if len({tuple(run) for run in (*first, *second)}) == 1:
        sentence = f"Losses: identical to the last digit, {len(first[0])} in each of {runs} runs."
        return LossCheck(is_equal=True, sentence=sentence)
    if len(counts) > 1:
        sentence = f"DIFFERENT losses: some runs logged {min(counts)} losses, others {max(counts)}."
        return LossCheck(is_equal=False, sentence=sentence)
    own = _spread(first)
    # An arm that scatters beside a baseline that does not is a difference, and no excuse.
    own = max(own, _spread(second)) if own else 0.0
    far, step = max(_distance(a, b) for a in first for b in second)
    if len(first) == 1:
        return LossCheck(
            is_equal=None,
            sentence=f"Losses: {name} differs from the baseline by up to {far:.3g}, first at "
            f"logged loss {step}. With one run, it is not known whether the baseline "
            "also differs from itself: pass more --pairs.",
        )
    if own and far <= _MOST_SPREADS * own:
        return LossCheck(
            is_equal=None,
            sentence=f"Losses: runs of the same variant differ by up to {own:.3g}, and {name} "
            f"differs from the baseline by up to {far:.3g}: chance can explain that.",
        )
    among = f", runs of the same variant by up to {own:.3g}" if own else ""
    return LossCheck(
        is_equal=False,
        sentence=f"DIFFERENT losses: {name} differs from the baseline by up to {far:.3g}, first "
        f"at logged loss {step}{among}. Do not trust the speed until this is explained.",
    )


def _spread(runs: Sequence[Losses]) -> float:
    """How far runs of one arm are from each other."""
    return max((_distance(a, b)[0] for a, b in combinations(runs, 2)), default=0.0)


def _distance(first: Losses, second: Losses) -> tuple[float, int]:
    """The largest difference, and where the first one is, from 1."""
    furthest, at = 0.0, 0
    for number, (one, other) in enumerate(zip(first, second, strict=True), 1):
        if one != other:
            at = at or number
            furthest = max(furthest, abs(one - other))
    return furthest, at
