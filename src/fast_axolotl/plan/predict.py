"""Predict tokens/s, memory, time and cost on other GPUs, and what limits the run.

A *reference* is the user's own run: measured ÷ predicted sets the level of the stack. Without one
it is that of published stacks. Intervals are of 90 %, in logarithms; their widths are the errors of
``benchmarks.plan_error``, added in quadrature for all that differs between reference and candidate.

Rates are of the steady phase without waiting for data, in positions, padding included; bf16 weights
and moments are assumed. A candidate keeps the global batch, and changes what does not fit.
Congestion, topology and uneven experts are not predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from statistics import median
from typing import Any

from fast_axolotl.errors import DataError
from fast_axolotl.plan.memory import Layout, Memory, adapter_parameters, predict_memory
from fast_axolotl.plan.scale import warn_of_cost, warn_of_latency
from fast_axolotl.plan.shape import Shape, guess_shape
from fast_axolotl.plan.steptime import predict_step
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.arithmetic import times
from fast_axolotl.record.devices import Gpu, find_gpu
from fast_axolotl.record.thresholds import BOUND_COMMUNICATION
from fast_axolotl.record.units import format_bytes, format_count, format_share

_SAME, _OTHER, _EXPERTS = 0.12, 0.19, 0.48
"""Half of a 90 % interval (log): the reference's own model and layout on more GPUs; another model,
length, recomputation or parallelism; the same with experts."""
_OTHER_GPU, _OTHER_PRECISION = 0.27, 0.15
_UNKNOWN_STACK, _UNKNOWN_EXPERTS = 0.40, 0.55
_COMMUNICATION = 0.5
"""Of the predicted communication that the reference did not have: links reach half or twice it."""
_FROM_ONE = 0.15
"""The same of a plan for several GPUs from a run on one, whose stack was not seen to communicate.
Ours: no published row has both."""
_HUGE_BATCH = 16e6
"""Tokens per step: what Llama 3.1 405B ended with."""
_USABLE_MEMORY = 0.92
"""Of a GPU: the rest is CUDA's own, and fragments."""
_ODD_LEVEL = (0.2, 1.8)
"""Levels outside of which a record is doubted: published stacks have 0.5 to 1.4."""
_LARGE_BATCH = 4.0
"""Times the reference's global batch from which the training is another."""


def find_price(gpu: Gpu) -> tuple[float | None, str]:
    """Dollars of one device per hour, and their source: the median over the clouds that list it on
    demand, by the dated table beside this file; ``None`` where none does."""
    table = json.loads(files("fast_axolotl.plan").joinpath("gpu_prices.json").read_bytes())
    dollars = sorted(row[2] for row in table["prices"] if row[1] in gpu.priced_as)
    if not dollars:
        return None, "unknown; pass --price"
    source = f"median of {len(dollars)} offers from {dollars[0]:g} to {dollars[-1]:g}, "
    return median(dollars), f"{source}{table['source']}, {table['date']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A run that was measured; ``None`` was not."""

    gpu: Gpu
    layout: Layout
    tokens_per_second: float
    """Positions of the whole job, padding included, waiting for data taken out."""
    real_share: float = 1.0
    """Of the positions, those that are tokens and not padding."""
    communication_share: float | None = None
    """Exposed, of a step."""
    memory_bytes: float | None = None
    """Highest of one GPU, by NVML."""
    loader_tokens_per_second: float | None = None
    """What the loaders of all ranks could deliver."""
    loader_scales: bool = True
    """Whether every rank reads for itself, so that more ranks bring more readers."""


