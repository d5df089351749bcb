"""CSV and TSV: quoted newlines, detected dialects, numbers only where every value is one.

Blocks are cut at line ends outside quotes, found by counting quotes, and parsed in parallel by
pyarrow. That is exact as long as every quote opens or closes a field; at the first one that does
not, the rest of the file goes through Python's ``csv`` module, which is slower and reads such files
the way most tools do. The same holds for dialects with an escape character.

Where a record begins depends on every quote before it. So a file is one unit, until one pass over
it (``find_edges``) has shown that its quotes are regular and where stretches of records begin: then
each stretch is a unit that is read on its own.

A column is a number only where every value is a plain one. A plain integer prints back as it was
written; a plain decimal has no leading zero. So "08123" is text, and its column with it. Empty
fields are null in a number column, and stay empty text in a text column. Nothing else is guessed:
dates, booleans and "NA" are text.
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise, zip_longest
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, CsvDialect, Decoded, ReadOptions, Rejection, Unit
from fast_axolotl.reading.lines import (
    BOM,
    MOST_BLOCK_BYTES,
    Lines,
    line_at,
    whole_file,
)
from fast_axolotl.reading.storage import Source, Supply, head_of, open_chunks

_CANDIDATES = ",\t;|"
_SNIFF_BYTES = 64 * 1024
_SNIFF_ROWS = 50
_SLOW_BLOCK_ROWS = 10_000

_DECIMAL = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_LONG_BYTES, _LONG_INTEGER = 16, r"^-?[0-9]{16,}$"
"""Integers that a float might round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """One CSV file with its settled dialect and column names."""

    source: Source
    compression: str | None
    options: ReadOptions
    dialect: CsvDialect
    names: tuple[str, ...]
    schema: pa.Schema | None = None
    edges: tuple[int, ...] | None = None
    """Where stretches of records begin, then the end of the file; ``None`` where not known."""

    @classmethod
    def open(cls, source: Source, compression: str | None, options: ReadOptions) -> CsvFile:
        head = head_of(source, compression, _SNIFF_BYTES).removeprefix(BOM)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                "the file is UTF-16; convert it to UTF-8", path=source.path, place="line 1"
            )
        dialect = options.csv
        if dialect.delimiter is None:
            is_tsv = ".tsv" in PurePosixPath(source.path).name.lower()
            delimiter = "\t" if is_tsv else _detect_delimiter(head, dialect)
            dialect = replace(dialect, delimiter=delimiter)
        text = io.StringIO(head.decode("utf-8", "replace"), newline="")
        names = dialect.column_names or tuple(
            next((record for record, _ in _records(text, dialect) if record), [])
        )
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise DataError(
                f"two columns have the name {min(repeated)!r}; rename one in the header, or pass "
                "csv=CsvDialect(column_names=...)",
                path=source.path,
                place="line 1",
            )
        return cls(
            source=source, compression=compression, options=options, dialect=dialect, names=names
        )

    @property
    def block_bytes(self) -> int:
        return min(self.options.block_bytes, MOST_BLOCK_BYTES)

    def units(self, file: int) -> list[Unit]:
        if self.edges is None:
            return whole_file(self.source, self.compression, file)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=stop - start)
            for start, stop in pairwise(self.edges)
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        if self.edges is not None:
            # Neighbouring stretches together, read where they are decoded.
            start, size = unit.start, self.block_bytes
            first, last = bisect_right(self.edges, start), bisect_right(self.edges, unit.stop)
            stops = self.edges[first:last]
            for stop, following in zip_longest(stops, stops[1:]):
                if following is None or following - start > size:
                    load = partial(self._read, start, stop)
                    yield _CsvBlock(file=self, weight=stop - start, load=load)
                    start = stop
            return
        cutter = _Cutter(self)
        for lines in cutter.run():
            yield _CsvBlock(file=self, weight=lines.stop - lines.start, load=partial(Lines, *lines))
        if cutter.rest is not None:
            yield from _slow_blocks(self, cutter.rest, cutter.offset)

    def _read(self, start: int, stop: int) -> Lines:
        return Lines(self.source.read_at(start, stop - start), 0, stop - start, start)

    def find_edges(self) -> list[int] | None:
        """The first record, then one about every ``unit_bytes``, then the end of the file.

        One sequential pass over a plain file; the result follows from the data and ``unit_bytes``
        alone. ``None`` where there is an escape character, or a quote that is out of place.
        """
        cutter, edges, step = _Cutter(self), list[int](), self.options.unit_bytes
        for data, start, stop, offset in cutter.run():
            edges, shift = edges or [offset], offset - start
            while (target := edges[-1] + step - shift) < stop:
                end = data.find(b"\n", target, stop)
                while (before := int(np.searchsorted(cutter.quotes, end))) % 2:
                    end = data.find(b"\n", int(cutter.quotes[before]), stop)
                edges.append(shift + (end + 1 or stop))
        return sorted({*edges, self.source.num_bytes}) if cutter.rest is None else None

    def line_at(self, offset: int) -> int:
        return line_at(self.source, self.compression, offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CsvBlock:
    """A block of whole records."""

    file: CsvFile
    weight: int
    load: Callable[[], Lines]
    text_wins: bool = True
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        dialect, names = self.file.dialect, self.file.names
        data, start, stop, offset = self.load()
        try:
            table = pacsv.read_csv(
                pa.BufferReader(pa.py_buffer(data).slice(start, stop - start)),
                read_options=pacsv.ReadOptions(
                    use_threads=False, block_size=stop - start + 1, column_names=names
                ),
                parse_options=pacsv.ParseOptions(
                    delimiter=dialect.delimiter, quote_char=dialect.quote, newlines_in_values=True
                ),
                convert_options=pacsv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
                ),
            )
        except (pa.ArrowException, UnicodeDecodeError):
            pass
        else:
            # pyarrow takes a byte order mark away, which is a value's own at the start of a block.
            if not data.startswith(BOM, start):
                return Decoded(_typed(table, schema))
        # The same block through Python, which tells the line of whatever is wrong.
        text = io.StringIO(data[start:stop].decode("utf-8", "surrogateescape"), newline="")
        block = _ParsedBlock(self.file, offset)
        for record, line in _records(text, dialect):
            block.add(record, line)
        return block.decode(schema)


