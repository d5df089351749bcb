"""Follows a record's folder while the run writes it, for days and in bounded memory.

Each call of ``poll`` looks for new files and reads what the known ones have grown by, every line
once; a line whose end has not come yet waits for it. A file that was put in the place of an earlier
one, because a new run uses the folder, is read from its start.

The record that results gives the same figures as one read at once. Blocks are sums, so two
neighbours of one phase can become one: every ratio of sums stays as it was. What is lost is detail
of long ago: of the slow fetches all but the worst, and the times of single steps, but for their
waits, a byte each. Of samples, whose counters only grow, every other one is let go, but never the
highest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError
from fast_axolotl.record.folder import (
    SYSTEM_FILES,
    UNREADABLE,
    RankRecord,
    RunRecord,
    SystemRecord,
    check_folder,
    find_protocol_runs,
    leave_out_earlier,
    no_record,
    parse_line,
    sort_in,
    sort_systems,
)
from fast_axolotl.record.histogram import Histogram
from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult
from fast_axolotl.record.schema import COUNTED, SAMPLED, Mark, StepBlock, SystemSample
from fast_axolotl.record.waits import join_waits

NEWEST = 128
"""Blocks and samples that keep their detail: two minutes, at one a second."""
_MOST_BLOCKS = 4096
"""Of all ranks together."""
MOST_SAMPLES = 1024
_MOST_MARKS = 1024
_MOST_LOGS = 64
_MOST_SLOW = 16
"""Slow fetches of two blocks that became one."""
_FIRST_MARKS = 64
_MOST_NOTES = 20
"""Of one file."""
_HEAD_BYTES = 256
"""By which a file is known again: they hold the kind of the first line, and when it was written."""
_MOST_BYTES = 4_000_000
"""Read from one file in one call: what a long record takes of memory at a time."""

_SUMMED = ("steps", "fetches", "wall_seconds", "host_wait_seconds", "device_wait_seconds")
_SIZES = ("pss_bytes", "pss_anon_bytes", "pss_file_bytes", "pss_shared_bytes")
_MOST_STEP_WAITS = 4096
"""Steps of a block that keeps a byte for the wait of each: beyond, only their sum is known."""


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
        ranks = self.record.ranks
        ends = [rank.end for rank in ranks.values()]
        ends += [system.end for system in self.record.systems.values()]
        world = max((rank.start.world_size for rank in ranks.values()), default=0)
        return bool(ends) and None not in ends and len(ranks) >= world

    def check(self) -> None:
        """Refuse a folder that is no record."""
        check_folder(self.folder)
        if not self._find_files():
            raise no_record(self.folder)

    def poll(self) -> int:
        """Read what is new; the number of new lines."""
        count = 0
        self.is_behind = False
        for path in self._find_files():
            tail = self._tails.setdefault(path.name, _Tail(path))
            try:
                texts = tail.read()
            except OSError:
                # Moved or removed this very moment; if there is a new file, the next call finds it.
                continue
            self.is_behind = self.is_behind or tail.is_behind
            count += len(texts)
            for text in texts:
                tail.number += 1
                try:
                    line = parse_line(text.decode("utf-8", errors="replace"))
                except UNREADABLE:
                    if len(tail.notes) < _MOST_NOTES:
                        what = f"{path.name}, line {tail.number}: not a line of a record"
                        tail.notes.append(what)
                    continue
                tail.home = sort_in(tail.home, line, path)
                if isinstance(line, StepBlock) and isinstance(tail.home, RankRecord):
                    self._step_at = self._clock()
        if count:
            self._assemble()
        return count

    def reset(self) -> None:
        """Begin a new window: figures are of what comes from now on."""
        restart_window(self.record)

    def _find_files(self) -> list[Path]:
        return [*sorted(self.folder.glob("rank-*.jsonl")), *self.folder.glob(SYSTEM_FILES)]

    def _assemble(self) -> None:
        """From all files anew: which ranks are of this run is known once rank 0 has begun."""
        homes = [tail.home for tail in self._tails.values()]
        ranks = [home for home in homes if isinstance(home, RankRecord)]
        self.record.ranks = {rank.start.rank: rank for rank in ranks}
        self.record.systems = sort_systems(homes)
        self.record.notes = [note for tail in self._tails.values() for note in tail.notes]
        leave_out_earlier(self.record)
        most = max(NEWEST + 32, _MOST_BLOCKS // max(1, len(self.record.ranks)))
        for rank in self.record.ranks.values():
            rank.blocks = condense_blocks(rank.blocks, most=most, newest=NEWEST)
            rank.marks = condense_marks(rank.marks, most=_MOST_MARKS)
            del rank.logs[:-_MOST_LOGS]
            del rank.windows[:-most]
        for system in self.record.systems.values():
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
        """Whether a folder is laid out as a protocol's: see ``protocol_result``."""
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
        number, arm, pair = 0, "", None
        if self.has_begun:
            number = max(0, _turn_of(self.run.folder))
            arm = self.run.folder.name.partition("-")[2]
            if arm not in [one.name for one in found.arms]:
                # A second training of a run has a number behind its arm.
                arm = arm.rpartition("-")[0] or arm
        if number and found.arms and found.planned_runs:
            # Each arm has one run in a pair; warm-ups come first.
            warmups = found.planned_runs // len(found.arms) - found.planned_pairs
            pair = max(-1, (number - 1) // len(found.arms) - warmups)
        seconds = [run.seconds for one in found.arms for run in one.runs]
        left, known = found.planned_runs - len(seconds), [one for one in seconds if one is not None]
        seconds_left = None
        if known and left > 0:
            # The mean of a run for each that is to come, and what remains of it for this one. The
            # file is written when a run has ended, and the next begins.
            mean, elapsed = sum(known) / len(known), self._now() - self._written[0] / 1e9
            seconds_left = mean * (left - 1) + max(0.0, mean - max(0.0, elapsed)) or None
        return ProtocolStage(
            run=number,
            arm=arm,
            pair=pair,
            planned_runs=found.planned_runs,
            planned_pairs=found.planned_pairs,
            done=len(seconds),
            seconds_left=seconds_left,
        )

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
        arms = self._protocol.arms if self._protocol is not None else ()
        done = {_turn_of(Path(run.folder)) for arm in arms for run in arm.runs}
        # One that was damaged is made again, after later ones.
        going_on = {path for path in begun if _turn_of(path) not in done}

        def place(folder: Path) -> tuple[int, int]:
            """The run's number, and that of the training in it."""
            training = folder.name.rpartition("-")[2]
            return _turn_of(folder), int(training) if training.isdecimal() else 1

        return max(going_on or begun, key=place, default=None)

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


def _turn_of(folder: Path) -> int:
    number = folder.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def restart_window(record: RunRecord) -> None:
    """Forget blocks and samples; the last sample stays, for counters to be compared with."""
    for rank in record.ranks.values():
        rank.blocks.clear()
    for system in record.systems.values():
        if not system.samples:
            continue
        last = system.samples[-1]
        known = next((one for one in reversed(system.samples) if one.pss_bytes is not None), last)
        sizes = {name: getattr(known, name) for name in _SIZES}
        system.samples[:] = [replace(last, **sizes)]


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


def condense_blocks(blocks: list[StepBlock], *, most: int, newest: int) -> list[StepBlock]:
    """At most about ``most`` blocks, the ``newest`` of them untouched."""
    while len(blocks) > most:
        old, joined = blocks[:-newest], []
        index = 0
        while index < len(old):
            pair = old[index : index + 2]
            knows_device = {block.device_wait_seconds is not None for block in pair}
            if len(pair) == 2 and pair[0].phase == pair[1].phase and len(knows_device) == 1:
                joined.append(join_blocks(*pair))
                index += 2
            else:
                joined.append(pair[0])
                index += 1
        if len(joined) == len(old):
            break
        blocks = joined + blocks[-newest:]
    return blocks


def join_blocks(first: StepBlock, second: StepBlock) -> StepBlock:
    """Two blocks that follow each other as one."""
    both = (first, second)
    sums: dict[str, Any] = {}
    for name in _SUMMED + SAMPLED:
        known = [value for block in both if (value := getattr(block, name)) is not None]
        sums[name] = sum(known) if known else None
    # What one of them fetched and did not count leaves no count of both.
    fetched = [block for block in both if block.fetches]
    for name in (*COUNTED, "forward_seconds"):
        counts = [getattr(block, name) for block in fetched or both]
        sums[name] = None if None in counts else sum(counts)
    for name in ("spans", "waits_by_cause"):
        one, other = getattr(first, name), getattr(second, name)
        sums[name] = {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}
    depths = [(block.queue_depth, block.fetches) for block in both if block.queue_depth is not None]
    weight = sum(fetches for _, fetches in depths)
    depth = depths[-1][0] if depths else None
    if weight:
        depth = sum(value * fetches for value, fetches in depths) / weight
    slow = sorted((*first.slow, *second.slow), key=lambda fetch: -fetch.seconds)[:_MOST_SLOW]
    has_device = first.device_waits is not None or second.device_waits is not None
    return replace(
        second,
        first_step=first.first_step,
        first_fetch=first.first_fetch,
        **sums,
        queue_depth=depth,
        step_waits=join_waits(first.step_waits, second.step_waits)
        if sums["steps"] <= _MOST_STEP_WAITS
        else "",
        host_waits=_merge(first.host_waits, second.host_waits),
        device_waits=_merge(first.device_waits, second.device_waits) if has_device else None,
        step_times=_merge(first.step_times, second.step_times),
        slow=tuple(sorted(slow, key=lambda fetch: fetch.fetch)),
        walls=None,
        hosts=None,
        devices=None,
    )


def _merge(first: dict[str, int] | None, second: dict[str, int] | None) -> dict[str, int]:
    merged = Histogram(first)
    merged.merge(second or {})
    return merged.written()


def condense_samples(samples: list[SystemSample], *, most: int, newest: int) -> list[SystemSample]:
    """At most about ``most`` samples, the ``newest`` of them untouched."""
    while len(samples) > most:
        highest = [
            max(samples, key=lambda sample: getattr(sample, name) or 0)
            for name in ("working_set_bytes", "hwm_bytes")
        ]
        old, kept = samples[1:-newest], samples[:1]
        for index in range(0, len(old), 2):
            pair = old[index : index + 2]
            best = max(pair, key=lambda sample: (sample.pss_bytes is not None, sample.t))
            kept += [one for one in pair if one is best or any(one is peak for peak in highest)]
        kept += samples[-newest:]
        if len(kept) == len(samples):
            break
        samples = kept
    return samples


def condense_marks(marks: list[Mark], *, most: int) -> list[Mark]:
    """The first, which tell how the run began, and the latest."""
    return marks if len(marks) <= most else marks[:_FIRST_MARKS] + marks[-(most // 2) :]
