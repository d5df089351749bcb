"""Which rank this process is, and which other processes write into the record.

A file belongs to the process that its first line names until that process or the record has ended.
A script that trains may start another that reads a loader and inherits the order to record, and the
child must not take its parent's file away. A process of another machine cannot be looked at. It
counts as writing while its file is younger than a minute. One of another
container of this machine counts as ended: most often that is this very container, started again.

The ranks of a node need not be one process tree: torchrun's are siblings, those of srun belong to a
daemon. Their files name them, so whoever samples a node finds them here.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from fast_axolotl.record import LineWriter, Start, SystemStart
from fast_axolotl.record.folder import SYSTEM_FILES, UNREADABLE, parse_line, system_file
from fast_axolotl.system import node_name, pid_namespace

_FRESH_SECONDS = 60.0
"""Age of a file up to which its writer on another machine counts as alive. Ours: samples are at
most five seconds apart, and clients of a file server see them up to some seconds late."""
_CLOCK_SECONDS = 2.0
"""A process that began this long after the record is another one with the same number."""
_LAST_LINE_BYTES = 4096
_RANK_FILE = re.compile(r"rank-\d+\.jsonl")


def read_rank(environment: Mapping[str, str] | None = None) -> tuple[int, int, int]:
    """Rank, number of ranks, rank on this machine: by the launcher's variables, else torch's."""
    variables = os.environ if environment is None else environment
    if variables.get("RANK", "").isdigit():
        local = variables.get("LOCAL_RANK", "")
        return (
            int(variables["RANK"]),
            int(variables.get("WORLD_SIZE", "1")),
            int(local) if local.isdigit() else 0,
        )
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
    start = _read_start(path)
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
        if find_writer(path) is not None or _is_fresh(path, only_empty=True)
    ]


def has_sampler(folder: str | Path) -> bool:
    """Whether somebody samples this node into a folder, or begins to."""
    path = system_file(folder, node_name())
    # A file of now that nobody can read belongs to somebody all the same.
    return find_writer(path) is not None or (_read_start(path) is None and _is_fresh(path))


def open_system_file(folder: str | Path) -> LineWriter | None:
    """The file for the samples of this node; ``None`` where somebody writes it already."""
    return None if has_sampler(folder) else LineWriter(system_file(folder, node_name()))


def _read_start(path: Path) -> Start | SystemStart | None:
    """A record's first line; ``None`` where it is still to come, or the file is another."""
    try:
        with path.open("rb") as opened:
            start = parse_line(opened.readline().decode())
    except (OSError, *UNREADABLE):
        return None
    return start if isinstance(start, Start | SystemStart) else None


def find_new_ranks(folder: Path, known: set[tuple[str, int]]) -> list[int]:
    """The processes of this node's ranks that have begun to record into a folder; ``known`` takes
    name and number of the files whose first line was read.

    It costs one listing of the folder, and a line of each new file.
    """
    pids = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            key = entry.name, entry.inode()
            if key in known or not _RANK_FILE.fullmatch(entry.name):
                continue
            start = _read_start(Path(entry.path))
            if start is None:
                continue  # its first line is still to come
            known.add(key)
            if isinstance(start, Start) and start.host == node_name() and _is_alive(start):
                pids.append(start.pid)
    return pids


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


def _is_fresh(path: Path, *, only_empty: bool = False) -> bool:
    """Whether a file was written within the last minute."""
    with suppress(OSError):
        stat = path.stat()
        is_wanted = not (only_empty and stat.st_size)
        return is_wanted and time.time() - stat.st_mtime < _FRESH_SECONDS
    return False
