"""How a job scales: runs at several numbers of GPUs beside each other.

*Efficiency* at N GPUs is throughput per GPU ÷ that at the smallest count: weak scaling where the
batch per GPU stays the same, strong scaling where the global batch does.

*Losses.* A token takes N ÷ throughput GPU-seconds. Waiting for data, a share s of them at N and s₀
at the smallest count, costs s − s₀ · efficiency. So for every part; their sum is 1 − efficiency.

Only what was measured is compared. Counts that were not run are predicted by ``predict``, which
knows nodes, layouts and memory; a curve through few counts knows none of them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.arithmetic import middle
from fast_axolotl.record.thresholds import FREE_STALL
from fast_axolotl.record.units import count_words, format_count, format_seconds, format_share

_WORTH = 0.5
"""Of what a GPU brings at the smallest count, what an added one must bring."""
_SAME = 0.10
"""Share by which batches, costs or efficiencies may differ and count as the same."""
_SETTINGS = ("data_paths", "num_workers", "sample_packing", "fsdp", "deepspeed_stage")


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
    rank's data; ``transfer``, of it, in which bytes move; ``straggler``."""
    is_dispatched: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    """What has to be equal."""
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
    straggler = 0.0 if summary.straggler_part == "data" else summary.straggler_fraction
    if world == 1:
        exposed = pure = straggler = 0.0
    if exposed is not None:
        # A rank that waits for another one's data does so in a collective.
        least = min(rank.stall_fraction or 0.0 for rank in ranks)
        exposed = min(1.0, max(0.0, exposed - (summary.stall_fraction or 0.0) + least))
    job: dict[str, Any] = {name: settings[name] for name in _SETTINGS if name in settings}
    job |= summary.environment.get("versions") or {}
    sizes, gpus = {}, world
    for model in [rank.models[-1] for rank in record.ranks.values() if rank.models][:1]:
        gpus *= model.num_devices
        job |= {"GPU": model.device_name, "precision": model.dtype, "length": model.sequence_len}
        sizes = {"parameters": model.num_total or model.num_parameters, "layers": model.layers}
        sizes["adapter parameters"] = model.num_adapter
    batch = (summary.samples_per_second or rate) / steps
    return Run(
        name=record.path,
        gpus=gpus,
        rate=rate,
        batch=batch,
        step_seconds=summary.step_p50_seconds,
        pair=pair,
        figures={
            "data": summary.stall_fraction,
            "communication": exposed,
            "transfer": None if exposed is None or pure is None else min(pure, exposed),
            "straggler": straggler,
        },
        is_dispatched=bool(settings.get("dispatcher")),
        model=sizes,
        job=job,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One number of GPUs; ``low`` and ``high`` are 95 % intervals."""

    gpus: int
    runs: int
    rate: float
    rate_low: float | None
    rate_high: float | None
    rate_per_gpu: float
    efficiency: float
    efficiency_low: float | None
    efficiency_high: float | None
    step_seconds: float | None
    batch_per_gpu: float
    losses: Mapping[str, float]
    """Points of efficiency, by where they go; their sum is 1 − efficiency."""
    added: float | None
    """What a GPU added to the count before brings ÷ what one brings at the smallest count."""


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
    base: list[float] = []
    for count, own in by_count.items():
        values = [run.rate / count for run in own]
        base, last = base or values, counts[-1] if counts else None
        each = compare([1.0] * len(values), values)
        # What drifts on the machine falls on all runs of one round of a protocol alike.
        pairs = [(rounds[run.pair], run.rate / count) for run in own if run.pair in rounds]
        if len(pairs) > 1:
            against = compare(*zip(*pairs, strict=True))
        else:
            against = compare(base, values, is_paired=False)
        rate, added = each.value * count, None
        if last is not None:
            added = (rate - last.rate) / (count - last.gpus) / counts[0].rate_per_gpu
        counts.append(
            Count(
                gpus=count,
                runs=len(own),
                rate=rate,
                rate_low=each.low and each.low * count,
                rate_high=each.high and each.high * count,
                rate_per_gpu=each.value,
                efficiency=against.value,
                efficiency_low=against.low if last else None,
                efficiency_high=against.high if last else None,
                step_seconds=middle(run.step_seconds for run in own),
                batch_per_gpu=statistics.median(run.batch for run in own) / count,
                losses=_divide_loss(first, own, against.value) if last else {},
                added=added,
            )
        )
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
        warnings=(*_compare_jobs(runs), *_warn(counts, by_count, unit)),
        notes=tuple(notes),
    )


def _mean(runs: Sequence[Run], name: str) -> float:
    """NaN where a run does not tell."""
    values = [run.figures.get(name) for run in runs]
    return statistics.fmean(math.nan if value is None else value for value in values)


def _divide_loss(first: Sequence[Run], own: Sequence[Run], efficiency: float) -> dict[str, float]:
    def points(name: str) -> float:
        return _mean(own, name) - _mean(first, name) * efficiency

    exposed, transfer, slowest = map(points, ("communication", "transfer", "straggler"))
    losses = {
        "data": points("data"),
        "transfer": transfer,
        "communication": exposed if math.isnan(transfer) else math.nan,
        "waiting for the slowest": slowest if math.isnan(exposed) else exposed - transfer,
    }
    losses = {name: value for name, value in losses.items() if not math.isnan(value)}
    return {**losses, "not explained": 1 - efficiency - sum(losses.values())}


def _compare_jobs(runs: Sequence[Run]) -> list[str]:
    """What differs between runs that should be one job; another model is refused."""
    known: dict[str, Run] = {}
    for run in runs:
        for key, value in run.model.items():
            other = known.setdefault(key, run)
            if abs(value - other.model[key]) > 0.02 * other.model[key]:
                text = f"another model: {value:,} {key}, and {other.model[key]:,} in {other.name}"
                raise DataError(f"{text}; scaling compares runs of the same job", path=run.name)
    warnings = []
    for key in dict.fromkeys(key for run in runs for key in run.job):
        values = {str(run.job[key]): run.name for run in runs if key in run.job}
        if len(values) > 1:
            places = ", ".join(f"{text} in {name}" for text, name in list(values.items())[:3])
            warnings.append(f"These are not the same job: {key} is {places}.")
    return warnings


def _warn(counts: Sequence[Count], by_count: Mapping[int, Sequence[Run]], unit: str) -> list[str]:
    one, *_, other = counts
    few, many = (count_words(end.gpus, "GPU") for end in (one, other))
    found, less = [], 1 - _SAME
    is_lower, is_small = other.efficiency < less, other.batch_per_gpu < less * one.batch_per_gpu
    if is_lower and is_small and (other.step_seconds or 0) < (one.step_seconds or 0):
        found.append(
            f"Low latency is not high throughput: a step takes {format_seconds(other.step_seconds)}"
            f" on {many} and {format_seconds(one.step_seconds)} on {few}, but a GPU does only "
            f"{format_share(other.efficiency, decimals=0)} of the work per second, with a batch of "
            f"{format_count(other.batch_per_gpu)} instead of {format_count(one.batch_per_gpu)}."
        )
    stalls = [_mean(by_count[end.gpus], "data") for end in (one, other)]
    if stalls[1] - stalls[0] >= FREE_STALL:
        one_reads = any(run.is_dispatched for run in by_count[other.gpus])
        why = "rank 0 reads for all ranks" if one_reads else "the ranks share a disk or CPU cores"
        shares = (format_share(stall) for stall in stalls)
        found.append(f"Waiting for data grows ({' → '.join(shares)} of the time): {why}.")
    unpaid = next((count for count in counts[1:] if (count.added or 0.0) < _WORTH), None)
    if unpaid is not None:
        found.append(
            f"From {unpaid.gpus} GPUs on, an added GPU brings less than half of what one brings on "
            f"{few}, so its {unit} cost more than twice as much."
        )
    if is_lower:
        dearer = f"{1 / other.efficiency:.2f} times as much as on {few}"
        found.append(f"More GPUs cost more: {unit} on {many} cost {dearer}.")
    return found
