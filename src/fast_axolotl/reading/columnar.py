"""Parquet, Arrow IPC (file and stream) and Feather.

**Parquet.** Units are row groups. What a row group takes once it is decoded cannot be told from its
size on disk: dictionaries and run lengths make a thousand times as much of it. So a group is
decoded in steps of a few rows first and more when these have been weighed, and handed out in parts
of some blocks. Where the groups before it say that a group is small, it is read whole, a third
faster, and again in steps if it was not. A group that is large on disk is streamed page by page.

**Arrow.** A local file that is not compressed is mapped into memory, as ``datasets`` does it: units
are ranges of rows, and to decode one is to slice. A file that is cut off while it is read ends the
process. What cannot be mapped (remote, compressed and damaged files) is decoded batch by batch. A
stream among them has no index, so it is one unit, read front to back. ``take_rows`` gives rows of
mapped files by their number. Not those of other files: each would cost the decoding of a unit.
"""

from __future__ import annotations

import operator
import warnings
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.blocks import (
    PART_BLOCKS,
    Block,
    Dataset,
    Decoded,
    InputFile,
    ReadOptions,
    Unit,
    check_names,
    fixed_row_bytes,
    or_broken,
    ready_block,
    value_bytes,
)
from fast_axolotl.reading.storage import Source

_FIRST_ROWS = 4
"""What a row group's first step decodes; a step has at most four times the rows of the one before,
so that only rows which differ much from all before them can surprise."""

_PAGE_BUFFER_BYTES = 1024 * 1024
"""Read-ahead per column while a large row group is streamed; all columns share a part's size."""

_LEAST_BUFFER_BYTES = 32 * 1024
"""Less would be many small reads: thousands of columns take more than a part, 64 MB for 2,000."""

_WIDE_ROWS = 1000
"""A step of thousands of columns has so many rows where two parts hold them: a step costs some
microseconds for each column, and fewer parts are joined to make a batch."""

_MARGIN = 1.05
"""A remote row group may be so many times its expected size, and still come in one request."""

_LARGE_BATCH_BYTES = 4 * 1024 * 1024
"""A mapped record batch is cut into units of about this size where it is larger."""

_LARGEST_BATCH_BLOCKS = 16
"""A decoded record batch of more than so many blocks, half a memory budget, is worth a warning."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a writer of the Arrow stream form puts last; before 2019 without the first half."""

_PLAIN_TYPES = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}

