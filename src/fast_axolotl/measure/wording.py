"""Figures in words: percentages, durations and rates as sentences hold them."""

from __future__ import annotations

__all__ = ["percent", "rate", "seconds"]


def percent(share: float | None) -> str:
    """``12.3 %``; a dash for what was not measured."""
    return "–" if share is None else f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min``, ``2.5 h``."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def rate(value: float | None) -> str:
    """Bytes per second in MB or GB."""
    if value is None:
        return "–"
    return f"{value / 1e9:,.2f} GB/s" if value >= 1e9 else f"{value / 1e6:,.1f} MB/s"
