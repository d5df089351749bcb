"""A benchmark's result: plain data, JSON in and out, and the rows of its printed matrix.

Times are kept as raw repeats; medians, spreads and ratios are worked out from them. ``None`` means
not measured. A ratio is always ours over theirs in rows per second: above 1 we are faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fast_axolotl.errors import DataError, UsageError

__all__ = [
    "GOAL_HEADER",
    "OURS_ARROW",
    "OURS_PYTHON",
    "BenchResult",
    "CaseResult",
    "Goal",
    "LeftOut",
    "Machine",
    "MemoryRun",
    "PeerTiming",
    "Table",
    "goal_cells",
    "machine_notes",
    "matrix_rows",
    "require_new",
    "save_json",
    "show_figure",
    "show_ratio",
    "show_time",
    "speed_up",
]

SCHEMA_VERSION = 1
OURS_ARROW = "fast-axolotl arrow"
OURS_PYTHON = "fast-axolotl python"
_MEGABYTE = 1_000_000
GOAL_HEADER = ("goal", "target", "measured", "met", "decided by")
_TIMING_HEADER = (
    "reader",
    "gives",
    "median",
    "min – max",
    "rows/s",
    "MB/s",
    "ours arrow",
    "ours python",
    "same rows",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTiming:
    """The repeats of one reader on one input."""

    name: str
    """The reader."""
    version: str | None
    """Of its package; ``None`` for ours and the standard library."""
    output: str
    """What it gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``."""
    rows: int
    """Rows in a timed pass: fewer than the case has where only a prefix is timed."""
    seconds: tuple[float, ...]
    """Every repeat, in the order run."""
    equal: bool
    """Whether it gives the same rows as ours in the same order, as far as it reads."""
    reason: str | None
    """How the rows differ, where they do."""
    unbounded: str | None
    """Why its memory grows with the file; ``None`` where it does not."""

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.median_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """One pass in a fresh process."""

    file: str
    """What was read, in words."""
    num_bytes: int
    """Size of the file."""
    name: str
    """The reader."""
    rows: int
    """Rows it gave."""
    seconds: float
    """From the call to the last batch."""
    first_batch_seconds: float
    """From the call to the first batch, modules imported before."""
    import_seconds: float
    """Importing pyarrow and the reader, before the call."""
    baseline_bytes: int
    """Anonymous resident memory after the imports."""
    peak_bytes: int
    """The most of it while reading."""

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.baseline_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A target and what was measured against it."""

    text: str
    """What is asked for."""
    target: float
    """The bound, in ``unit``."""
    at_least: bool
    """Whether the bound is a least value; otherwise it is a most."""
    unit: str
    """``×``, ``MB``, ``bytes``, ``s`` or ``%``."""
    measured: float | None
    """``None`` where it could not be measured."""
    detail: str | None
    """Which reader or file decided, or why there is no figure."""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A reader that took no part, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Everything about one input."""

    name: str
    rows: int
    """Rows of the input; of the largest one in a memory case."""
    num_bytes: int
    """Its size as a file."""
    timings: tuple[PeerTiming, ...] = ()
    memory: tuple[MemoryRun, ...] = ()
    goals: tuple[Goal, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def timing(self, name: str) -> PeerTiming | None:
        return next((timing for timing in self.timings if timing.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it ran."""

    cpu: str | None
    """Model name."""
    cores: int
    """Processors this process may use."""
    memory_bytes: int | None
    system: str
    """Kernel and architecture."""
    python: str
    versions: Mapping[str, str]
    """Distribution to version, of those that are installed."""
    load_average: float | None
    """Runnable processes in the minute before: other work on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A run of a benchmark."""

    title: str
    date: str
    """ISO date and time, UTC."""
    command: str
    """What reproduces it."""
    machine: Machine
    notes: tuple[str, ...]
    """How it was measured."""
    cases: tuple[CaseResult, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what is worked out from the raw repeats is left out."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchResult:
        """What ``to_json`` gave."""
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise DataError(
                f"a benchmark result of schema {version!r}; this version reads {SCHEMA_VERSION}"
            )
        return cls(
            title=data["title"],
            date=data["date"],
            command=data["command"],
            machine=Machine(**data["machine"]),
            notes=tuple(data["notes"]),
            cases=tuple(_case_from(item) for item in data["cases"]),
        )

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        save_json(self.to_json(), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells to print: text in the first column, figures in the others."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def require_new(path: Path) -> None:
    """Raises where a file is there already."""
    if path.exists():
        raise UsageError(f"{path} is there already; name another file or remove it first")


def save_json(data: Mapping[str, Any], path: Path) -> None:
    """Writes a result; a file that is there already is refused."""
    require_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _case_from(data: dict[str, Any]) -> CaseResult:
    timings = [{**item, "seconds": tuple(item["seconds"])} for item in data["timings"]]
    return CaseResult(
        name=data["name"],
        rows=data["rows"],
        num_bytes=data["num_bytes"],
        timings=tuple(PeerTiming(**item) for item in timings),
        memory=tuple(MemoryRun(**item) for item in data["memory"]),
        goals=tuple(Goal(**item) for item in data["goals"]),
        left_out=tuple(LeftOut(**item) for item in data["left_out"]),
    )


def speed_up(case: CaseResult, ours: str, peer: str) -> float | None:
    """Our rows per second over the peer's; ``None`` where one is missing or gave no rows."""
    first, second = case.timing(ours), case.timing(peer)
    if first is None or second is None or not second.rows:
        return None
    return first.rows_per_second / second.rows_per_second


def matrix_rows(result: BenchResult) -> list[Table]:
    """The tables of a result: timings, memory, goals; those that have rows."""
    tables = [_timing_table(result), _memory_table(result), _goal_table(result)]
    return [table for table in tables if table.rows]


def _timing_table(result: BenchResult) -> Table:
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for case in result.cases:
        if case.timings:
            size = f"{case.rows:,} rows, {case.num_bytes / _MEGABYTE:,.1f} MB"
            rows.append((f"{case.name}: {size}", *[""] * (len(_TIMING_HEADER) - 1)))
        rows += [_timing_cells(case, timing) for timing in case.timings]
        notes += _case_notes(case)
    notes += [
        *result.notes,
        *machine_notes(result.machine),
        f"{result.date}: {result.command}",
    ]
    return Table(title=result.title, header=_TIMING_HEADER, rows=tuple(rows), notes=tuple(notes))


def machine_notes(machine: Machine) -> list[str]:
    """Processor, system and versions, in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"{machine.cores} × {machine.cpu or 'unknown processor'}, {machine.system}",
        f"Python {machine.python}, {versions}",
    ]


def _timing_cells(case: CaseResult, timing: PeerTiming) -> tuple[str, ...]:
    share = timing.rows / case.rows
    return (
        f"  {timing.name}",
        timing.output,
        show_time(timing.median_seconds),
        f"{show_time(min(timing.seconds))} – {show_time(max(timing.seconds))}",
        f"{timing.rows_per_second:,.0f}",
        f"{share * case.num_bytes / timing.median_seconds / _MEGABYTE:,.0f}",
        show_ratio(speed_up(case, OURS_ARROW, timing.name)),
        show_ratio(speed_up(case, OURS_PYTHON, timing.name)),
        "yes" if timing.equal else "no",
    )


def _case_notes(case: CaseResult) -> list[str]:
    notes = []
    for timing in case.timings:
        if not timing.equal:
            notes.append(f"{case.name}, {timing.name}: other rows: {timing.reason}")
        elif timing.rows != case.rows:
            notes.append(f"{case.name}, {timing.name}: timed on its first {timing.rows:,} rows")
        if timing.unbounded:
            notes.append(f"{case.name}, {timing.name}: unbounded memory: {timing.unbounded}")
    return notes + [f"{case.name}, {item.name}: left out: {item.reason}" for item in case.left_out]


def _memory_table(result: BenchResult) -> Table:
    header = ("reader", "file", "time", "peak above start", "first batch", "with imports")
    rows: list[tuple[str, ...]] = []
    for case in result.cases:
        if case.memory:
            rows.append((case.name, *[""] * (len(header) - 1)))
        rows += [
            (
                f"  {run.name}",
                f"{run.file}, {run.num_bytes / _MEGABYTE:,.0f} MB",
                show_time(run.seconds),
                f"{run.above_bytes / _MEGABYTE:,.0f} MB",
                show_time(run.first_batch_seconds),
                show_time(run.first_batch_seconds + run.import_seconds),
            )
            for run in case.memory
        ]
    return Table(title=f"{result.title}: memory", header=header, rows=tuple(rows), notes=())


def _goal_table(result: BenchResult) -> Table:
    goals = [(case, goal) for case in result.cases for goal in case.goals]
    rows = tuple(goal_cells(case.name, goal) for case, goal in goals)
    met = sum(goal.met is True for _, goal in goals)
    return Table(
        title=f"{result.title}: goals",
        header=GOAL_HEADER,
        rows=rows,
        notes=(f"{met} of {len(goals)} goals met",),
    )


def goal_cells(case: str, goal: Goal) -> tuple[str, ...]:
    """The cells under ``GOAL_HEADER``."""
    return (
        f"{case}: {goal.text}",
        f"{'≥' if goal.at_least else '≤'} {show_figure(goal.target, goal.unit)}",
        "–" if goal.measured is None else show_figure(goal.measured, goal.unit),
        {True: "yes", False: "no", None: "–"}[goal.met],
        goal.detail or "",
    )


def show_time(seconds: float) -> str:
    """In µs, ms or s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:,.0f} µs"
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def show_ratio(value: float | None) -> str:
    """``2.50×``; a dash for what was not measured."""
    return "–" if value is None else show_figure(value, "×")


def show_figure(value: float, unit: str) -> str:
    """With three digits, more or less, and its unit."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}{'' if unit == '×' else ' '}{unit}"
