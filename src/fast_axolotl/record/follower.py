"""Follows a record's folder while the run writes it, reading every line once.

Each call of ``poll`` looks for new files and reads what the known ones have grown by; a line whose
end has not come yet waits for it. The record that results holds figures of the same value as one
read at once, in bounded memory (see ``condensing``). A file that was put in the place of an earlier
one, because a new run uses the folder, is read from its start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.record.condense import condense_blocks, condense_marks, condense_samples
from fast_axolotl.record.folder import (
    UNREADABLE,
    RankRecord,
    RunRecord,
    SystemRecord,
    find_protocol_runs,
    leave_out_earlier_ranks,
    parse_line,
    sort_in,
)
from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult
from fast_axolotl.record.schema import StepBlock

__all__ = [
    "MOST_SAMPLES",
    "NEWEST",
    "ProtocolFollower",
    "ProtocolStage",
    "RunFollower",
    "restart_window",
]

NEWEST = 128
"""Blocks and samples that keep their detail: two minutes, at one a second."""
_MOST_BLOCKS = 4096
"""Of all ranks together."""
MOST_SAMPLES = 1024
_MOST_MARKS = 1024
_MOST_LOGS = 64
_MOST_NOTES = 20
"""Of one file."""
_HEAD_BYTES = 256
"""By which a file is known again: they hold the kind of the first line, and when it was written."""
_MOST_BYTES = 4_000_000
"""Read from one file in one call: what a long record takes of memory at a time."""


class RunFollower:
    """Reads what is new in a record's folder."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = Path(folder)
        self.record = RunRecord(path=str(folder))
        self.is_behind = False
        """More was there than one call reads: call again."""
        self._clock = clock
        self._tails: dict[str, _Tail] = {}
        self._step_at = clock()

    @property
    def stepless_seconds(self) -> float:
        """Since a line about steps came, or following began."""
        return self._clock() - self._step_at

    @property
    def is_complete(self) -> bool:
        """Every file of the record has its last line, and no rank is missing."""
        ranks, system = self.record.ranks, self.record.system
        ends = [rank.end for rank in ranks.values()]
        world = max((rank.start.world_size for rank in ranks.values()), default=0)
        if system is not None:
            ends.append(system.end)
        return bool(ends) and None not in ends and len(ranks) >= world

    def check(self) -> None:
        """Refuse a folder that is no record."""
        if not self.folder.exists():
            raise MissingFileError("there is no such folder", path=str(self.folder))
        if not self.folder.is_dir():
            raise DataError("a record is a folder, and this is a file", path=str(self.folder))
        if not self._find_files():
            raise DataError(
                "no record in here: there is neither rank-0.jsonl nor system.jsonl; "
                "make one with fast-axolotl run --measure -- COMMAND",
                path=str(self.folder),
            )

    def poll(self) -> int:
        """Read what is new; the number of new lines."""
        count = 0
        self.is_behind = False
        for path in self._find_files():
            count += self._poll_file(path)
        if count:
            self._assemble()
            self._condense()
        return count

    def reset(self) -> None:
        """Begin a new window: figures are of what comes from now on."""
        restart_window(self.record)

    def _find_files(self) -> list[Path]:
        return [*sorted(self.folder.glob("rank-*.jsonl")), *self.folder.glob("system.jsonl")]

    def _poll_file(self, path: Path) -> int:
        tail = self._tails.setdefault(path.name, _Tail(path))
        try:
            texts = tail.read()
        except OSError:
            # Moved or removed this very moment; if there is a new file, the next call finds it.
            return 0
        self.is_behind = self.is_behind or tail.is_behind
        for text in texts:
            self._take(tail, text)
        return len(texts)

    def _take(self, tail: _Tail, text: bytes) -> None:
        tail.number += 1
        try:
            line = parse_line(text.decode("utf-8", errors="replace"))
        except UNREADABLE:
            if len(tail.notes) < _MOST_NOTES:
                tail.notes.append(f"{tail.path.name}, line {tail.number}: not a line of a record")
            return
        tail.home = sort_in(tail.home, line, tail.path)
        if isinstance(line, StepBlock) and isinstance(tail.home, RankRecord):
            self._step_at = self._clock()

    def _assemble(self) -> None:
        """From all files anew: which ranks are of this run is known once rank 0 has begun."""
        homes = [tail.home for tail in self._tails.values()]
        ranks = [home for home in homes if isinstance(home, RankRecord)]
        self.record.ranks = {rank.start.rank: rank for rank in ranks}
        self.record.system = next((one for one in homes if isinstance(one, SystemRecord)), None)
        self.record.notes = [note for tail in self._tails.values() for note in tail.notes]
        leave_out_earlier_ranks(self.record)

    def _condense(self) -> None:
        most = max(NEWEST + 32, _MOST_BLOCKS // max(1, len(self.record.ranks)))
        for rank in self.record.ranks.values():
            rank.blocks = condense_blocks(rank.blocks, most=most, newest=NEWEST)
            rank.marks = condense_marks(rank.marks, most=_MOST_MARKS)
            del rank.logs[:-_MOST_LOGS]
        system = self.record.system
        if system is not None:
            system.samples = condense_samples(system.samples, most=MOST_SAMPLES, newest=NEWEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolStage:
    """How far a protocol is."""

    run: int
    """Number of the newest run, from 1; 0 before the first has begun."""
    arm: str
    pair: int | None
    """Of the newest run, from 0; −1 is a warm-up; ``None`` where nobody told what is planned."""
    planned_runs: int
    """0 where nobody told."""
    planned_pairs: int
    done: int
    """Runs that have ended."""
    seconds_left: float | None
    """By the runs so far; ``None`` before the first has ended, and where that time is over."""

    @property
    def is_over(self) -> bool:
        """Whether every run that is planned has ended."""
        return 0 < self.planned_runs <= self.done


class ProtocolFollower:
    """Reads what is new in the newest run of a protocol's folder, and how far the protocol is."""

    def __init__(self, folder: str | Path, *, now: Callable[[], float] = time.time) -> None:
        self.folder = Path(folder)
        self._now = now
        self._protocol: ProtocolResult | None = None
        self._written: tuple[int, int] = (0, 0)
        """Date and size of the file as it was read."""
        self._read_protocol()
        self.run = RunFollower(self._find_newest() or self.folder)

    @staticmethod
    def is_protocol(folder: str | Path) -> bool:
        """Whether a folder is laid out as a protocol's: see ``comparison``."""
        root = Path(folder)
        if (root / PROTOCOL_FILE).is_file():
            return True
        # A record may lie in a folder of outputs, beside a "runs" of TensorBoard's.
        is_record = any(root.glob("*.jsonl"))
        return not is_record and bool(find_protocol_runs(root))

    @property
    def record(self) -> RunRecord:
        """Of the newest run."""
        return self.run.record

    @property
    def is_behind(self) -> bool:
        """More was there than one call reads: call again."""
        return self.run.is_behind

    @property
    def stepless_seconds(self) -> float:
        """Since a line about steps came, or following that run began."""
        return self.run.stepless_seconds

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to follow."""
        return self.run.folder != self.folder

    def read_stage(self) -> ProtocolStage | None:
        """How far it is now; ``None`` where the folder tells nothing about the whole."""
        self._read_protocol()
        found = self._protocol
        if found is None:
            return None
        done = [run for arm in found.arms for run in arm.runs]
        number = max(0, _turn_of(self.run.folder)) if self.has_begun else 0
        return ProtocolStage(
            run=number,
            arm=self._find_arm(found) if self.has_begun else "",
            pair=_pair_of(number, found),
            planned_runs=found.planned_runs,
            planned_pairs=found.planned_pairs,
            done=len(done),
            seconds_left=self._seconds_left(found, [run.seconds for run in done]),
        )

    def _find_arm(self, found: ProtocolResult) -> str:
        """A second training of a run has a number behind its arm."""
        name = self.run.folder.name.partition("-")[2]
        is_arm = name in [arm.name for arm in found.arms]
        return name if is_arm else name.rpartition("-")[0] or name

    def check(self) -> None:
        """Refuse a folder in which no run has begun and none is to be expected."""
        if not self.has_begun and (self.folder / PROTOCOL_FILE).is_file():
            ProtocolResult.read(self.folder)
        else:
            self.run.check()

    def poll(self) -> int:
        """Read what is new, in the next run if that has begun; the number of new lines."""
        self._read_protocol()
        newest = self._find_newest()
        if newest is not None and newest != self.run.folder:
            self.run = RunFollower(newest)
        return self.run.poll()

    def reset(self) -> None:
        """Begin a new window."""
        self.run.reset()

    def _find_newest(self) -> Path | None:
        begun = find_protocol_runs(self.folder)
        # One that was damaged is made again, after later ones.
        going_on = {path for path in begun if _turn_of(path) not in self._done_turns}
        return max(going_on or begun, key=_place_of, default=None)

    @property
    def _done_turns(self) -> set[int]:
        arms = self._protocol.arms if self._protocol is not None else ()
        return {_turn_of(Path(run.folder)) for arm in arms for run in arm.runs}

    def _read_protocol(self) -> None:
        try:
            stat = (self.folder / PROTOCOL_FILE).stat()
            written = stat.st_mtime_ns, stat.st_size
            if written != self._written:
                self._protocol = ProtocolResult.read(self.folder)
                self._written = written
        except (OSError, DataError):
            # A protocol is told by its runs, too; what was known stays.
            return

    def _seconds_left(self, found: ProtocolResult, seconds: Sequence[float | None]) -> float | None:
        """The mean of a run for each that is to come, and what remains of it for this one."""
        known = [one for one in seconds if one is not None]
        left = found.planned_runs - len(seconds)
        if not known or left <= 0:
            return None
        mean = sum(known) / len(known)
        # The file is written when a run has ended, and the next begins.
        elapsed = self._now() - self._written[0] / 1e9
        return mean * (left - 1) + max(0.0, mean - max(0.0, elapsed)) or None


def _pair_of(number: int, found: ProtocolResult) -> int | None:
    """Each arm has one run in a pair; warm-ups come first."""
    arms = len(found.arms)
    if not number or not arms or not found.planned_runs:
        return None
    warmups = found.planned_runs // arms - found.planned_pairs
    return max(-1, (number - 1) // arms - warmups)


def _place_of(folder: Path) -> tuple[int, int]:
    """The run's number, and that of the training in it."""
    number = folder.name.rpartition("-")[2]
    return _turn_of(folder), int(number) if number.isdecimal() else 1


def _turn_of(folder: Path) -> int:
    number = folder.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def restart_window(record: RunRecord) -> None:
    """Forget blocks and samples; the last sample stays, for counters to be compared with."""
    for rank in record.ranks.values():
        rank.blocks.clear()
    system = record.system
    if system is not None and system.samples:
        known = [one.pss_bytes for one in system.samples if one.pss_bytes is not None]
        last = system.samples[-1]
        system.samples[:] = [replace(last, pss_bytes=known[-1] if known else None)]


class _Tail:
    """How far one file has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home: RankRecord | SystemRecord | None = None
        self.number = 0
        """Lines read."""
        self.notes: list[str] = []
        """What was wrong with them."""
        self.is_behind = False
        self._offset = 0
        self._head = b""
        self._begun = b""
        """The start of a line whose end has not come yet."""

    def read(self) -> list[bytes]:
        """The whole lines that are new."""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_BYTES)
            # A new file may have the number of a removed one; its first line has another date.
            if not head.startswith(self._head) or size < self._offset:
                self.home, self.number, self.notes = None, 0, []
                self._offset, self._begun = 0, b""
            self._head = head
            file.seek(self._offset)
            found = file.read(_MOST_BYTES)
        self._offset += len(found)
        self.is_behind = self._offset < size
        *whole, self._begun = (self._begun + found).split(b"\n")
        return [text for text in whole if text.strip()]
