"""Predict tokens/s, memory, time and cost on other GPUs, and what limits the run.

A *reference* is the user's own run: measured ÷ predicted sets the level of the stack and of its
memory. Without one it is that of published stacks. For each number of GPUs all layouts of the same
global batch are predicted, and the fastest that fits is taken; one that differs less from the
reference's wins where the gain is below 4 %.

Intervals are of 90 %, in logarithms. Their widths are fitted by ``benchmarks.plan_error`` to
sources left out, added in quadrature for all that differs between reference and candidate. Rates
are of the steady phase without waiting for data, in positions, padding included. Congestion,
topology and uneven experts are not predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from importlib.resources import files
from itertools import product
from statistics import median
from typing import Any

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.plan.memory import (
    MOMENTS,
    Layout,
    Memory,
    adapter_parameters,
    divide_weights,
    list_layouts,
    predict_memory,
)
from fast_axolotl.plan.shape import Shape, parse_config
from fast_axolotl.plan.steptime import StepTime, fitted, predict_step
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.arithmetic import times
from fast_axolotl.record.devices import Gpu, find_gpu
from fast_axolotl.record.thresholds import BOUND_COMMUNICATION
from fast_axolotl.record.units import format_bytes, format_count, format_share

SEEN = ("ampere", "hopper", "blackwell", "blackwell-ultra", "tpu")
"""Generations that published rows are of."""
_COMMUNICATION = 0.5
"""Of the predicted communication that the reference did not have: links reach half or twice it."""
_HUGE_BATCH = 16e6
"""Tokens per step: what Llama 3.1 405B ended with."""
_USABLE_MEMORY = 0.92
"""Of a GPU: the rest is CUDA's own, and fragments."""
_MEMORY_LOW, _MEMORY_HIGH = 0.9, 1.2
"""What published peaks are of the predicted ones, without a run."""
TRUSTED_LEVELS = (0.2, 1.8)
"""Levels outside of which a record is doubted: published stacks have 0.5 to 1.4."""
_LARGE_BATCH = 4.0
"""Times the reference's global batch from which the training is another."""
_FEW_STEPS = 100
"""Optimizer steps below which a training is hardly one. Ours."""
_TIE = 0.04
"""Gain below which a layout with fewer changes is taken: predictions are no better."""
STARTUP_SECONDS, PAUSES = 180.0, 0.02
"""Without a record: start-up, and evaluation and checkpoints as a share of the training. Ours."""


@dataclass(frozen=True, slots=True)
class Range:
    """A value with its 90 % interval."""

    low: float
    value: float
    high: float


def find_price(gpu: Gpu) -> tuple[Range | None, str]:
    """Dollars of one device per hour, lowest, median and highest of the clouds that list it on
    demand, by the dated table beside this file; ``None`` where none does. And their source."""
    table = json.loads(files("fast_axolotl.plan").joinpath("gpu_prices.json").read_bytes())
    dollars = sorted(row[2] for row in table["prices"] if row[1] in gpu.priced_as)
    if not dollars:
        return None, "unknown; pass --price"
    source = f"median of {len(dollars)} offers from {dollars[0]:g} to {dollars[-1]:g}, "
    price = Range(dollars[0], median(dollars), dollars[-1])
    return price, f"{source}{table['source']}, {table['date']}"


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
    startup_seconds: float = STARTUP_SECONDS
    pause_seconds: float = 0.0
    """Of evaluation and checkpoints, for each optimizer step."""


