"""Peaks are found by exact names, by data type, and never guessed."""

from __future__ import annotations

import pytest

from fast_axolotl.measure.peak_flops import DEVICES, explain_missing, find_peak, normalise_dtype

NAMES = [name for device in DEVICES for name in device.names]


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
    assert find_peak(name, "bfloat16").tflops == pytest.approx(DENSE_BF16[name], abs=0.5)


@pytest.mark.parametrize(
    ("dtype", "tflops"),
    [("float32", 66.9), ("tf32", 494.7), ("float16", 989.4), ("fp8", 1978.9)],
)
def test_the_peak_depends_on_the_data_type(dtype: str, tflops: float) -> None:
    assert find_peak("NVIDIA H100 80GB HBM3", dtype).tflops == tflops


@pytest.mark.parametrize("name", NAMES)
def test_every_peak_has_a_source(name: str) -> None:
    found = [find_peak(name, dtype) for dtype in ("bfloat16", "float16", "tf32", "float32")]
    peaks = [peak for peak in found if peak is not None]
    assert peaks
    assert all(peak.source for peak in peaks)
    rates = [peak.tflops for peak in peaks]
    assert rates == sorted(rates, reverse=True)  # a wider type is never faster


def test_no_name_is_listed_twice() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40S-48Q",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H100",
        "H100",
        "nvidia h200",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H999",
        "L4",
        "",
    ],
)
def test_a_name_that_only_resembles_a_known_one_has_no_peak(name: str) -> None:
    assert find_peak(name, "bfloat16") is None
    reason = explain_missing(name, "bfloat16")
    assert "--peak-tflops" in reason
    assert repr(name) in reason


def test_an_l4_an_l40_and_an_l40s_are_three_devices() -> None:
    rates = [find_peak(f"NVIDIA {name}", "bf16") for name in ("L4", "L40", "L40S")]
    assert [peak.tflops for peak in rates if peak] == [121.0, 181.05, 362.05]


@pytest.mark.parametrize(("name", "tflops"), [("Tesla T4", 65.0), ("Tesla V100-SXM2-16GB", 125.0)])
def test_an_old_device_has_fp16_and_no_bf16(name: str, tflops: float) -> None:
    assert find_peak(name, "bfloat16") is None
    assert "known: float16, float32" in explain_missing(name, "bfloat16")
    assert find_peak(name, "float16").tflops == tflops


def test_without_an_accelerator_there_is_no_peak_and_a_reason() -> None:
    assert find_peak(None, "bfloat16") is None
    assert "--peak-tflops" in explain_missing(None, "bfloat16")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("amp_bf16", "bfloat16"),
        ("FP16", "float16"),
        ("float32", "float32"),
        ("tf32", "tf32"),
        ("amp_fp8", "float8"),
        ("int4", "int4"),
    ],
)
def test_data_types_have_one_name(given: str, ours: str) -> None:
    assert normalise_dtype(given) == ours
