"""Memory of one GPU: weights, gradients, optimizer, activations, and what comes and goes.

Weights, gradients and optimizer states are divided by what shards them: ZeRO-1 the optimizer,
ZeRO-2 gradients too, ZeRO-3 and FSDP everything, which then gathers two layers at a time. Tensor
and pipeline parallelism divide the model itself. Activations are the tensors that autograd keeps
per token and layer with flash attention, counted from the modules of transformers' Llama family;
``fused`` kernels keep fewer. Gradients are freed between steps: without accumulation they are not
there yet when activations peak, so the larger of the two moments counts, not their sum.

Not counted: a CUDA context (0.5 to 1 GB, outside of torch) and fragmentation, which add about a
tenth; images; CPU offload of anything but the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fast_axolotl.errors import UsageError
from fast_axolotl.plan.shape import Shape

__all__ = ["Layout", "Memory", "predict_memory"]

Sharding = Literal["ddp", "zero1", "zero2", "fsdp"]
Recompute = Literal["none", "selective", "full"]
Method = Literal["full", "lora", "qlora"]
Precision = Literal["bf16", "fp8", "fp4"]

_STATES = {"bf16": (2.0, 2.0, 4.0), "mixed": (4.0, 4.0, 8.0), "master": (2.0, 4.0, 12.0)}
"""Bytes of a trained weight, its gradient and its two moments: all in bf16, as transformers does
where the model is loaded so; fp32 with autocast; Megatron's bf16 beside an fp32 copy."""
_QUANTISED_BYTES = 0.53
"""Of a weight in nf4 with doubly quantised constants."""
_RANK = 16
"""Of LoRA adapters on every linear layer, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a run is laid out over its GPUs."""

    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 1
    """Virtual stages per pipeline rank."""
    shard: int = 0
    """How many ranks share one copy of the states; 0: all data-parallel ranks."""
    sharding: Sharding = "ddp"
    seq_len: int = 4096
    attended: float | None = None
    """Mean positions in a token's own sequence, where samples are packed; else ``seq_len``."""
    micro_batch: float = 1.0
    accumulation: int = 1
    recompute: Recompute = "none"
    method: Method = "full"
    lora_rank: int = _RANK
    precision: Precision = "bf16"
    states: Literal["bf16", "mixed", "master"] = "bf16"
    optimizer: Literal["adamw", "adamw_8bit", "offload"] = "adamw"
    attention_kernel: Literal["flash", "triton"] = "flash"
    is_fused: bool = False
    """Fused norms, activations and loss (Liger, Megatron, ``torch.compile``)."""

    def __post_init__(self) -> None:
        model = self.tp * self.pp * self.cp
        if min(self.gpus, self.tp, self.pp, self.cp, self.ep, self.accumulation) < 1:
            raise UsageError(f"a layout needs sizes of at least 1: {self}")
        if self.gpus % model:
            raise UsageError(
                f"{self.gpus} GPUs cannot be divided by tp·pp·cp = {self.tp}·{self.pp}·{self.cp}"
            )

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def shards(self) -> int:
        """How many ranks share the states; context-parallel ranks hold the same weights."""
        return self.shard or self.dp * self.cp

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one GPU."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def step_tokens(self) -> float:
        """Tokens of a step of the whole job."""
        return self.micro_batch * self.seq_len * self.dp * self.accumulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU at its peak, by what holds them."""

    weights: float
    gradients: float
    """At the moment of the peak; 0 where activations peak before they exist."""
    optimizer: float
    activations: float
    """Kept for the backward pass, logits and their gradients included."""
    gathered: float
    """Layers that FSDP has gathered, and quantised matrices while they are unpacked."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered


def adapter_parameters(shape: Shape, rank: int) -> float:
    """Weights of LoRA on every linear layer but the head."""
    query, keys = shape.attention_width, shape.kv_heads * shape.head_size
    attention = 2 * (shape.hidden + query) + 2 * (shape.hidden + keys)
    width = shape.ffn or shape.expert_ffn * max(1, shape.experts) + shape.shared_ffn
    return rank * shape.layers * (attention + (3 if shape.is_gated else 2) * (shape.hidden + width))


def norm_bytes(hidden: int, layout: Layout) -> float:
    """A norm keeps its input in fp32, what its scale multiplies (where that is trained), its
    output."""
    if layout.is_fused:
        return 4.0 * hidden
    return (8.0 if layout.method == "full" else 6.0) * hidden


