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
        who = "one variant logged none" if first or second else "neither variant logged any"
        return LossCheck(is_equal=None, sentence=f"Losses: {who}.")
    both = {"the baseline": first, name: second}
    broken = {}
    for who, runs in both.items():
        logged = [at for run in runs for at, loss in enumerate(run, 1) if not math.isfinite(loss)]
        if logged:
            broken[who] = min(logged)
    if broken:
        told = " and ".join(f"{who} (at logged loss {at})" for who, at in broken.items())
        words = f"NaN or infinite losses in {told}"
        if len(broken) == len(both):
            return LossCheck(is_equal=None, sentence=f"Losses: {words}: fix that first.")
        return LossCheck(is_equal=False, sentence=f"DIFFERENT losses: {words} only.")
    every = [*first, *second]
    counts = {len(run) for run in every}
    if len(set(map(tuple, every))) == 1:
        told = f"{len(first[0])} in each of {len(every)} runs"
        return LossCheck(is_equal=True, sentence=f"Losses: identical to the last digit, {told}.")
    if len(counts) > 1:
        sentence = f"DIFFERENT losses: some runs logged {min(counts)} losses, others {max(counts)}."
        return LossCheck(is_equal=False, sentence=sentence)
    # How far runs of one arm are from each other. An arm that scatters beside a baseline that does
    # not is a difference, and no excuse.
    own, other = (
        max((_distance(a, b)[0] for a, b in combinations(runs, 2)), default=0.0)
        for runs in (first, second)
    )
    own = max(own, other) if own else 0.0
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


def _distance(first: Losses, second: Losses) -> tuple[float, int]:
    """The largest difference, and where the first one is, from 1."""
    furthest, at = 0.0, 0
    for number, (one, other) in enumerate(zip(first, second, strict=True), 1):
        if one != other:
            at = at or number
            furthest = max(furthest, abs(one - other))
    return furthest, at
