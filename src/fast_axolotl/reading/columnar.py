"""Parquet, Arrow IPC (file and stream) and Feather.

**Parquet.** Units are row groups. What a row group takes once it is decoded cannot be told from its
size on disk: dictionaries and run lengths make a thousand times as much of it. So a group is
decoded in steps of a few rows first and more when these have been weighed, and handed out in parts
of some blocks. Steps are two thirds slower than a whole group of 1,000 rows; where the groups
before it say that a group is small, it is read whole, and read again in steps if it was not. A
group that is large on disk too is streamed page by page. What was decoded is validated in full.

**Arrow.** A local file that is not compressed is mapped into memory, as ``datasets`` does it: units
are ranges of rows, and to decode one is to slice. Each record batch is validated in full when it is
first used. A file that is cut off while it is read ends the process. What cannot be mapped (remote,
compressed and damaged files) is decoded batch by batch. A stream among them has no index, so it is
one unit, read front to back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import (
    PART_BLOCKS,
    Block,
    Decoded,
    ReadOptions,
    Unit,
    broken_block,
    held_bytes,
    ready_block,
    value_bytes,
)
from fast_axolotl.reading.storage import Source

_FIRST_ROWS = 4
"""What a row group's first step decodes; a step has at most four times the rows of the one before,
so that only rows which differ much from all before them can surprise."""

_PAGE_BUFFER_BYTES = 1024 * 1024
"""Read-ahead per column while a large row group is streamed; all columns share a part's size."""

_LEAST_PAGE_BUFFER_BYTES = 4 * 1024

_MARGIN = 1.05
"""A remote row group may be so many times its expected size, and still come in one request."""

_LARGE_BATCH_BYTES = 4 * 1024 * 1024
"""A mapped record batch is cut into units of about this size where it is larger."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a writer of the Arrow stream form puts last; before 2019 without the first half."""

