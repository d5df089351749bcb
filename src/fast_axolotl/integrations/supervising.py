"""Run a command as a child, watch its process tree from outside, and end as it ends.

The child runs in this process's group, so the terminal's own signals (Ctrl-C) reach it by
themselves. Signals sent to this process alone are passed on. A child killed by a signal is followed
by the same death here, so that whoever started this sees what it would have seen of the command.

Not passed on: SIGKILL and SIGSTOP, which cannot be. Kill the command itself then.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from fast_axolotl.errors import UsageError
from fast_axolotl.record import LineWriter

__all__ = ["cannot_start", "end_as", "supervise"]

_FROM_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (
    *_FROM_THE_TERMINAL,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def supervise(
    program: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    run_dir: str | Path,
    *,
    data_path: str | None = None,
    streams: Mapping[str, Any] | None = None,
    meanwhile: Callable[[Callable[[], bool]], None] | None = None,
) -> int:
    """Run the command to its end and record its process tree; its exit code, as Popen tells it.

    ``streams`` are the command's ``stdin``, ``stdout`` and ``stderr`` where they are not those of
    this process. ``meanwhile`` is called once the command runs, with a function that tells whether
    it still does; it must not raise. A command that cannot be started is a ``UsageError``.
    """
    from fast_axolotl.measure.sampler import SystemSampler

    with _PassedSignals() as signals:
        sys.stdout.flush()
        try:
            child = subprocess.Popen(
                list(command), executable=program, env=dict(environment), **(streams or {})
            )
        except OSError as error:
            raise cannot_start(program, error) from error
        signals.pass_to(child.pid)
        writer = LineWriter(Path(run_dir) / "system.jsonl")
        sampler = SystemSampler(child.pid, writer, data_path=data_path, source="run")
        sampler.start()
        if meanwhile is not None:
            meanwhile(lambda: _is_running(child))
        code = _wait_until_ended(child)
        sampler.stop(*_end_of(code))
        # Once the child is waited for, its number may be another process's.
        signals.pass_to(None)
        return child.wait()


def end_as(code: int) -> NoReturn:
    """Exit with a child's code; die of the signal that it died of."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code if code >= 0 else 128 - code)


def cannot_start(program: str, error: OSError) -> UsageError:
    """What to say of a file that can be executed by its mode, and yet not by the system."""
    if error.errno == errno.ENOEXEC:
        text = "is neither a program nor begins with #! and its interpreter; add that line"
    elif error.errno == errno.ENOENT:
        text = "names an interpreter in its first line (#!) that is not there; correct that line"
    else:
        text = f"cannot be started: {error.strerror or error}"
    return UsageError(f"{program} {text}")


def _is_running(child: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):
        return child.poll() is None
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None


def _wait_until_ended(child: subprocess.Popen[bytes]) -> int:
    """Its exit code; where the system can, it stays a zombie, whose counters can still be read."""
    if not hasattr(os, "waitid"):
        return child.wait()
    found: Any = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return int(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def _end_of(code: int) -> tuple[Literal["finished", "exception", "interrupted"], str]:
    if code == 0:
        return "finished", ""
    is_interrupted = code in (-signal.SIGINT, 128 + signal.SIGINT)
    return "interrupted" if is_interrupted else "exception", f"exit code {code}"


class _PassedSignals:
    """Passes the signals of this process on to another; those that come too early, later."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _PassedSignals:
        # What is ignored here (nohup, a background job) stays so in the child, too.
        heard = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)

    def pass_to(self, pid: int | None) -> None:
        """Who gets the signals from now on; ``None``: nobody."""
        self._pid = pid
        early, self._early = self._early, []
        for number in early:
            self._hear(number, None)

    def _hear(self, number: int, frame: object) -> None:
        if number in _FROM_THE_TERMINAL and _is_in_the_foreground():
            return
        if self._pid is None:
            self._early.append(number)
        else:
            # Not ``Popen.send_signal``, which would reap a child that has ended.
            os.kill(self._pid, number)


def _is_in_the_foreground() -> bool:
    """Whether the terminal's signals go to this process and its children alike.

    The terminal that controls them is asked, whatever stdin is.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
