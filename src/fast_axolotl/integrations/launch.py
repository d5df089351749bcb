"""Start a command with acceleration and measuring for its whole process tree, and exit as it exits.

The environment carries it: switches, and a folder in front of ``PYTHONPATH`` whose
``sitecustomize`` imports this package when ``axolotl`` is first looked for. It survives ``exec``,
``accelerate launch``, ``torchrun`` and spawned workers. It does not reach interpreters that ignore
``PYTHONPATH``, nor other machines unless the launcher passes it on: start a command on each of
them, and the same folder on a shared disk makes one record of all. An ``Order`` to measure travels
in it, too; what trains in there reads it back and records itself: see ``attach``.

A measured command is a child in this process's group, so the terminal's own signals (Ctrl-C) reach
it by themselves. Signals sent to this process alone are passed on. A child killed by a signal is
followed by the same death here, so that whoever started this sees what it would have seen of the
command. Not passed on: SIGKILL and SIGSTOP, which cannot be. Kill the command itself then.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from fast_axolotl.axolotl import RUN, SKIP, SWITCH, names_to_skip
from fast_axolotl.errors import UsageError
from fast_axolotl.system import MEASURE

_OPTIONS = "FAST_AXOLOTL_OPTIONS"
"""Those of an ``Order``, as JSON."""

_BOOT = Path(__file__).parents[1] / "boot"

_FROM_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (*_FROM_THE_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be measured, and how: the arguments of a trainer's ``MeterCallback``."""

    run_dir: str
    peak_tflops: float | None = None
    profile_steps: int = 0
    data_paths: tuple[str, ...] = ()
    stacks: bool = True

    def variables(self) -> dict[str, str]:
        """The variables that ``order`` reads this from, in a child wherever it runs."""
        paths = [str(Path(path).absolute()) for path in self.data_paths]
        options = json.dumps({**asdict(self), "data_paths": paths})
        return {MEASURE: str(Path(self.run_dir).absolute()), _OPTIONS: options}


def order(environment: Mapping[str, str] = os.environ) -> Order | None:
    """What the environment asks for; ``None``: nothing."""
    folder = environment.get(MEASURE)
    if not folder:
        return None
    options = json.loads(environment.get(_OPTIONS) or "{}")
    paths = tuple(options.get("data_paths", ()))
    return Order(**{**options, "run_dir": folder, "data_paths": paths})


def launch_environment(
    environment: Mapping[str, str],
    skip: Iterable[str] = (),
    *,
    order: Order | None = None,
    accelerate: bool = True,
) -> dict[str, str]:
    """The environment in which a command and its children find themselves accelerated, measured."""
    names = [*names_to_skip(environment), *skip]
    path = environment.get("PYTHONPATH")
    folders = path.split(os.pathsep) if path else []
    changed = dict(environment)
    changed[RUN] = "1"
    changed["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(_BOOT), *folders]))
    changed[SKIP] = ",".join(dict.fromkeys(filter(None, names)))
    if not accelerate:
        changed[SWITCH] = "0"
    return changed if order is None else {**changed, **order.variables()}


def find_program(name: str, environment: Mapping[str, str]) -> str:
    """The file of a command: on ``PATH``, or beside the Python that runs this package."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which(name, path=environment.get("PATH")) or shutil.which(name, path=beside)
    if program is not None:
        return program
    if name.startswith("-"):
        text = f"there is no option {name}; see --help, and put the command after --"
    elif "/" in name and Path(name).is_file():
        text = f"{name!r} is not executable; run chmod +x on it, or put its interpreter before it"
    else:
        text = (
            f"there is no command {name!r} on PATH or in {beside}; activate the environment that "
            "has it, or pass its full path; to set a variable, write env NAME=VALUE COMMAND"
        )
    raise UsageError(text)


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
    from fast_axolotl.measure.writers import open_system_file

    with _PassedSignals() as signals:
        sys.stdout.flush()
        try:
            child = subprocess.Popen(
                list(command), executable=program, env=dict(environment), **(streams or {})
            )
        except OSError as error:
            raise cannot_start(program, error) from error
        signals.pass_to(child.pid)
        # Of several commands on one node, the first to come here samples for all of them.
        writer = open_system_file(run_dir)
        sampler = SystemSampler(
            child.pid, writer, rank_folder=run_dir, data_path=data_path, source="run"
        )
        sampler.command = tuple(command)  # A child that has just begun may not show it yet.
        if writer is not None:
            sampler.start()
        if meanwhile is not None:
            meanwhile(lambda: _peek(child, os.WNOHANG) is None)
        code = _peek(child, 0)
        assert code is not None
        reason: Literal["finished", "exception", "interrupted"] = "exception"
        text = f"exit code {code}" if code else ""
        if not code:
            reason = "finished"
        elif signal.SIGINT in (-code, code - 128, signals.last):
            reason = "interrupted"
        elif signal.SIGTERM in (-code, code - 128, signals.last):
            reason, text = "interrupted", "stopped by SIGTERM"
        sampler.stop(reason, text)
        # Once the child is waited for, its number may be another process's.
        signals.pass_to(None)
        return child.wait()


def _peek(child: subprocess.Popen[bytes], flags: int) -> int | None:
    """A child's exit code, ``None`` while it runs; waits for it unless ``flags`` say no hang.

    Where the system can, an ended child stays a zombie, whose counters can still be read.
    """
    if not hasattr(os, "waitid"):
        return child.poll() if flags else child.wait()
    ended: Any = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | flags)
    if ended is None:
        return None
    return int(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


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
    text = f"cannot be started: {error.strerror or error}"
    if error.errno in (errno.ENOEXEC, errno.ENOENT):
        text = "needs a first line that names an interpreter which exists, such as #!/bin/sh"
    return UsageError(f"{program} {text}")


class _PassedSignals:
    """Passes the signals of this process on to another; those that come too early, later."""

    def __init__(self) -> None:
        self.last = 0
        """The number of the last one."""
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
        self.last = number
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
    with suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
