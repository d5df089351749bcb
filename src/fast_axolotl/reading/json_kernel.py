"""JSON lines to Arrow by a kernel, where their type is known already.

``kernels.json_rows`` parses text of one type three times as fast as pyarrow, and gives up on
whatever else it meets. ``read_known`` builds that type's *shape* of a schema, lends the kernel room
for its entries, and makes Arrow arrays of what it found. Room for the items of lists is guessed by
the block before; where it was too little, the block is parsed again with twice as much.

Only what the kernel proves comes from here. Numbers of more digits than it can round exactly are
left to Python, one by one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MOST_NODES = 64
_MOST_DEPTH = 32
_MOST_FIELDS = 64
_ENTRY_BYTES = 9
"""What the kernel needs for an entry: a value and a flag."""

_FIRST_ITEM_BYTES = 32
"""The text that an item of a list takes, as long as nothing is known."""

EXACT_INTEGER_LIMIT = 2.0**53
"""From here on a float may stand for an integer that it does not hold."""

_ATTEMPTS = 24
"""Room doubles at each, from a 32nd of the text's length on."""

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Shape:
    """A schema as the kernel wants it; see ``parse_rows``."""

    types: list[pa.DataType]
    kinds: _Ints
    ends: _Ints
    places: _Ints
    keys: _Bytes
    key_edges: _Ints
    in_list: npt.NDArray[np.bool_]
    """Nodes of which a row has any number of entries."""
    item_bytes: list[float] = field(default_factory=lambda: [_FIRST_ITEM_BYTES])
    """Text for each entry of the most numerous node in lists, of the last block."""


def read_known(
    kernels: Any,
    data: bytes,
    start: int,
    stop: int,
    schema: pa.Schema,
    *,
    most_rows: int,
    most_bytes: int,
    are_others_skipped: bool = False,
) -> pa.Table | None:
    """The rows of valid UTF-8, one object on each line; ``None`` where the kernel gave up.

    There are ``most_rows`` at most, for which the kernel may use ``most_bytes``. Fields of a row
    that the schema does not have may be skipped.
    """
    shape = _shape_of(schema)
    if shape is None:
        return None
    raw = np.frombuffer(data, np.uint8)
    counts, sizes = np.zeros((2, len(shape.kinds)), np.int64)
    for attempt in range(_ATTEMPTS):
        items = int((stop - start) / shape.item_bytes[0]) * 2**attempt + 64
        bases = np.zeros(len(shape.kinds) + 1, np.int64)
        np.where(shape.in_list, items, most_rows).cumsum(out=bases[1:])
        if bases[-1] * _ENTRY_BYTES > most_bytes:
            return None
        values, flags = np.empty(bases[-1], np.int64), np.empty(bases[-1], np.uint8)
        counts[:], sizes[:] = 0, 0
        num_rows = kernels.parse_rows(
            raw,
            start,
            stop,
            shape.kinds,
            shape.ends,
            shape.places,
            shape.keys,
            shape.key_edges,
            bases,
            values,
            values.view(np.float64),
            flags,
            counts,
            sizes,
            are_others_skipped,
        )
        if num_rows != kernels.FULL:
            break
    if num_rows < 0:
        return None
    if shape.in_list.any():
        shape.item_bytes[0] = max(1.0, (stop - start) / (1.2 * counts[shape.in_list].max() + 1))
    return _Arrays(kernels, data, raw, shape, bases, values, flags, counts, sizes).table(schema)


