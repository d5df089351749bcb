"""Token sequences in the forms that packing and padding take, and their rows as lists."""

from __future__ import annotations

import importlib.util
from typing import Any

import pyarrow as pa
import pytest

OUTPUTS = [
    "lists",
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("torch") is None, reason="torch is not installed"
        ),
    ),
]


def flat(sequences: list[list[int]], dtype: str = "int64") -> Any:
    """An Arrow column, with values before and after those of its rows."""
    kind = pa.list_(getattr(pa, dtype)())
    return pa.array([[99], *sequences, [98, 97]], kind).slice(1, len(sequences))


def as_lists(result: Any) -> Any:
    """A column, or all columns by their names, as lists."""
    if isinstance(result, dict):
        return {name: as_lists(column) for name, column in result.items()}
    return result if isinstance(result, list) else result.tolist()


def oracle_pad(
    sequences: list[list[int]], width: int, padding: int, side: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Padded rows and their masks, in plain Python."""
    rows = [sequence[:width] for sequence in sequences]
    pieces = [([padding] * (width - len(row)), row, len(row)) for row in rows]
    if side == "left":
        return [a + b for a, b, _ in pieces], [[0] * len(a) + [1] * n for a, _, n in pieces]
    return [b + a for a, b, _ in pieces], [[1] * n + [0] * len(a) for a, _, n in pieces]
