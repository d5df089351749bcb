"""One run as a child process: started, waited for, its log kept.

The child leads a process group of its own. So Ctrl-C reaches this process alone, which then ends
the whole group: no rank and no loader worker is left over. A child that does not end within ten
seconds of being asked is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["Launch", "launch", "read_tail"]

Launch = Callable[[Sequence[str], Mapping[str, str], Path, Callable[[], None]], int]
"""Runs a command with an environment and a file for its log, and calls back now and then."""

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_TAIL_LINES = 20
_TAIL_BYTES = 32_768


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    tick: Callable[[], None],
) -> int:
    """Runs a command to its end; its exit code, negative if a signal ended it."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return child.wait(_TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if child.returncode is None:
                _end_group(child)


def read_tail(log: Path) -> str:
    """The last lines that a command wrote to its log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"the log cannot be read: {error.strerror or error}"
    # A progress bar overwrites its line; only what was seen last counts.
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_TAIL_LINES:])


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
