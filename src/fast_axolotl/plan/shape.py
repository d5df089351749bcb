"""The shape of a decoder, from its ``config.json``.

Plain families are read from the config alone. For any other, transformers builds the model on the
meta device, without weights, and its own matrices are counted. Where transformers is not installed,
or a config leaves something out, the model is refused: nothing is guessed. State-space layers,
linear attention and encoders are refused, too: nothing here knows how fast they are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fast_axolotl.errors import DataError

_PLAIN = ("llama", "mistral", "qwen2", "qwen3")
_REFUSED = re.compile("a_log|conv|mamba|mixer|ssm|linear_attn|recurrent|rwkv|rglru|mlstm")
"""Parts of the names of weights of layers whose speed nothing here knows."""
_FEED_FORWARD = ("mlp", "ffn", "ff", "feed_forward", "fc", "dense_h", "dense_4h")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_top_k")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder: ``layers`` blocks of attention and a feed-forward part, dense or of experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: float
    """Width of the dense feed-forward part."""
    vocabulary: int
    is_gated: bool = True
    """Whether the feed-forward part has a gate beside its first matrix."""
    is_tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: float = 0
    shared_ffn: float = 0
    """Width of the experts that every token meets."""
    dense_layers: int = 0
    """Of a model with experts: its layers without them."""
    attention_weights: float | None = None
    """Of one layer, routers included, where they do not follow from the heads."""
    window: int | None = None
    window_layers: int = 0
    other: float = 0
    """Norms, biases and tables of positions."""

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def attention_size(self) -> float:
        """Weights of one layer's attention."""
        if self.attention_weights is not None:
            return self.attention_weights
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    def ffn_size(self, width: float) -> float:
        return (3 if self.is_gated else 2) * self.hidden * width

    @property
    def expert_share(self) -> float:
        """Of the layers, those with experts."""
        return (self.layers - self.dense_layers) / self.layers if self.experts else 0.0

    @property
    def active_ffn(self) -> float:
        """Width of the feed-forward parts that one token meets, mean over the layers."""
        routed = self.top_k * self.expert_ffn + self.shared_ffn
        return (1 - self.expert_share) * self.ffn + self.expert_share * routed

    @property
    def layer_weights(self) -> float:
        """Of one layer, all experts included: the mean over the layers."""
        each = self.experts * self.ffn_size(self.expert_ffn) + self.ffn_size(self.shared_ffn)
        dense = (1 - self.expert_share) * self.ffn_size(self.ffn)
        return self.attention_size + dense + self.expert_share * each

    @property
    def parameters(self) -> float:
        tables = 1 if self.is_tied else 2
        matrices = self.layers * self.layer_weights + tables * self.vocabulary * self.hidden
        return matrices + self.other

    @property
    def expert_parameters(self) -> float:
        """Those of routed experts: what expert parallelism divides."""
        return self.layers * self.expert_share * self.experts * self.ffn_size(self.expert_ffn)

    def attended(self, length: float) -> float:
        """Positions that a token attends to, summed over the layers, before the causal mask."""
        far = self.layers - self.window_layers
        return far * length + self.window_layers * min(length, self.window or length)


