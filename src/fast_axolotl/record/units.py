"""Format shares, seconds, bytes, counts, FLOPs and dates.

Values that were not measured, and numbers that are none (NaN), are a dash.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from functools import partial

_SCALES = {
    "bytes": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "B")),
    "FLOP": ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (0.0, "FLOP")),
}
"""Begin of a unit → from which number on it is written how."""


def format_value(value: float | None, unit: str, *, decimals: int = 1) -> str:
    """A figure with its unit, by the unit's own formatter; ``decimals`` are those of a percent."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if unit == "share":
        return f"{100 * value:.{decimals}f} %"
    if unit == "s" and size >= 600:
        return format_duration(value)
    if unit == "s" and size >= 1:
        return f"{value:,.2f} s"
    if unit == "s":
        return f"{1e3 * value:,.1f} ms" if size >= 1e-3 else f"{1e6 * value:,.0f} µs"
    for begin, scale in _SCALES.items():
        if unit.startswith(begin):
            by, name = next(step for step in scale if size >= step[0])
            text = format_count(value / by) if by else f"{value:,.0f}"
            return f"{text} {name}{unit.removeprefix(begin)}"
    if unit == "yes/no":
        return "yes" if value else "no"
    text = f"{value:,.0f}" if size >= 100 else f"{value:,.3g}"
    return f"{text} {unit}".rstrip()


format_share = partial(format_value, unit="share")
"""``12.3 %``."""
format_seconds = partial(format_value, unit="s")
"""What was measured: ``83 µs``, ``12.3 ms``, ``4.56 s``; from ten minutes on a duration."""
format_bytes = partial(format_value, unit="bytes")
"""``512 B``, ``1.5 MB``, ``12.3 GB``: three digits, powers of 1000."""
format_count = partial(format_value, unit="")
"""``1,234`` or ``12.3``."""


def format_duration(seconds: float) -> str:
    """How long something lasts: ``8.2 s``, ``12 min 30 s``, ``1 h 04 min``."""
    if seconds < 60:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_change(value: float, unit: str, *, decimals: int = 1) -> str:
    """A difference with its sign; one of shares is in points, with so many decimals."""
    if unit == "share":
        points = round(100 * abs(value), decimals)
        amount = f"{points:.{decimals}f} points" if points else "0 points"
    else:
        amount = format_value(abs(value), unit)
    is_nothing = not any(digit in "123456789" for digit in amount)
    return amount if is_nothing else f"{'−' if value < 0 else '+'}{amount}"


def format_date(seconds: float) -> str:
    """A moment, in UTC."""
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "–"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def count_words(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``3 fetches``."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending}"
