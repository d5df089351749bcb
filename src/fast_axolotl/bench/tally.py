"""One pass over a reader, counted and timed, with the memory it took.

The working set is the resident anonymous memory above where the process stood (``resident``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fast_axolotl.bench.resident import ResidentPeak
from fast_axolotl.reading import Reader, convert

__all__ = ["ReadTally", "tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTally:
    """What a pass over the data came to."""

    rows: int
    batches: int
    files: int
    num_bytes: int
    """Encoded bytes behind the rows."""
    seconds: float
    first_batch_seconds: float | None
    rows_per_second: float | None
    bytes_per_second: float | None
    working_set_bytes: int | None
    working_set_reason: str | None
    rejected_rows: int
    rejections: list[dict[str, Any]]
    ignored_files: list[str]
    columns: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tally(
    reader: Reader,
    *,
    head: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    start: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[ReadTally, list[dict[str, Any]]]:
    """Reads everything, or ``head`` rows, which are then returned; ``progress`` hears of
    (encoded bytes, rows) after each batch. ``start`` is when opening began, to be counted in."""
    shown: list[dict[str, Any]] = []
    first: float | None = None
    start = clock() if start is None else start
    with ResidentPeak() as memory:
        for batch in reader:
            first = clock() - start if first is None else first
            if head is not None:
                shown += _rows(batch.slice(0, head - len(shown)))
                if len(shown) >= head:
                    break
            if progress is not None:
                progress(reader.stats.num_bytes, reader.stats.rows)
    seconds = clock() - start
    reader.close()
    return _summary(reader, seconds, first, memory), shown


def _rows(batch: Any) -> list[dict[str, Any]]:
    columns = convert(batch, "python")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _summary(
    reader: Reader, seconds: float, first: float | None, memory: ResidentPeak
) -> ReadTally:
    stats = reader.stats
    return ReadTally(
        rows=stats.rows,
        batches=stats.batches,
        files=len(reader.files),
        num_bytes=stats.num_bytes,
        seconds=seconds,
        first_batch_seconds=first,
        rows_per_second=stats.rows / seconds if seconds else None,
        bytes_per_second=stats.num_bytes / seconds if seconds else None,
        working_set_bytes=memory.above_start_bytes,
        working_set_reason=memory.reason,
        rejected_rows=stats.rejected_rows,
        rejections=[asdict(item) for item in stats.rejections],
        ignored_files=list(stats.ignored_files),
        columns={field.name: str(field.type) for field in reader.schema},
    )
