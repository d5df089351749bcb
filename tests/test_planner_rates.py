"""Tokens/s, intervals, time and money of candidates, and the notes that stand beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.errors import UsageError
from fast_axolotl.plan import predict
from fast_axolotl.plan.memory import Layout
from fast_axolotl.plan.predict import Plan, Price, Reference, find_price, make_plan
from fast_axolotl.plan.shape import parse_config
from fast_axolotl.plan.steptime import predict_step
from fast_axolotl.record.devices import find_gpu
from test_planner_memory import LLAMA_8B, llama

SHAPE = parse_config(LLAMA_8B)
H100, A100, L40S = find_gpu("H100-SXM"), find_gpu("a100-80gb"), find_gpu("NVIDIA L40S")
LAYOUT = Layout(gpus=8, sharding="fsdp", seq_len=4096, micro_batch=2, accumulation=4)


def rate(layout: Layout, gpu: Any = H100, **options: Any) -> float:
    """Predicted tokens/s and GPU."""
    step = predict_step(SHAPE, gpu, layout, **options)
    return layout.step_tokens / step.total / layout.gpus


def measured(**values: Any) -> Reference:
    """A run that is as fast as predicted, unless it is said otherwise."""
    layout = values.get("layout", LAYOUT)
    values = {"gpu": H100, "layout": layout, "tokens_per_second": 8 * rate(layout), **values}
    return Reference(**values)


def plan(counts: list[int], **values: Any) -> Plan:
    reference = values.pop("reference", None)
    layout = values.pop("layout", LAYOUT if reference is None else reference.layout)
    offers = [(values.pop("gpu", H100), values.pop("price", None))]
    return make_plan(SHAPE, offers, counts, layout, reference=reference, **values)


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


@pytest.mark.parametrize(
    ("seconds", "changes"),
    [
        (0.0563, {"seq_len": 512}),  # the host launches kernels no faster
        (0.3191, {"seq_len": 2048, "micro_batch": 32}),
    ],
)
def test_a_small_model_takes_what_it_took_on_an_h200(
    seconds: float, changes: dict[str, Any]
) -> None:
    step = predict_step(llama("0.3B"), find_gpu("H200"), Layout(gpus=1, **changes))
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
    assert rate(fused) > rate(replace(LAYOUT, method="lora")) > plain
    assert rate(replace(LAYOUT, precision="fp8")) > 1.2 * plain
    # Weights are read for few tokens; then not even launching the kernels is fast enough.
    small = rate(replace(LAYOUT, micro_batch=0.05))
    assert small < 0.6 * plain
    assert rate(replace(LAYOUT, micro_batch=0.001)) < 0.03 * small
    pipeline = replace(LAYOUT, pp=4, sharding="zero1")
    assert (
        rate(replace(pipeline, accumulation=64))
        > rate(pipeline)
        > rate(replace(pipeline, accumulation=1))
    )
    assert rate(replace(LAYOUT, tp=8)) < plain
    far = replace(LAYOUT, gpus=64)
    assert rate(far, network=1.0) < 0.8 * rate(far)
    assert rate(replace(LAYOUT, optimizer="offload", accumulation=1)) < plain


def test_a_run_sets_the_level_and_narrows_the_interval() -> None:
    slow = measured(tokens_per_second=4 * rate(LAYOUT))
    found = plan([8], reference=slow)
    (own,) = found.candidates
    assert found.level == pytest.approx(0.5)
    assert own.tokens_per_second is not None
    assert own.tokens_per_second.value == pytest.approx(slow.tokens_per_second)
    assert not [note for note in found.notes if "published stack" in note]
    odd = plan([8], reference=measured(tokens_per_second=80 * rate(LAYOUT)))
    assert "10 times as fast as predicted" in odd.notes[0]
    wide = plan([8]).candidates[0].tokens_per_second
    assert wide is not None
    assert own.tokens_per_second.high / own.tokens_per_second.low < 1.3
    assert wide.high / wide.low > 2
    assert "No run of yours calibrates this plan" in plan([8]).notes[0]


def test_the_global_batch_stays_until_accumulation_is_one() -> None:
    found = plan([8, 16, 32, 128], reference=measured())
    assert [one.layout.accumulation for one in found.candidates] == [4, 2, 1, 1]
    batches = [one.global_batch_tokens / LAYOUT.step_tokens for one in found.candidates]
    assert batches == [1, 1, 1, 4]
    assert not [note for note in found.notes if "too large" in note]


def test_planning_from_one_gpu_warns_of_communication() -> None:
    alone = replace(LAYOUT, gpus=1, sharding="ddp", recompute="full", micro_batch=1)
    reference = measured(layout=alone, tokens_per_second=10_000.0, gpu=find_gpu("H200"))
    found = plan([1, 64], reference=reference, gpu=find_gpu("H200"), network=2.0)
    (note,) = [note for note in found.notes if "one GPU" in note]
    many = found.candidates[1]
    assert "640,000 tokens/s" in note
    assert many.tokens_per_second is not None
    assert many.communication_share is not None
    assert many.tokens_per_second.value < 640_000
    assert f"{many.communication_share:.0%}".replace("%", " %") in note
    # What no run has measured widens the interval.
    one = found.candidates[0].tokens_per_second
    assert one is not None
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
        assert last.tokens_per_second is not None
        assert last.tokens_per_second.value == pytest.approx(ceiling)
        assert "On 64 GPUs" in notes[0]
        assert f"yours delivers {ceiling:,.0f}" in notes[0]


def test_slow_links_bind_and_make_more_gpus_dearer() -> None:
    price = Price(dollars=2.0, source="--price")
    found = plan([8, 64], reference=measured(), tokens=1e9, price=price, network=0.5)
    near, far = found.candidates
    assert (near.binds, far.binds) == ("compute", "communication")
    assert near.seconds is not None
    assert near.dollars is not None
    assert far.dollars is not None
    assert near.dollars.value == pytest.approx(near.seconds.value / 3600 * 2.0 * 8)
    assert near.dollars.low < near.dollars.value < near.dollars.high


def test_what_does_not_fit_is_changed_and_said() -> None:
    whole = replace(LAYOUT, gpus=1, sharding="ddp", micro_batch=1)
    one, eight = plan([1, 8], layout=whole, gpu=L40S).candidates
    assert (one.binds, one.tokens_per_second) == ("memory", None)
    assert "needs at least" in one.changes
    assert eight.changes.startswith("fits if it shards weights")
    assert eight.memory_bytes < 0.92 * 48.3e9
    assert plan([8], layout=replace(whole, method="qlora"), gpu=L40S).candidates[0].changes == ""


def test_prices_have_a_source_and_a_date_and_no_placeholders() -> None:
    price = find_price(H100)
    assert price is not None
    assert 1.0 < price.dollars < 12.0
    assert price.source.endswith("2026-08-22")
    assert find_price(find_gpu("GB200")) is None
    path = Path(predict.__file__).with_name("gpu_prices.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    assert min(row[2] for row in table["prices"]) > 0.3
    assert not {"runpod", "mithril", "vast"} & {row[0] for row in table["prices"]}


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'L41' is not known; choose one of .*L40S"):
        find_gpu("L41")
    with pytest.raises(UsageError, match="at least 1"):
        plan([0])
