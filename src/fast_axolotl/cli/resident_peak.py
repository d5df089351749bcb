"""The peak of the memory that a piece of work holds."""

from __future__ import annotations

import threading
from pathlib import Path

from fast_axolotl.system import PROC, read_bytes_of

_SAMPLE_SECONDS = 0.002


class ResidentPeak:
    """The peak of resident anonymous memory: ``with ResidentPeak() as memory:``.

    Mapped files and the page cache are not in it: they belong to the system and can be dropped. A
    thread samples it every few milliseconds, so a shorter peak can be missed.
    """

    def __init__(self, status: Path = PROC / "self" / "status") -> None:
        self._status = status
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._samples: tuple[int, int] | None = None
        """At the beginning of the block, and the most since."""

    def __enter__(self) -> ResidentPeak:
        start = self._sample()
        if start is not None:
            self._samples = start, start
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._samples is not None:
            self._thread.join()

    @property
    def above_start_bytes(self) -> int | None:
        """What the block held at most, beside what was there before; ``None``: see ``reason``."""
        return None if self._samples is None else self._samples[1] - self._samples[0]

    @property
    def reason(self) -> str | None:
        """Why there is no figure."""
        return f"{self._status} has no RssAnon here" if self._samples is None else None

    def _run(self) -> None:
        is_over = False
        while not is_over and self._samples is not None:
            is_over = self._stop.wait(_SAMPLE_SECONDS)
            start, peak = self._samples
            self._samples = start, max(peak, self._sample() or 0)

    def _sample(self) -> int | None:
        for line in (read_bytes_of(self._status) or b"").splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
        return None
