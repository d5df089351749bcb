"""JSON lines to Arrow: pyarrow's parser where it is exact, otherwise Python's.

pyarrow parses a block some ten times faster than Python. But it lets bytes pass that are not UTF-8;
it takes two objects on a line, or ``null``, for rows; it refuses duplicate keys and arrays of mixed
kinds, which are valid; it turns text that looks like a date into timestamps; it rounds integers
past 64 bits to floats; it builds arrays that are too short when a list holds nulls; and it recurses
on nesting. A block in which one of these is possible is parsed row by row through Python instead,
so the rows are always those that ``json.loads`` would give.

Rows that share few keys take a place in every column: 50 bytes of text with one key of 3,000 become
24 kB. So a block whose keys keep changing, judged by a few kB from here and there, is parsed in
small pieces; columns that only other pieces have are left out here.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import (
    Block,
    Decoded,
    ReadOptions,
    Rejection,
    Unit,
    rejection_of,
)
from fast_axolotl.reading.lines import BOM, PARSED_BYTES, BadRows, LineFile, Lines, count_byte
from fast_axolotl.reading.schema import MIXED, TypeClash, join, join_schemas
from fast_axolotl.reading.storage import start_of

_LARGE_ROW_BYTES = 64 * 1024
"""Rows of about this size are parsed all together: one must not reach past what is parsed."""

_MAX_NESTING = 64
"""Values nested deeper are an error: every later step would recurse on them."""

_MOST_CLOSINGS = 4_000
"""Rows with more brackets go to Python: pyarrow would exhaust the stack at a depth of 10,000."""

_SPARSE_BYTES = 16 * 1024
"""Pieces of rows that share few keys; a block that is no larger is never cut."""

_PROBES, _PROBE_BYTES = 4, 2 * 1024
_FEW_KEYS = 16
_SMALL_BYTES = 64 * 1024
"""Files of JSON lines up to this size are read together with their neighbours, ..."""

_SMALL_UNITS = 256
"""... in at least so many units."""

_FEW_COLUMNS = 32
"""So many columns of nulls do no harm."""

_KEY = re.compile(rb'"([^"\\]{0,128})"[ \t]*:')
_INK = re.compile(rb"\S")
_CACHED_BYTES = 64 * 1024
_MOST_BLANKS = 64
"""Lines with more white space at their end are parsed by Python."""

_BLANK = re.compile(rb"\n\s")
_OBJECT = re.compile(rb"[ \t\r\n]*\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLinesFile(LineFile):
    """One object per line."""

    schema: pa.Schema | None = None

    @property
    def together(self) -> type[SmallFiles] | None:
        """What it is read with its neighbours as, where it is small."""
        source = self.source
        is_small = source.is_local and source.num_bytes <= _SMALL_BYTES
        return SmallFiles if is_small and self.compression is None else None

    def blocks(self, unit: Unit) -> Iterator[Block]:
        for weight, load in self.lines(unit):
            yield json_block(weight, load, self.options)

    def sample(self, num_bytes: int) -> Block:
        """The whole lines in about the first bytes of the file, or of what it decompresses to."""
        data = self.source.read_at(0, num_bytes // (4 if self.compression else 1))
        is_whole = self.compression is None and len(data) == self.source.num_bytes
        if self.compression is not None:
            data = start_of(data, self.compression)
        rows = self._lines(data, 0, len(data) if is_whole else data.rfind(b"\n") + 1, 0)
        return json_block(len(data), lambda: rows, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedLines(Lines):
    """The lines of several files."""

    paths: list[str]
    num_bytes: list[int]
    """What each of them has of the data."""

    def place(self, offset: int) -> tuple[str, str]:
        starts = [0, *accumulate(self.num_bytes)]
        file = bisect_right(starts, offset) - 1
        return self.paths[file], f"line {1 + self.data.count(10, starts[file], offset)}"


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Neighbouring small files of JSON lines, which are read together."""

    files: tuple[JsonLinesFile, ...]
    """None, where it stands for a file that an earlier one is read with."""
    options: ReadOptions
    schema: pa.Schema | None = None

    def units(self, file: int) -> list[Unit]:
        """Ranges of files, by their numbers."""
        if not self.files:
            return []
        total = sum(item.source.num_bytes for item in self.files)
        size = min(self.options.unit_bytes, total // _SMALL_UNITS)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=num_bytes)
            for start, stop, num_bytes in self._ranges(0, len(self.files), size)
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        for start, stop, size in self._ranges(unit.start, unit.stop, self.options.block_bytes // 2):
            yield json_block(size, partial(self._load, self.files[start:stop]), self.options)

    def sample(self, num_bytes: int) -> Block:
        """About so many bytes, in files from here and there."""
        step = -(-sum(file.source.num_bytes for file in self.files) // num_bytes)
        return json_block(num_bytes, partial(self._load, self.files[::step]), self.options)

    def _ranges(self, start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Neighbours that have so many bytes together: the first, the one behind the last, size."""
        num_bytes = 0
        for index in range(start, stop):
            num_bytes += self.files[index].source.num_bytes
            if num_bytes and (num_bytes >= size or index + 1 == stop):
                yield start, index + 1, num_bytes
                start, num_bytes = index + 1, 0

    def _load(self, files: Sequence[JsonLinesFile]) -> Lines:
        texts, paths, rejections = list[bytes](), list[str](), list[Rejection]()
        for source in (file.source for file in files):
            try:
                text = source.read_at(0, source.num_bytes)
            except DataError as error:
                if self.options.on_error == "raise":
                    raise
                rejections.append(rejection_of(error))
            else:
                texts.append(text.removeprefix(BOM).removesuffix(b"\n"))
                paths.append(source.path)
        data = b"\n".join(texts)
        return _JoinedLines(
            path="",
            data=data,
            stop=len(data),
            first_line=lambda: 1,
            rejections=tuple(rejections),
            paths=paths,
            num_bytes=[len(text) + 1 for text in texts],
        )


def json_block(weight: int, load: Callable[[], Lines], options: ReadOptions) -> Block:
    """A block of JSON objects."""
    return Block(
        decode=partial(_decode, load, options),
        weight=weight,
        count=partial(_count, load),
        is_text=True,
    )


def _decode(load: Callable[[], Lines], options: ReadOptions, schema: pa.Schema | None) -> Decoded:
    rows = load()
    if rows.start == rows.stop:
        return Decoded(pa.table({}), rows.rejections)
    num_rows = rows.num_rows()
    if rows.stop - rows.start > _SPARSE_BYTES and _is_sparse(rows, num_rows):
        pieces = (
            json_block(0, lambda piece=piece: piece, options)  # type: ignore[misc]
            for piece in _pieces(rows)
        )
        return replace(next(pieces).decode(schema), more=pieces)
    if (table := _parse(rows, schema, num_rows)) is None:
        return _parse_exactly(rows, options, schema)
    return Decoded(table, rows.rejections)


def _count(load: Callable[[], Lines]) -> int:
    rows = load()
    begins_blank = rows.data[rows.start : rows.start + 1].isspace()
    has_blanks = begins_blank or _BLANK.search(rows.data, rows.start, rows.stop)
    return sum(1 for _ in _row_spans(rows)) if has_blanks else rows.num_rows()


def _pieces(rows: Lines) -> Iterator[Lines]:
    """The same rows in small pieces, each with one line at least."""
    start, data = rows.start, rows.data
    while start < rows.stop:
        stop = data.rfind(b"\n", start, min(start + _SPARSE_BYTES, rows.stop)) + 1
        stop = stop or data.find(b"\n", start, rows.stop) + 1 or rows.stop
        yield replace(rows, start=start, stop=stop)
        rows = replace(rows, rejections=())
        start = stop


def _is_sparse(rows: Lines, num_rows: int) -> bool:
    """Whether rows have far fewer keys than there are."""
    length, data = rows.stop - rows.start, rows.data
    places = range(rows.start, rows.stop, -(-length // _PROBES))
    text = b"".join(data[at : min(at + _PROBE_BYTES, rows.stop)] for at in places)
    keys = _KEY.findall(text)
    keys_of_row = len(keys) * length / len(text) / num_rows
    return len(set(keys)) > max(_FEW_KEYS, 2 * keys_of_row)


def _parse(rows: Lines, schema: pa.Schema | None, num_rows: int) -> pa.Table | None:
    """What pyarrow gives, or ``None`` where it fails or cannot be trusted."""
    known = schema or pa.schema([])
    if any(column.type == MIXED for column in known):
        return None
    # pyarrow crashes where the first row is null, and where nesting is very deep.
    if not _OBJECT.match(rows.data, rows.start, rows.stop) or _may_be_deep(rows):
        return None
    try:
        # What is only known to be null is no hint: pyarrow would refuse anything else. And it would
        # make a column of nulls of whatever is missing here.
        is_hint = len(known) <= _FEW_COLUMNS and ": null" not in str(known)
        table = _read(rows, schema if is_hint else None, num_rows)
        if "timestamp[" in str(table.schema):
            plain = [column.with_type(_as_text(column.type)) for column in table.schema]
            table = _read(rows, pa.schema(plain), num_rows)
        table.validate(full=True)  # which pyarrow's JSON parser does not do for text
        join_schemas(known, table.schema)
        for leaf in (leaf for column in table.columns for leaf in _leaves(column.chunks)):
            if pa.types.is_floating(leaf.type):
                bounds = pc.min_max(leaf).as_py()
                # From here on a float may stand for an integer that it does not hold.
                if max(bounds["max"] or 0, -(bounds["min"] or 0)) >= 2.0**53:
                    return None
    except (pa.ArrowException, UnicodeDecodeError, RecursionError, TypeClash):
        return None
    # Every line must begin and end as an object does: then there is one on each. Blank lines and
    # white space around them are looked for only where there may be some.
    raw, num_joins = np.frombuffer(rows.data, dtype=np.uint8)[rows.start : rows.stop], 0
    for at in range(0, len(raw), _CACHED_BYTES):
        piece = raw[at : at + _CACHED_BYTES + 2]
        is_join = (piece[1:-1] == 10) & (piece[:-2] == ord("}")) & (piece[2:] == ord("{"))
        num_joins += int(np.count_nonzero(is_join))
    if table.num_rows == num_rows == num_joins + 1:
        return table
    num_objects = 0
    for start, stop in _row_spans(rows):
        end = rows.data[max(start, stop - _MOST_BLANKS) : stop].rstrip()
        if rows.data[start] != ord("{") or not end.endswith(b"}"):
            return None
        num_objects += 1
    return table if table.num_rows == num_objects else None


def _read(rows: Lines, schema: pa.Schema | None, num_rows: int) -> pa.Table:
    text = pa.py_buffer(rows.data).slice(rows.start, rows.stop - rows.start)
    is_large = len(text) > num_rows * _LARGE_ROW_BYTES
    size = len(text) + 1 if is_large else PARSED_BYTES
    return pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(use_threads=False, block_size=size),
        parse_options=pj.ParseOptions(explicit_schema=schema),
    )


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type with text in place of timestamps."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(_as_text(inner.type)) for inner in kind])
    return kind


def _leaves(arrays: Iterable[pa.Array], room: int = _MAX_NESTING) -> Iterator[pa.Array]:
    """The arrays of plain values inside of some arrays."""
    if room < 0:
        raise RecursionError
    for array in arrays:
        if pa.types.is_list(array.type):
            yield from _leaves([array.values], room - 1)
        elif pa.types.is_struct(array.type):
            inner = map(array.field, range(array.type.num_fields))
            yield from _leaves(inner, room - 1)
        else:
            yield array


def _may_be_deep(rows: Lines) -> bool:
    """Whether a row has so many brackets that its nesting may be too deep for pyarrow.

    Such a row is a line of at least two bytes a bracket: cheap to find where lines are short.
    """
    data, end, most = rows.data, rows.start, _MOST_CLOSINGS
    for probe in range(rows.start, rows.stop - most, most):
        if probe >= end and data.find(b"\n", probe, probe + most) < 0:
            start, end = data.rfind(b"\n", end, probe) + 1, data.find(b"\n", probe, rows.stop)
            end = rows.stop if end < 0 else end
            # Both closing brackets, which differ in one bit.
            if count_byte(data, b"}", start, end, ignored=ord("}") ^ ord("]")) > most:
                return True
    return False


def _row_spans(rows: Lines) -> Iterator[tuple[int, int]]:
    """Start and stop of the text of each line that is not blank."""
    start, stop = rows.start, rows.stop
    while start < stop:
        end = rows.data.find(b"\n", start, stop)
        end = stop if end < 0 else end
        if ink := _INK.search(rows.data, start, end):
            yield ink.start(), end
        start = end + 1


def _parse_exactly(rows: Lines, options: ReadOptions, known: pa.Schema | None) -> Decoded:
    """One block row by row, with an exact place for whatever is wrong."""
    schema = known if known is not None else pa.schema([])
    values: list[dict[str, Any]] = []
    names: set[str] = set()
    shapes: set[Hashable] = set()  # of rows whose types have been joined already
    bad = BadRows(rows.path, options)
    for start, stop in _row_spans(rows):
        try:
            row = _loads(rows.data[start:stop], options.columns)
            shape = _shape(row, _MAX_NESTING + 1)  # the row itself is a level
        except (ValueError, RecursionError) as error:
            bad.path, place = rows.place(start)
            bad.add(place, _cause(error))
            continue
        if shape not in shapes:
            found = pa.schema([(name, _column_type(value)) for name, value in row.items()])
            try:
                schema = join_schemas(schema, found, settled=None if options.may_widen else known)
            except TypeClash as clash:
                raise clash.error(*rows.place(start)) from None
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
    return Decoded(table, rows.rejections + tuple(bad.rejections))


def _loads(text: bytes, wanted: tuple[str, ...] | None) -> dict[str, Any]:
    row = json.loads(text, parse_float=_finite_float, strict=True)
    if b"\\u" in text:  # perhaps half of a surrogate pair
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
    return f"nested deeper than {_MAX_NESTING} levels" if is_deep else str(error)


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


def _shape(value: Any, room: int) -> Hashable:
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
