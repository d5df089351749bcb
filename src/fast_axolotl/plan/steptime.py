"""Predict the time of a step from the model, the GPU and the layout.

Matrix products take their FLOPs at a share of the peak, and longer where a dimension is small
against the GPU's ratio of FLOPs to bytes; attention is causal and has a share of its own; norms and
activations move bytes. Parallelism adds volumes over the node's link or the network, of which a
part hides behind compute, and a pipeline its bubble. The constants (``constants.json``) are fitted
to published runs (``python -m benchmarks.plan_error --fit``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from fast_axolotl.plan.memory import QUANTISED_BYTES, Layout, adapter_parameters, divide_weights
from fast_axolotl.plan.shape import Shape
from fast_axolotl.record.devices import Gpu


@cache
def fitted(part: Literal["step", "widths"]) -> dict[str, float]:
    """The constants of the package; ``constants.json`` says what each is."""
    table = json.loads(files("fast_axolotl.plan").joinpath("constants.json").read_bytes())
    return {name: value for name, (value, _) in table[part].items()}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part; they add up to ``total``."""

    compute: float
    communication: float
    """Exposed only."""
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer


def predict_step(
    shape: Shape, gpu: Gpu, layout: Layout, constants: Mapping[str, float] | None = None
) -> StepTime:
    """Time of one step of a stack of average speed."""
    c, tp, pp, tokens = {**fitted("step"), **(constants or {})}, layout.tp, layout.pp, layout.tokens
    layers, hidden, sparse = shape.layers / pp, shape.hidden, shape.expert_share
    is_full, gates = layout.method == "full", 2 if shape.is_gated else 1
    memory, bf16 = gpu.bandwidth * 1e9, gpu.bf16 * 1e12
    rate = c["gemm"] * bf16
    fp8 = gpu.tflops.get("float8")
    low = gpu.tflops.get("float4", fp8) if layout.precision == "fp4" else fp8
    if layout.precision != "bf16" and low:
        rate = c["gemm_low"] * low * 1e12
    rate *= c["ultra"] if gpu.generation == "blackwell-ultra" else 1.0
    rate *= c["gemm_ampere"] if gpu.generation == "ampere" else 1.0

    def product(rows: float, inner: float, outer: float, rate: float, count: float = 1.0) -> float:
        """Seconds of ``count`` products, one pass."""
        moved = 2.0 * (rows * inner + inner * outer + rows * outer)
        return count * (2.0 * rows * inner * outer / rate + moved / memory)

    def group_rate(size: int, stride: int) -> float:
        """Bytes/s per rank of ``size`` ranks that are ``stride`` apart: the link's within a node;
        else the adapters of all its ranks in the node, whose rings share the traffic."""
        near = size * stride <= gpu.node_size
        slots = max(1, gpu.node_size // stride)
        return c["link"] * 1e9 * (gpu.link if near else min(gpu.link, gpu.network * slots))

    # Compute of one micro-batch. A product has three passes: forward, and the gradients of input
    # and weight, the last of which frozen weights do not have.
    again = 1.0 if layout.recompute == "full" else 0.0
    passes = (3.0 if is_full else 2.0) + again
    one = product(tokens, hidden, shape.attention_size / hidden / tp, rate)
    if sparse < 1:
        dense = product(tokens, hidden, gates * shape.ffn / tp, rate)
        one += (1 - sparse) * (dense + product(tokens, shape.ffn / tp, hidden, rate))
    if sparse:
        if shape.shared_ffn:
            one += sparse * product(tokens, hidden, (gates + 1) * shape.shared_ffn / tp, rate)
        local = max(1.0, shape.experts / layout.ep)
        rows, wide = tokens / tp * shape.top_k / local, (gates + 1) * shape.expert_ffn
        one += sparse * product(rows, hidden, wide, rate * c["experts"], local)
    head = (passes - again) * product(tokens, hidden, shape.vocabulary / tp, c["gemm"] * bf16) / pp
    eager = 1.0 if layout.is_fused else c["eager"]
    moved = eager * (12 * hidden + 4 * shape.attention_width + (gates + 2) * shape.active_ffn)
    if not is_full and not layout.is_fused:
        # Thin products of LoRA move the inputs and outputs of every matrix once more.
        moved += c["adapters"] * adapter_parameters(shape, 1) / shape.layers
    moved += 6 * sparse * shape.top_k * hidden
    per_token = (layers * (3.0 + again) * 2.0 * moved + eager * 20.0 * shape.vocabulary / pp) / tp
    # Attention kernels fill with the length and the size of a head.
    length, kernel = layout.attended or layout.seq_len, layout.attention_kernel
    share = c["attention"] * length / (length + c["half_length"])
    share *= (1 + c["half_head"] / 128) / (1 + c["half_head"] / shape.head_size)
    if kernel == "triton" or gpu.generation.startswith(("hopper", "blackwell")):
        share *= {"cudnn": 1.0, "flash": c["flash"], "triton": c["triton"]}[kernel]
    if kernel == "flash":  # torch's rings compute more than the causal half
        share /= 1 + c["ring"] * (1 - 1 / layout.cp)
    flops = 2.0 * shape.attention_width / tp * shape.attended(length) / pp * tokens
    flops *= 3.5 + (layout.recompute != "none")
    compute = layers * (passes * one + sparse * c["expert_seconds"]) + head
    compute += flops / (bf16 * share) + tokens * per_token / memory
    compute = max(compute, layers * c["launch_fused" if layout.is_fused else "launch_eager"])
    if layout.method == "qlora":
        weights = layers * shape.layer_weights / tp
        bytes_per_pass = (QUANTISED_BYTES + 2.0) * weights / c["dequantise"]
        compute += passes * bytes_per_pass / memory

    # Communication of one micro-batch, as far as compute does not hide it.
    activation = 2.0 * tokens * hidden / tp
    exposed = 0.0
    if tp > 1:
        volume = layers * (8 + 2 * (again > 0)) * (tp - 1) * activation
        exposed += c["exposed"] * volume / group_rate(tp, 1)
    if layout.cp > 1:
        keys = 4.0 * tokens * shape.kv_heads * shape.head_size / tp
        exposed += c["exposed"] * layers * 3 * (layout.cp - 1) * keys / group_rate(layout.cp, tp)
    if layout.ep > 1 and sparse:
        # A token crosses the network once for each node that holds one of its experts.
        nodes = max(1.0, layout.ep / gpu.node_size)
        far = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.top_k)
        near = shape.top_k * (layout.ep - 1) / layout.ep
        cost = (near / gpu.link + far / gpu.network) / (c["link"] * 1e9)
        exposed += c["exposed"] * sparse * layers * 4 * activation * cost
    if pp > 1:
        exposed += 0.8 * layout.vp * activation / group_rate(2, layout.gpus // pp)

    # Communication of a step, and the optimizer. LoRA reduces its adapters alone.
    owned, trained = divide_weights(shape, layout)
    shards, ranks, step_exposed = layout.shards, layout.replicas, 0.0
    window = 2 / 3 * compute  # gradients are reduced while the last micro-batch goes backward
    if layout.sharding == "fsdp" and shards > 1:
        volume = (shards - 1) / shards * (4.0 * owned + 2.0 * trained)
        seconds = volume / group_rate(shards, tp)
        exposed += max(0.0, seconds - compute) + c["leak"] * min(seconds, compute)
        if shards < ranks:
            seconds = 4.0 * trained / shards / (c["link"] * 1e9 * gpu.network)
            step_exposed = max(0.0, seconds - window) + c["leak"] * min(seconds, window)
    elif ranks > 1:
        seconds = (ranks - 1) / ranks * 6.0 * trained / group_rate(ranks, tp)
        step_exposed = max(0.0, seconds - window) + c["exposed"] * min(seconds, window)
    states = 1 if layout.sharding == "ddp" else shards
    host = layout.optimizer == "offload"
    slow = 1 + c["jitter"] * math.log2(max(1.0, layout.gpus / gpu.node_size))
    return StepTime(
        compute=slow * layout.accumulation * compute,
        communication=slow * (layout.accumulation * exposed + step_exposed),
        bubble=slow * (pp - 1) / layout.vp * (compute + exposed),
        optimizer=30.0 * trained / states / (c["host_rate"] if host else memory),
    )