def read_config(path: str | Path) -> Shape:
    """The shape that a ``config.json`` of transformers describes, or that of a folder's."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"cannot be read as JSON: {error}", path=str(file)) from None
    if not isinstance(config, dict):
        raise DataError("holds no JSON object; pass a model's config.json", path=str(file))
    return parse_config(config, str(file))


def parse_config(config: Mapping[str, Any], path: str = "") -> Shape:
    """The shape in a config that was read already."""
    kind = config.get("model_type")
    names = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"]
    names += ["intermediate_size", "vocab_size", "tie_word_embeddings"]
    values: list[Any] = [config.get(name) for name in names]
    is_odd = any(config.get(name) for name in ("attention_bias", "mlp_bias", *_NUM_EXPERTS))
    if kind not in _PLAIN or None in values or is_odd:
        return _ask_transformers(config, path)
    layers, hidden, heads, kv_heads, ffn, vocabulary, is_tied = values
    head_size = config.get("head_dim") or hidden // heads
    small = {"qwen3": 2 * head_size, "qwen2": head_size * (heads + 2 * kv_heads)}
    kinds = list(config.get("layer_types") or ())
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=vocabulary,
        is_tied=is_tied,
        window=window,
        window_layers=(kinds.count("sliding_attention") if kinds else layers) if window else 0,
        other=layers * (2 * hidden + small.get(kind, 0)) + hidden,
    )


def _ask_transformers(config: Mapping[str, Any], path: str) -> Shape:
    """Count the matrices of the model that transformers builds without weights."""
    kind = config.get("model_type")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        message = f"the architecture {kind!r} is known to transformers alone: install transformers"
        raise DataError(f"{message}, or plan from a llama-like config", path=path) from None
    encoders = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "git"}
    if kind in encoders or config.get("is_encoder_decoder"):
        raise DataError(f"{kind!r}: encoders are not supported in a plan", path=path)
    try:
        whole = AutoConfig.for_model(**config)
        own = whole.get_text_config(decoder=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        message = f"transformers builds no decoder from it: {str(error)[:200]}"
        raise DataError(message, path=path) from None

    def find(*names: str) -> int:
        for name in names:
            try:
                value = getattr(own, name, None)
            except RuntimeError:  # transformers refuses what differs from layer to layer
                value = round(mean(getattr(one, name) for one in own.per_layer_config))
            if value:
                return int(value)
        return 0

    table = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", table)
    lookups = {
        id(weight)
        for module in model.modules()
        if "Embedding" in type(module).__name__
        for weight in module.parameters(recurse=False)
    }
    experts, gates = find(*_NUM_EXPERTS), 0
    sums: dict[str, Counter[int]] = {kind: Counter() for kind in ("routed", "ffn", "rest", "above")}
    for name, weight in model.named_parameters():
        parts = name.lower().split(".")
        if _REFUSED.search(name.lower()):
            message = f"{kind!r} has {name}: state-space layers are not supported in a plan"
            raise DataError(message, path=path)
        layer = next((int(part) for part in parts if part.isdecimal()), -1)
        is_matrix = (
            weight.dim() > 1 and not parts[-1].endswith("bias") and id(weight) not in lookups
        )
        group = "rest"
        if layer < 0 or not is_matrix or weight is head:
            group = "above"
        elif "experts" in parts or (weight.dim() > 2 and weight.shape[0] == experts):
            group = "routed"
        elif weight.shape[0] != experts and any(part.startswith(_FEED_FORWARD) for part in parts):
            group, gates = "ffn", gates + ("gate" in name or parts[-2] in ("w3", "wi"))
        sums[group][layer] += weight.numel()
    sparse, top_k = sums["routed"].keys(), find(*_TOP_K)
    layers, hidden, heads = len(sums["rest"]), find("hidden_size"), find("num_attention_heads")
    kinds = list(getattr(own, "layer_types", None) or ())
    unknown = {one for one in kinds if not one.endswith("attention") or "linear" in one}
    if unknown or not layers or (sparse and not top_k):
        reason = ", ".join(unknown) or "it does not say how many experts a token meets"
        raise DataError(f"{kind!r} is not supported in a plan: {reason}", path=path)
    widths = find("qk_head_dim"), find("v_head_dim")
    near = sum(one in ("sliding_attention", "chunked_attention") for one in kinds)
    lengths = ("sliding_window", "attention_chunk_size")
    window = find(*lengths) if getattr(own, "use_sliding_window", True) else 0
    is_gated = gates > 0 or bool(sparse)
    shared = sum(size for layer, size in sums["ffn"].items() if layer in sparse)
    per_width = (3 if is_gated else 2) * hidden
    found = Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=find("num_key_value_heads", "num_kv_heads") or heads,
        head_size=sum(widths) // 2 if all(widths) else find("head_dim") or hidden // heads,
        ffn=(sums["ffn"].total() - shared) / max(1, layers - len(sparse)) / per_width,
        vocabulary=table.shape[0],
        is_gated=is_gated,
        is_tied=head is table,
        experts=experts if sparse else 0,
        top_k=top_k if sparse else 0,
        expert_ffn=sums["routed"].total() / max(1, len(sparse) * experts) / per_width,
        shared_ffn=shared / max(1, len(sparse)) / per_width,
        dense_layers=layers - len(sparse) if sparse else 0,
        attention_weights=sums["rest"].total() / layers,
        window=window or None,
        window_layers=(near if kinds else layers) if window else 0,
    )
    total = sum(one.total() for one in sums.values())
    return replace(found, other=total - found.parameters)
