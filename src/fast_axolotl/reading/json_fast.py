"""JSON objects to Arrow: pyarrow's parser where it is right, Python's where it is not.

pyarrow parses a block some ten times faster than Python, and seven things about it must be watched.
It lets bytes pass that are not UTF-8; it takes two objects on a line, or ``null``, for rows; it
refuses duplicate keys and arrays of mixed kinds, which are valid; it turns text that looks like a
date into timestamps; it rounds integers past 64 bits to floats; it builds arrays that are too short
when a list holds nulls; and it recurses on nesting. A block in which one of these is possible is
parsed by Python instead, so the rows are always those that ``json.loads`` would give. Duplicate
keys keep the last value.

The path through Python is ``json_exact``.

Rows that share few keys take a place in every column: 50 bytes of text with one key of 3,000 become
24 kB. So a block is weighed first by parsing a few kB from here and there, and parsed in pieces
where the whole would take more than four blocks. Columns that only other blocks have cost nothing:
they are left out here, and share one array of nulls later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import PART_BLOCKS, Block, Decoded, ReadOptions, held_bytes
from fast_axolotl.reading.json_exact import MAX_TYPE_NESTING, ExactParse, JsonRows
from fast_axolotl.reading.lines import check_utf8
from fast_axolotl.reading.schema import MIXED, TypeClash, is_json_text, join_schemas

_MAX_NESTING = 4_000
"""Deeper rows go to Python, which raises where pyarrow would exhaust the stack (past 10,000)."""

_MOST_PARTS = 8
"""Into which a block is cut at once; each of them looks whether it must be cut further."""

_LEAST_PROBED_BYTES = 16 * 1024
_LEAST_PROBED_ROWS = 64
_PROBED_SHARE = 32
_MOST_PROBED_BYTES = 8 * 1024

_DENSE_EXPANSION = 4
"""What a byte of text takes at most where rows have all columns: 8 bytes of ``1,`` in a list."""

_PLACE_BYTES = 8
"""What a row takes in a column that it has no value in."""

_FEW_KEYS = 16
_FEW_COLUMNS = 32
"""So many columns of nulls do no harm."""

_EXACT_INTEGER_LIMIT = 2.0**53
"""From here on a float may stand for an integer that it does not hold."""

_KEY = re.compile(rb'"([^"]{0,128})"[ \t]*:')
_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_BRACKETS = re.compile(rb"[\[{]+|[\]}]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBlock:
    """A block of JSON objects."""

    path: str
    weight: int
    load: Callable[[], JsonRows]
    options: ReadOptions
    text_wins: bool = False
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        rows = self.load()
        if rows.start == rows.stop:
            return Decoded(pa.table({}))
        num_rows, most_bytes = rows.num_rows(), PART_BLOCKS * self.options.block_bytes
        num_parts = -(-self._decoded_bytes(rows, num_rows) // most_bytes)
        if num_parts > 1:
            length = (rows.stop - rows.start) // min(num_parts, _MOST_PARTS)
            parts: Iterator[Block] = (
                replace(self, load=lambda piece=piece: piece, weight=0)  # type: ignore[misc]
                for piece in rows.pieces(length)
            )
            first = next(parts).decode(schema)
            return replace(first, more=chain(first.more, parts))
        table = _parse(rows, schema, num_rows, self.options)
        if table is not None:
            return Decoded(table)
        return ExactParse(self.path, rows, self.options, schema).run()

    def _decoded_bytes(self, rows: JsonRows, num_rows: int) -> int:
        """What the rows will take, judged by some of them; 0 where it cannot be much."""
        length = rows.stop - rows.start
        if length < _LEAST_PROBED_BYTES or num_rows < _LEAST_PROBED_ROWS:
            return 0
        probe = rows.probe(min(length // _PROBED_SHARE, _MOST_PROBED_BYTES))
        keys = _KEY.findall(probe.data, probe.start, probe.stop)
        if len(set(keys)) <= min(_FEW_KEYS, 2 * len(keys) // probe.num_rows()):
            return 0  # rows have the same few keys: the rule, told ten times as fast as by parsing
        try:
            table = _read(probe, None)
        except pa.ArrowException:
            try:
                table = ExactParse(self.path, probe, self.options, None).run().table
            except DataError:
                return 0
        probed = probe.stop - probe.start
        expansion = held_bytes(table) / probed
        if expansion > _DENSE_EXPANSION:  # as many keys again are new in every further row
            expansion *= length / probed
        # Rows that have few of the columns may be many, and each has a place in all of them.
        places: int = table.num_columns * num_rows
        return max(int(expansion * length), places * _PLACE_BYTES)


def _parse(
    rows: JsonRows, schema: pa.Schema | None, num_rows: int, options: ReadOptions
) -> pa.Table | None:
    """What pyarrow gives, or ``None`` where it fails or cannot be trusted."""
    known, most_bytes = schema or pa.schema([]), PART_BLOCKS * options.block_bytes
    if len(known) > _FEW_COLUMNS and len(known) * _PLACE_BYTES * num_rows > most_bytes:
        schema = None  # pyarrow would make a column of nulls of whatever is missing here
    if any(column.type == MIXED or is_json_text(column) for column in known):
        return None
    if not _OBJECT.match(rows.data, rows.start, rows.stop):
        return None  # pyarrow crashes where the first row is null
    try:
        check_utf8(rows.data, rows.start, rows.stop)  # which pyarrow's JSON parser does not
        if _may_be_deep(rows):
            return None
        # What is only known to be null is no hint: pyarrow would refuse anything else.
        table = _read(rows, None if schema is None else pa.schema(_less_nulls(list(schema))))
        for _ in range(8):
            plain = pa.schema([column.with_type(_as_text(column.type)) for column in table.schema])
            if plain.equals(table.schema):
                break
            table = _read(rows, plain)
        table.validate()
        join_schemas(known, table.schema)
    except (pa.ArrowException, UnicodeDecodeError, RecursionError, TypeClash):
        return None
    for column in table.columns:
        for floats in (leaf for chunk in column.chunks for leaf in _float_leaves(chunk)):
            bounds = pc.min_max(floats)
            low, high = bounds["min"].as_py(), bounds["max"].as_py()
            if high is not None and max(high, -low) >= _EXACT_INTEGER_LIMIT:
                return None
    # Two rows may stand where one should, or a null where an object should.
    expected = num_rows
    if table.num_rows != expected:
        # Blank lines are no rows; they are looked for only where the numbers differ.
        expected = rows.count or sum(1 for _ in rows.spans())
    if table.num_rows != expected:
        return None
    if any(column.null_count == 0 for column in table.columns):
        return table
    empty = [column.is_null() for column in table.columns]
    return None if not empty or pc.any(reduce(pc.and_, empty)).as_py() else table


def _read(rows: JsonRows, schema: pa.Schema | None) -> pa.Table:
    # Arrow's own pool keeps what each thread freed: 145 MB for 20 MB in use, and it is no faster.
    return pj.read_json(
        pa.BufferReader(rows.buffer()),
        read_options=pj.ReadOptions(use_threads=False, block_size=rows.stop - rows.start + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=schema, newlines_in_values=not rows.one_per_line
        ),
        memory_pool=pa.system_memory_pool(),
    )


def _less_nulls(fields: list[pa.Field]) -> list[pa.Field]:
    kinds = [(inner, _less_null(inner.type)) for inner in fields]
    return [inner.with_type(kind) for inner, kind in kinds if kind is not None]


def _less_null(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_struct(kind):
        return pa.struct(_less_nulls(list(kind)))
    if pa.types.is_list(kind):
        inner = _less_null(kind.value_type)
        return None if inner is None else pa.list_(inner)
    return None if pa.types.is_null(kind) else kind


def _as_text(kind: pa.DataType, room: int = MAX_TYPE_NESTING) -> pa.DataType:
    """The type with text in place of timestamps."""
    if room == 0:
        raise RecursionError
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type, room - 1))
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(_as_text(inner.type, room - 1)) for inner in kind])
    return kind


def _float_leaves(array: pa.Array) -> Iterator[pa.Array]:
    """The arrays of floats inside of an array."""
    if not _has_floats(array.type):
        return
    if pa.types.is_list(array.type):
        yield from _float_leaves(array.flatten())
    elif pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _float_leaves(child)
    elif pa.types.is_floating(array.type):
        yield array


def _has_floats(kind: pa.DataType) -> bool:
    children = map(kind.field, range(kind.num_fields))
    return pa.types.is_floating(kind) or any(_has_floats(child.type) for child in children)


def _may_be_deep(rows: JsonRows) -> bool:
    """Whether a row is nested so deep that pyarrow should not see it.

    A row that deep is long, so lines are only looked at where a stretch has no line end.
    """
    for start, stop in _long_lines(rows) if rows.one_per_line else rows.spans():
        data = rows.data
        if data.count(b"[", start, stop) + data.count(b"{", start, stop) <= _MAX_NESTING:
            continue
        depth = 0
        for match in _BRACKETS.finditer(data, start, stop):  # those in strings are counted too
            token = match.group()
            depth = depth + len(token) if token[0] in b"[{" else max(0, depth - len(token))
            if depth > _MAX_NESTING:
                return True
    return False


def _long_lines(rows: JsonRows) -> Iterator[tuple[int, int]]:
    """Lines of at least two bytes a level, found by probing: cheap where lines are short."""
    data, end = rows.data, rows.start
    for probe in range(rows.start, rows.stop - _MAX_NESTING, _MAX_NESTING):
        if probe < end or data.find(b"\n", probe, probe + _MAX_NESTING) >= 0:
            continue
        end = data.find(b"\n", probe, rows.stop)
        end = rows.stop if end < 0 else end
        yield data.rfind(b"\n", rows.start, probe) + 1, end
