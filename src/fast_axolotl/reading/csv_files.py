"""CSV and TSV: quoted newlines, detected dialects, numbers only where every value is one.

Blocks are cut at line ends outside quotes, found by counting quotes with numpy, and parsed by
pyarrow in parallel. That is exact as long as every quote opens or closes a field; at the first one
that does not, the rest of the file goes through Python's ``csv`` module, which is slower and reads
such files the way most tools do. The same holds for dialects with an escape character.

A column is a number only if every value is a *plain* one: an integer that prints back as itself, or
a decimal without a leading zero. "08123" is text, and so is its whole column from there on. Empty
fields are null in a number column and empty text in a text column.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, CsvDialect, Decoded, ReadOptions, Rejection, Unit
from fast_axolotl.reading.compression import head_of, open_chunks
from fast_axolotl.reading.lines import BOM, whole_file
from fast_axolotl.reading.storage import Source

__all__ = ["CsvBlock", "CsvFile"]

_CANDIDATES = ",\t;|"
_SNIFF_BYTES = 256 * 1024
_SNIFF_ROWS = 50
_DECIMAL = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_LONG_INTEGER = r"^-?[0-9]{16,}$"
_SLOW_BLOCK_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """One CSV file with its settled dialect and column names."""

    source: Source
    compression: str | None
    options: ReadOptions
    dialect: CsvDialect
    names: tuple[str, ...]
    schema: pa.Schema | None = None

    @classmethod
    def open(cls, source: Source, compression: str | None, options: ReadOptions) -> CsvFile:
        head = head_of(source, compression, _SNIFF_BYTES).removeprefix(BOM)
        dialect = _settle(options.csv, head, source.path)
        names = dialect.column_names or _header(head, dialect)
        _refuse_repeats(names, source.path)
        return cls(
            source=source, compression=compression, options=options, dialect=dialect, names=names
        )

    def units(self, file: int) -> list[Unit]:
        return whole_file(self.source, self.compression, file)

    def blocks(self, unit: Unit) -> Iterator[Block]:
        cutter = _Cutter(self)
        for data, line in cutter.run():
            yield CsvBlock(file=self, weight=len(data), data=data, first_line=line)
        if cutter.rest is not None:
            yield from _slow_blocks(self, cutter.rest, cutter.line)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvBlock:
    """A block of whole records."""

    file: CsvFile
    weight: int
    data: bytes
    first_line: int
    text_wins: bool = True
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        unfit: list[pacsv.InvalidRow] = []

        def note(row: pacsv.InvalidRow) -> str:
            unfit.append(row)
            return "skip"

        try:
            table = self._parse(note)
        except (pa.ArrowException, UnicodeDecodeError):
            return self._row_by_row(schema)
        return self._row_by_row(schema) if unfit else Decoded(_typed(table, schema))

    def _parse(self, note: Callable[[pacsv.InvalidRow], str]) -> pa.Table:
        dialect = self.file.dialect
        return pacsv.read_csv(
            pa.BufferReader(self.data),
            read_options=pacsv.ReadOptions(
                use_threads=False, block_size=len(self.data) + 1, column_names=self.file.names
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=dialect.quote,
                newlines_in_values=True,
                invalid_row_handler=note,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(self.file.names, pa.string()), strings_can_be_null=False
            ),
        )

    def _row_by_row(self, schema: pa.Schema | None) -> Decoded:
        """The same block through Python, which tells the line of whatever is wrong."""
        text = self.data.decode("utf-8", "surrogateescape")
        rows = _Rows(self.file, self.first_line)
        for record, line, _ in _records(io.StringIO(text, newline=""), self.file.dialect):
            rows.add(record, line)
        return rows.decoded(schema)


@dataclass(slots=True)
class _Rows:
    """Records gathered one by one, the unfit ones refused or rejected with their line."""

    file: CsvFile
    first_line: int
    values: list[list[str]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)

    def add(self, record: list[str], line: int) -> None:
        if not record:
            return
        cause = self._fault(record)
        if cause is None:
            self.values.append(record)
            return
        place = f"line {self.first_line + line - 1}"
        if self.file.options.on_error == "raise":
            cure = 'mend the row, or pass on_error="skip" to leave it out and count it'
            raise DataError(f"{cause}; {cure}", path=self.file.source.path, place=place)
        self.rejections.append(
            Rejection(path=self.file.source.path, place=place, reason=cause, num_rows=1)
        )

    def _fault(self, record: list[str]) -> str | None:
        expected = len(self.file.names)
        if len(record) != expected:
            return f"expected {expected} fields, found {len(record)}"
        if any("\udc80" <= char <= "\udcff" for value in record for char in value):
            return "bytes that are not UTF-8"
        return None

    def decoded(self, schema: pa.Schema | None) -> Decoded:
        columns = zip(*self.values, strict=True) if self.values else [[] for _ in self.file.names]
        arrays = [pa.array(list(values), type=pa.string()) for values in columns]
        table = pa.Table.from_arrays(arrays, names=list(self.file.names))
        return Decoded(_typed(table, schema), tuple(self.rejections))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedBlock:
    """A block that Python's csv module has already parsed."""

    rows: _Rows
    weight: int
    text_wins: bool = True
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        return self.rows.decoded(schema)


