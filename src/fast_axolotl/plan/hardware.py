"""What a GPU can do, and what an hour of it costs: two tables beside this file.

``gpus.json`` has the makers' dense rates of one device. ``gpu_prices.json`` names its source and
date; rows that the source fills with placeholders are not in it. What is not in a table is an error
that lists what is, never a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from fast_axolotl.errors import UsageError


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
    """To the devices of its node, GB/s; PCIe's where there is no NVLink."""
    network: float
    """To other nodes, GB/s: the usual adapter per device; many clouds have less."""
    node_size: int
    """Devices that share the fast link: 8 in most machines, 72 in an NVL72 rack."""
    generation: str
    """Devices of one generation reach the same shares of their peaks."""
    priced_as: tuple[str, ...]
    """Its names in the table of prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one device costs per hour."""

    dollars: float
    source: str


def _read(name: str) -> Any:
    return json.loads(files("fast_axolotl.plan").joinpath(name).read_text(encoding="utf-8"))


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Every device of the table."""
    table = _read("gpus.json")
    rows = (dict(zip(table["columns"], row, strict=True)) for row in table["gpus"])
    lists = ("names", "priced_as")
    return tuple(Gpu(**(row | {name: tuple(row[name]) for name in lists})) for row in rows)


def find_gpu(name: str) -> Gpu:
    """By ``--gpu``'s name in any case, or exactly as the driver reports it."""
    for gpu in known_gpus():
        if name in gpu.names or name.lower() == gpu.key.lower():
            return gpu
    known = ", ".join(gpu.key for gpu in known_gpus())
    raise UsageError(f"GPU {name!r} is not known; choose one of {known}")


def find_price(gpu: Gpu) -> Price | None:
    """The median over the clouds that list it on demand; ``None`` where none does."""
    table = _read("gpu_prices.json")
    dollars = sorted(row[2] for row in table["prices"] if row[1] in gpu.priced_as)
    if not dollars:
        return None
    source = f"median of {len(dollars)} offers from {dollars[0]:g} to {dollars[-1]:g}, "
    return Price(dollars=median(dollars), source=f"{source}{table['source']}, {table['date']}")
