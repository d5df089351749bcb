"""What a GPU can do, and what an hour of it costs.

Rates are the makers' own, dense, of one device. Link rates are of one direction. ``node_size`` is
how many devices share the fast link: 8 in most machines, 72 in an NVL72 rack. ``network`` is the
usual network adapter per device; many clouds offer less, so it can be given. Prices come from
``gpu_prices.json`` in this folder, which names its source and date; rows that its source fills with
placeholders are not in it. What is not in a table is an error that lists what is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median

from fast_axolotl.errors import UsageError

__all__ = ["GPUS", "Gpu", "Price", "find_gpu", "find_price"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of accelerator."""

    key: str
    """The name that ``--gpu`` takes."""
    names: tuple[str, ...]
    """Exactly as NVML and torch report it."""
    bf16: float
    """Dense TFLOP/s."""
    fp8: float | None
    fp4: float | None
    memory_gb: float
    """10⁹ bytes."""
    bandwidth: float
    """Of its memory, GB/s."""
    link: float
    """To the devices of its node, GB/s."""
    network: float
    """To other nodes, GB/s."""
    node_size: int
    generation: str
    """Devices of one generation reach the same shares of their peaks."""
    priced_as: tuple[str, ...] = ()
    """Its names in the table of prices."""


GPUS = (
    Gpu("A100-40GB", ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB",
                      "A100-PCIE-40GB"),
        312, None, None, 42.5, 1555, 300, 25, 8, "ampere", ("A100",)),
    Gpu("A100-80GB", ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        312, None, None, 85.1, 2039, 300, 25, 8, "ampere", ("A100-80GB", "A100-80GB-SXM")),
    Gpu("A100-80GB-PCIe", ("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB"),
        312, None, None, 85.1, 1935, 25, 12.5, 8, "ampere", ("A100-80G-PCIe",)),
    Gpu("H100-SXM", ("NVIDIA H100 80GB HBM3",),
        989.4, 1978.9, None, 85.0, 3350, 450, 50, 8, "hopper",
        ("H100", "H100-SXM", "H100-80G-SXM5", "H100-NVLINK", "H100-MEGA")),
    Gpu("H100-PCIe", ("NVIDIA H100 PCIe",),
        756, 1513, None, 85.0, 2000, 50, 25, 8, "hopper", ("H100-80G-PCIe",)),
    Gpu("H100-NVL", ("NVIDIA H100 NVL",),
        835, 1670, None, 100.0, 3900, 50, 25, 8, "hopper", ("H100-NVL",)),
    Gpu("GH200", ("NVIDIA GH200 480GB",),
        989.4, 1978.9, None, 102.0, 4000, 50, 50, 1, "hopper", ("GH200",)),
    Gpu("H200", ("NVIDIA H200",),
        989.4, 1978.9, None, 150.1, 4800, 450, 50, 8, "hopper", ("H200", "H200-SXM")),
    Gpu("B200", ("NVIDIA B200",),
        2250, 4500, 9000, 192.0, 8000, 900, 50, 8, "blackwell", ("B200",)),
    Gpu("GB200", ("NVIDIA GB200",),
        2500, 5000, 10000, 198.0, 8000, 900, 50, 72, "blackwell"),
    Gpu("B300", ("NVIDIA B300",),
        2250, 4500, 13500, 288.0, 8000, 900, 100, 8, "blackwell-ultra", ("B300",)),
    Gpu("GB300", ("NVIDIA GB300",),
        2500, 5000, 15000, 298.0, 8000, 900, 100, 72, "blackwell-ultra"),
    Gpu("MI300X", ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        1307.4, 2614.9, None, 206.1, 5300, 310, 50, 8, "cdna", ("MI300X",)),
    Gpu("L40S", ("NVIDIA L40S",), 362.05, 733, None, 48.3, 864, 25, 12.5, 8, "ada", ("L40S",)),
    Gpu("L4", ("NVIDIA L4",), 121, 242.5, None, 24.1, 300, 25, 6.25, 8, "ada"),
    Gpu("A10G", ("NVIDIA A10G",), 70, None, None, 24.1, 600, 12, 6.25, 8, "ampere"),
    Gpu("RTX-4090", ("NVIDIA GeForce RTX 4090",),
        165.2, 330.3, None, 25.4, 1008, 20, 3, 8, "ada", ("RTX4090",)),
    Gpu("RTX-3090", ("NVIDIA GeForce RTX 3090",),
        71, None, None, 25.4, 936, 12, 3, 8, "ampere"),
    Gpu("RTX-A6000", ("NVIDIA RTX A6000",), 154.8, None, None, 51.0, 768, 25, 6.25, 8, "ampere"),
    Gpu("TPU-v4", ("TPU v4",), 275, None, None, 34.4, 1228, 150, 150, 4096, "tpu"),
    Gpu("TPU-v5e", ("TPU v5e",), 197, None, None, 17.2, 819, 100, 6, 256, "tpu"),
    Gpu("TPU-v5p", ("TPU v5p",), 459, None, None, 102.0, 2765, 300, 12, 8960, "tpu"),
    Gpu("TPU-v6e", ("TPU v6e",), 918, None, None, 34.4, 1640, 224, 12, 256, "tpu"),
    Gpu("TPU-v7", ("TPU Ironwood",), 2307, 4614, None, 206.0, 7370, 600, 25, 9216, "tpu"),
)  # fmt: skip
"""Link rates of devices without NVLink are those of PCIe, which their peers share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one device costs per hour."""

    dollars: float
    low: float
    high: float
    source: str


def find_gpu(name: str) -> Gpu:
    """By ``--gpu``'s name in any case, or exactly as the driver reports it."""
    for gpu in GPUS:
        if name in gpu.names or name.lower() == gpu.key.lower():
            return gpu
    known = ", ".join(gpu.key for gpu in GPUS)
    raise UsageError(f"GPU {name!r} is not known; known are {known}")


@cache
def find_price(gpu: Gpu) -> Price | None:
    """The median over the clouds that list it on demand, with the cheapest and the dearest."""
    text = files("fast_axolotl.plan").joinpath("gpu_prices.json").read_text(encoding="utf-8")
    table = json.loads(text)
    dollars = sorted(row[2] for row in table["prices"] if row[1] in gpu.priced_as)
    if not dollars:
        return None
    source = f"median of {len(dollars)} clouds, {table['source']}, {table['date']}"
    return Price(dollars=median(dollars), low=dollars[0], high=dollars[-1], source=source)