@dataclass(slots=True)
class _Arrays:
    """What the kernel found, node by node."""

    kernels: Any
    data: bytes
    raw: _Bytes
    shape: _Shape
    bases: _Ints
    values: _Ints
    flags: _Bytes
    counts: _Ints
    sizes: _Ints

    def table(self, schema: pa.Schema) -> pa.Table | None:
        columns, node = [], 1
        for _ in schema:
            column = self._array(node)
            if column is None:
                return None
            columns.append(column)
            node = int(self.shape.ends[node])
        return pa.Table.from_arrays(columns, schema=schema)

    def _array(self, node: int) -> pa.Array | None:
        kernels, kind, count = self.kernels, self.shape.kinds[node], int(self.counts[node])
        first = int(self.bases[node])
        values, flags = self.values[first : first + count], self.flags[first : first + count]
        num_nulls = count - int(np.count_nonzero(flags))
        is_valid = None
        if num_nulls:
            is_valid = pa.py_buffer(np.packbits(flags != 0, bitorder="little"))
        children: list[pa.Array] = []
        buffers = [is_valid]
        if kind == kernels.STRING:
            out = pa.allocate_buffer(int(self.sizes[node]) + kernels.PADDING)
            offsets = np.empty(count + 1, np.int32)
            size = kernels.copy_strings(self.raw, values, np.frombuffer(out, np.uint8), offsets)
            if size < 0:
                return None
            buffers += [pa.py_buffer(offsets), out]
        elif kind == kernels.LIST:
            offsets = np.zeros(count + 1, np.int32)
            offsets[1:] = values
            child = self._array(node + 1)
            if child is None:
                return None
            children.append(child)
            buffers.append(pa.py_buffer(offsets))
        elif kind == kernels.OBJECT:
            inner = node + 1
            while inner < self.shape.ends[node]:
                child = self._array(inner)
                if child is None:
                    return None
                children.append(child)
                inner = int(self.shape.ends[inner])
        elif kind == kernels.BOOLEAN:
            buffers.append(pa.py_buffer(np.packbits(values != 0, bitorder="little")))
        else:
            numbers = self._numbers(values, flags, is_float=kind == kernels.FLOAT)
            if numbers is None:
                return None
            buffers.append(pa.py_buffer(numbers))
        return pa.Array.from_buffers(
            self.shape.types[node], count, buffers, null_count=num_nulls, children=children or None
        )

    def _numbers(self, values: _Ints, flags: _Bytes, *, is_float: bool) -> npt.NDArray[Any] | None:
        """A copy of the numbers; ``None`` where one does not fit."""
        numbers: npt.NDArray[Any] = values.view(np.float64).copy() if is_float else values.copy()
        for index in np.flatnonzero(flags == self.kernels.LONG).tolist():
            span = int(values[index])
            number = json.loads(self.data[span >> 32 : span & 0xFFFF_FFFF])
            try:
                numbers[index] = number
            except OverflowError:
                return None
        is_large = is_float and len(numbers) and np.abs(numbers).max() >= EXACT_INTEGER_LIMIT
        return None if is_large else numbers


@lru_cache(maxsize=64)
def _shape_of(schema: pa.Schema) -> _Shape | None:
    """``None`` for a type that the kernel does not know."""
    from fast_axolotl.kernels import json_rows as kernels

    types: list[pa.DataType] = []
    kinds: list[int] = []
    ends: list[int] = []
    places: list[int] = []
    keys: list[bytes] = []
    in_list: list[bool] = []
    leaves = {
        pa.string(): kernels.STRING,
        pa.int64(): kernels.INTEGER,
        pa.float64(): kernels.FLOAT,
        pa.bool_(): kernels.BOOLEAN,
    }

    def add(kind: pa.DataType, place: int, key: bytes, is_inside: bool, depth: int) -> bool:
        node = len(kinds)
        if node >= _MOST_NODES or depth > _MOST_DEPTH:
            return False
        types.append(kind)
        places.append(place)
        keys.append(key)
        in_list.append(is_inside)
        ends.append(node + 1)
        if pa.types.is_struct(kind):
            kinds.append(kernels.OBJECT)
            names = {inner.name for inner in kind if inner.nullable}
            if kind.num_fields > _MOST_FIELDS or len(names) < kind.num_fields:
                return False
            for index, inner in enumerate(kind):
                text = json.dumps(inner.name, ensure_ascii=False)
                if text != f'"{inner.name}"' or not add(
                    inner.type, index, text.encode("utf-8", "surrogatepass"), is_inside, depth + 1
                ):
                    return False
        elif pa.types.is_list(kind):
            kinds.append(kernels.LIST)
            if not kind.value_field.nullable or not add(kind.value_type, 0, b"", True, depth + 1):
                return False
        elif kind in leaves:
            kinds.append(leaves[kind])
        else:
            return False
        ends[node] = len(kinds)
        return True

    if not len(schema) or not add(pa.struct(list(schema)), 0, b"", False, 0):
        return None
    key_edges = np.cumsum([0, *map(len, keys)])
    return _Shape(
        types,
        np.array(kinds),
        np.array(ends),
        np.array(places),
        np.frombuffer(b"".join(keys), np.uint8),
        key_edges,
        np.array(in_list),
    )
