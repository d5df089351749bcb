"""Parquet, Arrow IPC (file and stream) and Feather.

Units are row groups and record batches. A row group that is small is read whole, which decodes
nested columns three times faster than reading it in slices; a large one is streamed page by page,
so that memory does not depend on how the file was written. An Arrow stream has no index: it is one
unit, read front to back. Every batch is validated in full, since damaged offsets would otherwise
crash whoever touches them; that costs about a fifth of a Parquet read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Decoded, ReadOptions, Unit
from fast_axolotl.reading.remote import parquet_runs
from fast_axolotl.reading.storage import Source

__all__ = ["ArrowFile", "ParquetFile", "open_arrow", "open_parquet"]

_WHOLE_GROUP_BLOCKS = 4
"""A row group of up to so many blocks is read at once."""

_PAGE_BUFFER_BYTES = 1024 * 1024
"""Read-ahead per column while a large row group is streamed."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a writer of the Arrow stream form puts last; before 2019 without the first half."""

_DECODE_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError)
"""What pyarrow raises on damaged files. Its index and key errors are ArrowExceptions too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """A Parquet file whose footer has been read."""

    source: Source
    label: str
    """The path to show in messages: that of the file before it was spooled."""
    metadata: pq.FileMetaData
    schema: pa.Schema
    columns: list[str]
    """The ones that are read."""
    names: list[str]
    """All columns of the file."""
    options: ReadOptions
    keep_alive: Any = None

    def units(self, file: int) -> list[Unit]:
        groups = [self.metadata.row_group(index) for index in range(self.metadata.num_row_groups)]
        return [
            Unit(file=file, start=index, stop=index + 1, num_bytes=max(1, group.total_byte_size))
            for index, group in enumerate(groups)
            if group.num_rows
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        for part in self.units(unit.file):
            if unit.start <= part.start < unit.stop:
                yield from self._blocks(part)

    def _blocks(self, unit: Unit) -> Iterator[Block]:
        index, num_rows = unit.start, self.metadata.row_group(unit.start).num_rows
        if unit.num_bytes <= _WHOLE_GROUP_BLOCKS * self.options.block_bytes:
            yield _RowGroup(file=self, index=index, weight=unit.num_bytes, num_rows=num_rows)
            return
        step = max(1, num_rows * self.options.block_bytes // unit.num_bytes)
        weight, seen = max(1, unit.num_bytes * step // num_rows), 0
        place = f"row group {index}"
        with _named(self.label, place):
            file = self.open(buffer_size=_PAGE_BUFFER_BYTES)
            batches = file.iter_batches(
                step, row_groups=[index], columns=self.columns, use_threads=False
            )
            for batch in batches:
                seen += batch.num_rows
                yield _Ready(self.label, place, pa.Table.from_batches([batch]), weight)
        self.check_count(index, seen)

    @property
    def may_use_pool(self) -> bool:
        """pyarrow's own threads must not hold Python files: at exit they could abort it all."""
        return self.options.parallel_columns and self.source.filesystem is None

    def open(self, **settings: Any) -> pq.ParquetFile:
        return pq.ParquetFile(
            self.source.open_arrow(),
            metadata=self.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
            **settings,
        )

    def check_count(self, index: int, seen: int) -> None:
        expected = self.metadata.row_group(index).num_rows
        if seen != expected:
            raise DataError(
                f"{seen:,} of {expected:,} rows can be read; the file is damaged: fetch it again",
                path=self.label,
                place=f"row group {index}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowGroup:
    """A whole row group."""

    file: ParquetFile
    index: int
    weight: int
    text_wins: bool = False
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        file = self.file
        with _named(file.label, f"row group {self.index}"):
            table = file.open().read_row_group(
                self.index, columns=file.columns, use_threads=file.may_use_pool
            )
            table.validate(full=True)
        file.check_count(self.index, table.num_rows)
        return Decoded(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFile:
    """An Arrow IPC file or stream."""

    source: Source
    label: str
    schema: pa.Schema
    columns: list[str]
    """The ones that are read."""
    names: list[str]
    """All columns of the file."""
    options: ReadOptions
    num_batches: int | None
    """``None`` for the stream form, which has no index."""
    keep_alive: Any = None

    def units(self, file: int) -> list[Unit]:
        if self.num_batches is None:
            weight = self.source.num_bytes
            return [Unit(file=file, start=0, stop=1, num_bytes=weight)]
        weight = max(1, self.source.num_bytes // max(1, self.num_batches))
        together = max(1, self.options.unit_bytes // weight)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=weight * (stop - start))
            for start in range(0, self.num_batches, together)
            for stop in [min(start + together, self.num_batches)]
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        if self.num_batches is not None:
            yield _BatchRange(file=self, unit=unit, weight=unit.num_bytes)
            return
        with _named(self.label, "stream"):
            file = self.source.open_arrow()
            reader = pa.ipc.open_stream(file)
        index, held, size = 0, list[pa.RecordBatch](), 0
        while True:
            with _named(self.label, f"record batch {index}"):
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    batch = None
                if batch is not None:
                    held.append(batch)
                    size += int(batch.get_total_buffer_size())
            if held and (batch is None or size >= self.options.block_bytes):
                table = pa.Table.from_batches(held).select(self.columns)
                last = index - (batch is None)
                place = f"record batches {last - len(held) + 1} to {last}"
                yield _Ready(self.label, place, table, size)
                held, size = [], 0
            if batch is None:
                break
            index += 1
        # pyarrow takes a stream that is cut between two batches for a whole one.
        mark = self.source.read_at(file.tell() - len(_END_OF_STREAM), len(_END_OF_STREAM))
        if mark != _END_OF_STREAM and self.source.read_at(0, 4) == _END_OF_STREAM[:4]:
            raise DataError(
                "the stream has no end mark: it is cut off or still being written; fetch it again",
                path=self.label,
                place=f"after record batch {index - 1}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchRange:
    """Some record batches of an Arrow file."""

    file: ArrowFile
    unit: Unit
    weight: int
    text_wins: bool = False
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        batches = []
        reader = None
        for index in range(self.unit.start, self.unit.stop):
            with _named(self.file.label, f"record batch {index}"):
                if reader is None:
                    reader = pa.ipc.open_file(self.file.source.open_arrow())
                batch = reader.get_batch(index)
                batch.validate(full=True)
                batches.append(batch.select(self.file.columns))
        return Decoded(pa.Table.from_batches(batches))


@dataclass(frozen=True, slots=True)
class _Ready:
    """Rows that were decoded while splitting; only their validation is left."""

    label: str
    place: str
    table: pa.Table
    weight: int
    text_wins: bool = False
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        with _named(self.label, self.place):
            self.table.validate(full=True)
        return Decoded(self.table)


def open_parquet(
    source: Source, label: str, options: ReadOptions, keep_alive: Any = None
) -> ParquetFile:
    """Reads the footer."""
    with _named(label, "footer"):
        with pq.ParquetFile(source.open_arrow()) as file:
            metadata, schema = file.metadata, file.schema_arrow
        # Counts that a damaged footer can hold and no file can. The column chunks are left to the
        # decoder, which checks that they lie inside the file: asking for their metadata here would
        # let a C++ exception through on some damaged footers, which ends the process ("Definition
        # level histogram size mismatch").
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            if group.num_rows < 0 or group.total_byte_size < 0:
                raise DataError(
                    "the footer holds negative counts; it is damaged: fetch the file again",
                    path=label,
                    place=f"row group {index}",
                )
    columns = _selected(schema, options, label)
    if source.remote is not None:
        runs = parquet_runs(metadata, set(columns), source.num_bytes)
        source = replace(source, runs=runs)
    return ParquetFile(
        source=source,
        label=label,
        metadata=metadata,
        schema=pa.schema([schema.field(name) for name in columns], schema.metadata),
        columns=columns,
        names=schema.names,
        options=options,
        keep_alive=keep_alive,
    )


def open_arrow(
    source: Source, label: str, options: ReadOptions, keep_alive: Any = None
) -> ArrowFile:
    """Reads the schema and, of the file form, the index."""
    head = source.read_at(0, 6)
    with _named(label, "schema"):
        if head.startswith(b"FEA1"):
            raise DataError(
                "Feather version 1 is not supported; write the table again with pyarrow.feather",
                path=label,
            )
        if head.startswith(b"ARROW1"):
            with pa.ipc.open_file(source.open_arrow()) as file:
                schema, count = file.schema, file.num_record_batches
        else:
            with pa.ipc.open_stream(source.open_arrow()) as stream:
                schema, count = stream.schema, None
    columns = _selected(schema, options, label)
    return ArrowFile(
        source=source,
        label=label,
        schema=pa.schema([schema.field(name) for name in columns], schema.metadata),
        columns=columns,
        names=schema.names,
        options=options,
        num_batches=count,
        keep_alive=keep_alive,
    )


def _selected(schema: pa.Schema, options: ReadOptions, label: str) -> list[str]:
    with _named(label, "schema"):
        _check_fields(schema, label)
    names: list[str] = schema.names
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise DataError(f"two columns are called {min(repeated)!r}; rename one", path=label)
    return names if options.columns is None else [c for c in names if c in options.columns]


def _check_fields(fields: Iterable[pa.Field], label: str) -> None:
    """Refuses what would fail later on: types without kernels, and names that are not UTF-8."""
    for field in fields:
        name, kind = field.name, field.type
        if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):
            raise DataError(
                f"column {name!r} has the type {kind}, which pyarrow can hardly do anything with; "
                "write the file again with plain types",
                path=label,
                place="schema",
            )
        _check_fields((kind.field(index) for index in range(kind.num_fields)), label)


@contextmanager
def _named(path: str, place: str) -> Iterator[None]:
    """Gives pyarrow's errors the file and the place."""
    try:
        yield
    except DataError:
        raise
    except _DECODE_ERRORS as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"cannot be decoded ({reason}); the file is damaged or cut off: fetch it again",
            path=path,
            place=place,
        ) from error
