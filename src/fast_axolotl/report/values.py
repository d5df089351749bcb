"""Changes, settings and texts in words, as every form of a report shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fast_axolotl.record.protocol_result import Cell, MatrixRow
from fast_axolotl.record.units import format_change

__all__ = ["describe_change", "describe_left", "describe_value", "escape_markdown", "format_ratios"]

_MOST_DECIMALS = 5
"""Of a ratio: smaller changes than a hundred-thousandth are none that anybody asks for."""

_SPECIAL = re.compile(r"[\\`*\[\]<>&|#~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown may take for its own. An underscore inside a word is none: a figure's name."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


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
    return [
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.{max(decimals, 3) if value < 0.1 else decimals}f}"
        for value in known
    ]


def describe_left(seconds: float) -> str:
    """An estimate, as exact as one can be: ``about 12 min left``."""
    if seconds < 90:
        return f"about {max(1.0, seconds):.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"


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
    return _SPECIAL.sub(
        lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), " ".join(text.split())
    )
