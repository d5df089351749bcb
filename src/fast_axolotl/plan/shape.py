"""The shape of a transformer, as far as memory and time need it: from ``config.json``, from a
record, or from a number of parameters alone.

Counted are matrices and embeddings; norms and biases are below 0.1 %. Attention with compressed
keys and values (MLA) is counted by its own projections.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.record import ModelShape

__all__ = ["Shape", "guess_shape", "read_config", "shape_of_record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder: ``layers`` blocks of attention and a feed-forward part, dense or of experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the dense feed-forward part; 0 where every layer has experts only."""
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
    is_guess: bool = False
    """Whether only the number of parameters is known, and the rest is what is usual at that size."""

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
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def layer_weights(self) -> float:
        """Of one layer, all experts included: the mean over the layers."""
        dense = (self.layers - self.expert_layers) * self.ffn_size(self.ffn)
        each = self.experts * self.ffn_size(self.expert_ffn) + self.ffn_size(self.shared_ffn)
        return self.attention_size + (dense + self.expert_layers * each) / self.layers

    @property
    def parameters(self) -> float:
        tables = 1 if self.is_tied else 2
        return self.layers * self.layer_weights + tables * self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> float:
        """Those of routed experts: what expert parallelism divides."""
        return self.expert_layers * self.experts * self.ffn_size(self.expert_ffn)

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
    parameters: float, *, active: float | None = None, vocabulary: int = 32_000
) -> Shape:
    """What is usual at that size: about 128 times as wide as deep, a gated feed-forward part of 3.5
    widths; with ``active``, experts of which a token meets 8."""
    body = active or parameters
    width = (128 * body / 13) ** (1 / 3)
    hidden = max(128, 128 * round(width / 128))
    rest = max(body - 2 * vocabulary * hidden, body / 2)
    layers = max(2, round(rest / (hidden * hidden * 13)))
    ffn = max(128, round((rest / layers - 2.5 * hidden * hidden) / (3 * hidden)))
    heads = max(1, hidden // 128)
    whole = Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=max(1, heads // 4), head_size=128,
        ffn=ffn, vocabulary=vocabulary, is_guess=True,
    )  # fmt: skip
    if active is None or active >= parameters:
        return whole
    count = max(
        16, round(8 * (parameters - body + layers * 3 * hidden * ffn) / (layers * 3 * hidden * ffn))
    )
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=max(1, heads // 4), head_size=128,
        ffn=0, vocabulary=vocabulary, experts=count, top_k=8, expert_ffn=max(64, ffn // 8), is_guess=True,
    )  # fmt: skip


def read_config(path: str | Path) -> Shape:
    """The shape that a ``config.json`` of transformers describes, or that of a folder's."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(
            "there is no such file; give a model's config.json", path=str(file)
        ) from None
    except (ValueError, OSError) as error:
        raise DataError(f"cannot be read as JSON: {error}", path=str(file)) from None
    if not isinstance(config, dict):
        raise DataError("holds no JSON object; give a model's config.json", path=str(file))
    inner = config.get("text_config")
    return parse_config(inner if isinstance(inner, dict) else config, str(file))


def parse_config(config: Mapping[str, Any], path: str = "config") -> Shape:
    """The shape in a config that was read already."""

    def find(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is not None:
            return default
        raise DataError(
            f"does not say {names[0]}; a plan needs a decoder's config.json of transformers",
            path=path,
        )

    hidden = find("hidden_size", "n_embd", "d_model")
    heads = find("num_attention_heads", "n_head", "n_heads")
    layers = find("num_hidden_layers", "n_layer", "n_layers")
    head_size = find("head_dim", "v_head_dim", default=hidden // heads)
    kv_heads = find("num_key_value_heads", default=heads)
    kind = str(config.get("model_type", ""))
    is_plain = kind in ("gpt2", "gpt_neox", "gptj", "opt", "mpt", "bloom", "phi", "gpt_bigcode")
    ffn = find("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = find("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_ffn = find("moe_intermediate_size", default=ffn) if experts else 0
    shared = find("shared_expert_intermediate_size", default=0) if experts else 0
    if experts and not shared:
        shared = find("n_shared_experts", default=0) * expert_ffn
    weights = None
    if config.get("kv_lora_rank"):
        query, keys = find("q_lora_rank", default=hidden), find("kv_lora_rank")
        rope, plain, value = find("qk_rope_head_dim"), find("qk_nope_head_dim"), find("v_head_dim")
        weights = hidden * (keys + rope) + keys * heads * (plain + value) + heads * value * hidden
        weights += query * heads * (plain + rope) + (
            hidden * query if config.get("q_lora_rank") else 0
        )
        head_size = (plain + rope + value) // 2
    kinds = config.get("layer_types") or ()
    near = sum(kind == "sliding_attention" for kind in kinds)
    window = config.get("sliding_window")
    if window and not kinds and config.get("use_sliding_window", True):
        near = layers
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=find("vocab_size"),
        is_gated=not is_plain,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        top_k=find("num_experts_per_tok", "moe_k", "top_k_experts", default=1) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        dense_layers=find("first_k_dense_replace", default=0) if experts else 0,
        attention_weights=weights,
        window=window if near else None,
        window_layers=near,
    )


def shape_of_record(model: ModelShape) -> Shape:
    """What a record's shape means: its weights, layers and attention are measured, the division
    among matrices is the usual one."""
    active = float(model.num_parameters - model.num_adapter)
    total = float(model.num_total or model.num_parameters) - model.num_adapter
    layers, width = max(1, model.layers), max(64, model.attention_width)
    is_sparse = total > 1.5 * active
    # What all weights have beyond those that a token is multiplied with is the input's table.
    table = total - active
    if is_sparse or not 0.005 * active < table:
        table = min(0.2 * active, 128_000.0 * width)
    vocabulary = max(1, round(table / width))
    body = max(active - table, active / 4) / layers - 2.5 * width * width
    ffn = max(1, math.ceil(body / (3 * width)))
    experts = round(8 * (total - active + layers * 3 * width * ffn) / (layers * 3 * width * ffn))
    return Shape(
        layers=layers,
        hidden=width,
        heads=max(1, width // 128),
        kv_heads=max(1, width // 512),
        head_size=min(128, width),
        ffn=0 if is_sparse else ffn,
        vocabulary=vocabulary,
        experts=experts if is_sparse else 0,
        top_k=8 if is_sparse else 0,
        expert_ffn=max(1, ffn // 8) if is_sparse else 0,
        window=model.attention_window,
        window_layers=model.window_layers,
        is_tied=not is_sparse and total - active < 0.005 * active,
    )
