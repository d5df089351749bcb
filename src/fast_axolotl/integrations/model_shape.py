"""What FLOPs are computed from, read off a live model: its weights, its config, its device.

Works on any ``torch.nn.Module`` with a config of transformers' kind, wrapped by PEFT, DDP, FSDP,
DeepSpeed or ``torch.compile`` or not. What the formula does not cover says so: a reason under
``model_flops_per_token`` means that FLOPs are not known at all, one under another name that a part
is left out, and which.

Does not look at activations: a model that skips layers, or runs one twice, is counted as built.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.model_weights import Weight, count_weights, walk_weights
from fast_axolotl.measure.peak_flops import normalise_dtype
from fast_axolotl.record import ModelShape

__all__ = ["read_shape"]

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_top_k")
"""How configs call the number of experts that a token meets."""
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_FULL = ("full_attention", "attention")
_NEAR = ("sliding_attention", "chunked_attention")
"""Names of layer types: attention over everything, and over a window."""


def read_shape(
    model: Any,
    *,
    sequence_len: int | None = None,
    is_packed: bool = False,
    dtype: str | None = None,
    is_checkpointed: bool | None = None,
    peak_tflops: float | None = None,
) -> ModelShape:
    """The shape of ``model``.

    Args:
        sequence_len: Length of a sample, for when sequence lengths are not seen.
        is_packed: Whether a sample holds several sequences that do not attend to each other.
        dtype: What matrices are multiplied in. Left out: that of autocast or accelerate's mixed
            precision, else that of the weights.
        is_checkpointed: Whether activations are recomputed. Left out: what the modules say.
        peak_tflops: The device's peak, given by the user.
    """
    if not hasattr(model, "named_modules"):
        raise UsageError(f"read_shape needs a torch module, and this is a {type(model).__name__}")
    if peak_tflops is not None and not peak_tflops > 0:
        raise UsageError(f"peak_tflops is {peak_tflops}: give the device's dense TFLOP/s, above 0")
    inner = _unwrap(model)
    config = _text_config(getattr(inner, "config", None))
    reasons: dict[str, str] = {}
    towers = _find_towers(inner, config, reasons)
    counts = _count(walk_weights(inner, skipped=towers), config, reasons)
    layers = _read_layers(config, reasons)
    full = [width for width, window in layers if window is None]
    near = [width for width, window in layers if window is not None]
    width = _mean(full or near)
    return ModelShape(
        name=_name(inner, config),
        num_parameters=counts["all"],
        num_frozen=counts["frozen"],
        num_adapter=counts["adapter"],
        num_total=count_weights(inner),
        layers=len(layers),
        attention_width=width,
        attention_window=_mean([window for _, window in layers if window]) or None,
        window_layers=len(near),
        window_width=_mean(near) if near and _mean(near) != width else None,
        sequence_len=sequence_len,
        is_checkpointed=(
            _is_checkpointed(inner) if is_checkpointed is None else bool(is_checkpointed)
        ),
        is_packed=is_packed,
        dtype=normalise_dtype(_read_dtype(inner) if dtype is None else dtype),
        device_name=_device_name(inner),
        num_devices=_count_devices(inner),
        peak_tflops=peak_tflops,
        reasons=reasons,
    )


def _unwrap(model: Any) -> Any:
    """The model below ``torch.compile``, DDP, FSDP, DeepSpeed's engine and the like."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = getattr(model, "module", None)
        if not hasattr(inner, "named_modules"):
            return model
        model = inner


def _text_config(config: Any) -> Any:
    ask = getattr(config, "get_text_config", None)
    return ask(decoder=True) if callable(ask) else config


def _find_towers(model: Any, text: Any, reasons: dict[str, str]) -> frozenset[int]:
    """Modules with a config of their own that is not the text's: they see images or sound."""
    whole = getattr(model, "config", None)
    if whole is None or text is whole:
        return frozenset()
    parts = {
        id(part)
        for name, part in vars(whole).items()
        if name.endswith("_config") and part is not text and hasattr(part, "to_dict")
    }
    found = {id(one): one for one in model.modules() if id(getattr(one, "config", None)) in parts}
    if found:
        names = sorted({type(one).__name__ for one in found.values()})
        reasons["towers"] = f"the FLOPs of {', '.join(names)} are left out: only text is counted"
    return frozenset(found)


