"""Peaks are found by exact names, by data type, and never guessed."""

from __future__ import annotations

import pytest

from fast_axolotl.record.devices import find_gpu, find_peak, known_gpus, normalise_dtype

NAMES = [name for gpu in known_gpus() for name in gpu.names]


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


@pytest.mark.parametrize("name", DENSE_BF16)
def test_the_dense_bf16_peak_is_the_published_one(name: str) -> None:
    assert find_peak(name, "bfloat16")[0] == pytest.approx(DENSE_BF16[name], abs=0.5)


@pytest.mark.parametrize(
    ("dtype", "tflops"),
    [("float32", 66.9), ("tf32", 494.7), ("float16", 989.4), ("fp8", 1978.9)],
)
def test_the_peak_depends_on_the_data_type(dtype: str, tflops: float) -> None:
    assert find_peak("NVIDIA H100 80GB HBM3", dtype)[0] == tflops


def test_every_device_has_a_source_and_a_wider_type_is_never_faster() -> None:
    for gpu in known_gpus():
        assert gpu.source
        types = ("float4", "float8", "bfloat16", "float16", "tf32", "float32")
        rates = [gpu.tflops[dtype] for dtype in types if dtype in gpu.tflops]
        assert rates
        assert rates == sorted(rates, reverse=True), gpu.key


@pytest.mark.parametrize(
    "name", ["GH200", "B300", "GB300", "A10", "A30", "A40", "L40", "T4", "V100-32GB"]
)
def test_what_can_be_planned_for_has_a_peak_and_the_other_way_round(name: str) -> None:
    gpu = find_gpu(name)
    dtype = "bfloat16" if "bfloat16" in gpu.tflops else "float16"
    for reported in gpu.names:
        assert find_gpu(reported) is gpu
        assert find_peak(reported, dtype) == (gpu.bf16, gpu.source)


def test_no_name_is_listed_twice() -> None:
    assert len(set(NAMES)) == len(NAMES)


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
