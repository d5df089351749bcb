"""One pass over a reader, counted and timed, with the memory it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fast_axolotl.reading import Reader

__all__ = ["ReadTally", "ResidentPeak", "tally"]

_SAMPLE_SECONDS = 0.002


class ResidentPeak:
    """The peak of resident anonymous memory: ``with ResidentPeak() as memory:``.

    Mapped files and the page cache are not in it: they belong to the system and can be dropped. A
    thread samples it every few milliseconds, so a shorter peak can be missed. Where the system has
    no ``/proc``, the figures are ``None`` and ``reason`` says why.
    """

    def __init__(self, status: Path = Path("/proc/self/status")) -> None:
        self._status = status
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start_bytes: int | None = None
        """At the beginning of the block."""
        self.peak_bytes: int | None = None
        """The most that was seen."""

    def __enter__(self) -> ResidentPeak:
        self.start_bytes = self.peak_bytes = self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    @property
    def above_start_bytes(self) -> int | None:
        if self.peak_bytes is None or self.start_bytes is None:
            return None
        return self.peak_bytes - self.start_bytes

    @property
    def reason(self) -> str | None:
        """Why there is no figure."""
        return None if self.start_bytes is not None else f"{self._status} has no RssAnon here"

    def _run(self) -> None:
        while self.start_bytes is not None and not self._stop.wait(_SAMPLE_SECONDS):
            self._take()

    def _take(self) -> None:
        sample = self._sample()
        if sample is not None and self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, sample)

    def _sample(self) -> int | None:
        try:
            for line in self._status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return None


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
    """The peak of ``ResidentPeak`` above its start."""
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
    """Reads everything, or ``head`` rows, which are then returned.

    ``progress`` is called with encoded bytes and rows after each batch. ``start`` is when opening
    began, to be counted in.
    """
    from fast_axolotl.reading import convert

    shown: list[dict[str, Any]] = []
    first: float | None = None
    start = clock() if start is None else start
    with ResidentPeak() as memory:
        for batch in reader:
            first = clock() - start if first is None else first
            if head is not None:
                columns = convert(batch.slice(0, head - len(shown)), "python")
                rows = zip(*columns.values(), strict=True)
                shown += [dict(zip(columns, row, strict=True)) for row in rows]
                if len(shown) >= head:
                    break
            if progress is not None:
                progress(reader.stats.num_bytes, reader.stats.rows)
    seconds = clock() - start
    reader.close()
    stats = reader.stats
    summary = ReadTally(
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
    return summary, shown
