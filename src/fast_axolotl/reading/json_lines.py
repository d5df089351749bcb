"""JSON lines, and JSON objects to Arrow: pyarrow's parser where it is right, else Python's.

pyarrow parses a block some ten times faster than Python, and seven things about it must be watched.
It lets bytes pass that are not UTF-8; it takes two objects on a line, or ``null``, for rows; it
refuses duplicate keys and arrays of mixed kinds, which are valid; it turns text that looks like a
date into timestamps; it rounds integers past 64 bits to floats; it builds arrays that are too short
when a list holds nulls; and it recurses on nesting. A block in which one of these is possible is
parsed by ``json_exact`` instead, so the rows are always those that ``json.loads`` would give.

Rows that share few keys take a place in every column: 50 bytes of text with one key of 3,000 become
24 kB. So a block whose keys keep changing, judged by a few kB from here and there, is parsed in
small pieces. Columns that only other pieces have cost nothing: they are left out here, and share
one array of nulls later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from fast_axolotl.reading.blocks import PART_BLOCKS, Block, Decoded, ReadOptions, Unit
from fast_axolotl.reading.json_exact import MAX_NESTING, parse_exactly, row_spans
from fast_axolotl.reading.lines import BOM, LineFile, Lines
from fast_axolotl.reading.schema import MIXED, TypeClash, join_schemas
from fast_axolotl.reading.storage import start_of

_MOST_BLOCK_BYTES = 2 * 1024 * 1024
"""As fast as larger blocks on a quiet machine; on a busy one, where those fall out of the shared
cache between two passes over them, two to three times as fast."""

_MOST_CLOSINGS = 4_000
"""Rows with more brackets go to Python: pyarrow would exhaust the stack at a depth of 10,000."""

_SPARSE_BYTES = 16 * 1024
"""Pieces of rows that share few keys; a block that is no larger is never cut."""

_PROBES, _PROBE_BYTES = 4, 4 * 1024
_FEW_KEYS = 16
_FEW_COLUMNS = 32
"""So many columns of nulls do no harm."""

_PLACE_BYTES = 8
"""What a row takes in a column that it has no value in."""

_EXACT_INTEGER_LIMIT = 2.0**53
"""From here on a float may stand for an integer that it does not hold."""

_KEY = re.compile(rb'"([^"\\]{0,128})"[ \t]*:')
_BLANK = re.compile(rb"\n\s")
_OBJECT = re.compile(rb"[ \t\r\n]*\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLinesFile(LineFile):
    """One object per line."""

    schema: pa.Schema | None = None
    most_block_bytes: int = _MOST_BLOCK_BYTES

    def blocks(self, unit: Unit) -> Iterator[Block]:
        for weight, load in self.lines(unit):
            yield json_block(self.source.path, weight, load, self.options)

    def sample(self, num_bytes: int) -> Block:
        """The whole lines in about the first bytes of the file, or of what it decompresses to."""
        data = self.source.read_at(0, num_bytes // (4 if self.compression else 1))
        is_whole = self.compression is None and len(data) == self.source.num_bytes
        if self.compression is not None:
            data = start_of(data, self.compression)
        start = len(BOM) if data.startswith(BOM) else 0
        stop = len(data) if is_whole else max(start, data.rfind(b"\n") + 1)
        rows = Lines(data=data, start=start, stop=stop, first_line=lambda: 1)
        return json_block(self.source.path, stop, lambda: rows, self.options)


def json_block(path: str, weight: int, load: Callable[[], Lines], options: ReadOptions) -> Block:
    """A block of JSON objects."""
    return Block(
        decode=partial(_decode, path, load, options),
        weight=weight,
        count=partial(_count, load),
        is_text=True,
    )


def _decode(
    path: str, load: Callable[[], Lines], options: ReadOptions, schema: pa.Schema | None
) -> Decoded:
    rows = load()
    if rows.start == rows.stop:
        return Decoded(pa.table({}))
    num_rows = rows.num_rows()
    if rows.stop - rows.start > _SPARSE_BYTES and _is_sparse(rows, num_rows):
        pieces = (
            json_block(path, 0, lambda piece=piece: piece, options)  # type: ignore[misc]
            for piece in _pieces(rows)
        )
        return replace(next(pieces).decode(schema), more=pieces)
    table = _parse(rows, schema, num_rows, PART_BLOCKS * options.block_bytes)
    return parse_exactly(path, rows, options, schema) if table is None else Decoded(table)


def _count(load: Callable[[], Lines]) -> int:
    rows = load()
    begins_blank = rows.data[rows.start : rows.start + 1].isspace()
    has_blanks = begins_blank or _BLANK.search(rows.data, rows.start, rows.stop)
    return sum(1 for _ in row_spans(rows)) if has_blanks else rows.num_rows()


def _pieces(rows: Lines) -> Iterator[Lines]:
    """The same rows in small pieces, each with one line at least."""
    start, data = rows.start, rows.data
    while start < rows.stop:
        stop = data.rfind(b"\n", start, min(start + _SPARSE_BYTES, rows.stop)) + 1
        stop = stop or data.find(b"\n", start, rows.stop) + 1 or rows.stop
        yield replace(rows, start=start, stop=stop)
        start = stop


def _is_sparse(rows: Lines, num_rows: int) -> bool:
    """Whether rows have far fewer keys than there are."""
    length, data = rows.stop - rows.start, rows.data
    places = range(rows.start, rows.stop, -(-length // _PROBES))
    text = b"".join(data[at : min(at + _PROBE_BYTES, rows.stop)] for at in places)
    keys = _KEY.findall(text)
    keys_of_row = len(keys) * length / len(text) / num_rows
    return len(set(keys)) > max(_FEW_KEYS, 2 * keys_of_row)


def _parse(
    rows: Lines, schema: pa.Schema | None, num_rows: int, most_bytes: int
) -> pa.Table | None:
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
        is_large = len(known) > _FEW_COLUMNS and len(known) * _PLACE_BYTES * num_rows > most_bytes
        table = _read(rows, None if is_large or ": null" in str(known) else schema)
        if "timestamp" in str(table.schema):
            plain = [column.with_type(_as_text(column.type)) for column in table.schema]
            table = _read(rows, pa.schema(plain))
        table.validate(full=True)  # which pyarrow's JSON parser does not do for text
        join_schemas(known, table.schema)
        for leaf in (leaf for column in table.columns for leaf in _leaves(column.chunks)):
            if pa.types.is_floating(leaf.type):
                bounds = pc.min_max(leaf).as_py()
                if max(bounds["max"] or 0, -(bounds["min"] or 0)) >= _EXACT_INTEGER_LIMIT:
                    return None
    except (pa.ArrowException, UnicodeDecodeError, RecursionError, TypeClash):
        return None
    # Two rows may stand where one should, or a null where an object should. Blank lines are no
    # rows; they are looked for only where the numbers differ.
    if table.num_rows != num_rows and table.num_rows != sum(1 for _ in row_spans(rows)):
        return None
    if any(column.null_count == 0 for column in table.columns):
        return table
    empty = [column.is_null() for column in table.columns]
    return None if not empty or pc.any(reduce(pc.and_, empty)).as_py() else table


def _read(rows: Lines, schema: pa.Schema | None) -> pa.Table:
    text = pa.py_buffer(rows.data).slice(rows.start, rows.stop - rows.start)
    # Arrow's own pool keeps what each thread freed: 145 MB for 20 MB in use, and it is no faster.
    return pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pj.ParseOptions(explicit_schema=schema),
        memory_pool=pa.system_memory_pool(),
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


def _leaves(arrays: Iterable[pa.Array], room: int = MAX_NESTING) -> Iterator[pa.Array]:
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
            if data.count(b"]", start, end) + data.count(b"}", start, end) > most:
                return True
    return False
