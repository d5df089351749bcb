"""Read token sequences in every form, and return rows as lists, numpy or torch.

What Python holds stays in Python's lists, so that list in, list out never leaves them; arrays
become ``Flat``: all values end to end, and offsets. A token is an integer: floats, 1.0 included,
are refused, and so is an integer that the output cannot hold. A slow pass looks for the culprit
after something has failed, never before. Pyarrow is looked for among the loaded modules, never
imported for what cannot be its own.

Cost: an array of 32 or 64 bits is used where it lies, others are copied once. A list costs some
15 ns a token to become an array, and 6 to be checked where it stays a list.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fast_axolotl.errors import MissingExtraError, UsageError

OUTPUTS = ("lists", "numpy", "torch")

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = list[Sequence[int]]
"""Lists and tuples of Python's integers."""

_NOTHING: Array = np.empty(0, np.int32)
_ARROW_LISTS = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Flat:
    """Sequences end to end: number ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Array
    """Contiguous, of 32 or 64 bits; may hold more than the offsets span."""
    offsets: Array
    """Contiguous, of 64 bits, in order and within ``values``; one more than there are sequences."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def read(sequences: Any, name: str = "sequences") -> Rows | Flat:
    """The sequences as they are held: by Python, or in arrays. ``name`` is for messages."""
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(sequences, arrow.Array | arrow.ChunkedArray):
        return _from_arrow(sequences, name)
    if isinstance(sequences, tuple) and set(map(type, sequences)) == {np.ndarray}:
        raise UsageError(
            f"{name} is a tuple of arrays; pass a list of them, or for values and their offsets "
            "pyarrow.LargeListArray.from_arrays(offsets, values)"
        )
    try:
        rows = None if isinstance(sequences, str | bytes | Mapping) else [*sequences]
    except TypeError:
        rows = None
    if rows is None:
        raise UsageError(f"{name} is {_shown(sequences)}; pass a list of token sequences")
    kinds = set(map(type, rows))
    if kinds <= {list, tuple}:
        return rows
    # Plain arrays are joined without looking at each.
    plain = {(1, _INT32), (1, _INT64)}
    if kinds != {np.ndarray} or not {(row.ndim, row.dtype) for row in rows} <= plain:
        rows = [integers(row, f"{name}[{index}]") for index, row in enumerate(rows)]
    dtype = _INT64 if _INT64 in {row.dtype for row in rows} else _INT32
    return Flat(np.concatenate([*rows, _NOTHING], dtype=dtype), _offsets(lengths_of(rows)))


def flatten(rows: Rows | Flat, dtype: str, name: str = "sequences") -> Flat:
    """The sequences in arrays; those of Python become integers of ``dtype``.

    ``array.fromlist`` is the fastest strict way of those measured, at 15 ns a token. It fills small
    blocks, since growing one large one costs half as much again.
    """
    if isinstance(rows, Flat):
        return rows
    has_tuples = tuple in set(map(type, rows))
    offsets = _offsets(lengths_of(rows))
    values = np.empty(int(offsets[-1]), dtype)
    for start in range(0, len(rows), _BLOCK_ROWS):
        part = rows[start : start + _BLOCK_ROWS]
        block = array(np.dtype(dtype).char)
        try:
            # A deque of length 0 is the cheapest loop over a map.
            deque(map(block.fromlist, map(list, part) if has_tuples else part), 0)  # type: ignore[arg-type]
        except (TypeError, OverflowError) as error:
            raise _culprit(rows, dtype, name) or UsageError(f"{name}: {error}") from None
        values[offsets[start] : offsets[start + len(part)]] = block
    return Flat(values, offsets)


def plain_rows(rows: Rows, name: str = "sequences") -> Rows:
    """The rows with an ``int`` for every token; raises where one is no integer.

    A sum is an ``int`` only if everything in it was an ``int`` or a bool, and takes a quarter of
    the time of looking at each type. Rows that begin with something else, such as the scalars of
    numpy or a bool, are looked at one by one; a bool later in a row of ints stays as it is.
    """
    first = next(filter(len, rows), (0,))[0]
    try:
        with np.errstate(over="ignore"):
            if type(first) is int and type(sum(map(sum, rows))) is int:
                return rows
    except (TypeError, OverflowError, RuntimeWarning):
        pass
    if error := _culprit(rows, None, name):
        raise error
    return [[operator.index(token) for token in row] for row in rows]


