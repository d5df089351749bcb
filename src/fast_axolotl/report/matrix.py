"""A protocol as text: the answer first, then the matrix; in the terminal and as Markdown.

Takes a ``ProtocolResult`` and nothing else. A difference of losses comes before any speed, in red.
Figures that no arm has are not rows; below the matrix stands why, and why an arm has none of a row.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fast_axolotl.record.protocol_result import Arm, Cell, Matrix, MatrixRow, ProtocolResult
from fast_axolotl.report.content import counted_runs
from fast_axolotl.report.values import (
    count_words,
    escape_markdown,
    format_change,
    format_ratios,
    format_value,
)

__all__ = [
    "comparison_markdown",
    "describe_missing",
    "protocol_markdown",
    "render_protocol",
    "show_comparison",
    "show_protocol",
]

_PIPE_WIDTH = 140
_STYLES = {"better": "green", "worse": "bold red", "changed": "yellow"}


def show_protocol(protocol: ProtocolResult, *, file: IO[str] | None = None) -> None:
    """Print the result of a protocol to stdout, or to a file."""
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        _print_protocol(console, protocol)
    else:
        console.file.write(render_protocol(protocol))


def render_protocol(protocol: ProtocolResult, *, width: int = _PIPE_WIDTH) -> str:
    """What is printed to a pipe, as text."""
    text = io.StringIO()
    _print_protocol(Console(file=text, highlight=False, markup=False, width=width), protocol)
    return _without_ends(text.getvalue())


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
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        _print_comparison(console, matrix, alarms, notes, checks)
        return
    text = io.StringIO()
    plain = Console(file=text, highlight=False, markup=False, width=_PIPE_WIDTH)
    _print_comparison(plain, matrix, alarms, notes, checks)
    console.file.write(_without_ends(text.getvalue()))


def protocol_markdown(protocol: ProtocolResult) -> str:
    """For a pull request."""
    lines = [f"## {escape_markdown(protocol.title)}", ""]
    if protocol.are_losses_equal is False:
        lines += [f"> **{escape_markdown(protocol.losses)}**", ""]
    for paragraph in protocol.paragraph.split("\n"):
        lines += [escape_markdown(paragraph), ""]
    lines += [*_matrix_lines(protocol.matrix), ""]
    lines += [f"- {escape_markdown(line)}" for line in _facts(protocol)]
    for arm in protocol.arms:
        for folder, tail in _failures(arm):
            name = escape_markdown(f"{arm.name}, {folder}")
            lines += ["", f"{name} failed; its log ends so:", "", "```text"]
            lines += [tail.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


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
    told = (*describe_missing(matrix), *notes, *matrix.notes)
    lines += [f"- {escape_markdown(note)}" for note in told]
    return "\n".join(lines) + "\n"


def _print_protocol(console: Console, protocol: ProtocolResult) -> None:
    console.print(Text(protocol.title, style="bold"))
    if protocol.are_losses_equal is False:
        console.print(Text(protocol.losses, style="bold white on red"))
    console.print()
    console.print(Text(protocol.paragraph))
    console.print()
    if _measured_rows(protocol.matrix):
        console.print(_table(protocol.matrix))
    for line in _facts(protocol):
        console.print(Text(f"• {line}"), soft_wrap=False)
    for arm in protocol.arms:
        _print_failures(console, arm)


def _print_failures(console: Console, arm: Arm) -> None:
    for folder, tail in _failures(arm):
        console.print()
        console.print(Text(f"{arm.name}, {folder} failed; its log ends so:", "bold red"))
        console.print(Text(tail, style="dim"))


def _failures(arm: Arm) -> list[tuple[str, str]]:
    """Folders and ends of logs, each end once."""
    by_tail: dict[str, list[str]] = {}
    for run in arm.runs:
        if run.status == "failed":
            by_tail.setdefault(run.log_tail, []).append(run.folder)
    return [(" and ".join(folders), tail) for tail, folders in by_tail.items()]


def _print_comparison(
    console: Console,
    matrix: Matrix,
    alarms: Sequence[str],
    notes: Sequence[str],
    checks: Sequence[tuple[str, bool]],
) -> None:
    for alarm in alarms:
        console.print(Text(alarm, style="bold white on red"))
    for text, is_broken in checks:
        console.print(Text(text, style="bold red" if is_broken else ""))
    console.print(_table(matrix))
    for note in (*describe_missing(matrix), *notes, *matrix.notes):
        console.print(Text(f"• {note}", style="dim"))


def _table(matrix: Matrix) -> Table:
    table = Table()
    table.add_column("")
    table.add_column(matrix.arms[0], justify="right")
    for name in matrix.arms[1:]:
        table.add_column(name, justify="right")
        table.add_column(f"÷ {matrix.arms[0]}, 95 %")
    for row in _measured_rows(matrix):
        cells = [Text(row.label), Text(format_value(row.cells[0].value, row.unit))]
        for cell in row.cells[1:]:
            cells.append(Text(format_value(cell.value, row.unit)))
            cells.append(Text(_change(cell, row.unit), style=_STYLES.get(cell.outcome, "")))
        table.add_row(*cells)
    return table


def _matrix_lines(matrix: Matrix) -> list[str]:
    if not _measured_rows(matrix):
        return []
    baseline, *others = map(escape_markdown, matrix.arms)
    header = ["", baseline]
    for name in others:
        header += [name, f"÷ {baseline}, 95 %"]
    lines = [_line(header), _line([":---", "---:", *["---:", ":---"] * len(others)])]
    for row in _measured_rows(matrix):
        cells = [escape_markdown(row.label), format_value(row.cells[0].value, row.unit)]
        for cell in row.cells[1:]:
            change = escape_markdown(_change(cell, row.unit))
            is_change = cell.outcome in _STYLES
            cells += [
                format_value(cell.value, row.unit),
                f"**{change}**" if is_change else change,
            ]
        lines.append(_line(cells))
    return lines


def _change(cell: Cell, unit: str) -> str:
    """``1.23× (1.20 – 1.26) better``."""
    if cell.ratio is not None:
        ratio, *ends = format_ratios(cell, decimals=3)
        found = f"{ratio}×"
    elif cell.difference is None:
        return "" if cell.value is None else "not compared"
    elif unit.startswith("bytes") and cell.outcome == "no detectable change":
        return cell.outcome
    else:
        differences = (cell.difference, cell.difference_low, cell.difference_high)
        found, *ends = (
            format_change(one, unit, decimals=2) for one in differences if one is not None
        )
    if ends:
        found += f" ({' – '.join(ends)})"
    if cell.outcome == "not compared":
        return f"{found}, no interval"
    is_nothing = cell.ratio is None and cell.outcome == "no detectable change" and cell.reason
    return f"{found} {cell.outcome}{f': {cell.reason}' if is_nothing else ''}"


def _facts(protocol: ProtocolResult) -> list[str]:
    """Everything else worth a line, in the order in which one asks for it."""
    lines = []
    for arm in protocol.arms:
        verdict = f": {arm.verdict}: {arm.headline}" if arm.verdict else ""
        lines.append(f"{arm.name} ({arm.text}; {_count_runs(arm)}){verdict}")
    if protocol.losses and protocol.are_losses_equal is not False:
        lines.append(protocol.losses)
    lines += [f"Not alike in the arms: {text}" for text in protocol.differing_settings]
    lines += describe_missing(protocol.matrix)
    if protocol.arms:
        lines.append(_course(protocol))
    return [*lines, *protocol.notes, *protocol.matrix.notes]


def _course(protocol: ProtocolResult) -> str:
    """``2 pairs, in the order A B B A (A x, B y), after 1 warm-up of each arm; 3.0 min``."""
    pairs = count_words(protocol.pairs, "pair")
    if protocol.pairs < protocol.planned_pairs:
        pairs = f"{protocol.pairs} of {count_words(protocol.planned_pairs, 'pair')}"
    parts = [pairs]
    if protocol.order:
        parts.append(f"in the order {_order(protocol)}")
    parts += _warmups(protocol.arms)
    return f"{', '.join(parts)}; {protocol.seconds / 60:.1f} min"


def _warmups(arms: Sequence[Arm]) -> list[str]:
    counts = [sum(run.pair < 0 and run.status == "done" for run in arm.runs) for arm in arms]
    if not any(counts):
        return []
    if len(set(counts)) == 1:
        return [f"after {count_words(counts[0], 'warm-up')} of each arm"]
    return [f"after {count_words(sum(counts), 'warm-up')} in all"]


def _count_runs(arm: Arm) -> str:
    """``3 runs, and 1 to warm up``."""
    done = [run for run in arm.runs if run.status == "done"]
    counted = len(counted_runs(arm))
    parts = [count_words(counted, "run")]
    if len(done) > counted:
        parts.append(f"{len(done) - counted} to warm up")
    if len(arm.runs) > len(done):
        parts.append(f"{len(arm.runs) - len(done)} failed or left out")
    return ", ".join(parts)


def _order(protocol: ProtocolResult) -> str:
    """``A B B A``, told once what the letters are."""
    letters = {arm.name: chr(65 + at) for at, arm in enumerate(protocol.arms)}
    told = ", ".join(f"{letter} {name}" for name, letter in letters.items())
    return f"{' '.join(letters[name] for name in protocol.order)} ({told})"


def _measured_rows(matrix: Matrix) -> list[MatrixRow]:
    return [row for row in matrix.rows if any(cell.value is not None for cell in row.cells)]


def describe_missing(matrix: Matrix) -> list[str]:
    """Why figures have no row, and why arms lack them in a row: one sentence for each reason."""
    shown = _measured_rows(matrix)
    if not shown:
        return []
    told: dict[str, list[str]] = {}
    for row in matrix.rows:
        if row not in shown:
            # An arm that ran knows more about it than one that did not.
            reasons = sorted((cell.reason for cell in row.cells if cell.reason), key=_says_little)
            told.setdefault(reasons[0] if reasons else "no run counts", []).append(row.label)
    lines = [f"Not measured: {', '.join(labels)}: {reason}." for reason, labels in told.items()]
    for at, arm in enumerate(matrix.arms):
        lines += _missing_in(arm, [(row.label, row.cells[at]) for row in shown])
    return lines


def _missing_in(arm: str, cells: Sequence[tuple[str, Cell]]) -> list[str]:
    """Of figures that another arm has."""
    told: dict[str, list[str]] = {}
    for label, cell in cells:
        if cell.value is None:
            told.setdefault(cell.reason or "it was not recorded", []).append(label)
    return [
        f"Nothing was measured in {arm}: {reason}."
        if len(labels) == len(cells)
        else f"Not measured in {arm}: {', '.join(labels)}: {reason}."
        for reason, labels in told.items()
    ]


def _says_little(reason: str) -> bool:
    return reason.startswith("no run ")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _without_ends(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
