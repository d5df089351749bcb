"""Memory of one GPU: against peaks that torch measured, and by what divides it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.plan.memory import Layout, adapter_parameters, predict_memory
from fast_axolotl.plan.shape import Shape, parse_config, read_config, shape_of_record
from fast_axolotl.record import ModelShape

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SIZES = {
    "0.3B": (12, 1024, 16, 8, 4096, 32_000),
    "1.2B": (16, 2048, 32, 8, 8192, 128_256),
    "3B": (26, 3072, 24, 8, 8192, 32_000),
    "8B": (32, 4096, 32, 8, 14336, 128_256),
}
MEASURED: list[tuple[str, float, dict[str, Any]]] = [
    ("0.3B", 18.91, {"micro_batch": 8}),
    ("0.3B", 8.42, {"micro_batch": 8, "recompute": "full"}),
    ("0.3B", 22.93, {"micro_batch": 8, "states": "mixed"}),
    ("1.2B", 15.81, {"micro_batch": 1}),
    ("1.2B", 63.04, {"micro_batch": 8}),
    ("1.2B", 35.62, {"micro_batch": 8, "recompute": "full"}),
    ("1.2B", 25.55, {"micro_batch": 2, "accumulation": 4}),
    ("1.2B", 32.43, {"micro_batch": 4, "states": "mixed", "recompute": "full"}),
    ("1.2B", 29.04, {"micro_batch": 4, "method": "lora"}),
    ("1.2B", 16.35, {"micro_batch": 4, "method": "lora", "recompute": "full"}),
    ("3B", 48.24, {"micro_batch": 4}),
    ("3B", 35.58, {"micro_batch": 16, "recompute": "full"}),
    ("3B", 27.24, {"micro_batch": 1, "seq_len": 8192, "recompute": "full", "accumulation": 2}),
    ("3B", 34.50, {"micro_batch": 4, "method": "lora"}),
    ("8B", 64.33, {"micro_batch": 1, "recompute": "full"}),
    ("8B", 46.99, {"micro_batch": 2, "method": "lora"}),
    ("8B", 46.16, {"micro_batch": 8, "method": "lora", "recompute": "full"}),
]
"""``max_memory_allocated`` in GB of an H200 on 2026-11-16: torch 2.11, transformers 5.17."""


def llama(size: str) -> Shape:
    layers, hidden, heads, keys, ffn, vocabulary = SIZES[size]
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys,
        head_size=hidden // heads,
        ffn=ffn,
        vocabulary=vocabulary,
    )


@pytest.mark.parametrize(("size", "gigabytes", "changes"), MEASURED)
def test_the_peak_is_what_torch_measured(
    size: str, gigabytes: float, changes: dict[str, Any]
) -> None:
    layout = Layout(**{"gpus": 1, "seq_len": 2048, **changes})
    assert predict_memory(llama(size), layout).total == pytest.approx(gigabytes * 1e9, rel=0.02)


def test_each_way_of_sharding_divides_more() -> None:
    shape, plain = llama("8B"), Layout(gpus=8, states="master", accumulation=2)
    ddp, zero1, zero2, fsdp = (
        predict_memory(shape, replace(plain, sharding=sharding))  # type: ignore[arg-type]
        for sharding in ("ddp", "zero1", "zero2", "fsdp")
    )
    assert ddp.optimizer == pytest.approx(12 * shape.parameters)
    assert zero1.optimizer == pytest.approx(ddp.optimizer / 8)
    assert zero2.gradients == pytest.approx(ddp.gradients / 8)
    assert fsdp.weights == pytest.approx(ddp.weights / 8)
    assert fsdp.gathered > 0 == ddp.gathered
    assert ddp.total > zero1.total > zero2.total > fsdp.total


def test_tensor_and_pipeline_parallelism_divide_the_model() -> None:
    shape = llama("8B")
    whole = predict_memory(shape, Layout(gpus=8, accumulation=8))
    tensor = predict_memory(shape, Layout(gpus=8, tp=4, accumulation=8))
    pipeline = predict_memory(shape, Layout(gpus=8, pp=4, accumulation=8))
    assert tensor.weights == pytest.approx(whole.weights / 4)
    assert tensor.activations == pytest.approx(whole.activations / 4)
    assert pipeline.optimizer == pytest.approx(whole.optimizer / 4)
    # The first stage has a quarter of the layers, and four micro-batches in flight.
    assert pipeline.activations == pytest.approx(whole.activations, rel=0.05)


def test_lora_trains_its_adapters_alone_and_qlora_packs_the_rest() -> None:
    shape, plain = llama("8B"), Layout(gpus=1, recompute="full")
    lora = predict_memory(shape, replace(plain, method="lora"))
    qlora = predict_memory(shape, replace(plain, method="qlora"))
    assert adapter_parameters(shape, 16) == pytest.approx(41.9e6, rel=0.01)  # PEFT's own count
    assert lora.optimizer == pytest.approx(4 * 41.9e6, rel=0.01)
    assert qlora.weights < 0.4 * lora.weights
    assert qlora.optimizer == lora.optimizer


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (LLAMA_8B, 8.03, 7.50),
        ({**LLAMA_8B, "model_type": "qwen3", "tie_word_embeddings": True}, 7.50, 7.50),
        ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
          "tie_word_embeddings": True}, 0.1235, 0.1235),
        ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
          "num_local_experts": 8, "num_experts_per_tok": 2}, 46.7, 12.7),
        ({"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
          "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256,
          "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
          "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
          "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}, 671.0, 36.6),
    ],
)  # fmt: skip
def test_a_config_gives_the_parameters_its_maker_states(
    config: dict[str, Any], billions: float, active: float
) -> None:
    shape = parse_config(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


def test_windows_limit_how_far_a_token_attends() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    shape = parse_config({**LLAMA_8B, "layer_types": kinds, "sliding_window": 128})
    assert shape.attended(4096) == 16 * 4096 + 16 * 128
    assert parse_config(LLAMA_8B).attended(4096) == 32 * 4096


def test_the_shape_of_a_record_has_its_parameters() -> None:
    model = ModelShape(
        num_parameters=7_504_924_672, num_total=8_030_261_248, layers=32, attention_width=4096
    )
    shape = shape_of_record(model)
    assert shape.parameters == pytest.approx(8.03e9, rel=0.02)
    assert (shape.layers, shape.attention_width) == (32, 4096)


def test_bad_configs_name_the_file_and_the_cure(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config\.json"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text, words in [
        ("{", "JSON"),
        ("[]", "no JSON object"),
        ("{}", "hidden_size"),
        (json.dumps({**LLAMA_8B, "mamba_num_heads": 64}), "state-space"),
        (json.dumps({**LLAMA_8B, "layer_types": ["linear_attention"]}), "not supported in a plan"),
    ]:
        file.write_text(text)
        with pytest.raises(DataError, match=words) as caught:
            read_config(tmp_path)
        assert str(file) in str(caught.value)
    file.write_text(json.dumps({"text_config": LLAMA_8B}))
    assert read_config(file).layers == 32
