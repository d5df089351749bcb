"""Name the folders of several trainings in one run.

They are RUN, RUN-2, RUN-3, …; a number whose folder holds the record of another run is left out.
Who watches the processes of a run writes into the folder of the first, for all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from fast_axolotl.errors import DataError
from fast_axolotl.record.folder import UNREADABLE, RunRecord, parse_line, read_run
from fast_axolotl.record.schema import Start


def next_folder(run_dir: str | Path, number: int) -> Path:
    """The folder of the ``number``-th training of a run: the first gets the name given."""
    folder = Path(run_dir)
    return folder if number == 1 else folder.with_name(f"{folder.name}-{number}")


def free_folder(run_dir: str | Path, number: int, rank: int) -> Path:
    """The folder for the ``number``-th training of a run, or for a later one where the record of
    another run is in the way.

    All ranks of a run choose the same. A record is another run's if it began before this run's
    first training, or if it has lines of this rank already.
    """
    begun = min(map(_start_time, Path(run_dir).glob("rank-*.jsonl")), default=0.0)
    for candidate in itertools.count(number):
        folder = next_folder(run_dir, candidate)
        files = list(folder.glob("rank-*.jsonl"))
        is_other = folder / f"rank-{rank}.jsonl" in files or any(
            _start_time(file) < begun for file in files
        )
        if candidate == 1 or not is_other:
            return folder
    raise AssertionError("numbers do not end")


def _start_time(file: Path) -> float:
    """When a rank's record began; 0 where it does not say."""
    with contextlib.suppress(OSError, *UNREADABLE), file.open(encoding="utf-8") as lines:
        line = parse_line(next(lines, ""))
        return line.time if isinstance(line, Start) else 0.0
    return 0.0


def share_record(path: Path, run_dir: str | Path) -> bool:
    """Have the file of a rank show in the folder of a run, too, by a link; ``False`` where that has
    its own, or has no links."""
    shared = Path(run_dir) / path.name
    with contextlib.suppress(OSError):
        shared.parent.mkdir(parents=True, exist_ok=True)
        shared.symlink_to(path.absolute())
        return True
    return False


def find_folders(run_dir: str | Path, since: float = 0.0) -> list[Path]:
    """The folders of all trainings that one run has recorded: the one given, and those beside it.

    ``since`` is when the run began, in seconds since 1970: a folder of that name may be older.
    """
    found = [Path(run_dir)]
    for number in itertools.count(2):
        folder = next_folder(run_dir, number)
        files = list(folder.glob("rank-*.jsonl"))
        if not files:
            break
        if max(file.stat().st_mtime for file in files) >= since:
            found.append(folder)
    return found


def read_training(folder: str | Path) -> RunRecord:
    """The record of one training; of a later one, with what was seen from outside."""
    record = read_run(folder)
    stem, _, number = Path(folder).name.rpartition("-")
    if not record.systems and record.ranks and stem and number.isdecimal():
        # The watchers of the first, where that run was still going on when this one began.
        with contextlib.suppress(DataError):
            begun = min(rank.start.time for rank in record.ranks.values())
            for node, system in read_run(Path(folder).with_name(stem)).systems.items():
                until = system.start.time + max((one.t for one in system.samples[-1:]), default=0.0)
                if system.start.time <= begun <= until:
                    record.systems[node] = system
                    record.is_first_training = False
    return record


def read_trainings(run_dir: str | Path, since: float = 0.0) -> list[RunRecord]:
    """All trainings of a run."""
    return [read_training(folder) for folder in find_folders(run_dir, since)]


def choose_training(records: Sequence[RunRecord]) -> RunRecord:
    """The one with the most steps, of equal ones the first: a number that noise does not change."""
    return max(
        records,
        key=lambda record: max(
            (sum(block.steps for block in rank.blocks) for rank in record.ranks.values()), default=0
        ),
    )
