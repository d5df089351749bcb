"""Tokens/s, memory, time, money and energy of a run on other GPUs, and what binds it.

A *reference* is what is known of the user's own run: its layout and tokens/s, and where they were
measured the share of exposed communication, memory, power and what the loader could deliver. It
sets the level of the stack: measured ÷ predicted. Without one, the level is that of published
stacks, and the interval is wide.

Intervals are of 90 %, in logarithms; their widths are the errors of ``benchmarks.plan_error``,
added in quadrature for all that differs between the reference and the candidate. A candidate keeps
the global batch by accumulating less, and changes what does not fit: sharding, recomputation, the
micro-batch, tensor parallelism, in this order. What is not known (congestion, topology, uneven
experts) is not predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fast_axolotl.errors import UsageError
from fast_axolotl.plan.hardware import Gpu, Price
from fast_axolotl.plan.memory import Layout, Memory, predict_memory
from fast_axolotl.plan.shape import Shape
from fast_axolotl.plan.steptime import StepTime, predict_step
from fast_axolotl.record.units import format_bytes, format_count, format_share

__all__ = ["Candidate", "Plan", "Reference", "find_level", "interval_width", "make_plan"]

_SAME, _OTHER, _EXPERTS = 0.11, 0.17, 0.45
"""Half of a 90 % interval (log): the reference's own model and layout on more GPUs; another model,
length, recomputation or parallelism; another model with experts."""
_OTHER_GPU, _OTHER_PRECISION = 0.27, 0.15
_UNKNOWN_STACK, _UNKNOWN_EXPERTS = 0.40, 0.55
_COMMUNICATION = 0.5
"""Of the predicted communication that the reference did not have: links reach half or twice it."""
_COMMUNICATION_BINDS = 0.20
"""Share of a step; the verdict's line, too."""
_USABLE_MEMORY = 0.92
"""Of a GPU: the rest is CUDA's own, and fragments."""
_DEARER = 1.10
"""How much more a run must cost to be worth a warning."""
_LARGE_BATCH = 4.0
"""Times the reference's global batch from which learning is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A run that was measured."""

    gpu: Gpu
    layout: Layout
    tokens_per_second: float
    """Of the whole job, waiting for data taken out."""
    communication_share: float | None = None
    """Exposed, of a step, where a profiler saw it."""
    memory_bytes: float | None = None
    """Highest of one GPU, by NVML."""
    power_watts: float | None = None
    """Mean of one GPU."""
    loader_tokens_per_second: float | None = None
    """What the loader of all ranks could deliver."""
    loader_scales: bool = True
    """Whether every rank reads for itself, so that more ranks bring more readers."""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One number of GPUs. ``None`` is not known, or impossible: ``reason`` says which."""

    gpus: int
    layout: Layout
    changes: tuple[str, ...] = ()
    """How the layout differs from the reference's, so that it fits."""
    tokens_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    step_seconds: float | None = None
    communication_share: float | None = None
    """Exposed communication and pipeline bubbles, of a step."""
    memory: Memory
    memory_bytes: float
    """With what the reference needed beyond its own prediction."""
    binds: str
    """compute, memory, communication, or data."""
    demand_tokens_per_second: float | None = None
    """What the GPUs could take of a loader that is fast enough."""
    loader_tokens_per_second: float | None = None
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    dollars: float | None = None
    dollars_low: float | None = None
    dollars_high: float | None = None
    energy_kwh: float | None = None
    global_batch_tokens: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All candidates, and what to know about them."""

    model_parameters: float
    gpu: str
    tokens: float | None
    is_calibrated: bool
    level: float
    """Measured ÷ predicted tokens/s of the reference; 1 without one."""
    price_per_hour: float | None
    price_source: str
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    """Warnings with their evidence, one sentence or two each."""
    assumptions: tuple[str, ...]


def find_level(
    shape: Shape, reference: Reference, *, network: float | None = None
) -> tuple[float, float]:
    """How fast the stack computes, and how slow its communication is, relative to the prediction.

    Where communication was measured, the two are told apart; else one factor is of both.
    """
    step = predict_step(shape, reference.gpu, reference.layout, network=network)
    measured = reference.layout.step_tokens / reference.tokens_per_second
    share = reference.communication_share
    if share is None or not step.communication:
        return step.total / measured, 1.0
    level = (step.total - step.communication) / (measured * (1 - share))
    slowness = measured * share / step.communication
    return level, min(5.0, max(0.2, slowness * level))


def interval_width(reference: Reference | None, shape: Shape, gpu: Gpu, layout: Layout,
                   reference_shape: Shape | None = None) -> float:  # fmt: skip
    """Half of the 90 % interval of log tokens/s, but for communication."""
    if reference is None:
        return _UNKNOWN_EXPERTS if shape.experts else _UNKNOWN_STACK
    known, other = reference.layout, reference_shape or shape
    names = ("tp", "pp", "cp", "ep", "sharding", "recompute", "method", "seq_len")
    is_same = all(getattr(known, name) == getattr(layout, name) for name in names)
    # A batch half or twice as large is the same; far from that, kernels run at another rate.
    is_same &= 0.45 < layout.tokens / known.tokens < 2.2
    parts = [_SAME]
    if not is_same or other != shape:
        parts = [_EXPERTS if shape.experts or other.experts else _OTHER]
    if gpu != reference.gpu:
        parts.append(_OTHER_GPU)
    if layout.precision != known.precision:
        parts.append(_OTHER_PRECISION)
    return math.hypot(*parts)


def make_plan(
    shape: Shape,
    gpu: Gpu,
    counts: Sequence[int],
    layout: Layout,
    *,
    reference: Reference | None = None,
    tokens: float | None = None,
    price: Price | None = None,
    network: float | None = None,
) -> Plan:
    """A candidate for each number of GPUs; ``layout`` is the reference's, or where to start."""
    level, slowness = (1.0, 1.0)
    beyond = 0.0
    if reference is not None:
        level, slowness = find_level(shape, reference, network=network)
        own = predict_memory(shape, reference.layout).total
        beyond = max(0.0, (reference.memory_bytes or own) - own)
    candidates = []
    for count in sorted(set(counts)):
        if count < 1:
            raise UsageError(f"--gpus {count}: give numbers of at least 1")
        chosen, changes = _fit(shape, gpu, layout, count, beyond)
        memory = predict_memory(shape, chosen)
        common = {
            "gpus": count,
            "layout": chosen,
            "changes": changes,
            "memory": memory,
            "memory_bytes": memory.total + beyond,
            "global_batch_tokens": chosen.step_tokens,
        }
        usable = _USABLE_MEMORY * gpu.memory_gb * 1e9
        if memory.total + beyond > usable:
            reason = (
                f"needs {format_bytes(memory.total + beyond)} per GPU, and a {gpu.key} has "
                f"{format_bytes(usable)} to use"
            )
            candidates.append(Candidate(**common, binds="memory", reason=reason))  # type: ignore[arg-type]
            continue
        step = predict_step(shape, gpu, chosen, network=network)
        communication = step.communication * slowness
        seconds = (step.total - step.communication + communication) / level
        share = (communication + step.bubble) / (seconds * level)
        width = interval_width(reference, shape, gpu, chosen)
        width = math.hypot(width, _COMMUNICATION * _new_communication(shape, reference, step))
        rate = step.tokens / seconds
        low, high = rate * math.exp(-width), rate * math.exp(width)
        binds = "communication" if share >= _COMMUNICATION_BINDS else "compute"
        demand, ceiling = rate, None
        if reference is not None and reference.loader_tokens_per_second is not None:
            grown = count / reference.layout.gpus if reference.loader_scales else 1.0
            ceiling = reference.loader_tokens_per_second * grown
            if ceiling < rate:
                binds = "data"
                rate, low, high = (min(value, ceiling) for value in (rate, low, high))
        times = (
            (None, None, None) if tokens is None else (tokens / rate, tokens / high, tokens / low)
        )
        hourly = None if price is None else price.dollars * count / 3600
        costs = [None if hourly is None or time is None else hourly * time for time in times]
        watts = None if reference is None or gpu != reference.gpu else reference.power_watts
        energy = None if watts is None or times[0] is None else watts * count * times[0] / 3.6e6
        candidates.append(
            Candidate(
                **common,  # type: ignore[arg-type]
                tokens_per_second=rate,
                low=low,
                high=high,
                step_seconds=step.tokens / rate,
                communication_share=share,
                binds=binds,
                demand_tokens_per_second=demand,
                loader_tokens_per_second=ceiling,
                seconds=times[0],
                seconds_low=times[1],
                seconds_high=times[2],
                dollars=costs[0],
                dollars_low=costs[1],
                dollars_high=costs[2],
                energy_kwh=energy,
            )
        )
    return Plan(
        model_parameters=shape.parameters,
        gpu=gpu.key,
        tokens=tokens,
        is_calibrated=reference is not None,
        level=level,
        price_per_hour=None if price is None else price.dollars,
        price_source="" if price is None else price.source,
        candidates=tuple(candidates),
        notes=tuple(_notes(candidates, layout, reference)),
        assumptions=tuple(_assume(shape, gpu, reference, network)),
    )


