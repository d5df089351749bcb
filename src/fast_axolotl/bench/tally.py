"""One pass over a reader, counted and timed, with the memory it took.

The working set is the resident anonymous memory above where the process stood before: mapped
libraries and the page cache are not in it. It is sampled every 10 ms, so a shorter peak can be
missed. Where the system has no ``/proc``, it is ``None`` with a reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fast_axolotl.reading import Reader, convert

__all__ = ["MemoryWatch", "ReadTally", "tally"]

_SAMPLE_SECONDS = 0.01


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


class MemoryWatch:
    """The peak of resident anonymous memory above the start, while the block runs."""

    def __init__(self, status: Path = Path("/proc/self/status")) -> None:
        self._status = status
        self._stop = threading.Event()
        self._start: int | None = None
        self._peak = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> MemoryWatch:
        self._start = self._sample()
        if self._start is not None:
            self._peak = self._start
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def above_start_bytes(self) -> int | None:
        return None if self._start is None else self._peak - self._start

    @property
    def reason(self) -> str | None:
        return None if self._start is not None else f"{self._status} cannot be read on this system"

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._sample() or 0)

    def _sample(self) -> int | None:
        try:
            for line in self._status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return None


def tally(
    reader: Reader,
    *,
    head: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[ReadTally, list[dict[str, Any]]]:
    """Reads everything, or ``head`` rows, which are then returned; ``progress`` hears of
    (encoded bytes, rows) after each batch."""
    shown: list[dict[str, Any]] = []
    first: float | None = None
    start = clock()
    with MemoryWatch() as memory:
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


def _summary(reader: Reader, seconds: float, first: float | None, memory: MemoryWatch) -> ReadTally:
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
