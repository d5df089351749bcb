"""The tokens per second that a trainer logs of its own, held against ours.

Trainers count what is theirs to count: Axolotl trainable tokens per GPU, transformers all tokens,
with or without padding, since the training began. A figure that is off by the number of ranks or
of accumulated micro-batches is a mistake of definition, and a note names it: Axolotl reported the
sum over all GPUs as that of one (axolotl#3362), and one micro-batch for a whole step
(axolotl#3688).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.measure.ready_queue import number_of
from fast_axolotl.record.arithmetic import finite, middle, ratio

__all__ = ["Audit", "audit_trainer"]

_TRAINABLE, _ALL = (
    ("trainable_tokens_per_second",),
    ("padded_tokens_per_second", "tokens_per_second"),
)
_LOGGED = {
    "tokens/train_per_sec_per_gpu": (_TRAINABLE, True),
    "tokens_per_second_per_gpu": (_TRAINABLE, True),
    "train_tokens_per_second": (_ALL, False),
}
"""Name in the trainer's log → the figures of ours that it may mean, and whether it is per GPU."""

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
    for name, (kinds, is_per_gpu) in _LOGGED.items():
        for rank in ranks:
            since = (rank.steady_from or math.inf) - rank.record.start.time
            logs = [line for line in rank.record.logs if finite(line.values.get(name)) is not None]
            steady = [line.values[name] for line in logs if line.t >= since]
            # One that counts from the beginning is best at the end.
            logged = middle(steady if is_per_gpu else steady[-1:])
            if logged is not None:
                break
        else:
            continue
        accumulation = round(number_of(rank.settings, "gradient_accumulation") or 1)
        factors = _name_factors(world_size, accumulation, copies, is_per_gpu=is_per_gpu)
        gpus = world_size if is_per_gpu else 1
        ratios = [ratio(logged * gpus, figures[kind]) for kind in kinds]
        known = [value for value in ratios if value]
        if not known:
            return Audit(tokens_per_second=logged)
        # Padding counted or not: the one that comes closest to a factor.
        value = min(known, key=lambda one: min(abs(math.log(one / factor)) for factor in factors))
        factor = min(factors, key=lambda one: abs(math.log(value / one)))
        is_off = factor != 1.0 and abs(value / factor - 1.0) <= _CLOSE
        note = f"{name} of the trainer is {value:.3g} × ours: {factors[factor]}" if is_off else ""
        return Audit(tokens_per_second=logged, ratio=value, note=note)
    return Audit()


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
