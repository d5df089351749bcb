"""What people type, as values: sizes, shards, lists of names."""

from __future__ import annotations

from fast_axolotl.errors import UsageError

__all__ = ["parse_names", "parse_shard", "parse_size"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}


def parse_size(text: str) -> int:
    """``256MiB``, ``1.5 GB`` or a plain number of bytes."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"cannot read {text!r} as a size; write 256MiB or 1GB") from None


def parse_shard(text: str) -> tuple[int, int]:
    """``0/8`` as (0, 8)."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise UsageError(f"cannot read {text!r} as a shard; write 0/8 for the first of 8") from None
    return index, count


def parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
