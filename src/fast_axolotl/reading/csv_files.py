"""CSV and TSV: quoted newlines, detected dialects, and numbers where all values are numbers.

A block is cut at the last line end that an even number of quotes precedes, and parsed by pyarrow,
which reads any text as Python's ``csv`` module does, quotes out of place included. Such quotes can
put the cut inside a field. That shows, since the last field then ends with the line end of the
block; so does a row that does not fit. A block of this kind, and no other, is read by the ``csv``
module, ten times as slowly, which tells where records end and the line of what is wrong.

Where a record begins depends on every quote before it. So a file is one unit.

A column is a number only where every value is a plain one. A plain integer prints back as it was
written; a plain decimal has no leading zero. So "08123" is text, and its column with it. Empty
fields are null in a number column, and stay empty text in a text column. Nothing else is guessed:
dates, booleans and "NA" are text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import (
    Block,
    CsvDialect,
    Decoded,
    ReadOptions,
    Unit,
    check_names,
)
from fast_axolotl.reading.lines import (
    BOM,
    MOST_BLOCK_BYTES,
    PARSED_BYTES,
    BadRows,
    count_byte,
    line_at,
    whole_file,
)
from fast_axolotl.reading.storage import Source, Supply, head_of

_CANDIDATES = ",\t;|"
_SNIFF_BYTES = 64 * 1024
_SNIFF_ROWS = 50
_TAIL_BYTES = 16
_END = "end of the text"
"""A line behind a text: a record of its own, unless a quote is still open there."""

_DECIMAL = r"^-?(0|[1-9][0-9]{0,14}|(0|[1-9][0-9]*)(\.[0-9]+|(\.[0-9]+)?[eE][+-]?[0-9]+))$"
"""A plain number, but no integer that is so long that a float might round it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """One CSV file with its settled dialect and column names."""

    source: Source
    compression: str | None
    options: ReadOptions
    dialect: CsvDialect
    names: tuple[str, ...]
    start: int
    """Where the first row begins, behind the byte order mark and the header."""
    schema: pa.Schema | None = None

    @classmethod
    def open(cls, source: Source, compression: str | None, options: ReadOptions) -> CsvFile:
        head = head_of(source, compression, _SNIFF_BYTES)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                "the file is UTF-16; convert it to UTF-8", path=source.path, place="line 1"
            )
        start = len(BOM) if head.startswith(BOM) else 0
        head, dialect = head[start:], options.csv
        if dialect.delimiter is None:
            is_tsv = ".tsv" in PurePosixPath(source.path).name.lower()
            delimiter = "\t" if is_tsv else _detect_delimiter(head, dialect)
            dialect = replace(dialect, delimiter=delimiter)
        names = dialect.column_names or ()
        if not names:
            records = ((record, end) for record, _, end in _records(head, dialect) if record)
            header, end = next(records, ([], len(head)))
            texts = [name.encode("utf-8", "surrogateescape") for name in header]
            names, start = tuple(text.decode("utf-8", "replace") for text in texts), start + end
        cure = "in the header, or pass csv=CsvDialect(column_names=...)"
        check_names(names, source.path, "line 1", cure)
        return cls(
            source=source,
            compression=compression,
            options=options,
            dialect=dialect,
            names=names,
            start=start,
        )

    def units(self, file: int) -> list[Unit]:
        return whole_file(self.source, self.compression, file)

    def blocks(self, unit: Unit) -> Iterator[Block]:
        """Stretches of whole records, read from the beginning."""
        size = min(self.options.block_bytes, MOST_BLOCK_BYTES)
        text = Supply(self.source, self.compression, size)
        while len(text.held) < self.start and not text.ended:
            text.advance(0)
        text.drop(min(self.start, len(text.held)))
        is_first = True  # which tells the columns of a file without rows
        while text.held or is_first:
            held, is_last = text.held, text.ended
            decoded, stop = self._parse(held + b"\n" if is_last else held, text.offset, is_last)
            if stop:
                is_first = False
                yield Block(
                    decode=partial(_typed, decoded), weight=stop, is_text=True, text_wins=True
                )
            text.advance(min(stop, len(held)))

    def _cut(self, text: bytes) -> int:
        """The end of the last line that an even number of quotes precedes."""
        quote = self.dialect.quote.encode()
        stop = text.rfind(b"\n") + 1
        is_open = count_byte(text, quote, 0, stop) % 2
        while stop and is_open:
            earlier = text.rfind(b"\n", 0, text.rfind(quote, 0, stop)) + 1
            is_open = (is_open + count_byte(text, quote, earlier, stop)) % 2
            stop = earlier
        return stop

    def _parse(self, text: bytes, offset: int, is_last: bool) -> tuple[Decoded, int]:
        """The whole records of a text, and where they end: by pyarrow, unless a row does not fit,
        or the last line may end inside of a field."""
        dialect, stop = self.dialect, len(text) if is_last else self._cut(text)
        # pyarrow loses the line feed of a quoted "\r\n" that its own blocks part.
        block_size = len(text) + 1 if b"\r" in text else PARSED_BYTES
        try:
            table = pacsv.read_csv(
                pa.BufferReader(pa.py_buffer(text).slice(0, stop)),
                read_options=pacsv.ReadOptions(
                    use_threads=False, block_size=block_size, column_names=self.names
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
                ),
            )
            last = table.column(-1)[-1].as_py() if table.num_rows else ""
            end, quote = text[max(0, stop - _TAIL_BYTES) : stop].rstrip(b"\r\n"), dialect.quote
            # Certainly closed where a quote stands at the end that is not the value's own.
            ink = last.rstrip("\r\n")
            is_closed = ink and not ink.endswith(quote) and end.endswith(quote.encode())
            # It takes a byte order mark away, which is a value's own at the start of a block.
            if self.names and not text.startswith(BOM) and (is_closed or last == ink):
                return Decoded(table), stop
        except (pa.ArrowException, UnicodeDecodeError):
            pass
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
                    raise DataError(
                        "a quoted field is not closed: the file is truncated, or a quote is "
                        "missing; fix the quote, or replace the file with an intact copy",
                        path=self.source.path,
                        place=f"line {first_line() + line - 1}",
                    )
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
        columns = zip(*values, strict=True) if values else [[] for _ in self.names]
        arrays = [pa.array(list(column), type=pa.string()) for column in columns]
        table = pa.Table.from_arrays(arrays, names=list(self.names))
        return Decoded(table, tuple(bad.rejections)), stop


