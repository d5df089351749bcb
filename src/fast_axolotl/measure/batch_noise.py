"""The gradient noise scale of a run, from the norms that its ranks recorded, and the global batch.

Of a step with K micro-batches on all ranks, g is the gradient and h that of one of them, multiplied
by the backward passes of a rank:

    |G|² = (K·|g|² − |h|²) ÷ (K − 1)      tr(Σ) = (|h|² − |g|²) · K ÷ (K − 1)

The noise scale is Σtr(Σ) ÷ Σ|G|² over the later half of the steps: it grows while a model learns.
The interval is that of the inverse, by ten blocks of consecutive steps, the delta method and
Student's t at 95 %. Where that reaches 0, the noise scale has no upper bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fast_axolotl.measure.loop_figures import find_readers
from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.measure.summary_builder import SummaryBuilder
from fast_axolotl.record.arithmetic import ratio, times, total

BLOCKS = 10
STUDENT = 2.262
"""97.5 % quantile of Student's t with nine degrees of freedom."""
LEAST_STEPS = 2 * BLOCKS
_EQUAL = 1e-5
"""By which norms of one gradient differ at most."""
_UNLIKE = 0.25
"""By which fetches and backward passes of a step may differ: the last of an epoch is short."""


def noise_interval(pairs: Sequence[tuple[float, float]], units: int) -> list[float | None]:
    """The noise scale and its bounds, from |h|² and |g|² of steps; g has so many units, h one."""
    edges = [len(pairs) * block // BLOCKS for block in range(BLOCKS + 1)]
    signal, noise = [], []
    for begin, end in itertools.pairwise(edges):
        first, whole = (sum(values) for values in zip(*pairs[begin:end], strict=True))
        signal.append((units * whole - first) / (units - 1))
        noise.append((first - whole) * units / (units - 1))
    inverse = ratio(sum(signal), sum(noise))
    if inverse is None:
        return [None, None, None]
    spread = sum((part - inverse * rest) ** 2 for part, rest in zip(signal, noise, strict=True))
    error = STUDENT * math.sqrt(BLOCKS / (BLOCKS - 1) * spread) / sum(noise)
    return [ratio(1.0, value) for value in (inverse, inverse + error, inverse - error)]


def add_noise(builder: SummaryBuilder, ranks: Sequence[RankFigures], copies: int) -> None:
    """The samples of a step, which ``copies`` ranks share, and the noise scale beside them."""
    readers, count = find_readers(ranks), builder.values["world_size"]
    batches = [ratio(rank.steady.count("samples"), rank.steady.steps) for rank in readers]
    batch = ratio(None if None in batches else total(batches), copies) or None
    builder.put_steady("global_batch_samples", batch, "", "samples")
    lines = [{line.step: line for line in rank.record.gradients} for rank in ranks]
    common = sorted(set(lines[0]).intersection(*lines)) if lines else []
    passes = lines[0][common[-1]].micro_batches if common else 1
    late = [[own[step] for own in lines] for step in common if step >= common[-1] / 2]
    late = [step for step in late if all(line.micro_batches == passes for line in step)]
    firsts = [[passes**2 * line.first for line in step] for step in late]
    pairs = [(sum(f), sum(line.whole for line in s)) for f, s in zip(firsts, late, strict=True)]
    # What every rank has a whole one of is reduced already where it is equal on all of them.
    is_equal = all(max(one) - min(one) <= _EQUAL * max(one) for one in firsts)
    is_reduced = is_equal or any(line.is_reduced for step in late for line in step)
    units = passes if is_reduced else passes * count
    fetches = total(ratio(rank.steady.fetches, rank.steady.steps) for rank in readers) or 0.0
    values: list[float | None] = [None, None, None]
    if len(pairs) < LEAST_STEPS:
        steps = f"{len(pairs)} steps of the second half were measured on all ranks"
        reason = f"{steps}, but {LEAST_STEPS} are needed: run longer" if any(lines) else ""
    elif len(ranks) < count or copies > 1:
        reason = "ranks left no record, or share gradients in tensor or context parallel groups"
    elif units < 2 or abs(fetches / (passes * count) - 1.0) > _UNLIKE:
        reason = f"a step has {fetches:.3g} fetches, but {passes * count} backward passes"
        reason = reason if units > 1 else "all ranks have the same gradients"
    else:
        reason = "the noise hides the gradient: run longer" if batch else "samples were not counted"
        samples = times(ratio(batch, fetches), passes * count / units)
        values = [times(found, samples) for found in noise_interval(pairs, units)]
    for end, value in zip(("", "_low", "_high"), values, strict=True):
        builder.put(f"gradient_noise_scale{end}", value, reason, "gradient_noise_scale")
