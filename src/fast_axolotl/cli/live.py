"""``fast-axolotl watch``, and the live view of ``run`` and ``measure``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fast_axolotl.cli.options import AsJson, say
from fast_axolotl.cli.report import how_run_ended, show
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record import RunRecord, read_run

LOG_FILE = "log.txt"
"""In the folder of a record: what the command printed."""

_FAILED_LINES = 20


def watch(
    target: Annotated[
        str,
        Argument(help="A process, with its children, or the folder of a run.", metavar="PID|RUN"),
    ],
    seconds: Annotated[
        float | None, Option(help="Stop after this many seconds. Default: when it ends.", min=0.1)
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="For a PID: save the record in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run live: what limits it so far, throughput, memory, disk and swap.

    For the folder of a run that is being measured, it shows all figures. For any other process, it
    shows what can be seen from outside: CPU, memory, disk, swap and GPU.

    Ctrl-C quits. Without a terminal, it prints one line per second. The watched process is
    not changed. To watch a folder whose name is a number, write ./4711.
    """
    if target.isdecimal():
        _watch_process(int(target), seconds, output, as_json=as_json)
        return
    if output is not None:
        raise UsageError("--output needs a PID; a run that is measured has its own record")
    folder = Path(target)
    ending = _watch_folder(folder, seconds, how_run_ended, title=target, as_json=as_json)
    if not as_json:
        print(f"\nWatched until {ending}.")
    show(folder, as_json=as_json)


def _watch_folder(
    folder: Path,
    seconds: float | None,
    ending: Callable[[RunRecord], str],
    *,
    title: str,
    as_json: bool,
) -> str:
    """Show a record, on stderr if stdout is for JSON; why that ended."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.report.live import Display, follow

    read_run(folder)  # What is no record is refused before the terminal is taken.
    display = Display(sys.stderr if as_json else sys.stdout)
    return follow(
        lambda: read_run(folder), summarise, display, title=title, ending=ending, seconds=seconds
    )


def _watch_process(pid: int, seconds: float | None, output: Path | None, *, as_json: bool) -> None:
    """Sample a process into a record, and show that as it grows."""
    from fast_axolotl.measure.sampler import SystemSampler, check_process
    from fast_axolotl.record import LineWriter

    check_process(pid)
    if output is not None and (output / "system.jsonl").exists():
        raise UsageError(f"{output / 'system.jsonl'} already exists: choose another --output")
    made = tempfile.TemporaryDirectory(prefix="fast-axolotl-watch-")
    with made if output is None else nullcontext(output) as name:
        folder = Path(name)
        writer = LineWriter(folder / "system.jsonl")
        sampler = SystemSampler(pid, writer, exclude_pids=(os.getpid(),), source="watch")
        if writer.failure:
            raise DataError(
                f"the record cannot be written: {writer.failure}; choose another --output"
            )

        def ending(_: RunRecord) -> str:
            return sampler.failure or ("" if sampler.is_alive else "the process ended")

        why = ""
        try:
            sampler.start()
            start = sampler.begin()
            title = f"process {pid}  {' '.join(start.command)}"
            why = _watch_folder(folder, seconds, ending, title=title, as_json=as_json)
        finally:
            sampler.stop("interrupted" if why in ("", "Ctrl-C") else "finished")
        if not as_json:
            print(f"\nWatched until {why}.")
        show(folder, is_all=True, as_json=as_json)
        if writer.failure:
            raise DataError(
                f"the record ends early: {writer.failure}; free space or choose another folder"
            )


class LiveRun:
    """The view of a command that is being run. Without a terminal its output is left alone."""

    def __init__(self, run_dir: str, environment: Mapping[str, str]) -> None:
        from fast_axolotl.report.live import Display

        self.streams: dict[str, Any] = {}
        """Where the command reads and writes, as Popen takes it; for the rest, as we do."""
        self.environment = dict(environment)
        self._folder = Path(run_dir)
        self._display = Display(sys.stderr)
        self._log = self._folder / LOG_FILE if self._display.is_screen else None
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            shown = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]
            self.streams = dict.fromkeys(shown, self._log.open("wb"))
            # Python holds back what it prints to a file; to a terminal it does not.
            self.environment.setdefault("PYTHONUNBUFFERED", "1")

    def close(self) -> None:
        """Once the command has ended."""
        for stream in self.streams.values():
            stream.close()

    def show(self, is_running: Callable[[], bool]) -> None:
        """Draw until the command ends, to which Ctrl-C goes."""
        log = self._log
        try:
            from fast_axolotl.measure.summary import summarise
            from fast_axolotl.protocol.child import read_last_lines
            from fast_axolotl.report.live import follow

            def read() -> RunRecord:
                has_begun = any(self._folder.glob("*.jsonl"))
                return read_run(self._folder) if has_begun else RunRecord(path=str(self._folder))

            follow(
                read,
                summarise,
                self._display,
                title=self._folder.name,
                ending=lambda record: "" if is_running() else "the command ended",
                read_log=lambda: () if log is None else read_last_lines(log, 8),
            )
        except Exception as error:  # noqa: BLE001 - a fault of the view must not end the command
            say(f"the live view stopped, the command continues: {error!r}")

    def print_end(self, code: int) -> None:
        """Where the output is; if the command failed, its exit code and the end of its output."""
        from fast_axolotl.protocol.child import read_last_lines

        if self._log is None:
            return
        say(f"output of the command: {self._log}")
        if code == 0:
            return
        lines = read_last_lines(self._log, _FAILED_LINES)
        how = f"was stopped by signal {-code}" if code < 0 else f"failed with exit code {code}"
        say(f"the command {how}{'; its last lines:' if lines else ' and printed nothing'}")
        print("\n".join(lines), file=sys.stderr, flush=True)
