"""One run as a child process: started, waited for, its log kept.

The child leads a process group of its own. So Ctrl-C reaches this process alone, which then ends
the whole group; so it does when the child has ended by itself: no rank, no loader worker and
nothing that was put into the background is left over. What does not end within ten seconds of
being asked is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fast_axolotl.record.log_tail import read_last_lines

__all__ = ["Launch", "launch", "read_tail", "with_own_programs"]

Launch = Callable[[Sequence[str], Mapping[str, str], Path, Callable[[], None]], int]
"""Runs a command with an environment and a file for its log, and calls back now and then."""

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_TAIL_LINES = 20


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
    with log.open("wb") as file:
        child = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(inherit),
        )
        try:
            while True:
                try:
                    return child.wait(_TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            _end_group(child)


def with_own_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Programs beside this Python are found, too: what Axolotl starts (accelerate) lies there."""
    beside = str(Path(sys.executable).parent)
    folders = environment.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys([*filter(None, folders), beside]))
    return {**environment, "PATH": path}


def read_tail(log: Path) -> str:
    """The last lines that a command wrote to its log; empty where there is none."""
    return "\n".join(read_last_lines(log, _TAIL_LINES))


def _end_group(child: subprocess.Popen[bytes]) -> None:
    asked = time.monotonic()
    is_there = _signal(child.pid, signal.SIGTERM)
    try:
        while is_there and time.monotonic() - asked < _GRACE_SECONDS:
            time.sleep(_LOOK_SECONDS)
            # One that has ended and was not waited for still counts as there.
            child.poll()
            is_there = _signal(child.pid, 0)
    finally:
        _signal(child.pid, signal.SIGKILL)
        child.wait()


def _signal(group: int, number: int) -> bool:
    """Whether there is anyone in the group who could be sent it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # macOS says so of a group whose last member has ended.
        return False
    return True