def _new_communication(shape: Shape, reference: Reference | None, step: StepTime) -> float:
    """Predicted communication, as a share of a step, that the reference did not measure."""
    share = step.communication / step.total
    if reference is None:
        return 0.0  # published stacks communicate: their spread has it
    own = predict_step(shape, reference.gpu, reference.layout)
    return max(0.0, share - own.communication / own.total)


def _fit(
    shape: Shape, gpu: Gpu, layout: Layout, count: int, beyond: float
) -> tuple[Layout, tuple[str, ...]]:
    """The layout on ``count`` GPUs at the same global batch, changed until it fits."""
    model = layout.tp * layout.pp * layout.cp
    if count % model:
        layout = replace(layout, gpus=count, tp=1, pp=1, cp=1)
        model = 1
    wanted = layout.accumulation * layout.dp * model / count
    ep = math.gcd(layout.ep, count)
    shard = layout.shard if layout.shard and count % layout.shard == 0 else 0
    start = replace(layout, gpus=count, accumulation=max(1, round(wanted)), ep=ep, shard=shard)
    usable = _USABLE_MEMORY * gpu.memory_gb * 1e9
    changes: list[str] = []
    steps: list[tuple[str, dict[str, object]]] = []
    if count > 1 and layout.sharding != "fsdp":
        steps.append(("shards weights (FSDP or ZeRO-3)", {"sharding": "fsdp"}))
    if layout.recompute != "full":
        steps.append(("recomputes activations", {"recompute": "full"}))
    if layout.micro_batch > 1:
        more = max(1, round(start.accumulation * layout.micro_batch))
        steps.append(("has a micro-batch of 1", {"micro_batch": 1.0, "accumulation": more}))
    for size in (2, 4, 8):
        if (
            size > layout.tp
            and size <= gpu.node_size
            and count % (size * layout.pp * layout.cp) == 0
        ):
            steps.append((f"splits layers over {size} GPUs (TP)", {"tp": size}))
    chosen = start
    for name, change in steps:
        if predict_memory(shape, chosen).total + beyond <= usable:
            break
        kept = chosen
        chosen = replace(chosen, **change)  # type: ignore[arg-type]
        if "tp" in change:
            more = max(1, round(start.step_tokens / (chosen.step_tokens / chosen.accumulation)))
            chosen = replace(chosen, accumulation=more)
            changes = [text for text in changes if "(TP)" not in text]
        if predict_memory(shape, chosen).total < predict_memory(shape, kept).total:
            changes.append(name)
        else:
            chosen = kept
    return chosen, tuple(changes)


