"""The peak of the memory that a piece of work holds."""

from __future__ import annotations

import threading
from pathlib import Path

from fast_axolotl.system import PROC, read_bytes_of

_SAMPLE_SECONDS = 0.002


class ResidentPeak:
    """The peak of resident anonymous memory: ``with ResidentPeak() as memory:``.

    Mapped files and the page cache are not in it: they belong to the system and can be dropped. A
    thread samples it every few milliseconds, so a shorter peak can be missed. Where the system has
    no ``/proc``, the figures are ``None`` and ``reason`` says why.
    """

    def __init__(self, status: Path = PROC / "self" / "status") -> None:
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
        """What the block held at most, beside what was there before."""
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
        for line in (read_bytes_of(self._status) or b"").splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
        return None
