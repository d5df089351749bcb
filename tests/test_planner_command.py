"""``fast-axolotl plan``: from the folder of a record, and from a config alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.cli.plan import plan
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.plan.reference import read_reference
from fast_axolotl.record import ModelShape, RunRecord
from support.records import make_ranks, make_run, steady, write_run
from test_planner_memory import LLAMA_8B

MODEL = ModelShape(
    num_parameters=7_504_924_672,
    num_total=8_030_261_248,
    layers=32,
    attention_width=4096,
    sequence_len=4096,
    is_checkpointed=True,
    device_name="NVIDIA H100 80GB HBM3",
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
        num_parameters=7_546_867_712, num_total=8_072_204_288, num_adapter=41_943_040,
        num_frozen=7_504_924_672, layers=32, attention_width=4096, device_name="NVIDIA H200",
    )  # fmt: skip
    record = recorded(model=model, config={"adapter": "qlora"}, tensor_parallel=2, num_workers=1)
    for rank in record.ranks.values():
        rank.blocks = [replace(one, produced=10, producing_seconds=1.0) for one in rank.blocks]
    _, reference = read_reference(record, summarise(record))
    layout = reference.layout
    assert (layout.method, layout.tp, layout.seq_len) == ("qlora", 2, 4096)
    assert layout.lora_rank == pytest.approx(16, abs=2)
    assert reference.loader_scales
    alone = recorded(dispatcher=True)
    assert not read_reference(alone, summarise(alone))[1].loader_scales
    # Each of four readers gives 20 samples per second; 12 times what the model takes.
    assert reference.loader_tokens_per_second == pytest.approx(4 * 20 * 3686, rel=0.02)


def test_the_table_says_what_binds_and_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", recorded())
    plan(run=tmp_path / "run", gpus="8,64", tokens="10B", price="2.5/h")
    text = capsys.readouterr().out
    assert "8.03 B parameters on H100-SXM, 10 B tokens" in text
    assert "compute" in text
    assert "Dollars per GPU and hour: H100-SXM: $2.5, by --price." in text
    assert "No run of yours" not in text


def test_json_holds_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", recorded())
    plan(run=tmp_path / "run", gpus="8", tokens="1.5B", as_json=True)
    found = json.loads(capsys.readouterr().out)
    (one,) = found["candidates"]
    rate = one["tokens_per_second"]
    assert rate["value"] == pytest.approx(8 * 2 * 3686 / 1.2, rel=0.01)
    assert rate["low"] < rate["value"] < rate["high"]
    assert one["seconds"]["value"] == pytest.approx(1.5e9 / rate["value"])
    assert "2026-08-22" in found["notes"][-1]


def test_several_kinds_of_gpu_become_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", recorded())
    options: dict[str, Any] = {"gpu": "H100-SXM,B200", "gpus": "8,64", "tokens": "1.5B"}
    plan(run=tmp_path / "run", **options, price="2,100")
    text = " ".join(capsys.readouterr().out.split())
    assert "Fastest: 64 × B200, " in text
    assert "Cheapest: 8 × H100-SXM, " in text
    assert "B200: The run was on H100-SXM" in text
    with pytest.raises(UsageError, match="one per kind of GPU"):
        plan(run=tmp_path / "run", **options, price="1,2,3")


def test_latency_that_hides_a_low_throughput_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", recorded(gradient_accumulation=16))
    plan(run=tmp_path / "run", gpus="8,1024", network=5.0)
    text = " ".join(capsys.readouterr().out.split())
    assert "Low latency is not high throughput: a step takes" in text
    assert "on 1024 GPUs and 1.20 s on 8, but a GPU does only" in text
    assert "tokens per GPU instead of 8,192" in text
    plan(run=tmp_path / "run", gpus="8,16", tokens="1B")
    assert "Low latency" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": ""}, "cannot read --gpus"),
        ({"gpu": ","}, "pass the folder of a record"),
        ({"network": 0.0}, "--network 0: pass a number above 0"),
        ({"network": float("nan")}, "--network nan"),
        ({"micro_batch": -1}, "--micro-batch -1"),
        ({"sequence_len": 0}, "--sequence-len 0"),
        ({"gpu": "B200,b200", "price": "1,2"}, "or 1: one per kind of GPU"),
        ({"gpus": "8,x"}, "write 8,16,64"),
        ({"price": "cheap"}, "such as 2.5/h"),
        ({"gpu": "H100"}, "'H100' is not known"),
        ({"tokens": "many"}, "300M, 10B"),
        ({"tokens": "-1B"}, "300M, 10B"),
        ({"model": None}, "pass the folder of a record"),
    ],
)
def test_numbers_that_make_no_plan_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with pytest.raises(UsageError, match=words):
        plan(**{"model": tmp_path, "gpu": "B200", "gpus": "8", **options})


def test_without_a_record_a_sentence_says_that_intervals_are_wide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plan(model=tmp_path, gpu="b200", gpus="8", tokens="1T", method="lora")
    text = capsys.readouterr().out
    assert "No run of yours calibrates this plan" in text
    assert "skypilot-org/skypilot-catalog" in text


def test_a_record_without_a_gpu_or_tokens_cannot_calibrate() -> None:
    record = make_run(*make_ranks(1))
    with pytest.raises(DataError, match="does not name the model and the GPU"):
        read_reference(record, summarise(record))
    record.ranks[0].add(MODEL)
    with pytest.raises(DataError, match="has no tokens/s"):
        read_reference(record, summarise(record))
