"""The goals set for Axolotl with our replacements. Recorded, never asserted.

A ratio of runs whose results differ is none: what is wrong has no speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fast_axolotl.bench.axolotl_runs import OURS, STOCK
from fast_axolotl.bench.goals import Ratio, ratio_goal
from fast_axolotl.bench.matrix import Goal, PeerTiming

__all__ = ["losses_goal", "ratio_goals"]

_PREPROCESS = (2.0, 3.0)
"""What is asked for, and what is aimed at."""
_TRAIN = (4.0,)

_LEAST: Mapping[str, Sequence[float]] = {
    "preprocess-chat": _PREPROCESS,
    "preprocess-alpaca": _PREPROCESS,
    "preprocess-completion": _PREPROCESS,
    "preprocess-dpo": _PREPROCESS,
    "train": _TRAIN,
    "train-2-ranks": _TRAIN,
    "dedupe": (50.0,),
    "save": (20.0,),
    "pack_parallel": (30.0,),
    "len(sampler)": (15.0,),
    "process_datasets_for_packing": (25.0,),
    "V2 collator": (6.0,),
    "encode_streaming (without the tokenizer)": (10.0,),
}
"""Case or function to the least ratios of ours over stock's speed."""


def ratio_goals(name: str, timings: Sequence[PeerTiming]) -> list[Goal]:
    """The goals of a case, or of a function."""
    by_name = {timing.name: timing for timing in timings}
    goals = [ratio_goal(Ratio(OURS, STOCK, least), by_name) for least in _LEAST.get(name, ())]
    goals[1:] = [replace(goal, text=f"{goal.text}, aimed at") for goal in goals[1:]]
    wrong = [timing.reason for timing in timings if not timing.equal]
    if wrong:
        goals = [replace(goal, measured=None, detail=f"differs: {wrong[0]}") for goal in goals]
    return goals


def losses_goal(equal: int, steps: int) -> Goal:
    """Every logged loss equal to the last digit."""
    return Goal(
        text="logged losses and gradient norms equal to the last digit",
        target=steps,
        at_least=True,
        unit="steps",
        measured=equal,
        detail="the worst pair of runs",
    )
