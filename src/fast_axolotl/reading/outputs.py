"""Make Python lists, numpy arrays or torch tensors of a batch.

Nested values arrive as values. ``numpy`` and ``torch`` give flat values and offsets for list
columns, so no token is ever a Python object; text stays a list of ``str``. ``to_numpy`` of pyarrow
is avoided where it can be: it imports pandas, which takes longer than a small file.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError, MissingExtraError, UsageError
from fast_axolotl.reading.schema import MIXED, is_number

OUTPUTS = ("python", "arrow", "numpy", "torch")

_NO_PYTHON_VALUE = (ArithmeticError, ValueError, pa.ArrowException)
"""Raised for dates past the year 9999, decimals past their precision, unknown time zones."""


def convert(batch: pa.RecordBatch, output: str) -> Any:
    """A batch in one of the ``OUTPUTS``."""
    if output == "arrow":
        return batch
    if output not in OUTPUTS:
        raise UsageError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
    change = _values if output == "python" else _arrays
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = change(column)
        except _NO_PYTHON_VALUE as error:
            raise DataError(
                f"column {name!r} of type {column.type} has a value that Python cannot represent "
                f'({error}); pass output="arrow", or read only other columns'
            ) from error
    return _tensors(columns) if output == "torch" else columns


def _tensors(value: Any) -> Any:
    """Tensors in place of arrays, at any depth."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("the torch output needs PyTorch: pip install torch") from None
    if isinstance(value, dict):
        return {name: _tensors(item) for name, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return value


def _values(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    has_json = str(MIXED) in str(array.type)
    return [_parsed(value, array.type) for value in values] if has_json else values


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """The value of mixed types for the JSON text that stands for it, at any depth."""
    if value is None:
        return None
    if kind == MIXED:
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {field.name: _parsed(value[field.name], field.type) for field in kind}
    return [_parsed(item, kind.value_type) for item in value] if kind.num_fields == 1 else value


def _arrays(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _arrays(array.dictionary_decode())
    if is_number(kind) and array.null_count == 0:
        return np.from_dlpack(array)
    if pa.types.is_floating(kind) or (pa.types.is_boolean(kind) and array.null_count == 0):
        return array.to_numpy(zero_copy_only=False)
    inner = kind
    while pa.types.is_list(inner) or pa.types.is_large_list(inner):
        inner = inner.value_type
    is_flat = is_number(inner) or pa.types.is_boolean(inner)
    if is_flat and inner != kind and array.null_count == 0:
        offsets = np.zeros(1, np.int64)
        if len(array):
            offsets = np.from_dlpack(array.offsets).astype(np.int64)
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        return {"values": _arrays(values), "offsets": offsets - offsets[0]}
    return _values(array)
