"""Parquet, Arrow IPC (file and stream) and Feather.

Units are row groups and record batches. What a row group takes once it is decoded cannot be told
from its size on disk: dictionaries and run lengths make a thousand times as much of it. So a group
is decoded in steps of a few rows first and more when these have been weighed, and handed out in
parts of some blocks. Steps are two thirds slower than a whole group of 1,000 rows; where the groups
before it say that a group is small, it is read whole, and read again in steps if it was not. A
group that is large on disk too is streamed page by page.

The record batches of an Arrow stream, which has no index, are found by walking its message headers:
some 256 bytes for each. What the walk does not understand (dictionaries, damage, the form of before
2019) is one unit, read front to back. A record batch cannot be decoded in steps, only handed out in
slices: a compressed one takes what it takes.

Every batch is validated in full, since damaged offsets would otherwise crash whoever touches them;
that costs a twentieth of a Parquet read and more than half of an Arrow read.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import (
    PART_BLOCKS,
    Block,
    BrokenBlock,
    Decoded,
    ReadOptions,
    Unit,
    held_bytes,
    value_bytes,
)
from fast_axolotl.reading.storage import Source

_FIRST_ROWS = 4
"""What a row group's first step decodes; a step has at most four times the rows of the one before,
so that only rows which differ much from all before them can surprise."""

_PAGE_BUFFER_BYTES = 1024 * 1024
"""Read-ahead per column while a large row group is streamed; all columns share a part's size."""

_LEAST_PAGE_BUFFER_BYTES = 4 * 1024

_HEADER_BYTES = 256
"""Enough of an Arrow message for its type, length and rows; where it is not, all of it is read."""

_MOST_REMOTE_HEADERS = 64
"""A walk over more messages of a remote file costs more in round trips than it gains."""

