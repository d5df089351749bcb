"""Peak matmul rates of accelerators: dense, by data type, from the makers' own figures.

A device is found by its exact name, as NVML and ``torch.cuda.get_device_name`` report it. There is
no guess and no match on a part of a name: an L40 is no L4, and a slice of a GPU (MIG) is not the
GPU. A rate is what the tensor cores reach without structured sparsity, accumulating in 32 bits;
data sheets often print twice that, with sparsity. What is not in the table has no MFU, and the
reason says how to give the peak.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The rate that MFU is a share of."""

    tflops: float
    """Dense TFLOP/s of one device."""
    source: str
    """Who says so."""


@dataclass(frozen=True, slots=True)
class Device:
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


def _rates(
    half: float, tf32: float, float32: float | None = None, float8: float | None = None
) -> dict[str, float]:
    """The rates of a device with bf16, whose two halves are equally fast."""
    rates = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": float32, "float8": float8}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


DEVICES = (
    Device(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100-PCIE-80GB", "NVIDIA A100 80GB PCIe", "A100-SXM4-40GB", "A100-SXM4-80GB",
            "A100-PCIE-40GB"),
           "NVIDIA A100 Tensor Core GPU data sheet, dense", _rates(312.0, 156.0, 19.5)),
    Device(("NVIDIA H100 80GB HBM3",), "NVIDIA H100 architecture white paper, H100 SXM5, dense",
           _rates(989.4, 494.7, 66.9, 1978.9)),
    Device(("NVIDIA H100 PCIe",), "NVIDIA H100 architecture white paper, H100 PCIe, dense",
           _rates(756.0, 378.0, 51.2, 1513.0)),
    Device(("NVIDIA H100 NVL",),
           "NVIDIA H100 data sheet, H100 NVL, half of the figure with sparsity",
           _rates(835.0, 417.5, 60.0, 1670.0)),
    Device(("NVIDIA H200",), "NVIDIA H200 data sheet: the rates of H100 SXM5, dense",
           _rates(989.4, 494.7, 66.9, 1978.9)),
    Device(("NVIDIA B200",), "NVIDIA HGX B200 data sheet, one of eight GPUs, dense",
           _rates(2250.0, 1125.0, float8=4500.0)),
    Device(("NVIDIA GB200",), "NVIDIA GB200 NVL72 data sheet, one of 72 GPUs, dense",
           _rates(2500.0, 1250.0, float8=5000.0)),
    Device(("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
           "AMD Instinct MI300X data sheet, by a secondary source, dense",
           _rates(1307.4, 653.7, 163.4, 2614.9)),
    Device(("NVIDIA L40S",), "NVIDIA L40S data sheet, dense", _rates(362.05, 183.0, 91.6, 733.0)),
    Device(("NVIDIA L40",), "NVIDIA L40 data sheet, dense", _rates(181.05, 90.5, 90.5, 362.0)),
    Device(("NVIDIA L4",), "NVIDIA L4 data sheet, half of the figure with sparsity",
           _rates(121.0, 60.0, 30.3, 242.5)),
    Device(("NVIDIA A40",), "NVIDIA A40 data sheet, dense", _rates(149.7, 74.8, 37.4)),
    Device(("NVIDIA A30",), "NVIDIA A30 data sheet, dense", _rates(165.0, 82.0, 10.3)),
    Device(("NVIDIA A10",), "NVIDIA A10 data sheet, dense", _rates(125.0, 62.5, 31.2)),
    Device(("NVIDIA RTX A6000",), "NVIDIA GA102 architecture white paper, dense",
           _rates(154.8, 77.4, 38.7)),
    Device(("NVIDIA GeForce RTX 3090",), "NVIDIA GA102 architecture white paper, dense",
           _rates(71.0, 35.6, 35.6)),
    Device(("NVIDIA GeForce RTX 4090",),
           "NVIDIA Ada architecture white paper, by a secondary source, dense",
           _rates(165.2, 82.6, 82.6, 330.3)),
    Device(("NVIDIA A10G",), "the cloud that offers it, by a secondary source, dense",
           _rates(70.0, 35.0)),
    Device(("Tesla T4",), "NVIDIA T4 data sheet; it has no bf16",
           {"float16": 65.0, "float32": 8.1}),
    Device(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
           "NVIDIA V100 data sheet, V100 SXM2; it has no bf16",
           {"float16": 125.0, "float32": 15.7}),
)  # fmt: skip


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


def normalise_dtype(dtype: str) -> str:
    """Our name of a data type: ``bf16``, ``amp_bf16`` and ``torch.bfloat16`` are ``bfloat16``."""
    name = dtype.lower().removeprefix("torch.")
    return next((ours for ours, others in _DTYPES.items() if name in others), name)


def _find_device(device_name: str | None) -> Device | None:
    return next((device for device in DEVICES if device_name in device.names), None)