def layer_bytes(shape: Shape, layout: Layout) -> float:
    """What autograd keeps of one layer for one token; sequence parallelism divides it by ``tp``."""
    hidden, query = shape.hidden, shape.attention_width
    keys = shape.kv_heads * shape.head_size
    is_trained = layout.method == "full"
    norm = norm_bytes(hidden, layout)
    if layout.states == "mixed" and not layout.is_fused:
        norm += 5 * hidden  # autocast casts the input of each of five matrices, not once for all
    attention = 2 * (2 * query + 2 * keys) + 4 * shape.heads
    sparse = shape.expert_layers / shape.layers
    width = (1 - sparse) * shape.ffn + sparse * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    # Gate, its activation, the other half, their product; fused kernels recompute two of them.
    ffn = 2 * width * ((2 if layout.is_fused else 4) if shape.is_gated else 2)
    routed = sparse * shape.top_k * hidden * 4
    adapters = 0.0
    if not is_trained:
        adapters = 2.0 * layout.lora_rank * 7
    return (2 * norm + attention + ffn + routed + adapters) / layout.tp


def predict_memory(shape: Shape, layout: Layout) -> Memory:
    """The peak of the GPU that holds most."""
    weight, gradient, moments = _STATES[layout.states]
    model = layout.tp * layout.pp
    dense = (shape.parameters - shape.expert_parameters) / model
    owned = dense + shape.expert_parameters / (layout.pp * max(layout.ep, layout.tp))
    trained, frozen = owned, 0.0
    if layout.method != "full":
        trained, frozen = adapter_parameters(shape, layout.lora_rank) / model, owned
    if layout.optimizer != "adamw":
        moments = {"adamw_8bit": 2.0, "offload": 0.0}[layout.optimizer] + max(0.0, moments - 8.0)
    tables = (1 if shape.is_tied else 2) * shape.vocabulary * shape.hidden / model
    frozen_bytes = 2.0 * frozen
    if layout.method == "qlora":
        frozen_bytes = _QUANTISED_BYTES * (frozen - tables) + 2.0 * tables
    shards = layout.shards
    level = ("ddp", "zero1", "zero2", "fsdp").index(layout.sharding)
    weights = (weight * trained + frozen_bytes) / (shards if level == 3 else 1)
    gradients = gradient * trained / (shards if level >= 2 else 1)
    optimizer = moments * trained / (shards if level >= 1 else 1)
    gathered = 0.0
    largest = max(shape.layer_weights / layout.tp, shape.vocabulary * shape.hidden / layout.tp)
    if level == 3 and shards > 1:
        gathered += 2 * 2.0 * largest + gradient * largest * (layout.method == "full")
    elif layout.states == "mixed":
        # Autograd keeps autocast's copies of the weights: of all, or of the head alone.
        gathered += tables if layout.recompute == "full" else 2.0 * owned - tables
    if layout.method == "qlora":
        gathered += 2.0 * shape.hidden * max(shape.ffn, shape.expert_ffn, shape.hidden) / layout.tp
    tokens = layout.tokens
    layers = shape.layers / layout.pp
    # The first stage of a pipeline keeps as many micro-batches as there are stages.
    in_flight = (
        1.0
        if layout.pp == 1
        else min(layout.accumulation, layout.pp)
        * (1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1)
    )
    each = layer_bytes(shape, layout) * tokens
    boundary = (4.0 if layout.states == "mixed" else 2.0) * shape.hidden * tokens / layout.tp
    kept, again = layers * each, 0.0
    if layout.recompute == "full":
        kept, again = layers * boundary, each
    elif layout.recompute == "selective":
        kept = layers * 0.55 * each
    # The softmax of the logits in fp32, and twice as much while its gradient is computed; fused
    # losses work in chunks.
    logits = tokens * shape.vocabulary / layout.tp * (2.0 if layout.is_fused else 12.0)
    last = tokens * norm_bytes(shape.hidden, layout) / layout.tp
    kept = kept * in_flight
    standing = gradients if layout.accumulation > 1 else 0.0
    early = kept + last + logits + standing
    late = gradients + (kept / layers if layout.pp == 1 else kept) + again
    # Under recomputation the backward pass of the last layer holds that layer beside all inputs.
    middle = kept + again + standing
    activations, held = max(
        (early - standing, standing),
        (middle - standing, standing),
        (late - gradients, gradients),
        key=sum,
    )
    return Memory(
        weights=weights,
        gradients=held,
        optimizer=optimizer,
        activations=activations,
        gathered=gathered,
    )
