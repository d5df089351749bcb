"""One run as a child process: the page cache before it, started, waited for, its log kept.

The child leads a process group of its own. So Ctrl-C reaches this process alone, which then ends
the whole group; so it does when the child has ended by itself: no rank, no loader worker and
nothing that was put into the background is left over. What does not end within ten seconds of
being asked is killed.

A first run that reads from the disk and a second one that finds everything in memory are two
different experiments, so the page cache is dropped where that is asked for and allowed, and its
state is noted in any case. Linux only; elsewhere the state is unknown and says so.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fast_axolotl.errors import mask_secrets
from fast_axolotl.system import PROC, meminfo_bytes

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


def prepare_page_cache(
    drop: bool, *, proc: Path = PROC, flush: Callable[[], None] = os.sync
) -> str:
    """The state of the cache in a few words, after it was dropped if that was wanted."""
    state = "not cleared between runs"
    if drop:
        # What is not written yet would not be dropped.
        flush()
        try:
            (proc / "sys" / "vm" / "drop_caches").write_text("3\n")
            state = "cleared before each run"
        except OSError as error:
            reason = error.strerror or str(error)
            state = f"not cleared between runs, because clearing failed ({reason})"
    cached = meminfo_bytes(proc, "Cached")
    if cached is None:
        return f"{state}; its size is not available here"
    return f"{state}; {cached / 1e9:,.2f} GB cached"


def with_own_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Programs beside this Python are found, too: what Axolotl starts (accelerate) lies there."""
    beside = str(Path(sys.executable).parent)
    folders = environment.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys([*filter(None, folders), beside]))
    return {**environment, "PATH": path}


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
