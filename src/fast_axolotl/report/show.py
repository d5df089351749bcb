"""A run in the terminal: the verdict first, then why, what to do next, and the figures.

Takes a summary and nothing else. A figure that was not measured is a dash, and below its group
stands the reason. Colours are for terminals; a pipe gets plain text.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import IO, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fast_axolotl.record import RunSummary, Verdict
from fast_axolotl.report.figures import GROUPS, Group, Row
from fast_axolotl.report.terminal import format_seconds

__all__ = [
    "VERDICT_STYLES",
    "render_summary",
    "show_summary",
    "summary_to_json",
    "verdict_title",
]

_PIPE_WIDTH = 100
_LABEL_WIDTH = 25

_TITLES = {
    "inconclusive": "Inconclusive",
    "swap": "Swap-bound",
    "io": "I/O-bound",
    "data": "Data-bound",
    "communication": "Communication-bound",
    "compute": "Compute-bound",
    "mixed": "Mixed",
}
VERDICT_STYLES = {
    "inconclusive": "bold white on grey35",
    "swap": "bold white on red",
    "io": "bold white on red",
    "data": "bold white on red",
    "communication": "bold white on dark_orange3",
    "compute": "bold white on green4",
    "mixed": "bold black on yellow",
}


def show_summary(summary: RunSummary, *, file: IO[str] | None = None) -> None:
    """Print a run to stdout, or to a file."""
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        _print_all(console, summary)
    else:
        console.file.write(render_summary(summary))


def render_summary(summary: RunSummary, *, width: int = _PIPE_WIDTH) -> str:
    """What is printed to a pipe, as text."""
    text = io.StringIO()
    _print_all(Console(file=text, highlight=False, markup=False, width=width), summary)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _print_all(console: Console, summary: RunSummary) -> None:
    _print_verdict(console, summary.verdict)
    _print_course(console, summary)
    for group in GROUPS:
        _print_group(console, summary, group)
    _print_ranks(console, summary)
    _print_values(console, "Settings", summary.settings)
    _print_values(console, "Environment", summary.environment)


def summary_to_json(summary: RunSummary) -> str:
    """The whole summary as JSON; what is no number is ``null``."""
    return json.dumps(_plain(asdict(summary)), indent=2, ensure_ascii=False, default=str)


def verdict_title(verdict: Verdict) -> str:
    """``Data-bound (burst)``."""
    title = _TITLES[verdict.kind]
    return f"{title} ({verdict.subtype})" if verdict.subtype else title


def _print_verdict(console: Console, verdict: Verdict) -> None:
    title = Text(f" {verdict_title(verdict)} ", style=VERDICT_STYLES[verdict.kind])
    console.print(Text.assemble(title, " ", (verdict.headline, "bold")))
    if verdict.evidence:
        _print_heading(console, "Why")
        for line in verdict.evidence:
            _print_bullet(console, line)
    if verdict.action:
        _print_heading(console, "Next")
        _print_indented(console, Text(verdict.action))


def _print_heading(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _print_indented(console: Console, what: Table | Text) -> None:
    console.print(Padding(what, (0, 0, 0, 2), expand=False))


def _print_bullet(console: Console, line: str, mark: str = "•", style: str = "") -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(mark, style=style), Text(line, style=style))
    _print_indented(console, grid)


def _print_course(console: Console, one: RunSummary) -> None:
    ended = one.end_reason + (f": {one.error}" if one.error else "")
    ranks = "" if one.world_size < 2 else f" on the deciding one of {one.world_size} ranks"
    pairs = [
        ("folder", one.run_dir),
        ("started", _date(one.started)),
        ("ended", f"{ended}, after {format_seconds(one.duration_seconds)}"),
        (
            "measured",
            f"{one.steps:,} steps, {one.fetches:,} fetches in "
            f"{format_seconds(one.measured_seconds)}{ranks}; "
            f"{one.warmup_steps:,} steps of warm-up left out",
        ),
    ]
    if one.stall_pattern:
        of = {"": "", "rows": ", after a number of rows"}
        follows = of.get(one.stall_period_of, f", with each {one.stall_period_of}")
        pairs.append(("waits come", f"{_PATTERNS[one.stall_pattern]}{follows}"))
    spans = [f"{name} {format_seconds(value)}" for name, value in one.span_seconds.items()]
    if spans:
        pairs.append(("taken out", " · ".join(spans)))
    if one.flops_convention:
        pairs.append(("FLOPs", one.flops_convention))
    if one.hwm_by_phase:
        tops = [f"{name} {value / 1e9:,.2f} GB" for name, value in one.hwm_by_phase.items()]
        pairs.append(("high-water marks", " · ".join(tops)))
    pairs += [("note", note) for note in one.notes]
    _print_heading(console, "The run")
    _print_pairs(console, pairs)


_PATTERNS = {
    "steady": "all along",
    "burst": "in bursts",
    "periodic": "rarely, and then long",
}


def _print_group(console: Console, one: RunSummary, group: Group) -> None:
    names = [name for row in group.rows for name in row.fields]
    missing = [name for name in names if getattr(one, name) is None]
    reasons = [one.reasons.get(name, "it was not recorded") for name in missing]
    if len(missing) == len(names) and len(set(reasons)) == 1:
        _print_heading(console, group.title)
        _print_bullet(console, reasons[0], mark="–", style="dim")
        return
    _print_heading(console, group.title)
    _print_pairs(console, [(row.label, _value(one, row)) for row in group.rows])
    told: dict[str, list[str]] = {}
    for row in group.rows:
        for place, name in enumerate(row.fields):
            if getattr(one, name) is None:
                reason = one.reasons.get(name, "it was not recorded")
                told.setdefault(reason, []).append(_missing_name(one, row, place))
    for reason, labels in told.items():
        unique = ", ".join(dict.fromkeys(labels))
        _print_bullet(console, f"{unique}: {reason}", mark="–", style="dim")


def _missing_name(one: RunSummary, row: Row, place: int) -> str:
    """The row's label, with the part that is missing where the others are there."""
    is_whole = all(getattr(one, name) is None for name in row.fields)
    part = row.parts[place] if row.parts else ""
    return row.label if is_whole or not part else f"{row.label}, {part}"


