"""``fast-axolotl plan``: memory against measured peaks, rates, money, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_error import active_parameters
from fast_axolotl.cli.plan import describe_plan
from fast_axolotl.cli.plan import plan as plan_command
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.integrations.model_shape import read_shape
from fast_axolotl.measure.summary import summarise
from fast_axolotl.plan import predict
from fast_axolotl.plan.memory import Layout, adapter_parameters, predict_memory
from fast_axolotl.plan.predict import Plan, Range, Reference, find_price, make_plan, read_reference
from fast_axolotl.plan.shape import Shape, parse_config, read_config
from fast_axolotl.plan.steptime import predict_step
from fast_axolotl.record import ModelShape, RunRecord, StackLine, Stacks
from fast_axolotl.record.devices import find_gpu
from support.records import make_ranks, make_run, steady, write_run

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
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
    ("1.2B", 35.62, {"micro_batch": 8, "recompute": "full"}),
    ("1.2B", 25.55, {"micro_batch": 2, "accumulation": 4}),
    ("1.2B", 32.43, {"micro_batch": 4, "states": "mixed", "recompute": "full"}),
    ("1.2B", 29.04, {"micro_batch": 4, "method": "lora"}),
    ("1.2B", 16.35, {"micro_batch": 4, "method": "lora", "recompute": "full"}),
    ("3B", 35.58, {"micro_batch": 16, "recompute": "full"}),
    ("3B", 27.24, {"micro_batch": 1, "seq_len": 8192, "recompute": "full", "accumulation": 2}),
    ("3B", 34.50, {"micro_batch": 4, "method": "lora"}),
    ("8B", 64.33, {"micro_batch": 1, "recompute": "full"}),
    ("8B", 46.99, {"micro_batch": 2, "method": "lora"}),
    ("8B", 46.16, {"micro_batch": 8, "method": "lora", "recompute": "full"}),
]
"""``max_memory_allocated`` in GB of an H200 on 2026-11-16: torch 2.11, transformers 5.17."""


def llama(size: str) -> Shape:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    sizes = dict(zip(names, SIZES[size], strict=True))
    return Shape(**sizes, head_size=sizes["hidden"] // sizes["heads"])


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


def test_windows_limit_how_far_a_token_attends() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    shape = parse_config({**LLAMA_8B, "layer_types": kinds, "sliding_window": 128})
    assert shape.attended(4096) == 16 * 4096 + 16 * 128
    assert SHAPE.attended(4096) == 32 * 4096


def test_bad_configs_name_the_file_and_the_cure(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text, words in [
        ("{", "JSON"),
        ("[]", "no JSON object"),
        ("{}", "builds no decoder"),
        (json.dumps({"model_type": "mamba"}), "state-space"),
        (json.dumps({"model_type": "bert"}), "encoders"),
    ]:
        file.write_text(text)
        with pytest.raises(DataError, match=words) as caught:
            read_config(tmp_path)
        assert str(file) in str(caught.value)


# fmt: off
ARCHITECTURES = {
    "llama4": (400.7, {"text_config": {"num_local_experts": 128, "interleave_moe_layer_step": 2}}),
    "falcon": (6.92, {}),
    "nemotron": (7.73, {"num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096,
                       "intermediate_size": 16384, "vocab_size": 256000, "head_dim": 128}),
    "deepseek_v3": (671.0, {}), "gpt_oss": (116.8, {}), "qwen3_moe": (15.35, {}),
    "mixtral": (46.7, {}), "gemma2": (2.61, {}), "gemma3": (2.63, {}), "phi3": (3.82, {}),
    "gpt2": (0.124, {}), "gpt_neox": (20.6, {}), "qwen2_moe": (14.3, {}), "olmo2": (6.89, {}),
    "olmoe": (13.4, {}), "glm4_moe": (106.8, {"head_dim": 128}), "starcoder2": (3.03, {}),
    "qwen2": (12.05, {}), "mistral": (7.24, {}), "llama": (6.74, {}), "qwen3": (12.05, {}),
    "cohere2": (35.0, {}), "phimoe": (41.9, {}), "granitemoe": (37.0, {}),
}
# fmt: on


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parameters_and_active_parameters_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    billions, changes = ARCHITECTURES[kind]
    config = transformers.AutoConfig.for_model(kind, **changes)
    with pytest.importorskip("torch").device("meta"):
        text = config.get_text_config(decoder=True)
        model = transformers.AutoModelForCausalLM.from_config(text)
    known = read_shape(model)
    shape = parse_config(json.loads(config.to_json_string(use_diff=False)))
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()))
    assert active_parameters(shape) == pytest.approx(known.num_parameters, rel=1e-9)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.window_layers == known.window_layers
    assert shape.attention_width == known.attention_width


# Rates, intervals and money.

SHAPE = parse_config(LLAMA_8B)
H100, A100, L40S = find_gpu("H100-SXM"), find_gpu("a100-80gb"), find_gpu("NVIDIA L40S")
AS_RECORDED = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 2, "recompute": "none"}
LAYOUT = Layout(gpus=8, sharding="fsdp", seq_len=4096, micro_batch=2, accumulation=4)


def rate(layout: Layout, gpu: Any = H100, **options: Any) -> float:
    """Predicted tokens/s and GPU."""
    step = predict_step(SHAPE, replace(gpu, **options), layout)
    return layout.step_tokens / step.total / layout.gpus


def measured(**values: Any) -> Reference:
    """A run that is as fast as predicted, unless it is said otherwise."""
    layout = values.get("layout", LAYOUT)
    known = {"gpu": H100, "layout": layout, "tokens_per_second": 8 * rate(layout)}
    return Reference(**known | values)


def plan(counts: list[int], **values: Any) -> Plan:
    reference = values.pop("reference", None)
    layout = values.pop("layout", LAYOUT if reference is None else reference.layout)
    gpu, price = values.pop("gpu", H100), values.pop("price", None)
    if link := values.pop("network", None):
        gpu = replace(gpu, network=link)
    offers = [(gpu, price and Range(price, price, price))]
    found = make_plan(SHAPE, offers, counts, layout, reference=reference, **values)
    return replace(found, notes=tuple(describe_plan(found, gpu, layout, reference)))


@pytest.mark.parametrize(
    ("layout", "gpu", "published"),
    [
        # Rows of three sources: NeMo 24.07, fms-fsdp, torchtitan.
        (Layout(gpus=8, cp=2, sharding="zero1", seq_len=8192, accumulation=32, precision="fp8"),
         H100, 12036),
        (Layout(gpus=128, shard=8, sharding="fsdp", seq_len=4096, micro_batch=2), A100, 3900),
        (Layout(gpus=32, sharding="fsdp", seq_len=8192, micro_batch=2, precision="fp8",
                recompute="selective"), find_gpu("H200"), 10938),
    ],
)  # fmt: skip
def test_without_a_run_rates_are_near_published_ones(
    layout: Layout, gpu: Any, published: float
) -> None:
    assert rate(layout, gpu) == pytest.approx(published, rel=0.25)


def test_a_small_model_takes_what_it_took_on_an_h200() -> None:
    # The host launches kernels no faster than the first.
    for seconds, length, micro_batch in ((0.0563, 512, 1), (0.3191, 2048, 32)):
        layout = Layout(gpus=1, seq_len=length, micro_batch=micro_batch)
        step = predict_step(llama("0.3B"), find_gpu("H200"), layout)
        assert step.total == pytest.approx(seconds, rel=0.15)


def test_what_costs_time_costs_tokens() -> None:
    plain = rate(LAYOUT)
    assert rate(replace(LAYOUT, recompute="full")) < 0.85 * plain
    assert rate(replace(LAYOUT, seq_len=32768, micro_batch=0.25)) < plain
    assert rate(replace(LAYOUT, attended=512)) > plain
    fused = replace(LAYOUT, is_fused=True)
    assert rate(fused) > 1.05 * plain
    # LoRA saves a third of the products; unfused, its adapters give half of that back.
    assert rate(replace(fused, method="lora")) > 1.2 * rate(fused)
    assert 1.2 * plain > rate(replace(LAYOUT, method="lora")) > 1.02 * plain
    assert rate(replace(LAYOUT, precision="fp8")) > 1.2 * plain
    # Weights are read for few tokens; then not even launching the kernels is fast enough.
    small = rate(replace(LAYOUT, micro_batch=0.05))
    assert small < 0.6 * plain
    assert rate(replace(LAYOUT, micro_batch=0.001)) < 0.03 * small
    pipeline = replace(LAYOUT, pp=4, sharding="zero1")
    short, long = (rate(replace(pipeline, accumulation=count)) for count in (1, 64))
    assert short < rate(pipeline) < long
    assert rate(replace(LAYOUT, tp=8)) < plain
    far = replace(LAYOUT, gpus=64)
    assert rate(far, network=1.0) < 0.8 * rate(far)
    assert rate(replace(LAYOUT, optimizer="offload", accumulation=1)) < plain


def test_a_run_sets_the_level_and_narrows_the_interval() -> None:
    slow = measured(tokens_per_second=4 * rate(LAYOUT))
    found = plan([8], reference=slow, pinned=AS_RECORDED)
    (own,) = found.candidates
    assert found.level == pytest.approx(0.5)
    assert own.tokens_per_second.value == pytest.approx(slow.tokens_per_second)
    assert not [note for note in found.notes if "published stack" in note]
    odd = plan([8], reference=measured(tokens_per_second=80 * rate(LAYOUT)))
    assert "10 times as fast as predicted" in odd.notes[0]
    wide = plan([8]).candidates[0].tokens_per_second
    assert own.tokens_per_second.high / own.tokens_per_second.low < 1.5
    assert wide.high / wide.low > 1.25 * own.tokens_per_second.high / own.tokens_per_second.low
    assert "No run of yours calibrates this plan" in plan([8]).notes[1]


def test_the_global_batch_stays_or_a_warning_says_that_it_cannot() -> None:
    found = plan([8, 16, 32, 128], reference=measured())
    batches = [one.global_batch_tokens / LAYOUT.step_tokens for one in found.candidates]
    assert batches == pytest.approx([1, 1, 1, 1])
    (large,) = plan([512], reference=measured(), pinned=AS_RECORDED).candidates
    assert large.global_batch_tokens == 16 * LAYOUT.step_tokens
    assert large.doubt == "a step has 4,194,304 tokens"
    # 48 steps in 20 s are no sensible choice, with or without a record.
    for reference in (None, measured()):
        (few,) = plan([512], reference=reference, tokens=48 * LAYOUT.step_tokens).candidates
        assert few.doubt == "the training has only 48 steps"


@pytest.mark.parametrize("gigabytes", [22.0, 47.0, 80.0])
def test_the_layout_is_the_fastest_that_fits_by_brute_force(gigabytes: float) -> None:
    """Every micro-batch, sharding, recomputation, offload, TP, PP and CP at one global batch."""
    gpu = replace(H100, memory_gb=gigabytes)
    start = Layout(gpus=1, seq_len=4096, accumulation=32)
    rates = {}
    for tp, pp, cp, way, again, store, count in product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), ("ddp", "zero1", "zero2", "fsdp"),
        ("none", "selective", "full"), ("adamw", "offload"), (1, 2, 4, 8, 16, 32),
    ):  # fmt: skip
        if 8 % (tp * pp * cp) or (pp > 1 and way in ("zero2", "fsdp")):
            continue
        micro = 32 / count / (8 // (tp * pp * cp))
        known: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "sharding": way, "optimizer": store}
        known |= {"recompute": again, "accumulation": count, "micro_batch": micro}
        one = replace(start, gpus=8, **known)
        if micro >= 1 and predict_memory(SHAPE, one).total <= 0.92e9 * gigabytes:
            rates[one] = 8 * rate(one, gpu)
    (found,) = plan([8], layout=start, gpu=gpu).candidates
    assert found.tokens_per_second.value >= 0.96 * max(rates.values())
    assert found.layout in rates or found.layout.sharding == "ddp"
    assert "The next, " in found.changes


def test_a_recorded_run_is_possible_and_its_memory_calibrates_both_ways() -> None:
    predicted = predict_memory(SHAPE, LAYOUT).total
    for share in (0.6, 1.3, 3.0):
        run = measured(memory_bytes=share * predicted)
        (own,) = plan([8], reference=run, pinned=AS_RECORDED | {"accumulation": 4}).candidates
        assert (own.fits, own.memory_bytes.value) == ("yes", share * predicted)
    # An 8-bit optimizer that the prediction did not know of is a share of every candidate.
    half = plan([16], reference=measured(memory_bytes=0.5 * predicted), pinned=AS_RECORDED)
    (other,) = half.candidates
    assert other.memory_bytes.value == pytest.approx(0.5 * other.memory.total)
    assert other.memory_bytes.low < other.memory_bytes.value < other.memory_bytes.high
    lion = plan([8], reference=measured(), pinned={"optimizer": "lion"}).candidates[0]
    assert lion.layout.optimizer == "lion"
    exact = replace(LAYOUT, state_bytes=2.0)
    assert predict_memory(SHAPE, exact).optimizer == pytest.approx(2.0 * SHAPE.parameters / 8)


def test_planning_from_one_gpu_warns_of_communication() -> None:
    alone = replace(LAYOUT, gpus=1, sharding="ddp", recompute="full", micro_batch=1)
    reference = measured(layout=alone, tokens_per_second=10_000.0, gpu=find_gpu("H200"))
    found = plan([1, 64], reference=reference, gpu=find_gpu("H200"), network=2.0, tokens=1e9)
    (note,) = [note for note in found.notes if "one GPU" in note]
    many = found.candidates[1]
    assert "640,000 tokens/s" in note
    assert many.tokens_per_second.value < 640_000
    assert f"{many.communication_share:.0%}".replace("%", " %") in note
    # What no run has measured widens the interval.
    one = found.candidates[0].tokens_per_second
    assert many.tokens_per_second.high / many.tokens_per_second.low > one.high / one.low
    assert not [note for note in plan([64], reference=measured()).notes if "one GPU" in note]


@pytest.mark.parametrize(("scales", "binding"), [(True, []), (False, [64])])
def test_the_loader_binds_where_it_cannot_keep_up(scales: bool, binding: list[int]) -> None:
    ceiling = 8 * 4 * rate(LAYOUT)
    reference = measured(loader_tokens_per_second=ceiling, loader_scales=scales)
    found = plan([8, 64], reference=reference)
    assert [one.gpus for one in found.candidates if one.binds == "data"] == binding
    notes = [note for note in found.notes if "loader must deliver" in note]
    assert len(notes) == len(binding)
    if binding:
        last = found.candidates[1]
        assert last.tokens_per_second.value == pytest.approx(ceiling)
        assert "On 64 GPUs" in notes[0]
        assert f"yours delivers {ceiling:,.0f}" in notes[0]


def test_slow_links_bind() -> None:
    pinned = {"tp": 1, "pp": 1, "cp": 1}
    near, far = plan([8, 64], reference=measured(), network=0.5, pinned=pinned).candidates
    assert (near.binds, far.binds) == ("compute", "communication")


def test_what_does_not_fit_is_said() -> None:
    whole = Layout(gpus=1, seq_len=4096, accumulation=32)
    one, eight = plan([1, 8], layout=whole, gpu=L40S, pinned={"optimizer": "adamw"}).candidates
    assert (one.binds, one.fits, one.tokens_per_second) == ("memory", "no", None)
    assert "needs at least" in one.changes
    assert eight.fits == "yes"
    lora = replace(whole, method="lora")
    pinned = {"micro_batch": 1, "recompute": "full"}
    need = plan([1], layout=lora, pinned=pinned).candidates[0].memory_bytes
    tight = replace(L40S, memory_gb=1.1 * need.value / 0.92e9)
    (unsure,) = plan([1], layout=lora, gpu=tight, pinned=pinned).candidates
    assert unsure.fits == "may"


def test_time_and_money_are_whole_and_hold_the_spread_of_the_price() -> None:
    run = measured(startup_seconds=600.0, pause_seconds=0.5)
    offers = [(H100, Range(1.0, 2.0, 8.0))]
    (one,) = make_plan(SHAPE, offers, [8], LAYOUT, reference=run, tokens=1e9).candidates
    assert one.steps == pytest.approx(1e9 / one.global_batch_tokens)
    whole = 600 + 0.5 * one.steps + 1e9 / one.tokens_per_second.value
    assert one.seconds.value == pytest.approx(whole)
    assert one.dollars.value == pytest.approx(whole / 3600 * 8 * 2.0)
    assert one.dollars.low == pytest.approx(one.seconds.low / 3600 * 8 * 1.0)
    assert one.dollars.high == pytest.approx(one.seconds.high / 3600 * 8 * 8.0)


@pytest.mark.parametrize(
    ("gpu", "count", "gigabytes"), [("RTX-4090", 1, 20.14), ("H100-SXM", 8, 46.86)]
)
def test_the_worked_examples_of_the_docs_hold(gpu: str, count: int, gigabytes: float) -> None:
    layout = Layout(gpus=1, seq_len=2048, accumulation=128, method="lora")
    found = plan([count], gpu=find_gpu(gpu), layout=layout, tokens=5e7)
    assert found.candidates[0].memory_bytes.value / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_qlora_pays_for_unpacking_its_weights() -> None:
    lora, qlora = (replace(LAYOUT, gpus=1, sharding="ddp", method=way) for way in ("lora", "qlora"))
    assert 0.75 * rate(lora) < rate(qlora) < 0.98 * rate(lora)
    assert rate(replace(qlora, micro_batch=0.1)) < 0.85 * rate(replace(lora, micro_batch=0.1))


def test_prices_have_a_source_and_a_date_and_no_placeholders() -> None:
    dollars, source = find_price(H100)
    assert (dollars.low, dollars.high) == (1.29, 11.39)
    assert dollars.low < dollars.value < dollars.high
    assert "skypilot-org/skypilot-catalog" in source
    assert source.endswith("2026-08-22")
    assert find_price(find_gpu("GB200")) == (None, "unknown; pass --price")
    path = Path(predict.__file__).with_name("gpu_prices.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    assert min(row[2] for row in table["prices"]) > 0.3
    assert not {"runpod", "mithril", "vast"} & {row[0] for row in table["prices"]}


# The command.

MODEL = ModelShape(
    num_parameters=7_504_924_672,
    layers=32,
    attention_width=4096,
    sequence_len=4096,
    is_checkpointed=True,
    device_name="NVIDIA H100 80GB HBM3",
    config=LLAMA_8B,
)


def recorded(stall: float = 0.0, model: ModelShape = MODEL, **settings: Any) -> RunRecord:
    """Eight ranks of FSDP, two samples of 4096 tokens in 1.2 s, of which a tenth is padding."""
    ranks = make_ranks(
        8,
        own_seconds=1.2,
        wait=steady(stall, 1.2),
        fetches=300,
        samples=2,
        tokens=7372,
        padded=8192,
        settings={"fsdp": True, "batch_size": 2, **settings},
    )
    for rank in ranks:
        rank.add(model)
    return make_run(*ranks)


def test_a_record_calibrates_by_its_rate_without_the_stall() -> None:
    for stall in (0.0, 0.3):
        record = recorded(stall)
        shape, reference = read_reference(record, summarise(record))
        assert shape.parameters == pytest.approx(8.03e9, rel=0.02)
        assert reference.gpu.key == "H100-SXM"
        layout = reference.layout
        assert (layout.gpus, layout.sharding, layout.recompute) == (8, "fsdp", "full")
        assert (layout.seq_len, layout.micro_batch) == (4096, pytest.approx(2, rel=0.01))
        assert reference.tokens_per_second == pytest.approx(8 * 2 * 4096 / 1.2, rel=0.01)
        assert reference.real_share == pytest.approx(0.9, rel=0.01)


def test_adapters_groups_and_the_loader_are_read() -> None:
    model = ModelShape(
        num_parameters=7_546_867_712, num_adapter=41_943_040,
        num_frozen=7_504_924_672, layers=32, attention_width=4096, device_name="NVIDIA H200",
        config=LLAMA_8B,
    )  # fmt: skip
    settings: dict[str, Any] = {"tensor_parallel": 2, "num_workers": 1}
    settings["attn_implementation"] = "flash_attention_2"
    record = recorded(model=model, config={"adapter": "qlora"}, **settings)
    idle = StackLine(phase="idle", file="queue.py", line=1, function="get", seconds=11.0)
    for rank in record.ranks.values():
        rank.add(Stacks(t=1.0, who="workers", seconds=1.0, lines=(idle,)))
    _, reference = read_reference(record, summarise(record))
    layout = reference.layout
    assert (layout.method, layout.tp, layout.seq_len) == ("qlora", 2, 4096)
    assert layout.attention_kernel == "flash"
    assert layout.lora_rank == pytest.approx(16, abs=2)
    assert reference.loader_scales
    alone = recorded(dispatcher=True)
    assert not read_reference(alone, summarise(alone))[1].loader_scales
    # The workers load for a twelfth of their time.
    rate = summarise(record).tokens_per_second
    assert reference.loader_tokens_per_second == pytest.approx(12 * rate)


def test_several_kinds_of_gpu_become_one_plan_and_json_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", recorded())
    options: dict[str, Any] = {"gpu": "H100-SXM,B200", "gpus": "8,64", "tokens": "1.5B"}
    options |= {"recompute": "full", "micro_batch": 2, "pp": 1, "tp": 1, "cp": 1}
    plan_command(run=tmp_path / "run", **options, price="2,100")
    text = " ".join(capsys.readouterr().out.split())
    assert "8.03 B parameters on H100-SXM, B200, 1.5 B tokens" in text
    assert "Fastest: 8 × B200, " in text
    assert "Cheapest: 8 × H100-SXM, " in text
    assert "B200: The run was on H100-SXM" in text
    assert "Dollars per GPU and hour: H100-SXM: $2, by --price." in text
    assert "No run of yours" not in text
    with pytest.raises(UsageError, match="one per kind of GPU"):
        plan_command(run=tmp_path / "run", **options, price="1,2,3")
    plan_command(run=tmp_path / "run", **options, as_json=True)
    found = json.loads(capsys.readouterr().out)
    one = found["candidates"][0]
    rate = one["tokens_per_second"]
    assert rate["value"] == pytest.approx(8 * 2 * 3686 / 1.2, rel=0.01)
    assert rate["low"] < rate["value"] < rate["high"]
    assert one["seconds"]["value"] == pytest.approx(1.5e9 / rate["value"])
    assert "2026-08-22" in found["notes"][-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": ""}, "cannot read --gpus"),
        ({"network": 0.0}, "--network 0: pass a number above 0"),
        ({"optimizer": "adam"}, "choose one of adamw, adamw_8bit"),
        ({"tp": 3}, "cannot be divided by --tp"),
        ({"gpu": "H100"}, "choose one of H100-SXM, H100-PCIe, H100-NVL"),
        ({"gpus": "1" + 20 * "0"}, "at most 1,000,000"),
        ({"gpu": "B200,b200", "price": "1,2"}, "pass one, or 1: one per kind of GPU"),
        ({"gpus": "8,x"}, "write 8,16,64"),
        ({"price": "cheap"}, "write 2.5/h"),
        ({"gpu": "L41"}, r"'L41' is not known; choose one of .*L40S"),
        ({"tokens": "many"}, "300M, 10B"),
        ({"model": None}, "pass the folder of a record"),
    ],
)
def test_numbers_that_make_no_plan_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with pytest.raises(UsageError, match=words):
        plan_command(**{"model": tmp_path, "gpu": "B200", "gpus": "8", **options})


def test_a_record_without_a_gpu_or_tokens_cannot_calibrate() -> None:
    record = make_run(*make_ranks(1))
    with pytest.raises(DataError, match="does not name the model and the GPU"):
        read_reference(record, summarise(record))
    record.ranks[0].add(MODEL)
    with pytest.raises(DataError, match="has no tokens/s"):
        read_reference(record, summarise(record))