def _notes(
    candidates: Sequence[Candidate], layout: Layout, reference: Reference | None
) -> list[str]:
    """What users get wrong, where these candidates are about to."""
    notes = []
    possible = [one for one in candidates if one.tokens_per_second]
    if reference is not None and reference.layout.gpus == 1:
        many = [one for one in possible if one.gpus > 1 and one.binds != "data"]
        if many:
            last = many[-1]
            naive = reference.tokens_per_second * last.gpus
            notes.append(
                f"The run used one GPU, so no communication was measured. {last.gpus} times its "
                f"rate would be {format_count(naive)} tokens/s; predicted are "
                f"{format_count(last.tokens_per_second)}, with "
                f"{format_share(last.communication_share, decimals=0)} of a step in communication, "
                "from the links' rates alone. Measure a short run on two nodes before you rent more."
            )
    for one in possible:
        if one.binds == "data":
            need = format_count(one.demand_tokens_per_second)
            notes.append(
                f"At {one.gpus} GPUs the loader must deliver {need} tokens/s; yours "
                f"gives {format_count(one.loader_tokens_per_second)}."
            )
            break
    own = (reference.layout if reference is not None else layout).step_tokens
    large = [one for one in possible if one.global_batch_tokens > _LARGE_BATCH * own]
    if reference is not None and large:
        notes.append(
            f"From {large[0].gpus} GPUs on the global batch is too large to be the same training: "
            f"{format_count(large[0].global_batch_tokens)} tokens per step instead of "
            f"{format_count(own)}, because accumulation cannot go below 1. Fewer steps see the same "
            "tokens: raise the learning rate and the warm-up with care, and compare losses."
        )
    paid = [one for one in possible if one.dollars is not None]
    cheapest = min(paid, key=lambda one: one.dollars or 0.0, default=None)
    for one in paid:
        if cheapest and one.gpus > cheapest.gpus and one.dollars and cheapest.dollars:
            ratio = one.dollars / cheapest.dollars
            if ratio >= _DEARER:
                notes.append(
                    f"More GPUs cost more: {one.gpus} cost {ratio:.2f} times as much per run as "
                    f"{cheapest.gpus}."
                )
                break
    return notes


def _assume(
    shape: Shape, gpu: Gpu, reference: Reference | None, network: float | None
) -> list[str]:
    lines = []
    if reference is None:
        lines.append(
            "No run of yours calibrates this plan: the rates are those of published, well-tuned "
            "stacks, and the intervals are wide. Five minutes of fast-axolotl measure narrow them."
        )
    elif gpu != reference.gpu:
        lines.append(
            f"The run was on {reference.gpu.key}: its level is assumed to hold on {gpu.key}."
        )
    if shape.is_guess:
        lines.append(
            "Only the number of parameters is known; the model's widths are the usual ones."
        )
    rate = gpu.network if network is None else network
    lines.append(f"Between nodes of {gpu.node_size}: {rate:g} GB/s per GPU, no congestion.")
    if reference is not None and reference.loader_tokens_per_second is not None:
        if reference.loader_scales:
            lines.append("Every rank brings loader workers and processors of its own.")
        else:
            lines.append("One rank reads for all, so the loader does not grow with the GPUs.")
    return lines
