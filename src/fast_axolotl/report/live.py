"""A run as it goes on: read what is new, sum it up, draw it, once a second, until it ends.

What is read comes from a source: the folder of a record, or samples of a process. How it is summed
up is given as a function, since this layer measures nothing. The sum over all steps so far costs
more the longer the run is; it is made anew only so often that it takes 5 % of one core.

It is drawn on a whole terminal, or as lines without one. The terminal's other screen is used, so
that what was printed before comes back afterwards, and a change of size leaves no rests. Keys are
read one by one without an echo (cbreak); Ctrl-C and Ctrl-Z mean what they always do. The terminal
is put back however the view ends; only SIGKILL prevents it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any, Protocol

from rich.console import Console, Group
from rich.live import Live

from fast_axolotl.record import (
    DiskProbe,
    RunRecord,
    RunSummary,
    SystemRecord,
    SystemSample,
    SystemStart,
)
from fast_axolotl.record.follower import MOST_SAMPLES, NEWEST, condense_samples, restart_window
from fast_axolotl.report.live_frame import Frame, make_frame
from fast_axolotl.report.live_layout import Keys, ViewState, format_line, lay_out

INTERVAL_SECONDS = 1.0
_SUMMARY_SHARE = 0.05
"""Of one core, at most this for summing up."""
_SLICE_SECONDS = 0.2
"""How often a new size of the terminal is looked for."""
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.?)", re.DOTALL)
"""Arrows and the like: no keys of ours."""


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

    def begin(self, start: SystemStart, disk: DiskProbe | None = None) -> None:
        """The first lines of what would be the record."""
        self.record.system = SystemRecord(start=start, disk=disk)

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


class Display(Protocol):
    """What the loop of a live view needs."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, frame: Frame, *, paused_seconds: float | None = None, ending: str = "") -> None:
        """Draw a frame."""

    def wait(self, seconds: float) -> str:
        """Wait; a key that was pressed, in which case it may be over earlier."""


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


def open_display(file: IO[str]) -> Display:
    """A screen where ``file`` is a terminal that is ours to use, else lines."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal or console.is_dumb_terminal or not _is_in_the_foreground(file):
        return LineDisplay(file)
    return ScreenDisplay(console, sys.stdin)


class LineDisplay:
    """One line a frame; of a protocol, one before the first of every run."""

    def __init__(self, file: IO[str], sleep: Callable[[float], None] = time.sleep) -> None:
        self._file = file
        self._sleep = sleep
        self._title: str | None = None
        """Of the last frame."""

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, frame: Frame, *, paused_seconds: float | None = None, ending: str = "") -> None:
        if frame.stage and frame.has_begun and frame.title != self._title:
            run, *rest = frame.stage
            begin = f"watching {run}" if self._title is None else f"{run} starts"
            words = ", ".join([*rest, frame.title])
            print(f"fast-axolotl: {begin}: {words}", file=self._file, flush=True)
        self._title = frame.title
        print(format_line(frame, ending=ending), file=self._file, flush=True)

    def wait(self, seconds: float) -> str:
        self._sleep(seconds)
        return ""


class ScreenDisplay:
    """The whole terminal, and its keys."""

    def __init__(self, console: Console, keyboard: IO[str] | None) -> None:
        self._console = console
        self._keyboard = _Keyboard(keyboard)
        self._live: Live | None = None
        self._shown: tuple[Frame, ViewState] | None = None
        self._size = console.size
        self._is_suspended = False
        self._before: Any = None

    def __enter__(self) -> ScreenDisplay:
        def suspend(number: int, frame: FrameType | None) -> None:
            self._is_suspended = True

        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTSTP, suspend)
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        if self._before is not None:
            signal.signal(signal.SIGTSTP, self._before)

    def show(self, frame: Frame, *, paused_seconds: float | None = None, ending: str = "") -> None:
        pause = "pause" if paused_seconds is None else "continue"
        keys: Keys = (("p", pause), ("r", "reset window"), ("q", "quit"))
        if not self._keyboard.is_open:
            keys = (("Ctrl-C", "quit"),)
        self._shown = frame, ViewState(paused_seconds=paused_seconds, ending=ending, keys=keys)
        self._draw()

    def wait(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            key = self._keyboard.wait(min(max(0.0, left), _SLICE_SECONDS))
            if self._is_suspended:
                # Give the terminal back, stop as Ctrl-Z asks, and take it again afterwards.
                self._is_suspended = False
                self._close()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._open()
                self._draw()
            if key or left <= 0:
                return key
            if self._console.size != self._size:
                self._draw()

    def print_last(self) -> None:
        """Print the last frame below what was on the terminal before, to stay there."""
        if self._shown is not None:
            lines = lay_out(*self._shown, width=self._console.size.width)
            self._console.print(Group(*lines))

    def _draw(self) -> None:
        if self._shown is None or self._live is None:
            return
        self._size = self._console.size
        # The last column is left free: some terminals wrap when it is written.
        width = max(1, self._size.width - 1)
        lines = lay_out(*self._shown, width=width, height=self._size.height)
        self._live.update(Group(*lines), refresh=True)

    def _open(self) -> None:
        self._keyboard.open()
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _close(self) -> None:
        try:
            if self._live is not None:
                self._live.stop()
        finally:
            self._keyboard.close()


class _Keyboard:
    """A terminal read key by key; one that is none just passes the time."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._number: int | None = None
        self._before: list[Any] | None = None

    @property
    def is_open(self) -> bool:
        return self._number is not None

    def open(self) -> None:
        try:
            number = self._file.fileno() if self._file is not None else -1
            if not os.isatty(number) or not _is_in_the_foreground(self._file):
                return
            self._before = termios.tcgetattr(number)
            tty.setcbreak(number)
        except (OSError, ValueError, termios.error):
            return
        self._number = number

    def close(self) -> None:
        number, self._number = self._number, None
        if number is None or self._before is None:
            return
        try:
            termios.tcsetattr(number, termios.TCSADRAIN, self._before)
        except termios.error:
            # The terminal is gone, and with it what there was to put back.
            return

    def wait(self, seconds: float) -> str:
        if self._number is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._number], [], [], seconds)
        if not ready:
            return ""
        typed = os.read(self._number, 64)
        if not typed:
            self.close()
        return _ESCAPES.sub(b"", typed)[-1:].decode("ascii", "ignore").lower()


def _is_in_the_foreground(file: IO[str] | None) -> bool:
    """A background job must not touch the terminal: the system would stop it."""
    try:
        return file is not None and os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
