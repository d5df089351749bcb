"""How a job scales, from runs on several numbers of GPUs.

*Efficiency* at N GPUs is throughput per GPU ÷ that at the smallest count. *Losses*: waiting for
data, a share s of the time at N and s₀ at the smallest count, costs s − s₀ · efficiency; so does
every part, and their sum is 1 − efficiency. Counts that were not run are left to ``predict``.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.arithmetic import middle
from fast_axolotl.record.units import count_words

_SAME = 0.10
"""Share by which batches or costs may differ and count as the same."""
_SETTINGS = ("data_paths", "num_workers", "sample_packing", "fsdp", "deepspeed_stage")
_MODEL = ("parameters", "layers", "adapter parameters")
"""What must be equal, in two digits; other models are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The figures of one run."""

    name: str
    gpus: int
    rate: float
    """Tokens/s, or samples/s, of the whole job."""
    batch: float
    """Samples of a step on all GPUs; tokens where samples were not counted."""
    step_seconds: float | None = None
    pair: str = ""
    """The same for runs of one round of a protocol."""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """Shares of the steady time: ``data``; ``communication``, exposed, without waiting for another
    rank's data; ``transfer``, of it, in which bytes move."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """What should be equal."""


def read_scaling_run(record: RunRecord, summary: RunSummary, pair: str, unit: str) -> Run:
    """What the summary of a run says about how its job scales."""
    rate, steps = getattr(summary, f"{unit}_per_second"), summary.steps_per_second
    settings, world, ranks = summary.settings, summary.world_size, summary.ranks
    if not rate or not steps:
        reason = summary.reasons.get(f"{unit}_per_second", "the run is too short")
        raise DataError(f"has no {unit}/s: {reason}", path=record.path)
    if len(ranks) < world and not settings.get("dispatcher"):
        text = f"holds {len(ranks)} of {world} ranks; copy the other nodes' rank-*.jsonl into it"
        raise DataError(text, path=record.path)
    exposed, pure = summary.exposed_communication_fraction, summary.pure_communication_fraction
    if world == 1:
        exposed = pure = 0.0
    if exposed is not None:
        # A rank that waits for another one's data does so in a collective.
        least = min(rank.stall_fraction or 0.0 for rank in ranks)
        exposed = min(1.0, max(0.0, exposed - (summary.stall_fraction or 0.0) + least))
    job: dict[str, Any] = {name: settings[name] for name in _SETTINGS if name in settings}
    job |= summary.environment.get("versions") or {}
    gpus = world
    for model in [rank.models[-1] for rank in record.ranks.values() if rank.models][:1]:
        gpus *= model.num_devices
        job |= {"GPU": model.device_name, "precision": model.dtype, "length": model.sequence_len}
        sizes = (model.num_parameters, model.layers, model.num_adapter)
        job |= {name: f"{size:.2g}" for name, size in zip(_MODEL, sizes, strict=True)}
    return Run(
        name=record.path,
        gpus=gpus,
        rate=rate,
        batch=(summary.samples_per_second or rate) / steps,
        step_seconds=summary.step_p50_seconds,
        pair=pair,
        figures={
            "data": summary.stall_fraction,
            "communication": exposed,
            "transfer": None if exposed is None or pure is None else min(pure, exposed),
        },
        job=job,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One number of GPUs; ``low`` and ``high`` are 95 % intervals."""

    gpus: int
    runs: int
    rate: float
    rate_per_gpu: float
    efficiency: float
    efficiency_low: float | None
    efficiency_high: float | None
    step_seconds: float | None
    batch_per_gpu: float
    losses: Mapping[str, float]
    """Points of efficiency, by where they go; their sum is 1 − efficiency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What runs at several counts say together."""

    unit: str
    kind: Literal["weak", "strong", "neither"]
    counts: tuple[Count, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def make_scaling(runs: Sequence[Run], compare: Callable[..., Any], *, unit: str) -> Scaling:
    """All counts, and what to know of them; ``compare`` is ``protocol.statistics.compare_runs``."""
    by_count: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.gpus):
        by_count[run.gpus].append(run)
    if len(by_count) < 2:
        sizes = (count_words(one, "GPU") for one in by_count)
        told = " on ".join((count_words(len(runs), "run"), *sizes))
        raise UsageError(
            f"{told}: pass runs on two or more numbers of GPUs; see protocol --world-size"
        )
    (smallest, first), *_ = by_count.items()
    rounds = {run.pair: run.rate / smallest for run in first if run.pair}
    counts: list[Count] = []
    for count, own in by_count.items():
        # What drifts on the machine falls on all runs of one round of a protocol alike.
        pairs = [(rounds[run.pair], run.rate / count) for run in own if run.pair in rounds]
        rates = [[run.rate / run.gpus for run in some] for some in (first, own)]
        is_paired = len(pairs) > 1
        against = compare(*(zip(*pairs, strict=True) if is_paired else rates), is_paired=is_paired)
        rate = statistics.geometric_mean(rates[1])
        counts.append(
            Count(
                gpus=count,
                runs=len(own),
                rate=rate * count,
                rate_per_gpu=rate,
                efficiency=against.value,
                efficiency_low=against.low if counts else None,
                efficiency_high=against.high if counts else None,
                step_seconds=middle(run.step_seconds for run in own),
                batch_per_gpu=statistics.median(run.batch for run in own) / count,
                losses=_divide_loss(first, own, against.value) if counts else {},
            )
        )
    warnings = []
    for key in dict.fromkeys(key for run in runs for key in run.job):
        values = {str(run.job[key]): run.name for run in runs if key in run.job}
        places = ", ".join(f"{text} in {name}" for text, name in list(values.items())[:3])
        if len(values) > 1 and key in _MODEL:
            text = f"another model: {key} is {places}; scaling compares runs of the same job"
            raise DataError(text, path=runs[-1].name)
        if len(values) > 1:
            warnings.append(f"These are not the same job: {key} is {places}.")
    warnings += warn_of_cost([(one.gpus, 1 / one.efficiency) for one in counts])
    notes = []
    if any(one.runs < 2 for one in counts):
        notes.append("A single run has no interval: repeat the runs (protocol --pairs 3).")
    if any(math.isnan(_mean(own, "communication")) for own in by_count.values()):
        notes.append("The unexplained part includes communication: measure with --profile-steps 5.")
    batches = [one.batch_per_gpu for one in counts]
    wholes = [one.batch_per_gpu * one.gpus for one in counts]
    is_weak, is_strong = (max(some) <= (1 + _SAME) * min(some) for some in (batches, wholes))
    return Scaling(
        unit=unit,
        kind="weak" if is_weak else "strong" if is_strong else "neither",
        counts=tuple(counts),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _mean(runs: Sequence[Run], name: str) -> float:
    """NaN where a run does not tell."""
    values = [run.figures.get(name) for run in runs]
    return statistics.fmean(math.nan if value is None else value for value in values)


def _divide_loss(first: Sequence[Run], own: Sequence[Run], efficiency: float) -> dict[str, float]:
    exposed, transfer, data = (
        _mean(own, name) - _mean(first, name) * efficiency
        for name in ("communication", "transfer", "data")
    )
    losses = {
        "data": data,
        "transfer": transfer,
        "waiting for the slowest": exposed - transfer,
        "communication": exposed if math.isnan(transfer) else math.nan,
    }
    losses = {name: value for name, value in losses.items() if not math.isnan(value)}
    return {**losses, "not explained": 1 - efficiency - sum(losses.values())}


def warn_of_cost(costs: Sequence[tuple[int, float]]) -> Iterator[str]:
    """The first number of GPUs on which the same work costs clearly more than on fewer."""
    cheapest, least = min(costs, key=lambda item: item[1], default=(0, 0.0))
    for gpus, cost in costs:
        if gpus > cheapest and cost >= (1 + _SAME) * least:
            yield (
                f"More GPUs cost more: the same work on {count_words(gpus, 'GPU')} costs "
                f"{cost / least:.2f} times as much as on {cheapest}."
            )
            return
