"""Read the size and shape of a live model, for MFU.

Works on any ``torch.nn.Module`` with a config of transformers' kind, wrapped by PEFT, DDP, FSDP,
DeepSpeed or ``torch.compile`` or not. What the formula does not cover says so: a reason under
``model_flops_per_token`` means that FLOPs are not known at all, one under another name that a part
is left out, and which.

Weights are found by a walk over the modules, not over ``parameters()``: what a module says of
itself (``in_features``, ``out_features``) stays true when its weight is quantised into bytes,
sharded by FSDP or DeepSpeed, or replaced by something that is no parameter at all. Costs one visit
per module. Left out, because a token is not multiplied with them: embeddings that are looked up,
biases and norms, towers for images or sound (their tokens are not the text's), the copies that PEFT
keeps of modules it replaced, and adapters that are not active.

Does not look at activations: a model that skips layers, or runs one twice, is counted as built.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.hooks import guarded
from fast_axolotl.record import ModelShape
from fast_axolotl.record.devices import normalise_dtype

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_top_k")
"""How configs call the number of experts that a token meets."""
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_FULL = ("full_attention", "attention")
_NEAR = ("sliding_attention", "chunked_attention")
"""Names of layer types: attention over everything, and over a window."""
_EXPERTS = "experts"
"""Name of the module that holds the routed experts, in every model family of transformers that has
them; those every token meets are called ``shared_expert(s)``."""


def _explain(meter: Meter, error: Exception) -> None:
    sentence = f"the model's shape could not be read: {type(error).__name__}: {error}"
    for field in ("mfu", "hfu", "model_flops_per_token"):
        meter.reason(field, sentence)


@guarded(_explain)
def record_model(meter: Meter, model: Any, **known: Any) -> None:
    """Record the shape of a model, or why not."""
    meter.model(read_shape(model, **known))


def read_shape(
    model: Any,
    *,
    sequence_len: int | None = None,
    is_packed: bool = False,
) -> ModelShape:
    """The shape of ``model``.

    Args:
        sequence_len: Length of a sample, for when sequence lengths are not seen.
        is_packed: Whether a sample holds several sequences that do not attend to each other.
    """
    if not hasattr(model, "named_modules"):
        raise UsageError(f"read_shape needs a torch module, not a {type(model).__name__}")
    # The model below ``torch.compile``, DDP, FSDP, DeepSpeed's engine and the like.
    while hasattr(
        inner := getattr(model, "_orig_mod", getattr(model, "module", None)), "named_modules"
    ):
        model = inner
    whole = getattr(model, "config", None)
    ask = getattr(whole, "get_text_config", None)
    config = ask(decoder=True) if callable(ask) else whole
    reasons: dict[str, str] = {}
    sizes = _count_matrices(model, whole, config, reasons)
    layers = _read_layers(config, reasons)
    full = [width for width, window in layers if window is None]
    near = [width for width, window in layers if window is not None]
    width = _mean(full or near)
    is_checkpointed = any(
        getattr(module, "gradient_checkpointing", False) is True
        or type(module).__name__ == "CheckpointWrapper"
        for module in model.modules()
    )
    device_name, num_devices = _read_devices(model)
    # FSDP's second version gives the model's class a name of its own.
    name = getattr(config, "_name_or_path", "") or type(model).__name__.removeprefix("FSDP")
    return ModelShape(
        name=str(name),
        num_parameters=round(sizes["all"]),
        num_frozen=round(sizes["frozen"]),
        num_adapter=round(sizes["adapter"]),
        layers=len(layers),
        attention_width=width,
        attention_window=_mean([window for _, window in layers if window]) or None,
        window_layers=len(near),
        window_width=_mean(near) if near and _mean(near) != width else None,
        sequence_len=sequence_len,
        is_checkpointed=is_checkpointed,
        is_packed=is_packed,
        dtype=normalise_dtype(_read_dtype(model)),
        device_name=device_name,
        num_devices=num_devices,
        config={} if config is None or ask is None else json.loads(config.to_json_string(False)),
        reasons=reasons,
    )


_Weight = tuple[str, tuple[int, ...], bool]
"""Path of a matrix, or of a stack of those of experts; its logical shape; whether it is trained."""


def _walk(
    module: Any, path: str, skipped: frozenset[int], adapters: frozenset[str] | None = None
) -> Iterator[_Weight]:
    """Every weight that a token is multiplied with, but for modules whose ``id`` is skipped."""
    if id(module) in skipped:
        return
    if _is_linear(module):
        # Some quantised layers have buffers only: nothing to train.
        is_trained = bool(getattr(getattr(module, "weight", None), "requires_grad", False))
        yield path, (module.out_features, module.in_features), is_trained
        return
    active = getattr(module, "active_adapters", None)
    if isinstance(active, (list, tuple)) and all(isinstance(name, str) for name in active):
        adapters = frozenset(active)
    is_lora = path.rpartition(".")[2].startswith("lora_")
    prefix = f"{path}." if path else ""
    for name, parameter in module.named_parameters(recurse=False):
        shape = _logical_shape(module, parameter)
        # Experts have biases of two dimensions, and LoRA of an embedding looks its first half up.
        is_matrix = len(shape) > 1 and not (
            name.endswith("bias") or path.endswith("lora_embedding_A")
        )
        if is_matrix and (not is_lora or adapters is None or name in adapters):
            yield prefix + name, shape, bool(parameter.requires_grad)
    for name, child in module.named_children():
        if name == "original_module" and hasattr(module, "modules_to_save"):
            continue  # PEFT trains a copy; this one is kept for undoing it and never runs
        if not is_lora or adapters is None or name in adapters:
            yield from _walk(child, prefix + name, skipped, adapters)


def _is_linear(module: Any) -> bool:
    """A layer that is one matrix. PEFT's wrappers have the same attributes and hold the layer."""
    return (
        isinstance(getattr(module, "in_features", None), int)
        and isinstance(getattr(module, "out_features", None), int)
        and not hasattr(module, "base_layer")
    )