def lengths_of(rows: Rows | Flat) -> Array:
    """How many tokens each sequence has."""
    if isinstance(rows, Flat):
        return np.diff(rows.offsets)
    return np.fromiter(map(len, rows), np.int64, len(rows))


def require_fit(tokens: Flat, dtype: str, name: str, limit: int) -> None:
    """Raises for the first token, of the first ``limit`` of each, that ``dtype`` cannot hold."""
    rows = [tokens.values[a:b][:limit] for a, b in pairwise(tokens.offsets.tolist())]
    if error := _culprit(rows, dtype, name):
        raise error


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


def integer(name: str, value: Any, *, least: int | None = None, dtype: str = "int64") -> int:
    """``value`` as an ``int`` that is large enough and that ``dtype`` can hold."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be an integer, not {_shown(value)}") from None
    if least is not None and number < least:
        raise UsageError(f"{name} must be {least} or more, not {number}")
    if not _fits(number, dtype):
        raise _too_large(name, number, dtype)
    return number


def integers(row: Any, name: str) -> Array:
    """A list, array, tensor or Arrow array of integers in 32 or 64 bits, contiguous."""
    try:
        values = row.numpy(force=True) if hasattr(row, "numpy") else np.asanyarray(row)
        is_row = values.ndim == 1
    except (TypeError, ValueError):
        is_row = False
    if not is_row:
        raise UsageError(f"{name} is {_shown(row)}; pass a list or an array of integers")
    return _integers(values, name)


def deliver(result: Array, output: str) -> Any:
    """An array as one of the ``OUTPUTS``."""
    if output == "numpy":
        return result
    if output == "torch":
        return _torch().from_numpy(result)
    if result.ndim == 1:
        return result.tolist()
    return untracked(row.tolist() for row in result)


def untracked(rows: Iterable[list[int]]) -> list[list[int]]:
    """The rows in a list, each out of the garbage collector's sight from the moment it is made.

    The collector walks every token of every new list several times over, in search of cycles that
    integers cannot form; this takes longer than making the lists. CPython itself leaves tuples and
    dicts of such values untracked. Rows are freed as ever when nothing refers to them.
    """
    kept = []
    for row in rows:
        untrack(row)
        kept.append(row)
    return kept


untrack: Any = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))
"""Takes one list out of the collector's sight. As all kernels, this needs CPython."""


def _from_arrow(column: Any, name: str) -> Flat:
    import pyarrow.compute as pc

    if not str(column.type).startswith(_ARROW_LISTS):
        raise UsageError(f"{name} is an Arrow array of {column.type}; pass lists of integers")
    values = pc.list_flatten(column)
    if column.null_count or values.null_count:
        raise UsageError(f"{name} has nulls; fill or drop them")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return Flat(_integers(values.to_numpy(zero_copy_only=False), name), _offsets(lengths))


def _integers(values: Array, name: str) -> Array:
    """The values in 32 or 64 bits, with their sign, contiguous; not copied where they are so."""
    kind, size = values.dtype.kind, values.dtype.itemsize
    if not values.size:
        return _NOTHING
    if isinstance(values, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array; fill or drop the masked values")
    if kind not in "iub":
        odd = next((one for one in values.tolist() if type(one) is not int), values[0])
        raise UsageError(f"{name} has {values.dtype} values, such as {odd!r}; pass integers")
    if kind == "u" and size == 8 and values.max() > np.iinfo(np.int64).max:
        place = int(np.argmax(values > np.iinfo(np.int64).max))
        raise _too_large(f"{name}, value {place},", int(values[place]), "int64")
    is_narrow = size < 4 or (size == 4 and kind == "i")
    return np.ascontiguousarray(values, np.int32 if is_narrow else np.int64)


def _offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _culprit(rows: Iterable[Iterable[Any]], dtype: str | None, name: str) -> UsageError | None:
    """The error for the first token that is no integer, or none of ``dtype``."""
    for index, row in enumerate(rows):
        for place, token in enumerate(row):
            try:
                number = operator.index(token)
            except TypeError:
                return UsageError(f"{name}[{index}][{place}] is {_shown(token)}; pass integers")
            if dtype is not None and not _fits(number, dtype):
                return _too_large(f"{name}[{index}][{place}]", number, dtype)
    return None


def _fits(number: int, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)


def _too_large(where: str, number: int, dtype: str) -> UsageError:
    cure = 'pass dtype="int64"' if _fits(number, "int64") else "token ids must fit in 64 bits"
    return UsageError(f"{where} is {number}, which does not fit in {dtype}; {cure}")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtraError("the torch output needs PyTorch: pip install torch") from None
    return torch