@dataclass(slots=True)
class _ParsedBlock:
    """Records found by Python's csv module; unfit ones are refused or rejected with their line."""

    file: CsvFile
    offset: int
    """Where the first record begins in the decompressed file."""
    weight: int = 0
    text_wins: bool = True
    num_rows: int | None = None
    values: list[list[str]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)

    def add(self, record: list[str], line: int) -> None:
        self.weight += sum(map(len, record)) + len(record)
        if not record:
            return
        expected = len(self.file.names)
        if len(record) != expected:
            cause = f"expected {expected} fields, found {len(record)}"
        elif any("\udc80" <= char <= "\udcff" for value in record for char in value):
            cause = "invalid UTF-8"
        else:
            self.values.append(record)
            return
        place = f"line {self.file.line_at(self.offset) + line - 1}"
        if self.file.options.on_error == "raise":
            cure = 'fix the row, or pass on_error="skip" to skip and count such rows'
            raise DataError(f"{cause}; {cure}", path=self.file.source.path, place=place)
        self.rejections.append(
            Rejection(path=self.file.source.path, place=place, reason=cause, num_rows=1)
        )

    def decode(self, schema: pa.Schema | None) -> Decoded:
        columns = zip(*self.values, strict=True) if self.values else [[] for _ in self.file.names]
        arrays = [pa.array(list(values), type=pa.string()) for values in columns]
        table = pa.Table.from_arrays(arrays, names=list(self.file.names))
        return Decoded(_typed(table, schema), tuple(self.rejections))


class _Cutter:
    """Cuts a file at line ends outside quotes, for as long as its quotes are regular."""

    def __init__(self, file: CsvFile) -> None:
        self._file = file
        self._quote = ord(file.dialect.quote)
        self._may_stand_beside = np.zeros(256, dtype=bool)
        neighbours = f"{file.dialect.delimiter}\r\n{file.dialect.quote}".encode()
        self._may_stand_beside[list(neighbours)] = True
        self.rest: Iterator[bytes] | None = None
        """What was left when a quote was found that neither opens nor closes a field."""
        self.offset = 0
        """Where that begins in the decompressed file."""
        self.quotes = np.zeros(0, dtype=np.int64)
        """Where quotes are in the text that was cut last."""

    def run(self) -> Iterator[Lines]:
        file = self._file
        if file.dialect.escape is not None:
            self.rest = open_chunks(file.source, file.compression, file.options.block_bytes)
            return
        text = Supply(file.source, file.compression, file.block_bytes)
        if text.held.startswith(BOM):
            text.advance(len(BOM))
        has_header = file.dialect.column_names is None
        while True:
            held, offset, is_last = text.held, text.offset, text.ended
            end = self._cut(held, is_last)
            if end is None:
                self.rest, self.offset = text.rest(), offset
                return
            if is_last and held and end <= len(held):
                raise DataError(
                    "a quoted field is not closed: the file is truncated, or a quote is missing; "
                    "fix the quote, or replace the file with an intact copy",
                    path=file.source.path,
                    place=f"line {file.line_at(offset + end)}",
                )
            end = min(end, len(held))
            start = self._header_end(held, end) if has_header else 0
            has_header = has_header and start == 0
            if is_last or (end > start and not has_header):
                yield Lines(held, start, end, offset + start)
            if is_last:
                return
            text.advance(end)

    def _cut(self, text: bytes, is_last: bool) -> int | None:
        """The end of the last whole record; ``None`` where a quote is out of place.

        The last one is past the end of the text, unless a quote is still open there.
        """
        if is_last:
            text = text + b"\n"  # not in place: the text may be a buffer that is used again
        raw = np.frombuffer(text, dtype=np.uint8)
        self.quotes = quotes = np.flatnonzero(raw == self._quote)
        opening, closing = quotes[0::2], quotes[1::2]
        before = raw[opening[opening > 0] - 1]
        after = raw[closing[closing < len(raw) - 1] + 1]
        if not (self._may_stand_beside[before].all() and self._may_stand_beside[after].all()):
            return None
        end = text.rfind(b"\n")
        while end >= 0 and (num_before := int(np.searchsorted(quotes, end))) % 2:
            end = text.rfind(b"\n", 0, int(quotes[num_before - 1]))  # before the field it is in
        return end + 1

    def _header_end(self, block: bytes, stop: int) -> int:
        """The offset after the first record of ``block[:stop]`` that is not empty."""
        head = block[: block.find(b"\n", _SNIFF_BYTES, stop) + 1 or stop]
        text = io.StringIO(head.decode("utf-8", "surrogateescape"), newline="")
        consumed = 0

        def counted() -> Iterator[str]:
            nonlocal consumed
            for line in text:
                consumed += len(line.encode("utf-8", "surrogateescape"))
                yield line

        records = _records(counted(), self._file.dialect)
        return consumed if any(record for record, _ in records) else 0