@dataclass(slots=True)
class _Cutter:
    """Cuts a file at line ends outside quotes, for as long as its quotes are regular."""

    file: CsvFile
    line: int = 1
    rest: Iterator[bytes] | None = None
    """What was left when a quote was found that neither opens nor closes a field."""

    def run(self) -> Iterator[tuple[bytes, int]]:
        size = self.file.options.block_bytes
        chunks = open_chunks(self.file.source, self.file.compression, size)
        held, skip_header = b"", self.file.dialect.column_names is None
        if self.file.dialect.escape is not None:
            self.rest = chunks
            return
        for index, chunk in enumerate(chunks):
            held += chunk.removeprefix(BOM) if index == 0 else chunk
            end = self._cut(held)
            if end is None:
                self.rest = chain([held], chunks)
                return
            block, held = held[:end], held[end:]
            if skip_header and block:
                block, skip_header = self._without_header(block), False
            yield block, self.line
            self.line += block.count(b"\n")
        yield from self._last(held, skip_header)

    def _last(self, held: bytes, skip_header: bool) -> Iterator[tuple[bytes, int]]:
        end = self._cut(held + b"\n")
        if end is None:
            self.rest = iter([held])
            return
        if held and end <= len(held):
            raise DataError(
                "a quoted field is not closed: the file is cut off, or a quote is missing; fetch "
                "it again or mend it",
                path=self.file.source.path,
                place=f"after line {self.line + held.count(10, 0, end)}",
            )
        yield (self._without_header(held) if skip_header else held), self.line

    def _cut(self, text: bytes) -> int | None:
        """The end of the last whole record; ``None`` where a quote is out of place."""
        raw = np.frombuffer(text, dtype=np.uint8)
        quote = ord(self.file.dialect.quote)
        quotes = np.flatnonzero(raw == quote)
        if not len(quotes):
            return text.rfind(b"\n") + 1
        beside = np.frombuffer((self.file.dialect.delimiter or ",").encode() + b"\r\n", np.uint8)
        beside = np.append(beside, quote)
        opening, closing = quotes[0::2], quotes[1::2]
        before = raw[opening[opening > 0] - 1]
        after = raw[closing[closing < len(raw) - 1] + 1]
        if not (np.isin(before, beside).all() and np.isin(after, beside).all()):
            return None
        ends = np.flatnonzero(raw == ord("\n"))
        outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
        return int(outside[-1]) + 1 if len(outside) else 0

    def _without_header(self, block: bytes) -> bytes:
        """The block after its first record that is not empty."""
        text = io.StringIO(block.decode("utf-8", "surrogateescape"), newline="")
        records = _records(text, self.file.dialect)
        consumed = _offset_of_line(block, next((end for record, _, end in records if record), 0))
        self.line += block.count(b"\n", 0, consumed)
        return block[consumed:]


def _offset_of_line(block: bytes, line: int) -> int:
    """The offset after so many lines."""
    offset = 0
    for _ in range(line):
        end = block.find(b"\n", offset)
        if end < 0:
            return len(block)
        offset = end + 1
    return offset


