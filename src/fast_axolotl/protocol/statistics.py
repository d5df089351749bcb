"""Decide whether a figure of two variants differs, with an interval.

The unit of replication is the run, never the step: steps of one run share the state of the machine,
and tests over steps find changes where there are none (66 to 76 % of the time at a nominal 5 %, by
simulation). Each pair of runs gives one ratio. Of the logarithms, a fifth at either end counts as
much as its neighbour (from six pairs on): their trimmed mean has Yuen's t interval, with Winsorised
variance. Runs that were not paired are compared by Welch's interval of two such means. Values near
0 have differences in place of ratios.

A protocol looks at its pairs from the third on and ends when the answer is clear. Each look but the
last spends an equal part of half of the 5 %, the last one what is left: ``spend_at``. Probabilities
are divided by that part and intervals as much wider. ``benchmarks/false_findings.py`` counts this.

A matrix tests many figures, so some change by chance. Holm's correction keeps the probability of
even one such row at 5 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fast_axolotl.record.arithmetic import finite

LEVEL = 0.05
"""Probability of taking chance for a change."""
LEAST_PAIRS = 3
"""Before the first look: two pairs show no change of less than 13 times their noise."""
_TRIMMED = 5
"""One value in so many is left out at either end; of fewer than six, none."""
_MISSED = 0.4
"""Twice the probability of missing a change that is called detectable, by Cohen's convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio or a difference of two arms."""

    value: float | None
    """That decides: robust against outliers."""
    mean: float | None = None
    """The same of all values, with the outliers."""
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    p_value: float | None = None
    """Probability of such a value, or one further away, without any change, at any look."""
    error: float | None = None
    """Standard error: of a ratio's logarithm, or of a difference."""
    degrees: float | None = None
    """Degrees of freedom of that error."""
    reason: str = ""
    """Why there is no value, or no interval."""


def t_probability(t: float, degrees: float) -> float:
    """Probability that Student's t is at least so far from 0, on either side."""
    if math.isinf(t):
        return 0.0
    # The regularised incomplete beta function I_x(a, b) by its power series, whose terms are all
    # positive and fall fast left of the mean; beyond it 1 − I_(1−x)(b, a) is the same.
    a, b = degrees / 2, 0.5
    x, rest = degrees / (degrees + t * t), t * t / (degrees + t * t)
    is_left = x < (a + 1) / (a + b + 2)
    if not is_left:
        a, b, x, rest = b, a, rest, x
    if x <= 0:
        return float(not is_left)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log(rest)) / a
    n, term, series = 0.0, 1.0, 1.0
    while term > 1e-16 * series:
        term *= (a + b + n) / (a + 1 + n) * x
        series += term
        n += 1
    return front * series if is_left else 1 - front * series


@cache
def t_quantile(degrees: float, level: float = LEVEL) -> float:
    """How far from 0 Student's t is with this probability, on either side: 1.96 for many runs."""
    low, high = 0.0, 1e9
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if t_probability(middle, degrees) <= level else (middle, high)
    return high


def bound_spread(degrees: float) -> float:
    """How many times a measured spread the true one is at most, in 95 % of cases."""
    # The quantile of chi-squared: from a table, then by Wilson and Hilferty's approximation.
    few = {1: 15.95, 2: 4.415, 3: 2.92}
    part = 2 / (9 * max(4, int(degrees)))
    return few.get(int(degrees)) or (1 - part - 1.645 * math.sqrt(part)) ** -1.5


def spend_at(pairs: int, most: int, *, is_last: bool = False) -> float:
    """The part of the 5 % for the look after so many pairs of at most ``most``.

    ``is_last``: no further pair is made, whatever this look shows.
    """
    early = 0.5 / max(1, most - LEAST_PAIRS)
    is_early = LEAST_PAIRS <= pairs < most and not is_last
    return early if is_early else 1.0 - early * max(0, pairs - LEAST_PAIRS)


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: at most 5 % of families have one below 5 % by chance."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[at])
        adjusted[at] = min(1.0, largest)
    return adjusted


