"""The folder of a record: append lines to it, and read them.

    RUN/rank-0.jsonl      Start, then Settings, StepBlock, Mark, Phase, …, End
    RUN/rank-1.jsonl
    RUN/system-NODE.jsonl SystemStart, SystemSample, …, End; one of each machine

``system.jsonl`` is what earlier versions, and who watches a process, write for the last of them.
Several trainings of one run are recorded in RUN, RUN-2, RUN-3, …; a number whose folder holds the
record of another run is left out. Who watches the processes of a run writes into the folder of the
first, for all of them.
A writer that meets a full disk stops writing and says so in ``failure``; it never raises into the
training loop. A reader takes every whole line and remembers whether the last one was cut off.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from fast_axolotl.errors import DataError, MissingFileError, mask_secrets, mask_words
from fast_axolotl.record import schema
from fast_axolotl.record.codec import from_plain, to_json
from fast_axolotl.record.protocol_result import PROTOCOL_FILE

_KINDS: dict[str, tuple[type, str]] = {
    "start": (schema.Start, ""),
    "settings": (schema.Settings, "settings"),
    "steps": (schema.StepBlock, "blocks"),
    "mark": (schema.Mark, "marks"),
    "phase": (schema.Phase, "phases"),
    "model": (schema.ModelShape, "models"),
    "log": (schema.Log, "logs"),
    "window": (schema.ProfileWindow, "windows"),
    "stacks": (schema.Stacks, "stacks"),
    "end": (schema.End, ""),
    "system_start": (schema.SystemStart, ""),
    "system": (schema.SystemSample, ""),
}
"""The kinds of lines, and where a rank keeps them."""
_READ_OVER = ("resume", "evaluate")
"""Marks with the number of batches that were read before the first step, and not trained on."""
_NAMES = {line: name for name, (line, _) in _KINDS.items()}
_LISTS = {line: home for line, home in _KINDS.values() if home}
_DECODERS: dict[str, Any] = {name: msgspec.json.Decoder(line) for name, (line, _) in _KINDS.items()}
SYSTEM_FILES = "system*.jsonl"
JOB_FILE = "job.json"
INTERPRETERS_FILE = "interpreters.txt"
"""Which Pythons were to be measured: written by the start-up hook."""
_CLOCK_SECONDS = 60.0
"""How far the clocks of two nodes may be apart."""


class _Kind(msgspec.Struct):
    kind: str


_KIND = msgspec.json.Decoder(_Kind)


@dataclass(slots=True)
class RankRecord:
    """The lines of one rank, by kind, in their order."""

    start: schema.Start
    settings: list[schema.Settings] = field(default_factory=list)
    blocks: list[schema.StepBlock] = field(default_factory=list)
    marks: list[schema.Mark] = field(default_factory=list)
    phases: list[schema.Phase] = field(default_factory=list)
    models: list[schema.ModelShape] = field(default_factory=list)
    windows: list[schema.ProfileWindow] = field(default_factory=list)
    logs: list[schema.Log] = field(default_factory=list)
    stacks: list[schema.Stacks] = field(default_factory=list)
    end: schema.End | None = None
    num_skipped: int = 0
    """Batches that were read over before the training began."""
    _skipped_as: str = "resume"

    def add(self, line: object) -> None:
        """Sort one line in."""
        if isinstance(line, schema.End):
            self.end = line
        elif type(line) in _LISTS:
            getattr(self, _LISTS[type(line)]).append(line)
        if isinstance(line, schema.Mark) and line.name in _READ_OVER and line.fetch:
            # What was taken for steps before it was known better is none.
            self.num_skipped, self._skipped_as = line.fetch, line.name
            self.blocks = [self._without_skipped(block) for block in self.blocks]
            self.marks = [mark for mark in self.marks if mark.name != "first_step"]
            self.marks.append(schema.Mark(t=line.t, name="first_step"))
        elif self.num_skipped and isinstance(line, schema.StepBlock):
            self.blocks[-1] = self._without_skipped(line)

    def _without_skipped(self, block: schema.StepBlock) -> schema.StepBlock:
        """A block of skipped batches as the span that it was: no steps, no tokens."""
        if block.first_fetch >= self.num_skipped or not block.steps:
            return block
        return schema.StepBlock(
            t=block.t,
            phase="warmup",
            first_step=block.first_step,
            steps=0,
            first_fetch=block.first_fetch,
            fetches=0,
            wall_seconds=0.0,
            host_wait_seconds=0.0,
            device_wait_seconds=None if block.device_wait_seconds is None else 0.0,
            spans={**block.spans, self._skipped_as: block.wall_seconds},
        )

    @property
    def values(self) -> dict[str, Any]:
        """The settings known at the end."""
        return {key: value for line in self.settings for key, value in line.values.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """Why figures of this rank are missing."""
        return {key: value for line in self.settings for key, value in line.reasons.items()}


@dataclass(slots=True)
class SystemRecord:
    """The lines of whoever watched the process tree."""

    start: schema.SystemStart
    samples: list[schema.SystemSample] = field(default_factory=list)
    end: schema.End | None = None

    def add(self, line: object) -> None:
        """Sort one line in."""
        if isinstance(line, schema.SystemSample):
            self.samples.append(line)
        elif isinstance(line, schema.End):
            self.end = line


@dataclass(slots=True)
class RunRecord:
    """A whole run, as read from its folder."""

    path: str
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    systems: dict[str, SystemRecord] = field(default_factory=dict)
    """By the node that was watched."""
    notes: list[str] = field(default_factory=list)
    """What was wrong with the files, one sentence each."""
    interpreters: dict[str, str] = field(default_factory=dict)
    """Every Python that was to be measured, and why it could not be, if it could not."""
    is_first_training: bool = True
    """Whether the command's start is this training's: not of one that follows another."""

    @property
    def system(self) -> SystemRecord | None:
        """What was watched on rank 0's node, else on the first; ``None``: nothing was."""
        first = self.ranks.get(0)
        own = self.systems.get(first.start.host) if first is not None else None
        return own or next(iter(self.systems.values()), None)

    def find_losses(self) -> list[schema.Log]:
        """The lines with a loss, of the first rank that logged any.

        Trainers log on one rank, or the same on all. The rank that decides about the data may be
        another one from run to run, and losses of two runs are to be compared.
        """
        logs = (rank.logs for _, rank in sorted(self.ranks.items()))
        losses = ([line for line in lines if "loss" in line.values] for lines in logs)
        return next(filter(None, losses), [])