def read_reference(
    record: RunRecord, summary: RunSummary, shape: Shape | None = None
) -> tuple[Shape, Reference]:
    """The model and the run; ``shape`` is the model's own, where its config was given.

    Otherwise its weights, layers and attention are the recorded ones, divided among matrices as is
    usual.
    """
    model = next((rank.models[-1] for rank in record.ranks.values() if rank.models), None)
    if model is None or model.device_name is None:
        raise DataError(
            "does not name the model and the GPU, so it cannot calibrate a plan; measure a "
            "training on a GPU, or plan without a record: --model config.json --gpu H100-SXM",
            path=record.path,
        )
    rate, stall = summary.tokens_per_second, min(0.95, summary.stall_fraction or 0.0)
    if not rate or not summary.steps_per_second:
        reason = summary.reasons.get("tokens_per_second", "the run is too short")
        raise DataError(f"has no tokens/s: {reason}", path=record.path)
    if shape is None:
        active = float(model.num_parameters - model.num_adapter)
        whole = max(active, float(model.num_total or model.num_parameters) - model.num_adapter)
        layers, width = max(1, model.layers), max(64, model.attention_width)
        # What all weights have beyond those that a token is multiplied with is the input's table.
        table = whole - active if whole < 1.5 * active else 0.0
        words = round(table / width) if table > 0.005 * active else 32_000
        shape = guess_shape(whole, active, layers=layers, hidden=width, vocabulary=words)
    config = summary.settings.get("config")
    settings = {**(config if isinstance(config, dict) else {}), **summary.settings}

    def number(*names: str) -> int:
        found = (settings.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), 1)

    tp, pp = number("tensor_parallel", "tensor_parallel_size"), number("pipeline_parallel")
    cp = number("context_parallel", "context_parallel_size", "sequence_parallel_degree")
    replicas = summary.data_parallel_size or max(1, summary.world_size // (tp * pp * cp))
    if replicas * tp * pp * cp != summary.world_size:
        tp, pp, cp, replicas = 1, 1, 1, summary.world_size
    accumulation = number("gradient_accumulation", "gradient_accumulation_steps")
    positions = max(rate, summary.padded_tokens_per_second or rate)
    each = positions / summary.steps_per_second / (accumulation * replicas)
    seq_len = model.sequence_len or round(each / number("micro_batch_size", "batch_size"))
    seq_len = max(1, seq_len)
    stage = 3 if settings.get("fsdp") else settings.get("deepspeed_stage") or 0
    sharding: Any = ("ddp", "zero1", "zero2", "fsdp")[min(3, int(stage))]
    method: Any = "qlora" if settings.get("adapter") == "qlora" else "lora"
    layout = Layout(
        gpus=tp * pp * cp * replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        sharding=sharding,
        seq_len=seq_len,
        attended=summary.mean_attended_length,
        micro_batch=each / seq_len,
        accumulation=accumulation,
        recompute="full" if model.is_checkpointed else "none",
        method=method if model.num_adapter else "full",
        lora_rank=max(1, round(model.num_adapter / adapter_parameters(shape, 1))),
        precision="fp8" if model.dtype == "float8" else "bf16",
    )
    exposed = summary.exposed_communication_fraction
    return shape, Reference(
        gpu=find_gpu(model.device_name),
        layout=layout,
        tokens_per_second=positions / (1 - stall),
        real_share=rate / positions,
        communication_share=None if exposed is None else min(0.9, exposed / (1 - stall)),
        memory_bytes=summary.gpu_memory_bytes,
        loader_tokens_per_second=times(summary.reader_ratio, rate),
        loader_scales=not settings.get("dispatcher"),
    )


@dataclass(frozen=True, slots=True)
class Range:
    """A value with its 90 % interval."""

    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One number of one kind of GPU. ``None`` is not known, or impossible."""

    gpu: str
    gpus: int
    layout: Layout
    changes: str = ""
    """How the layout differs from the reference's, so that it fits; or why it cannot."""
    global_batch_tokens: float
    memory: Memory
    memory_bytes: float
    """With what the reference needed beyond its own prediction."""
    binds: str
    """compute, memory, communication, or data."""
    tokens_per_second: Range | None = None
    step_seconds: float | None = None
    communication_share: float | None = None
    """Exposed communication and pipeline bubbles, of a step."""
    demand_tokens_per_second: float | None = None
    """What the GPUs could take of a loader that is fast enough."""
    loader_tokens_per_second: float | None = None
    seconds: Range | None = None
    dollars: Range | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All candidates, and what to know about them."""

    gpu: str
    parameters: float
    tokens: float | None
    level: float | None
    """Measured ÷ predicted tokens/s of the reference; ``None`` without one."""
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    """Warnings with their evidence, what layouts had to change, what is assumed, the price."""


def interval_width(
    reference: Reference | None, shape: Shape, gpu: Gpu, layout: Layout, own: Shape | None = None
) -> float:
    """Half of the 90 % interval of log tokens/s, but for communication; ``own`` is the shape of the
    reference, where it is another."""
    if reference is None:
        return _UNKNOWN_EXPERTS if shape.experts else _UNKNOWN_STACK
    known = reference.layout
    names = ("tp", "pp", "cp", "ep", "sharding", "recompute", "method", "seq_len")
    is_same = all(getattr(known, name) == getattr(layout, name) for name in names)
    # A batch half or twice as large is the same; far from that, kernels run at another rate.
    is_same &= 0.45 < layout.tokens / known.tokens < 2.2 and (own or shape) == shape
    base = _SAME if is_same else _EXPERTS if shape.experts or (own or shape).experts else _OTHER
    other_gpu = _OTHER_GPU if gpu != reference.gpu else 0.0
    return math.hypot(base, other_gpu, _OTHER_PRECISION * (layout.precision != known.precision))


def make_plan(
    shape: Shape,
    offers: Sequence[tuple[Gpu, float | None, str]],
    counts: Sequence[int],
    layout: Layout,
    *,
    reference: Reference | None = None,
    tokens: float | None = None,
    network: float | None = None,
) -> Plan:
    """A candidate for each kind and number of GPUs, from the layout of the reference, or the one to
    start with; ``offers`` are kinds with their dollars per hour and the source of that."""
    level = slowness = real_share = 1.0
    beyond = seen = 0.0
    if reference is not None:
        known, real_share = reference.layout, reference.real_share
        step = predict_step(shape, reference.gpu, known, network=network)
        measured = known.step_tokens / reference.tokens_per_second
        level, seen = step.total / measured, step.communication / step.total
        share = reference.communication_share
        if share is not None and step.communication:
            level = (step.total - step.communication) / (measured * (1 - share))
            slowness = min(5.0, max(0.2, measured * share * level / step.communication))
        predicted = predict_memory(shape, known).total
        beyond = max(0.0, (reference.memory_bytes or predicted) - predicted)
    candidates: list[Candidate] = []
    for (gpu, price, _), count in product(offers, sorted(set(counts))):
        usable = _USABLE_MEMORY * gpu.memory_gb * 1e9
        if reference is not None and gpu == reference.gpu:
            usable = max(usable, reference.memory_bytes or 0.0)  # it has run
        chosen, changes = _fit(shape, gpu, layout, count, usable - beyond)
        memory, binds = predict_memory(shape, chosen), "memory"
        rate = time = money = share = demand = ceiling = None
        if memory.total + beyond > usable:
            need, room = format_bytes(memory.total + beyond), format_bytes(usable)
            changes = f"needs at least {need} per GPU, but the {gpu.key} has only {room} available"
        else:
            step = predict_step(shape, gpu, chosen, network=network)
            communication = slowness * step.communication
            seconds = (step.total - step.communication + communication) / level
            share = (communication + step.bubble) / (seconds * level)
            binds = "communication" if share >= BOUND_COMMUNICATION else "compute"
            width = interval_width(reference, shape, gpu, chosen)
            demand = real_share * chosen.step_tokens / seconds
            if reference is not None:
                new = max(0.0, step.communication / step.total - seen)
                alone = _FROM_ONE if reference.layout.gpus == 1 < count else 0.0
                width = math.hypot(width, _COMMUNICATION * new, alone)
                grown = count / reference.layout.gpus if reference.loader_scales else 1.0
                ceiling = times(reference.loader_tokens_per_second, grown)
            ends = [demand * math.exp(way * width) for way in (-1, 0, 1)]
            if ceiling is not None and ceiling < demand:
                binds, ends = "data", [min(end, ceiling) for end in ends]
            rate = Range(*ends)
            if tokens is not None:
                time = Range(*(tokens / end for end in reversed(ends)))
                if price is not None:
                    money = Range(*(tokens / end * price * count / 3600 for end in reversed(ends)))
        candidates.append(
            Candidate(
                gpu=gpu.key,
                gpus=count,
                layout=chosen,
                changes=changes,
                global_batch_tokens=chosen.step_tokens,
                memory=memory,
                memory_bytes=memory.total + beyond,
                binds=binds,
                tokens_per_second=rate,
                step_seconds=real_share * chosen.step_tokens / rate.value if rate else None,
                communication_share=share,
                demand_tokens_per_second=demand,
                loader_tokens_per_second=ceiling,
                seconds=time,
                dollars=money,
            )
        )
    notes = []
    for gpu, price, source in offers:
        own = [one for one in candidates if one.gpu == gpu.key]
        cost = "" if price is None else f"${price:g}, "
        said = [*_describe(own, gpu, reference, level, gpu.network if network is None else network)]
        said.append(f"Dollars per GPU and hour: {gpu.key}: {cost}{source}.")
        notes += [f"{gpu.key}: {note}" if len(offers) > 1 else note for note in said]
    return Plan(
        gpu=", ".join(gpu.key for gpu, _, _ in offers),
        parameters=shape.parameters,
        tokens=tokens,
        level=None if reference is None else level,
        candidates=tuple(candidates),
        notes=tuple(notes),
    )


def _fit(shape: Shape, gpu: Gpu, layout: Layout, count: int, usable: float) -> tuple[Layout, str]:
    """The layout on ``count`` GPUs at the same global batch; if it does not fit, the fastest of its
    changes that does."""
    split = {} if count % (layout.tp * layout.pp * layout.cp) == 0 else {"tp": 1, "pp": 1, "cp": 1}

    def change(old: Layout, **values: Any) -> Layout:
        new = replace(old, **values, accumulation=1)
        return replace(new, accumulation=max(1, round(layout.step_tokens / new.step_tokens)))

    start = change(layout, gpus=count, **split)
    if predict_memory(shape, start).total <= usable:
        return start, ""
    layouts = [
        change(start, sharding=sharding, recompute=recompute, micro_batch=samples, tp=tp)
        for tp, samples, recompute, sharding in product(
            (start.tp, *(size for size in (2, 4, 8) if start.tp < size <= gpu.node_size)),
            dict.fromkeys((layout.micro_batch, min(1.0, layout.micro_batch))),
            dict.fromkeys((layout.recompute, "full")),
            dict.fromkeys((layout.sharding, "fsdp")),
        )
        if count % (tp * start.pp * start.cp) == 0
    ]
    fitting = [one for one in layouts if predict_memory(shape, one).total <= usable]
    start = min(layouts, key=lambda one: predict_memory(shape, one).total)
    if fitting:
        start = max(fitting, key=lambda one: one.step_tokens / predict_step(shape, gpu, one).total)
    texts = {
        "sharding": "shards weights (FSDP or ZeRO-3)",
        "recompute": "recomputes activations",
        "micro_batch": f"has a micro-batch of {start.micro_batch:g}",
        "tp": f"splits layers over {start.tp} GPUs (tensor parallel)",
    }
    changed = [texts[name] for name in texts if getattr(start, name) != getattr(layout, name)]
    return start, f"fits if it {', '.join(changed)}"


def _describe(
    candidates: Sequence[Candidate],
    gpu: Gpu,
    reference: Reference | None,
    level: float,
    network: float,
) -> Iterator[str]:
    """What users get wrong, where these candidates are about to; what layouts had to change, and
    what the prediction rests on."""
    possible = [one for one in candidates if one.tokens_per_second is not None]
    yield from warn_of_cost([(one.gpus, one.dollars.value) for one in possible if one.dollars])
    if possible and possible[-1].binds != "data":
        ends = (possible[0], possible[-1])
        yield from warn_of_latency(
            *((one.gpus, one.step_seconds, one.global_batch_tokens / one.gpus) for one in ends)
        )
    usual, known = _HUGE_BATCH, "published trainings of language models end with 16 M"
    if reference is not None:
        batch = reference.layout.step_tokens
        usual = min(usual, _LARGE_BATCH * batch)
        known = f"your run has {format_count(batch)}"
    for large in [one for one in possible if one.global_batch_tokens > usual][:1]:
        yield (
            f"From {large.gpus} GPUs, the batch is too large for the same training: a step has "
            f"{format_count(large.global_batch_tokens)} tokens, and {known}. Accumulation cannot "
            "go below 1. A larger batch needs another learning rate and may generalise worse: "
            "compare the losses, or use fewer GPUs."
        )
    if reference is not None and possible and not _ODD_LEVEL[0] < level < _ODD_LEVEL[1]:
        yield (
            f"The run is {level:.2g} times as fast as predicted, which no published stack is: "
            "check its tokens, model and GPU, and whether a tiny batch slowed it down."
        )
    for starved in [one for one in possible if one.binds == "data"][:1]:
        yield (
            f"On {starved.gpus} GPUs, the loader must deliver "
            f"{format_count(starved.demand_tokens_per_second)} tokens/s; yours delivers "
            f"{format_count(starved.loader_tokens_per_second)}."
        )
    last = possible[-1] if possible else None
    if reference is not None and last is not None and reference.layout.gpus == 1 < last.gpus:
        naive = reference.tokens_per_second * reference.real_share * last.gpus
        yield (
            f"The run used one GPU, so communication was not measured. {last.gpus} times its rate "
            f"would be {format_count(naive)} tokens/s; the prediction is "
            f"{format_count(last.demand_tokens_per_second)} tokens/s, with "
            f"{format_share(last.communication_share, decimals=0)} of a step in communication, "
            "from the link rates alone. Measure a short run on two nodes before you rent more."
        )
    for text in dict.fromkeys(one.changes for one in candidates if one.changes):
        counts = ", ".join(str(one.gpus) for one in candidates if one.changes == text)
        yield f"{counts} × {gpu.key}: {text}."
    if reference is None:
        yield (
            "No run of yours calibrates this plan: it uses the rates of published, well-tuned "
            "stacks, and its intervals are wide. A short measured run narrows them."
        )
    elif gpu != reference.gpu:
        yield (
            f"The run was on {reference.gpu.key}: the plan assumes that {gpu.key} reaches the "
            "same share of its predicted speed."
        )
    yield (
        f"Between nodes of {gpu.node_size} GPUs ({gpu.key}): {network:g} GB/s per GPU, without "
        "congestion."
    )
