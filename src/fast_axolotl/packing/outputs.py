"""Rows as lists, numpy or torch, and the options that ask for them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from fast_axolotl.errors import MissingExtraError, UsageError
from fast_axolotl.packing.inputs import Array, integer

OUTPUTS = ("lists", "numpy", "torch")

_BLOCK_ROWS = 256
"""Rows made before they leave the collector's sight: it runs at every 700 new lists."""


def check_options(
    output: str, too_long: str, ways: Sequence[str], dtype: str, num_threads: int
) -> None:
    """Raises for a wrong option; ``ways`` are those with a sequence that is too long."""
    option("output", output, OUTPUTS)
    option("too_long", too_long, ways)
    option("dtype", dtype, ("int64", "int32"))
    if integer("num_threads", num_threads) < 0:
        raise UsageError(f"num_threads must be 0 (all processors) or more, not {num_threads}")


def option(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises where ``value`` is not one of the allowed ones, or needs a package that is missing."""
    if not isinstance(value, str) or value not in allowed:
        names = " or ".join(map(repr, allowed))
        raise UsageError(f"{name} must be {names}, not {value!r}")
    if name == "output" and value == "torch":
        _torch()


def deliver(result: Array, output: str) -> Any:
    """An array as one of the ``OUTPUTS``; numpy and torch share its memory."""
    if output == "numpy":
        return result
    if output == "torch":
        return _torch().from_numpy(result)
    if result.ndim == 1:
        return result.tolist()
    starts = range(0, len(result), _BLOCK_ROWS)
    blocks = (result[start : start + _BLOCK_ROWS] for start in starts)
    return untracked(row for block in blocks for row in block.tolist())


def untracked(rows: Iterable[list[int]]) -> list[list[int]]:
    """The rows in a list, each out of the garbage collector's sight from the moment it is made.

    The collector looks for cycles. It walks every token of every new list several times over, which
    takes longer than making them, and lists of integers have none to find. CPython itself leaves
    tuples and dicts of such values untracked. Rows are freed as ever when nothing refers to them;
    only one that is made part of a cycle later would stay.
    """
    kept = []
    for row in rows:
        _untrack(row)
        kept.append(row)
    return kept


try:
    _untrack: Any = ctypes.PYFUNCTYPE(None, ctypes.py_object)(
        ("PyObject_GC_UnTrack", ctypes.pythonapi)
    )
except AttributeError:  # not CPython

    def _untrack(row: list[int]) -> None:
        pass


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtraError("the torch output needs PyTorch: pip install torch") from None
    return torch
