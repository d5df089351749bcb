"""Read sequences in every form: lists, arrays, tensors, Arrow columns, values with offsets.

Torch and pyarrow are looked for among the loaded modules, never imported: an argument of their
types cannot come from anywhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.sequences.tokens import (
    NOTHING,
    Array,
    Flat,
    Rows,
    integers,
    lengths_of,
    offsets_of,
    shown,
)

__all__ = ["read"]

_ARROW_LISTS = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def read(sequences: Any, name: str = "sequences") -> Rows | Flat:
    """The sequences as they are held: by Python, or in arrays. ``name`` is for messages."""
    arrow = sys.modules.get("pyarrow")
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(sequences, tensor):
        sequences = _from_tensor(sequences, name)
    if isinstance(sequences, np.ndarray) and sequences.dtype != object:
        return _from_matrix(sequences, name)
    if _is_flat_pair(sequences):
        return _from_parts(sequences[0], sequences[1], name)
    if arrow is not None and isinstance(sequences, arrow.Array | arrow.ChunkedArray):
        return _from_arrow(sequences, name)
    if isinstance(sequences, str | bytes | Mapping) or not isinstance(sequences, Iterable):
        raise UsageError(f"{name} is {shown(sequences)}: pass a list of token sequences")
    rows = sequences if isinstance(sequences, list) else list(sequences)
    kinds = set(map(type, rows))
    if kinds <= {list, tuple}:
        return rows
    if kinds == {tensor}:
        rows = [_from_tensor(row, f"{name}[{index}]") for index, row in enumerate(rows)]
        kinds = {np.ndarray}
    if kinds != {np.ndarray} or not _are_plain(rows):
        rows = [_row(row, f"{name}[{index}]", tensor) for index, row in enumerate(rows)]
    if set(map(type, rows)) == {np.ndarray}:
        return Flat(_concatenated(rows), offsets_of(lengths_of(rows)))
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]


def _is_flat_pair(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(isinstance(part, np.ndarray) for part in value)


def _from_matrix(matrix: Array, name: str) -> Flat:
    if matrix.ndim != 2:
        raise UsageError(
            f"{name} is an array of {matrix.ndim} dimensions: pass two, one row a sequence, "
            "or the tuple (values, offsets)"
        )
    count, length = matrix.shape
    return Flat(integers(matrix.reshape(-1), name), np.arange(count + 1, dtype=np.int64) * length)


def _from_parts(values: Array, offsets: Array, name: str) -> Flat:
    if values.ndim != 1 or offsets.ndim != 1 or not len(offsets):
        raise UsageError(
            f"{name} has values of shape {values.shape} and offsets of shape {offsets.shape}: pass "
            "two arrays of one dimension, offsets one longer than the number of sequences"
        )
    if offsets.dtype.kind not in "iu":
        raise UsageError(f"the offsets of {name} are {offsets.dtype}: pass integers")
    edges = np.ascontiguousarray(offsets, np.int64)
    falls = edges[1:] < edges[:-1]
    if falls.any():
        index = int(np.argmax(falls))
        raise UsageError(
            f"the offsets of {name} fall from {edges[index]} to {edges[index + 1]} at index "
            f"{index + 1}: give them in ascending order"
        )
    if edges[0] < 0 or edges[-1] > len(values):
        raise UsageError(
            f"the offsets of {name} go from {edges[0]} to {edges[-1]}, and there are "
            f"{len(values)} values: keep them from 0 to {len(values)}"
        )
    return Flat(integers(values, name), edges)


def _from_arrow(column: Any, name: str) -> Flat:
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    _require_lists(column, name)
    parts, rows = [], 0
    for chunk in chunks:
        parts.append(_from_arrow_array(chunk, name, rows))
        rows += len(chunk)
    if len(parts) == 1:
        return parts[0]
    values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
    lengths = [np.diff(part.offsets) for part in parts]
    return Flat(_concatenated(values), offsets_of(np.concatenate([*lengths, NOTHING])))


def _require_lists(column: Any, name: str) -> None:
    if not str(column.type).startswith(_ARROW_LISTS):
        raise UsageError(f"{name} is an Arrow array of {column.type}: pass lists of integers")


def _from_arrow_array(column: Any, name: str, first_row: int) -> Flat:
    if column.null_count:
        index = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise UsageError(f"{name}[{first_row + index}] is null: fill or drop it")
    values = column.flatten()
    edges = offsets_of(column.value_lengths().to_numpy(zero_copy_only=False))
    if values.null_count:
        place = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        index = int(np.searchsorted(edges, place, "right")) - 1
        where = f"{name}[{first_row + index}][{place - int(edges[index])}]"
        raise UsageError(f"{where} is null: fill or drop it")
    if len(values) == 0:
        return Flat(NOTHING, edges)
    return _from_parts(values.to_numpy(zero_copy_only=False), edges, name)


def _from_tensor(tensor: Any, name: str) -> Array:
    try:
        values: Array = tensor.numpy(force=True)
    except TypeError:
        raise UsageError(f"{name} is a tensor of {tensor.dtype}: pass integers") from None
    return values


def _are_plain(rows: list[Array]) -> bool:
    """Whether nothing has to be looked at or changed before these arrays are joined."""
    return {(row.ndim, row.dtype) for row in rows} <= {(1, _INT32), (1, _INT64)}


def _row(row: Any, name: str, tensor: Any) -> Any:
    """One sequence of a list that holds others than lists: an array of integers, or a list."""
    if isinstance(row, tensor):
        row = _from_tensor(row, name)
    if isinstance(row, np.ndarray):
        if row.ndim != 1:
            raise UsageError(f"{name} is an array of {row.ndim} dimensions: a sequence has one")
        return integers(row, name)
    is_sequence = hasattr(row, "__len__") and hasattr(row, "__getitem__")
    if not is_sequence or isinstance(row, str | bytes | Mapping):
        raise UsageError(f"{name} is {shown(row)}: a sequence is a list or an array of tokens")
    return list(row)


def _concatenated(parts: list[Array]) -> Array:
    kinds = {part.dtype for part in parts}
    return np.concatenate([*parts, NOTHING], dtype=_INT64 if _INT64 in kinds else _INT32)
