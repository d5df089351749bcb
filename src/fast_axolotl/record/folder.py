"""A record's folder: files of lines, appended to by the run and read by anyone later.

    RUN/rank-0.jsonl      Start, then Settings, StepBlock, Mark, Phase, …, End
    RUN/rank-1.jsonl
    RUN/system.jsonl      SystemStart, SystemSample, …, End

A writer that meets a full disk stops writing and says so in ``failure``; it never raises into the
training loop. A reader takes every whole line and remembers whether the last one was cut off.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.record import lines
from fast_axolotl.record.checking import check_types
from fast_axolotl.record.comparison import PROTOCOL_FILE
from fast_axolotl.record.lines import SCHEMA

__all__ = [
    "LineWriter",
    "RankRecord",
    "RunRecord",
    "SystemRecord",
    "check_schema",
    "dump_line",
    "find_protocol_runs",
    "leave_out_earlier_ranks",
    "parse_line",
    "read_run",
]

_KINDS: dict[str, type] = {
    "start": lines.Start,
    "settings": lines.Settings,
    "steps": lines.StepBlock,
    "mark": lines.Mark,
    "phase": lines.Phase,
    "model": lines.ModelShape,
    "free_run": lines.FreeRun,
    "log": lines.Log,
    "window": lines.ProfileWindow,
    "end": lines.End,
    "system_start": lines.SystemStart,
    "system": lines.SystemSample,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=str)
_INNER = {("steps", "slow"): lines.SlowFetch, ("system", "gpus"): lines.DeviceSample}


@dataclass(slots=True)
class RankRecord:
    """The lines of one rank, by kind, in their order."""

    start: lines.Start
    settings: list[lines.Settings] = field(default_factory=list)
    blocks: list[lines.StepBlock] = field(default_factory=list)
    marks: list[lines.Mark] = field(default_factory=list)
    phases: list[lines.Phase] = field(default_factory=list)
    models: list[lines.ModelShape] = field(default_factory=list)
    free_runs: list[lines.FreeRun] = field(default_factory=list)
    windows: list[lines.ProfileWindow] = field(default_factory=list)
    logs: list[lines.Log] = field(default_factory=list)
    end: lines.End | None = None

    def add(self, line: object) -> None:
        """Sort one line in."""
        if isinstance(line, lines.End):
            self.end = line
            return
        homes: dict[type, list[Any]] = {
            lines.Settings: self.settings,
            lines.StepBlock: self.blocks,
            lines.Mark: self.marks,
            lines.Phase: self.phases,
            lines.ModelShape: self.models,
            lines.FreeRun: self.free_runs,
            lines.ProfileWindow: self.windows,
            lines.Log: self.logs,
        }
        home = homes.get(type(line))
        if home is not None:
            home.append(line)

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

    start: lines.SystemStart
    samples: list[lines.SystemSample] = field(default_factory=list)
    end: lines.End | None = None


@dataclass(slots=True)
class RunRecord:
    """A whole run, as read from its folder."""

    path: str
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    system: SystemRecord | None = None
    notes: list[str] = field(default_factory=list)
    """What was wrong with the files, one sentence each."""


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
            _move_aside(self.path)
            self._file = self.path.open("wb")
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


def _move_aside(path: Path) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    numbers = itertools.count(1)
    path.rename(
        next(free for n in numbers if not (free := path.with_name(f"{path.name}.{n}")).exists())
    )


def dump_line(line: object) -> str:
    """One line as JSON, empty fields left out."""
    kind = _NAMES[type(line)]
    found = {"kind": kind}
    for item in fields(line):  # type: ignore[arg-type]
        value = getattr(line, item.name)
        if value is None or value == () or value == {}:
            continue
        if (kind, item.name) in _INNER:
            value = [asdict(one) for one in value]
        found[item.name] = value
    return _ENCODER.encode(found)


def read_run(path: str | Path) -> RunRecord:
    """Read a record's folder."""
    folder = Path(path)
    if not folder.exists():
        raise MissingFileError("there is no such folder", path=str(folder))
    if not folder.is_dir():
        raise DataError("a record is a folder, and this is a file", path=str(folder))
    record = RunRecord(path=str(folder))
    for file in sorted(folder.glob("rank-*.jsonl")):
        _read_rank(file, record)
    leave_out_earlier_ranks(record)
    system = folder / "system.jsonl"
    if system.exists():
        _read_system(system, record)
    if not record.ranks and record.system is None:
        what = "; ".join(record.notes[:3]) or "there is neither rank-0.jsonl nor system.jsonl"
        raise DataError(
            _describe_protocol(folder)
            or f"no record in here: {what}; make one with fast-axolotl run --measure -- COMMAND",
            path=str(folder),
        )
    return record