def read_reference(
    record: RunRecord, summary: RunSummary, shape: Shape | None = None
) -> tuple[Shape, Reference]:
    """The model and the run; ``shape`` is the model's own, where its config was given."""
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
    if shape is None and not model.config:
        message = "does not hold the model's config; pass it: --model config.json"
        raise DataError(message, path=record.path)
    shape = shape or parse_config(model.config, record.path)
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
    seq_len = model.sequence_len or max(1, round(each / number("micro_batch_size", "batch_size")))
    micro = round(each / seq_len) if abs(each / seq_len % 1 - 0.5) > 0.45 else each / seq_len
    stage = 3 if settings.get("fsdp") else settings.get("deepspeed_stage") or 0
    sharding: Any = ("ddp", "zero1", "zero2", "fsdp")[min(3, int(stage))]
    method: Any = "qlora" if settings.get("adapter") == "qlora" else "lora"
    attention = settings.get("attn_implementation")
    name = str(settings.get("optimizer", ""))
    kinds = ["adamw_8bit"] if "8bit" in name else [kind for kind in MOMENTS if kind in name]
    layout = Layout(
        gpus=tp * pp * cp * replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        sharding=sharding,
        seq_len=seq_len,
        attended=summary.mean_attended_length,
        micro_batch=micro or each / seq_len,
        accumulation=accumulation,
        recompute="full" if model.is_checkpointed else "none",
        method=method if model.num_adapter else "full",
        lora_rank=max(1, round(model.num_adapter / adapter_parameters(shape, 1))),
        precision="fp8" if model.dtype == "float8" else "bf16",
        optimizer=kinds[0] if kinds else "adamw",
        attention_kernel="flash" if attention == "flash_attention_2" else "cudnn",
        is_fused=bool(settings.get("use_liger_kernel") or settings.get("liger_rms_norm")),
    )
    if state := settings.get("optimizer_state_bytes"):
        shards = 1 if sharding == "ddp" else layout.shards
        each = state * shards / divide_weights(shape, layout)[1]
        # AdamW's moments have the type of the weights.
        is_mixed = layout.optimizer == "adamw" and layout.method == "full" and each > 6
        layout = replace(layout, state_bytes=each, states="mixed" if is_mixed else "bf16")
    exposed = summary.exposed_communication_fraction
    pauses = sum(summary.ledger.get(name, 0.0) for name in ("evaluation", "checkpoint"))
    return shape, Reference(
        gpu=find_gpu(model.device_name),
        layout=layout,
        tokens_per_second=positions / (1 - stall),
        real_share=rate / positions,
        communication_share=None if exposed is None else min(0.9, exposed / (1 - stall)),
        memory_bytes=summary.gpu_memory_bytes,
        loader_tokens_per_second=times(summary.reader_ratio, rate),
        loader_scales=not settings.get("dispatcher"),
        startup_seconds=summary.ledger.get("startup", STARTUP_SECONDS),
        pause_seconds=pauses / max(1, summary.steps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One number of one kind of GPU. ``None`` is not known, or impossible."""

    gpu: str
    gpus: int
    layout: Layout
    changes: str = ""
    """The next best layout, and why it is not taken; or why none fits."""
    doubt: str = ""
    """Why nobody should choose it."""
    global_batch_tokens: float
    memory: Memory
    memory_bytes: Range
    """Calibrated by the reference's peak, where it has one."""
    fits: str
    """yes; may: only a part of the interval fits; no."""
    binds: str
    """compute, memory, communication, or data."""
    tokens_per_second: Range | None = None
    communication_share: float | None = None
    """Exposed communication and pipeline bubbles, of a step."""
    demand_tokens_per_second: float | None = None
    """What the GPUs could take of a loader that is fast enough."""
    loader_tokens_per_second: float | None = None
    steps: float | None = None
    """Of the optimizer."""
    seconds: Range | None = None
    """With start-up, evaluation and checkpoints."""
    dollars: Range | None = None
    """With the spread of the price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All candidates, and what to know about them."""

    parameters: float
    tokens: float | None
    level: float | None
    """Measured ÷ predicted tokens/s of the reference; ``None`` without one."""
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    """Warnings with their evidence, the layouts, what is assumed, the price."""


def list_differences(
    reference: Reference | None, shape: Shape, gpu: Gpu, layout: Layout, own: Shape | None = None
) -> dict[str, float]:
    """How far a candidate is from what is known, by the names of ``constants.json``; ``own``
    is the shape of the reference, where it is another."""
    if reference is None:
        return {
            "stack": 1.0,
            "stack_experts": float(shape.experts > 0),
            "stack_octave": max(0.0, math.log2(layout.seq_len / 8192)),
            "unseen": float(gpu.generation not in SEEN),
        }
    known, own = reference.layout, own or shape
    names = ("tp", "pp", "cp", "ep", "sharding", "recompute", "method")
    is_same = all(getattr(known, name) == getattr(layout, name) for name in names)
    # Far from the same batch, kernels run at another rate.
    is_same &= 0.6 < layout.tokens / known.tokens < 1.7
    is_other = not is_same or own != shape or known.seq_len != layout.seq_len
    return {
        "same": 1.0,
        "model": float(own != shape),
        "layout": float(not is_same),
        "experts": float(is_other and bool(shape.experts or own.experts)),
        "octave": abs(math.log2(layout.seq_len / known.seq_len)),
        "gpu": float(gpu.key != reference.gpu.key),
        "generation": float(gpu.generation != reference.gpu.generation),
        "precision": float(layout.precision != known.precision),
    }


def interval_width(far: Mapping[str, float], widths: Mapping[str, float] | None = None) -> float:
    """Half of the 90 % interval of log tokens/s, but for communication."""
    widths = widths or fitted("widths")
    return math.hypot(*(widths[name] * distance for name, distance in far.items()))


@dataclass(slots=True)
class _Calibration:
    """What the reference says of every prediction, and the search for layouts that uses it."""

    shape: Shape
    start: Layout
    reference: Reference | None
    pinned: Mapping[str, Any]
    level: float = 1.0
    slowness: float = 1.0
    """Of communication."""
    seen: float = 0.0
    """Share of communication that the reference was predicted to have."""

    def __post_init__(self) -> None:
        if (run := self.reference) is None:
            return
        step = predict_step(self.shape, run.gpu, run.layout)
        measured = run.layout.step_tokens / run.tokens_per_second
        self.level, self.seen = step.total / measured, step.communication / step.total
        share = run.communication_share
        if share is not None and step.communication:
            self.level = (step.total - step.communication) / (measured * (1 - share))
            slowness = measured * share * self.level / step.communication
            self.slowness = min(5.0, max(0.2, slowness))

    def step(self, gpu: Gpu, layout: Layout) -> StepTime:
        """Seconds by part, as the reference's stack would take."""
        step = predict_step(self.shape, gpu, layout)
        compute, communication, *rest = (part / self.level for part in astuple(step))
        return StepTime(compute, self.slowness * communication, *rest)

    def memory(self, gpu: Gpu, layout: Layout) -> Range:
        """Bytes of a GPU. What a run needs less than predicted is a share of everything; what it
        needs more is the same for every layout, or a share where a layout needs more of all."""
        predicted = predict_memory(self.shape, layout).total
        run = self.reference
        if run is None or run.memory_bytes is None:
            return Range(_MEMORY_LOW * predicted, predicted, _MEMORY_HIGH * predicted)
        if layout == run.layout and gpu.key == run.gpu.key:
            return Range(run.memory_bytes, run.memory_bytes, run.memory_bytes)
        own = predict_memory(self.shape, run.layout).total
        ratio = run.memory_bytes / own
        value = predicted * ratio if ratio < 1 else predicted + run.memory_bytes - own
        width = 0.03 + 0.15 * min(1.0, abs(math.log(predicted / own)) + abs(math.log(ratio)))
        return Range(value * (1 - width), value, value * (1 + width))

    def choose(self, gpu: Gpu, count: int, usable: float) -> tuple[Layout, str]:
        """The fastest layout that fits, and what to know of the next; else the smallest."""
        start, pinned = self.start, self.pinned
        layouts = list(list_layouts(self.shape, start, count, gpu.node_size, pinned))
        layouts += [start] * (start.gpus == count and self.reference is not None)
        if not layouts:
            text = f"{count} GPUs cannot be divided by --tp, --pp and --cp: {dict(pinned)}"
            raise UsageError(text)
        if not {"micro_batch", "accumulation"} <= pinned.keys():
            away = {one: abs(math.log(one.step_tokens / start.step_tokens)) for one in layouts}
            nearest = max(0.01, min(away.values()) + 1e-6)
            layouts = [one for one in away if away[one] <= nearest]
        needs = {one: self.memory(gpu, one) for one in layouts}
        fitting = [one for one in needs if needs[one].value <= usable]
        fitting = fitting or [one for one in needs if needs[one].low <= usable]
        if not fitting:
            least = min(needs, key=lambda one: needs[one].low)
            room = f"but the {gpu.key} has only {format_bytes(usable)} available"
            return least, f"needs at least {format_bytes(needs[least].low)} per GPU, {room}"
        steps = {one: self.step(gpu, one) for one in needs}
        pace = {one: steps[one].total / one.step_tokens for one in needs}

        def outline(one: Layout) -> tuple[Any, ...]:
            sizes = one.tp, one.pp, one.cp, one.optimizer
            return *sizes, one.ep, one.recompute, one.sharding == "fsdp", one.micro_batch

        def order(one: Layout) -> tuple[Any, ...]:
            """Few changes of the reference are better: of parallelism most of all."""
            pairs = zip(outline(one), outline(start), (2, 2, 2, 2, 1, 1, 1, 0), strict=True)
            changes = sum(cost for own, other, cost in pairs if own != other)
            return needs[one].high > usable, changes, pace[one]

        limit = (1 + _TIE) * min(pace[one] for one in fitting)
        chosen = min((one for one in fitting if pace[one] <= limit), key=order)
        text = str(chosen)
        others = [one for one in fitting if outline(one) != outline(chosen)]
        for other in sorted(others, key=pace.__getitem__)[:1]:
            slower = pace[other] / pace[chosen] - 1
            parts = zip(asdict(steps[other]).items(), astuple(steps[chosen]), strict=True)
            costs = {n: a / other.step_tokens - b / chosen.step_tokens for (n, a), b in parts}
            way = "slower" if slower >= 0 else "faster, but changes more"
            why = (max if slower >= 0 else min)(costs, key=costs.__getitem__)
            text += f". The next, {other}, is {format_share(abs(slower))} {way} ({why})"
        if self.reference is not None and start in pace and start != chosen:
            text += f". Yours, {start}, is {format_share(pace[start] / pace[chosen] - 1)} slower"
        return chosen, text


def make_plan(
    shape: Shape,
    offers: Sequence[tuple[Gpu, Range | None]],
    counts: Sequence[int],
    layout: Layout,
    *,
    reference: Reference | None = None,
    tokens: float | None = None,
    pinned: Mapping[str, Any] | None = None,
) -> Plan:
    """A candidate for each kind and number of GPUs, at the global batch of ``layout``; ``offers``
    are kinds with their dollars per hour. ``pinned`` are the sizes that no search changes."""
    known = _Calibration(shape, layout, reference, pinned or {})
    real_share = 1.0 if reference is None else reference.real_share
    candidates: list[Candidate] = []
    for (gpu, price), count in product(offers, sorted(set(counts))):
        usable = _USABLE_MEMORY * gpu.memory_gb * 1e9
        if reference is not None and gpu.key == reference.gpu.key:
            usable = max(usable, reference.memory_bytes or 0.0)  # it has run
        chosen, changes = known.choose(gpu, count, usable)
        need = known.memory(gpu, chosen)
        fits = "yes" if need.high <= usable else "may" if need.low <= usable else "no"
        found: dict[str, Any] = {"gpu": gpu.key, "gpus": count, "layout": chosen, "fits": fits}
        found |= {"global_batch_tokens": chosen.step_tokens, "changes": changes}
        found |= {"memory": predict_memory(shape, chosen), "memory_bytes": need, "binds": "memory"}
        if fits != "no":
            step = known.step(gpu, chosen)
            share = (step.communication + step.bubble) / step.total
            found["binds"] = "communication" if share >= BOUND_COMMUNICATION else "compute"
            width = interval_width(list_differences(reference, shape, gpu, chosen))
            demand, ceiling = real_share * chosen.step_tokens / step.total, None
            startup, pause = STARTUP_SECONDS, PAUSES * step.total
            if reference is not None:
                startup, pause = reference.startup_seconds, reference.pause_seconds
                plain = predict_step(shape, gpu, chosen)
                new = max(0.0, plain.communication / plain.total - known.seen)
                width = math.hypot(width, _COMMUNICATION * new)
                grown = count / reference.layout.gpus if reference.loader_scales else 1.0
                ceiling = times(reference.loader_tokens_per_second, grown)
            ends = [demand * math.exp(way * width) for way in (-1, 0, 1)]
            if ceiling is not None and ceiling < demand:
                found["binds"], ends = "data", [min(end, ceiling) for end in ends]
            if chosen.step_tokens > min(_HUGE_BATCH, _LARGE_BATCH * layout.step_tokens):
                found["doubt"] = f"a step has {format_count(chosen.step_tokens)} tokens"
            if tokens is not None:
                steps = max(1.0, tokens / (real_share * chosen.step_tokens))
                idle = startup + steps * pause
                lasts = [idle + tokens / end for end in reversed(ends)]
                found |= {"steps": steps, "seconds": Range(*lasts)}
                if steps < _FEW_STEPS:
                    found["doubt"] = f"the training has only {format_count(round(steps))} steps"
                elif idle > 0.5 * lasts[1]:
                    found["doubt"] = "start-up, evaluation and checkpoints take most of the time"
                if price is not None:
                    pairs = zip((price.low, price.value, price.high), lasts, strict=True)
                    found["dollars"] = Range(*(cost * count * time / 3600 for cost, time in pairs))
            found |= {"communication_share": share, "tokens_per_second": Range(*ends)}
            found |= {"demand_tokens_per_second": demand, "loader_tokens_per_second": ceiling}
        candidates.append(Candidate(**found))
    return Plan(
        parameters=shape.parameters,
        tokens=tokens,
        level=None if reference is None else known.level,
        candidates=tuple(candidates),
    )
