"""A run as it goes on: read what is new, sum it up, draw it, once a second, until it ends.

What is read comes from a source: the folder of a record, or samples of a process. How it is summed
up is given as a function, since this layer measures nothing. The sum over all steps so far costs
more the longer the run is; it is made anew only so often that it takes 5 % of one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
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


@dataclass(slots=True)
class LiveView:
    """Shows a source until it ends, the time is up, or somebody quits."""

    source: LiveSource
    summarise: Callable[[RunRecord], RunSummary]
    display: Display
    _: KW_ONLY
    title: Callable[[], str]
    ending: Callable[[], str]
    """Asked every second; tells in a few words why it is over once it is."""
    is_outside: bool = False
    read_log: Callable[[], Sequence[str]] | None = None
    stage: Callable[[], Sequence[str]] = tuple
    """Tells which part of a larger whole the record is."""
    clock: Callable[[], float] = time.monotonic
    _path: str = ""
    """Of the record that the figures are of."""
    _summary: RunSummary | None = None
    _summary_due: float = 0.0
    _is_changed: bool = True
    _frame: Frame | None = None
    _paused_at: float | None = None
    _reset_at: float | None = None

    def run(self, seconds: float | None = None) -> str:
        """Show it; what ended that. Ctrl-C ends it as ``q`` does."""
        begin = self.clock()
        with self.display:
            try:
                while True:
                    ending = self.ending()
                    is_over = bool(ending)
                    if not ending and seconds is not None and self.clock() - begin >= seconds:
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
        is_behind = True
        while is_behind:
            self._is_changed = bool(self.source.poll()) or self._is_changed
            is_behind = self.source.is_behind

    def _show(self, ending: str = "") -> None:
        paused = None if self._paused_at is None else self.clock() - self._paused_at
        if self._frame is not None:
            self.display.show(self._frame, paused_seconds=paused, ending=ending)

    def _make_frame(self, *, is_last: bool = False, is_over: bool = False) -> None:
        record = self.source.record
        if record.path != self._path:
            # Another run has begun: neither the figures nor the window of the last are its own.
            self._path, self._summary, self._reset_at = record.path, None, None
        is_due = self.clock() >= self._summary_due or is_last
        if self._summary is None or (self._is_changed and is_due):
            begin = self.clock()
            self._summary = self.summarise(record)
            self._is_changed = False
            end = self.clock()
            self._summary_due = end + (end - begin) / _SUMMARY_SHARE
        self._frame = make_frame(
            record,
            self._summary,
            title=self.title(),
            is_outside=self.is_outside,
            stepless_seconds=self.source.stepless_seconds,
            window_seconds=None if self._reset_at is None else self.clock() - self._reset_at,
            is_over=is_over,
            log=self.read_log() if self.read_log is not None else (),
            stage=self.stage(),
        )

    def _wait(self, begin: float, seconds: float | None) -> bool:
        """Until the next frame is due; whether somebody quits."""
        due = self.clock() + INTERVAL_SECONDS
        if seconds is not None:
            due = min(due, begin + seconds)
        while (left := due - self.clock()) > 0:
            key = self.display.wait(left)
            if key == "q":
                return True
            if key == "p":
                self._paused_at = self.clock() if self._paused_at is None else None
            elif key == "r":
                self._read()
                self.source.reset()
                self._reset_at, self._paused_at = self.clock(), None
                self._summary, self._is_changed = None, True
            if key in ("p", "r"):
                if self._paused_at is None:
                    self._make_frame()
                self._show()
        return False