def _typed(decoded: Decoded, schema: pa.Schema | None) -> Decoded:
    """Records whose values are text, with numbers where all values are numbers."""
    kinds = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
    names, values = decoded.table.column_names, decoded.table.columns
    columns = [_as_numbers(*pair) for pair in zip(values, map(kinds.get, names), strict=True)]
    return replace(decoded, table=pa.Table.from_arrays(columns, names=names))


def _records(text: bytes, dialect: CsvDialect) -> Iterator[tuple[list[str], int, int]]:
    """Records, the line on which each begins, counted from 1, and the byte at which it ends."""
    csv.field_size_limit(2**31 - 1)
    consumed, line = 0, 1

    def lines() -> Iterator[str]:
        nonlocal consumed
        for item in io.StringIO(text.decode("utf-8", "surrogateescape"), newline=""):
            consumed += len(item.encode("utf-8", "surrogateescape"))
            yield item

    reader = csv.reader(
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
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if filled.null_count == len(filled):
        return pa.chunked_array([pa.nulls(len(column), known or pa.null())])
    if known is None or not pa.types.is_floating(known):
        try:
            integers = filled.cast(pa.int64())
            if integers.cast(pa.string()).equals(filled):
                return integers
        except pa.ArrowException:
            pass
    if not pc.all(pc.match_substring_regex(filled, _DECIMAL)).as_py():
        return column
    try:
        decimals = filled.cast(pa.float64())
    except pa.ArrowException:
        return column
    return decimals if pc.all(pc.is_finite(decimals)).as_py() else column
