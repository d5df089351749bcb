"""The live view of a record, and of a command that is started here."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fast_axolotl.cli.options import say

if TYPE_CHECKING:
    from fast_axolotl.record import RunRecord

LOG_FILE = "log.txt"
"""In the folder of a record: what the command printed."""

_SETTLED_SECONDS = 3.0
"""Without a line after the watcher has written its last, for a rank to count as cut off."""
_DEAD_SECONDS = 10.0
"""Without a line, for a run whose processes are gone to count as cut off."""
_FAILED_LINES = 20


def watch_record(folder: Path, seconds: float | None, *, as_json: bool) -> None:
    """Follow the folder of a record until the run ends, the time is up, or Ctrl-C."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run
    from fast_axolotl.record.codec import to_json

    ending = watch_folder(folder, seconds, _how_run_ended, title=str(folder), as_json=as_json)
    if as_json:
        print(to_json(summarise(read_run(folder))))
        return
    print(f"\nWatched until {ending}.")
    print(f"Every figure: fast-axolotl show --all {shlex.quote(str(folder))}")


def watch_folder(
    folder: Path,
    seconds: float | None,
    ending: Callable[[RunRecord], str],
    *,
    title: str,
    as_json: bool,
) -> str:
    """Show a record, on stderr if stdout is for JSON; why that ended."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run
    from fast_axolotl.report.live import Display, follow

    read_run(folder)  # What is no record is refused before the terminal is taken.
    display = Display(sys.stderr if as_json else sys.stdout)
    why = follow(
        lambda: read_run(folder), summarise, display, title=title, ending=ending, seconds=seconds
    )
    if display.is_screen and not as_json:
        display.print_last()
    return why


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

    def __enter__(self) -> LiveRun:
        if self._log is None:
            return self
        self._log.parent.mkdir(parents=True, exist_ok=True)
        opened = self._log.open("wb")
        for name in ("stdout", "stderr"):
            if getattr(sys, name).isatty():
                self.streams[name] = opened
        # Python holds back what it prints to a file; to a terminal it does not.
        self.environment.setdefault("PYTHONUNBUFFERED", "1")
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self.streams.values():
            stream.close()

    def show(self, is_running: Callable[[], bool]) -> None:
        """Draw until the command ends, to which Ctrl-C goes."""
        log = self._log
        try:
            from fast_axolotl.measure.summary import summarise
            from fast_axolotl.protocol.child import read_last_lines
            from fast_axolotl.record import RunRecord, read_run
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
        for line in lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()


def _how_run_ended(record: RunRecord) -> str:
    """Empty while it goes on."""
    systems = record.systems.values()
    files = Path(record.path).glob("*.jsonl")
    quiet = time.time() - max((file.stat().st_mtime for file in files), default=0.0)
    ends = [rank.end for rank in record.ranks.values()] + [system.end for system in systems]
    world = max((rank.start.world_size for rank in record.ranks.values()), default=0)
    is_complete = None not in ends and len(record.ranks) >= world
    is_settled = bool(systems) and all(system.end is not None for system in systems)
    if not is_complete and not (is_settled and quiet > _SETTLED_SECONDS):
        is_dead = quiet > _DEAD_SECONDS and not _may_be_alive(record)
        return "the run was cut off: its processes are gone" if is_dead else ""
    words = {"exception": "the run failed", "interrupted": "the run was interrupted"}
    for reason, text in words.items():
        for end in ends:
            if end is not None and end.reason == reason:
                return f"{text}: {end.error}" if end.error else text
    return "the run finished"


def _may_be_alive(record: RunRecord) -> bool:
    """Whether a process of the run lives, or lies on another machine where nobody can tell."""
    from fast_axolotl.system import node_name

    processes = [(rank.start.host, rank.start.pid) for rank in record.ranks.values()]
    watched = [system.start for system in record.systems.values()]
    processes += [(start.host, start.root_pid) for start in watched]
    for host, pid in processes:
        if host != node_name():
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        return True
    return False