def find_protocol_runs(folder: Path) -> set[Path]:
    """The folders of a protocol's runs that have recorded anything."""
    return {path.parent for path in folder.glob("runs/[0-9]*-*/*.jsonl")}


def _describe_protocol(folder: Path) -> str:
    """What to do with a folder that holds a protocol; empty for any other."""
    runs = sorted(find_protocol_runs(folder))
    has_result = (folder / PROTOCOL_FILE).is_file()
    words = [f"{verb} {shlex.quote(str(folder))}" for verb in ("report", "compare") if has_result]
    words += [f"show {shlex.quote(str(runs[-1]))}"] if runs else []
    if not words:
        return ""
    commands = ", ".join(f"fast-axolotl {word}" for word in words)
    return f"this is the folder of a protocol, with a record for each run: {commands}"


def leave_out_earlier_ranks(record: RunRecord) -> None:
    """Of a run with more ranks that used the same folder before."""
    first = record.ranks.get(0)
    if first is None:
        return
    for rank in [rank for rank in record.ranks if rank >= first.start.world_size]:
        del record.ranks[rank]
        record.notes.append(
            f"rank-{rank}.jsonl is of another run: this one had {first.start.world_size} ranks"
        )


def _read_rank(file: Path, record: RunRecord) -> None:
    rank: RankRecord | None = None
    for line in _read_lines(file, record):
        if isinstance(line, lines.Start):
            rank = RankRecord(start=line)
            record.ranks[line.rank] = rank
        elif rank is not None:
            rank.add(line)
    if rank is None:
        record.notes.append(f"{file.name} has no start line and was left out")


def _read_system(file: Path, record: RunRecord) -> None:
    for line in _read_lines(file, record):
        if isinstance(line, lines.SystemStart):
            record.system = SystemRecord(start=line)
        elif record.system is not None and isinstance(line, lines.SystemSample):
            record.system.samples.append(line)
        elif record.system is not None and isinstance(line, lines.End):
            record.system.end = line


def _read_lines(file: Path, record: RunRecord) -> Iterator[object]:
    try:
        opened = file.open(encoding="utf-8", errors="replace")
    except OSError as error:
        record.notes.append(f"{file.name} cannot be read: {error.strerror or error}")
        return
    with opened:
        for number, text in enumerate(opened, 1):
            try:
                found = json.loads(text)
                line = parse_line(found)
            except (ValueError, TypeError, AttributeError, KeyError):
                if text.endswith("\n"):
                    record.notes.append(f"{file.name}, line {number}: not a line of a record")
                else:
                    record.notes.append(f"{file.name}: cut off in line {number}")
                continue
            check_schema(line, file)
            if line is not None:
                yield line


def parse_line(found: dict[str, Any]) -> object | None:
    """A line from its JSON; ``None`` for a kind that a later version added."""
    name = found.pop("kind")
    kind = _KINDS.get(name)
    if kind is None:
        return None
    for key, value in found.items():
        inner = _INNER.get((name, key))
        if inner is not None:
            value = [_make(inner, one) for one in value]
        found[key] = tuple(value) if isinstance(value, list) else value
    return _make(kind, found)


def _make(kind: type, values: dict[str, Any]) -> object:
    """Without the fields that a later version added."""
    known = {item.name for item in fields(kind)}
    return kind(**check_types(kind, {key: values[key] for key in values if key in known}))


def check_schema(line: object, file: Path) -> None:
    """Refuse what a later version wrote."""
    schema = getattr(line, "schema", SCHEMA)
    if schema > SCHEMA:
        raise DataError(
            f"written in format {schema}, and this version reads up to {SCHEMA}: "
            "pip install --upgrade fast-axolotl",
            path=str(file),
        )
