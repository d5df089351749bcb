"""``open_dataset`` and the ``Reader``: files in, record batches out, in bounded memory.

A pass over the data is: deal out the units (``order``), decode them ahead in threads, shuffle their
rows and cut them into batches (``rows``). After any batch ``state_dict`` says where the next one
begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from fast_axolotl.errors import DataError, ResumeError, UsageError
from fast_axolotl.reading.blocks import CsvDialect, Dataset, InputFile, ReadOptions, Rejection
from fast_axolotl.reading.files import find_files
from fast_axolotl.reading.formats import open_files
from fast_axolotl.reading.index import unit_rows, with_csv_edges
from fast_axolotl.reading.order import (
    Order,
    Piece,
    Position,
    ResumePoint,
    check_shard,
    warn_of_sharing,
)
from fast_axolotl.reading.rows import Rows, cut_batches, read_rows, shuffle_rows
from fast_axolotl.reading.unify_types import Known, first_schema
from fast_axolotl.system import usable_cores

MIB = 1024 * 1024

DEFAULT_MEMORY_BUDGET = 256 * MIB
LEAST_MEMORY_BUDGET = 16 * MIB
_MOST_LISTED_REJECTIONS = 1000
_UNITS = 4096
"""A file list is cut into about so many units, so that 1,024 shards find work in a few GB."""
_LEAST_UNIT_BYTES = MIB // 32
_MOST_UNIT_BYTES = 4 * MIB
_PADDING = pa.field("is_padding", pa.bool_())
_THREAD_BYTES = 2 * MIB
"""One decode thread for each so many encoded bytes."""

_THREAD_BUDGET = 8 * MIB
"""Memory that each decode thread must be given: its allocator keeps some of what it ever used."""

_MOST_THREADS = 8
"""More decode threads than this have not paid for themselves in any measurement."""


@dataclass(slots=True)
class ReadStats:
    """What a reader has done in its current pass."""

    rows: int = 0
    """Rows delivered."""
    batches: int = 0
    """Batches delivered."""
    num_bytes: int = 0
    """Encoded bytes behind the rows delivered so far, before decompression of the columns."""
    padding_rows: int = 0
    """Rows among them that were repeated under ``even="pad"``."""
    dropped_rows: int = 0
    """Rows of this shard that are left out under ``even="drop"``."""
    rejected_rows: int = 0
    """Rows skipped with ``on_error="skip"``; those of ``rejected_files`` are not counted."""
    rejected_files: set[str] = field(default_factory=set)
    """Files skipped whole or from some place on, so that the number of lost rows is unknown."""
    rejections: list[Rejection] = field(default_factory=list)
    """What was skipped and why: the first thousand rows and files."""
    ignored_files: tuple[str, ...] = ()
    """Files in folders that are not data files."""

    def reject(self, rejection: Rejection) -> None:
        self.rejected_rows += rejection.num_rows or 0
        if rejection.num_rows is None:
            self.rejected_files.add(rejection.path)
        if len(self.rejections) < _MOST_LISTED_REJECTIONS:
            self.rejections.append(rejection)


def open_dataset(
    paths: str | Path | Sequence[str | Path],
    *,
    format: str = "auto",
    columns: Sequence[str] | None = None,
    batch_size: int = 1000,
    num_threads: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    shard: tuple[int, int] | None = None,
    shuffle: int | None = None,
    epoch: int = 0,
    even: Literal["drop", "pad"] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    infer: Literal["auto", "scan"] = "auto",
    split: str | None = None,
    csv: CsvDialect | None = None,
    storage_options: dict[str, Any] | None = None,
    retry_seconds: float = 300.0,
) -> Reader:
    """Open files of any supported format; the ``Reader`` yields ``pyarrow.RecordBatch``es.

    Args:
        paths: A file, folder, glob or URI, or a list of them, read in this order.
        format: ``auto``, or one of ``list_supported_formats()``.
        columns: Read only these columns, in this order.
        batch_size: Rows per batch.
        num_threads: Decode threads; 0 uses all available processors, at most 8.
        memory_budget: Memory for reading ahead, in bytes.
        shard: ``(index, count)``: read only this shard, counted from 0.
        shuffle: The seed of the shuffle; ``None`` keeps the order of the files.
        epoch: Gives each epoch another shuffle.
        even: Make all shards yield the same number of batches: ``drop`` drops surplus rows,
            ``pad`` repeats rows and marks them in a column ``is_padding``.
        on_error: ``raise``, or ``skip`` to skip rows and files that cannot be read; ``stats``
            counts and lists them.
        infer: ``auto`` infers the types of JSON and CSV from the first rows and then keeps them;
            ``scan`` reads all files once before the first batch.
        split: The split to read if a folder has several; ``all`` reads all of them.
        csv: The CSV dialect; detected by default.
        storage_options: Options for fsspec, such as credentials.
        retry_seconds: How long to retry a failed remote request, in total.
    """
    for name, value, choices in (
        ("infer", infer, ("auto", "scan")),
        ("even", even, (None, "drop", "pad")),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    if columns is not None and (
        isinstance(columns, str) or not columns or len(set(columns)) != len(columns)
    ):
        raise UsageError(f"columns must be a list of distinct names, not {columns!r}")
    for name, number, least in (
        ("memory_budget", memory_budget, LEAST_MEMORY_BUDGET),
        ("batch_size", batch_size, 1),
        ("num_threads", num_threads, 0),
        ("shuffle", 0 if shuffle is None else shuffle, 0),
        ("epoch", epoch, 0),
    ):
        _check_at_least(name, number, least)
    if not retry_seconds >= 0:
        raise UsageError(f"retry_seconds must be at least 0, not {retry_seconds!r}")
    sources, ignored = find_files(
        paths, split=split, storage_options=storage_options, retry_seconds=retry_seconds
    )
    block_bytes = max(MIB // 4, min(memory_budget // 32, 8 * MIB))
    total = sum(source.num_bytes for source in sources)
    options = ReadOptions(
        on_error=on_error,
        csv=csv or CsvDialect(),
        columns=None if columns is None else tuple(columns),
        block_bytes=block_bytes,
        unit_bytes=max(_LEAST_UNIT_BYTES, min(total // _UNITS, _MOST_UNIT_BYTES)),
    )
    dataset = Dataset(
        files=tuple(open_files(sources, format, options)),
        options=options,
        window_bytes=memory_budget // 8,
    )
    shard = check_shard(shard)
    if shard[1] > 1 or shuffle is not None:
        dataset = with_csv_edges(dataset)
    schema = first_schema(
        dataset,
        scan=infer == "scan",
        num_threads=_decode_threads(num_threads, memory_budget, total),
        budget=memory_budget // 2,
    )
    if even == "pad" and _PADDING.name in schema.names:
        raise UsageError(
            f'the data already has a column {_PADDING.name!r}; rename it, or pass even="drop"'
        )
    rows = None if even is None else unit_rows(dataset)
    order = Order(dataset=dataset, seed=shuffle, epoch=epoch, rows=rows)
    return Reader(
        ResumePoint(order=order, schema=schema),
        shard=shard,
        even=even,
        batch_size=batch_size,
        num_threads=num_threads,
        memory_budget=memory_budget,
        ignored_files=tuple(ignored),
    )


class Reader(AbstractContextManager["Reader"]):
    """Record batches of a dataset, with a position that can be saved and restored.

    Iteration starts at the beginning, or where ``load_state_dict`` resumes. A new iterator ends
    the previous one.
    """

    def __init__(
        self,
        start: ResumePoint,
        *,
        shard: tuple[int, int],
        even: Literal["drop", "pad"] | None,
        batch_size: int,
        num_threads: int,
        memory_budget: int,
        ignored_files: tuple[str, ...],
    ) -> None:
        self.shard = shard
        """The index of this shard, and the number of shards."""
        self.even = even
        """How all shards get the same number of batches."""
        self.batch_size = batch_size
        """Rows per batch."""
        self._num_threads, self._memory_budget = num_threads, memory_budget
        self._base = start.schema
        self.stats = ReadStats(ignored_files=ignored_files)
        """Counts of the current pass."""
        self._running = ExitStack()
        self._places: list[tuple[int, Position]] = []
        """Of the last batch; see ``Batch``."""
        self._resume_at(start)

    def _resume_at(self, point: ResumePoint) -> None:
        self.close()
        self._next, self._known, self._has_begun = point, Known(point.schema), False
        """Where the next batch begins. The types there may be fewer than those of ``_known``."""

    @property
    def schema(self) -> pa.Schema:
        """The columns known so far: final for Parquet, Arrow and text, and after a scan."""
        schema = self._known.schema
        return schema.append(_PADDING) if self.even == "pad" else schema

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files to read, with their format and compression."""
        return tuple(
            InputFile(source=part, format=f.format, compression=f.compression, options=f.options)
            for f in self._next.order.dataset.files
            for part in f.sources
        )

    @property
    def num_bytes(self) -> int:
        """Encoded bytes of this shard: what ``stats.num_bytes`` reaches at the end of a pass."""
        return sum(piece.num_bytes for piece in self._next.order.sequence(self.shard))

    @property
    def num_rows(self) -> int:
        """The rows that this reader yields in a full pass, with ``even`` taken into account.

        Parquet and Arrow files store the number. Other files are read once to count their rows,
        and the counts are kept in the user's cache folder.
        """
        counts = self._shard_rows()
        choose = {"drop": min, "pad": max}.get(self.even or "")
        return choose(counts) if choose else counts[self.shard[0]]

    def take(self, indices: Sequence[int]) -> pa.Table:
        """Rows of local Arrow files by index, independent of shard and shuffle.

        Such files are mapped, so that nothing is decoded; other formats are an error.
        """
        from fast_axolotl.reading.columnar import take_rows  # most readers never take

        return take_rows(self._next.order.dataset, self._base, indices)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._has_begun:
            self.set_epoch(self._next.order.epoch)
        self.close()
        self._has_begun = True
        self.stats = ReadStats(ignored_files=self.stats.ignored_files)
        index, count = self.shard
        if index == 0 and count > 1:
            warn_of_sharing(self._next.order, count)
        return self._run(self._running)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the current iteration; a new one can start."""
        self._running.close()
        self._running = ExitStack()

    def set_epoch(self, epoch: int) -> None:
        """Go back to the beginning, with the shuffle of another epoch."""
        _check_at_least("epoch", epoch, 0)
        order = replace(self._next.order, epoch=epoch, generations=())
        self._resume_at(ResumePoint(order=order, schema=self._base))

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """The position of the next batch, as plain JSON values.

        With ``taken``: the position after this many rows of the last batch.
        """
        point = self._next
        if taken is not None:
            left = taken
            point = replace(point, rows=point.rows - sum(n for n, _ in self._places) + taken)
            for count, start in self._places:
                if left < count:
                    point = replace(point, position=start.forward(left))
                    break
                left -= count
        return point.state(self.shard)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Resume from a saved state.

        ``state`` is a return value of ``state_dict``, or an object that contains such states, for
        example the state of a ``StatefulDataLoader``. With the states of all ranks and workers, the
        number of ranks or workers may change: every remaining row is delivered exactly once.
        """
        point = ResumePoint.from_states(state, self._next.order.dataset, self.shard)
        if (point.order.rows is None) != (self.even is None):
            raise ResumeError(
                f"the state was saved {'without' if self.even else 'with'} even; open the reader "
                f"{'without' if self.even else 'with'} it, too"
            )
        self._resume_at(point)

    def _shard_rows(self) -> list[int]:
        order = self._next.order
        rows = unit_rows(self._next.order.dataset) if order.rows is None else order.rows
        dealt = order.deal(self.shard[1])
        return [sum(piece.count(rows) for piece in pieces) for pieces in dealt]

    def _read(self, pieces: Sequence[Piece], start: Position, running: ExitStack) -> Iterator[Rows]:
        """The rows of a sequence in the order of delivery, from a position on."""
        order = self._next.order
        num_bytes = sum(piece.num_bytes for piece in pieces)
        threads = _decode_threads(self._num_threads, self._memory_budget, num_bytes)
        budget = self._memory_budget // (2 if order.seed is None else 4)
        tables = read_rows(order.dataset, pieces, start, self._known, threads, budget, running)
        if order.seed is None:
            return tables
        seed_of = partial(order.window_seed, self.shard, len(order.generations))
        return shuffle_rows(tables, pieces, start, seed_of, order.dataset.window_bytes)

    def _run(self, running: ExitStack) -> Iterator[pa.RecordBatch]:
        pieces, start = self._next.order.sequence(self.shard), self._next.position
        # Batches of the same number everywhere cannot also be cut by bytes.
        most_bytes = self._memory_budget // 8 if self.even is None else sys.maxsize
        read = self._read if self.even is None else self._read_evenly

        def counted() -> Iterator[Rows]:
            for rows in read(pieces, start, running):
                for rejection in rows.rejections:
                    self.stats.reject(rejection)
                self.stats.num_bytes += rows.num_bytes
                if self.even == "pad":
                    marks = pa.repeat(rows.start.piece == len(pieces), len(rows.table))
                    rows = replace(rows, table=rows.table.append_column(_PADDING, marks))
                yield rows

        with running:
            batches = cut_batches(counted(), lambda: self.batch_size, most_bytes)
            for batch, places, after, schema in batches:
                check_pass(self._running, running)
                if self.even == "pad":
                    schema = schema.remove(len(schema) - 1)
                point, self._places = self._next, places
                point.position, point.schema = after, schema
                point.rows += len(batch)
                self.stats.rows += len(batch)
                self.stats.batches += 1
                yield batch
            check_pass(self._running, running)

    def _read_evenly(
        self, pieces: Sequence[Piece], start: Position, running: ExitStack
    ) -> Iterator[Rows]:
        """As many rows as every other shard has, one left out or repeated."""
        counts = self._shard_rows()
        own, delivered, end = counts[self.shard[0]], self._next.rows, Position(len(pieces))
        target = min(counts) if self.even == "drop" else max(counts)
        left, padding = target - delivered, max(0, target - max(own, delivered))
        self.stats.dropped_rows = max(0, own - target)

        for rows in self._read(pieces, start, running):
            table = rows.table.slice(0, max(0, left))
            left -= table.num_rows
            is_cut = table.num_rows < rows.table.num_rows
            after = rows.start.forward(table.num_rows) if is_cut else rows.after
            yield replace(rows, table=table, after=after)
        if left > padding:
            raise DataError(
                f"{left - padding:,} of {own:,} counted rows are missing: a file changed after its "
                "rows were counted; open the files again"
            )
        if left:
            # The first row of this shard again; that of the largest where it has none.
            richest = counts.index(max(counts)), self.shard[1]
            source = pieces if own else self._next.order.sequence(richest)
            rows = next(rows for rows in self._read(source, Position(), running) if len(rows.table))
            self.stats.padding_rows += left
            table = rows.table.slice(0, left)
            yield replace(rows, table=table, start=end, after=end, num_bytes=0, rejections=())


def check_pass(newest: ExitStack, running: ExitStack) -> None:
    """Refuses to go on with a pass that is not the newest one."""
    if newest is not running:
        raise UsageError(
            "this iterator is no longer valid: the reader was closed, restored or iterated again; "
            "use the newest iterator"
        )


def dataset_of(reader: Reader) -> Dataset:
    """Its files, opened and cut up."""
    return reader._next.order.dataset


def _decode_threads(wanted: int, memory_budget: int, num_bytes: int) -> int:
    """Starting a thread costs more than a small file is worth."""
    useful = min(num_bytes // _THREAD_BYTES, memory_budget // _THREAD_BUDGET)
    return min(useful, wanted or usable_threads()) if useful > 1 else 1


def usable_threads() -> int:
    """Processors that this process may use, and at most 8."""
    return min(_MOST_THREADS, usable_cores())


def _check_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number, {least:,} or more, not {value!r}")
