"""JSON objects through Python: row by row, exact, with a line for whatever is wrong.

About ten times slower than pyarrow's parser, and the reference for it: the rows are those that
``json.loads`` gives, the last of duplicate keys included. Types are joined over rows (see
``schema``); a true conflict names line, column and both types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from fast_axolotl.reading.blocks import Decoded, ReadOptions
from fast_axolotl.reading.lines import BadRows, count_byte
from fast_axolotl.reading.schema import MIXED, TypeClash, is_json_text, join, join_schemas

MAX_TYPE_NESTING = 64
"""Values nested deeper get no Arrow type of their own, which every later step would recurse on."""

_MAX_VALUE_NESTING = 250
"""Values nested deeper are an error: Python's own recursion ends not far above twice as many."""

_INK = re.compile(rb"\S")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRows:
    """The text of some objects, and where they are."""

    data: bytes
    start: int = 0
    stop: int
    """``data[start:stop]`` are objects separated by white space; slicing it would copy it."""
    spans: Callable[[], Iterator[tuple[int, int]]]
    """Start and stop of each row's text in ``data``."""
    first_line: Callable[[], int]
    """The line in the file of ``start``, from 1; counted only when it is asked for."""
    one_per_line: bool
    """Whether every row ends with its line."""
    count: int | None = None
    """The number of rows, where it is known."""

    def place(self, offset: int) -> str:
        return f"line {self.first_line() + self.data.count(10, self.start, offset)}"

    def num_rows(self) -> int:
        """Where it is not known, that of the lines, blank ones included."""
        if self.count is not None:
            return self.count
        newlines = count_byte(self.data, b"\n", self.start, self.stop)
        return newlines + (self.data[self.stop - 1] != ord("\n"))

    def pieces(self, num_bytes: int) -> Iterator[JsonRows]:
        """The same rows in pieces of some bytes, each with one row at least."""
        held: list[tuple[int, int]] = []

        def piece() -> JsonRows:
            spans, start = tuple(held), held[0][0]
            return replace(
                self,
                start=start,
                stop=spans[-1][1],
                spans=lambda: iter(spans),
                first_line=lambda: self.first_line() + self.data.count(10, self.start, start),
                count=len(spans),
            )

        for span in self.spans():
            if held and span[1] - held[0][0] > num_bytes:
                yield piece()
                held.clear()
            held.append(span)
        if held:
            yield piece()


def line_spans(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each line that is not blank."""
    while start < stop:
        end = data.find(b"\n", start, stop)
        end = stop if end < 0 else end
        if _INK.search(data, start, end):
            yield start, end
        start = end + 1


@dataclass(slots=True)
class ExactParse:
    """One block row by row, with an exact place for whatever is wrong."""

    path: str
    rows: JsonRows
    options: ReadOptions
    known: pa.Schema | None

    def run(self) -> Decoded:
        schema = self.known if self.known is not None else pa.schema([])
        rows: list[dict[str, Any]] = []
        names: set[str] = set()
        shapes: set[Hashable] = set()  # of rows whose types have been joined already
        bad = BadRows(self.path, self.options)
        for start, stop in self.rows.spans():
            try:
                row = _parse(self.rows.data[start:stop], self.options.columns)
                shape = _shape(row)
            except (ValueError, RecursionError) as error:
                bad.add(self.rows.place(start), _cause(error))
                continue
            if shape not in shapes:
                schema = self._join(schema, row, start)
                shapes.add(shape)
                names.update(row)
            rows.append(row)
        # The other columns of the known schema would be nulls, and may be thousands.
        schema = pa.schema([field for field in schema if field.name in names])
        columns = [_to_array([row.get(field.name) for row in rows], field) for field in schema]
        if not columns:
            table = pa.table({"": pa.nulls(len(rows))}).select([])
        else:
            fields = [
                field if array.type == field.type else field.with_type(array.type)
                for field, array in zip(schema, columns, strict=True)
            ]
            table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
        return Decoded(table, tuple(bad.rejections))

    def _join(self, schema: pa.Schema, row: dict[str, Any], start: int) -> pa.Schema:
        fields = []
        for name, value in row.items():
            try:
                fields.append(pa.field(name, _type_of(value)))
            except (TypeClash, OverflowError):
                fields.append(pa.field(name, MIXED))
        found = pa.schema(fields)
        try:
            return join_schemas(
                schema, found, settled=None if self.options.may_widen else self.known
            )
        except TypeClash as clash:
            if clash.is_late or self.options.on_conflict == "raise":
                raise clash.error(self.path, self.rows.place(start)) from None
            index = schema.get_field_index(clash.column)
            return self._join(schema.set(index, clash.as_json_text()), row, start)


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
        where = f" of line {error.lineno} of the row" if error.lineno > 1 else ""
        problem = error.msg.removesuffix(" at")
        return f"malformed JSON: {problem} at character {error.colno}{where}"
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 at byte {error.start} of the row"
    if isinstance(error, UnicodeEncodeError):
        return "an escaped surrogate without its other half, which is not valid text"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _to_array(values: list[Any], column: pa.Field) -> pa.Array:
    if column.type != MIXED and not is_json_text(column):
        try:
            return pa.array(values, type=column.type)
        except (pa.ArrowException, OverflowError):
            pass
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    storage = pa.array(texts, type=pa.string())
    return storage if is_json_text(column) else pa.ExtensionArray.from_storage(MIXED, storage)


def _type_of(value: Any, room: int = MAX_TYPE_NESTING) -> pa.DataType:
    if room == 0:
        raise OverflowError("nested too deeply")
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
            kind = join(kind, _type_of(item, room - 1), "[]")
        return pa.list_(kind)
    return pa.struct([pa.field(name, _type_of(item, room - 1)) for name, item in value.items()])


def _shape(value: Any, room: int = _MAX_VALUE_NESTING) -> Hashable:
    """Equal for values that have the same type; cheaper than the type itself."""
    if room == 0:
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