def _count(weights: Iterable[Weight], config: Any, reasons: dict[str, str]) -> dict[str, int]:
    """Sizes of all, frozen and adapter weights; of experts, the share that one token meets."""
    top_k, num_experts = _look_up(config, _TOP_K), _look_up(config, _NUM_EXPERTS)
    sums = {"all": 0.0, "frozen": 0.0, "adapter": 0.0}
    has_experts = False
    for weight in weights:
        share = 1.0
        if weight.is_routed(num_experts):
            has_experts = True
            share = min(1.0, top_k / num_experts) if top_k and num_experts else 1.0
        sums["all"] += share * weight.size
        sums["frozen"] += 0.0 if weight.is_trained else share * weight.size
        sums["adapter"] += share * weight.size if weight.is_adapter else 0.0
    if not sums["all"]:
        _block(reasons, "the model has no matrices to count")
    elif has_experts and not (top_k and num_experts):
        _block(reasons, "the model has experts, and its config does not say how many a token meets")
    elif num_experts and num_experts > 1 and not has_experts:
        _block(reasons, f"the weights of the {num_experts} experts were not found in the model")
    return {name: round(value) for name, value in sums.items()}


def _read_layers(config: Any, reasons: dict[str, str]) -> list[tuple[int, int | None]]:
    """Width of attention and window, if there is one, of every layer that has attention."""
    if getattr(config, "is_encoder_decoder", False):
        _block(reasons, "models with an encoder and a decoder are not counted")
    num_layers = _look_up(config, ("num_hidden_layers", "n_layer", "n_layers"))
    if num_layers is None:
        _block(reasons, "the model's config does not say how many layers it has")
        return []
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    each = [config] * num_layers
    if getattr(config, "is_heterogeneous", False):
        each = list(config.per_layer_config)
    if not kinds:
        return [(_read_width(one, reasons), _read_window(one)) for one in each]
    found = [
        (_read_width(one, reasons), _read_window(one) if kind in _NEAR else None)
        for one, kind in zip(each, kinds, strict=False)
        if kind in _FULL or kind in _NEAR
    ]
    if len(found) < num_layers:
        reasons["layers"] = (
            f"{num_layers - len(found)} of {num_layers} layers have no softmax attention: "
            "of these only the weights are counted"
        )
    return found


def _read_window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return _look_up(config, ("sliding_window", "attention_chunk_size"))


def _read_width(config: Any, reasons: dict[str, str]) -> int:
    """Heads times head size. Where keys and values differ in size (MLA), times their mean."""
    heads = _look_up(config, ("num_attention_heads", "n_head", "n_heads"))
    if heads is None:
        reasons["attention_width"] = "the config names no attention heads: none is counted"
        return 0
    key, value = _look_up(config, ("qk_head_dim",)), _look_up(config, ("v_head_dim",))
    if key and value:
        return heads * (key + value) // 2
    size = _look_up(config, ("head_dim",))
    return heads * size if size else _look_up(config, ("hidden_size", "n_embd", "d_model")) or 0


def _mean(values: list[int]) -> int:
    return round(sum(values) / len(values)) if values else 0


def _look_up(config: Any, names: tuple[str, ...]) -> int | None:
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


def _name(model: Any, config: Any) -> str:
    # FSDP's second version gives the model's class a name of its own.
    own = type(model).__name__.removeprefix("FSDP")
    return str(getattr(config, "_name_or_path", "") or own)


def _is_checkpointed(model: Any) -> bool:
    return any(
        getattr(module, "gradient_checkpointing", False) is True
        or type(module).__name__ == "CheckpointWrapper"
        for module in model.modules()
    )


def _read_dtype(model: Any) -> str:
    """Mixed precision's where it is on, else that in which most weights are multiplied."""
    torch = sys.modules["torch"]
    if torch.is_autocast_enabled("cuda"):
        return str(torch.get_autocast_dtype("cuda"))
    mixed = _mixed_precision()
    if mixed is not None:
        return mixed
    sizes: dict[Any, int] = {}
    for module in model.modules():
        compute = getattr(module, "compute_dtype", None)
        for parameter in module.parameters(recurse=False):
            kind = compute if isinstance(compute, torch.dtype) else parameter.dtype
            if kind.is_floating_point:
                sizes[kind] = sizes.get(kind, 0) + parameter.numel()
    if not sizes:
        return "bfloat16"
    kind = max(sizes, key=lambda one: sizes[one])
    if kind is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(kind)


def _mixed_precision() -> str | None:
    """What accelerate, and so the Trainer of transformers, casts to inside the forward pass."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.AcceleratorState._shared_state:
        return None  # asking would make a state where there is none
    kind = module.AcceleratorState().mixed_precision
    return kind if kind in ("bf16", "fp16", "fp8") else None


def _device_name(model: Any) -> str | None:
    """The GPU's name. Weights may be kept on the CPU between their uses: then the current GPU's."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():
        return None
    for parameter in model.parameters():
        if parameter.device.type == "cuda":
            return str(torch.cuda.get_device_name(parameter.device))
    return str(torch.cuda.get_device_name()) if torch.cuda.is_initialized() else None


def _count_devices(model: Any) -> int:
    """Several where one process spreads the layers over its GPUs (``device_map``)."""
    places = {str(one.device) for one in model.parameters() if one.device.type == "cuda"}
    return max(1, len(places))