_SCHEMA_MESSAGE, _RECORD_BATCH_MESSAGE = 1, 3

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a writer of the Arrow stream form puts last; before 2019 without the first half."""

_DECODE_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError)
"""What pyarrow raises on damaged files. Its index and key errors are ArrowExceptions too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columnar:
    source: Source
    label: str
    """The path to show in messages: that of the file before it was spooled."""
    schema: pa.Schema
    columns: list[str]
    """The ones that are read."""
    names: list[str]
    """All columns of the file."""
    options: ReadOptions
    keep_alive: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile(_Columnar):
    """A Parquet file whose footer has been read."""

    metadata: pq.FileMetaData
    row_bytes: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """What a row of each of the groups before took, decoded."""

    def units(self, file: int) -> list[Unit]:
        groups = [self.metadata.row_group(index) for index in range(self.metadata.num_row_groups)]
        return [
            Unit(
                file=file,
                start=index,
                stop=index + 1,
                num_bytes=max(1, group.total_byte_size),
                num_rows=group.num_rows,
            )
            for index, group in enumerate(groups)
            if group.num_rows
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        most = PART_BLOCKS * self.options.block_bytes
        for index in range(unit.start, unit.stop):
            group = self.metadata.row_group(index)
            num_rows, weight = group.num_rows, max(1, group.total_byte_size)
            if num_rows and weight <= most:
                yield _RowGroup(file=self, index=index, weight=weight, num_rows=num_rows)
            elif num_rows:
                buffer = most // max(1, self.metadata.num_columns)
                buffer = min(max(buffer, _LEAST_PAGE_BUFFER_BYTES), _PAGE_BUFFER_BYTES)
                parts = self.parts(index, self.options.block_bytes, buffer_size=buffer)
                for table in parts:
                    share = weight * table.num_rows // num_rows
                    yield _Ready(self.label, f"row group {index}", table, share)

    def parts(self, index: int, part_bytes: int, **settings: Any) -> Iterator[pa.Table]:
        """The rows of a group in tables of about ``part_bytes``; not yet validated.

        A step has as many rows as make a block at the size of those of the last step, or at what is
        left of the encoded bytes, whichever is more.
        """
        group, target = self.metadata.row_group(index), self.options.block_bytes
        rows_left, encoded_left = group.num_rows, group.total_byte_size
        step = max(1, min(_FIRST_ROWS, target * rows_left // max(1, encoded_left)))
        held, size = list[pa.RecordBatch](), 0
        has_dictionary = any(pa.types.is_dictionary(field.type) for field in self.schema)
        with _named(self.label, f"row group {index}"):
            file = self.open(index, **settings)
            # Not documented to change the batches of an iteration that has begun. Where it does
            # not, steps stay small, which costs time and nothing else.
            resize = getattr(getattr(file, "reader", None), "set_batch_size", None)
            for batch in file.iter_batches(
                step, row_groups=[index], columns=self.columns, use_threads=self.may_use_pool
            ):
                # The buffers are ten times as fast to weigh, but hold all of a dictionary.
                num_bytes = value_bytes(batch) if has_dictionary else batch.get_total_buffer_size()
                held.append(batch)
                size += num_bytes
                rows_left -= batch.num_rows
                encoded_left = max(0, encoded_left - num_bytes)
                if size >= part_bytes or rows_left <= 0:
                    yield pa.Table.from_batches(held)
                    held, size = [], 0
                row_bytes = max(
                    num_bytes / max(1, batch.num_rows), encoded_left / max(1, rows_left)
                )
                del batch
                step = max(1, min(4 * step, int(target / max(row_bytes, 1e-3))))
                if resize is not None:
                    resize(step)
        self.check_count(index, group.num_rows - rows_left)

    @property
    def may_use_pool(self) -> bool:
        """pyarrow's own threads must not hold Python files: at exit they could abort it all."""
        return self.options.parallel_columns and self.source.remote is None

    def open(self, index: int, **settings: Any) -> pq.ParquetFile:
        """The file, to read one row group of it."""

        def opened(file: pa.NativeFile, **settings: Any) -> pq.ParquetFile:
            return pq.ParquetFile(
                file,
                metadata=self.metadata,
                pre_buffer=False,
                page_checksum_verification=True,
                **settings,
            )

        def rehearsal(file: pa.NativeFile) -> None:
            opened(file).read_row_group(index, columns=self.columns, use_threads=False)

        return opened(self.source.open_arrow(rehearsal=rehearsal), **settings)

    def check_count(self, index: int, seen: int) -> None:
        expected = self.metadata.row_group(index).num_rows
        if seen != expected:
            raise DataError(
                f"only {seen:,} of {expected:,} rows can be read; replace the file with an intact "
                "copy",
                path=self.label,
                place=f"row group {index}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowGroup:
    """A whole row group."""

    file: ParquetFile
    index: int
    weight: int
    num_rows: int
    text_wins: bool = False

    def decode(self, schema: pa.Schema | None) -> Decoded:
        file = self.file
        most = PART_BLOCKS * file.options.block_bytes
        # Half a part: so far from a whole one, reading in steps would not cut the group either.
        # Whether the groups before it are known already, which is chance, must not show.
        if file.row_bytes and max(file.row_bytes) * self.num_rows <= most // 2:
            with _named(file.label, f"row group {self.index}"):
                table = file.open(self.index).read_row_group(
                    self.index, columns=file.columns, use_threads=file.may_use_pool
                )
                table.validate(full=True)
            file.check_count(self.index, table.num_rows)
            file.row_bytes.append(held_bytes(table) / self.num_rows)
            if held_bytes(table) <= most // 2:
                return Decoded(table)
            del table
        decoded = _first_of(self._parts(most), self.num_rows)
        file.row_bytes.append(held_bytes(decoded.table) / max(1, decoded.table.num_rows))
        return decoded

    def _parts(self, most: int) -> Iterator[pa.Table]:
        for table in self.file.parts(self.index, most):
            with _named(self.file.label, f"row group {self.index}"):
                table.validate(full=True)
            yield table


class _Message(NamedTuple):
    """A record batch in an Arrow file."""

    offset: int
    num_bytes: int
    num_rows: int
    is_compressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFile(_Columnar):
    """An Arrow IPC file or stream."""

    full_schema: pa.Schema
    """That of all columns."""
    num_batches: int | None
    """``None`` for the stream form, which has no index."""
    walked: list[list[_Message] | None] = field(default_factory=list)
    """What ``messages`` found."""

    def messages(self) -> list[_Message] | None:
        """The record batches, or ``None`` where they cannot be told by their headers alone."""
        if not self.walked:
            with _named(self.label, "message headers"):
                self.walked.append(_walk(self.source, is_stream=self.num_batches is None))
        return self.walked[0]

    def units(self, file: int) -> list[Unit]:
        messages, count = self.messages(), self.num_batches
        if messages is None and count is None:
            return [Unit(file=file, start=0, stop=1, num_bytes=self.source.num_bytes)]
        if messages is None:
            size = max(1, self.source.num_bytes // max(1, count or 0))
            messages = [_Message(0, size, -1)] * (count or 0)
        units, start, weight = list[Unit](), 0, 0
        for stop, message in enumerate(messages, 1):
            weight += message.num_bytes
            if weight >= self.options.unit_bytes or stop == len(messages):
                rows = sum(item.num_rows for item in messages[start:stop])
                known = rows if rows >= 0 else None
                units.append(
                    Unit(file=file, start=start, stop=stop, num_bytes=weight, num_rows=known)
                )
                start, weight = stop, 0
        return units

    def blocks(self, unit: Unit) -> Iterator[Block]:
        messages = self.messages()
        if messages is not None or self.num_batches is not None:
            own = None if messages is None else messages[unit.start : unit.stop]
            rows = None if own is None else sum(item.num_rows for item in own)
            yield _BatchRange(file=self, unit=unit, weight=unit.num_bytes, num_rows=rows)
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
                for part in _slices(table, size, self.options.block_bytes):
                    weight = size * part.num_rows // table.num_rows
                    yield _Ready(self.label, place, part, weight)
                held, size = [], 0
            if batch is None:
                break
            index += 1
        # pyarrow takes a stream that is cut between two batches for a whole one.
        mark = self.source.read_at(file.tell() - len(_END_OF_STREAM), len(_END_OF_STREAM))
        if mark != _END_OF_STREAM and self.source.read_at(0, 4) == _END_OF_STREAM[:4]:
            raise DataError(
                "the stream has no end marker: it is truncated or still being written; replace the "
                "file with an intact copy",
                path=self.label,
                place=f"after record batch {index - 1}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchRange:
    """Some record batches of an Arrow file."""

    file: ArrowFile
    unit: Unit
    weight: int
    num_rows: int | None
    text_wins: bool = False

    def decode(self, schema: pa.Schema | None) -> Decoded:
        return _first_of(self._parts(), self.num_rows)

    def _parts(self) -> Iterator[pa.Table]:
        """The batches together as long as they are small, slices of those which are not."""
        block_bytes = self.file.options.block_bytes
        together = self._together()
        if together is not None and together.get_total_buffer_size() < block_bytes:
            yield together
            return
        held, size = list[pa.RecordBatch](), 0
        batches = self._one_by_one() if together is None else iter(together.to_batches())
        del together
        for index, batch in enumerate(batches, self.unit.start):
            held.append(batch)
            size += batch.get_total_buffer_size()
            if size >= block_bytes or index == self.unit.stop - 1:
                yield from _slices(pa.Table.from_batches(held), size, block_bytes)
                held, size = [], 0

    def _together(self) -> pa.Table | None:
        """The batches in one read and as few calls as there can be: each call from a thread waits
        for the others. ``None`` where their place is not known or something is wrong."""
        file, messages = self.file, (self.file.messages() or [])[self.unit.start : self.unit.stop]
        # What a compressed batch takes is known when it is decoded, so those come one by one.
        if not messages or any(message.is_compressed for message in messages):
            return None
        first, head = messages[0], _schema_message(file.full_schema)
        length = sum(message.num_bytes for message in messages)
        data = pa.allocate_buffer(len(head) + length + len(_END_OF_STREAM))
        view = memoryview(data).cast("B")
        view[: len(head)], view[-len(_END_OF_STREAM) :] = head, _END_OF_STREAM
        file.source.read_into(first.offset, view[len(head) : -len(_END_OF_STREAM)])
        try:
            table = pa.ipc.open_stream(data).read_all()
            if len(file.columns) < len(file.names):
                table = table.select(file.columns)
            table.validate(full=True)
        except _DECODE_ERRORS:
            return None
        return table

    def _one_by_one(self) -> Iterator[pa.RecordBatch]:
        file, messages, opened = self.file, self.file.messages() or [], None
        for index in range(self.unit.start, self.unit.stop):
            with _named(file.label, f"record batch {index}"):
                if file.num_batches is not None:
                    opened = opened or pa.ipc.open_file(file.source.open_arrow())
                    batch = opened.get_batch(index)
                else:
                    opened = opened or file.source.open_arrow()
                    opened.seek(messages[index].offset)
                    batch = pa.ipc.read_record_batch(pa.ipc.read_message(opened), file.full_schema)
                batch = batch.select(file.columns)
                batch.validate(full=True)
            yield batch


@lru_cache(maxsize=64)
def _schema_message(schema: pa.Schema) -> bytes:
    """What a stream of batches begins with."""
    return bytes(schema.serialize())


@dataclass(frozen=True, slots=True)
class _Ready:
    """Rows that were decoded while splitting; only their validation is left."""

    label: str
    place: str
    table: pa.Table
    weight: int
    text_wins: bool = False
    num_rows: int | None = None
    is_valid: bool = False

    def decode(self, schema: pa.Schema | None) -> Decoded:
        if not self.is_valid:
            with _named(self.label, self.place):
                self.table.validate(full=True)
        return Decoded(self.table)


def _slices(table: pa.Table, size: int, block_bytes: int) -> Iterator[pa.Table]:
    """A table that is larger than a part in slices of a block; they share its memory."""
    step = max(1, table.num_rows)
    if size > PART_BLOCKS * block_bytes:
        step = max(1, table.num_rows * block_bytes // size)
    return (table.slice(start, step) for start in range(0, table.num_rows, step))


def _first_of(parts: Iterator[pa.Table], num_rows: int | None) -> Decoded:
    """The first of some valid tables, and the others for when they are wanted."""

    def others() -> Iterator[Block]:
        try:
            for table in parts:
                yield _Ready("", "", table, 0, is_valid=True)
        except DataError as error:
            yield BrokenBlock(error)

    first = next(parts, None)
    if first is None:
        return Decoded(pa.table({}))
    return Decoded(first, more=() if first.num_rows == num_rows else others())


def _walk(source: Source, *, is_stream: bool) -> list[_Message] | None:
    """The record batches of a stream or file by its message headers, without their bodies.

    ``None`` for whatever is odd, where the headers are more than a fiftieth of the file, and where
    the index of a file says otherwise.
    """
    read_at = source.read_at
    if source.remote is None:
        file = source.open_arrow()
        read_at = lambda offset, length: file.read_at(length, offset)  # noqa: E731 - opened once
    found: list[_Message] = []
    has_schema, room = False, source.num_bytes // 50 + 64 * 1024
    offset = 0 if is_stream else 8
    while room > 0:
        head = read_at(offset, _HEADER_BYTES)
        room -= len(head)
        if len(head) < 8 or head[:4] != _END_OF_STREAM[:4]:
            return None
        size = int.from_bytes(head[4:8], "little", signed=True)
        if size == 0:
            is_whole = has_schema and (
                is_stream or _indexed(read_at, source.num_bytes) == [item.offset for item in found]
            )
            return found if is_whole else None
        try:
            kind, body, rows, is_compressed = _header(head[8 : 8 + size])
        except struct.error:
            if not len(head) - 8 < size <= room:
                return None
            room -= size
            try:
                kind, body, rows, is_compressed = _header(read_at(offset + 8, size))
            except struct.error:
                return None
        end = offset + 8 + size + body
        expected = _RECORD_BATCH_MESSAGE if has_schema else _SCHEMA_MESSAGE
        if kind != expected or min(size, body, rows) < 0 or end > source.num_bytes:
            return None
        if has_schema:
            found.append(_Message(offset, end - offset, rows, is_compressed))
            if source.remote and source.num_bytes > _MOST_REMOTE_HEADERS * (end - offset):
                return None
        offset, has_schema = end, True
    return None


def _indexed(read_at: Callable[[int, int], bytes], num_bytes: int) -> list[int] | None:
    """Where the record batches of an Arrow file begin, by its index: a vector of structs."""
    size = int.from_bytes(read_at(num_bytes - 10, 4), "little")
    data = read_at(num_bytes - 10 - size, size) if 0 < size < num_bytes - 10 else b""
    try:
        vector = _place(data, _number(data, "<I", 0), 3)
        vector += _number(data, "<I", vector)
        starts = range(vector + 4, vector + 4 + 24 * _number(data, "<I", vector), 24)
        return [_number(data, "<q", start) for start in starts]
    except struct.error:
        return None


def _header(data: bytes) -> tuple[int, int, int, bool]:
    """Type, length of the body, rows and compression of an Arrow message, which is a flatbuffer."""
    message = _number(data, "<I", 0)
    kind, body = _place(data, message, 1), _place(data, message, 3)
    kind, body = kind and _number(data, "<B", kind), body and _number(data, "<q", body)
    header = _place(data, message, 2)
    table = header + _number(data, "<I", header)
    first = _place(data, table, 0)
    if kind == _SCHEMA_MESSAGE and first and _number(data, "<H", first):
        raise struct.error("another order of bytes")
    if kind != _RECORD_BATCH_MESSAGE:
        return kind, body, 0, False
    rows, is_compressed = first and _number(data, "<q", first), _place(data, table, 3) > 0
    return kind, body, rows, is_compressed


def _place(data: bytes, table: int, index: int) -> int:
    """Where a field of a flatbuffer's table is; 0 where it has its default.

    A table begins with the distance back to its list of fields: the size of that list in bytes, the
    size of the table, then where in the table each field is.
    """
    fields = table - _number(data, "<i", table)
    place = 4 + 2 * index
    start = _number(data, "<H", fields + place) if place < _number(data, "<H", fields) else 0
    return start and table + start


def _number(data: bytes, code: str, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise struct.error("outside of the message")
    return int(struct.unpack_from(code, data, at)[0])


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
                    "the footer has negative counts; replace the file with an intact copy",
                    path=label,
                    place=f"row group {index}",
                )
    return ParquetFile(**_common(source, label, schema, options, keep_alive), metadata=metadata)


def open_arrow(
    source: Source, label: str, options: ReadOptions, keep_alive: Any = None
) -> ArrowFile:
    """Reads the schema and, of the file form, the index."""
    head = source.read_at(0, 6)
    with _named(label, "schema"):
        if head.startswith(b"FEA1"):
            raise DataError(
                "Feather version 1 is not supported; convert the file with pyarrow.feather",
                path=label,
            )
        if head.startswith(b"ARROW1"):
            with pa.ipc.open_file(source.open_arrow()) as file:
                schema, count = file.schema, file.num_record_batches
        else:
            with pa.ipc.open_stream(source.open_arrow()) as stream:
                schema, count = stream.schema, None
    common = _common(source, label, schema, options, keep_alive)
    return ArrowFile(**common, full_schema=schema, num_batches=count)


def _common(
    source: Source, label: str, schema: pa.Schema, options: ReadOptions, keep_alive: Any
) -> dict[str, Any]:
    with _named(label, "schema"):
        _check_fields(schema, label)
    names: list[str] = schema.names
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise DataError(f"two columns have the name {min(repeated)!r}; rename one", path=label)
    columns = [name for name in names if options.columns is None or name in options.columns]
    return {
        "source": source,
        "label": label,
        "schema": pa.schema([schema.field(name) for name in columns], schema.metadata),
        "columns": columns,
        "names": names,
        "options": options,
        "keep_alive": keep_alive,
    }


def _check_fields(fields: Iterable[pa.Field], label: str) -> None:
    """Refuses what would fail later on: types without kernels, and names that are not UTF-8."""
    for column in fields:
        name, kind = column.name, column.type
        if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):
            raise DataError(
                f"column {name!r} has the type {kind}, which pyarrow supports only in part; "
                "rewrite the file with plain types",
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
            f"the file is corrupt or truncated ({reason}); replace it with an intact copy",
            path=path,
            place=place,
        ) from error
