"""FLOPs and utilisation: published rows reproduced, and the formula for what is not published."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure.flops import flops_per_token, utilisation
from fast_axolotl.record import ModelShape
from fast_axolotl.record.devices import find_gpu, find_peak, known_gpus, normalise_dtype

DATA = Path(__file__).parent / "data" / "throughput_rows.csv"
ROWS = list(csv.DictReader(DATA.read_text(encoding="utf-8").splitlines()))

DEVICES = {
    "h100_80gb": "NVIDIA H100 80GB HBM3",
    "a100_80gb": "NVIDIA A100-SXM4-80GB",
    "a100_40gb": "NVIDIA A100-SXM4-40GB",
}
"""What the published tables call a device, and what the device calls itself."""

LLAMA_8B = ModelShape(
    name="8B",
    num_parameters=7_504_924_672,
    layers=32,
    attention_width=4096,
    sequence_len=8192,
    device_name="NVIDIA H200",
)


def read_row(row: dict[str, str]) -> ModelShape:
    device, dtype = row["accelerator"].split("/")
    return ModelShape(
        name=row["model"],
        num_parameters=int(row["n_params"]),
        layers=int(row["layers"]),
        attention_width=int(row["attn_width_HxQ"]),
        sequence_len=int(row["seq_len"]),
        is_checkpointed=row["recompute"] == "True",
        dtype=dtype,
        device_name=DEVICES[device],
        num_devices=int(row["gpus"]),
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['accelerator']}")
def test_published_utilisation_is_reproduced_from_model_device_and_tokens(
    row: dict[str, str],
) -> None:
    assert row["formula"] == "PaLM 6N+12LHQT"
    shape = read_row(row)
    found, reasons = utilisation(
        shape, tokens_per_second=float(row["tokens_per_s_per_gpu"]) * shape.num_devices
    )
    assert reasons == {}
    assert found["peak_tflops"] == pytest.approx(float(row["peak_tflops"]), rel=5e-3)
    assert 100 * found["mfu"] == pytest.approx(float(row["reported_mfu_pct"]), rel=5e-3)
    assert 100 * found["hfu"] == pytest.approx(float(row["reported_hfu_pct"]), rel=5e-3)
    assert found["hfu"] == pytest.approx(found["mfu"] * (4 / 3 if shape.is_checkpointed else 1))
    # Published as whole TFLOP/s, cut off and not rounded: coarser than 0.5 % below 200, so the
    # cut-off figure must be the same. Where tokens/s were rounded, it may sit on the edge.
    tflops = found["model_flops_per_second"] / shape.num_devices / 1e12
    reported = int(row["reported_tflops_per_gpu"])
    assert reported - 0.01 <= tflops <= reported + 1.01


def test_a_window_bounds_attention_in_its_layers_only() -> None:
    shape = replace(LLAMA_8B, num_parameters=0, attention_window=1024, window_layers=24)
    assert flops_per_token(shape, 8192).model == 12 * 4096 * (8 * 8192 + 24 * 1024)
    assert flops_per_token(shape, 512).model == 12 * 4096 * 32 * 512
    assert flops_per_token(shape, 8192).convention.startswith(
        "model FLOPs per token = 12·8 layers·width 4096·attended length 8192"
        " + 12·24 layers·width 4096·attended length 1024 within their window;"
    )
    narrow = replace(shape, window_width=2048, reasons={"towers": "towers are left out"})
    assert flops_per_token(narrow, 8192).model == 12 * (8 * 8192 * 4096 + 24 * 1024 * 2048)
    # What a shape leaves out stands beside the figure.
    leaves = "; real tokens only; causal masking not discounted; towers are left out"
    assert flops_per_token(narrow, 8192).convention.endswith(leaves)


@pytest.mark.parametrize(
    ("change", "names", "words"),
    [
        (
            {"is_packed": True},
            ("model_flops_per_token", "mfu"),
            "sequence lengths were not recorded",
        ),
        ({"device_name": "NVIDIA X1"}, ("mfu", "hfu", "peak_tflops"), "'NVIDIA X1'"),
        ({"dtype": "float32"}, ("mfu", "hfu"), "another data type than float32"),
        ({"reasons": {"model_flops_per_token": "an encoder"}}, ("mfu", "hfu"), "an encoder"),
    ],
)
def test_what_cannot_be_known_is_none_with_a_reason(
    change: dict[str, Any], names: tuple[str, ...], words: str
) -> None:
    found, reasons = utilisation(replace(LLAMA_8B, **change), tokens_per_second=1e4)
    assert {found[name] for name in names} == {None}
    assert words in reasons["mfu"]


def test_a_given_peak_needs_no_known_device() -> None:
    shape = replace(LLAMA_8B, device_name="NVIDIA X1", peak_tflops=500.0)
    found, reasons = utilisation(shape, tokens_per_second=1e3)
    assert (found["peak_tflops"], found["peak_source"]) == (500.0, "set with --peak-tflops")
    assert found["mfu"] == pytest.approx(found["model_flops_per_second"] / 500e12)
    assert reasons == {}


DENSE_BF16 = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "AMD Instinct MI300X": 1307,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA A10G": 70,
}
"""Published dense rates, rounded as published."""


def test_the_dense_peak_is_the_published_one() -> None:
    for name, tflops in DENSE_BF16.items():
        assert find_peak(name, "bfloat16")[0] == pytest.approx(tflops, abs=0.5), name
    types = {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "fp8": 1978.9}
    found = {dtype: find_peak("NVIDIA H100 80GB HBM3", dtype)[0] for dtype in types}
    assert found == types


def test_every_device_has_a_source_and_a_wider_type_is_never_faster() -> None:
    for gpu in known_gpus():
        assert gpu.source
        types = ("float4", "float8", "bfloat16", "float16", "tf32", "float32")
        rates = [gpu.tflops[dtype] for dtype in types if dtype in gpu.tflops]
        assert rates
        assert rates == sorted(rates, reverse=True), gpu.key
    names = [name for gpu in known_gpus() for name in gpu.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["GH200", "B300", "GB300", "A10", "A30", "A40", "L40", "T4", "V100-32GB"]
)
def test_what_can_be_planned_for_has_a_peak_and_the_other_way_round(name: str) -> None:
    gpu = find_gpu(name)
    dtype = "bfloat16" if "bfloat16" in gpu.tflops else "float16"
    for reported in gpu.names:
        assert find_gpu(reported) is gpu
        assert find_peak(reported, dtype) == (gpu.bf16, gpu.source)


def test_what_is_not_known_exactly_has_no_peak_and_a_reason() -> None:
    for name in (
        *("NVIDIA L40S-48Q", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H100", "H100"),
        *("nvidia h200", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        *("NVIDIA H999", "L4", ""),
    ):
        peak, reason = find_peak(name, "bfloat16")
        assert peak is None, name
        assert "--peak-tflops" in reason
        assert repr(name) in reason
    peak, reason = find_peak(None, "bfloat16")
    assert (peak, "--peak-tflops" in reason) == (None, True)
    # An old device has fp16 and no bf16.
    for name, tflops in (("Tesla T4", 65.0), ("Tesla V100-SXM2-16GB", 125.0)):
        peak, reason = find_peak(name, "bfloat16")
        assert (peak, "known: float16, float32" in reason) == (None, True)
        assert find_peak(name, "float16")[0] == tflops


def test_data_types_have_one_name() -> None:
    names = {"bf16": "bfloat16", "torch.bfloat16": "bfloat16", "amp_bf16": "bfloat16"}
    names |= {"FP16": "float16", "float32": "float32", "tf32": "tf32", "amp_fp8": "float8"}
    for given, ours in {**names, "int4": "int4"}.items():
        assert normalise_dtype(given) == ours