def _value(one: RunSummary, row: Row) -> str:
    values = [getattr(one, name) for name in row.fields]
    if all(value is None for value in values):
        return "–"
    shown = ["–" if value is None else row.format(value) for value in values]
    if row.parts:
        pairs = zip(row.parts, shown, strict=True)
        both = ((value, part) if row.is_part_behind else (part, value) for part, value in pairs)
        text = " · ".join(" ".join(filter(None, words)) for words in both)
    else:
        text = shown[0]
    note = row.note.replace("{peak_source}", one.peak_source)
    return f"{text}  ({note})" if note else text


def _print_pairs(console: Console, pairs: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name, style="cyan"), Text(value))
    _print_indented(console, table)


def _print_ranks(console: Console, one: RunSummary) -> None:
    if len(one.ranks) < 2:
        return
    _print_heading(console, "Ranks")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    header = ("rank", "stall", "host wait", "steps", "step p50", "samples/s", "tokens/s", "")
    for name in header:
        table.add_column(name, justify="right")
    for rank in one.ranks:
        table.add_row(
            str(rank.rank),
            _or_dash(rank.stall_fraction, "{:.1%}"),
            _or_dash(rank.host_stall_fraction, "{:.1%}"),
            f"{rank.steps:,}",
            format_seconds(rank.step_p50_seconds),
            _or_dash(rank.samples_per_second, "{:,.1f}"),
            _or_dash(rank.tokens_per_second, "{:,.0f}"),
            "" if rank.is_finished else "unfinished",
        )
    _print_indented(console, table)


def _print_values(console: Console, title: str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    _print_heading(console, title)
    _print_pairs(console, [(name, _in_words(value)) for name, value in values.items()])


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {_in_words(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value).replace("%", " %")


def _date(seconds: float) -> str:
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "–"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
