"""Decide whether a figure of two variants differs, with an interval.

The unit of replication is the run, never the step: steps of one run share the state of the machine,
and tests over steps find changes where there are none (66 to 76 % of the time at a nominal 5 %, by
simulation). Runs alternate, A B B A, and each pair gives one ratio. Their logarithms have a mean
and a t interval of n − 1 degrees of freedom: 6 % false findings. Five pairs find 98 % of changes of
5 % where runs differ by 1.5 % for no reason, 85 % where they do by 2 %. Runs that were not
interleaved are compared by Welch's interval of two means.

A ratio needs values that are not near 0. Where there are some, differences take its place.

A matrix tests many figures, so some change by chance. Holm's correction keeps the probability of
even one such row at 5 %. How small a change a protocol can show is a question of power: half the
width of an interval is found every second time only, so ``detectable_change`` gives the size that
is found in 80 % of protocols. Probabilities of t are exact to some 1e-9, without a table.
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
_MISSED = 0.4
"""Twice the probability of missing a change of the size that is called detectable: by Cohen's
convention it is found in 80 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio or a difference of two arms."""

    value: float | None
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    p_value: float | None = None
    """Probability of such a value, or one further away, without any change."""
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
    low, high = 0.0, 1.0
    while t_probability(high, degrees) > level:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if t_probability(middle, degrees) <= level else (middle, high)
    return high


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: at most 5 % of families have one below 5 % by chance."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[at])
        adjusted[at] = min(1.0, largest)
    return adjusted


def detectable_change(
    error: float, degrees: float, *, level: float = LEVEL, least: float = 0.0
) -> float:
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
) -> Estimate:
    """Geometric mean of arm ÷ baseline over the pairs that have both, or mean of arm − baseline.

    Of runs that were not interleaved, the same of the two means. ``resolution`` is the share by
    which a ratio can be off however many runs there are.
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
    scale = math.exp if is_ratio else float
    mean = statistics.fmean(others) - statistics.fmean(known)
    if count == 1:
        unpaired = "one run has no interval: the difference may be noise"
        reason = "one pair has no interval: pass more --pairs" if is_paired else unpaired
        return Estimate(value=scale(mean), reason=reason)
    # Values that are rounded to steps of the slack scatter, however alike they look.
    rounding = slack**2 / 12
    if is_paired:
        changes = [after - before for before, after in zip(known, others, strict=True)]
        error = math.sqrt((statistics.variance(changes) + 2 * rounding) / count)
        degrees = count - 1.0
    else:
        sizes = (len(known), len(others))
        parts = [(statistics.variance(one) + rounding) / len(one) for one in (known, others)]
        error = math.sqrt(sum(parts))
        # Welch and Satterthwaite's degrees of freedom.
        below = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
        degrees = error**4 / below if below else sum(sizes) - 2.0
    half = t_quantile(degrees) * error + slack
    # What rounding leaves of a difference is none; runs that are all alike have no error.
    beyond = abs(mean) - slack if abs(mean) > slack + 1e-12 else 0.0
    t = beyond / error if error else math.inf if beyond else 0.0
    return Estimate(
        value=scale(mean),
        low=scale(mean - half),
        high=scale(mean + half),
        p_value=t_probability(t, degrees),
        error=error,
        degrees=degrees,
    )
