"""Turn Arrow columns into bytes, so that rows can be compared.

Every column becomes one or more parts, each the bytes ``data[offsets[i] : offsets[i + 1]]`` of row
``i``, or nothing where the row is null. Text, numbers and lists of numbers are views of Arrow's own
buffers; nulls inside such a list are a second part, for the rows that have any. A struct is a part
for its nulls and the parts of its fields. What is nested deeper (lists of text, of structs, of
lists) is hashed from the inside out, and the digests of the values, 16 bytes each, stand for them.

A row's bytes depend on its values alone, never on its neighbours or on where a batch ends.

Two values are equal when Python prints them alike, which is what Axolotl compares: null equals null
and nothing else, an empty list is no null, NaN equals any NaN, 0.0 and -0.0 differ. Text, large
text and text views are alike, and so are a dictionary column and its decoded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.errors import DataError
from fast_axolotl.kernels.threads import slices, spread

TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
BINARY = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
_FIXED_WIDTH = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_fixed_size_binary)
_WIDE_OFFSETS = (pa.types.is_large_list, pa.types.is_large_binary, pa.types.is_large_string)

DIGEST_BYTES = 16
_NO_NULLS = np.zeros(0, np.bool_)
_NO_BYTES = np.zeros(0, np.uint8)
_BYTES_PER_THREAD = 2 * 1024 * 1024
_PART_BYTES = 32
"""What a part of a row costs beside its bytes, in bytes hashed."""

_SLICES_PER_THREAD = 4


class Part(NamedTuple):
    """What one column, or one field of it, adds to every row."""

    data: Any
    """uint8."""
    offsets: Any
    """int64, one more than there are rows."""
    valid: Any
    """bool, or empty where no row is null."""
    is_optional: bool = False
    """Whether a row without bytes is one that does not have this part."""


def parts_of(array: pa.Array, secret: Any, num_threads: int = 1) -> list[Part]:
    """The parts of one column; digests of nested values are keyed with ``secret``."""
    array = _plain(array)
    kind, valid = array.type, _valid(array)
    if pa.types.is_null(kind) or pa.types.is_struct(kind):
        fields = array.flatten() if pa.types.is_struct(kind) else []
        inner = [part for field in fields for part in parts_of(field, secret, num_threads)]
        return [Part(_NO_BYTES, _even_offsets(array, 0), valid), *inner]
    if is_one_of(kind, (*TEXT, *BINARY)):
        return [Part(*text_bytes(array), valid)]
    if not kind.num_fields:  # neither a map nor any kind of list
        data, width = _fixed_bytes(array)
        return [Part(data, _even_offsets(array, width), valid)]
    items, offsets = _items(array)
    if not is_one_of(items.type, _FIXED_WIDTH):
        digests = digests_of(parts_of(items, secret, num_threads), len(items), secret, num_threads)
        return [Part(digests.view(np.uint8), offsets * DIGEST_BYTES, valid)]
    data, width = _fixed_bytes(items)
    present = _valid(items)
    if not len(present):
        return [Part(data, offsets * width, valid)]
    zeroed = data.reshape(len(items), width) * present[:, None]
    # Which items are null, for the rows that have such items and are no null themselves.
    before = np.concatenate([[0], np.cumsum(~present)])
    lengths = np.diff(offsets) * (np.diff(before[offsets]) > 0)
    if len(valid):
        lengths *= valid
    inside = np.repeat(lengths > 0, np.diff(offsets))
    is_present = present[offsets[0] : offsets[-1]][inside].view(np.uint8)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    nulls = Part(is_present, edges, _NO_NULLS, is_optional=True)
    return [Part(zeroed.ravel(), offsets * width, valid), nulls]


def digests_of(parts: Sequence[Part], num_rows: int, secret: Any, num_threads: int) -> Any:
    """Two words for every row, folded over the parts in their order."""
    from fast_axolotl.kernels.rowhash import absorb

    digests = np.zeros(2 * num_rows, np.uint64)
    for part in parts:
        # Kernels trust this; no array, however odd, may make them read elsewhere.
        assert len(part.offsets) == num_rows + 1, "a part has other rows than its table"
        assert len(part.valid) in (0, num_rows), "a part has other nulls than rows"
        assert part.offsets[-1] <= len(part.data), "a part ends past its bytes"

    def fold(first: int, last: int) -> None:
        for part in parts:
            absorb(*part, secret, digests, first, last)

    num_bytes = sum(int(part.offsets[-1] - part.offsets[0]) for part in parts)
    work = num_bytes + _PART_BYTES * len(parts) * num_rows
    threads = min(num_threads, 1 + work // _BYTES_PER_THREAD)
    spread(fold, slices(num_rows, threads * _SLICES_PER_THREAD), threads)
    return digests


def text_bytes(array: pa.Array) -> tuple[Any, Any]:
    """The bytes of a column of text or bytes, and its offsets into them; a view is cast first."""
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    buffer = array.buffers()[2]
    data = _NO_BYTES if buffer is None else np.frombuffer(buffer, np.uint8)
    return data, _offsets(array, len(data))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that stands for all that are compared alike: large text for every kind of text."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_one_of(kind, (*TEXT, *BINARY)):
        return pa.large_string() if is_one_of(kind, TEXT) else pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        entry = pa.struct(
            [("key", plain_type(kind.key_type)), ("value", plain_type(kind.item_type))]
        )
        return pa.large_list(entry)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if kind.num_fields and not pa.types.is_union(kind):  # any other kind of list
        return pa.large_list(plain_type(kind.value_type))
    return kind


def is_one_of(kind: pa.DataType, predicates: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    """Whether a type is of one of several kinds."""
    return any(predicate(kind) for predicate in predicates)


def _plain(array: pa.Array) -> pa.Array:
    """The same values in one of the few layouts that ``parts_of`` reads, without copying values."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        # Where every value is null, itself or as part of something null, the dictionary may be too
        # small for the indices.
        if array.null_count == len(array) or not len(array.dictionary):
            return _plain(pa.nulls(len(array), kind.value_type))
        return _plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(array))
    if pa.types.is_union(kind):
        return pa.array([repr(value) for value in array.to_pylist()], pa.large_binary())
    return array


