"""The tokens per second that a trainer logs of its own, held against ours.

Axolotl logs trainable tokens per second and GPU. transformers logs all tokens since the training
began, with or without padding; since its clock runs from the start, its count per step is compared
instead. A figure that is off by the number of ranks or of accumulated micro-batches is a mistake of
definition, and a note names it: Axolotl reported the sum over all GPUs as that of one
(axolotl#3362), and one micro-batch for a whole step (axolotl#3688).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.measure.ready_queue import number_of
from fast_axolotl.record.arithmetic import finite, middle, ratio, times

__all__ = ["Audit", "audit_trainer"]

_PER_GPU = ("tokens/train_per_sec_per_gpu", "tokens_per_second_per_gpu")
"""Names in Axolotl's log, the newer first."""
_SINCE_START, _COUNTED = "train_tokens_per_second", "num_input_tokens_seen"
"""Names in transformers' log."""

_CLOSE = 0.1
"""Share by which a ratio may miss a factor. Ours: a trainer's clock runs in checkpoints, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the trainer logged, and how it compares with ours."""

    tokens_per_second: float | None = None
    ratio: float | None = None
    note: str = ""


def audit_trainer(
    ranks: Sequence[RankFigures], figures: Mapping[str, float | None], world_size: int, copies: int
) -> Audit:
    """Compare the trainer's figure with the ``figures`` of all ranks."""
    for rank in ranks:
        since = (rank.steady_from or math.inf) - rank.record.start.time
        logs = [line for line in rank.record.logs if line.t >= since]
        seen = {name for line in logs for name in line.values}
        name = next((name for name in (*_PER_GPU, _SINCE_START) if name in seen), "")
        if name:
            break
    else:
        return Audit()
    logged = [finite(line.values.get(name)) for line in logs]
    if name in _PER_GPU:
        rate = middle(logged)
        ratios = [ratio(times(rate, world_size), figures["trainable_tokens_per_second"])]
    else:
        rate = next((value for value in reversed(logged) if value is not None), None)
        counted = [line for line in logs if _COUNTED in line.values]
        tokens = [line.values[_COUNTED] for line in counted]
        steps = counted[-1].step - counted[0].step if counted else 0
        per_step = ratio(tokens[-1] - tokens[0], steps) if counted else None
        per_second = times(per_step, figures["steps_per_second"])
        kinds = ("padded_tokens_per_second", "tokens_per_second")
        ratios = [ratio(per_second, figures[kind]) for kind in kinds]
    known = [value for value in ratios if value]
    if not known:
        return Audit(tokens_per_second=rate)
    accumulation = round(number_of(rank.settings, "gradient_accumulation") or 1)
    factors = _name_factors(world_size, accumulation, copies, is_per_gpu=name in _PER_GPU)
    # Padding counted or not: the kind that comes closest to a factor.
    _, value, factor = min(
        (abs(math.log(value / factor)), value, factor) for value in known for factor in factors
    )
    is_off = factor != 1.0 and abs(value / factor - 1.0) <= _CLOSE
    note = f"{name} of the trainer is {value:.3g} × ours: {factors[factor]}" if is_off else ""
    return Audit(tokens_per_second=rate, ratio=value, note=note)


def _name_factors(
    world_size: int, accumulation: int, copies: int, *, is_per_gpu: bool
) -> dict[float, str]:
    """Factor → what explains it; of equal ones, the later and likelier."""
    ranks, steps = f"{world_size} ranks", f"{accumulation} gradient accumulation steps"
    summed = f"it counts each token on all of {ranks}"
    if is_per_gpu:
        summed = f"it is the sum of {ranks}, not per GPU (axolotl#3362)"
    return {
        float(world_size * accumulation): f"{ranks} times {steps}",
        1.0 / (world_size * accumulation): f"1 ÷ ({ranks} times {steps})",
        accumulation / world_size: f"{steps} ÷ {ranks}",
        float(accumulation): f"it counts each token once for each of {steps}",
        1.0 / world_size: f"it counts one of {ranks}",
        float(copies): f"{copies} ranks that see the same batch are added up",
        world_size / accumulation: f"it is the sum of {ranks}, for one of {steps}",
        1.0 / accumulation: f"it counts one of {steps} (axolotl#3688)",
        float(world_size): summed,
        1.0: "",
    }