def _logical_shape(module: Any, parameter: Any) -> tuple[int, ...]:
    whole = getattr(parameter, "ds_shape", None)  # DeepSpeed ZeRO-3 leaves an empty tensor
    if whole is not None:
        return tuple(whole)
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two weights to a byte
    if state is None and hasattr(module, "original") and hasattr(module, "__getitem__"):
        state = getattr(module[0], "quant_state", None)  # the same, as a parametrization
    shape = getattr(state, "shape", None)
    return tuple(parameter.shape if shape is None else shape)


def _count_matrices(
    model: Any, whole: Any, config: Any, reasons: dict[str, str]
) -> dict[str, float]:
    """Sizes of all, frozen and adapter weights; of experts, the share that one token meets.

    Modules with a config of their own that is not the text's see images or sound: left out.
    """
    from torch.nn import Embedding

    parts: set[int] = set()
    if whole is not None and config is not whole:
        parts = {
            id(part)
            for name, part in vars(whole).items()
            if name.endswith("_config") and part is not config and hasattr(part, "to_dict")
        }
    towers = [item for item in model.modules() if id(getattr(item, "config", None)) in parts]
    if towers:
        names = sorted({type(tower).__name__ for tower in towers})
        reasons["towers"] = f"the FLOPs of {', '.join(names)} are not counted, only those of text"
    top_k, num_experts = _look_up(config, *_TOP_K), _look_up(config, *_NUM_EXPERTS)
    sums = {"all": 0.0, "frozen": 0.0, "adapter": 0.0}
    has_experts = False
    ask = getattr(model, "get_output_embeddings", None)
    output = ask() if callable(ask) else None
    lookups = [
        part for part in model.modules() if isinstance(part, Embedding) and part is not output
    ]
    for path, shape, is_trained in _walk(model, "", frozenset(map(id, [*towers, *lookups]))):
        size = float(prod(shape))
        names = path.split(".")
        if _EXPERTS in names or (len(shape) > 2 and shape[0] == num_experts):
            has_experts = True
            size *= min(1.0, top_k / num_experts) if top_k and num_experts else 1.0
        sums["all"] += size
        sums["frozen"] += 0.0 if is_trained else size
        sums["adapter"] += size if any(name.startswith("lora_") for name in names) else 0.0
    if not sums["all"]:
        _block(reasons, "the model has no matrices to count")
    elif has_experts and not (top_k and num_experts):
        _block(reasons, "the config does not say how many experts each token uses")
    elif num_experts and num_experts > 1 and not has_experts:
        _block(reasons, f"the weights of the {num_experts} experts were not found in the model")
    return sums


