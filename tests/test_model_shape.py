"""Shapes of small real models, and their FLOPs against torch's own counter.

The counter sees every matrix multiplication of a forward and a backward pass on the CPU. With
eager attention it counts whole score matrices, as the formula does. Beyond the formula it sees only
the outer products that make rotary angles: under 0.1 % even of models this small.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.integrations.model_shape import read_shape
from fast_axolotl.measure.flops import flops_per_token
from fast_axolotl.record import ModelShape

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Other libraries warn as they please while they are imported.
pytestmark = pytest.mark.filterwarnings("default")

LENGTH = 48
BATCH = 2
ROTARY = 1e-3
"""Share of the FLOPs that the counter sees and the formula leaves out."""

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attn_implementation": "eager",
}


def make(family: str, **changes: Any) -> Any:
    """A small model of a family of transformers."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def count_flops(model: Any, lengths: tuple[int, ...] = (LENGTH,) * BATCH) -> int:
    """What torch's counter sees of forward and backward, one sequence after the other."""
    from torch.utils.flop_counter import FlopCounterMode

    model.train()
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            tokens = torch.randint(0, SIZES["vocab_size"], (1, length))
            model(input_ids=tokens, labels=tokens).loss.backward()
    return int(counter.get_total_flops())


def check(model: Any, shape: ModelShape) -> None:
    expected = flops_per_token(shape, LENGTH).model * LENGTH * BATCH
    assert count_flops(model) == pytest.approx(expected, rel=ROTARY)


def test_a_dense_llama_costs_what_the_counter_sees() -> None:
    model = make("Llama")
    shape = read_shape(model)
    head = 160 * 64
    assert shape.num_parameters == 2 * (4 * 64 * 64 + 3 * 64 * 112) + head
    assert (shape.num_frozen, shape.layers, shape.attention_width) == (0, 2, 64)
    if not torch.cuda.is_available():
        assert (shape.device_name, shape.num_devices) == (None, 1)
    assert shape.reasons == {}
    check(model, shape)


def test_experts_that_a_token_meets_are_counted_and_latent_attention_has_two_sizes() -> None:
    options = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
    model = make("Mixtral", num_local_experts=8, **options)
    shape = read_shape(model)
    attention, router, expert, head = 4 * 64 * 64, 8 * 64, 3 * 64 * 112, 160 * 64
    assert shape.num_parameters == 2 * (attention + router + 2 * expert) + head
    assert shape.reasons == {}
    check(model, shape)
    options |= {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 2}
    options |= {"first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16}
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    model = make("DeepseekV3", **options, **heads)
    shape = read_shape(model)
    assert shape.attention_width == 4 * (24 + 16) // 2
    check(model, shape)


def test_lora_costs_four_for_a_frozen_and_six_for_an_adapter_weight() -> None:
    peft = pytest.importorskip("peft")
    plain = make("Llama", num_key_value_heads=2)
    dense = read_shape(plain).num_parameters
    chosen = {"r": 8, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", **chosen))
    shape = read_shape(model)
    adapter = 2 * 8 * ((64 + 64) + (64 + 32) + 2 * (64 + 112))
    assert (shape.num_parameters, shape.num_frozen) == (dense + adapter, dense)
    assert shape.num_adapter == adapter
    # As Axolotl and TRL do: without it, the first layer hands no gradient on.
    model.enable_input_require_grads()
    check(model, shape)


def test_weights_of_four_bits_count_at_their_logical_size() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = make("Llama")
    plain = read_shape(model)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    packed = bnb.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                    )
                    packed.load_state_dict(linear.state_dict())
                    setattr(parent, name, packed.to("cpu"))
    shape = read_shape(model)
    assert shape.num_parameters == plain.num_parameters
    assert shape.num_frozen == plain.num_parameters - 160 * 64
    assert shape.dtype in ("bfloat16", "float32")


def test_wrappers_change_nothing(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    expected = read_shape(make("Llama"))
    group = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=group, rank=0, world_size=1)
    try:
        for wrap in (
            torch.compile,
            torch.nn.parallel.DistributedDataParallel,
            partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")),
            fully_shard,
        ):
            assert read_shape(wrap(make("Llama"))) == expected
    finally:
        torch.distributed.destroy_process_group()


def test_windows_and_layers_without_attention_are_read_from_the_config() -> None:
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, head_dim=16, sliding_window=64
    )
    model = transformers.Gemma3ForCausalLM(config)
    shape = read_shape(model)
    assert (shape.layers, shape.window_layers, shape.attention_window) == (6, 5, 64)
    check(model, shape)

    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, hidden_size=64)
    config.layer_types = kinds
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64))
    plain.config = config
    shape = read_shape(plain)
    assert shape.layers == 1
    assert "2 of 3 layers have no softmax attention" in shape.reasons["layers"]


def test_a_tower_for_images_is_left_out_and_said_so() -> None:
    text, sizes = transformers.LlamaConfig(**SIZES), {"hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    vision = transformers.CLIPVisionConfig(**sizes)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    )
    shape = read_shape(model)
    projector = 32 * 64 + 64 * 64
    assert shape.num_parameters == read_shape(make("Llama")).num_parameters + projector
    assert "only those of text" in shape.reasons["towers"]
    assert (shape.layers, shape.attention_width) == (2, 64)


def test_what_the_formula_does_not_cover_has_no_flops() -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    assert "encoder" in read_shape(t5).reasons["model_flops_per_token"]
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert "how many layers" in read_shape(plain).reasons["model_flops_per_token"]
    plain.config = SimpleNamespace(num_hidden_layers=1, num_attention_heads=1, hidden_size=4)
    assert "model_flops_per_token" not in read_shape(plain).reasons
    plain.config.num_experts = 8
    assert "8 experts were not found" in read_shape(plain).reasons["model_flops_per_token"]
    plain.experts = torch.nn.Linear(4, 4)
    assert "does not say how many" in read_shape(plain).reasons["model_flops_per_token"]
    empty = torch.nn.Sequential()
    empty.config = SimpleNamespace(num_hidden_layers=1)
    assert "no matrices" in read_shape(empty).reasons["model_flops_per_token"]


def test_the_data_type_is_that_of_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama")
    assert read_shape(model).dtype == "float32"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert read_shape(model).dtype == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert read_shape(model.to(torch.bfloat16)).dtype == "bfloat16"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.float16}.__getitem__)
    assert read_shape(model).dtype == "float16"
