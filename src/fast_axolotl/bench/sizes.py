"""Numbers of rows as people write them: ``10k``, ``1M``, ``2500``."""

from __future__ import annotations

from fast_axolotl.errors import UsageError

__all__ = ["parse_sizes", "size_name"]

_UNITS = {"": 1, "k": 1000, "m": 1_000_000}


def parse_sizes(text: str) -> tuple[int, ...]:
    """``10k,1M`` as (10000, 1000000): ascending, each once."""
    sizes = {_parse_size(part.strip()) for part in text.split(",") if part.strip()}
    if not sizes:
        raise UsageError(f"cannot read {text!r} as sizes; write 10k,100k,1M or plain numbers")
    return tuple(sorted(sizes))


def size_name(size: int) -> str:
    """The shortest way to write it: ``10k`` for 10000."""
    for unit in ("M", "k"):
        if size >= _UNITS[unit.lower()] and size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def _parse_size(text: str) -> int:
    number = text.rstrip("kKmM")
    try:
        size = float(number) * _UNITS[text[len(number) :].lower()]
    except (ValueError, KeyError):
        size = 0.0
    if not 1 <= size < 2**63 or size != int(size):
        raise UsageError(
            f"cannot read {text!r} as a size; write a number of rows, such as 10k, 1M or 2500"
        )
    return int(size)