def _read_layers(config: Any, reasons: dict[str, str]) -> list[tuple[int, int | None]]:
    """Width of attention and window, if there is one, of every layer that has attention."""
    if getattr(config, "is_encoder_decoder", False):
        _block(reasons, "FLOPs of encoder-decoder models are not counted")
    num_layers = _look_up(config, "num_hidden_layers", "n_layer", "n_layers")
    if num_layers is None:
        _block(reasons, "the model's config does not say how many layers it has")
        return []
    configs = [config] * num_layers
    if getattr(config, "is_heterogeneous", False):
        configs = list(config.per_layer_config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        return [(_read_width(layer, reasons), _read_window(layer)) for layer in configs]
    layers = [
        (_read_width(layer, reasons), _read_window(layer) if kind in _NEAR else None)
        for layer, kind in zip(configs, kinds, strict=False)
        if kind in _FULL or kind in _NEAR
    ]
    if len(layers) < num_layers:
        reasons["layers"] = (
            f"{num_layers - len(layers)} of {num_layers} layers have no softmax attention: "
            "of these only the weights are counted"
        )
    return layers


def _read_window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return _look_up(config, "sliding_window", "attention_chunk_size")


def _read_width(config: Any, reasons: dict[str, str]) -> int:
    """Heads times head size. Where keys and values differ in size (MLA), times their mean."""
    heads = _look_up(config, "num_attention_heads", "n_head", "n_heads")
    if heads is None:
        reasons["attention_width"] = "the config has no attention heads; attention is not counted"
        return 0
    key, value = _look_up(config, "qk_head_dim"), _look_up(config, "v_head_dim")
    if key and value:
        return heads * (key + value) // 2
    size = _look_up(config, "head_dim")
    return heads * size if size else _look_up(config, "hidden_size", "n_embd", "d_model") or 0


def _mean(values: list[int]) -> int:
    return round(sum(values) / len(values)) if values else 0


def _look_up(config: Any, *names: str) -> int | None:
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses what differs from layer to layer
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _block(reasons: dict[str, str], reason: str) -> None:
    reasons.setdefault("model_flops_per_token", reason)


def _read_dtype(model: Any) -> str:
    """Mixed precision's where it is on, else that in which most weights are multiplied."""
    torch = sys.modules["torch"]
    if torch.is_autocast_enabled("cuda"):
        return str(torch.get_autocast_dtype("cuda"))
    # What accelerate, and so the Trainer of transformers, casts to inside the forward pass. Asking
    # would make a state where there is none.
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.AcceleratorState._shared_state:
        mixed = accelerate.AcceleratorState().mixed_precision
        if mixed in ("bf16", "fp16", "fp8"):
            return str(mixed)
    sizes = Counter[Any]()
    for module in model.modules():
        compute = getattr(module, "compute_dtype", None)
        for parameter in module.parameters(recurse=False):
            kind = compute if isinstance(compute, torch.dtype) else parameter.dtype
            if kind.is_floating_point:
                sizes[kind] += parameter.numel()
    kind = max(sizes, key=sizes.__getitem__, default=torch.bfloat16)
    if kind is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(kind)


def _read_devices(model: Any) -> tuple[str | None, int]:
    """The GPU's name, and how many one process spreads the layers over (``device_map``).

    Weights may be kept on the CPU between their uses: then the current GPU's.
    """
    cuda = sys.modules["torch"].cuda
    places = [item.device for item in model.parameters() if item.device.type == "cuda"]
    if places and cuda.is_available():
        return str(cuda.get_device_name(places[0])), len(set(map(str, places)))
    is_used = cuda.is_available() and cuda.is_initialized()
    return (str(cuda.get_device_name()) if is_used else None), 1