class LineWriter:
    """Appends lines to one file and flushes each, until the disk refuses.

    A file that is there already is an earlier record. It is kept as ``NAME.1``, ``NAME.2``, …,
    which no reader of the folder takes up. With a ``refusal``, the reason why this writer may not
    have the file, the file is left as it is and nothing is written.
    """

    def __init__(self, path: str | Path, *, refusal: str = "") -> None:
        self.path = Path(path)
        self.num_bytes = 0
        self.failure = f"{self.path}: {refusal}" if refusal else ""
        """Why nothing is written any more; empty while all is well."""
        self._file: Any = None
        if refusal:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size:
                beside = (self.path.with_name(f"{self.path.name}.{n}") for n in itertools.count(1))
                self.path.rename(next(free for free in beside if not free.exists()))
            # Of two that begin this very moment, neither may write over the other's lines.
            self._file = self.path.open("ab" if self.path.exists() else "xb")
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror or error}"

    def write(self, line: object) -> None:
        """Append one line."""
        if self._file is None:
            return
        # A path or an error may hold bytes that are no text; they are written as \\udcXX.
        text = f"{dump_line(line)}\n".encode(errors="backslashreplace")
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError) as error:
            self.failure = f"{self.path}: {getattr(error, 'strerror', None) or error}"
            self.close()
        else:
            self.num_bytes += len(text)

    def close(self) -> None:
        """Write nothing more."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.failure = self.failure or f"{self.path}: {error.strerror or error}"


def dump_line(line: object) -> str:
    """One line as JSON, empty fields left out, secrets masked."""
    values: dict[str, Any] = {"kind": _NAMES[type(line)]}
    for item in fields(line):  # type: ignore[arg-type]
        value = getattr(line, item.name)
        if value is None or value == () or value == {} or value == "" == item.default:
            continue
        if item.name == "command":
            value = mask_words(value)
        elif item.name in ("error", "text"):
            value = mask_secrets(value)
        values[item.name] = value
    try:
        return msgspec.json.encode(values, enc_hook=str).decode()
    except UnicodeEncodeError:  # a path with bytes that are no text
        return to_json(values, indent=None)


def read_run(path: str | Path) -> RunRecord:
    """Read a record's folder."""
    folder = Path(path)
    if not folder.exists():
        raise MissingFileError("there is no such folder", path=str(folder))
    if not folder.is_dir():
        raise DataError("a record is a folder, but this is a file", path=str(folder))
    record = RunRecord(path=str(folder))
    for file in sorted(folder.glob("rank-*.jsonl")):
        home = _read_file(file, record)
        if isinstance(home, RankRecord):
            record.ranks[home.start.rank] = home
        else:
            record.notes.append(f"{file.name} has no start line and was skipped")
    with suppress(OSError):
        lines = (folder / INTERPRETERS_FILE).read_text(errors="replace").splitlines()
        record.interpreters = {line.partition("\t")[0]: line.partition("\t")[2] for line in lines}
    homes = [_read_file(file, record) for file in sorted(folder.glob(SYSTEM_FILES))]
    systems = [home for home in homes if isinstance(home, SystemRecord)]
    # Of two files of one node, that which began last.
    systems.sort(key=lambda system: system.start.time)
    record.systems = dict(sorted((system.start.host, system) for system in systems))
    if 0 in record.ranks:
        # Ranks and nodes of another run that used the same folder before are left out.
        start = record.ranks[0].start
        for rank in [rank for rank in record.ranks if rank >= start.world_size]:
            del record.ranks[rank]
            text = f"rank-{rank}.jsonl is from another run: this one had {start.world_size} ranks"
            record.notes.append(text)
        hosts = {rank.start.host for rank in record.ranks.values()}
        others = [node for node in record.systems if node not in hosts and len(record.systems) > 1]
        for system in map(record.systems.__getitem__, others):
            last = max((line.t for line in (*system.samples[-1:], system.end) if line), default=0.0)
            if system.start.time + last + _CLOCK_SECONDS < start.time:
                node = system.start.host
                del record.systems[node]
                text = f"the samples of {node} belong to an earlier run and were skipped"
                record.notes.append(text)
    if not record.ranks and not record.systems:
        # A folder that holds a protocol has several records below.
        reason = "; ".join(record.notes[:3])
        reason = reason or "it contains neither rank-0.jsonl nor system-NODE.jsonl"
        text = f"this folder holds no record: {reason}; "
        text += "make one with fast-axolotl measure -- COMMAND"
        runs = sorted({file.parent for file in folder.glob("runs/[0-9]*-*/*.jsonl")})
        verbs = ("report", "compare") if (folder / PROTOCOL_FILE).is_file() else ()
        words = [f"{verb} {shlex.quote(str(folder))}" for verb in verbs]
        words += [f"show {shlex.quote(str(runs[-1]))}"] if runs else []
        if (folder / JOB_FILE).is_file():
            text = f"this is the record of a data job, which has no steps; read {JOB_FILE} itself"
        elif words:
            commands = ", ".join(f"fast-axolotl {word}" for word in words)
            text = f"this is the folder of a protocol, with one record per run: {commands}"
        raise DataError(text, path=str(folder))
    return record