def _slow_blocks(file: CsvFile, chunks: Iterator[bytes], first_line: int) -> Iterator[Block]:
    """The rest of a file through Python's csv module."""
    encoding = "utf-8-sig" if first_line == 1 else "utf-8"
    raw = io.BufferedReader(_Feed(chunks))
    text = io.TextIOWrapper(raw, encoding=encoding, errors="surrogateescape", newline="")
    records = _records(text, file.dialect)
    if first_line == 1 and file.dialect.column_names is None:
        next((record for record, _, _ in records if record), None)
    rows, weight = _Rows(file, first_line), 0
    for record, line, _ in records:
        rows.add(record, line)
        weight += sum(map(len, record)) + len(record)
        if len(rows.values) >= _SLOW_BLOCK_ROWS or weight >= file.options.block_bytes:
            yield _ParsedBlock(rows=rows, weight=weight)
            rows, weight = _Rows(file, first_line), 0
    yield _ParsedBlock(rows=rows, weight=weight)


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


def _records(text: io.TextIOBase, dialect: CsvDialect) -> Iterator[tuple[list[str], int, int]]:
    """Records, and the lines on which each begins and ends, counted from 1."""
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
        yield record, line, reader.line_num
        line = reader.line_num + 1


def _settle(told: CsvDialect, head: bytes, path: str) -> CsvDialect:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("the file is UTF-16; convert it to UTF-8", path=path, place="line 1")
    if told.delimiter is not None:
        return told
    if ".tsv" in path.lower():
        return replace(told, delimiter="\t")
    return replace(told, delimiter=_detect_delimiter(head, told))


def _detect_delimiter(head: bytes, told: CsvDialect) -> str:
    """The candidate that splits the first records into the most fields, all alike."""
    text = head.decode("utf-8", "replace")
    best, most = ",", 1
    for candidate in _CANDIDATES:
        records = _records(io.StringIO(text, newline=""), replace(told, delimiter=candidate))
        widths = [len(record) for record, _, _ in islice(records, _SNIFF_ROWS) if record]
        if len(head) == _SNIFF_BYTES:
            widths = widths[:-1] or widths
        if widths and min(widths) == max(widths) > most:
            best, most = candidate, widths[0]
    return best


def _header(head: bytes, dialect: CsvDialect) -> tuple[str, ...]:
    text = io.StringIO(head.decode("utf-8", "replace"), newline="")
    return tuple(next((record for record, _, _ in _records(text, dialect) if record), []))


def _refuse_repeats(names: tuple[str, ...], path: str) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise DataError(
            f"two columns are called {min(repeated)!r}; rename one in the header, or pass "
            "CsvDialect(column_names=...)",
            path=path,
            place="line 1",
        )


def _typed(table: pa.Table, schema: pa.Schema | None) -> pa.Table:
    """Text columns turned into numbers where the values, and what is known so far, allow it."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        known = schema.field(name).type if schema is not None and name in schema.names else None
        is_text = known is not None and pa.types.is_string(known)
        columns.append(column if is_text else _as_numbers(column, known))
    return pa.Table.from_arrays(columns, names=table.column_names)


def _as_numbers(column: pa.ChunkedArray, known: pa.DataType | None) -> pa.ChunkedArray:
    if len(column) == 0:
        return column.cast(known or pa.null())
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if filled.null_count == len(filled):
        return column if known is None or pa.types.is_null(known) else filled.cast(known)
    integers = None if known is not None and pa.types.is_floating(known) else _as_integers(filled)
    if integers is not None:
        return integers
    decimals = _as_decimals(filled)
    return column if decimals is None else decimals


def _as_integers(values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Plain integers: those that print back as they were written."""
    try:
        integers = values.cast(pa.int64())
    except pa.ArrowException:
        return None
    return integers if integers.cast(pa.string()).equals(values) else None


def _as_decimals(values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Plain decimals, unless one is an integer that a float cannot hold."""
    if not pc.all(pc.match_substring_regex(values, _DECIMAL)).as_py():
        return None
    if pc.any(pc.match_substring_regex(values, _LONG_INTEGER)).as_py():
        return None
    try:
        return values.cast(pa.float64())
    except pa.ArrowException:
        return None
