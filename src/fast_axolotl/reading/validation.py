"""Full validation of Arrow data, faster for large columns of text.

``validate(full=True)`` of pyarrow looks at every value of text on its own. Here text is first
validated as bytes, so that pyarrow still checks every offset, null count and nested length. Then a
kernel checks that it is UTF-8, if one is loaded. Without it, only blocks that hold a byte beyond
ASCII are checked: that takes less than half of the time for a row group of 10 MB of English text,
and as long as before for Chinese.

This proves that data is valid and never that it is not: whatever it cannot prove (an unusual type,
a character cut in two, a null with odd bytes behind it) goes to ``validate(full=True)``, which has
the last word and the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.reading.kernel_loader import loaded_utf8

_SMALL_BYTES = 2 * 1024 * 1024
"""Below this the calls from Python take as long as they save, most of all with other threads."""

_BLOCK_BYTES = 4096
_MOST_BLOCKS_BEYOND_ASCII = 0.3
"""Where more blocks hold such characters, checking them one by one saves nothing."""


def validate(data: pa.Table | pa.RecordBatch) -> None:
    """The same as ``data.validate(full=True)``."""
    num_chunks = max((getattr(column, "num_chunks", 1) for column in data.columns), default=1)
    if data.get_total_buffer_size() < _SMALL_BYTES * max(1, num_chunks):
        data.validate(full=True)
        return
    data.validate()
    for column in data.columns:
        for array in getattr(column, "chunks", (column,)):
            if not _is_valid(array):
                try:
                    array.validate(full=True)
                except pa.ArrowException:
                    data.validate(full=True)  # this one names the column
                    raise


def validate_text(array: pa.Array) -> None:
    """The same as ``array.validate(full=True)`` for text with valid offsets and without nulls."""
    _, offsets, data = array.buffers()
    kernels = loaded_utf8(len(data or b""))
    if not kernels or not kernels.are_utf8(np.frombuffer(data, np.uint8), _offsets(array, offsets)):
        array.validate(full=True)


def _is_valid(array: pa.Array) -> bool:
    """True where the array is valid; false where that is not certain."""
    kind = _without_text(array.type)
    if kind is None or array.get_total_buffer_size() < _SMALL_BYTES:
        return False
    try:
        array.view(kind).validate(full=True)
        return all(map(_is_utf8, _texts(array)))
    except pa.ArrowException:
        return False


@lru_cache(maxsize=256)
def _without_text(kind: pa.DataType) -> pa.DataType | None:
    """The type with bytes in place of text; ``None`` where no such view is known to work."""
    types = pa.types
    if types.is_string(kind):
        return pa.binary()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        inner = [_without_text(field.type) for field in fields]
        if not inner or None in inner:
            return None
        fields = [field.with_type(one) for field, one in zip(fields, inner, strict=True)]
        if types.is_struct(kind):
            return pa.struct(fields)
        return pa.list_(fields[0]) if types.is_list(kind) else pa.large_list(fields[0])
    return kind if types.is_integer(kind) or types.is_floating(kind) else None


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    """The text inside an array of a type that ``_without_text`` knows."""
    kind, types = array.type, pa.types
    if types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _texts(array.field(index))
    elif types.is_list(kind) or types.is_large_list(kind):
        yield from _texts(array.values)
    elif types.is_string(kind) or types.is_large_string(kind):
        yield array


def _is_utf8(array: pa.Array) -> bool:
    """Whether text with valid offsets is certainly UTF-8, value by value.

    All of the buffer counts, also what lies outside of a slice or past the end of a struct.
    """
    _, buffer, data = array.buffers()
    text = np.frombuffer(data or b"", np.uint8)
    if not len(text):
        return True
    offsets = _offsets(array, buffer)
    if kernels := loaded_utf8(len(text)):
        return bool(kernels.are_utf8(text, offsets))
    highest = np.maximum.reduceat(text, np.arange(0, len(text), _BLOCK_BYTES))
    (blocks,) = (highest >= 0x80).nonzero()
    if not len(blocks) or len(blocks) > _MOST_BLOCKS_BEYOND_ASCII * len(highest):
        return not len(blocks)
    # No value may begin inside a character, which a text of several values would not show.
    begins = text.take(offsets[:-1], mode="clip")
    if not (_is_ascii(begins) or (begins & 0xC0 != 0x80).all()):
        return False
    if not (_is_ascii(text[: offsets[0]]) and _is_ascii(text[offsets[-1] :])):
        return False
    # The values that reach into those blocks, as one text for each block, with nulls between them.
    starts = blocks * _BLOCK_BYTES
    places = (
        offsets.searchsorted(starts, "right") - 1,
        offsets.searchsorted(starts + _BLOCK_BYTES),
    )
    edges = np.maximum.accumulate(offsets.take(np.ravel(places, "F"), mode="clip"))
    buffers = [pa.py_buffer(b"\x55" * (len(edges) // 8 + 1)), pa.py_buffer(edges), data]
    pa.Array.from_buffers(array.type, len(edges) - 1, buffers).validate(full=True)
    return True


def _offsets(array: pa.Array, buffer: pa.Buffer) -> np.ndarray[Any, Any]:
    width = np.int32 if pa.types.is_string(array.type) else np.int64
    return np.frombuffer(buffer, width)[array.offset : array.offset + len(array) + 1]


def _is_ascii(text: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    return not len(text) or bool(text.max() < 0x80)
