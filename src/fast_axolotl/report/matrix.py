"""A protocol, a comparison, or runs beside each other as text: in the terminal and as Markdown.

The answer comes first, then the matrix. A difference of losses comes before any speed, in red.
Figures that no arm has are not rows; below the matrix stands why, and why an arm has none of a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import IO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.catalogue import MATRIX
from fast_axolotl.record.protocol_result import Arm, Cell, Matrix, MatrixRow, ProtocolResult
from fast_axolotl.record.units import count_words, format_change, format_duration, format_value
from fast_axolotl.report.content import (
    VERDICTS,
    ReportRun,
    counted_runs,
    describe_run,
    find_alarms,
    verdict_title,
)
from fast_axolotl.report.figures import missing_reason
from fast_axolotl.report.terminal import print_parts

_PIPE_WIDTH = 140
_MOST_DECIMALS = 5
"""Of a ratio: smaller changes than a hundred-thousandth are none that anybody asks for."""
_SPECIAL = re.compile(r"[\\`*\[\]<>&|#~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown may take for its own. An underscore inside a word is none: a figure's name."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_STYLES = {"better": "green", "worse": "bold red", "changed": "yellow"}


def show_protocol(
    protocol: ProtocolResult, *, file: IO[str] | None = None, width: int = _PIPE_WIDTH
) -> None:
    """Print the result of a protocol to stdout, or to a file: lines of the width."""
    parts: list[RenderableType] = [Text(protocol.title, style="bold")]
    if protocol.are_losses_equal is False:
        parts.append(Text(protocol.losses, style="bold white on red"))
    parts += [Text(), Text(protocol.paragraph), Text()]
    if measured_rows(protocol.matrix):
        parts.append(_table(protocol.matrix))
    parts += [Text(f"• {line}") for line in _facts(protocol)]
    for name, tail in _failures(protocol):
        parts += [
            Text(),
            Text(f"{name} failed; the end of its log:", "bold red"),
            Text(tail, "dim"),
        ]
    print_parts(parts, width, file)


def protocol_markdown(protocol: ProtocolResult) -> str:
    """For a pull request."""
    lines = [f"## {escape_markdown(protocol.title)}", ""]
    if protocol.are_losses_equal is False:
        lines += [f"> **{escape_markdown(protocol.losses)}**", ""]
    for paragraph in protocol.paragraph.split("\n"):
        lines += [escape_markdown(paragraph), ""]
    lines += [*_matrix_lines(protocol.matrix), ""]
    lines += [f"- {escape_markdown(line)}" for line in _facts(protocol)]
    for name, tail in _failures(protocol):
        lines += ["", f"{escape_markdown(name)} failed; the end of its log:", "", "```text"]
        lines += [tail.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def show_comparison(
    matrix: Matrix,
    *,
    alarms: Sequence[str] = (),
    notes: Sequence[str] = (),
    checks: Sequence[tuple[str, bool]] = (),
    file: IO[str] | None = None,
) -> None:
    """Print a matrix alone, with limits that were checked: a sentence, and whether it is broken.

    Alarms are what to know before any figure.
    """
    parts: list[RenderableType] = [Text(alarm, style="bold white on red") for alarm in alarms]
    parts += [Text(text, style="bold red" if is_broken else "") for text, is_broken in checks]
    parts.append(_table(matrix))
    below = (*_describe_missing(matrix), *notes, *matrix.notes)
    parts += [Text(f"• {note}", style="dim") for note in below]
    print_parts(parts, _PIPE_WIDTH, file)


def comparison_markdown(
    matrix: Matrix,
    *,
    alarms: Sequence[str] = (),
    notes: Sequence[str] = (),
    checks: Sequence[tuple[str, bool]] = (),
) -> str:
    """The same of a comparison."""
    lines = [line for alarm in alarms for line in (f"> **{escape_markdown(alarm)}**", "")]
    lines += [*_matrix_lines(matrix), ""]
    lines += [
        f"- **{escape_markdown(text)}**" if broken else f"- {escape_markdown(text)}"
        for text, broken in checks
    ]
    below = (*_describe_missing(matrix), *notes, *matrix.notes)
    lines += [f"- {escape_markdown(note)}" for note in below]
    return "\n".join(lines) + "\n"


def runs_markdown(runs: Sequence[ReportRun]) -> str:
    """Of single runs: verdicts, what to do next, a table, and why it has dashes."""
    lines = []
    for run in runs:
        verdict = run.summary.verdict
        name = f"{escape_markdown(run.name)}: " if len(runs) > 1 else ""
        for alarm in find_alarms(run.summary, run.record):
            lines += [f"> **{name}{escape_markdown(alarm)}**", ""]
        title, headline = map(
            escape_markdown, (verdict_title(verdict.kind, verdict.subtype), verdict.headline)
        )
        lines += [f"**{name}{title}.** {headline}", ""]
        lines += [f"- {escape_markdown(line)}" for line in verdict.evidence]
        lines += [""] if verdict.evidence else []
        if verdict.action:
            lines += [f"**Next:** {escape_markdown(verdict.action)}", ""]
    matrix = compare_plainly(runs)
    lines.append(_line(["figure", *map(escape_markdown, matrix.arms)]))
    lines.append("| --- |" + " ---: |" * len(matrix.arms))
    for row in measured_rows(matrix):
        values = [format_value(cell.value, row.unit) for cell in row.cells]
        lines.append(_line([escape_markdown(row.label), *values]))
    missing = [f"- {escape_markdown(line)}" for line in _describe_missing(matrix)]
    lines += ["", *missing] if missing else []
    return "\n".join(lines) + "\n"


def compare_plainly(runs: Sequence[ReportRun]) -> Matrix:
    """Single runs beside each other, with no ratio and no judgement."""
    rows = []
    for figure in MATRIX:
        if any(figure.name not in run.summary.figures for run in runs):
            continue
        cells = []
        for run in runs:
            value = getattr(run.summary, figure.name)
            reason = missing_reason(run.summary, figure.name) if value is None else ""
            cells.append(Cell(value=value, reason=reason))
        rows.append(
            MatrixRow(
                name=figure.name,
                label=figure.label,
                unit=figure.unit,
                better=figure.better,
                cells=tuple(cells),
            )
        )
    return Matrix(arms=tuple(run.name for run in runs), rows=tuple(rows))


def _table(matrix: Matrix) -> Table:
    table = Table()
    table.add_column("")
    table.add_column(matrix.arms[0], justify="right")
    for name in matrix.arms[1:]:
        table.add_column(name, justify="right")
        table.add_column(f"÷ {matrix.arms[0]} (95 % interval)")
    for row in measured_rows(matrix):
        table.add_row(*(Text(text, style=style) for text, style in _styled_cells(row)))
    return table


def _styled_cells(row: MatrixRow) -> list[tuple[str, str]]:
    """Label, value of the baseline, and of each other arm the value and its change."""
    cells = [(row.label, ""), (format_value(row.cells[0].value, row.unit), "")]
    for cell in row.cells[1:]:
        cells.append((format_value(cell.value, row.unit), ""))
        cells.append((_change(cell, row.unit), _STYLES.get(cell.outcome, "")))
    return cells


def _matrix_lines(matrix: Matrix) -> list[str]:
    if not measured_rows(matrix):
        return []
    baseline, *others = map(escape_markdown, matrix.arms)
    header = ["", baseline]
    for name in others:
        header += [name, f"÷ {baseline} (95 % interval)"]
    lines = [_line(header), _line([":---", "---:", *["---:", ":---"] * len(others)])]
    for row in measured_rows(matrix):
        cells = ((escape_markdown(text), style) for text, style in _styled_cells(row))
        lines.append(_line([f"**{text}**" if style else text for text, style in cells]))
    return lines


def _change(cell: Cell, unit: str) -> str:
    """``1.23× (1.20 – 1.26) better``."""
    if cell.ratio is not None:
        ratio, *ends = _format_ratios(cell, decimals=3)
        text = f"{ratio}×"
    elif cell.difference is None:
        return "" if cell.value is None else "not compared"
    elif unit.startswith("bytes") and cell.outcome.startswith("no "):
        return cell.outcome
    else:
        differences = (cell.difference, cell.difference_low, cell.difference_high)
        text, *ends = (
            format_change(one, unit, decimals=2) for one in differences if one is not None
        )
    if ends:
        text += f" ({' – '.join(ends)})"
    if cell.outcome == "not compared":
        return f"{text}, no interval"
    return f"{text} {cell.outcome}"


def describe_change(cell: Cell, unit: str) -> tuple[str, str]:
    """An arm against the baseline: ``×1.42`` and its interval; empty where there is neither."""
    if cell.ratio is not None:
        ratio, *ends = _format_ratios(cell, decimals=2)
        return f"×{ratio}", " to ".join(ends)
    if cell.difference:
        ends = [
            format_change(end, unit)
            for end in (cell.difference_low, cell.difference_high)
            if end is not None
        ]
        return format_change(cell.difference, unit), " to ".join(ends)
    return "", ""


def _format_ratios(cell: Cell, *, decimals: int) -> list[str]:
    """The ratio of a cell, and the ends of its interval where it has one.

    A change has more decimals where fewer would round it to 1, which stands for no change.
    """
    known = [value for value in (cell.ratio, cell.low, cell.high) if value is not None]
    if cell.outcome in ("better", "worse", "changed"):
        enough = (
            number
            for number in range(decimals, _MOST_DECIMALS)
            if all(round(value, number) != 1.0 for value in known)
        )
        decimals = next(enough, _MOST_DECIMALS)
    return [
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.{max(decimals, 3) if value < 0.1 else decimals}f}"
        for value in known
    ]


def escape_markdown(text: str) -> str:
    """Texts are data: nothing of them is a style, a tag, a column or a line of its own."""
    return _SPECIAL.sub(
        lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), " ".join(text.split())
    )


def _failures(protocol: ProtocolResult) -> list[tuple[str, str]]:
    """Arms with their folders, and ends of logs, each end once."""
    failures = []
    for arm in protocol.arms:
        by_tail: dict[str, list[str]] = {}
        for run in arm.runs:
            if run.status == "failed":
                by_tail.setdefault(run.log_tail, []).append(run.folder)
        failures += [
            (f"{arm.name}, {' and '.join(names)}", tail) for tail, names in by_tail.items()
        ]
    return failures


def _facts(protocol: ProtocolResult) -> list[str]:
    """Everything else worth a line, in the order in which one asks for it."""
    lines = []
    for arm in protocol.arms:
        done = sum(run.status == "done" for run in arm.runs)
        counted = len(counted_runs(arm))
        parts = [count_words(counted, "measured run")]
        parts += [count_words(done - counted, "warm-up run")] if done > counted else []
        parts += [f"{len(arm.runs) - done} failed or not counted"] if len(arm.runs) > done else []
        verdict = f": {_describe_verdict(arm)}" if arm.verdict else ""
        lines.append(f"{arm.name} ({arm.text}; {', '.join(parts)}){verdict}")
    if protocol.losses and protocol.are_losses_equal is not False:
        lines.append(protocol.losses)
    lines += [f"Different settings: {text}" for text in protocol.differing_settings]
    lines += _describe_missing(protocol.matrix)
    if protocol.arms:
        # Such as: 2 pairs, in the order A B B A (A x, B y), after 1 warm-up of each arm; 3 min 02 s
        parts = [count_words(protocol.pairs, "pair")]
        if protocol.pairs < protocol.planned_pairs:
            parts = [f"{protocol.pairs} of {count_words(protocol.planned_pairs, 'pair')}"]
        if protocol.order:
            letters = {arm.name: chr(65 + at) for at, arm in enumerate(protocol.arms)}
            names = ", ".join(f"{letter} {name}" for name, letter in letters.items())
            order = " ".join(letters[name] for name in protocol.order)
            parts.append(f"in the order {order} ({names})")
        warmups = [
            sum(run.pair < 0 and run.status == "done" for run in arm.runs) for arm in protocol.arms
        ]
        if any(warmups):
            each = f"{count_words(warmups[0], 'warm-up run')} of each variant"
            total = f"{count_words(sum(warmups), 'warm-up run')} in total"
            parts.append(f"after {each if len(set(warmups)) == 1 else total}")
        lines.append(f"{', '.join(parts)}; {format_duration(protocol.seconds)}")
    return [*lines, *protocol.notes, *protocol.matrix.notes]


def _describe_verdict(arm: Arm) -> str:
    """The verdict of the run that stands for an arm, and which one that is."""
    kind, _, subtype = arm.verdict.partition(" ")
    title = verdict_title(kind, subtype) if kind in VERDICTS else arm.verdict
    return f"{title}. {arm.headline} (Run {describe_run(arm)}.)"


def measured_rows(matrix: Matrix) -> list[MatrixRow]:
    """Those with a value in any arm."""
    rows = ((row, [finite(cell.value) for cell in row.cells]) for row in matrix.rows)
    return [row for row, values in rows if any(value is not None for value in values)]


def _describe_missing(matrix: Matrix) -> list[str]:
    """Why figures have no row, and why arms lack them in a row: one sentence for each reason."""
    shown = measured_rows(matrix)
    if not shown:
        return []
    missing: dict[str, list[str]] = {}
    for row in matrix.rows:
        if row not in shown:
            # An arm that ran knows more about it than one that did not.
            reasons = sorted(
                (cell.reason for cell in row.cells if cell.reason),
                key=lambda reason: reason.startswith("no run "),
            )
            missing.setdefault(reasons[0] if reasons else "no measured run", []).append(row.label)
    lines = [f"Not measured: {'; '.join(labels)} ({reason})." for reason, labels in missing.items()]
    for at, arm in enumerate(matrix.arms):
        missing = {}
        for row in shown:
            if row.cells[at].value is None:
                reason = row.cells[at].reason or "not recorded"
                missing.setdefault(reason, []).append(row.label)
        lines += [
            f"Nothing measured in {arm}: {reason}."
            if len(labels) == len(shown)
            else f"Not measured in {arm}: {'; '.join(labels)} ({reason})."
            for reason, labels in missing.items()
        ]
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
