"""Record batches as Python lists, numpy arrays or torch tensors.

``python`` walks the Arrow buffers column by column rather than value by value: strings and numbers
are made in bulk by numpy, lists are slices of their flattened values, structs are zipped from their
fields. Nested values arrive as values. ``numpy`` and ``torch`` give flat values and offsets for
list columns, so no token is ever a Python object; text stays a list of ``str``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError, MissingExtraError, UsageError
from fast_axolotl.reading.schema import MIXED

__all__ = ["OUTPUTS", "convert", "to_numpy", "to_python", "to_torch"]

OUTPUTS = ("python", "arrow", "numpy", "torch")

_NO_PYTHON_VALUE = (ArithmeticError, ValueError, pa.ArrowException)
"""Raised for dates past the year 9999, decimals past their precision, unknown time zones."""


def convert(batch: pa.RecordBatch, output: str) -> Any:
    """A batch in one of the ``OUTPUTS``."""
    if output == "arrow":
        return batch
    if output == "python":
        return to_python(batch)
    if output == "numpy":
        return to_numpy(batch)
    if output == "torch":
        return to_torch(batch)
    raise UsageError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")


def to_python(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    """Column name to list of values."""
    return _each_column(batch, _values)


def to_numpy(batch: pa.RecordBatch) -> dict[str, Any]:
    """Numbers as arrays, lists as ``{"values", "offsets"}``, everything else as lists."""
    return _each_column(batch, _arrays)


def to_torch(batch: pa.RecordBatch) -> dict[str, Any]:
    """Like ``to_numpy``, with tensors in place of arrays."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            "the torch output needs PyTorch: pip install 'fast-axolotl[torch]'"
        ) from None

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tensors(item) for name, item in value.items()}
        if isinstance(value, np.ndarray) and value.dtype != object:
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        return value

    return {name: tensors(value) for name, value in to_numpy(batch).items()}


def _each_column(batch: pa.RecordBatch, change: Callable[[pa.Array], Any]) -> dict[str, Any]:
    result = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            result[name] = change(column)
        except _NO_PYTHON_VALUE as error:
            raise DataError(
                f"column {name!r} of type {column.type} holds a value that Python cannot express "
                f'({error}); read it with output="arrow", or leave the column out'
            ) from error
    return result


def _values(array: pa.Array) -> list[Any]:
    kind = array.type
    if kind == MIXED:
        texts = array.storage.to_pylist()
        return [None if text is None else json.loads(text) for text in texts]
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(array)
    if pa.types.is_struct(kind):
        return _structs(array)
    bulk: list[Any]
    if (_is_bulk(kind) and array.null_count == 0) or _is_text(kind):
        bulk = array.to_numpy(zero_copy_only=False).tolist()
    else:
        bulk = array.to_pylist()
    return bulk


def _is_bulk(kind: pa.DataType) -> bool:
    """Types for which numpy's Python values are Arrow's Python values."""
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _lists(array: pa.Array) -> list[Any]:
    offsets = array.offsets.to_numpy().tolist()
    first = offsets[0]
    flat = _values(array.values.slice(first, offsets[-1] - first))
    lists = [flat[start - first : stop - first] for start, stop in pairwise(offsets)]
    return _with_nulls(lists, array)


def _structs(array: pa.Array) -> list[Any]:
    names = [field.name for field in array.type]
    if not names:
        return _with_nulls([{} for _ in range(len(array))], array)
    columns = [_values(child) for child in array.flatten()]
    if len(names) == 1:
        rows = [{names[0]: value} for value in columns[0]]
    else:
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return _with_nulls(rows, array)


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count:
        for index in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[index] = None
    return values


def _arrays(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _arrays(array.dictionary_decode())
    if pa.types.is_floating(kind) or (_is_bulk(kind) and array.null_count == 0):
        return array.to_numpy(zero_copy_only=False)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and array.null_count == 0 and _is_number_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        return {"values": _arrays(values), "offsets": offsets - offsets[0]}
    return _values(array)


def _is_number_list(kind: pa.DataType) -> bool:
    inner = kind.value_type
    if pa.types.is_list(inner) or pa.types.is_large_list(inner):
        return _is_number_list(inner)
    return _is_bulk(inner)