_DECODE_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError)
"""What pyarrow raises on damaged files. Its index and key errors are ArrowExceptions too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columnar(InputFile):
    content: Source
    """What is read: the file, or a decompressed copy."""
    schema: pa.Schema
    """Of the columns that are read."""
    names: list[str]
    """All columns of the file."""

    def _checked(self, rows: Any) -> Any:
        """The rows under the schema. Damaged offsets would crash whoever touches them, and pyarrow
        lets bytes pass as text."""
        rows.validate(full=True)
        return rows if rows.schema.equals(self.schema) else rows.cast(self.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile(_Columnar):
    """A Parquet file whose footer has been read."""

    metadata: pq.FileMetaData
    encoded_share: float
    """The bytes of the file by those that its footer counts, which are not compressed."""
    row_bytes: deque[float] = field(default_factory=partial(deque, maxlen=16))
    """What a row of each of the groups before took, decoded."""

    def units(self, file: int) -> list[Unit]:
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
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
        for index in range(unit.start, unit.stop):
            group, parts = self.metadata.row_group(index), partial(self.parts, index)
            num_rows, weight = group.num_rows, max(1, group.total_byte_size)
            if num_rows and weight <= PART_BLOCKS * self.options.block_bytes:
                yield Block(decode=partial(_first_of, parts), weight=weight, num_rows=num_rows)
            elif num_rows:
                for table in parts():
                    yield ready_block(table, weight * table.num_rows // num_rows)

    def parts(self, index: int) -> Iterator[pa.Table]:
        """The rows of a group in tables of about ``PART_BLOCKS`` blocks.

        A step has as many rows as make a block at the size of those of the last step, or at what is
        left of the encoded bytes, whichever is more.
        """
        group, target = self.metadata.row_group(index), self.options.block_bytes
        rows_left, encoded_left = group.num_rows, group.total_byte_size
        part_bytes, width = PART_BLOCKS * target, fixed_row_bytes(self.schema)
        buffer_size, is_all = 0, len(self.schema) == len(self.names)
        if encoded_left > part_bytes:  # streamed
            buffer_size = min(part_bytes // len(self.names), _PAGE_BUFFER_BYTES)
            buffer_size = max(buffer_size, _LEAST_BUFFER_BYTES)
        # A remote group that is wanted whole is fetched whole: its size in the file, which the
        # footer does not tell, is about its share of all. pyarrow's own way (``pre_buffer``) would
        # read on threads that can abort the process at its exit, since they hold a Python file.
        ahead = buffer_size or int(is_all * encoded_left * self.encoded_share * _MARGIN)
        open_file = partial(
            pq.ParquetFile,
            metadata=self.metadata,
            pre_buffer=False,
            buffer_size=buffer_size,
            page_checksum_verification=True,
        )
        # Half a part: so far from a whole one, reading in steps would not cut the group either.
        # Whether the groups before it are known already, which is chance, must not show.
        is_small = self.row_bytes and max(self.row_bytes) * rows_left <= part_bytes // 2
        # pyarrow's own threads could abort the process at its exit if they hold a Python file.
        columns: dict[str, Any] = {"columns": self.schema.names, "use_threads": False}
        step = max(1, min(_FIRST_ROWS, target * rows_left // max(1, encoded_left)))
        if width:
            step = max(1, int(part_bytes / width), min(_WIDE_ROWS, int(2 * part_bytes / width)))
        held, size = list[pa.RecordBatch](), 0
        with _named(self.source.path, f"row group {index}"):
            if is_small:
                table = open_file(self.content.open_arrow(ahead)).read_row_group(index, **columns)
                size = value_bytes(table)
                if table.num_rows == rows_left and size <= part_bytes // 2:
                    self.row_bytes.append(size / rows_left)
                    yield self._checked(table)
                    return
                del table
                size = 0
            file = open_file(self.content.open_arrow(ahead))
            # Not documented to change the batches of an iteration that has begun. Where it does
            # not, steps stay small, which costs time and nothing else.
            resize = getattr(file.reader, "set_batch_size", lambda rows: None)
            for batch in file.iter_batches(step, row_groups=[index], **columns):
                held.append(self._checked(batch))
                num_bytes = int(width * len(batch)) or value_bytes(held[-1])
                size += num_bytes
                rows_left -= batch.num_rows
                encoded_left = max(0, encoded_left - num_bytes)
                if size >= part_bytes or rows_left <= 0:
                    table = pa.Table.from_batches(held)
                    self.row_bytes.append(size / max(1, table.num_rows))
                    held, size = [], 0
                    yield table
                    del table
                row_bytes = max(num_bytes / max(1, len(batch)), encoded_left / max(1, rows_left))
                del batch
                if not width:
                    step = max(1, min(4 * step, int(target / max(row_bytes, 1e-3))))
                    resize(step)
            if rows_left:
                raise pa.ArrowInvalid(f"{rows_left:,} of {group.num_rows:,} rows are missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile(_Columnar):
    """A local Arrow file or stream whose record batches lie in its mapping."""

    batches: tuple[pa.RecordBatch, ...]
    """With the columns that are read."""
    starts: tuple[int, ...]
    """The first row of each batch, then the number of rows."""
    stops: tuple[int, ...]
    """The bytes before each batch, then those of all, with all columns."""
    validated: set[int] = field(default_factory=set)
    """The batches that are known to be intact."""

    def units(self, file: int) -> list[Unit]:
        """Ranges of rows of the same size: small batches together, large ones in parts."""
        num_bytes, num_rows = self.stops[-1], self.starts[-1]
        step = min(num_bytes // max(1, len(self.batches)), _LARGE_BATCH_BYTES)
        stops, starts = np.array(self.stops), np.array(self.starts)
        ends = np.arange(0, num_bytes, max(self.options.unit_bytes, step))
        inner = np.rint(np.interp(ends, stops, starts)).astype(int)
        # Small batches belong to one unit: two would check all of such a batch each.
        batch = np.searchsorted(stops, ends, side="right") - 1
        is_small = np.diff(stops)[batch] <= _LARGE_BATCH_BYTES
        edges = sorted({0, *np.where(is_small, starts[batch], inner).tolist(), num_rows})
        num_bytes = max(1, num_bytes // max(1, len(edges) - 1))
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=num_bytes, num_rows=stop - start)
            for start, stop in pairwise(edges)
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        def decode(_: pa.Schema | None) -> Decoded:
            return Decoded(pa.Table.from_batches(self.rows(unit.start, unit.stop), self.schema))

        yield Block(decode=decode, weight=unit.num_bytes, num_rows=unit.stop - unit.start)

    def rows(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Some rows in the mapping, of batches that have been checked; nothing is copied."""
        for index in range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)):
            if index not in self.validated:
                with _named(self.source.path, f"record batch {index}"):
                    self._checked(self.batches[index])
                self.validated.add(index)
            begin = max(start, self.starts[index])
            yield self.batches[index].slice(begin - self.starts[index], stop - begin)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the file itself, so that no rows are sent to it."""
        names = ("source", "format", "compression", "options")
        return partial(open_arrow, self.content, **{n: getattr(self, n) for n in names}), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFile(_Columnar):
    """An Arrow IPC file or stream that cannot be mapped."""

    num_batches: int | None
    """``None`` for the stream form, which has no index."""

    def units(self, file: int) -> list[Unit]:
        count = 1 if self.num_batches is None else self.num_batches
        size = max(1, self.content.num_bytes // max(1, count))
        step = max(1, self.options.unit_bytes // size)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=size * (stop - start))
            for start, stop in pairwise([*range(0, count, step), count])
        ]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        if self.num_batches is not None:
            decode = partial(_first_of, partial(self.parts, unit))
            yield Block(decode=decode, weight=unit.num_bytes)
            return
        for table in self.parts(unit):
            yield ready_block(table, table.nbytes)

    def parts(self, unit: Unit) -> Iterator[pa.Table]:
        """The batches together as long as they are small, slices of those which are not."""
        path, block_bytes = self.source.path, self.options.block_bytes
        is_stream = self.num_batches is None
        with _named(path, "schema"):
            file = self.content.open_arrow(min(unit.num_bytes, block_bytes))
            reader: Any = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        batches = reader if is_stream else map(reader.get_batch, range(unit.start, unit.stop))
        index, held, size = unit.start, list[pa.RecordBatch](), 0
        while True:
            with _named(path, f"record batch {index}"):
                batch = next(batches, None)
                if batch is not None:
                    held.append(self._checked(batch.select(self.schema.names)))
                    num_bytes = held[-1].get_total_buffer_size()
                    size += num_bytes
                    if num_bytes > _LARGEST_BATCH_BLOCKS * block_bytes:
                        warnings.warn(
                            f"{path}: record batch {index} takes {num_bytes / 2**20:,.0f} MiB, "
                            "which cannot be decoded in parts, whatever the memory budget; write "
                            "the file with fewer rows in each record batch (max_chunksize)",
                            stacklevel=2,
                        )
            if held and (batch is None or size >= block_bytes):
                table = pa.Table.from_batches(held)
                step = max(1, -(-table.num_rows // max(1, size // block_bytes)))
                for start in range(0, table.num_rows, step):
                    yield table.slice(start, step)
                held, size = [], 0
            if batch is None:
                break
            index += 1
        with _named(path, f"after record batch {index - 1}"):
            if is_stream and not _has_end(self.content, file.tell()):
                raise pa.ArrowInvalid("the stream has no end marker")


def take_rows(dataset: Dataset, schema: pa.Schema, indices: Sequence[int]) -> pa.Table:
    """The rows of these numbers, in this order."""
    files: list[MappedFile] = []
    for file in dataset.files:
        # Columns that folders tell (keys) are not in the file.
        if file.source.keys or not isinstance(file, MappedFile) or file.schema != schema:
            raise UsageError(
                f"take() cannot read {file.source.path}: it needs local Arrow files with the same "
                "columns; convert the data to such files"
            )
        files.append(file)
    starts = [*accumulate((file.starts[-1] for file in files), initial=0)]
    given, pieces = [*indices], list[pa.RecordBatch]()
    if any(isinstance(one, bool) or not hasattr(one, "__index__") for one in given):
        raise UsageError(f"indices must be whole numbers, not {given!r}")
    for row in map(operator.index, given):
        if not 0 <= row < starts[-1]:
            raise UsageError(f"no row {row}: the data has {starts[-1]:,} rows, counted from 0")
        number = bisect_right(starts, row) - 1
        pieces += files[number].rows(row - starts[number], row - starts[number] + 1)
    return pa.Table.from_batches(pieces, schema)


def open_parquet(content: Source, **facts: Any) -> ParquetFile:
    """Reads the footer."""
    with _named(content.path, "footer"):
        with pq.ParquetFile(content.open_arrow()) as file:
            metadata, schema = file.metadata, file.schema_arrow
        # Counts that a damaged footer can hold and no file can. The column chunks are left to the
        # decoder, which checks that they lie inside the file: asking for their metadata here would
        # let a C++ exception through on some damaged footers, which ends the process ("Definition
        # level histogram size mismatch").
        total = 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            if group.num_rows < 0 or group.total_byte_size < 0:
                raise pa.ArrowInvalid("negative counts")
            total += group.total_byte_size
    facts |= _columns(content, schema, facts["options"])
    share = min(1.0, content.num_bytes / max(1, total))
    return ParquetFile(**facts, metadata=metadata, encoded_share=share)


def open_arrow(content: Source, **facts: Any) -> MappedFile | ArrowFile:
    """Maps a local file; of others reads the schema and, of the file form, the index."""
    head = content.read_at(0, 6)
    with _named(content.path, "schema"):
        if head.startswith(b"FEA1"):
            raise DataError(
                "Feather version 1 is not supported; convert the file with pyarrow.feather",
                path=content.path,
            )
        file = content.open_arrow(is_mapped=content.is_local)
        is_stream = not head.startswith(b"ARROW1")
        reader: Any = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
    facts |= _columns(content, reader.schema, facts["options"])
    schema, count = facts["schema"], None if is_stream else reader.num_record_batches
    is_mapped = content.is_local and all(reader.schema.field(item.name) == item for item in schema)
    with suppress(*_DECODE_ERRORS):  # decoding tells which batch is damaged
        found: Any = reader if count is None else map(reader.get_batch, range(count))
        batches = list[pa.RecordBatch]()
        while is_mapped and (batch := next(found, None)) is not None:
            buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
            is_mapped = not any(buffer.is_mutable for buffer in buffers)  # by decompressing
            batches.append(batch)
        if is_mapped and (count is not None or _has_end(content, file.tell())):
            return MappedFile(
                **facts,
                batches=tuple(batch.select(schema.names) for batch in batches),
                starts=(0, *accumulate(batch.num_rows for batch in batches)),
                stops=(0, *accumulate(batch.get_total_buffer_size() for batch in batches)),
            )
    return ArrowFile(**facts, num_batches=count)


def _has_end(source: Source, offset: int) -> bool:
    """Whether a stream read up to here is whole; pyarrow does not mind if it is cut there."""
    mark = source.read_at(offset - len(_END_OF_STREAM), len(_END_OF_STREAM))
    return mark == _END_OF_STREAM or source.read_at(0, 4) != _END_OF_STREAM[:4]


def _columns(content: Source, schema: pa.Schema, options: ReadOptions) -> dict[str, Any]:
    """The columns to read, after a look at all of them."""
    with _named(content.path, "schema"):
        fields = [_plain(column, content.path) for column in schema]
    names: list[str] = schema.names
    check_names(names, content.path)
    wanted = [item for item in fields if options.columns is None or item.name in options.columns]
    return {"content": content, "schema": pa.schema(wanted, schema.metadata), "names": names}


def _plain(column: pa.Field, path: str) -> pa.Field:
    """The column with plain text in place of views, which pyarrow cannot take rows from.

    Refuses what would fail later on: types without kernels, and names that are not UTF-8.
    """
    name, kind = column.name, column.type
    if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):
        raise DataError(
            f"column {name!r} has the type {kind}, which pyarrow supports only in part; "
            "rewrite the file with plain types",
            path=path,
            place="schema",
        )
    inner = [_plain(kind.field(n), path) for n in range(kind.num_fields)] if kind.num_fields else []
    if pa.types.is_struct(kind):
        kind = pa.struct(inner)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = pa.list_(*inner) if pa.types.is_list(kind) else pa.large_list(*inner)
    else:
        kind = _PLAIN_TYPES.get(kind, kind)
    return column.with_type(kind)


def _first_of(read: Callable[[], Iterator[pa.Table]], _: pa.Schema | None) -> Decoded:
    """The first of some tables, and the others for when they are wanted."""
    parts = read()
    return Decoded(next(parts, pa.table({})), more=or_broken(map(ready_block, parts)))


@contextmanager
def _named(path: str, place: str) -> Iterator[None]:
    """Gives pyarrow's errors the file and the place."""
    try:
        yield
    except DataError:
        raise
    except _DECODE_ERRORS as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        cause = f"the file is corrupt or truncated ({reason}); replace the file with an intact copy"
        if "crypt" in reason:
            cause = f"the file is encrypted ({reason}); write a copy without encryption"
        raise DataError(cause, path=path, place=place) from error
