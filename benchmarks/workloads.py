"""The inputs of the operations, made on the spot and always the same for one size.

Sequences and rows to hash are those of the earlier package's benchmark, drawn by numpy.
"""

from __future__ import annotations

import json
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

VOCABULARY = 30_000
LONG_ROW_CHARACTERS = 4096
TOKENS_OF_A_ROW = 365
"""The mean of a chat dataset, tokenized."""
REPEATED_SHARE = 0.2
"""Of the tokenized rows."""
_SIGMA = 0.8
"""Of the logarithm of their lengths."""


class Sequences:
    """Token sequences of ``low`` to ``high`` tokens, as arrays and as Python's lists."""

    def __init__(self, count: int, low: int, high: int) -> None:
        self.count = count
        self._low = low
        self._high = high
        self._lists: list[list[int]] = []

    @cached_property
    def flat(self) -> tuple[Any, Any]:
        """Tokens of 32 bits end to end, and offsets."""
        rng = np.random.default_rng(0)
        offsets = np.zeros(self.count + 1, np.int64)
        np.cumsum(rng.integers(self._low, self._high + 1, self.count), out=offsets[1:])
        return rng.integers(0, VOCABULARY, offsets[-1], dtype=np.int32), offsets

    def first(self, count: int) -> tuple[Any, Any]:
        """The first of them, without a copy."""
        values, offsets = self.flat
        return values[: offsets[count]], offsets[: count + 1]

    def lists(self, count: int) -> list[list[int]]:
        """The first of them as lists, made once; every token is an object of its own."""
        if len(self._lists) != count:
            values, offsets = self.first(count)
            edges = pairwise(offsets.tolist())
            self._lists = [values[start:stop].tolist() for start, stop in edges]
        return self._lists

    def write(self, path: Path, count: int) -> Path:
        """The first of them as ``peer`` reads them."""
        values, offsets = self.first(count)
        values.tofile(path)
        offsets.tofile(path.with_suffix(".offsets"))
        return path


def json_rows(count: int) -> list[str]:
    """Rows of about 70 bytes."""
    return [
        json.dumps({"id": index, "text": f"Sample text content {index}", "value": index * 1.5})
        for index in range(count)
    ]


def long_rows(count: int) -> list[str]:
    """Rows of 4 KB, each its own."""
    filler = "The quick brown fox jumps over the lazy dog. " * (LONG_ROW_CHARACTERS // 45 + 1)
    return [f"{index:08} {filler}"[:LONG_ROW_CHARACTERS] for index in range(count)]


def repeated_texts(count: int) -> Any:
    """An Arrow column of texts in random order, each of which comes twice."""
    numbers = np.random.default_rng(0).permutation(count) // 2
    return _texts(numbers)


def short_texts(count: int) -> Any:
    """An Arrow column of texts, one in a hundred of which repeats an earlier one."""
    rng = np.random.default_rng(0)
    numbers = np.arange(count)
    repeats = rng.random(count) < 0.01
    numbers[repeats] = (numbers[repeats] * rng.random(int(repeats.sum()))).astype(np.int64)
    return _texts(numbers)


def _texts(numbers: Any) -> Any:
    texts = pc.cast(pa.array(numbers), pa.string())
    return pc.binary_join_element_wise("Sample text content", texts, "of a row", " ")


def token_rows(count: int) -> Any:
    """An Arrow table of tokenized rows, a fifth of which repeat an earlier one."""
    rng = np.random.default_rng(0)
    distinct = max(1, round(count * (1 - REPEATED_SHARE)))
    lengths = draw_lengths("lognormal, mean 365", distinct)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    total = int(lengths.sum())
    tokens = rng.integers(0, VOCABULARY, total, dtype=np.int32)
    labels = np.where(rng.random(total) < 0.3, -100, tokens).astype(np.int64)
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, tokens),
        "attention_mask": pa.ListArray.from_arrays(offsets, np.ones(total, np.int8)),
        "labels": pa.ListArray.from_arrays(offsets, labels),
    }
    chosen = np.arange(count)
    chosen[distinct:] = rng.integers(0, distinct, count - distinct)
    return pa.table(columns).take(pa.array(rng.permutation(chosen))).combine_chunks()


DISTRIBUTIONS = {
    "uniform 10–100": 512,
    "lognormal, mean 365": 4096,
    "heavy tail": 8192,
}
"""Kind of lengths to the capacity they are packed into."""


def draw_lengths(kind: str, count: int) -> Any:
    """Lengths of one of the ``DISTRIBUTIONS``; none is above the capacity."""
    rng = np.random.default_rng(1)
    if kind == "uniform 10–100":
        lengths = rng.integers(10, 101, count)
    elif kind == "heavy tail":
        lengths = (100 * (1 + rng.pareto(1.1, count))).astype(np.int64)
    else:
        mean = np.log(TOKENS_OF_A_ROW) - _SIGMA**2 / 2
        lengths = rng.lognormal(mean, _SIGMA, count).astype(np.int64)
    return np.clip(lengths, 1, DISTRIBUTIONS[kind])


def write_lines(rows: list[str], path: Path) -> Path:
    """One row a line; rows hold no line breaks."""
    path.write_text("\n".join(rows), encoding="utf-8")
    return path
