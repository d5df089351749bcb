"""CSV and TSV: quoted newlines, detected dialects, and numbers where all values are numbers.

A block is cut at the last line end that an even number of quotes precedes, and parsed by pyarrow,
which reads any text as Python's ``csv`` module does, quotes out of place included. Such quotes can
put the cut inside a field. That shows, since the last field then ends with the line end of the
block; so does a row that does not fit. A block of this kind, and no other, is read by the ``csv``
module, ten times as slowly, which tells where records end and the line of what is wrong.

Where a record begins depends on every quote before it. So a file is one unit, until one pass over
it (``find_edges``) has shown that its quotes are regular and where stretches of records begin: then
each stretch is a unit that is read on its own.

A column is a number where every value of the first part is a plain one. A plain integer prints back
as it was written; a plain decimal has no leading zero. So "08123" is text, and its column with it;
in a later part of a column of numbers it is an error. Empty fields are null in a number column, and
stay empty text in a text column. Nothing else is guessed: dates, booleans and "NA" are text.
"""

from __future__ import annotations

import importlib.util
import io
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import (
    Block,
    CsvDialect,
    Decoded,
    InputFile,
    ReadOptions,
    Unit,
    check_names,
)
from fast_axolotl.reading.lines import BOM, MOST_BLOCK_BYTES, BadRows, count_byte, line_at
from fast_axolotl.reading.schema import TypeClash, is_number
from fast_axolotl.reading.storage import MOST_RECORD_BYTES, Source, Supply

_CANDIDATES = ",\t;|"
_SNIFF_BYTES = 64 * 1024
_SNIFF_ROWS = 50
_TAIL_BYTES = 16
_PART_BYTES = 512 * 1024
"""What pyarrow parses at a time: half of the processor time where caches are of 2 MiB a core."""

_END = "end of the text"
"""A line behind a text: a record of its own, unless a quote is still open there."""

_UNCLOSED = (
    "a quoted field is not closed: the file is truncated, or a quote is missing; fix the quote, or "
    "replace the file with an intact copy"
)

