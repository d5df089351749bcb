"""Whether two arms have learned the same: their losses, as the trainer logged them, one by one.

Equal means equal to the last digit. On a device whose sums are not reproducible, runs of one and
the same arm differ, too; then the larger spread among the runs of either arm is what the distance
of the arms is held against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

Losses = Sequence[float]

_MOST_SPREADS = 2.0
"""Arms further from each other than twice their own spread are different."""


def compare_losses(
    baseline: Sequence[Losses], arm: Sequence[Losses], name: str
) -> tuple[bool | None, str]:
    """Whether the losses of the runs of two arms are equal, if that can be told, in a sentence."""
    first, second = [run for run in baseline if run], [run for run in arm if run]
    if not first or not second:
        who = "one variant logged none" if first or second else "neither variant logged any"
        return None, f"Losses: {who}."
    broken = {}
    for who, runs in {"the baseline": first, name: second}.items():
        logged = [at for run in runs for at, loss in enumerate(run, 1) if not math.isfinite(loss)]
        if logged:
            broken[who] = min(logged)
    if broken:
        places = " and ".join(f"{who} (at logged loss {at})" for who, at in broken.items())
        words = f"NaN or infinite losses in {places}"
        if len(broken) > 1:
            return None, f"Losses: {words}: fix that first."
        return False, f"DIFFERENT losses: {words} only."
    every = [*first, *second]
    counts = {len(run) for run in every}
    if len(set(map(tuple, every))) == 1:
        count = f"{len(first[0])} in each of {len(every)} runs"
        return True, f"Losses: identical to the last digit, {count}."
    if len(counts) > 1:
        return False, f"DIFFERENT losses: some runs logged {min(counts)}, others {max(counts)}."
    # How far runs of one arm are from each other. An arm that scatters beside a baseline that does
    # not is a difference, and no excuse.
    own, other = (
        max((_distance(a, b)[0] for a, b in combinations(runs, 2)), default=0.0)
        for runs in (first, second)
    )
    own = max(own, other) if own else 0.0
    far, step = max(_distance(a, b) for a in first for b in second)
    differs = f"{name} differs from the baseline by up to {far:.3g}, first at logged loss {step}"
    if len(first) == 1:
        return None, (
            f"Losses: {differs}. With one run, it is not known whether the baseline also differs "
            "from itself: pass more --pairs."
        )
    among = f"; runs of the same variant differ by up to {own:.3g}" if own else ""
    if own and far <= _MOST_SPREADS * own:
        return None, f"Losses: {differs}{among}: chance can explain that."
    return False, (
        f"DIFFERENT losses: {differs}{among}. Do not trust the speed until this is explained."
    )


def _distance(first: Losses, second: Losses) -> tuple[float, int]:
    """The largest difference, and where the first one is, from 1."""
    places = [at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
    if not places:
        return 0.0, 0
    return max(abs(first[at] - second[at]) for at in places), places[0] + 1
