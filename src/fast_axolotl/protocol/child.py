"""Run one variant as a child process and keep its log.

The child leads a process group of its own. So Ctrl-C reaches this process alone, which then ends
the whole group; so it does when the child has ended by itself: no rank, no loader worker and
nothing that was put into the background is left over. What does not end within ten seconds of
being asked is killed.

A first run that reads from the disk and a second one that finds everything in memory are two
different experiments: warm-up runs fill the page cache, which is not cleared between runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fast_axolotl.errors import mask_secrets

Launch = Callable[[Sequence[str], Mapping[str, str], Path, Callable[[], None]], int]
"""Runs a command with an environment and a file for its log, and calls back now and then."""

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_TAIL_LINES = 20
_TAIL_BYTES = 32_768
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
"""Colours, movements of the cursor, titles of the window: none of them is text."""


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    tick: Callable[[], None],
    *,
    inherit: Sequence[int] = (),
) -> int:
    """Runs a command to its end; its exit code, negative if a signal ended it.

    ``inherit`` are open files that it keeps open.
    """
    late: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    caught = {number: kept for number, kept in handlers.items() if callable(kept)}
    with log.open("wb") as file:
        # An interrupt while the process is being made would lose sight of it: it waits.
        for number in caught:
            signal.signal(number, lambda number, _: late.append(number))
        try:
            child = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(inherit),
            )
        finally:
            for number, kept in caught.items():
                signal.signal(number, kept)
        try:
            for missed in late:
                signal.raise_signal(missed)
            while True:
                try:
                    return child.wait(_TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            try:
                _end(child, signal.SIGTERM)
            finally:
                # One that was killed still holds its files until the kernel has ended it.
                _end(child, signal.SIGKILL)
                child.wait()


def read_tail(log: Path) -> str:
    """The last lines that a command wrote to its log; empty where there is none."""
    return mask_secrets("\n".join(read_last_lines(log, _TAIL_LINES)))


def read_last_lines(path: str | Path, most: int, *, num_bytes: int = _TAIL_BYTES) -> list[str]:
    """The last lines of a log that hold anything, of progress bars as they look now."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.split("\n"):
        # What stands before a return was written over.
        written = [part for part in _ESCAPES.sub("", line).split("\r") if part.strip()]
        shown = written[-1] if written else ""
        lines.append("".join(sign if sign.isprintable() else " " for sign in shown).rstrip())
    return [line for line in lines if line][-most:]


def _end(child: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to the group of a child, and waits a while until nobody is in it."""
    asked = time.monotonic()
    # macOS says PermissionError of a group whose last member has ended.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
        while time.monotonic() - asked < _GRACE_SECONDS:
            time.sleep(_LOOK_SECONDS)
            # One that has ended and was not waited for still counts as there.
            child.poll()
            os.killpg(child.pid, 0)
