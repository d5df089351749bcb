"""What an hour of a GPU costs, by the table beside this file, which names its source and date.

Rows that the source fills with placeholders are not in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from statistics import median

from fast_axolotl.record.devices import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one device costs per hour."""

    dollars: float
    source: str


def find_price(gpu: Gpu) -> Price | None:
    """The median over the clouds that list it on demand; ``None`` where none does."""
    text = files("fast_axolotl.plan").joinpath("gpu_prices.json").read_text(encoding="utf-8")
    table = json.loads(text)
    dollars = sorted(row[2] for row in table["prices"] if row[1] in gpu.priced_as)
    if not dollars:
        return None
    source = f"median of {len(dollars)} offers from {dollars[0]:g} to {dollars[-1]:g}, "
    return Price(dollars=median(dollars), source=f"{source}{table['source']}, {table['date']}")
