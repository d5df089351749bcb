"""Figures in words: by the unit of a matrix's row, with sign and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fast_axolotl.record.comparison import Cell, MatrixRow

__all__ = ["describe_change", "describe_value", "format_date", "format_length", "format_value"]

_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "B"))
_SIZES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def format_value(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash for what was not measured."""
    if value is None or not math.isfinite(value):
        return "–"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "s":
        return _seconds(value)
    if unit.startswith("bytes"):
        return _bytes(value) + unit.removeprefix("bytes")
    return f"{_number(value)} {unit}".rstrip()


def _seconds(value: float) -> str:
    size = abs(value)
    if size >= 600:
        return format_length(value)
    if size >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:,.1f} ms" if size >= 1e-3 else f"{1e6 * value:,.0f} µs"


def _bytes(value: float) -> str:
    name = next(name for least, name in _BYTES if abs(value) >= least)
    return f"{value / _SIZES[name]:,.3g} {name}" if name != "B" else f"{value:,.0f} B"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def format_length(seconds: float) -> str:
    """``1 h 04 min``, ``12 min 30 s``, ``8.2 s``."""
    if seconds < 60:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_date(seconds: float) -> str:
    """A moment, in UTC."""
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "–"
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def describe_change(cell: Cell, row: MatrixRow) -> tuple[str, str]:
    """An arm against the baseline: ``×1.42`` and its interval; empty where there is neither."""
    if cell.ratio is not None:
        return f"×{_ratio(cell.ratio)}", _interval(cell.low, cell.high, _ratio)
    if cell.difference:
        shown = _signed(cell.difference, row.unit)
        interval = _interval(
            cell.difference_low, cell.difference_high, lambda value: _signed(value, row.unit)
        )
        return shown, interval
    return "", ""


def _interval(low: float | None, high: float | None, form: Any) -> str:
    return "" if low is None or high is None else f"{form(low)} to {form(high)}"


def _ratio(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _signed(value: float, unit: str) -> str:
    sign = "+" if value > 0 else "−" if value < 0 else ""
    if unit == "share":
        return f"{sign}{100 * abs(value):.1f} points"
    return f"{sign}{format_value(abs(value), unit)}"


def describe_value(value: Any) -> str:
    """A setting, whatever it is, in one line."""
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {describe_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(describe_value, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
