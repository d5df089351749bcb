"""JSON objects through Python: row by row, exact, with a line for whatever is wrong.

About ten times slower than pyarrow's parser, and the reference for it: the rows are those that
``json.loads`` gives, the last of duplicate keys included. Types are joined over rows (see
``schema``); a true conflict names line, column and both types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import ConflictError, DataError
from fast_axolotl.reading.blocks import Decoded, ReadOptions, Rejection
from fast_axolotl.reading.schema import MIXED, TypeClash, is_json_text, join, join_schemas

__all__ = ["MAX_TYPE_NESTING", "JsonRows", "SlowParse"]

MAX_TYPE_NESTING = 64
"""Values nested deeper get no Arrow type of their own, which every later step would recurse on."""

_MAX_VALUE_NESTING = 500
"""Values nested deeper are an error: Python's own recursion ends not far above."""

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

    def buffer(self) -> pa.Buffer:
        return pa.py_buffer(self.data).slice(self.start, self.stop - self.start)


@dataclass(slots=True)
class SlowParse:
    """One block row by row, with an exact place for whatever is wrong."""

    path: str
    rows: JsonRows
    options: ReadOptions
    known: pa.Schema | None
    rejections: list[Rejection] = field(default_factory=list)
    shapes: set[Hashable] = field(default_factory=set)
    """Shapes of rows whose types have been joined already."""

    def run(self) -> Decoded:
        schema = self.known if self.known is not None else pa.schema([])
        values: list[dict[str, Any]] = []
        for start, stop in self.rows.spans():
            try:
                row = self._parse(start, stop)
                schema = self._widen(schema, row, start)
            except ConflictError:
                raise
            except DataError as error:
                self._reject(error)
                continue
            values.append(row)
        return Decoded(_to_table(values, schema), tuple(self.rejections))

    def _parse(self, start: int, stop: int) -> dict[str, Any]:
        text = self.rows.data[start:stop]
        try:
            row = json.loads(text, parse_float=_finite_float, strict=True)
            if len(text) > _MAX_VALUE_NESTING and _depth(row) > _MAX_VALUE_NESTING:
                raise RecursionError
            if _SURROGATE.search(text):
                json.dumps(row, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            cause = f"malformed JSON: {error.msg} at character {error.colno} of line {error.lineno}"
            raise self._error(
                cause if error.lineno > 1 else cause[: cause.rindex(" of")], start
            ) from None
        except UnicodeDecodeError as error:
            raise self._error(f"bytes that are not UTF-8 at byte {error.start}", start) from None
        except UnicodeEncodeError:
            raise self._error("half of a surrogate pair, which is no text", start) from None
        except RecursionError:
            raise self._error("nested too deep", start) from None
        except ValueError as error:
            raise self._error(str(error), start) from None
        if not isinstance(row, dict):
            raise self._error(f"expected an object, found {_kind(row)}", start)
        wanted = self.options.columns
        return row if wanted is None else {name: row[name] for name in wanted if name in row}

    def _widen(self, schema: pa.Schema, row: dict[str, Any], start: int) -> pa.Schema:
        shape = _shape(row)
        if shape in self.shapes:
            return schema
        schema = self._join(schema, row, start)
        self.shapes.add(shape)
        return schema

    def _join(self, schema: pa.Schema, row: dict[str, Any], start: int) -> pa.Schema:
        found = pa.schema([pa.field(name, _column_type(value)) for name, value in row.items()])
        try:
            return join_schemas(schema, found)
        except TypeClash as clash:
            if self.options.on_conflict == "raise":
                raise clash.error(self.path, self.rows.place(start)) from None
            index = schema.get_field_index(clash.column)
            return self._join(schema.set(index, clash.as_json_text()), row, start)

    def _error(self, cause: str, offset: int) -> DataError:
        return DataError(
            f'{cause}; mend the row, or pass on_error="skip" to leave it out and count it',
            path=self.path,
            place=self.rows.place(offset),
        )

    def _reject(self, error: DataError) -> None:
        if self.options.on_error == "raise":
            raise error
        self.rejections.append(
            Rejection(path=self.path, place=error.place, reason=error.message, num_rows=1)
        )


def _to_table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns, fields = [], []
    for column in schema:
        values = [row.get(column.name) for row in rows]
        array = _to_array(values, column)
        columns.append(array)
        fields.append(column if array.type == column.type else column.with_type(array.type))
    if not fields:
        return pa.table({"": pa.nulls(len(rows))}).select([])
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _to_array(values: list[Any], column: pa.Field) -> pa.Array:
    if column.type != MIXED and not is_json_text(column):
        try:
            return pa.array(values, type=column.type)
        except (pa.ArrowException, OverflowError):
            pass
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    storage = pa.array(texts, type=pa.string())
    return storage if is_json_text(column) else pa.ExtensionArray.from_storage(MIXED, storage)


def _column_type(value: Any) -> pa.DataType:
    """The Arrow type of one value; ``MIXED`` for what has none."""
    try:
        return _type_of(value)
    except (TypeClash, OverflowError):
        return MIXED


def _type_of(value: Any, room: int = MAX_TYPE_NESTING) -> pa.DataType:
    if room == 0:
        raise OverflowError("nested too deep")
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


def _shape(value: Any) -> Hashable:
    """Equal for values that have the same type; cheaper than the type itself."""
    if isinstance(value, dict):
        return tuple((name, _shape(item)) for name, item in value.items())
    if isinstance(value, list):
        return frozenset(map(_shape, value))
    is_long = isinstance(value, int) and not -(2**63) <= value < 2**63
    return "long" if is_long else type(value).__name__


def _depth(value: Any) -> int:
    """How many levels of lists and objects a value has."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list)) and item]:
        depth += 1
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large for a float")
    return value


def _kind(value: Any) -> str:
    names = {list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
