"""How long a step takes, from the shape of the model, the GPU and the layout.

Physics first. Matrix products take their FLOPs at a share of the peak, and longer where a dimension
is small against the GPU's ratio of FLOPs to bytes; attention is causal and runs at a share of its
own; norms, activations and quantisation move bytes. Tensor, context, expert, pipeline and data
parallelism add volumes over the node's link or the network, of which a part hides behind compute,
and a pipeline its bubble. Full recomputation adds a forward pass. FLOPs are not compared between
stacks, which count attention differently: only tokens/s are.

The few constants are fitted to published runs (``python -m benchmarks.plan_error --fit``). What
they cannot know is the stack: kernels, fusion, versions. That is one factor, ``level``, and a run
of the user's own measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fast_axolotl.plan.hardware import Gpu
from fast_axolotl.plan.memory import Layout
from fast_axolotl.plan.shape import Shape

__all__ = ["Constants", "StepTime", "predict_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is fitted; shares are of the makers' figures."""

    gemm: float = 0.626
    """Share of the bf16 peak that large matrix products reach."""
    gemm_fp8: float = 0.685
    gemm_fp4: float = 0.57
    ultra: float = 1.31
    """How much of its peak more a B300 holds than a B200, whose power limit is lower."""
    recompute: float = 0.753
    """Cost of recomputing a forward pass, relative to the first one."""
    attention: float = 0.703
    """Share of the bf16 peak that causal flash attention reaches, half of the square counted."""
    attention_hopper: float = 0.503
    attention_blackwell: float = 0.303
    attention_triton: float = 0.35
    """Share of flash attention's rate that the first Triton kernels reach."""
    io: float = 0.727
    """How much of the operands' traffic is not hidden behind the products."""
    elementwise: float = 2.3
    """Passes over the activations, relative to one read and one write of each."""
    quantise: float = 0.608
    """The same of casts to fp8 and fp4."""
    experts: float = 0.367
    """Share of a dense product's rate that grouped products of experts reach."""
    expert_launch: float = 0.00165
    """Seconds that a layer of experts adds to a micro-batch: routing, sorting, uneven loads."""
    routing: float = 0.73
    """Passes over the routed activations."""
    link: float = 0.9
    """Share of the link's and the network's rate that collectives reach."""
    exposed_tp: float = 1.0
    """Share of each kind of communication that compute does not hide."""
    exposed_ep: float = 0.6
    exposed_cp: float = 0.276
    exposed_dp: float = 0.459
    leak: float = 0.234
    """Share of hidden communication that still costs time, because it slows kernels down."""
    jitter: float = 0.00376
    """What each doubling of the nodes adds: the slowest rank decides."""
    launch: float = 0.0002
    """Seconds in which the host can launch a layer's kernels, forward and backward."""


DEFAULTS = Constants()
_HOST_RATE = 20e9
"""Bytes per second that a GPU's share of the host's memory gives to an optimizer there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by part; they add up to ``total``."""

    compute: float
    communication: float
    """Exposed only."""
    bubble: float
    optimizer: float
    hidden_communication: float
    tokens: float
    """Of the whole job's step."""

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total


