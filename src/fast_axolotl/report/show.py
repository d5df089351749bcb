"""A run in the terminal: the verdict first, then why, what to do next, and the figures.

Takes a summary and nothing else. A figure that was not measured is a dash, and below its group
stands the reason. Colours are for terminals; a pipe gets plain text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fast_axolotl.record import RunRecord, RunSummary, Verdict
from fast_axolotl.record.codec import to_plain
from fast_axolotl.report.alarms import find_alarms
from fast_axolotl.report.figures import GROUPS, Group, Row, format_row, read_figure
from fast_axolotl.report.terminal import format_seconds, format_share
from fast_axolotl.report.values import count_words, describe_value, format_date

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


def show_summary(
    summary: RunSummary, *, record: RunRecord | None = None, file: IO[str] | None = None
) -> None:
    """Print a run to stdout, or to a file; its record tells of losses that are no numbers."""
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        _print_all(console, summary, record)
    else:
        console.file.write(render_summary(summary, record=record))


def render_summary(
    summary: RunSummary, *, record: RunRecord | None = None, width: int = _PIPE_WIDTH
) -> str:
    """What is printed to a pipe, as text."""
    text = io.StringIO()
    _print_all(Console(file=text, highlight=False, markup=False, width=width), summary, record)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _print_all(console: Console, summary: RunSummary, record: RunRecord | None) -> None:
    alarms = find_alarms(summary, record)
    for alarm in alarms:
        console.print(Text(alarm, style="bold red"))
    if alarms:
        console.print()
    _print_verdict(console, summary.verdict)
    _print_course(console, summary)
    for group in GROUPS:
        _print_group(console, summary, group)
    _print_ranks(console, summary)
    _print_values(console, "Settings", summary.settings)
    _print_values(console, "Environment", summary.environment)


def summary_to_json(summary: RunSummary) -> str:
    """The whole summary as JSON; what is no number is ``null``."""
    return json.dumps(to_plain(summary), indent=2, ensure_ascii=False, default=str)


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


def _print_course(console: Console, summary: RunSummary) -> None:
    ended = summary.end_reason + (f": {summary.error}" if summary.error else "")
    ranks = ""
    if summary.world_size > 1 and summary.deciding_rank is not None:
        ranks = f" on rank {summary.deciding_rank}, the deciding one of {summary.world_size}"
    pairs = [
        ("folder", summary.run_dir),
        ("started", format_date(summary.started)),
        ("ended", f"{ended}, after {format_seconds(summary.duration_seconds)}"),
        (
            "measured",
            f"{count_words(summary.steps, 'step')}, {count_words(summary.fetches, 'fetch')} in "
            f"{format_seconds(summary.measured_seconds)}{ranks}; "
            f"{count_words(summary.warmup_steps, 'step')} of warm-up left out",
        ),
    ]
    if summary.stall_pattern:
        of = {"": "", "rows": ", after a number of rows"}
        follows = of.get(summary.stall_period_of, f", with each {summary.stall_period_of}")
        pairs.append(("waits come", f"{_PATTERNS[summary.stall_pattern]}{follows}"))
    spans = [f"{name} {format_seconds(value)}" for name, value in summary.span_seconds.items()]
    if spans:
        pairs.append(("taken out", " · ".join(spans)))
    if summary.flops_convention:
        pairs.append(("FLOPs", summary.flops_convention))
    if summary.hwm_by_phase:
        tops = [f"{name} {value / 1e9:,.2f} GB" for name, value in summary.hwm_by_phase.items()]
        pairs.append(("high-water marks", " · ".join(tops)))
    pairs += [("note", note) for note in summary.notes]
    _print_heading(console, "The run")
    _print_pairs(console, pairs)


_PATTERNS = {
    "steady": "all along",
    "burst": "in bursts",
    "periodic": "rarely, and then long",
}


def _print_group(console: Console, summary: RunSummary, group: Group) -> None:
    names = [name for row in group.rows for name in row.fields]
    missing = [name for name in names if read_figure(summary, name) is None]
    reasons = [summary.reasons.get(name, "it was not recorded") for name in missing]
    if len(missing) == len(names) and len(set(reasons)) == 1:
        _print_heading(console, group.title)
        _print_bullet(console, reasons[0], mark="–", style="dim")
        return
    _print_heading(console, group.title)
    _print_pairs(console, [(row.label, _value(summary, row)) for row in group.rows])
    for reason, labels in _missing_labels(summary, group).items():
        _print_bullet(console, f"{', '.join(labels)}: {reason}", mark="–", style="dim")


def _missing_labels(summary: RunSummary, group: Group) -> dict[str, list[str]]:
    """Reason → the rows it holds for, each with the parts that are missing where others are not."""
    told: dict[str, list[str]] = {}
    for row in group.rows:
        missing = [name for name in row.fields if read_figure(summary, name) is None]
        by_reason: dict[str, list[str]] = {}
        for name in missing:
            reason = summary.reasons.get(name, "it was not recorded")
            part = row.parts[row.fields.index(name)] if row.parts else ""
            by_reason.setdefault(reason, []).append(part)
        for reason, parts in by_reason.items():
            named = " and ".join(filter(None, parts))
            is_whole = len(parts) == len(row.fields) or not named
            told.setdefault(reason, []).append(row.label if is_whole else f"{row.label} ({named})")
    return told


def _value(summary: RunSummary, row: Row) -> str:
    text = format_row(summary, row)
    return f"{text}  ({row.note})" if row.note and text != "–" else text


def _print_pairs(console: Console, pairs: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name, style="cyan"), Text(value))
    _print_indented(console, table)


def _print_ranks(console: Console, summary: RunSummary) -> None:
    if len(summary.ranks) < 2:
        return
    _print_heading(console, "Ranks")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    header = ("rank", "stall", "host wait", "steps", "step p50", "samples/s", "tokens/s", "")
    for name in header:
        table.add_column(name, justify="right")
    for rank in summary.ranks:
        table.add_row(
            str(rank.rank),
            _or_dash(rank.stall_fraction, format_share),
            _or_dash(rank.host_stall_fraction, format_share),
            f"{rank.steps:,}",
            format_seconds(rank.step_p50_seconds),
            _or_dash(rank.samples_per_second, "{:,.1f}".format),
            _or_dash(rank.tokens_per_second, "{:,.0f}".format),
            "" if rank.is_finished else "unfinished",
        )
    _print_indented(console, table)


def _print_values(console: Console, title: str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    _print_heading(console, title)
    _print_pairs(console, [(name, describe_value(value)) for name, value in values.items()])


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)
