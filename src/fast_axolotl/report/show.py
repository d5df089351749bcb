"""A run in the terminal: the verdict first, then why, what to do next, and the figures.

A figure that was not measured is a dash, and below its group stands the reason. Colours are for
terminals; a pipe gets plain text. ``show_short_summary`` is for the end of a run in a terminal,
where the whole summary would push its own verdict out of sight, and for whoever asks for no more.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import OverflowMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fast_axolotl.record import RunRecord, RunSummary, Verdict
from fast_axolotl.record.catalogue import LEDGER
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_count,
    format_date,
    format_seconds,
    format_share,
)
from fast_axolotl.report.content import (
    VERDICTS,
    describe_gpus,
    describe_regimes,
    describe_replacements,
    divide_clock,
    find_alarms,
    verdict_title,
)
from fast_axolotl.report.figures import (
    GROUPS,
    Row,
    describe_value,
    format_row,
    member_tables,
    missing_reason,
    read_figure,
)
from fast_axolotl.report.terminal import print_parts

_PIPE_WIDTH = 100
_LABEL_WIDTH = 25
_SHORT_LABEL_WIDTH = 11
_MOST_NOTES = 2

_PATTERNS = {"steady": "all the time", "burst": "in bursts", "periodic": "rarely, but long"}


def show_summary(
    summary: RunSummary,
    *,
    record: RunRecord | None = None,
    file: IO[str] | None = None,
    width: int = _PIPE_WIDTH,
) -> None:
    """Print a run to stdout, or to a file; its record tells of losses that are no numbers.

    What is no terminal gets lines of the width.
    """
    alarms = find_alarms(summary, record)
    parts: list[RenderableType] = [Text(alarm, style="bold red") for alarm in alarms]
    parts += [Text()] if alarms else []
    verdict = summary.verdict
    parts.append(_verdict_line(verdict))
    if verdict.evidence:
        parts += [_heading("Why"), *map(_bullet, verdict.evidence)]
    if verdict.action:
        parts += [_heading("Next"), _indented(Text(verdict.action))]
    ended = summary.end_reason + (f": {summary.error}" if summary.error else "")
    ranks = ""
    if summary.world_size > 1 and summary.deciding_rank is not None:
        ranks = f" on rank {summary.deciding_rank}, the slowest of {summary.world_size} to get data"
    course = [
        ("folder", summary.run_dir),
        *((("GPU", gpus),) if record is not None and (gpus := describe_gpus(record)) else ()),
        ("started", format_date(summary.started)),
        ("ended", f"{ended}, after {format_seconds(summary.duration_seconds)}"),
        (
            "measured",
            f"{count_words(summary.steps, 'step')}, {count_words(summary.fetches, 'fetch')} in "
            f"{format_seconds(summary.measured_seconds)}{ranks}; "
            f"{count_words(summary.warmup_steps, 'step')} of warm-up not counted",
        ),
    ]
    if summary.replacements is not None:
        course.append(("replacements active", describe_replacements(summary)))
    if summary.stall_pattern:
        of = {"": "", "rows": ", every so many rows"}
        follows = of.get(summary.stall_period_of, f", at each {summary.stall_period_of}")
        course.append(("waits occur", f"{_PATTERNS[summary.stall_pattern]}{follows}"))
    clock = [
        f"{LEDGER[part]} {format_share(share)} ({format_seconds(seconds)})"
        for part, seconds, share in divide_clock(summary.ledger)
    ]
    if clock:
        course.append(("wall clock", " · ".join(clock)))
    regimes = map(" · ".join, describe_regimes(summary))
    course += [("" if at else "over time", text) for at, text in enumerate(regimes)]
    if summary.flops_convention:
        course.append(("FLOPs", summary.flops_convention))
    if summary.hwm_by_phase:
        tops = [f"{name} {format_bytes(value)}" for name, value in summary.hwm_by_phase.items()]
        course.append(("peak memory", " · ".join(tops)))
    course += [("note", note) for note in summary.notes]
    parts += [_heading("The run"), _pairs(course)]
    for title, rows in GROUPS.items():
        parts += [_heading(title), *_group_parts(summary, rows)]
    for title, columns, members in member_tables(summary):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in columns:
            table.add_column(name, justify="right")
        for member in members:
            table.add_row(*member)
        parts += [_heading(title), _indented(table)]
    for title, values in (("Settings", summary.settings), ("Environment", summary.environment)):
        if values:
            pairs = [(name, describe_value(value)) for name, value in values.items()]
            parts += [_heading(title), _pairs(pairs)]
    print_parts(parts, width, file)


def _group_parts(summary: RunSummary, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Its rows, and below them why figures are missing: a line for each reason."""
    names = [name for row in rows for name in row.fields]
    reasons = {
        name: missing_reason(summary, name) for name in names if read_figure(summary, name) is None
    }
    if len(reasons) == len(names) and len(set(reasons.values())) == 1:
        yield _bullet(reasons[names[0]], mark="–", style="dim")
        return
    pairs: list[tuple[str, str]] = []
    missing: dict[str, list[str]] = {}
    for row in rows:
        text = format_row(summary, row)
        pairs.append((row.label, f"{text}  ({row.note})" if row.note and text != "–" else text))
        by_reason: dict[str, list[str]] = {}
        for name, part in zip(row.fields, row.parts or ("",) * len(row.fields), strict=True):
            if name in reasons:
                by_reason.setdefault(reasons[name], []).append(part)
        for reason, parts in by_reason.items():
            named = " and ".join(filter(None, parts))
            is_whole = len(parts) == len(row.fields) or not named
            label = row.label if is_whole else f"{row.label} ({named})"
            missing.setdefault(reason, []).append(label)
    yield _pairs(pairs)
    for reason, labels in missing.items():
        yield _bullet(f"{'; '.join(labels)}: {reason}", mark="–", style="dim")