def _items(array: pa.Array) -> tuple[pa.Array, Any]:
    """The plain values of all lists, and where each list begins and ends among them.

    Not by a cast to one kind of list: pyarrow 21 to 26 make invalid arrays of list views, and of
    slices that hold a column of nulls.
    """
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return _plain(values), _even_offsets(array, size)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        lengths = array.value_lengths().fill_null(0).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return _plain(array.flatten()), offsets
    values = array.values
    if pa.types.is_map(kind):
        values = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    offsets = _offsets(array, len(values))
    return _plain(values.slice(offsets[0], offsets[-1] - offsets[0])), offsets - offsets[0]


def _fixed_bytes(array: pa.Array) -> tuple[Any, int]:
    """The values of a type of fixed width as bytes, every NaN the same."""
    kind = array.type
    if pa.types.is_boolean(kind):
        array, kind = array.cast(pa.uint8()), pa.uint8()
    width = kind.bit_width // 8
    buffer = array.buffers()[1]
    if buffer is None:
        return _NO_BYTES, width
    start = array.offset * width
    stop = start + len(array) * width
    _require_sound(array, stop <= len(buffer))
    data = np.frombuffer(buffer, np.uint8)[start:stop]
    if pa.types.is_floating(kind):
        values = data.view(f"f{width}")
        unordered = np.isnan(values)
        if unordered.any():
            return np.where(unordered, values.dtype.type(np.nan), values).view(np.uint8), width
    return data, width


def _offsets(array: pa.Array, num_items: int) -> Any:
    """The offsets of a list or binary array of 32 or 64 bits, checked to lie within its values."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(1, np.int64)
    width = np.dtype(np.int64 if is_one_of(array.type, _WIDE_OFFSETS) else np.int32)
    start, count = width.itemsize * array.offset, len(array) + 1
    _require_sound(array, start + width.itemsize * count <= len(buffer))
    stored = np.frombuffer(buffer, width, count=count, offset=start)
    offsets = np.require(stored, np.int64, ["ALIGNED"])
    is_inside = offsets[0] >= 0 and offsets[-1] <= num_items
    _require_sound(array, is_inside and not (offsets[1:] < offsets[:-1]).any())
    return offsets


def _require_sound(array: pa.Array, is_sound: bool) -> None:
    if not is_sound:
        raise DataError(
            f"an array of type {array.type} has unsorted offsets or buffers that are too short; "
            "find the corrupt part with Array.validate(full=True)"
        )


def _even_offsets(array: pa.Array, width: int) -> Any:
    return np.arange(len(array) + 1, dtype=np.int64) * width


def _valid(array: pa.Array) -> Any:
    if not array.null_count:
        return _NO_NULLS
    # Not by ``to_numpy``, which imports pandas.
    return np.from_dlpack(array.is_valid().cast(pa.uint8())).view(np.bool_)
