"""The result of ``bench hash``, ``dedupe``, ``pack`` and ``pad``: plain data, and its tables.

A case is one input of one size. Its contestants are timed as the readers are (``matrix``); beside
them stand measurements that are no race: memory in a fresh process, packs of each method. A ratio
is ours over theirs in rows per second; above 1 we are faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fast_axolotl.bench.matrix import (
    GOAL_HEADER,
    Goal,
    LeftOut,
    Machine,
    PeerTiming,
    Table,
    goal_cells,
    machine_notes,
    save_json,
    show_figure,
    show_ratio,
    show_time,
)
from fast_axolotl.errors import DataError

__all__ = [
    "Measurement",
    "OperationCase",
    "OperationResult",
    "WarmUp",
    "losses",
    "operation_tables",
]

SCHEMA_VERSION = 1
_MEGABYTE = 1_000_000

Value = float | int | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures of one thing that is not raced: their names carry the unit."""

    name: str
    seconds: tuple[float, ...] = ()
    """Every repeat, where it was timed."""
    values: Mapping[str, Value]
    """``peak_bytes``, ``packs``, ``efficiency``, …; ``None`` where it was not measured."""
    reason: str | None = None
    """Why something was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCase:
    """One input: who was timed on it, and what else was measured."""

    name: str
    text: str
    """What the input is, in words."""
    rows: int
    unit: str
    """What a row is called here: ``rows``, ``sequences`` or ``lengths``."""
    timings: tuple[PeerTiming, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    """Peer to the one of ours that does the same work; ours are not in it."""
    measurements: tuple[Measurement, ...] = ()
    goals: tuple[Goal, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def timing(self, name: str) -> PeerTiming | None:
        return next((timing for timing in self.timings if timing.name == name), None)

    @property
    def ours(self) -> tuple[str, ...]:
        return tuple(timing.name for timing in self.timings if timing.name not in self.rivals)

    def ratio(self, ours: str, peer: str) -> float | None:
        """Ours over the peer's rows per second; ``None`` where one took no part."""
        first, second = self.timing(ours), self.timing(peer)
        if first is None or second is None:
            return None
        return first.rows_per_second / second.rows_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What the first call of a process pays, kept out of every other figure."""

    import_seconds: float
    """Importing numba and the modules of the kernels."""
    compile_seconds: Mapping[str, float]
    """Kernel to the time of compiling it, or of loading what was compiled before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """A run of one of the benchmarks."""

    title: str
    date: str
    """ISO date and time, UTC."""
    command: str
    """What reproduces it."""
    machine: Machine
    notes: tuple[str, ...]
    """How it was measured."""
    warm_up: WarmUp
    cases: tuple[OperationCase, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what is worked out from the raw repeats is left out."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OperationResult:
        """What ``to_json`` gave."""
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise DataError(
                f"an operation's result of schema {version!r}; this version reads {SCHEMA_VERSION}"
            )
        return cls(
            title=data["title"],
            date=data["date"],
            command=data["command"],
            machine=Machine(**data["machine"]),
            notes=tuple(data["notes"]),
            warm_up=WarmUp(**data["warm_up"]),
            cases=tuple(_case_from(item) for item in data["cases"]),
        )

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        save_json(self.to_json(), path)


def _case_from(data: dict[str, Any]) -> OperationCase:
    return OperationCase(
        name=data["name"],
        text=data["text"],
        rows=data["rows"],
        unit=data["unit"],
        timings=tuple(PeerTiming(**_with_seconds(item)) for item in data["timings"]),
        rivals=data["rivals"],
        measurements=tuple(Measurement(**_with_seconds(item)) for item in data["measurements"]),
        goals=tuple(Goal(**item) for item in data["goals"]),
        left_out=tuple(LeftOut(**item) for item in data["left_out"]),
    )


def _with_seconds(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "seconds": tuple(item["seconds"])}


def losses(case: OperationCase) -> list[str]:
    """Where the one of ours that does the same work is slower, one line each."""
    lines = []
    for peer, ours in case.rivals.items():
        ratio = case.ratio(ours, peer)
        if ratio is not None and ratio < 1:
            lines.append(f"{case.name}: {ours} loses to {peer}: {show_ratio(ratio)}")
    return lines


def operation_tables(result: OperationResult) -> list[Table]:
    """The tables of a result: timings and measurements of each case, then the goals."""
    tables = []
    for case in result.cases:
        tables += [_timing_table(result, case)] if case.timings else []
        tables += [_measurement_table(result, case)] if case.measurements else []
    return [*tables, _goal_table(result)]


def _timing_table(result: OperationResult, case: OperationCase) -> Table:
    ours = case.ours
    short = [name.removeprefix("fast-axolotl").replace(" ", ", ") for name in ours]
    header = ("", "takes → gives", "median", "min – max", f"{case.unit}/s")
    rows = [
        (
            timing.name,
            timing.output,
            show_time(timing.median_seconds),
            f"{show_time(min(timing.seconds))} – {show_time(max(timing.seconds))}",
            f"{timing.rows_per_second:,.0f}",
            *(show_ratio(case.ratio(name, timing.name)) for name in ours),
            "yes" if timing.equal else "no",
        )
        for timing in case.timings
    ]
    notes = [
        f"{timing.name}: another answer: {timing.reason}"
        for timing in case.timings
        if not timing.equal
    ]
    notes += _share_notes(case)
    return Table(
        title=f"{result.title}: {case.name}: {case.text}",
        header=(*header, *(f"ours{name}" for name in short), "equal"),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _share_notes(case: OperationCase) -> list[str]:
    """Who was timed on the first rows alone, together where the number is the same."""
    shares: dict[int, list[str]] = {}
    for timing in case.timings:
        if timing.rows != case.rows:
            shares.setdefault(timing.rows, []).append(timing.name)
    return [
        f"timed on the first {rows:,} {case.unit}, compared by {case.unit}/s: {', '.join(names)}"
        for rows, names in shares.items()
    ]


def _measurement_table(result: OperationResult, case: OperationCase) -> Table:
    keys = list(dict.fromkeys(key for item in case.measurements for key in item.values))
    is_timed = any(item.seconds for item in case.measurements)
    rows = tuple(
        (
            item.name,
            *([show_time(median(item.seconds)) if item.seconds else "–"] if is_timed else []),
            *(_cell(key, item.values.get(key)) for key in keys),
        )
        for item in case.measurements
    )
    return Table(
        title=f"{result.title}: {case.name}" + (": memory" if case.timings else f": {case.text}"),
        header=("", *(["median"] if is_timed else []), *map(_heading, keys)),
        rows=rows,
        notes=tuple(f"{item.name}: {item.reason}" for item in case.measurements if item.reason),
    )


def _heading(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _cell(key: str, value: Value) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes"):
        return f"{value / _MEGABYTE:,.1f} MB"
    if key == "efficiency":
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else show_figure(value, "").rstrip()


def _goal_table(result: OperationResult) -> Table:
    goals = [(case.name, goal) for case in result.cases for goal in case.goals]
    met = sum(goal.met is True for _, goal in goals)
    lost = [line for case in result.cases for line in losses(case)]
    warm_up = result.warm_up
    compiled = warm_up.compile_seconds
    return Table(
        title=f"{result.title}: goals",
        header=GOAL_HEADER,
        rows=tuple(goal_cells(name, goal) for name, goal in goals),
        notes=(
            f"{met} of {len(goals)} goals met",
            *lost,
            *_left_out_notes(result.cases),
            f"before the first call, timed apart: imports {show_time(warm_up.import_seconds)}, "
            f"{len(compiled)} kernels compiled or loaded in {show_time(sum(compiled.values()))}",
            *result.notes,
            *machine_notes(result.machine),
            f"{result.date}: {result.command}",
        ),
    )


def _left_out_notes(cases: Sequence[OperationCase]) -> list[str]:
    """Each absence once, with the cases where it is not absent from all that were timed."""
    absences: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for item in case.left_out:
            absences.setdefault((item.name, item.reason), []).append(case.name)
    return [
        f"{name}: left out of {', '.join(names)}: {reason}"
        for (name, reason), names in absences.items()
    ]
