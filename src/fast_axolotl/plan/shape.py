"""The shape of a transformer, from its ``config.json`` or from its number of parameters.

Counted are matrices and embeddings; norms and biases are below 0.1 %. Attention with compressed
keys and values (MLA) is counted by its own projections. State-space layers, linear attention and
encoders are refused: nothing here knows how fast they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, MissingFileError

_PLAIN = ("gpt2", "gpt_neox", "gptj", "opt", "mpt", "bloom", "phi", "gpt_bigcode", "starcoder2")
"""Families whose feed-forward part has no gate."""
_REFUSED = ("mamba", "ssm", "hybrid", "rwkv", "linear_attention", "is_encoder_decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder: ``layers`` blocks of attention and a feed-forward part, dense or of experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the dense feed-forward part."""
    vocabulary: int
    is_gated: bool = True
    """Whether the feed-forward part has a gate beside its first matrix."""
    is_tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of the experts that every token meets."""
    dense_layers: int = 0
    """Of a model with experts: its first layers without them."""
    attention_weights: int | None = None
    """Of one layer, where they do not follow from the heads (MLA)."""
    window: int | None = None
    window_layers: int = 0

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def attention_size(self) -> int:
        """Weights of one layer's attention."""
        if self.attention_weights is not None:
            return self.attention_weights
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    def ffn_size(self, width: int) -> int:
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
        return self.layers * self.layer_weights + tables * self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> float:
        """Those of routed experts: what expert parallelism divides."""
        return self.layers * self.expert_share * self.experts * self.ffn_size(self.expert_ffn)

    @property
    def active_parameters(self) -> float:
        """The weights that one token is multiplied with."""
        met = self.expert_parameters * (self.top_k / self.experts if self.experts else 0.0)
        whole = self.layers * self.layer_weights - self.expert_parameters
        return whole + met + self.vocabulary * self.hidden

    def attended(self, length: float) -> float:
        """Positions that a token attends to, summed over the layers, before the causal mask."""
        near = self.window_layers if self.window else 0
        return (self.layers - near) * length + near * min(length, self.window or 0)


def guess_shape(
    parameters: float,
    active: float | None = None,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    vocabulary: int = 32_000,
) -> Shape:
    """What is usual at that size: 128 times as wide as deep, a gated feed-forward part that takes
    the rest; where fewer weights are active, experts of which a token meets 8."""
    body = min(active or parameters, parameters)
    hidden = hidden or max(128, 128 * round((128 * body / 13) ** (1 / 3) / 128))
    tables = 1 if active else 2  # the input's is not active
    rest = max(body - tables * vocabulary * hidden, body / 2)
    layers = layers or max(2, round(rest / (13 * hidden * hidden)))
    ffn = max(8, round((rest / layers - 2.5 * hidden * hidden) / (3 * hidden)))
    size, is_sparse = min(128, hidden), parameters > 1.5 * body
    met = layers * 3 * hidden * ffn
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // size),
        kv_heads=max(1, hidden // size // 4),
        head_size=size,
        ffn=0 if is_sparse else ffn,
        vocabulary=vocabulary,
        experts=max(16, round(8 * (parameters - body + met) / met)) if is_sparse else 0,
        top_k=8 if is_sparse else 0,
        expert_ffn=ffn // 8 if is_sparse else 0,
    )


def read_config(path: str | Path) -> Shape:
    """The shape that a ``config.json`` of transformers describes, or that of a folder's."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        message = "there is no such file; pass a model's config.json"
        raise MissingFileError(message, path=str(file))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"cannot be read as JSON: {error}", path=str(file)) from None
    if not isinstance(config, dict):
        raise DataError("holds no JSON object; pass a model's config.json", path=str(file))
    inner = config.get("text_config")
    return parse_config(inner if isinstance(inner, dict) else config, str(file))


def parse_config(config: Mapping[str, Any], path: str = "") -> Shape:
    """The shape in a config that was read already."""

    def find(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            message = f"does not contain {names[0]}; a plan needs the config.json of a decoder"
            raise DataError(message, path=path)
        return default

    kinds = list(config.get("layer_types") or config.get("layers_block_type") or ())
    words = [config.get("model_type"), *kinds, *(name for name in config if config[name])]
    for word in map(str, words):
        if word.startswith(_REFUSED):
            message = f"{word!r}: state-space layers and encoders are not supported in a plan"
            raise DataError(message, path=path)
    hidden = find("hidden_size", "n_embd", "d_model")
    heads = find("num_attention_heads", "n_head", "n_heads")
    layers = find("num_hidden_layers", "n_layer", "n_layers")
    head_size = find("head_dim", default=hidden // heads)
    ffn = find("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    experts = find("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_ffn = find("moe_intermediate_size", default=ffn) if experts else 0
    shared = find("n_shared_experts", default=0) * expert_ffn if experts else 0
    weights = None
    if config.get("kv_lora_rank"):
        rank, query = find("kv_lora_rank"), find("q_lora_rank", default=hidden)
        rope, plain, value = find("qk_rope_head_dim"), find("qk_nope_head_dim"), find("v_head_dim")
        weights = hidden * (rank + rope) + heads * (rank * (plain + value) + value * hidden)
        weights += query * heads * (plain + rope) + (0 if query == hidden else hidden * query)
        head_size = (plain + rope + value) // 2
    is_tied = str(config.get("model_type", "")).startswith(("gemma", "gpt2"))  # their default
    window = config.get("sliding_window")
    near = kinds.count("sliding_attention")
    if window and not kinds and config.get("use_sliding_window", True):
        near = layers
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if weights else find("num_key_value_heads", default=heads),
        head_size=head_size,
        ffn=ffn,
        vocabulary=find("vocab_size"),
        is_gated=config.get("model_type") not in _PLAIN,
        is_tied=bool(config.get("tie_word_embeddings", is_tied)),
        experts=experts,
        top_k=find("num_experts_per_tok", "moe_k", "top_k_experts", default=1) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=find("shared_expert_intermediate_size", default=shared) if experts else 0,
        dense_layers=find("first_k_dense_replace", default=0) if experts else 0,
        attention_weights=weights,
        window=window if near else None,
        window_layers=near,
    )
