"""A run on one screen: verdict, why, what to do next, and the figures that matter most.

For the end of a run in a terminal, where the whole summary would push its own verdict out of sight.
``show`` prints every figure.
"""

from __future__ import annotations

import shlex
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fast_axolotl.record import RunRecord, RunSummary, Verdict
from fast_axolotl.report.alarms import find_alarms
from fast_axolotl.report.show import VERDICT_STYLES, verdict_title
from fast_axolotl.report.terminal import format_bytes, format_seconds, format_share
from fast_axolotl.report.values import format_count

__all__ = ["show_short_summary"]

_LABEL_WIDTH = 11
_MOST_NOTES = 2


def show_short_summary(summary: RunSummary, record: RunRecord, *, file: IO[str]) -> None:
    """Print it to a terminal."""
    console = Console(file=file, highlight=False, markup=False)
    for alarm in find_alarms(summary, record):
        console.print(Text(alarm, style="bold red"))
    verdict = summary.verdict
    title = Text(f" {verdict_title(verdict)} ", style=VERDICT_STYLES[verdict.kind])
    console.print(Text.assemble(title, " ", (verdict.headline, "bold")))
    _print_rows(console, _verdict_rows(verdict), style="bold")
    console.print()
    _print_rows(console, _figure_rows(summary), style="cyan")
    for line in _missing_lines(summary):
        _print_rows(console, [("–", line)], style="dim")
    _print_rows(console, _note_rows(summary.notes), style="dim")
    console.print()
    # Not folded by rich: a terminal wraps it, and it can still be copied whole.
    command = f"fast-axolotl show {shlex.quote(record.path)}"
    console.print(Text(f"Every figure: {command}"), soft_wrap=True)


def _verdict_rows(verdict: Verdict) -> list[tuple[str, str]]:
    mark = "• " if len(verdict.evidence) > 1 else ""
    rows = [("" if at else "Why", f"{mark}{line}") for at, line in enumerate(verdict.evidence)]
    return [*rows, *([("Next", verdict.action)] if verdict.action else [])]


def _figures(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Label, field of the summary, and the figure in words."""
    step = [format_seconds(one) for one in (summary.step_p50_seconds, summary.step_p95_seconds)]
    first = format_seconds(summary.first_step_seconds)
    return [
        ("stall", "stall_fraction", f"{format_share(summary.stall_fraction)} of the steady time"),
        ("tokens/s", "tokens_per_second", format_count(summary.tokens_per_second)),
        ("samples/s", "samples_per_second", format_count(summary.samples_per_second)),
        ("step", "step_p50_seconds", f"p50 {step[0]} · p95 {step[1]}"),
        ("MFU", "mfu", f"{format_share(summary.mfu)} of the peak"),
        ("working set", "working_set_bytes", _memory(summary)),
        ("first step", "first_step_seconds", f"{first} after the first fetch began"),
    ]


def _figure_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Those that are known."""
    rows = _figures(summary)
    return [(label, text) for label, name, text in rows if getattr(summary, name) is not None]


def _missing_lines(summary: RunSummary) -> list[str]:
    """Why the others are not known, once for each reason. MFU is for those who asked for it."""
    told: dict[str, list[str]] = {}
    for label, name, _ in _figures(summary):
        if getattr(summary, name) is None and name != "mfu":
            told.setdefault(summary.reasons.get(name, "not recorded"), []).append(label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in told.items()]


def _note_rows(notes: tuple[str, ...]) -> list[tuple[str, str]]:
    rows = [("note", note) for note in notes[:_MOST_NOTES]]
    left = len(notes) - len(rows)
    return [*rows, *([("", f"{left} more {'note' if left == 1 else 'notes'}")] if left else [])]


def _memory(summary: RunSummary) -> str:
    peak = summary.working_set_peak_bytes
    parts = [format_bytes(summary.working_set_bytes)]
    parts += [] if peak is None else [f"highest {format_bytes(peak)}"]
    if summary.limit_bytes and summary.limit_share is not None:
        parts.append(f"{format_share(summary.limit_share)} of {format_bytes(summary.limit_bytes)}")
    return ", ".join(parts)


def _print_rows(console: Console, rows: list[tuple[str, str]], *, style: str) -> None:
    if not rows:
        return
    table = Table.grid(padding=(0, 1))
    is_dash = rows[0][0] == "–"
    table.add_column(width=1 if is_dash else _LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(label, style=style), Text(value, style="dim" if is_dash else ""))
    console.print(table)
