"""Predict the memory of one GPU: weights, gradients, optimizer, activations.

Sharding divides the states, parallelism the model. Activations are the tensors that autograd keeps
per token and layer with flash attention, counted from transformers' Llama modules. Gradients are
freed between steps: without accumulation they do not exist when activations peak, so the larger of
two moments counts. Not counted: a CUDA context (0.5 to 1 GB, outside of torch) and fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from fast_axolotl.plan.shape import Shape

_STATES = {"bf16": (2.0, 2.0, 4.0), "mixed": (4.0, 4.0, 8.0), "master": (2.0, 4.0, 12.0)}
"""Bytes of a trained weight, its gradient and its moments: all in bf16, as transformers loads
them; fp32 with autocast; Megatron's bf16 beside an fp32 copy."""
MOMENTS = {
    "adamw": 8.0,
    "adamw_8bit": 2.0,
    "lion": 4.0,
    "muon": 4.0,
    "sgd": 4.0,
    "adafactor": 0.1,
    "offload": 0.0,
}
"""Bytes of an optimizer's state for each trained weight, in fp32; bf16 weights have half of it but
in 8 bits. ``offload``: AdamW in the host's memory."""
QUANTISED_BYTES = 0.53
"""Of a weight in nf4 with doubly quantised constants."""


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
    sharding: Literal["ddp", "zero1", "zero2", "fsdp"] = "ddp"
    seq_len: int = 4096
    attended: float | None = None
    """Mean positions in a token's own sequence, where samples are packed; else ``seq_len``."""
    micro_batch: float = 1.0
    accumulation: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    method: Literal["full", "lora", "qlora"] = "full"
    lora_rank: int = 16
    precision: Literal["bf16", "fp8", "fp4"] = "bf16"
    states: Literal["bf16", "mixed", "master"] = "bf16"
    optimizer: str = "adamw"
    """One of ``MOMENTS``."""
    state_bytes: float | None = None
    """Of the optimizer for each trained weight, where it was measured."""
    attention_kernel: Literal["cudnn", "flash", "triton"] = "cudnn"
    """cuDNN's, torch's since 2.5, flash attention 3 and 4; flash attention 2; those before it."""
    is_fused: bool = False
    """Fused norms, activations and loss (Liger, Megatron, ``torch.compile``)."""

    @property
    def replicas(self) -> int:
        """Ranks with the same weights: data- and context-parallel ones."""
        return self.gpus // (self.tp * self.pp)

    @property
    def shards(self) -> int:
        return self.shard or self.replicas

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one GPU."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def step_tokens(self) -> float:
        """Tokens of a step of the whole job."""
        return self.tokens * self.replicas * self.accumulation

    def __str__(self) -> str:
        """What a search may change, in words."""
        names = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "FSDP"}
        words = [f"micro-batch {self.micro_batch:g} × {self.accumulation}", names[self.sharding]]
        sizes = {"TP": self.tp, "PP": self.pp, "CP": self.cp, "EP": self.ep}
        words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += ["" if self.recompute == "none" else f"{self.recompute} recomputation"]
        words += ["offload" if self.optimizer == "offload" else ""]
        return ", ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU at its peak, by what holds them."""

    weights: float
    gradients: float
    """At the moment of the peak; 0 where activations peak before they exist."""
    optimizer: float
    activations: float
    """Kept for the backward pass, logits and their gradients included."""
    gathered: float
    """Layers that FSDP has gathered, and copies of weights in another type."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered


def adapter_parameters(shape: Shape, rank: int) -> float:
    """Weights of LoRA on every linear layer but the head."""
    keys = shape.kv_heads * shape.head_size
    width = shape.ffn or shape.expert_ffn * shape.experts + shape.shared_ffn
    sides: float = 4 * shape.hidden + 2 * shape.attention_width + 2 * keys
    sides += (3 if shape.is_gated else 2) * (shape.hidden + width)
    return float(rank * shape.layers * sides)


def divide_weights(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Weights on one GPU before they are sharded, and how many of its weights are trained."""
    tp, pp = layout.tp, layout.pp
    owned = (shape.parameters - shape.expert_parameters) / (tp * pp)
    owned += shape.expert_parameters / (pp * max(layout.ep, tp))
    if layout.method == "full":
        return owned, owned
    return owned, adapter_parameters(shape, layout.lora_rank) / (tp * pp)


