"""The trainings of one run: the first in the folder given, the next ones in folders beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from fast_axolotl.record.folder import RunRecord, read_run

__all__ = ["find_folders", "find_longest", "next_folder", "read_trainings"]


def next_folder(run_dir: str | Path, number: int) -> Path:
    """The folder of the ``number``-th training of a run: the first gets the name given."""
    folder = Path(run_dir)
    return folder if number == 1 else folder.with_name(f"{folder.name}-{number}")


def find_folders(run_dir: str | Path, since: float = 0.0) -> list[Path]:
    """The folders of all trainings that one run has recorded: the one given, and those beside it.

    ``since`` is when the run began, in seconds since 1970: a folder of that name may be older.
    """
    found = [Path(run_dir)]
    for number in itertools.count(2):
        folder = next_folder(run_dir, number)
        files = list(folder.glob("rank-*.jsonl"))
        if not files or max(file.stat().st_mtime for file in files) < since:
            break
        found.append(folder)
    return found


def read_trainings(run_dir: str | Path, since: float = 0.0) -> list[RunRecord]:
    """All of them; who watched the processes has written into the first folder, for all."""
    records = [read_run(folder) for folder in find_folders(run_dir, since)]
    for record in records[1:]:
        record.system = record.system or records[0].system
    return records


def find_longest(records: Sequence[RunRecord]) -> RunRecord:
    """The one whose steps, over all ranks, took the most time."""
    return max(records, key=_count_seconds)


def _count_seconds(record: RunRecord) -> float:
    return sum(block.wall_seconds for rank in record.ranks.values() for block in rank.blocks)
