"""Whether two functions give the same answer, be it lists, arrays or tensors: digests of columns.

A column holds texts, integers, or rows of integers. Its digest is SHA-256 over the values as they
are counted, 64 bits each, and over the lengths of the rows, so it depends neither on the type that
holds them nor on its width. Costs some 15 ns a number of a list, and 2 of an array.

This file also runs in the processes of peers, where our package must not be imported: it needs the
standard library alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

__all__ = ["digest_columns"]

_TOGETHER = 4096
_NUMBERS_TOGETHER = 1 << 20
_SAMPLE_CHARACTERS = 40


def digest_columns(columns: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Column name to its digest, and to the beginning of its first value with their number."""
    found = {name: _digest(column) for name, column in columns.items()}
    digests = {name: digest for name, (digest, _) in found.items()}
    return digests, {name: sample for name, (_, sample) in found.items()}


def _digest(column: Any) -> tuple[str, str]:
    if hasattr(column, "numpy"):
        column = column.numpy()
    if hasattr(column, "ndim"):
        return _digest_array(column)
    values = iter(column)
    first = next(values, None)
    if first is None:
        return _finish(hashlib.sha256(), hashlib.sha256(), 0, "nothing")
    values = chain([first], values)
    if isinstance(first, str):
        return _digest_texts(values, first)
    if hasattr(first, "__len__"):
        return _digest_rows(values, first)
    return _digest_numbers(values, first)


def _digest_texts(values: Iterator[str], first: str) -> tuple[str, str]:
    content, count = hashlib.sha256(), 0
    while block := list(islice(values, _TOGETHER)):
        content.update("\n".join([*block, ""]).encode("utf-8", "surrogatepass"))
        count += len(block)
    return _finish(content, hashlib.sha256(), count, first)


def _digest_numbers(values: Iterator[int], first: int) -> tuple[str, str]:
    content, count = hashlib.sha256(), 0
    while block := array("q", islice(values, _TOGETHER)):
        content.update(block.tobytes())
        count += len(block)
    return _finish(content, hashlib.sha256(), count, str(first))


def _digest_rows(values: Iterator[Iterable[int]], first: Iterable[int]) -> tuple[str, str]:
    content, lengths, count = hashlib.sha256(), hashlib.sha256(), 0
    sample = str(list(islice(first, _SAMPLE_CHARACTERS)))
    while block := list(islice(values, _TOGETHER)):
        rows = [array("q", row) for row in block]
        content.update(b"".join(row.tobytes() for row in rows))
        lengths.update(array("q", map(len, rows)).tobytes())
        count += len(block)
    return _finish(content, lengths, count, sample)


def _digest_array(values: Any) -> tuple[str, str]:
    content, lengths = hashlib.sha256(), hashlib.sha256()
    flat = values.reshape(-1)
    for start in range(0, len(flat), _NUMBERS_TOGETHER):
        content.update(flat[start : start + _NUMBERS_TOGETHER].astype("int64").tobytes())
    if not len(values):
        return _finish(content, lengths, 0, "nothing")
    if values.ndim > 1:
        lengths.update((array("q", [values.shape[1]]) * len(values)).tobytes())
    first = values[0].tolist()
    sample = first if isinstance(first, int) else first[:_SAMPLE_CHARACTERS]
    return _finish(content, lengths, len(values), str(sample))


def _finish(content: Any, lengths: Any, count: int, sample: str) -> tuple[str, str]:
    both = hashlib.sha256(content.digest() + lengths.digest()).hexdigest()
    return both, f"{count:,}: {sample[:_SAMPLE_CHARACTERS]}"
