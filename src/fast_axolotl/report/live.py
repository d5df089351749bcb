"""A run as it goes on: read what is new, sum it up, draw it, once a second, until it ends.

What is read comes from a source: the folder of a record, or samples of a process. How it is summed
up is given as a function, since this layer measures nothing. The sum over all steps so far costs
more the longer the run is; it is made anew only so often that it takes 5 % of one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from fast_axolotl.record import RunRecord, RunSummary, SystemRecord, SystemSample, SystemStart
from fast_axolotl.record.follower import (
    MOST_SAMPLES,
    NEWEST,
    condense_samples,
    restart_window,
)
from fast_axolotl.report.live_frame import Frame, make_frame
from fast_axolotl.report.live_screen import Display

__all__ = ["LiveSource", "LiveView", "SampledProcess"]

INTERVAL_SECONDS = 1.0
_SUMMARY_SHARE = 0.05
"""Of one core, at most this for summing up."""


class LiveSource(Protocol):
    """Where a live view reads from."""

    @property
    def record(self) -> RunRecord:
        """All that is known by now."""

    @property
    def is_behind(self) -> bool:
        """More is there than one ``poll`` reads."""

    @property
    def stepless_seconds(self) -> float:
        """Since the last news of a step."""

    def poll(self) -> int:
        """Take in what is new; how much it is."""

    def reset(self) -> None:
        """Begin a new window."""


class SampledProcess:
    """A process tree that is sampled right here, as a source. Its record has no ranks."""

    is_behind = False
    stepless_seconds = 0.0

    def __init__(self, pid: int) -> None:
        self.record = RunRecord(path=f"process {pid}")
        self._new: SimpleQueue[SystemSample] = SimpleQueue()

    def begin(self, start: SystemStart) -> None:
        """The first line of what would be the record."""
        self.record.system = SystemRecord(start=start)

    def add(self, sample: SystemSample) -> None:
        """Take a sample, from any thread."""
        self._new.put(sample)

    def poll(self) -> int:
        system = self.record.system
        if system is None:
            return 0
        new = [self._new.get() for _ in range(self._new.qsize())]
        samples = [*system.samples, *new]
        system.samples = condense_samples(samples, most=MOST_SAMPLES, newest=NEWEST)
        return len(new)

    def reset(self) -> None:
        restart_window(self.record)


class LiveView:
    """Shows a source until it ends, the time is up, or somebody quits."""

    def __init__(
        self,
        source: LiveSource,
        summarise: Callable[[RunRecord], RunSummary],
        display: Display,
        *,
        title: Callable[[], str],
        ending: Callable[[], str],
        is_outside: bool = False,
        read_log: Callable[[], Sequence[str]] | None = None,
        stage: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ending`` is asked every second, and tells in a few words why it is over once it is.

        ``stage`` tells which part of a larger whole the record is.
        """
        self._source = source
        self._summarise = summarise
        self._display = display
        self._title = title
        self._ending = ending
        self._is_outside = is_outside
        self._read_log = read_log
        self._stage = stage
        self._clock = clock
        self._path = source.record.path
        self._summary: RunSummary | None = None
        self._summary_due = clock()
        self._is_changed = True
        self._frame: Frame | None = None
        self._paused_at: float | None = None
        self._reset_at: float | None = None

    def run(self, seconds: float | None = None) -> str:
        """Show it; what ended that. Ctrl-C ends it as ``q`` does."""
        begin = self._clock()
        with self._display:
            try:
                while True:
                    ending = self._ending()
                    is_over = bool(ending)
                    if not ending and seconds is not None and self._clock() - begin >= seconds:
                        ending = "the time was up"
                    self._read()
                    if self._paused_at is None or ending:
                        self._make_frame(is_last=bool(ending), is_over=is_over)
                    self._show(ending)
                    if ending or self._wait(begin, seconds):
                        return ending or "q was pressed"
            except KeyboardInterrupt:
                return "Ctrl-C"

    def _read(self) -> None:
        self._is_changed = bool(self._source.poll()) or self._is_changed
        while self._source.is_behind:
            self._is_changed = bool(self._source.poll()) or self._is_changed

    def _show(self, ending: str = "") -> None:
        paused = None if self._paused_at is None else self._clock() - self._paused_at
        if self._frame is not None:
            self._display.show(self._frame, paused_seconds=paused, ending=ending)

    def _make_frame(self, *, is_last: bool = False, is_over: bool = False) -> None:
        record = self._source.record
        if record.path != self._path:
            # Another run has begun: neither the figures nor the window of the last are its own.
            self._path, self._summary, self._reset_at = record.path, None, None
        is_due = self._clock() >= self._summary_due or is_last
        if self._summary is None or (self._is_changed and is_due):
            begin = self._clock()
            self._summary = self._summarise(record)
            self._is_changed = False
            end = self._clock()
            self._summary_due = end + (end - begin) / _SUMMARY_SHARE
        self._frame = make_frame(
            record,
            self._summary,
            title=self._title(),
            is_outside=self._is_outside,
            stepless_seconds=self._source.stepless_seconds,
            window_seconds=None if self._reset_at is None else self._clock() - self._reset_at,
            is_over=is_over,
            log=self._read_log() if self._read_log is not None else (),
            stage=self._stage(),
        )

    def _wait(self, begin: float, seconds: float | None) -> bool:
        """Until the next frame is due; whether somebody quits."""
        due = self._clock() + INTERVAL_SECONDS
        if seconds is not None:
            due = min(due, begin + seconds)
        while (left := due - self._clock()) > 0:
            key = self._display.wait(left)
            if key == "q":
                return True
            if key == "p":
                self._paused_at = self._clock() if self._paused_at is None else None
            elif key == "r":
                self._read()
                self._source.reset()
                self._reset_at, self._paused_at = self._clock(), None
                self._summary, self._is_changed = None, True
            if key in ("p", "r"):
                if self._paused_at is None:
                    self._make_frame()
                self._show()
        return False