def system_file(folder: str | Path, node: str) -> Path:
    """The file for what is watched on one node."""
    return Path(folder) / f"system-{re.sub(r'[^A-Za-z0-9._-]+', '_', node)[:200]}.jsonl"


def _read_file(file: Path, record: RunRecord) -> RankRecord | SystemRecord | None:
    home: RankRecord | SystemRecord | None = None
    try:
        opened = file.open(encoding="utf-8", errors="replace")
    except OSError as error:
        record.notes.append(f"{file.name} cannot be read: {error.strerror or error}")
        return None
    with opened:
        for number, text in enumerate(opened, 1):
            try:
                line = parse_line(text)
            except UNREADABLE:
                what = f"{file.name}: truncated in line {number}"
                if text.endswith("\n"):
                    what = f"{file.name}, line {number}: not a line of a record"
                record.notes.append(what)
                continue
            if isinstance(line, schema.Start | schema.SystemStart):
                if line.schema > schema.SCHEMA:
                    raise DataError(
                        f"it is in format {line.schema}, but this version reads only up to format "
                        f"{schema.SCHEMA}: install a newer fast-axolotl",
                        path=str(file),
                    )
                home = RankRecord(line) if isinstance(line, schema.Start) else SystemRecord(line)
            elif home is not None and line is not None:
                home.add(line)
    return home


UNREADABLE = (ValueError, TypeError, AttributeError, KeyError)
"""What ``parse_line`` raises for a text that is no line of a record."""


def parse_line(text: str) -> object | None:
    """A line from its JSON; ``None`` for a kind that a later version added."""
    try:
        name = _KIND.decode(text).kind
        return _DECODERS[name].decode(text) if name in _KINDS else None
    except ValueError:
        # What earlier versions wrote: NaN, whole numbers with a decimal point; bytes of a path.
        values = json.loads(text)
        kind = _KINDS.get(values.pop("kind"))
        return None if kind is None else from_plain(kind[0], values)


def read_start(path: Path) -> schema.Start | schema.SystemStart | None:
    """A file's first line; ``None`` where it is still to come, or the file is another."""
    with suppress(OSError, *UNREADABLE), path.open("rb") as opened:
        start = parse_line(opened.readline().decode())
        return start if isinstance(start, schema.Start | schema.SystemStart) else None
    return None


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
    start = read_start(file)
    return 0.0 if start is None else start.time


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
        with suppress(DataError):
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
