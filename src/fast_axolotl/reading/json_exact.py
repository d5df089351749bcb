"""JSON objects through Python: row by row, exact, with a line for whatever is wrong.

About ten times slower than pyarrow's parser, and the reference for it: the rows are those that
``json.loads`` gives, the last of duplicate keys included. Types are joined over rows (see
``schema``); a true conflict names line, column and both types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from typing import Any

import pyarrow as pa

from fast_axolotl.reading.blocks import Decoded, ReadOptions
from fast_axolotl.reading.lines import BadRows, Lines
from fast_axolotl.reading.schema import MIXED, TypeClash, join, join_schemas

MAX_NESTING = 64
"""Values nested deeper are an error: every later step would recurse on them."""

_INK = re.compile(rb"\S")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def row_spans(rows: Lines) -> Iterator[tuple[int, int]]:
    """Start and stop of the text of each line that is not blank."""
    start, stop = rows.start, rows.stop
    while start < stop:
        end = rows.data.find(b"\n", start, stop)
        end = stop if end < 0 else end
        if ink := _INK.search(rows.data, start, end):
            yield ink.start(), end
        start = end + 1


def parse_exactly(path: str, rows: Lines, options: ReadOptions, known: pa.Schema | None) -> Decoded:
    """One block row by row, with an exact place for whatever is wrong."""
    schema = known if known is not None else pa.schema([])
    values: list[dict[str, Any]] = []
    names: set[str] = set()
    shapes: set[Hashable] = set()  # of rows whose types have been joined already
    bad = BadRows(path, options)
    for start, stop in row_spans(rows):
        try:
            row = _parse(rows.data[start:stop], options.columns)
            shape = _shape(row)
        except (ValueError, RecursionError) as error:
            bad.add(rows.place(start), _cause(error))
            continue
        if shape not in shapes:
            found = pa.schema([(name, _column_type(value)) for name, value in row.items()])
            try:
                schema = join_schemas(schema, found, settled=None if options.may_widen else known)
            except TypeClash as clash:
                raise clash.error(path, rows.place(start)) from None
            shapes.add(shape)
            names.update(row)
        values.append(row)
    # The other columns of the known schema would be nulls, and may be thousands.
    schema = pa.schema([field for field in schema if field.name in names])
    columns = [_to_array([row.get(field.name) for row in values], field.type) for field in schema]
    table = pa.table({"": pa.nulls(len(values))}).select([])
    if columns:
        fields = [field.with_type(array.type) for field, array in zip(schema, columns, strict=True)]
        table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    return Decoded(table, tuple(bad.rejections))


def _parse(text: bytes, wanted: tuple[str, ...] | None) -> dict[str, Any]:
    row = json.loads(text, parse_float=_finite_float, strict=True)
    if _SURROGATE.search(text):
        json.dumps(row, ensure_ascii=False).encode()
    if not isinstance(row, dict):
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise ValueError(f"expected a JSON object, found {names.get(type(row), 'a number')}")
    return row if wanted is None else {name: row[name] for name in wanted if name in row}


def _cause(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        # Python ends some of its texts with "at": "Unterminated string starting at".
        return f"malformed JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 at byte {error.start} of the row"
    if isinstance(error, UnicodeEncodeError):
        return "an escaped surrogate without its other half, which is not valid text"
    is_deep = isinstance(error, RecursionError)
    return f"nested deeper than {MAX_NESTING} levels" if is_deep else str(error)


def _to_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind != MIXED:
        try:
            return pa.array(values, type=kind)
        except (pa.ArrowException, OverflowError):
            pass
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.ExtensionArray.from_storage(MIXED, pa.array(texts, type=pa.string()))


def _column_type(value: Any) -> pa.DataType:
    try:
        return _type_of(value)
    except (TypeClash, OverflowError):
        return MIXED


def _type_of(value: Any) -> pa.DataType:
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise OverflowError(value)
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, list):
        kind = pa.null()
        for item in value:
            kind = join(kind, _type_of(item), "[]")
        return pa.list_(kind)
    return pa.struct([pa.field(name, _type_of(item)) for name, item in value.items()])


def _shape(value: Any, room: int = MAX_NESTING) -> Hashable:
    """Equal for values that have the same type; cheaper than the type itself."""
    if room < 0:
        raise RecursionError
    if isinstance(value, dict):
        return tuple([(name, _shape(item, room - 1)) for name, item in value.items()])
    if isinstance(value, list):
        return frozenset([_shape(item, room - 1) for item in value])
    is_long = isinstance(value, int) and not -(2**63) <= value < 2**63
    return "long" if is_long else type(value).__name__


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large for a 64-bit float")
    return value
