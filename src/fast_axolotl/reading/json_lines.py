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
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import (
    Block,
    Decoded,
    InputFile,
    ReadOptions,
    Rejection,
    Unit,
    rejection_of,
)
from fast_axolotl.reading.lines import BOM, BadRows, LineFile, Lines, count_byte
from fast_axolotl.reading.schema import MIXED, TypeClash, join, join_schemas
from fast_axolotl.reading.storage import Source, start_of

_MAX_NESTING = 64
"""Values nested deeper are an error: every later step would recurse on them."""

_MOST_CLOSINGS = 4_000
"""Rows with more brackets go to Python: pyarrow would exhaust the stack at a depth of 10,000."""

_SPARSE_BYTES = 16 * 1024
"""Pieces of rows that share few keys; a block of two of them is never cut."""

_PROBES, _PROBE_BYTES = 4, 2 * 1024
_FEW_KEYS = 16

_FEW_COLUMNS = 32
"""So many columns of nulls do no harm."""

_KEY = re.compile(rb'"([^"\\]{0,128})"[ \t]*:')


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLinesFile(LineFile):
    """One object per line."""

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
class SmallFiles(InputFile):
    """Small files of JSON lines, read many at a time; ``source`` has the bytes of all."""

    files: tuple[Source, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.files

    def units(self, file: int) -> list[Unit]:
        """Ranges of files."""
        units, start, size = list[Unit](), 0, 0
        for stop, source in enumerate(self.sources, 1):
            size += source.num_bytes + 1
            if size >= self.options.unit_bytes or stop == len(self.sources):
                units.append(Unit(file=file, start=start, stop=stop, num_bytes=size))
                start, size = stop, 0
        return units

    def blocks(self, unit: Unit) -> Iterator[Block]:
        load = partial(self._load, self.sources[unit.start : unit.stop])
        yield json_block(unit.num_bytes, load, self.options)

    def sample(self, num_bytes: int) -> Block:
        """Whole files from here and there."""
        total = sum(source.num_bytes for source in self.sources)
        sources = self.sources[:: -(-total // num_bytes) or 1]
        return json_block(0, partial(self._load, sources), self.options)

    def _load(self, sources: Sequence[Source]) -> Lines:
        texts, rejections = list[bytes](), list[Rejection]()
        for source in sources:
            try:
                texts.append(source.read_at(0, source.num_bytes).removeprefix(BOM))
            except DataError as error:
                if self.options.on_error == "raise":
                    raise
                texts.append(b"")
                rejections.append(rejection_of(error))
        starts = [*accumulate((len(text) + 1 for text in texts), initial=0)]
        data = b"\n".join(texts)

        def place(at: int) -> tuple[str, str]:
            index = bisect_right(starts, at) - 1
            return sources[index].path, f"line {1 + data.count(10, starts[index], at)}"

        return Lines(data=data, stop=len(data), place=place, rejections=tuple(rejections))


def json_block(weight: int, load: Callable[[], Lines], options: ReadOptions) -> Block:
    """A block of JSON objects."""
    return Block(
        decode=partial(_decode, load, options),
        weight=weight,
        count=lambda: _look(rows := load(), *rows.spans())[0],
        is_text=True,
    )


def _decode(load: Callable[[], Lines], options: ReadOptions, schema: pa.Schema | None) -> Decoded:
    rows = load()
    if rows.start == rows.stop:
        return Decoded(pa.table({}), rows.rejections)
    (starts, ends), edges = rows.spans(), []
    if rows.stop - rows.start > 2 * _SPARSE_BYTES and _is_sparse(rows, len(starts)):
        lines = np.searchsorted(starts, range(rows.start, rows.stop, _SPARSE_BYTES))
        edges = np.unique(starts[lines[lines < len(starts)]]).tolist()
    if len(edges) > 1:
        pieces = (
            json_block(0, partial(replace, rows, start=start, stop=stop, rejections=()), options)
            for start, stop in pairwise([*edges, rows.stop])
        )
        first = next(pieces).decode(schema)
        return replace(first, rejections=rows.rejections + first.rejections, more=pieces)
    num_rows, are_objects = _look(rows, starts, ends)
    table = _parse(rows, schema) if are_objects else None
    if table is None or table.num_rows != num_rows:
        return _parse_exactly(rows, options, schema)
    return Decoded(table, rows.rejections)


def _look(rows: Lines, starts: np.ndarray, ends: np.ndarray) -> tuple[int, bool]:
    """The number of lines that are not blank, and whether pyarrow may see them: each begins and
    ends as an object does, so that none goes on in the next one, and none is nested too deeply."""
    data, raw = rows.data, np.frombuffer(rows.data, dtype=np.uint8)
    is_plain = (raw[starts] == ord("{")) & (raw[ends - 1] == ord("}"))
    num_rows, are_objects = len(starts), True
    for start, end in zip(starts[~is_plain], ends[~is_plain], strict=True):
        text = data[start:end].strip()
        num_rows -= not text
        are_objects &= text[:1] + text[-1:] in (b"", b"{}")
    is_long = ends - starts > _MOST_CLOSINGS
    for start, end in zip(starts[is_long], ends[is_long], strict=True):
        brackets = (byte for byte in (b"}", b"]") if data.find(byte, start, end - 1) >= 0)
        closings = sum(count_byte(data, byte, start, end) for byte in brackets)
        are_objects &= closings <= _MOST_CLOSINGS
    return num_rows, are_objects


def _is_sparse(rows: Lines, num_rows: int) -> bool:
    """Whether rows have far fewer keys than there are."""
    length, data = rows.stop - rows.start, rows.data
    places = range(rows.start, rows.stop, -(-length // _PROBES))
    text = b"".join(data[at : min(at + _PROBE_BYTES, rows.stop)] for at in places)
    keys = _KEY.findall(text)
    keys_of_row = len(keys) * length / len(text) / num_rows
    return len(set(keys)) > max(_FEW_KEYS, 2 * keys_of_row)


def _parse(rows: Lines, schema: pa.Schema | None) -> pa.Table | None:
    """What pyarrow gives, or ``None`` where it fails or cannot be trusted."""
    known = schema or pa.schema([])
    if any(column.type == MIXED for column in known):
        return None
    try:
        # What is only known to be null is no hint: pyarrow would refuse anything else. And it would
        # make a column of nulls of whatever is missing here.
        is_hint = len(known) <= _FEW_COLUMNS and ": null" not in str(known)
        table = _read(rows, schema if is_hint else None)
        if "timestamp[" in str(table.schema):
            plain = [column.with_type(_as_text(column.type)) for column in table.schema]
            table = _read(rows, pa.schema(plain))
        table.validate(full=True)  # which pyarrow's JSON parser does not do for text
        join_schemas(known, table.schema)
        for leaf in (leaf for column in table.columns for leaf in _leaves(column.chunks)):
            if pa.types.is_floating(leaf.type):
                from pyarrow import compute  # 30 ms that conversations do not need

                bounds = compute.min_max(leaf).as_py()
                # From here on a float may stand for an integer that it does not hold.
                if max(bounds["max"] or 0, -(bounds["min"] or 0)) >= 2.0**53:
                    return None
    except (pa.ArrowException, UnicodeDecodeError, RecursionError, TypeClash):
        return None
    return table


def _read(rows: Lines, schema: pa.Schema | None) -> pa.Table:
    text = pa.py_buffer(rows.data).slice(rows.start, rows.stop - rows.start)
    return pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
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


def _parse_exactly(rows: Lines, options: ReadOptions, known: pa.Schema | None) -> Decoded:
    """One block row by row, with an exact place for whatever is wrong."""
    schema = known if known is not None else pa.schema([])
    values: list[dict[str, Any]] = []
    names: set[str] = set()
    shapes: set[Hashable] = set()  # of rows whose types have been joined already
    bad = BadRows("", options)
    for start, stop in zip(*rows.spans(), strict=True):
        if not (text := rows.data[start:stop].lstrip()):
            continue
        try:
            row = _loads(text, options.columns)
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
    columns = {
        field.name: _to_array([row.get(field.name) for row in values], field.type)
        for field in schema
        if field.name in names
    }
    table = pa.table(columns or {"": pa.nulls(len(values))}).select(list(columns))
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
