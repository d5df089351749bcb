"""``open_dataset`` and the ``Reader``: any files in, record batches out, bounded memory.

A pass over the data is: deal out the units (``order``), split and decode their blocks ahead in
threads (``prefetch``), bring every block to the types known so far (``unify_types``), cut the rows
into batches (``batches``). After any batch ``state_dict`` says where the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from fast_axolotl.errors import UsageError
from fast_axolotl.reading.batches import Batcher, value_bytes
from fast_axolotl.reading.blocks import (
    CsvDialect,
    Dataset,
    Decoded,
    InputFile,
    ReadOptions,
    Rejection,
)
from fast_axolotl.reading.files import find_files
from fast_axolotl.reading.formats import open_files
from fast_axolotl.reading.order import (
    BlockShare,
    Order,
    Position,
    ResumePoint,
    UnitShare,
    check_shard,
)
from fast_axolotl.reading.prefetch import Prefetcher
from fast_axolotl.reading.unify_types import Known, first_schema
from fast_axolotl.system import READING_LISTENERS, usable_cores

__all__ = ["ReadStats", "Reader", "open_dataset", "usable_threads"]

MIB = 1024 * 1024

DEFAULT_MEMORY_BUDGET = 256 * MIB
_LEAST_MEMORY_BUDGET = 16 * MIB
_MOST_LISTED_REJECTIONS = 1000
_THREAD_BYTES = 2 * MIB
"""One decode thread for each so many encoded bytes."""

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
    rejected_rows: int = 0
    """Rows left out under ``on_error="skip"``, as far as their number is known."""
    rejections: list[Rejection] = field(default_factory=list)
    """What was left out and why, the first thousand."""
    ignored_files: tuple[str, ...] = ()
    """Files in folders that are no data files."""

    def reject(self, rejection: Rejection) -> None:
        self.rejected_rows += rejection.num_rows or 0
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
    on_conflict: Literal["raise", "json"] = "raise",
    infer: Literal["auto", "scan"] = "auto",
    split: str | None = None,
    json_field: str | None = None,
    csv: CsvDialect | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Reader:
    """A ``Reader`` of files of any supported format: it iterates ``pyarrow.RecordBatch``es.

    Args:
        paths: A file, folder, glob or URI, or a list of them, read in this order.
        format: ``auto``, or one of ``list_supported_formats()``.
        columns: Only these columns, in this order.
        batch_size: Rows in a batch.
        num_threads: Decode threads; 0 takes what this process may use, at most 8.
        memory_budget: Bytes that reading ahead may hold.
        shard: ``(index, count)``: only this share of the rows.
        shuffle: A seed; ``None`` keeps the order of the files.
        epoch: Changes the shuffle.
        even: Every shard gives the same number of batches: ``drop`` leaves out what some shards
            have more than others, ``pad`` repeats rows and marks them in a column ``is_padding``.
        on_error: ``raise``, or ``skip`` to leave out what cannot be read and list it in ``stats``.
        on_conflict: ``raise``, or ``json`` to receive a column of clashing types as JSON text.
        infer: ``scan`` reads JSON and CSV once before the first batch, so that the schema is final
            from the start; ``auto`` widens it as it goes.
        split: Which split of a folder that has several; ``all`` for all of them.
        json_field: The field of a JSON document that holds the rows.
        csv: The dialect, where detection should not decide.
        storage_options: For fsspec.
    """
    for name, value, choices in (
        ("infer", infer, ("auto", "scan")),
        ("even", even, (None, "drop", "pad")),
        ("on_error", on_error, ("raise", "skip")),
        ("on_conflict", on_conflict, ("raise", "json")),
    ):
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    if columns is not None and (
        isinstance(columns, str) or not columns or len(set(columns)) != len(columns)
    ):
        raise UsageError(f"columns must be a list of different names, not {columns!r}")
    _check_at_least("memory_budget", memory_budget, _LEAST_MEMORY_BUDGET)
    sources, ignored = find_files(paths, split=split, storage_options=storage_options)
    block_bytes = max(MIB // 4, min(memory_budget // 32, 8 * MIB))
    total = sum(source.num_bytes for source in sources)
    options = ReadOptions(
        on_error=on_error,
        on_conflict=on_conflict,
        csv=csv or CsvDialect(),
        json_field=json_field,
        columns=None if columns is None else tuple(columns),
        block_bytes=block_bytes,
        unit_bytes=min(block_bytes // 2, max(total // 64, 2 * MIB)),
    )
    opened = open_files(sources, format, options)
    dataset = Dataset(
        inputs=tuple(item for item, _ in opened),
        formats=tuple(file for _, file in opened),
        options=options,
        window_bytes=4 * block_bytes,
    )
    return Reader(
        dataset,
        batch_size=batch_size,
        num_threads=num_threads,
        memory_budget=memory_budget,
        shard=check_shard(shard),
        shuffle=shuffle,
        epoch=epoch,
        scan=infer == "scan",
        ignored_files=tuple(ignored),
    )


class Reader:
    """Record batches of a dataset, with a position that can be saved and restored.

    Iterating starts at the beginning, or where ``load_state_dict`` put it. A new iteration stops
    the one before.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        num_threads: int,
        memory_budget: int,
        shard: tuple[int, int],
        shuffle: int | None,
        epoch: int,
        scan: bool,
        ignored_files: tuple[str, ...],
    ) -> None:
        _check_at_least("batch_size", batch_size, 1)
        _check_at_least("num_threads", num_threads, 0)
        _check_at_least("epoch", epoch, 0)
        if shuffle is not None:
            _check_at_least("shuffle", shuffle, 0)
        self._dataset = dataset
        self._batch_size = batch_size
        self._num_threads = num_threads = num_threads or usable_threads()
        self._memory_budget = memory_budget
        self._shard = shard
        self._base = first_schema(
            dataset, scan=scan, num_threads=num_threads, budget=memory_budget // 2
        )
        self._stats = ReadStats(ignored_files=ignored_files)
        self._stop: Callable[[], None] | None = None
        self._pass = object()
        """Changes with every pass, so that one that was stopped cannot move the position."""
        self._order = Order.plan(dataset, shuffle, epoch)
        self._rewind()

    def _rewind(self) -> None:
        self._generations: list[list[list[int]]] = []
        self._position = Position()
        self._known = Known(self._base)
        self._next_schema = self._base
        """The types known where the next batch begins; those of ``_known`` may be ahead of it."""
        self._restored = False

    @property
    def schema(self) -> pa.Schema:
        """The columns known so far: final for Parquet, Arrow and text, and after a scan."""
        return self._known.schema

    @property
    def stats(self) -> ReadStats:
        """Counts of the current pass."""
        return self._stats

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files that are read, and what they are."""
        return self._dataset.inputs

    @property
    def num_bytes(self) -> int:
        """The encoded bytes of this reader's share, the measure that ``stats.num_bytes`` nears."""
        return sum(share.num_bytes for share in self._shares())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self.close()
        if not self._restored:
            self._rewind()
        self._restored = False
        self._stats = ReadStats(ignored_files=self._stats.ignored_files)
        return self._run(self._shares(), self._position, self._pass)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead and ends the current iteration; a new one can be started."""
        self._pass = object()
        if self._stop is not None:
            self._stop()
            self._stop = None

    def set_epoch(self, epoch: int) -> None:
        """Back to the beginning, with the shuffle of another epoch."""
        _check_at_least("epoch", epoch, 0)
        self.close()
        self._rewind()
        self._order = Order.plan(self._dataset, self._order.seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, as plain JSON values."""
        point = ResumePoint(
            dataset=self._dataset,
            order=self._order,
            generations=self._generations,
            position=self._position,
            schema=self._next_schema,
        )
        return point.state(self._shard)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Continues where a state was taken.

        ``state`` is what ``state_dict`` gave, or anything that holds such states, for example the
        state of a ``StatefulDataLoader``. With the states of all ranks and workers, the reader
        continues on another number of them, and every row not yet delivered comes exactly once.
        """
        point = ResumePoint.from_states(state, self._dataset, self._shard)
        self.close()
        self._dataset, self._order = point.dataset, point.order
        self._generations, self._position = point.generations, point.position
        self._known = Known(point.schema)
        self._next_schema = point.schema
        self._restored = True

    def _shares(self) -> list[UnitShare]:
        return self._order.deal(self._shard, self._generations)

    def _run(
        self, shares: Sequence[UnitShare], start: Position, token: object
    ) -> Iterator[pa.RecordBatch]:
        dataset = self._dataset
        if len(shares) < self._num_threads:
            dataset = dataset.with_options(parallel_columns=True)
        known, options = self._known, dataset.options
        # Starting a thread costs more than a small file is worth.
        useful_threads = sum(share.num_bytes for share in shares) // _THREAD_BYTES
        prefetcher: Prefetcher[BlockShare, Decoded] = Prefetcher(
            self._order.blocks(dataset, shares, start),
            lambda share: known.decode(share.block, options),
            num_threads=max(1, min(self._num_threads, useful_threads)),
            budget=self._memory_budget // 2,
        )
        self._stop = stop = prefetcher.close
        batcher = Batcher(self._batch_size, self._memory_budget // 8)
        file = -1
        try:
            for share, decoded in prefetcher:
                unit = shares[share.position.unit].units[0]
                if self._order.seed is not None:
                    _announce("refill", "a shuffle window is filled")
                elif unit.file != file:
                    file = unit.file
                    _announce("shard", dataset.inputs[file].source.path)
                decoded = known.widen(decoded, share.block, options)
                self._add(share, decoded, batcher, start)
                for batch, position in batcher.full():
                    yield self._delivered(batch, position, batcher, token)
            for batch, position in batcher.rest():
                yield self._delivered(batch, position, batcher, token)
            self._check_pass(token)
        finally:
            stop()

    def _add(self, share: BlockShare, decoded: Decoded, batcher: Batcher, start: Position) -> None:
        """Counts a block's rows and hands those of this share to the batcher."""
        for rejection in decoded.rejections if share.is_first else ():
            self._stats.reject(rejection)
        table = decoded.table
        rows = share.rows(table)
        self._stats.num_bytes += share.weight * rows.num_rows // max(1, table.num_rows)
        begin = share.position
        if begin == (start.unit, start.block, 0):
            begin = start
        row_bytes = value_bytes(table) / max(1, table.num_rows)
        after = Position(begin.unit, begin.block + 1)
        batcher.add(rows, begin, after, row_bytes)

    def _check_pass(self, token: object) -> None:
        if self._pass is not token:
            raise UsageError(
                "this iteration was stopped: the reader was closed, restored or iterated anew; "
                "use the newer iterator"
            )

    def _delivered(
        self, batch: pa.RecordBatch, position: Position, batcher: Batcher, token: object
    ) -> pa.RecordBatch:
        self._check_pass(token)
        self._position = position
        self._next_schema = batcher.next_schema or self._known.schema
        self._stats.rows += batch.num_rows
        self._stats.batches += 1
        return batch


def _announce(name: str, text: str) -> None:
    for listener in READING_LISTENERS:
        listener(name, text)


def usable_threads() -> int:
    """Processors that this process may use, and at most 8."""
    return min(_MOST_THREADS, usable_cores())


def _check_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least:,}, not {value!r}")
