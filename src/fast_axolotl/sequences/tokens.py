"""What a token is, and sequences of them in flat arrays.

Cost: an array of 32 or 64 bits is used where it lies, others are copied once. A list costs some
15 ns a token to become an array, and 6 to be checked where it stays a list.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fast_axolotl.errors import UsageError

__all__ = [
    "DTYPES",
    "NOTHING",
    "Array",
    "Flat",
    "Rows",
    "flatten",
    "integer",
    "integers",
    "lengths_of",
    "offsets_of",
    "plain_rows",
    "require_fit",
    "require_threads",
    "shown",
]

DTYPES = ("int64", "int32")

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = list[Sequence[int]]
"""Lists and tuples of Python's integers."""

NOTHING: Array = np.empty(0, np.int32)

_BLOCK_ROWS = 256
_TYPECODES = {"int32": "i", "int64": "q"}
_INT64_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Flat:
    """Sequences end to end: number ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Array
    """Contiguous, of 32 or 64 bits; may hold more than the offsets span."""
    offsets: Array
    """Contiguous, of 64 bits, in order and within ``values``; one more than there are sequences."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def flatten(rows: Rows | Flat, dtype: str, name: str = "sequences") -> Flat:
    """The sequences in arrays; those of Python become integers of ``dtype``.

    ``array.fromlist`` is the fastest strict way of those measured, at 15 ns a token. It fills small
    blocks, since growing one large one costs half as much again.
    """
    if isinstance(rows, Flat):
        return rows
    has_tuples = tuple in set(map(type, rows))
    offsets = offsets_of(lengths_of(rows))
    values = np.empty(int(offsets[-1]), dtype)
    for start in range(0, len(rows), _BLOCK_ROWS):
        part = rows[start : start + _BLOCK_ROWS]
        block = array(_TYPECODES[dtype])
        try:
            # A deque of length 0 is the cheapest loop over a map.
            deque(map(block.fromlist, map(list, part) if has_tuples else part), 0)  # type: ignore[arg-type]
        except (TypeError, OverflowError) as error:
            raise _culprit(rows, dtype, name) or UsageError(f"{name}: {error}") from None
        values[offsets[start] : offsets[start + len(part)]] = block
    return Flat(values, offsets)


def lengths_of(rows: Rows | Flat) -> Array:
    """How many tokens each sequence has."""
    if isinstance(rows, Flat):
        return np.diff(rows.offsets)
    return np.fromiter(map(len, rows), np.int64, len(rows))


def offsets_of(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


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
    error = _culprit(rows, None, name)
    if error:
        raise error
    return [[operator.index(token) for token in row] for row in rows]


def integers(values: Array, name: str) -> Array:
    """The values in 32 or 64 bits, with their sign, contiguous; not copied where they are so."""
    kind, size = values.dtype.kind, values.dtype.itemsize
    if not values.size:
        return NOTHING
    if isinstance(values, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array: fill it, or drop what is masked")
    if kind not in "iub":
        first = values[:1].tolist()[0]
        raise UsageError(f"{name} holds {values.dtype}, such as {first!r}: pass integers")
    if kind == "u" and size == 8 and values.max() > _INT64_MOST:
        place = int(np.argmax(values > _INT64_MOST))
        raise _too_large(f"{name}, value {place},", int(values[place]), "int64")
    is_narrow = size < 4 or (size == 4 and kind == "i")
    return np.ascontiguousarray(values, np.int32 if is_narrow else np.int64)


def require_fit(tokens: Flat, dtype: str, name: str, limit: int) -> None:
    """Raises for the first token, of the first ``limit`` of each, that ``dtype`` cannot hold."""
    limits = np.iinfo(dtype)
    outside = (tokens.values < limits.min) | (tokens.values > limits.max)
    for place in np.flatnonzero(outside).tolist():
        index = int(np.searchsorted(tokens.offsets, place, "right")) - 1
        nth = place - int(tokens.offsets[index])
        if 0 <= index < len(tokens) and nth < limit:
            raise _too_large(f"{name}[{index}][{nth}]", int(tokens.values[place]), dtype)


def integer(name: str, value: Any, dtype: str | None = None) -> int:
    """``value`` as an ``int`` that ``dtype``, where given, can hold."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be an integer, and it is {shown(value)}") from None
    if dtype is not None and not _fits(number, dtype):
        raise _too_large(name, number, dtype)
    return number


def require_threads(num_threads: int) -> None:
    """Raises where this is no number of threads; 0 means every processor."""
    if integer("num_threads", num_threads) < 0:
        raise UsageError(f"num_threads must be 0, for every processor, or more: not {num_threads}")


def shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


def _culprit(rows: Rows, dtype: str | None, name: str) -> UsageError | None:
    """The error for the first token that is no integer, or none of ``dtype``."""
    limits = np.iinfo(dtype or "int64")
    for index, row in enumerate(rows):
        for place, token in enumerate(row):
            try:
                number = operator.index(token)
            except TypeError:
                return UsageError(
                    f"{name}[{index}][{place}] is {shown(token)}: tokens are integers"
                )
            if dtype is not None and not limits.min <= number <= limits.max:
                return _too_large(f"{name}[{index}][{place}]", number, dtype)
    return None


def _fits(number: int, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)


def _too_large(where: str, number: int, dtype: str) -> UsageError:
    cure = 'pass dtype="int64"' if _fits(number, "int64") else "token ids have 64 bits at most"
    return UsageError(f"{where} is {number}, which {dtype} cannot hold: {cure}")
