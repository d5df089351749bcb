"""What all formats share: datasets, units and blocks.

A file is planned as ``Unit``s, which can be opened on their own: row groups, record batches, a byte
range of lines, or the whole file where nothing smaller can be found without reading. A unit gives
its ``Block``s in order; a block is small, decodes on any thread, and always gives the same rows.
Splitting (which may decompress) is sequential, decoding is parallel.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import ConflictError, DataError
from fast_axolotl.reading.storage import Source

PART_BLOCKS = 4
"""What is decoded together may take so many blocks in memory; more comes in parts."""

_COMPRESSED_EXPANSION = 4
"""Rough ratio of text to its compressed form: only used to weigh files against each other."""

_OFFSET_BYTES = 4
_LARGE = (pa.LargeStringArray, pa.LargeBinaryArray, pa.LargeListArray)
_WITH_OFFSETS = (pa.StringArray, pa.BinaryArray, pa.ListArray, *_LARGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvDialect:
    """The dialect of a CSV file; values that are ``None`` are detected from its first rows."""

    delimiter: str | None = None
    """One character between the fields."""
    quote: str = '"'
    """One character around fields that hold delimiters or newlines; doubled inside them."""
    escape: str | None = None
    """One character before a literal quote or delimiter, where the writer did not double quotes."""
    column_names: tuple[str, ...] | None = None
    """Names for a file without a header line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a format needs to know to read a file."""

    on_error: Literal["raise", "skip"] = "raise"
    csv: CsvDialect = field(default_factory=CsvDialect)
    columns: tuple[str, ...] | None = None
    block_bytes: int = 8 * 1024 * 1024
    """Size of a block before decoding; a single larger row makes a larger block."""
    unit_bytes: int = 4 * 1024 * 1024
    """Size of the byte ranges of line files."""
    may_widen: bool = False
    """Whether types may still change: while they are inferred, before any batch is given out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A row, a part of a file or a file that could not be read and was skipped."""

    path: str
    place: str
    reason: str
    num_rows: int | None
    """``None`` if the number of lost rows is unknown."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows of a block and the ones that had to be left out."""

    table: pa.Table
    rejections: tuple[Rejection, ...] = ()
    more: Iterable[Block] = ()
    """The rest of the block, where all of it at once would take too much memory.

    Where it is cut follows from the block alone, so that a resumed pass finds the same parts.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A part of a file that can be opened on its own."""

    file: int
    """Index in the list of files."""
    start: int
    """First row group, record batch or byte."""
    stop: int
    """One past the last."""
    num_bytes: int
    """Its weight when work is dealt out: encoded bytes, estimated where compressed."""
    num_rows: int | None = None
    """The number of rows where the file's own metadata tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows that are decoded together."""

    decode: Callable[[pa.Schema | None], Decoded]
    """The rows. ``schema`` is what is known so far; the result may be wider, never guessed."""
    weight: int = 0
    """Encoded bytes: a property of the file alone, never of how it is read."""
    num_rows: int | None = None
    """The number of rows where it is known without decoding."""
    count: Callable[[], int] | None = None
    """Counts the rows of a block without errors, where that needs no decoding."""
    is_text: bool = False
    """Whether values can be had as they were written: by decoding once more under a new schema."""
    text_wins: bool = False
    """Whether a clash of text with a number means that the column is text (CSV)."""
    keys: tuple[tuple[str, pa.Scalar], ...] = ()
    """Columns that the folders tell, in place of its own of these names."""


def ready_block(table: pa.Table, weight: int = 0) -> Block:
    """Rows that are decoded already."""
    return Block(decode=lambda _: Decoded(table), weight=weight)


