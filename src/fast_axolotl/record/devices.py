"""The table of GPUs: peak FLOP/s, memory and links.

``gpus.json`` has the makers' own figures of one device: peak matmul rates by data type, memory,
links. A rate is what the tensor cores reach without structured sparsity; data sheets often print
twice that. A device is found by its exact name, as NVML and ``torch.cuda.get_device_name`` report
it, never by a part of a name: an L40 is no L4, and a slice of a GPU (MIG) is not the GPU. What is
not in the table has no peak, never a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fast_axolotl.errors import UsageError

_DTYPES = {
    "bfloat16": ("bf16", "amp_bf16"),
    "float16": ("fp16", "half", "amp_fp16"),
    "float32": ("fp32", "float"),
    "tf32": ("tfloat32",),
    "float8": ("fp8", "amp_fp8", "float8_e4m3fn", "float8_e5m2"),
}
"""Our name of a data type → other names of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """One kind of accelerator."""

    key: str
    """The name that ``--gpu`` takes."""
    names: tuple[str, ...]
    """Exactly as reported."""
    tflops: dict[str, float]
    """Data type → dense TFLOP/s; a type that is not here has no matmul units on this device."""
    memory_gb: float
    """10⁹ bytes."""
    bandwidth: float
    """Of its memory, GB/s."""
    link: float
    """To the devices of its node, GB/s; PCIe's where there is no NVLink."""
    network: float
    """To other nodes, GB/s: the usual adapter per device; many clouds have less."""
    node_size: int
    """Devices that share the fast link: 8 in most machines, 72 in an NVL72 rack."""
    generation: str
    """Devices of one generation reach the same shares of their peaks."""
    priced_as: tuple[str, ...]
    """Its names in the table of prices."""
    source: str
    """Who says what its rates are."""

    @property
    def bf16(self) -> float:
        """TFLOP/s of bf16; of fp16 on devices that have no bf16."""
        return self.tflops.get("bfloat16") or self.tflops["float16"]


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Every device of the table."""
    text = files("fast_axolotl.record").joinpath("gpus.json").read_text(encoding="utf-8")
    table = json.loads(text)
    rows = (dict(zip(table["columns"], row, strict=True)) for row in table["gpus"])
    lists = ("names", "priced_as")
    return tuple(Gpu(**(row | {name: tuple(row[name]) for name in lists})) for row in rows)


def find_gpu(name: str) -> Gpu:
    """By ``--gpu``'s name in any case, or a part of it, or exactly as the driver reports it."""
    for gpu in known_gpus():
        if name in gpu.names or name.lower() == gpu.key.lower():
            return gpu
    alike = [gpu.key for gpu in known_gpus() if name.lower() in gpu.key.lower()]
    if len(alike) == 1:
        return find_gpu(alike[0])
    known = ", ".join(alike or (gpu.key for gpu in known_gpus()))
    raise UsageError(f"GPU {name!r} is not known; choose one of {known}")


def find_peak(device_name: str | None, dtype: str) -> tuple[float | None, str]:
    """Dense TFLOP/s of one device by its exact name, and who says so; or ``None`` and why."""
    hint = "give it with --peak-tflops (dense, of one device)"
    if device_name is None:
        return None, f"no accelerator was seen, so there is no peak to compare with: {hint}"
    gpu = next((gpu for gpu in known_gpus() if device_name in gpu.names), None)
    if gpu is None:
        return None, f"the peak of {device_name!r} is not known: {hint}"
    tflops = gpu.tflops.get(normalise_dtype(dtype))
    if tflops is None:
        known = ", ".join(sorted(gpu.tflops))
        return None, f"{device_name!r} has no known peak for {dtype} (known: {known}): {hint}"
    return tflops, gpu.source


def normalise_dtype(dtype: str) -> str:
    """Our name of a data type: ``bf16``, ``amp_bf16`` and ``torch.bfloat16`` are ``bfloat16``."""
    name = dtype.lower().removeprefix("torch.")
    return next((ours for ours, others in _DTYPES.items() if name in others), name)