_DECODE_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError)
"""What pyarrow raises on damaged files. Its index and key errors are ArrowExceptions too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columnar:
    source: Source
    schema: pa.Schema
    """Of the columns that are read."""
    names: list[str]
    """All columns of the file."""
    options: ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile(_Columnar):
    """A Parquet file whose footer has been read."""

    metadata: pq.FileMetaData
    encoded_share: float
    """The bytes of the file by those that its footer counts, which are not compressed."""
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
                decode = partial(self._decode, index, num_rows)
                yield Block(decode=decode, weight=weight, num_rows=num_rows)
            elif num_rows:
                buffer = most // max(1, self.metadata.num_columns)
                buffer = min(max(buffer, _LEAST_PAGE_BUFFER_BYTES), _PAGE_BUFFER_BYTES)
                for table in self.parts(index, self.options.block_bytes, buffer_size=buffer):
                    yield ready_block(table, weight * table.num_rows // num_rows)

    def _decode(self, index: int, num_rows: int, schema: pa.Schema | None) -> Decoded:
        """A whole row group."""
        most = PART_BLOCKS * self.options.block_bytes
        # Half a part: so far from a whole one, reading in steps would not cut the group either.
        # Whether the groups before it are known already, which is chance, must not show.
        if self.row_bytes and max(self.row_bytes) * num_rows <= most // 2:
            with _named(self.source.path, f"row group {index}"):
                table = self.open(index).read_row_group(
                    index, columns=self.schema.names, use_threads=False
                )
                self.check_count(index, table.num_rows)
                self.row_bytes.append(held_bytes(table) / num_rows)
                if held_bytes(table) <= most // 2:
                    return Decoded(_validated(table))
            del table
        decoded = _first_of(self.parts(index, most))
        self.row_bytes.append(held_bytes(decoded.table) / max(1, decoded.table.num_rows))
        return decoded

    def parts(self, index: int, part_bytes: int, **settings: Any) -> Iterator[pa.Table]:
        """The rows of a group in tables of about ``part_bytes``.

        A step has as many rows as make a block at the size of those of the last step, or at what is
        left of the encoded bytes, whichever is more.
        """
        group, target = self.metadata.row_group(index), self.options.block_bytes
        rows_left, encoded_left = group.num_rows, group.total_byte_size
        step = max(1, min(_FIRST_ROWS, target * rows_left // max(1, encoded_left)))
        held, size = list[pa.RecordBatch](), 0
        with _named(self.source.path, f"row group {index}"):
            file = self.open(index, **settings)
            # Not documented to change the batches of an iteration that has begun. Where it does
            # not, steps stay small, which costs time and nothing else.
            resize = getattr(getattr(file, "reader", None), "set_batch_size", None)
            # pyarrow's own threads could abort the process at its exit if they hold a Python file.
            for batch in file.iter_batches(
                step, row_groups=[index], columns=self.schema.names, use_threads=False
            ):
                num_bytes = value_bytes(batch)
                held.append(batch)
                size += num_bytes
                rows_left -= batch.num_rows
                encoded_left = max(0, encoded_left - num_bytes)
                if size >= part_bytes or rows_left <= 0:
                    yield _validated(pa.Table.from_batches(held))
                    held, size = [], 0
                row_bytes = max(
                    num_bytes / max(1, batch.num_rows), encoded_left / max(1, rows_left)
                )
                del batch
                step = max(1, min(4 * step, int(target / max(row_bytes, 1e-3))))
                if resize is not None:
                    resize(step)
        self.check_count(index, group.num_rows - rows_left)

    def open(self, index: int, **settings: Any) -> pq.ParquetFile:
        """The file, to read one row group of.

        A remote group that is wanted whole is fetched whole: its size in the file, which the footer
        does not tell, is about its share of all. pyarrow's own way (``pre_buffer``) would read on
        threads that can abort the process at its exit, since they hold a Python file.
        """
        ahead = settings.get("buffer_size", 0)
        if not ahead and len(self.schema) == len(self.names):
            weight = self.metadata.row_group(index).total_byte_size
            ahead = int(weight * self.encoded_share * _MARGIN)
        return pq.ParquetFile(
            self.source.open_arrow(ahead),
            metadata=self.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
            **settings,
        )

    def check_count(self, index: int, seen: int) -> None:
        expected = self.metadata.row_group(index).num_rows
        if seen != expected:
            raise DataError(
                f"only {seen:,} of {expected:,} rows can be read; replace the file with an intact "
                "copy",
                path=self.source.path,
                place=f"row group {index}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile(_Columnar):
    """A local Arrow file or stream whose record batches lie in its mapping."""

    batches: tuple[pa.RecordBatch, ...]
    """With the columns that are read."""
    starts: tuple[int, ...]
    """The first row of each batch, then the number of rows."""
    sizes: tuple[int, ...]
    """The bytes of each batch, with all columns."""
    validated: set[int] = field(default_factory=set)
    """The batches that are known to be intact."""

    def units(self, file: int) -> list[Unit]:
        """Ranges of rows: small batches together, large ones in parts."""
        units, start, weight = list[Unit](), 0, 0
        for stop, size in zip(self.starts[1:], self.sizes, strict=True):
            weight += size
            if stop > start and (weight >= self.options.unit_bytes or stop == self.starts[-1]):
                parts = min(stop - start, max(1, weight // _LARGE_BATCH_BYTES))
                edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
                units += [
                    Unit(
                        file=file,
                        start=first,
                        stop=last,
                        num_bytes=max(1, weight // parts),
                        num_rows=last - first,
                    )
                    for first, last in pairwise(edges)
                ]
                start, weight = stop, 0
        return units

    def blocks(self, unit: Unit) -> Iterator[Block]:
        with _named(self.source.path, f"rows {unit.start:,} to {unit.stop - 1:,}"):
            table = pa.Table.from_batches(self.rows(unit.start, unit.stop), self.schema)
        yield Block(
            decode=lambda _: Decoded(table),
            weight=unit.num_bytes,
            num_rows=unit.stop - unit.start,
        )

    def rows(self, start: int, stop: int) -> list[pa.RecordBatch]:
        """A range of rows; nothing is copied."""
        found = []
        for index in range(bisect_right(self.starts, start) - 1, len(self.batches)):
            first = self.starts[index]
            if first >= stop:
                break
            found.append(self.batch(index).slice(max(0, start - first), stop - max(start, first)))
        return found

    def batch(self, index: int) -> pa.RecordBatch:
        """A record batch in the mapping, which has been checked."""
        if index not in self.validated:
            with _named(self.source.path, f"record batch {index}"):
                _validated(self.batches[index])
            self.validated.add(index)
        return self.batches[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFile(_Columnar):
    """An Arrow IPC file or stream that cannot be mapped."""

    num_batches: int | None
    """``None`` for the stream form, which has no index."""

    def units(self, file: int) -> list[Unit]:
        count = 1 if self.num_batches is None else self.num_batches
        size = max(1, self.source.num_bytes // max(1, count))
        step = max(1, self.options.unit_bytes // size)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=size * (stop - start))
            for start, stop in pairwise([*range(0, count, step), count])
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        if self.num_batches is not None:
            yield Block(decode=lambda _: _first_of(self.parts(unit)), weight=unit.num_bytes)
            return
        for table in self.parts(unit):
            yield ready_block(table, held_bytes(table))

    def parts(self, unit: Unit) -> Iterator[pa.Table]:
        """The batches together as long as they are small, slices of those which are not."""
        path, block_bytes = self.source.path, self.options.block_bytes
        with _named(path, "schema"):
            file = self.source.open_arrow(min(unit.num_bytes, block_bytes))
            is_stream = self.num_batches is None
            reader: Any = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        index, held, size = unit.start, list[pa.RecordBatch](), 0
        while True:
            batch = None
            with _named(path, f"record batch {index}"), suppress(StopIteration):
                if is_stream:
                    batch = reader.read_next_batch()
                elif index < unit.stop:
                    batch = reader.get_batch(index)
                if batch is not None:
                    held.append(_validated(batch.select(self.schema.names)))
                    size += held[-1].get_total_buffer_size()
            if held and (batch is None or size >= block_bytes):
                table, held = pa.Table.from_batches(held), []
                step = max(1, table.num_rows)
                if size > PART_BLOCKS * block_bytes:
                    step = max(1, table.num_rows * block_bytes // size)
                for start in range(0, table.num_rows, step):
                    yield table.slice(start, step)
                size = 0
            if batch is None:
                break
            index += 1
        if is_stream and not _has_end(self.source, file.tell()):
            raise DataError(
                "the stream has no end marker: it is truncated or still being written; replace the "
                "file with an intact copy",
                path=path,
                place=f"after record batch {index - 1}",
            )


def open_parquet(source: Source, options: ReadOptions) -> ParquetFile:
    """Reads the footer."""
    with _named(source.path, "footer"):
        with pq.ParquetFile(source.open_arrow()) as file:
            metadata, schema = file.metadata, file.schema_arrow
        # Counts that a damaged footer can hold and no file can. The column chunks are left to the
        # decoder, which checks that they lie inside the file: asking for their metadata here would
        # let a C++ exception through on some damaged footers, which ends the process ("Definition
        # level histogram size mismatch").
        total = 0
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            total += group.total_byte_size
            if group.num_rows < 0 or group.total_byte_size < 0:
                raise DataError(
                    "the footer has negative counts; replace the file with an intact copy",
                    path=source.path,
                    place=f"row group {index}",
                )
    share = min(1.0, source.num_bytes / max(1, total))
    columns = _columns(source, schema, options)
    return ParquetFile(**columns, metadata=metadata, encoded_share=share)


def open_arrow(source: Source, options: ReadOptions) -> MappedFile | ArrowFile:
    """Maps a local file; of others reads the schema and, of the file form, the index."""
    head = source.read_at(0, 6)
    with _named(source.path, "schema"):
        if head.startswith(b"FEA1"):
            raise DataError(
                "Feather version 1 is not supported; convert the file with pyarrow.feather",
                path=source.path,
            )
        file = source.map_arrow() if source.is_local else source.open_arrow()
        is_stream = not head.startswith(b"ARROW1")
        reader: Any = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
    columns = _columns(source, reader.schema, options)
    count = None if is_stream else reader.num_record_batches
    batches = None
    if source.is_local:
        with suppress(*_DECODE_ERRORS):  # decoding tells which batch is damaged
            batches = _mapped_batches(source, file, reader, count)
    if batches is None:
        return ArrowFile(**columns, num_batches=count)
    return MappedFile(
        **columns,
        batches=tuple(batch.select(columns["schema"].names) for batch in batches),
        starts=(0, *accumulate(batch.num_rows for batch in batches)),
        sizes=tuple(batch.get_total_buffer_size() for batch in batches),
    )


def _mapped_batches(
    source: Source, mapping: pa.MemoryMappedFile, reader: Any, count: int | None
) -> list[pa.RecordBatch] | None:
    """All record batches of a local file; ``None`` where they would be copies, or a part."""
    batches, position = list[pa.RecordBatch](), mapping.tell()
    mapping.seek(0)
    begin = mapping.read_buffer(1).address
    mapping.seek(position)
    for batch in reader if count is None else map(reader.get_batch, range(count)):
        if batch.num_rows and not any(item.num_rows for item in batches):
            found = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
            if not all(begin <= buffer.address <= begin + source.num_bytes for buffer in found):
                return None
        batches.append(batch)
    return batches if count is not None or _has_end(source, mapping.tell()) else None


def _has_end(source: Source, offset: int) -> bool:
    """Whether a stream read up to here is whole; pyarrow does not mind if it is cut there."""
    mark = source.read_at(offset - len(_END_OF_STREAM), len(_END_OF_STREAM))
    return mark == _END_OF_STREAM or source.read_at(0, 4) != _END_OF_STREAM[:4]


def _columns(source: Source, schema: pa.Schema, options: ReadOptions) -> dict[str, Any]:
    """The columns to read, after a look at all of them."""
    with _named(source.path, "schema"):
        _check_fields(schema, source.path)
    names: list[str] = schema.names
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise DataError(
            f"two columns have the name {min(repeated)!r}; rename one", path=source.path
        )
    wanted = [field for field in schema if options.columns is None or field.name in options.columns]
    return {
        "source": source,
        "schema": pa.schema(wanted, schema.metadata),
        "names": names,
        "options": options,
    }


def _check_fields(fields: Iterable[pa.Field], path: str) -> None:
    """Refuses what would fail later on: types without kernels, and names that are not UTF-8."""
    for column in fields:
        name, kind = column.name, column.type
        if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):
            raise DataError(
                f"column {name!r} has the type {kind}, which pyarrow supports only in part; "
                "rewrite the file with plain types",
                path=path,
                place="schema",
            )
        _check_fields((kind.field(index) for index in range(kind.num_fields)), path)


def _validated(data: Any) -> Any:
    """Damaged offsets would crash whoever touches them, and pyarrow lets bytes pass as text."""
    data.validate(full=True)
    return data


def _first_of(parts: Iterator[pa.Table]) -> Decoded:
    """The first of some tables, and the others for when they are wanted."""

    def others() -> Iterator[Block]:
        try:
            for table in parts:
                yield ready_block(table)
        except DataError as error:
            yield broken_block(error)

    first = next(parts, None)
    return Decoded(pa.table({})) if first is None else Decoded(first, more=others())


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