def predict_memory(shape: Shape, layout: Layout) -> Memory:
    """The peak of the GPU that holds most."""
    weight, gradient, moments = _STATES[layout.states]
    if layout.state_bytes is not None and layout.optimizer != "offload":
        moments = layout.state_bytes
    elif layout.optimizer != "adamw":
        halved = 2.0 if layout.states == "bf16" and layout.optimizer != "adamw_8bit" else 1.0
        moments = MOMENTS[layout.optimizer] / halved + max(0.0, moments - 8.0)
    tp, pp, tokens, hidden = layout.tp, layout.pp, layout.tokens, shape.hidden
    is_full, is_fused, is_mixed = layout.method == "full", layout.is_fused, layout.states == "mixed"
    owned, trained = divide_weights(shape, layout)
    frozen = 0.0 if is_full else 2.0 * owned
    table = shape.vocabulary * shape.hidden / tp
    tables = (1 if shape.is_tied else 2) * table / pp
    if layout.method == "qlora":
        frozen = QUANTISED_BYTES * (owned - tables) + 2.0 * tables
    level = ("ddp", "zero1", "zero2", "fsdp").index(layout.sharding)
    shards = layout.shards
    weights = (weight * trained + frozen) / (shards if level == 3 else 1)
    gradients = gradient * trained / (shards if level >= 2 else 1)
    optimizer = moments * trained / (shards if level >= 1 else 1)
    gathered = 0.0
    if level == 3 and shards > 1:
        largest = max(shape.layer_weights / tp, table)
        gathered = (4.0 + gradient * is_full) * largest
    elif is_mixed:
        # Autograd keeps autocast's copies of the weights: of all, or of the head alone.
        gathered = 2.0 * table / pp if layout.recompute == "full" else 2.0 * (owned - table / pp)
    if layout.method == "qlora":
        gathered += 2.0 * hidden * max(shape.ffn, shape.expert_ffn) / tp
    # What autograd keeps of one layer for one token. A norm keeps its input in fp32, what its scale
    # multiplies (where that is trained), its output.
    norm = 4.0 * hidden if is_fused else (8.0 if is_full else 6.0) * hidden
    per_layer = 2 * norm + 4.0 * (shape.attention_width + shape.kv_heads * shape.head_size)
    per_layer += 4 * shape.heads
    if is_mixed and not is_fused:
        per_layer += 10 * hidden  # autocast casts the input of each of five matrices
    # Gate, its activation, the other half, their product; fused kernels recompute two of them.
    per_layer += 2 * shape.active_ffn * (4 if shape.is_gated and not is_fused else 2)
    per_layer += 4 * shape.expert_share * shape.top_k * hidden
    per_layer += 0.0 if is_full else 14.0 * layout.lora_rank
    per_layer, norm = per_layer / tp, norm / tp
    layers, again = shape.layers / pp, 0.0
    kept = layers * per_layer * tokens
    if layout.recompute == "full":
        again = per_layer * tokens
        kept = layers * (4.0 if is_mixed else 2.0) * hidden * tokens / tp
    elif layout.recompute == "selective":
        kept *= 0.55
    if pp > 1:  # the first stage keeps as many micro-batches as there are stages
        kept *= min(layout.accumulation, pp) * (1 + (pp - 1) / (pp * layout.vp) * (layout.vp > 1))
    # The softmax of the logits in fp32, and twice as much while its gradient is computed; fused
    # losses work in chunks.
    logits = tokens * shape.vocabulary / tp * (2.0 if is_fused else 12.0)
    standing = gradients if layout.accumulation > 1 else 0.0
    activations, gradients = max(
        (kept + norm * tokens + logits, standing),
        (kept + again, standing),  # the last layer is recomputed beside all inputs
        (kept / layers + again, gradients),
        key=sum,
    )
    return Memory(weights, gradients, optimizer, activations, gathered)


def list_layouts(
    shape: Shape, start: Layout, gpus: int, node_size: int, pinned: Mapping[str, Any]
) -> Iterator[Layout]:
    """Every way to lay the global batch of ``start`` out over so many GPUs; what ``pinned`` names
    has that value.

    Sizes of parallelism are powers of two: tensors within a node, pipelines where the layers can be
    divided, sequences into parts of 1,024 tokens at least. Pipelines do not shard gradients.
    """

    def sizes(name: str, fits: Callable[[int], bool]) -> list[int]:
        known: int = pinned.get(name, getattr(start, name))
        return [known] if name in pinned else sorted({known, *filter(fits, (1, 2, 4, 8, 16))})

    samples, least = start.step_tokens / start.seq_len, min(1.0, start.micro_batch)
    recomputes = [pinned["recompute"]] if "recompute" in pinned else ["none", "selective", "full"]
    stores = dict.fromkeys([pinned.get("optimizer", start.optimizer)])
    if start.optimizer not in stores:
        start = replace(start, state_bytes=None)  # it was measured of another one
    elif start.method == "full" and "optimizer" not in pinned:
        stores["offload"] = None
    widths = sizes("tp", lambda n: n <= min(8, node_size) and shape.heads % n == 0)
    depths = sizes("pp", lambda n: shape.layers % n == 0)
    lengths = sizes("cp", lambda n: n == 1 or (n <= 8 and 1024 * n <= start.seq_len))
    for tp, pp, cp in product(widths, depths, lengths):
        if gpus % (tp * pp * cp):
            continue
        replicas = gpus // (tp * pp)
        each = samples * cp / replicas  # of a rank, in a step
        whole = max(1, round(each))
        counts = [n for n in range(1, min(whole, 4096) + 1) if whole % n == 0]
        if "micro_batch" in pinned:
            counts = [max(1, round(each / pinned["micro_batch"]))]
        counts = [pinned["accumulation"]] if "accumulation" in pinned else counts
        batches = [(pinned.get("micro_batch", max(each / n, least)), n) for n in counts]
        ways = ["zero1"] if pp > 1 else ["zero1", "zero2", "fsdp"]
        ways = ["ddp", *ways] if replicas > 1 else ["ddp"]
        ends = {1, node_size} if shape.experts else set()
        groups = {start.ep, *(n for n in ends if not (shape.experts % n or replicas * tp % n))}
        for (micro, count), *values in product(batches, ways, recomputes, stores, sorted(groups)):
            names = ("sharding", "recompute", "optimizer", "ep")
            known: dict[str, Any] = dict(zip(names, values, strict=True), tp=tp, pp=pp, cp=cp)
            yield replace(start, gpus=gpus, micro_batch=micro, accumulation=count, **known)
