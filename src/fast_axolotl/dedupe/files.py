"""Remove duplicate rows of a dataset within a memory budget.

A part of the budget is for reading and writing; the rest is for the set of rows seen, at most 40
bytes for each different row. As long as it fits, one pass decides every row and writes the new
ones. When it no longer does, everything known and every later row goes to disk (``Spill``), the
repeated rows are found there, and a second pass, from where memory ran out, writes the others.
JSON and CSV are read once more before that, so that all rows are compared under their final types.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fast_axolotl.dedupe.output import GROUP_BYTES, check_target, disk_errors, whole_file
from fast_axolotl.dedupe.row_bytes import plain_type
from fast_axolotl.dedupe.rows import column_names, digest_batch, keep_rows
from fast_axolotl.dedupe.seen import SeenRows
from fast_axolotl.dedupe.spill import Spill
from fast_axolotl.errors import ConflictError, DataError, UsageError
from fast_axolotl.reading import Reader, Rejection, open_dataset
from fast_axolotl.reading.schema import MIXED, TypeClash, conform, join_schemas

MIB = 1024 * 1024
DEFAULT_MEMORY_BUDGET = 1024 * MIB
_LEAST_MEMORY_BUDGET = 192 * MIB
_LEAST_WORKING_BYTES = 144 * MIB
_BATCH_ROWS = 16_384
_OTHERS = 1 << 62
"""Rows of the other data are numbered so much lower: before any row of the input."""

Paths = str | Path | Sequence[str | Path]
Write = Callable[[pa.RecordBatch], None]
Progress = Callable[[str, int, int, int], None]
"""Hears of a phase, its bytes done, its bytes in all, and its rows done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupeSummary:
    """What was read, dropped and written."""

    rows_in: int
    rows_out: int
    duplicates: int
    """Duplicate rows dropped, including those of ``against``."""
    duplicates_of_others: int
    """Of those, rows that occur in ``against``."""
    rejected_rows: int
    """Rows skipped with ``on_error="skip"``, as far as their number is known."""
    rejections: tuple[Rejection, ...]
    """What could not be read and why, in the input and in ``against``."""
    files_in: int
    files_against: int
    bytes_in: int
    """The size of the input files."""
    bytes_out: int
    seconds: float
    rows_per_second: float | None
    state_bytes: int
    """The most memory that the set of rows seen took."""
    spilled_bytes: int
    """Written to disk because the set did not fit; 0 where it did."""
    output: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def dedupe_files(
    inputs: Paths,
    output: str | Path,
    *,
    columns: Sequence[str] | None = None,
    against: Paths | None = None,
    overwrite: bool = False,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    num_threads: int = 0,
    temp_dir: str | Path | None = None,
    progress: Progress | None = None,
    **read_options: Any,
) -> DedupeSummary:
    """Remove duplicate rows: write the first row of each value, in the original order.

    Args:
        inputs: What ``open_dataset`` reads: files, folders, globs or URIs.
        output: A ``.parquet``, ``.arrow``, ``.feather`` or ``.jsonl`` file (also ``.jsonl.gz`` and
            ``.jsonl.zst``). It appears whole or not at all.
        columns: Compare only these columns; whole rows are written in any case.
        against: Other data; rows that occur there are dropped as well.
        overwrite: Replace ``output`` if it exists.
        memory_budget: Memory for this work in bytes, on top of what the process already uses.
        num_threads: Decode threads; 0 uses all available CPU cores.
        temp_dir: Where data spills beyond the memory budget; by default next to ``output``.
        progress: Called after every batch.
        read_options: For ``open_dataset``: ``format``, ``split``, ``on_error``, ….
    """
    started = time.perf_counter()
    target = Path(output)
    folder = target.parent if temp_dir is None else Path(temp_dir)
    if not isinstance(memory_budget, int) or memory_budget < _LEAST_MEMORY_BUDGET:
        raise UsageError(
            f"memory_budget must be a whole number of bytes, at least {_LEAST_MEMORY_BUDGET:,} "
            f"({_LEAST_MEMORY_BUDGET // MIB} MiB), not {memory_budget!r}"
        )
    check_target(target, overwrite=overwrite)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"temp_dir {folder} is not a writable folder; pass another")
    working_bytes = max(_LEAST_WORKING_BYTES, memory_budget // 4)
    settings = {
        "batch_size": _BATCH_ROWS,
        "num_threads": num_threads,
        "memory_budget": working_bytes // 4,
        "infer": "scan",
        **read_options,
    }
    tell: Progress = progress or (lambda *_: None)
    tell("opening files", 0, 0, 0)
    reader = open_dataset(inputs, **settings)
    others = None if against is None else open_dataset(against, **settings)
    files = [*reader.files, *(others.files if others is not None else ())]
    sources = (Path(file.source.path) for file in files)
    if target.exists() and any(path.exists() and target.samefile(path) for path in sources):
        raise UsageError(f"{target} is one of the input files; write to another name")
    limit = memory_budget - working_bytes
    try:
        key = _key_schema(reader, others, columns)
        with ExitStack() as stack:
            group_bytes = min(GROUP_BYTES, working_bytes // 16)
            write = stack.enter_context(whole_file(target, reader.schema, group_bytes))
            spill = Spill(folder, limit=limit)
            stack.callback(spill.close)
            seen = SeenRows(num_threads)
            run = _Run(key, limit, num_threads, spill, write, tell, seen, seen.secret)
            run.work(reader, others)
    except TypeClash as clash:
        raise ConflictError(
            f"column {clash.path!r} has the type {clash.known} in one dataset and {clash.found} in "
            "the other, which cannot be compared; make the types equal, or compare other columns"
        ) from None
    seconds = time.perf_counter() - started
    return DedupeSummary(
        rows_in=run.rows_in,
        rows_out=run.rows_out,
        duplicates=run.rows_in - run.rows_out,
        duplicates_of_others=run.of_others,
        rejected_rows=run.rejected,
        rejections=tuple(run.rejections),
        files_in=len(reader.files),
        files_against=0 if others is None else len(others.files),
        bytes_in=sum(file.source.num_bytes for file in reader.files),
        bytes_out=target.stat().st_size,
        seconds=seconds,
        rows_per_second=run.rows_in / seconds if seconds else None,
        state_bytes=run.state_bytes,
        spilled_bytes=spill.num_bytes,
        output=str(target),
    )


@dataclass
class _Run:
    """One run over the data: decides rows in memory while they fit, then only writes them down."""

    key: pa.Schema
    limit: int
    """What the set of rows seen may take."""
    num_threads: int
    spill: Spill
    write: Write
    tell: Progress
    seen: SeenRows | None
    """``None`` once it no longer fits."""
    secret: Any
    rows_in: int = 0
    rows_out: int = 0
    of_others: int = 0
    rejected: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    state_bytes: int = 0
    """The most that the set has held."""

    def work(self, reader: Reader, others: Reader | None) -> None:
        """Writes the rows that come for the first time."""
        if others is not None:
            for batch, start in self._batches(others, "reading the rows to remove"):
                self._firsts(batch, np.arange(start, start + batch.num_rows) - _OTHERS)
            self._note_rejections(others)
        row, state = 0, reader.state_dict()
        for batch, start in self._batches(reader, "reading"):
            self.rows_in = start + batch.num_rows
            firsts = self._firsts(batch, np.arange(start, self.rows_in))
            if firsts is not None:
                self._write(batch, start, firsts)
                row = self.rows_in
                if self.seen is None:
                    state = reader.state_dict()  # where memory ran out
        self._note_rejections(reader)
        if row == self.rows_in:
            return
        self.tell("finding duplicates on disk", 0, 0, self.rows_in)
        with disk_errors(self.spill.folder):
            self.spill.resolve()
        reader.load_state_dict(state)
        for batch, start in self._batches(reader, "writing", row):
            row = start + batch.num_rows
            if row > self.rows_in:
                break
            self._write(batch, start, self.spill.firsts(start, row))
        if row != self.rows_in:
            raise DataError(
                f"the input had {self.rows_in:,} rows when it was first read and changed before "
                "the second read; run again when nothing writes to it"
            )

    def _firsts(self, batch: pa.RecordBatch, numbers: Any) -> Any:
        """The number of the first row like each, or ``None`` where that is found out later."""
        keys = batch.select(self.key.names)
        if [*map(plain_type, keys.schema.types)] != [*map(plain_type, self.key.types)]:
            table = conform(pa.Table.from_batches([keys]), self.key)
            keys = table.combine_chunks().to_batches()[0]
        digests = digest_batch(keys, self.secret, self.num_threads)
        with disk_errors(self.spill.folder):
            if self.seen is None:
                self.spill.add(digests, numbers)
                return None
            firsts = self.seen.enter(digests, numbers)
            self.state_bytes = max(self.state_bytes, self.seen.num_bytes)
            if self.seen.num_bytes > self.limit:
                for entered, rows in self.seen.entries():
                    self.spill.add(entered, rows)
                self.seen = None
        return firsts

    def _note_rejections(self, reader: Reader) -> None:
        self.rejections += reader.stats.rejections
        self.rejected += reader.stats.rejected_rows

    def _batches(
        self, reader: Reader, phase: str, start: int = 0
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Batches and the number of their first row."""
        for batch in reader:
            yield batch, start
            start += batch.num_rows
            pa.default_memory_pool().release_unused()
            self.tell(phase, reader.stats.num_bytes, reader.num_bytes, start)

    def _write(self, batch: pa.RecordBatch, start: int, firsts: Any) -> None:
        new = firsts == np.arange(start, start + batch.num_rows)
        self.write(keep_rows(batch, new))
        self.rows_out += int(np.count_nonzero(new))
        self.of_others += int(np.count_nonzero(firsts < 0))


def _key_schema(reader: Reader, others: Reader | None, columns: Sequence[str] | None) -> pa.Schema:
    """The columns that are compared, under types that both sides can be brought to."""
    names = column_names(reader.schema, columns, "the input")
    if not names:
        raise DataError("the input has no columns to compare; check that the files have rows")
    key = pa.schema([reader.schema.field(name) for name in names])
    if others is None or not others.schema.names:
        return key
    names = column_names(others.schema, names, "the dataset to compare with")
    theirs = pa.schema([others.schema.field(name) for name in names])
    for name in names:
        # Values of several kinds are held as JSON text, which no plain value equals.
        ours, other = key.field(name).type, theirs.field(name).type
        if (ours == MIXED) != (other == MIXED):
            raise TypeClash(name, ours, other)
    is_like = [*map(plain_type, key.types)] == [*map(plain_type, theirs.types)]
    return key if is_like else join_schemas(key, theirs)