def _group_rate(gpu: Gpu, size: int, stride: int, network: float | None) -> float:
    """GB/s per rank of a group of ``size`` ranks that are ``stride`` apart: the link's within a
    node; else the adapters of all its ranks in the node, whose rings share the traffic."""
    if size * stride <= gpu.node_size:
        return gpu.link
    inside = max(1, gpu.node_size // stride)
    return min(gpu.link, (gpu.network if network is None else network) * inside)


def predict_step(
    shape: Shape,
    gpu: Gpu,
    layout: Layout,
    constants: Constants = DEFAULTS,
    *,
    network: float | None = None,
) -> StepTime:
    """Time of one step of a stack of average speed; ``network`` is GB/s per GPU between nodes."""
    c, tp, tokens = constants, layout.tp, layout.tokens
    layers = shape.layers / layout.pp
    is_full = layout.method == "full"
    # Passes of a product: forward, gradient of the input, gradient of the weight.
    again = c.recompute if layout.recompute == "full" else 0.0
    passes = (3.0 if is_full else 2.0) + again
    attention_passes = 3.5 + (c.recompute if layout.recompute != "none" else 0.0)
    peak, share = gpu.bf16 * 1e12, c.gemm
    if layout.precision == "fp8" and gpu.fp8:
        peak, share = gpu.fp8 * 1e12, c.gemm_fp8
    elif layout.precision == "fp4" and gpu.fp4:
        peak, share = gpu.fp4 * 1e12, c.gemm_fp4
    elif layout.precision == "fp4" and gpu.fp8:
        peak, share = gpu.fp8 * 1e12, c.gemm_fp8
    if gpu.generation == "blackwell-ultra":
        share *= c.ultra
    memory = gpu.bandwidth * 1e9

    def product(rows: float, inner: float, outer: float, rate: float, count: float = 1.0) -> float:
        """Seconds of ``count`` products, one pass."""
        moved = 2.0 * (rows * inner + inner * outer + rows * outer)
        return count * (2.0 * rows * inner * outer / rate + c.io * moved / memory)

    rate = peak * share
    hidden, gates = shape.hidden, 2 if shape.is_gated else 1
    per_layer = product(tokens, hidden, shape.attention_size / hidden / tp, rate)
    sparse = shape.expert_layers / shape.layers
    if sparse < 1:
        dense = product(tokens, hidden, gates * shape.ffn / tp, rate)
        per_layer += (1 - sparse) * (dense + product(tokens, shape.ffn / tp, hidden, rate))
    if sparse:
        if shape.shared_ffn:
            per_layer += sparse * product(tokens, hidden, (gates + 1) * shape.shared_ffn / tp, rate)
        ranks = max(layout.ep, 1)
        local = max(1.0, shape.experts / ranks)
        rows = tokens / tp * shape.top_k / local
        slow = rate * c.experts
        per_layer += sparse * product(rows, hidden, (gates + 1) * shape.expert_ffn, slow, local)
    head = product(tokens, hidden, shape.vocabulary / tp, gpu.bf16 * 1e12 * c.gemm) / layout.pp
    width = (1 - sparse) * shape.ffn + sparse * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    elements = 12 * hidden + 4 * shape.attention_width + (gates + 2) * width
    moved = 2.0 * c.elementwise * elements
    if layout.precision != "bf16":
        moved += 2.0 * c.quantise * (3 * hidden + shape.attention_width + (gates + 1) * width)
    moved += 2.0 * c.routing * sparse * shape.top_k * 6 * hidden
    per_token = (layers * (3.0 + again) * moved + 20.0 * shape.vocabulary / layout.pp) / tp
    attended = shape.attended(layout.attended or layout.seq_len) / layout.pp
    flops = 4.0 * shape.attention_width / tp * attended / 2 * attention_passes * tokens
    kernels = {"hopper": c.attention_hopper, "blackwell": c.attention_blackwell}
    kernels["blackwell-ultra"] = c.attention_blackwell
    attention = flops / (gpu.bf16 * 1e12 * kernels.get(gpu.generation, c.attention))
    if layout.attention_kernel == "triton":
        attention /= c.attention_triton
    compute = (
        layers * passes * per_layer
        + (passes - again) * head
        + attention
        + tokens * per_token / memory
    )
    compute += sparse * layers * c.expert_launch
    compute = max(compute, c.launch * layers * (1 + again / 3))

    link = c.link * 1e9
    activation = 2.0 * tokens * hidden
    exposed = hidden_part = 0.0
    if tp > 1:
        times = 8 + 2 * (layout.recompute == "full")
        volume = layers * times * (tp - 1) / tp * activation
        exposed += c.exposed_tp * volume / (link * _group_rate(gpu, tp, 1, network))
    if layout.cp > 1:
        keys = 2.0 * tokens * 2 * shape.kv_heads * shape.head_size / tp
        volume = layers * 3 * (layout.cp - 1) * keys
        exposed += c.exposed_cp * volume / (link * _group_rate(gpu, layout.cp, tp, network))
    if layout.ep > 1 and sparse:
        volume = sparse * layers * 4 * activation / tp
        # A token crosses the network once for each node that holds one of its experts.
        nodes = max(1.0, layout.ep / gpu.node_size)
        far = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.top_k)
        near = shape.top_k * (layout.ep - 1) / layout.ep
        outside = gpu.network if network is None else network
        exposed += c.exposed_ep * volume * (near / gpu.link + far / outside) / link
    if layout.pp > 1:
        rate_between = _group_rate(gpu, 2, layout.gpus // layout.pp, network)
        exposed += 0.2 * 4 * layout.vp * activation / tp / (link * rate_between)

    trained = shape.parameters if is_full else 0.01 * shape.parameters
    owned = (trained - shape.expert_parameters * is_full) / (tp * layout.pp)
    owned += shape.expert_parameters * is_full / (layout.pp * max(layout.ep, 1))
    shards = layout.shards
    around = _group_rate(gpu, layout.dp * layout.cp, tp, network)
    step_exposed = 0.0
    if layout.sharding == "fsdp" and shards > 1:
        whole = (shape.parameters - shape.expert_parameters) / (tp * layout.pp)
        whole += shape.expert_parameters / (layout.pp * layout.ep)
        gathered = _group_rate(gpu, shards, tp, network)
        volume = (shards - 1) / shards * (6.0 if is_full else 4.0) * whole
        seconds = volume / (link * gathered)
        exposed += max(0.0, seconds - compute) + c.leak * min(seconds, compute)
        hidden_part += (1 - c.leak) * min(seconds, compute)
        if shards < layout.dp * layout.cp:
            step_exposed += c.exposed_dp * 4.0 * owned / shards / (link * gpu.network)
    elif layout.dp * layout.cp > 1:
        ranks = layout.dp * layout.cp
        seconds = (ranks - 1) / ranks * 6.0 * owned / (link * around)
        # Buckets are reduced while the last micro-batch goes backward.
        window = 2 / 3 * compute
        step_exposed += max(0.0, seconds - window) + c.exposed_dp * min(seconds, window)
        hidden_part += (1 - c.exposed_dp) * min(seconds, window)
    states = shards if layout.sharding != "ddp" else 1
    # An optimizer on the host moves its states through the memory that all GPUs of a node share.
    optimizer = 30.0 * owned / states / (_HOST_RATE if layout.optimizer == "offload" else memory)
    nodes = max(1.0, layout.gpus / gpu.node_size)
    slow = 1 + c.jitter * math.log2(nodes)
    micro = layout.accumulation
    stages = (layout.pp - 1) / layout.vp
    return StepTime(
        compute=slow * micro * compute,
        communication=slow * (micro * exposed + step_exposed),
        bubble=slow * stages * (compute + exposed),
        optimizer=optimizer,
        hidden_communication=hidden_part,
        tokens=layout.step_tokens,
    )
