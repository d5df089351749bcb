"""Where a live view is drawn and what is typed at it: a whole terminal, or lines without one.

The terminal's other screen is used, so that what was printed before comes back afterwards, and a
change of size leaves no rests. Keys are read one by one without an echo (cbreak); Ctrl-C and Ctrl-Z
mean what they always do. The terminal is put back however the view ends; only SIGKILL prevents it.
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
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, Protocol

from rich.console import Console, Group
from rich.live import Live

from fast_axolotl.report.live_frame import Frame
from fast_axolotl.report.live_layout import Keys, ViewState, format_line, lay_out

__all__ = ["Display", "LineDisplay", "ScreenDisplay", "open_display"]

_SLICE_SECONDS = 0.2
"""How often a new size of the terminal is looked for."""
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.?)", re.DOTALL)
"""Arrows and the like: no keys of ours."""
_KEYS: Keys = (("p", "pause"), ("r", "reset window"), ("q", "quit"))
_PAUSED_KEYS: Keys = (("p", "go on"), ("r", "reset window"), ("q", "quit"))


class Display(Protocol):
    """What the loop of a live view needs."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, frame: Frame, *, paused_seconds: float | None = None, ending: str = "") -> None:
        """Draw a frame."""

    def wait(self, seconds: float) -> str:
        """Wait; a key that was pressed, in which case it may be over earlier."""


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
            begin = f"watching {run}" if self._title is None else f"{run} begins"
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
        keys = _KEYS if paused_seconds is None else _PAUSED_KEYS
        state = ViewState(
            paused_seconds=paused_seconds,
            ending=ending,
            keys=keys if self._keyboard.is_open else (("Ctrl-C", "quit"),),
        )
        self._shown = frame, state
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