_DECIMAL = r"^-?(?:0|[1-9][0-9]{0,14}|(?:0|[1-9][0-9]*)(?:\.[0-9]+|(?:\.[0-9]+)?[eE][+-]?[0-9]+))$"
"""A plain number, but no integer that is so long that a float might round it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile(InputFile):
    """One CSV file with its settled dialect and column names."""

    dialect: CsvDialect
    names: tuple[str, ...]
    start: int
    """Where the first row begins, behind the byte order mark and the header."""
    edges: tuple[int, ...] | None = None
    """Where stretches of records begin, then the end of the file; ``None`` where not known."""

    @classmethod
    def open(cls, *, source: Source, options: ReadOptions, **facts: Any) -> CsvFile:
        head = Supply(source, facts["compression"], _SNIFF_BYTES).held
        start = len(BOM) if head.startswith(BOM) else 0
        head, dialect = head[start:], options.csv
        if dialect.delimiter is None:
            is_tsv = ".tsv" in PurePosixPath(source.path).name.lower()
            delimiter = "\t" if is_tsv else _detect_delimiter(head, dialect)
            dialect = replace(dialect, delimiter=delimiter)
        names = dialect.column_names or ()
        if not names:
            is_cut = len(head) + start >= _SNIFF_BYTES
            lines = _records(head if is_cut else head + f"\n{_END}".encode(), dialect)
            found = ((record, end) for record, _, end in lines if record and end <= len(head) + 1)
            header, end = next(found, ([], len(head)))
            if not header and head.strip():
                raise DataError(_UNCLOSED, path=source.path, place="line 1")
            end = min(end, len(head))
            texts = [name.encode("utf-8", "surrogateescape") for name in header]
            names, start = tuple(text.decode("utf-8", "replace") for text in texts), start + end
        cure = "in the header, or pass csv=CsvDialect(column_names=...)"
        check_names(names, source.path, "line 1", cure)
        facts |= {"dialect": dialect, "names": names, "start": start}
        return cls(source=source, options=options, **facts)

    def sample(self, num_bytes: int) -> Block:
        """The whole records in about the first bytes."""
        return self._block(self.start, num_bytes, lambda: next(self._stretches(num_bytes))[1])

    def units(self, file: int) -> list[Unit]:
        if self.edges is None:
            return InputFile.units(self, file)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=stop - start)
            for start, stop in pairwise(self.edges)
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        if self.edges is None:
            size = min(self.options.block_bytes, MOST_BLOCK_BYTES)
            offset = self.start
            for num_bytes, decoded in self._stretches(size):
                yield self._block(offset, num_bytes, lambda decoded=decoded: decoded)  # type: ignore[misc]
                offset += num_bytes
        else:  # neighbouring stretches make no more than half a block; read where it is decoded

            def read() -> Decoded:
                text = self.source.read_at(unit.start, unit.stop - unit.start)
                return self._parse(text + b"\n", unit.start, is_last=True)[0]

            yield self._block(unit.start, unit.num_bytes, read)

    def find_edges(self) -> list[int]:
        """Where stretches of records of about ``unit_bytes`` begin, then the end of the file.

        One sequential pass over a plain file; the result follows from the data and ``unit_bytes``
        alone.
        """
        edges = [self.start]
        anyway = replace(self, options=replace(self.options, on_error="skip"))
        for num_bytes, _ in anyway._stretches(self.options.unit_bytes):
            edges.append(min(edges[-1] + num_bytes, self.source.num_bytes))
        return edges

    def _stretches(self, size: int) -> Iterator[tuple[int, Decoded]]:
        """The length and the rows of stretches of whole records, read from the beginning."""
        text = self._text_from(self.start, size)
        is_first = True  # which tells the columns of a file without rows
        while text.held or is_first:
            held, is_last = text.held, text.ended
            decoded, stop = self._parse(held + b"\n" if is_last else held, text.offset, is_last)
            if stop:
                is_first = False
                yield stop, decoded
            text.advance(min(stop, len(held)))

    def _text_from(self, offset: int, size: int) -> Supply:
        text = Supply(self.source, self.compression, size)
        while text.offset < offset and not text.ended:
            text.advance(min(len(text.held), offset - text.offset))
        return text

    def _block(self, offset: int, num_bytes: int, read: Callable[[], Decoded]) -> Block:
        """A block of whole records; ``read`` gives its values as text."""

        def decode(schema: pa.Schema | None) -> Decoded:
            decoded, columns = read(), []
            try:
                decoded.table.validate(full=True)
            except pa.ArrowInvalid:  # some value is not UTF-8
                text = self._text_from(offset, num_bytes).held[:num_bytes] + b"\n"
                decoded, _ = self._parse_exactly(text, offset, is_last=True)
            types = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
            for name, texts in zip(decoded.table.column_names, decoded.table.columns, strict=True):
                known = types.get(name)
                columns.append(_as_numbers(texts, known))
                found = columns[-1].type
                is_settled = not self.options.may_widen and known is not None and is_number(known)
                if is_settled and found != known:
                    # The first row with which the column is no longer what it was.
                    row = bisect_left(
                        range(len(texts)),
                        True,
                        key=lambda row: _as_numbers(texts.slice(0, row + 1), known).type != known,
                    )
                    found = _as_numbers(texts.slice(row, 1), None).type
                    place = self._place(offset, num_bytes, row)
                    raise TypeClash(name, known, found, is_late=True).error(self.source.path, place)
            table = pa.Table.from_arrays(columns, names=decoded.table.column_names)
            return replace(decoded, table=table)

        return Block(decode=decode, weight=num_bytes, is_text=True, text_wins=True)

    def _place(self, offset: int, num_bytes: int, row: int) -> str:
        """Where a row of the block at an offset begins."""
        records = _records(self._text_from(offset, num_bytes).held, self.dialect)
        lines = (line for record, line, _ in records if len(record) == len(self.names))
        line = next(islice(lines, row, None))
        return f"line {line_at(self.source, self.compression, offset) + line - 1}"

    def _cut(self, text: bytes) -> int:
        """The end of the last line that an even number of quotes precedes."""
        quote = self.dialect.quote.encode()
        stop = text.rfind(b"\n") + 1
        is_open = quote in text and count_byte(text, quote, 0, stop) % 2
        while stop and is_open:
            earlier = text.rfind(b"\n", 0, text.rfind(quote, 0, stop)) + 1
            is_open = (is_open + count_byte(text, quote, earlier, stop)) % 2
            stop = earlier
        return stop

    def _parse(self, text: bytes, offset: int, is_last: bool) -> tuple[Decoded, int]:
        """The whole records of a text, and where they end: by pyarrow, unless a row does not fit,
        or the last line may end inside of a field."""
        dialect, stop = self.dialect, len(text) if is_last else self._cut(text)
        # A part ends between records, but pyarrow loses the "\n" of a value's "\r\n" there.
        parts = (stop + 1,) if b"\r" in text else (_PART_BYTES, stop + 1)
        for part_bytes in parts:
            try:
                table = pacsv.read_csv(
                    pa.BufferReader(pa.py_buffer(text).slice(0, stop)),
                    read_options=pacsv.ReadOptions(
                        use_threads=False, block_size=part_bytes, column_names=self.names
                    ),
                    parse_options=pacsv.ParseOptions(
                        delimiter=dialect.delimiter,
                        quote_char=dialect.quote,
                        double_quote=dialect.escape is None,
                        escape_char=dialect.escape or False,
                        newlines_in_values=True,
                    ),
                    convert_options=pacsv.ConvertOptions(
                        column_types=dict.fromkeys(self.names, pa.string()),
                        strings_can_be_null=False,
                        check_utf8=False,  # where the block is decoded: other threads can do that
                    ),
                )
                last = table.column(-1)[-1].as_py() if table.num_rows else ""
            except (pa.ArrowException, UnicodeDecodeError):
                continue
            end, quote = text[max(0, stop - _TAIL_BYTES) : stop].rstrip(b"\r\n"), dialect.quote
            # Certainly closed where a quote stands at the end that is not the value's own.
            ink = last.rstrip("\r\n")
            is_closed = ink and not ink.endswith(quote) and end.endswith(quote.encode())
            # It takes a byte order mark away, which is a value's own at the start of a block.
            if self.names and not text.startswith(BOM) and (is_closed or last == ink):
                return Decoded(table), stop
        stop = text.rfind(b"\n") + 1
        return self._parse_exactly(text[:stop], offset, is_last)

    def _parse_exactly(self, text: bytes, offset: int, is_last: bool) -> tuple[Decoded, int]:
        """The whole records of some lines by Python's ``csv`` module, and where they end."""
        values: list[list[str]] = []
        bad, stop = BadRows(self.source.path, self.options), 0

        @cache
        def first_line() -> int:
            return line_at(self.source, self.compression, offset)

        for record, line, end in _records(text + _END.encode(), self.dialect):
            if end > len(text):
                if is_last and record != [_END]:
                    place = f"line {first_line() + line - 1}"
                    raise DataError(_UNCLOSED, path=self.source.path, place=place)
                break
            stop = end
            if not record:
                continue
            cause = ""
            if len(record) != len(self.names):
                cause = f"expected {len(self.names)} fields, found {len(record)}"
            elif any("\udc80" <= char <= "\udcff" for value in record for char in value):
                cause = "invalid UTF-8"
            if cause:
                bad.add(f"line {first_line() + line - 1}", cause)
            else:
                values.append(record)
        texts = pa.schema([(name, pa.string()) for name in self.names])
        rows = [dict(zip(self.names, record, strict=True)) for record in values]
        return Decoded(pa.Table.from_pylist(rows, texts), tuple(bad.rejections)), stop


