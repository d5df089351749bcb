"""Peak matmul rates of accelerators: dense, by data type, from the makers' own figures.

A device is found by its exact name, as NVML and ``torch.cuda.get_device_name`` report it. There is
no guess and no match on a part of a name: an L40 is no L4, and a slice of a GPU (MIG) is not the
GPU. A rate is what the tensor cores reach without structured sparsity, accumulating in 32 bits;
data sheets often print twice that, with sparsity. What is not in the table has no MFU, and the
reason says how to give the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Peak", "explain_missing", "find_peak", "known_devices", "normalise_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The rate that MFU is a share of."""

    tflops: float
    """Dense TFLOP/s of one device."""
    source: str
    """Who says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """One kind of accelerator."""

    names: tuple[str, ...]
    """Exactly as reported."""
    source: str
    tflops: dict[str, float]
    """Data type → dense TFLOP/s; a type that is not here has no matmul units on this device."""


_DTYPES = {
    "bfloat16": ("bf16", "amp_bf16"),
    "float16": ("fp16", "half", "amp_fp16"),
    "float32": ("fp32", "float"),
    "tf32": ("tfloat32",),
    "float8": ("fp8", "amp_fp8", "float8_e4m3fn", "float8_e5m2"),
}
"""Our name of a data type → other names of it."""

_A100 = {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5}
_H100_SXM = {
    "bfloat16": 989.4,
    "float16": 989.4,
    "tf32": 494.7,
    "float32": 66.9,
    "float8": 1978.9,
}

_DEVICES = (
    _Device(
        names=(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100-PCIE-80GB",
            "NVIDIA A100 80GB PCIe",
            "A100-SXM4-40GB",
            "A100-SXM4-80GB",
            "A100-PCIE-40GB",
        ),
        source="NVIDIA A100 Tensor Core GPU data sheet, dense",
        tflops=_A100,
    ),
    _Device(
        names=("NVIDIA H100 80GB HBM3",),
        source="NVIDIA H100 architecture white paper, H100 SXM5, dense",
        tflops=_H100_SXM,
    ),
    _Device(
        names=("NVIDIA H100 PCIe",),
        source="NVIDIA H100 architecture white paper, H100 PCIe, dense",
        tflops={
            "bfloat16": 756.0,
            "float16": 756.0,
            "tf32": 378.0,
            "float32": 51.2,
            "float8": 1513.0,
        },
    ),
    _Device(
        names=("NVIDIA H100 NVL",),
        source="NVIDIA H100 data sheet, H100 NVL, half of the figure with sparsity",
        tflops={
            "bfloat16": 835.0,
            "float16": 835.0,
            "tf32": 417.5,
            "float32": 60.0,
            "float8": 1670.0,
        },
    ),
    _Device(
        names=("NVIDIA H200",),
        source="NVIDIA H200 data sheet: the rates of H100 SXM5, dense",
        tflops=_H100_SXM,
    ),
    _Device(
        names=("NVIDIA B200",),
        source="NVIDIA HGX B200 data sheet, one of eight GPUs, dense",
        tflops={"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1125.0, "float8": 4500.0},
    ),
    _Device(
        names=("NVIDIA GB200",),
        source="NVIDIA GB200 NVL72 data sheet, one of 72 GPUs, dense",
        tflops={"bfloat16": 2500.0, "float16": 2500.0, "tf32": 1250.0, "float8": 5000.0},
    ),
    _Device(
        names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        source="AMD Instinct MI300X data sheet, by a secondary source, dense",
        tflops={
            "bfloat16": 1307.4,
            "float16": 1307.4,
            "tf32": 653.7,
            "float32": 163.4,
            "float8": 2614.9,
        },
    ),
    _Device(
        names=("NVIDIA L40S",),
        source="NVIDIA L40S data sheet, dense",
        tflops={
            "bfloat16": 362.05,
            "float16": 362.05,
            "tf32": 183.0,
            "float32": 91.6,
            "float8": 733.0,
        },
    ),
    _Device(
        names=("NVIDIA L40",),
        source="NVIDIA L40 data sheet, dense",
        tflops={
            "bfloat16": 181.05,
            "float16": 181.05,
            "tf32": 90.5,
            "float32": 90.5,
            "float8": 362.0,
        },
    ),
    _Device(
        names=("NVIDIA L4",),
        source="NVIDIA L4 data sheet, half of the figure with sparsity",
        tflops={
            "bfloat16": 121.0,
            "float16": 121.0,
            "tf32": 60.0,
            "float32": 30.3,
            "float8": 242.5,
        },
    ),
    _Device(
        names=("NVIDIA A40",),
        source="NVIDIA A40 data sheet, dense",
        tflops={"bfloat16": 149.7, "float16": 149.7, "tf32": 74.8, "float32": 37.4},
    ),
    _Device(
        names=("NVIDIA A30",),
        source="NVIDIA A30 data sheet, dense",
        tflops={"bfloat16": 165.0, "float16": 165.0, "tf32": 82.0, "float32": 10.3},
    ),
    _Device(
        names=("NVIDIA A10",),
        source="NVIDIA A10 data sheet, dense",
        tflops={"bfloat16": 125.0, "float16": 125.0, "tf32": 62.5, "float32": 31.2},
    ),
    _Device(
        names=("NVIDIA RTX A6000",),
        source="NVIDIA GA102 architecture white paper, dense",
        tflops={"bfloat16": 154.8, "float16": 154.8, "tf32": 77.4, "float32": 38.7},
    ),
    _Device(
        names=("NVIDIA GeForce RTX 3090",),
        source="NVIDIA GA102 architecture white paper, dense",
        tflops={"bfloat16": 71.0, "float16": 71.0, "tf32": 35.6, "float32": 35.6},
    ),
    _Device(
        names=("NVIDIA GeForce RTX 4090",),
        source="NVIDIA Ada architecture white paper, by a secondary source, dense",
        tflops={
            "bfloat16": 165.2,
            "float16": 165.2,
            "tf32": 82.6,
            "float32": 82.6,
            "float8": 330.3,
        },
    ),
    _Device(
        names=("NVIDIA A10G",),
        source="the cloud that offers it, by a secondary source, dense",
        tflops={"bfloat16": 70.0, "float16": 70.0, "tf32": 35.0},
    ),
    _Device(
        names=("Tesla T4",),
        source="NVIDIA T4 data sheet; it has no bf16",
        tflops={"float16": 65.0, "float32": 8.1},
    ),
    _Device(
        names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        source="NVIDIA V100 data sheet, V100 SXM2; it has no bf16",
        tflops={"float16": 125.0, "float32": 15.7},
    ),
    _Device(
        names=("TPU v4",), source="Google Cloud TPU v4 documentation", tflops={"bfloat16": 275.0}
    ),
    _Device(
        names=("TPU v5e", "TPU v5 lite"),
        source="Google Cloud TPU v5e documentation",
        tflops={"bfloat16": 197.0},
    ),
    _Device(
        names=("TPU v5p", "TPU v5"),
        source="Google Cloud TPU v5p documentation",
        tflops={"bfloat16": 459.0},
    ),
    _Device(
        names=("TPU v6e", "TPU v6 lite"),
        source="Google Cloud TPU v6e documentation",
        tflops={"bfloat16": 918.0},
    ),
)


def find_peak(device_name: str | None, dtype: str) -> Peak | None:
    """The peak of one device by its exact name, or ``None``; see ``explain_missing``."""
    device = _find_device(device_name)
    tflops = None if device is None else device.tflops.get(normalise_dtype(dtype))
    if device is None or tflops is None:
        return None
    return Peak(tflops=tflops, source=device.source)


def explain_missing(device_name: str | None, dtype: str) -> str:
    """Why ``find_peak`` has nothing, and what to do: one sentence."""
    hint = "give it with --peak-tflops (dense, of one device)"
    if device_name is None:
        return f"no accelerator was seen, so there is no peak to compare with: {hint}"
    device = _find_device(device_name)
    if device is None:
        return f"the peak of {device_name!r} is not known: {hint}"
    known = ", ".join(sorted(device.tflops))
    return f"{device_name!r} has no known peak for {dtype} (known: {known}): {hint}"


def known_devices() -> tuple[str, ...]:
    """The names that have a peak."""
    return tuple(name for device in _DEVICES for name in device.names)


def normalise_dtype(dtype: str) -> str:
    """Our name of a data type: ``bf16``, ``amp_bf16`` and ``torch.bfloat16`` are ``bfloat16``."""
    name = dtype.lower().removeprefix("torch.")
    for ours, others in _DTYPES.items():
        if name == ours or name in others:
            return ours
    return name


def _find_device(device_name: str | None) -> _Device | None:
    return next((one for one in _DEVICES if device_name in one.names), None)