def detectable_change(error: float, degrees: float, level: float, least: float) -> float:
    """The change that would be found in 80 % of protocols, on the scale of the error.

    Found is what is beyond chance and measured as at least ``least``. The usual sum of two
    quantiles of t: 1 % too small for five pairs, 12 % for two.
    """
    return max(t_quantile(degrees, level) * error, least) + t_quantile(degrees, _MISSED) * error


def compare_runs(
    baseline: Sequence[float | None],
    arm: Sequence[float | None],
    *,
    is_paired: bool = True,
    is_ratio: bool = True,
    resolution: float = 0.0,
    spend: float = 1.0,
) -> Estimate:
    """The middle of arm ÷ baseline over the pairs that have both, or of arm − baseline.

    Of runs that were not interleaved, the same of the two middles. ``resolution`` is the share by
    which a ratio can be off however many runs there are; ``spend`` is the part of the 5 % for this
    look at the pairs.
    """
    first, second = (list(map(finite, values)) for values in (baseline, arm))
    if is_paired:
        pairs = [pair for pair in zip(first, second, strict=True) if None not in pair]
        first, second = ([pair[at] for pair in pairs] for at in (0, 1))
    known, others = ([value for value in values if value is not None] for values in (first, second))
    count, slack = min(len(known), len(others)), 0.0
    if not count:
        unpaired = "one side has no run with this figure"
        reason = "no pair has this figure in both variants" if is_paired else unpaired
        return Estimate(value=None, reason=reason)
    if is_ratio:
        least = min(*known, *others)
        if least <= 0:
            zero = "a run has the value 0 here, which has no ratio"
            reason = "a run has a negative value here" if least else zero
            return Estimate(value=None, reason=reason)
        known, others = (list(map(math.log, values)) for values in (known, others))
        slack = math.log1p(resolution)
    scale = (lambda log: math.exp(min(log, 700.0))) if is_ratio else float
    mean = statistics.fmean(others) - statistics.fmean(known)
    if count == 1:
        unpaired = "one run has no interval: the difference may be noise"
        reason = "one pair has no interval: pass more --pairs" if is_paired else unpaired
        return Estimate(value=scale(mean), mean=scale(mean), reason=reason)
    # Values that are rounded to steps of the slack scatter, however alike they look.
    rounding = slack**2 / 12
    if is_paired:
        changes = [after - before for before, after in zip(known, others, strict=True)]
        middle, square, degrees = _find_middle(changes, 2 * rounding)
    else:
        (begin, *before), (end, *after) = (_find_middle(one, rounding) for one in (known, others))
        middle, parts = end - begin, (before, after)
        square = sum(part for part, _ in parts)
        # Welch and Satterthwaite's degrees of freedom.
        below = sum(part**2 / own for part, own in parts)
        degrees = square**2 / below if below else sum(own for _, own in parts)
    error = math.sqrt(square)
    half = t_quantile(degrees, LEVEL * spend) * error + slack
    # What rounding leaves of a difference is none; runs that are all alike have no error.
    beyond = abs(middle) - slack if abs(middle) > slack + 1e-12 else 0.0
    t = beyond / error if error else math.inf if beyond else 0.0
    return Estimate(
        value=scale(middle),
        mean=scale(mean),
        low=scale(middle - half),
        high=scale(middle + half),
        p_value=min(1.0, t_probability(t, degrees) / spend),
        error=error,
        degrees=degrees,
    )


def _find_middle(values: Sequence[float], rounding: float) -> tuple[float, float, float]:
    """The trimmed mean of two or more values, its squared error, and the degrees of freedom."""
    ordered, count = sorted(values), len(values)
    cut = count // _TRIMMED if count > _TRIMMED else 0
    kept = ordered[cut : count - cut]
    pulled = [kept[0]] * cut + kept + [kept[-1]] * cut
    squares = statistics.variance(pulled) * (count - 1) / (len(kept) - 1)
    return statistics.fmean(kept), (squares + rounding) / len(kept), len(kept) - 1.0
