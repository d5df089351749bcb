"""Figures in words: by their unit, with sign and interval; and words as Markdown takes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fast_axolotl.record.protocol_result import Cell, MatrixRow

__all__ = [
    "count_words",
    "describe_change",
    "describe_value",
    "escape_markdown",
    "format_change",
    "format_count",
    "format_date",
    "format_length",
    "format_ratios",
    "format_value",
]

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

_MOST_DECIMALS = 5
"""Of a ratio: smaller changes than a hundred-thousandth are none that anybody asks for."""

_SPECIAL = re.compile(r"[\\`*\[\]<>&|#~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown may take for its own. An underscore inside a word is none: a figure's name."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


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
    return f"{format_count(value)} {unit}".rstrip()


def _seconds(value: float) -> str:
    size = abs(value)
    if size >= 600:
        return format_length(value)
    if size >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:,.1f} ms" if size >= 1e-3 else f"{1e6 * value:,.0f} µs"


def _bytes(value: float) -> str:
    for size, name in _BYTES:
        if abs(value) >= size:
            return f"{format_count(value / size)} {name}"
    return f"{value:,.0f} B"


def format_count(value: float | None) -> str:
    """``1,234`` or ``12.3``; a dash for what was not measured."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def count_words(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``3 fetches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


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
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def describe_change(cell: Cell, row: MatrixRow) -> tuple[str, str]:
    """An arm against the baseline: ``×1.42`` and its interval; empty where there is neither."""
    if cell.ratio is not None:
        ratio, *ends = format_ratios(cell, decimals=2)
        return f"×{ratio}", " to ".join(ends)
    if cell.difference:
        ends = [
            format_change(end, row.unit)
            for end in (cell.difference_low, cell.difference_high)
            if end is not None
        ]
        return format_change(cell.difference, row.unit), " to ".join(ends)
    return "", ""


def format_ratios(cell: Cell, *, decimals: int) -> list[str]:
    """The ratio of a cell, and the ends of its interval where it has one.

    A change has more decimals where fewer would round it to 1, which stands for no change.
    """
    known = [value for value in (cell.ratio, cell.low, cell.high) if value is not None]
    if cell.outcome in ("better", "worse", "changed"):
        enough = (
            number
            for number in range(decimals, _MOST_DECIMALS)
            if all(round(value, number) != 1.0 for value in known)
        )
        decimals = next(enough, _MOST_DECIMALS)
    return [_ratio(value, decimals) for value in known]


def _ratio(value: float, decimals: int) -> str:
    if value >= 10:
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.{max(decimals, 3) if value < 0.1 else decimals}f}"


def format_change(value: float, unit: str, *, decimals: int = 1) -> str:
    """A difference, with its sign; ``decimals`` are those of points."""
    if unit == "share":
        points = round(100 * abs(value), decimals)
        amount = f"{points:.{decimals}f} points" if points else "0 points"
    else:
        amount = format_value(abs(value), unit)
    is_nothing = not any(sign in "123456789" for sign in amount)
    return amount if is_nothing else f"{'−' if value < 0 else '+'}{amount}"


def describe_value(value: Any) -> str:
    """A setting, whatever it is, in one line."""
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {describe_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(describe_value, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def escape_markdown(text: str) -> str:
    """Texts are data: nothing of them is a style, a tag, a column or a line of its own."""
    return _SPECIAL.sub(_escape, " ".join(text.split()))


def _escape(found: re.Match[str]) -> str:
    return _ENTITIES.get(found[0], f"\\{found[0]}")