def _verdict_line(verdict: Verdict) -> Text:
    title = f" {verdict_title(verdict.kind, verdict.subtype)} "
    return Text.assemble((title, VERDICTS[verdict.kind].style), " ", (verdict.headline, "bold"))


def _heading(title: str) -> Text:
    return Text.assemble("\n", (title, "bold"))


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2), expand=False)


def _grid(
    rows: Sequence[tuple[str, str]],
    width: int,
    style: str,
    *,
    text_style: str = "",
    overflow: OverflowMethod = "fold",
) -> Table:
    """Labels of a width, and what stands beside them."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow=overflow)
    for label, text in rows:
        grid.add_row(Text(label, style=style), Text(text, style=text_style))
    return grid


def _bullet(line: str, mark: str = "•", style: str = "") -> Padding:
    return _indented(_grid([(mark, line)], 1, style, text_style=style, overflow="ellipsis"))


def _pairs(pairs: Sequence[tuple[str, str]]) -> Padding:
    return _indented(_grid(pairs, _LABEL_WIDTH, "cyan"))


def show_short_summary(
    summary: RunSummary, record: RunRecord, *, file: IO[str] | None = None
) -> None:
    """Print one screen to stdout, or a file: verdict, why, advice, and what matters most."""
    parts: list[RenderableType] = []

    def add_rows(rows: list[tuple[str, str]], style: str, width: int = _SHORT_LABEL_WIDTH) -> None:
        if rows:
            parts.append(_grid(rows, width, style, text_style="dim" if width == 1 else ""))

    parts += [Text(alarm, style="bold red") for alarm in find_alarms(summary, record)]
    verdict = summary.verdict
    parts.append(_verdict_line(verdict))
    mark = "• " if len(verdict.evidence) > 1 else ""
    why = [("" if at else "Why", f"{mark}{line}") for at, line in enumerate(verdict.evidence)]
    add_rows([*why, *([("Next", verdict.action)] if verdict.action else [])], "bold")
    parts.append(Text())
    p50, p95 = format_seconds(summary.step_p50_seconds), format_seconds(summary.step_p95_seconds)
    first = format_seconds(summary.first_step_seconds)
    memory = [format_bytes(summary.working_set_bytes)]
    if summary.working_set_peak_bytes is not None:
        memory.append(f"peak {format_bytes(summary.working_set_peak_bytes)}")
    if summary.limit_bytes and summary.limit_share is not None:
        memory.append(f"{format_share(summary.limit_share)} of {format_bytes(summary.limit_bytes)}")
    all_figures = (
        (
            "stall",
            "stall_fraction",
            f"{format_share(summary.stall_fraction)} of the time after warm-up",
        ),
        ("tokens/s", "tokens_per_second", format_count(summary.tokens_per_second)),
        ("samples/s", "samples_per_second", format_count(summary.samples_per_second)),
        ("step", "step_p50_seconds", f"p50 {p50} · p95 {p95}"),
        ("MFU", "mfu", f"{format_share(summary.mfu)} of the GPU's peak"),
        ("working set", "working_set_bytes", ", ".join(memory)),
        ("first step", "first_step_seconds", f"{first} after the first batch was requested"),
    )
    figures: list[tuple[str, str]] = []
    missing: dict[str, list[str]] = {}
    for label, name, text in all_figures:
        if getattr(summary, name) is not None:
            figures.append((label, text))
        elif name != "mfu":  # for those who asked for it
            missing.setdefault(missing_reason(summary, name), []).append(label)
    clock = [
        f"{LEDGER[part]} {format_share(share)}" for part, _, share in divide_clock(summary.ledger)
    ]
    figures += [("wall clock", " · ".join(clock))] if clock else []
    add_rows(figures, "cyan")
    if summary.replacements is not None:
        parts.append(Text(f"replacements active: {describe_replacements(summary)}"))
    for reason, labels in missing.items():
        add_rows([("–", f"{'; '.join(labels)}: {reason}")], "dim", width=1)
    notes = [("note", note) for note in summary.notes[:_MOST_NOTES]]
    left = len(summary.notes) - len(notes)
    notes += [("", f"{left} more {'note' if left == 1 else 'notes'}")] if left else []
    add_rows(notes, "dim")
    parts.append(Text())
    print_parts(parts, _PIPE_WIDTH, file)
    # Not folded by rich: a terminal wraps it, and it can still be copied whole.
    print(f"Every figure: fast-axolotl show --all {shlex.quote(record.path)}", file=file)
