"""The gradient noise scale of a run, from the norms that its ranks recorded, and the global batch.

Of a step with K micro-batches on all ranks, with |g|² of the whole and |h|² of one of them, where h
is multiplied by the backward passes of a rank so that both estimate the same gradient:

    |G|² = (K·|g|² − |h|²) ÷ (K − 1)      tr(Σ) = (|h|² − |g|²) · K ÷ (K − 1)

Sums over steps, never ratios of single steps, make the noise scale Σtr(Σ) ÷ Σ|G|², in micro-batches
and then in samples. It is that of the later half of the steps: a noise scale grows while a model
learns, and the first gradients are long.

The interval is that of the inverse, Σ|G|² ÷ Σtr(Σ), whose denominator is never near 0: ten blocks
of steps, one after the other, as they are correlated; the delta method for a ratio; Student's t at
95 %. Where the interval of the inverse reaches 0, the noise scale has no upper bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fast_axolotl.measure.job import Replicas
from fast_axolotl.measure.loop_figures import find_readers
from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.measure.summary_builder import SummaryBuilder
from fast_axolotl.record.arithmetic import ratio, total

__all__ = ["add_noise", "noise_interval"]

BLOCKS = 10
STUDENT = 2.262
"""97.5 % quantile of Student's t with nine degrees of freedom."""
LEAST_STEPS = 2 * BLOCKS
_EQUAL = 1e-5
"""By which norms of one gradient differ on equal devices at most."""
_UNLIKE = 0.25
"""By which fetches and backward passes of a step may differ: the last step of an epoch is short."""


def noise_interval(
    pairs: Sequence[tuple[float, float]], num_units: int
) -> tuple[float | None, float | None, float | None]:
    """The noise scale in units, its lower and its upper bound; ``None`` where there is none.

    ``pairs`` are |h|² and |g|² of steps in their order; h has one unit, g ``num_units``.
    """
    signal = [(num_units * whole - first) / (num_units - 1) for first, whole in pairs]
    noise = [(first - whole) * num_units / (num_units - 1) for first, whole in pairs]
    edges = [len(pairs) * block // BLOCKS for block in range(BLOCKS + 1)]
    sums = [
        (sum(signal[begin:end]), sum(noise[begin:end])) for begin, end in itertools.pairwise(edges)
    ]
    whole_noise = sum(noise)
    if whole_noise <= 0:
        return None, None, None
    inverse = sum(signal) / whole_noise
    spread = sum((part - inverse * rest) ** 2 for part, rest in sums)
    error = STUDENT * math.sqrt(BLOCKS / (BLOCKS - 1) * spread) / whole_noise
    return ratio(1.0, inverse), ratio(1.0, inverse + error), ratio(1.0, inverse - error)


def add_noise(builder: SummaryBuilder, ranks: Sequence[RankFigures], replicas: Replicas) -> None:
    """The samples of a step, and the noise scale to hold them against."""
    readers = find_readers(ranks)
    batches = [ratio(rank.steady.count("samples"), rank.steady.steps) for rank in readers]
    batch = None if None in batches else ratio(total(batches), replicas.copies)
    builder.put_steady("global_batch_samples", batch or None, "", "samples")
    names = [f"gradient_noise_scale{end}" for end in ("", "_low", "_high")]
    values: tuple[float | None, ...] = (None, None, None)
    reason = ""
    if any(rank.record.gradients for rank in ranks):
        found = _estimate(ranks, readers, replicas, builder.values["world_size"])
        reason = "the noise hides the gradient: look at more steps, or at the lower bound"
        values, reason = (values, found) if isinstance(found, str) else (found, reason)
    for name, value in zip(names, values, strict=True):
        builder.put(name, value, reason, names[0])


def _estimate(
    ranks: Sequence[RankFigures], readers: Sequence[RankFigures], replicas: Replicas, count: int
) -> tuple[float | None, ...] | str:
    """In samples, over ``count`` ranks; or why not."""
    if len(ranks) < count:
        return f"{len(ranks)} of {count} ranks left a record of their gradients"
    if replicas.copies > 1:
        return "ranks of a tensor or context parallel group share each gradient"
    lines = [{line.step: line for line in rank.record.gradients} for rank in ranks]
    common = sorted(set(lines[0]).intersection(*lines[1:]))
    passes = lines[0][common[-1]].micro_batches if common else 0
    steps = [
        step
        for step in common
        if step >= common[-1] / 2 and all(own[step].micro_batches == passes for own in lines)
    ]
    if len(steps) < LEAST_STEPS:
        return (
            f"{len(steps)} steps of the later half were looked at on all ranks, and {LEAST_STEPS} "
            "are needed: run longer"
        )
    fetches = total(ratio(rank.steady.fetches, rank.steady.steps) for rank in readers) or 0.0
    if abs(fetches / (passes * count) - 1.0) > _UNLIKE:
        return (
            f"a step has {fetches:.3g} fetches and {passes * count} backward passes: how many "
            "samples one of them has is not known"
        )
    samples = ratio(
        total(rank.steady.count("samples") for rank in readers),
        total(rank.steady.fetches for rank in readers),
    )
    if not samples:
        return "samples were not counted"
    # What every rank has a whole one of is reduced already where it is equal on all of them.
    firsts = [[own[step].first for own in lines] for step in steps]
    is_equal = all(max(one) - min(one) <= _EQUAL * max(one) for one in firsts)
    is_reduced = is_equal or any(own[step].is_reduced for own in lines for step in steps)
    num_units = passes if is_reduced else passes * count
    if num_units < 2:
        return "all ranks had the same gradients: they read the same rows"
    pairs = [
        (passes**2 * sum(one), sum(own[step].whole for own in lines))
        for one, step in zip(firsts, steps, strict=True)
    ]
    unit = samples * passes * count / num_units
    return tuple(
        None if found is None else found * unit for found in noise_interval(pairs, num_units)
    )
