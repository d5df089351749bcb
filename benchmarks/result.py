"""A benchmark's result: plain data as JSON, the goals, and the tables that are printed.

Times are kept as raw repeats; medians, spreads and ratios are worked out from them. ``None`` means
not measured. A ratio is always ours over theirs in rows per second: above 1 we are faster. Goals
are recorded, never asserted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from fast_axolotl.errors import UsageError
from fast_axolotl.record.units import format_seconds

SCHEMA_VERSION = 2
MEGABYTE = 1_000_000

Value = float | int | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The repeats of one contestant on one input."""

    name: str
    version: str | None = None
    """Of its package; ``None`` for ours and the standard library."""
    output: str = ""
    """What it takes and gives."""
    rows: int
    """Rows in a timed pass: fewer than the case has where only a prefix is timed."""
    seconds: tuple[float, ...]
    """Every repeat, in the order run."""
    reason: str | None = None
    """How its answer differs from ours; ``None`` where it is equal."""

    @property
    def equal(self) -> bool:
        return self.reason is None

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.median_seconds

    @property
    def spread(self) -> str:
        return f"{format_seconds(min(self.seconds))} – {format_seconds(max(self.seconds))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures of one thing that is not raced: their names carry the unit."""

    name: str
    seconds: tuple[float, ...] = ()
    """Every repeat, where it was timed."""
    values: Mapping[str, Value] = field(default_factory=dict)
    """``peak_bytes``, ``packs``, ``efficiency``, …; ``None`` where it was not measured."""
    reason: str | None = None
    """Why something was not measured."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A target and what was measured against it."""

    text: str
    target: float
    """The bound, in ``unit``."""
    unit: str
    """``×``, ``MB``, ``bytes``, ``s``, ``%`` or ``steps``."""
    measured: float | None
    detail: str | None = None
    """Which contestant or file decided, or why there is no figure."""
    at_least: bool = False
    """Whether the bound is a least value; otherwise it is a most."""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input: who was timed on it, and what else was measured."""

    name: str
    text: str
    """What the input is, in words."""
    rows: int
    unit: str = "rows"
    """What a row is called here: ``rows``, ``sequences``, ``lengths``, ``steps``, …"""
    num_bytes: int | None = None
    """Size as a file, where it is one."""
    timings: Sequence[Timing] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    """Peer to the one of ours that does the same work; ours are not in it."""
    measurements: Sequence[Measurement] = ()
    goals: Sequence[Goal] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Who took no part, and why."""

    def timing(self, name: str) -> Timing | None:
        return next((timing for timing in self.timings if timing.name == name), None)

    def ratio(self, ours: str, peer: str) -> float | None:
        """Ours over the peer's rows per second; ``None`` where one took no part or gave no rows."""
        first, second = self.timing(ours), self.timing(peer)
        if first is None or second is None or not second.rows:
            return None
        return first.rows_per_second / second.rows_per_second

    def ratio_goal(self, ours: str, peer: str, least: float) -> Goal:
        """At least so many times a peer's rows per second. What is wrong has no speed."""
        measured = self.ratio(ours, peer)
        detail = f"{peer} took no part" if measured is None else None
        wrong = [item.reason for item in map(self.timing, (ours, peer)) if item and item.reason]
        if measured is not None and wrong:
            measured, detail = None, f"differs: {wrong[0]}"
        return Goal(f"{ours} over {peer}", least, "×", measured, detail, at_least=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells to print: text in the first column, figures in the others."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a race found. When, where and by which command it did, ``command.execute`` adds."""

    cases: Sequence[Case] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain data beside the cases: warm-up, cells of the meter, trials of the protocol, …"""
    notes: Sequence[str] = ()
    """How it was measured."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of packages in other environments."""
    tables: Sequence[Table] | None = None
    """``None`` for a table or two of each case."""
    title: str = ""
    date: str = ""
    """ISO date and time, UTC."""
    command: str = ""
    """What reproduces it."""
    machine: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is worked out from the raw repeats is left out, but for ``equal``."""
        cases = [asdict(case) for case in self.cases]
        for case in cases:
            for timing in case["timings"]:
                timing["equal"] = timing["reason"] is None
            left_out = case["left_out"].items()
            case["left_out"] = [{"name": name, "reason": reason} for name, reason in left_out]
        shared: dict[str, Any] = {
            "title": self.title,
            "date": self.date,
            "command": self.command,
            "machine": self.machine,
            "schema_version": SCHEMA_VERSION,
        }
        if cases:
            shared |= {"notes": self.notes, "cases": cases}
        found: dict[str, Any] = json.loads(json.dumps({**shared, **self.facts}))
        return found

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        require_new(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def require_new(path: Path) -> None:
    """Raises where a file is there already."""
    if path.exists():
        raise UsageError(f"{path} is there already; name another file or remove it first")


# Tables.


def record_table(
    title: str,
    records: Iterable[Mapping[str, Any]],
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]],
    notes: Sequence[str] = (),
) -> Table:
    """A row for each record, a column for each heading with what shows it."""
    rows = [[show(record) for show in columns.values()] for record in records]
    return Table(title=title, header=list(columns), rows=rows, notes=notes)


def result_tables(result: Result) -> list[Table]:
    """Those that the race made, or timings and measurements of each case; then the goals."""
    made = result.tables
    if made is None:
        made = [table for case in result.cases for table in case_tables(result.title, case)]
    tables = [*made, *([_goal_table(result)] if result.cases else [])]
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    notes = (
        f"{machine['cores']} × {machine.get('cpu') or 'unknown processor'}, {machine['system']}",
        f"Python {machine['python']}, {versions}",
        f"{result.date}: {result.command}",
    )
    return [*tables[:-1], replace(tables[-1], notes=(*tables[-1].notes, *notes))]


def case_tables(title: str, case: Case) -> list[Table]:
    """Who was timed, and what else was measured."""
    tables = [_timing_table(title, case)] if case.timings else []
    if case.measurements:
        heading = f"{title}: {case.name}" + (": memory" if case.timings else f": {case.text}")
        tables.append(_measurement_table(heading, case.measurements))
    return tables


def _timing_table(title: str, case: Case) -> Table:
    ours = [timing.name for timing in case.timings if timing.name not in case.rivals]
    short = [name.removeprefix("fast-axolotl").replace(",", "") for name in ours]
    rows = []
    notes = []
    for timing in case.timings:
        cells = [timing.name, timing.output, format_seconds(timing.median_seconds), timing.spread]
        cells.append(f"{timing.rows_per_second:,.0f}")
        if case.num_bytes is not None:
            read = case.num_bytes * timing.rows / case.rows
            cells.append(f"{read / timing.median_seconds / MEGABYTE:,.0f}")
        cells += [format_ratio(case.ratio(name, timing.name)) for name in ours]
        rows.append((*cells, "yes" if timing.equal else "no"))
        if not timing.equal:
            notes.append(f"{timing.name}: another answer: {timing.reason}")
    header = ["", "takes → gives", "median", "min – max", f"{case.unit}/s"]
    header += ["MB/s"] if case.num_bytes is not None else []
    header += [*(f"ours{name}" for name in short), "equal"]
    heading = f"{title}: {case.name}: {case.text}"
    return Table(title=heading, header=header, rows=rows, notes=notes)


def _measurement_table(title: str, measurements: Sequence[Measurement]) -> Table:
    """A column for each figure that any of them has."""

    def cell(key: str, value: Value) -> str:
        if value is None:
            return "–"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if key.endswith("_bytes"):
            return f"{value / MEGABYTE:,.1f} MB"
        if key.endswith("first_batch_seconds"):
            return format_seconds(value)
        if key == "efficiency":
            return f"{value:.2%}"
        return f"{value:,}" if isinstance(value, int) else _format_figure(value, "").rstrip()

    keys = list(dict.fromkeys(key for item in measurements for key in item.values))
    is_timed = any(item.seconds for item in measurements)
    rows = []
    for item in measurements:
        middle = format_seconds(median(item.seconds)) if item.seconds else "–"
        cells = [cell(key, item.values.get(key)) for key in keys]
        rows.append([item.name, *([middle] if is_timed else []), *cells])
    headings = (
        key.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ") for key in keys
    )
    return Table(
        title=title,
        header=("", *(["median"] if is_timed else []), *headings),
        rows=rows,
        notes=[f"{item.name}: {item.reason}" for item in measurements if item.reason],
    )


def _goal_table(result: Result) -> Table:
    """Every goal; below it where we lose, who is absent, and how it was measured."""
    rows, lost = [], []
    absences: dict[tuple[str, str], list[str]] = {}
    for case in result.cases:
        for goal in case.goals:
            cells = (
                f"{case.name}: {goal.text}",
                f"{'≥' if goal.at_least else '≤'} {_format_figure(goal.target, goal.unit)}",
                "–" if goal.measured is None else _format_figure(goal.measured, goal.unit),
                {True: "yes", False: "no", None: "–"}[goal.met],
                goal.detail or "",
            )
            rows.append(cells)
        for peer, ours in case.rivals.items():
            ratio = case.ratio(ours, peer)
            if ratio is not None and ratio < 1:
                lost.append(f"{case.name}: {ours} loses to {peer}: {format_ratio(ratio)}")
        for absent in case.left_out.items():
            absences.setdefault(absent, []).append(case.name)
    notes = [f"{sum(cells[3] == 'yes' for cells in rows)} of {len(rows)} goals met", *lost]
    notes += [
        f"{name}: left out of {', '.join(names)}: {reason}"
        for (name, reason), names in absences.items()
    ]
    header = ("goal", "target", "measured", "met", "decided by")
    title = f"{result.title}: goals"
    return Table(title=title, header=header, rows=rows, notes=[*notes, *result.notes])


def format_ratio(value: float | None) -> str:
    """``2.50×``; a dash for what was not measured."""
    return "–" if value is None else _format_figure(value, "×")


def _format_figure(value: float, unit: str) -> str:
    """With three digits, more or less, and its unit."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}{'' if unit == '×' else ' '}{unit}"
