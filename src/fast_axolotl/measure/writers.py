"""Write the record of one rank, and know which other processes write into the folder.

A file belongs to the process that its first line names until that process or the record has ended.
A script that trains may start another that reads a loader and inherits the order to record, and the
child must not take its parent's file away. A process of another machine cannot be looked at. It
counts as writing while its file is younger than a minute. One of another
container of this machine counts as ended: most often that is this very container, started again.

The ranks of a node need not be one process tree: torchrun's are siblings, those of srun belong to a
daemon. Their files name them, so whoever samples a node finds them here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fast_axolotl.record import End, LineWriter, Log, Mark, Settings, Start, SystemStart
from fast_axolotl.record.folder import SYSTEM_FILES, read_start, system_file
from fast_axolotl.record.schema import Reason
from fast_axolotl.system import node_name, pid_namespace

_FRESH_SECONDS = 60.0
"""Age of a file up to which its writer on another machine counts as alive. Ours: samples are at
most five seconds apart, and clients of a file server see them up to some seconds late."""
_CLOCK_SECONDS = 2.0
"""A process that began this long after the record is another one with the same number."""
_LAST_LINE_BYTES = 4096
_RANK_FILE = re.compile(r"rank-\d+\.jsonl")
_ROOMY_BYTES = 3_000_000
"""Size of the record up to which single steps, shards and all that a trainer logs are written.
After that, a trainer's lines are a three-hundredth of the run's age apart, or a minute."""

_log = logging.getLogger("fast_axolotl.measure")


class Journal:
    """Writes ``RUN/rank-N.jsonl``. A disk that refuses ends the record, not the run."""

    def __init__(self, folder: Path, start: Start, *, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.start = start
        self.clock = clock
        self.origin = clock()
        """The clock when the record began: ``t = 0``."""
        self.values: dict[str, Any] = {}
        """The settings known by now."""
        self._reasons: dict[str, str] = {}
        self._log_due = 0.0
        self.path = path = folder / f"rank-{start.rank}.jsonl"
        owner = find_owner(path)
        refusal = ""
        if isinstance(owner, Start):
            refusal = f"process {owner.pid} on {owner.host} is already recording into it"
        self.is_refused = bool(refusal)
        """Whether the file is another process's, and nothing is written."""
        self._writer = LineWriter(path, refusal=refusal)
        self._is_failure_told = False
        self.write(start)

    @property
    def has_room(self) -> bool:
        """Whether the record is still small enough for every detail."""
        return self._writer.num_bytes < _ROOMY_BYTES

    def since_start(self, at: float | None = None) -> float:
        """Seconds since the first line."""
        return round((self.clock() if at is None else at) - self.origin, 6)

    def write(self, line: object) -> None:
        """Append a line."""
        self._writer.write(line)
        if self._writer.failure and not self._is_failure_told:
            self._is_failure_told = True
            what = "nothing is recorded" if self.is_refused else "recording has stopped"
            _log.warning("%s, but the run continues: %s", what, self._writer.failure)

    def mark(
        self, name: str, *, at: float | None = None, text: str = "", fetch: int | None = None
    ) -> None:
        """Note something that happened at a moment."""
        self.write(Mark(t=self.since_start(at), name=name, text=text, fetch=fetch))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the numbers that a trainer logged."""
        numbers = {
            key: float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        t = self.since_start()
        # A trainer may log every step of a long run.
        if numbers and (self.has_room or t >= self._log_due):
            self._log_due = t + min(t / 300, 60.0)
            self.write(Log(t=t, step=step, values=numbers))

    def settings(self, values: Mapping[str, Any]) -> None:
        """Note settings, where they are new."""
        plain = {key: as_json(value) for key, value in values.items()}
        known = self.values
        new = {key: plain[key] for key in plain if key not in known or known[key] != plain[key]}
        if new:
            self.values.update(new)
            self.write(Settings(t=self.since_start(), values=new))

    def reason(self, figure: str, sentence: str) -> None:
        """Note why a figure is missing, once."""
        if self._reasons.get(figure) != sentence:
            self._reasons[figure] = sentence
            self.write(Settings(t=self.since_start(), reasons={figure: sentence}))

    def end(self, reason: Reason, error: str, overhead_seconds: float, fetches: int) -> None:
        """Write the last line."""
        self.write(
            End(
                t=self.since_start(),
                reason=reason,
                error=error,
                overhead_seconds=round(overhead_seconds, 6),
                overhead_fetches=fetches,
            )
        )
        self._writer.close()


def as_json(value: Any) -> Any:
    """A value as JSON holds it; what JSON cannot hold becomes its text."""
    try:
        return json.loads(json.dumps(value, default=str))
    except (TypeError, ValueError):
        return str(value)


def read_rank(environment: Mapping[str, str] | None = None) -> tuple[int, int, int]:
    """Rank, number of ranks, rank on this machine: by the launcher's variables, else torch's."""
    variables = os.environ if environment is None else environment
    if variables.get("RANK", "").isdigit():
        local = variables.get("LOCAL_RANK", "")
        local_rank = int(local) if local.isdigit() else 0
        return int(variables["RANK"]), int(variables.get("WORLD_SIZE", "1")), local_rank
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), 0
    return 0, 1, 0


def find_owner(path: Path) -> Start | SystemStart | None:
    """The first line of a file that another process is writing; ``None``: nobody is."""
    writer = find_writer(path)
    is_own = isinstance(writer, Start) and (writer.host, writer.pid) == (node_name(), os.getpid())
    return None if writer is None or (is_own and _is_visible(writer)) else writer


def find_writer(path: Path) -> Start | SystemStart | None:
    """The first line of a file that some process, this one included, is writing."""
    start = read_start(path)
    if start is None:
        return None
    with path.open("rb") as opened:
        opened.seek(max(0, path.stat().st_size - _LAST_LINE_BYTES))
        if opened.read().splitlines()[-1].startswith(b'{"kind":"end"'):
            return None
    boot, here = start.pid_namespace.split()[:1], pid_namespace().split()[:1]
    is_here = start.host == node_name() and boot in ([], here)
    return start if (_is_alive(start) if is_here else _is_fresh(path)) else None


def find_running_nodes(folder: Path) -> list[str]:
    """The nodes whose samplers are writing into a folder now."""
    return [
        path.stem.removeprefix("system-")
        for path in sorted(folder.glob(SYSTEM_FILES))
        if find_writer(path) is not None or (read_start(path) is None and _is_fresh(path))
    ]


def has_sampler(folder: str | Path) -> bool:
    """Whether somebody samples this node into a folder, or begins to."""
    path = system_file(folder, node_name())
    # A file of now that nobody can read belongs to somebody all the same.
    return find_writer(path) is not None or (read_start(path) is None and _is_fresh(path))


def open_system_file(folder: str | Path) -> LineWriter | None:
    """The file for the samples of this node; ``None`` where somebody writes it already."""
    return None if has_sampler(folder) else LineWriter(system_file(folder, node_name()))


def find_new_ranks(folder: Path, known: set[tuple[str, int]]) -> Iterator[int]:
    """The processes of this node's ranks that have begun to record into a folder; ``known`` takes
    name and number of the files whose first line was read.

    It costs one listing of the folder, and a line of each new file.
    """
    with suppress(OSError):
        for entry in os.scandir(folder):
            key = entry.name, entry.inode()
            if key in known or not _RANK_FILE.fullmatch(entry.name):
                continue
            start = read_start(Path(entry.path))
            if start is None:
                continue  # its first line is still to come
            known.add(key)
            if isinstance(start, Start) and start.host == node_name() and _is_alive(start):
                yield start.pid


def _is_visible(start: Start | SystemStart) -> bool:
    """Whether a process's number means the same here. Earlier versions did not write where."""
    return start.pid_namespace in ("", pid_namespace())


def _is_alive(start: Start | SystemStart) -> bool:
    """Whether the process of a first line lives; one with its number that is younger is another."""
    try:
        process = psutil.Process(start.pid if isinstance(start, Start) else start.root_pid)
        is_same = _is_visible(start) and process.create_time() <= start.time + _CLOCK_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_fresh(path: Path) -> bool:
    """Whether a file was written within the last minute."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime < _FRESH_SECONDS
    return False