@cache
def _csv() -> Any:
    """A copy of Python's ``csv``, since its limit for the size of a field is one for a process."""
    spec = importlib.util.find_spec("_csv")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.field_size_limit(MOST_RECORD_BYTES)
    return module


def _records(text: bytes, dialect: CsvDialect) -> Iterator[tuple[list[str], int, int]]:
    """Records, the line on which each begins, counted from 1, and the byte at which it ends."""
    consumed, line = 0, 1

    def lines() -> Iterator[str]:
        nonlocal consumed
        for item in io.StringIO(text.decode("utf-8", "surrogateescape"), newline=""):
            consumed += len(item.encode("utf-8", "surrogateescape"))
            yield item

    reader = _csv().reader(
        lines(),
        delimiter=dialect.delimiter or ",",
        quotechar=dialect.quote,
        escapechar=dialect.escape,
        doublequote=dialect.escape is None,
    )
    for record in reader:
        yield record, line, consumed
        line = reader.line_num + 1


def _detect_delimiter(head: bytes, dialect: CsvDialect) -> str:
    """The candidate that splits the first records into the most fields, all alike."""
    best, most = ",", 1
    for candidate in _CANDIDATES:
        records = _records(head, replace(dialect, delimiter=candidate))
        widths = [len(record) for record, *_ in islice(records, _SNIFF_ROWS) if record]
        if len(head) >= _SNIFF_BYTES - len(BOM):
            widths = widths[:-1] or widths
        if widths and min(widths) == max(widths) > most:
            best, most = candidate, widths[0]
    return best


def _as_numbers(column: pa.ChunkedArray, known: pa.DataType | None) -> pa.ChunkedArray:
    """Integers, else decimals, else the text itself, where what is known so far allows it."""
    if known is not None and pa.types.is_string(known):
        return column
    if len(column) == 0:
        return pa.chunked_array([], type=known or pa.null())
    filled = column
    has_text = pc.cast(pc.binary_length(column), pa.bool_())  # pa.scalar("") would import pandas
    if not pc.all(has_text).as_py():
        filled = pc.if_else(has_text, column, pa.nulls(len(column), pa.string()))
        if filled.null_count == len(filled):
            return pa.chunked_array([pa.nulls(len(column), known or pa.null())])
    if known is None or not pa.types.is_floating(known):
        try:
            integers = filled.cast(pa.int64())
            if integers.cast(pa.string()).equals(filled):
                return integers
        except pa.ArrowException:
            pass
    try:
        if not pc.all(pc.match_substring_regex(filled, _DECIMAL)).as_py():
            return column
        decimals = filled.cast(pa.float64())
    except pa.ArrowException:
        return column
    return decimals if pc.all(pc.is_finite(decimals)).as_py() else column