def or_broken(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks; where splitting fails, one in its place that raises the reason when decoded."""
    try:
        yield from blocks
    except DataError as reason:
        error = reason

        def decode(schema: pa.Schema | None) -> Decoded:
            raise error

        yield Block(decode=decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file and what it turned out to be. Each format has its own way to cut it up."""

    source: Source
    format: str
    compression: str | None = None
    options: ReadOptions
    schema: pa.Schema | None = None
    """Exact where the file declares it, ``None`` where it is inferred from the rows."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files that it stands for, where many small ones are read as one."""
        return (self.source,)

    def units(self, file: int) -> list[Unit]:
        """The units of the file in order: one where it can only be read from its beginning."""
        size = max(1, self.source.num_bytes)
        weight = size * (_COMPRESSED_EXPANSION if self.compression else 1)
        return [Unit(file=file, start=0, stop=size, num_bytes=weight)]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        """The blocks of a unit in order; always the same ones."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile(InputFile):
    """Stands for a file that could not be opened, where such files are to be skipped."""

    error: DataError
    schema: pa.Schema | None = field(default_factory=lambda: pa.schema([]))

    def blocks(self, unit: Unit) -> Iterator[Block]:
        yield from ()
        raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Opened files and how they are cut up."""

    files: tuple[InputFile, ...]
    options: ReadOptions
    window_bytes: int
    """How much is shuffled together."""

    @property
    def fingerprint(self) -> str:
        """A short hash of the file list (base name, size and format of each) and the columns.

        A mapped file, or small ones put together, differ from the same ones on remote storage:
        their units are other ones.
        """
        lines = [
            f"{PurePosixPath(source.identity).name}\t{source.num_bytes}\t{file.format}"
            f"{', mapped' if hasattr(file, 'batches') else ''}"
            f"{', joined' if len(file.sources) > 1 else ''}"
            for file in self.files
            for source in file.sources
        ]
        text = "\n".join([*lines, repr(self.options.columns)])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def units(self) -> list[Unit]:
        return [unit for index, file in enumerate(self.files) for unit in file.units(index)]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        """A unit's blocks; where splitting fails, a block that says so in its place."""
        file = self.files[unit.file]
        blocks = or_broken(file.blocks(unit))
        keys = file.source.keys
        return (replace(block, keys=keys) for block in blocks) if keys else blocks

    def with_options(self, **changes: Any) -> Dataset:
        options = replace(self.options, **changes)
        files = tuple(replace(file, options=options) for file in self.files)
        return replace(self, options=options, files=files)


def rejection_of(error: DataError, num_rows: int | None = None) -> Rejection:
    return Rejection(path=error.path, place=error.place, reason=error.message, num_rows=num_rows)


def decode_or_reject(block: Block, schema: pa.Schema | None, options: ReadOptions) -> Decoded:
    """The rows of a block; where it cannot be read and skipping is wanted, the rejection of it."""
    keys = dict(block.keys)
    if schema is not None and keys:
        schema = pa.schema([field for field in schema if field.name not in keys])
    try:
        decoded = block.decode(schema)
    except ConflictError:
        raise
    except DataError as error:
        if options.on_error == "raise":
            raise
        return Decoded(pa.table({}), (rejection_of(error, block.num_rows),))
    table, more, columns = decoded.table, decoded.more, options.columns
    if keys:
        table = table.drop_columns([name for name in keys if name in table.column_names])
        for name, value in keys.items() if table.num_rows else ():
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        more = more and (replace(part, keys=block.keys) for part in more)
    if columns is not None and table.num_columns:
        table = table.select([name for name in columns if name in table.schema.names])
    return Decoded(table, decoded.rejections, more)


def check_names(names: Sequence[str], path: str, place: str = "", cure: str = "") -> None:
    """Refuses a file with two columns of one name."""
    if len(set(names)) < len(names):
        repeated = min(name for name, count in Counter(names).items() if count > 1)
        message = f"two columns have the name {repeated!r}; rename one {cure}".rstrip()
        raise DataError(message, path=path, place=place)


def value_bytes(data: pa.Table | pa.RecordBatch) -> int:
    """The size of the values alone: buffers also hold what depends on how a block was decoded."""
    if width := fixed_row_bytes(data.schema):  # there may be thousands of columns
        return int(width * data.num_rows)
    return sum(
        _array_bytes(chunk)
        for column in data.columns
        for chunk in getattr(column, "chunks", (column,))
    )


def fixed_row_bytes(schema: pa.Schema) -> float:
    """What the values of a row take, or 0 where rows differ."""
    num_bits = 0
    for kind in schema.types:
        if not pa.types.is_primitive(kind):
            return 0.0
        num_bits += int(kind.bit_width)
    return num_bits / 8


def _array_bytes(array: pa.Array) -> int:
    """Constant time a column: the first and the last offset say how much lies between."""
    kind, types = array.type, pa.types
    if len(array) == 0 or types.is_null(kind):
        return 0
    if isinstance(array, _WITH_OFFSETS):
        width = np.int64 if isinstance(array, _LARGE) else np.int32
        first, last = np.frombuffer(array.buffers()[1], width)[array.offset :][[0, len(array)]]
        size = int(last - first)
        if isinstance(array, pa.ListArray | pa.LargeListArray):
            size = _array_bytes(array.values.slice(first, size))
        return _OFFSET_BYTES * len(array) + size
    if types.is_primitive(kind):
        return int(kind.bit_width) * len(array) // 8
    if types.is_struct(kind):
        return sum(_array_bytes(array.field(index)) for index in range(kind.num_fields))
    if types.is_dictionary(kind):
        # As decoded: the dictionary itself is that of all rows of its file.
        values = array.dictionary
        mean_bytes = _array_bytes(values) / max(1, len(values))
        return _array_bytes(array.indices) + int(len(array) * mean_bytes)
    return int(array.nbytes)