def _slow_blocks(file: CsvFile, chunks: Iterator[bytes], offset: int) -> Iterator[Block]:
    """The rest of a file through Python's csv module."""
    encoding = "utf-8-sig" if offset == 0 else "utf-8"
    raw = io.BufferedReader(_Feed(chunks))
    text = io.TextIOWrapper(raw, encoding=encoding, errors="surrogateescape", newline="")
    records = _records(text, file.dialect)
    if offset <= len(BOM) and file.dialect.column_names is None:
        next((record for record, _ in records if record), None)
    block = _ParsedBlock(file, offset)
    failure: DataError | None = None
    try:
        for record, line in records:
            block.add(record, line)
            if len(block.values) >= _SLOW_BLOCK_ROWS or block.weight >= file.options.block_bytes:
                yield block
                block = _ParsedBlock(file, offset)
    except DataError as error:
        failure = error  # first what came before it
    yield block
    if failure is not None:
        raise failure


class _Feed(io.RawIOBase):
    """Chunks as a raw stream."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._held:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._held = memoryview(chunk)
        length = min(len(buffer), len(self._held))
        buffer[:length] = self._held[:length]
        self._held = self._held[length:]
        return length


def _records(text: Iterable[str], dialect: CsvDialect) -> Iterator[tuple[list[str], int]]:
    """Records, and the line on which each begins, counted from 1."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(
        text,
        delimiter=dialect.delimiter or ",",
        quotechar=dialect.quote,
        escapechar=dialect.escape,
        doublequote=dialect.escape is None,
    )
    line = 1
    for record in reader:
        yield record, line
        line = reader.line_num + 1


def _detect_delimiter(head: bytes, dialect: CsvDialect) -> str:
    """The candidate that splits the first records into the most fields, all alike."""
    text = head.decode("utf-8", "replace")
    best, most = ",", 1
    for candidate in _CANDIDATES:
        records = _records(io.StringIO(text, newline=""), replace(dialect, delimiter=candidate))
        widths = [len(record) for record, _ in islice(records, _SNIFF_ROWS) if record]
        if len(head) == _SNIFF_BYTES:
            widths = widths[:-1] or widths
        if widths and min(widths) == max(widths) > most:
            best, most = candidate, widths[0]
    return best


def _typed(table: pa.Table, schema: pa.Schema | None) -> pa.Table:
    """Text columns turned into numbers where the values, and what is known so far, allow it."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        known = schema.field(name).type if schema is not None and name in schema.names else None
        is_text = known is not None and pa.types.is_string(known)
        columns.append(column if is_text else _as_numbers(column, known))
    return pa.Table.from_arrays(columns, names=table.column_names)


def _as_numbers(column: pa.ChunkedArray, known: pa.DataType | None) -> pa.ChunkedArray:
    """Integers, else decimals, else the text itself."""
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
    has_long = pc.max(pc.binary_length(filled)).as_py() >= _LONG_BYTES
    if has_long and pc.any(pc.match_substring_regex(filled, _LONG_INTEGER)).as_py():
        return column
    try:
        decimals = filled.cast(pa.float64())
    except pa.ArrowException:
        return column
    return decimals if pc.all(pc.is_finite(decimals)).as_py() else column
