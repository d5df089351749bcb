"""Make a document of several runs: a protocol, a comparison or a report.

The answer comes first, then the matrix. A difference of losses comes before any speed. Figures that
no arm has are not rows; below the matrix stands why, and why an arm has none of a row. By default a
terminal shows the main rows: a rate, the stall, the step, the start, the memory, the whole
run, and what decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.catalogue import MATRIX
from fast_axolotl.record.protocol_result import Arm, ArmRun, Matrix, MatrixRow, ProtocolResult
from fast_axolotl.record.protocol_result import Cell as MatrixCell
from fast_axolotl.record.units import count_words, format_change, format_duration, format_value
from fast_axolotl.report.document import (
    Block,
    Bullets,
    Card,
    Cell,
    Document,
    Paragraph,
    Row,
    Section,
    Table,
    Tone,
)
from fast_axolotl.report.runs import (
    ReportRun,
    figure_group,
    phase_rows,
    verdict_badge,
    verdict_blocks,
)

_BRIEF_ROWS = (
    *("tokens_per_second", "samples_per_second", "rows_per_second", "working_set_bytes"),
    *("stall_fraction", "step_p50_seconds", "start_to_step_seconds", "duration_seconds"),
)
"""Rates that changed alike are one row."""
_LEVEL = 0.05
"""Up to this probability of chance, an interval excludes that there is no change."""
_NO_RUN = "No measured run."
_RATES = ("rows_per_second", "samples_per_second", "tokens_per_second", "mfu")
"""Ends of the names of figures that usually change alike."""
_ADVICE = re.compile(r" ?\b(?:After that|Next): ")
"""What an advice begins with, in the text of a variant."""
_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "changed": "warn"}


def protocol_document(protocol: ProtocolResult) -> Document:
    """The answer of a protocol, its matrix, and what each variant is bound by."""
    blocks: list[Block] = []
    if protocol.are_losses_equal is False:
        blocks.append(Paragraph(protocol.losses, "alarm"))
    if progress := describe_progress(protocol):
        blocks.append(Paragraph(progress, "warning"))
    answer = _answer_blocks(protocol)
    if changes := _describe_changes(protocol.arms, protocol.matrix):
        blocks.append(Section(title="Answer", blocks=[*answer, changes], layout="answer"))
    else:
        blocks += answer
    if shown_rows(protocol.matrix):
        blocks.append(Section(title="Comparison", blocks=[_matrix_table(protocol.matrix)]))
    elif not any(map(_counted_runs, protocol.arms)):
        blocks.append(Paragraph(_NO_RUN))
    cards = [_arm_card(protocol, arm) for arm in protocol.arms]
    blocks.append(Section(title="Variants", blocks=cards, layout="cards"))
    blocks.append(Section(title="Notes", blocks=[Bullets(_facts(protocol))]))
    for arm in protocol.arms:
        by_tail: dict[str, list[str]] = {}
        for run in arm.runs:
            if run.status == "failed":
                by_tail.setdefault(run.log_tail, []).append(run.folder)
        for tail, names in by_tail.items():
            title = f"{arm.name}, {' and '.join(names)} failed; the end of its log:"
            blocks.append(Section(title=title, blocks=[Paragraph(tail, "log")]))
    if log := protocol.dedupe.get("log_tail"):
        title = "Dedupe alone failed; the end of its log:"
        blocks.append(Section(title=title, blocks=[Paragraph(log, "log")]))
    return Document(title=protocol.title, blocks=blocks)


def comparison_document(
    matrix: Matrix,
    *,
    arms: Sequence[Arm] = (),
    alarms: Sequence[str] = (),
    notes: Sequence[str] = (),
    checks: Sequence[tuple[str, bool]] = (),
) -> Document:
    """How the verdict changed, then a matrix, with limits that were checked: a sentence, and
    whether it is broken. Alarms are what to know before any figure.
    """
    blocks: list[Block] = [Paragraph(alarm, "alarm") for alarm in alarms]
    blocks += [Paragraph(text, "warning" if is_broken else "") for text, is_broken in checks]
    if changes := _describe_changes(arms, matrix):
        blocks.append(Section(title="What changed", blocks=[changes]))
    if shown_rows(matrix):
        blocks.append(_matrix_table(matrix))
    blocks.append(Bullets([*_describe_missing(matrix), *notes, *matrix.notes]))
    return Document(title="", blocks=blocks)


def brief_matrix(matrix: Matrix) -> Matrix:
    """The rows that matter most, in their order, without the notes on how they were made."""
    rows = tuple(
        row
        for row in matrix.rows
        if row.name in _BRIEF_ROWS or any(cell.is_deciding for cell in row.cells)
    )
    return replace(matrix, rows=rows, notes=("More rows and notes: --all, and the report.",))


def runs_document(runs: Sequence[ReportRun], *, is_named: bool = False) -> Document:
    """Verdicts of single runs, and their figures beside each other."""
    verdicts = verdict_blocks(runs, is_named=is_named)
    return Document(title="", blocks=[*verdicts, *beside_each_other(runs)])


def beside_each_other(runs: Sequence[ReportRun]) -> list[Block]:
    """The figures of single runs, with no ratio and no judgement."""
    if not runs:
        return []
    known = [run.summary.figures for run in runs]
    # Not what is zero everywhere.
    names = [one.name for one in MATRIX if any(each.get(one.name, 0) != 0 for each in known)]
    section = figure_group("Figures", names, runs)
    if len(runs) < 2:
        return [section]
    note = Paragraph(
        "One run each: a difference may be noise. fast-axolotl protocol repeats the runs and "
        "computes intervals.",
        "muted",
    )
    # Why some were not measured stands below all figures.
    blocks = [note, *section.blocks[:-1]]
    return [replace(section, title="Comparison of single runs", blocks=blocks)]


def shown_run(arm: Arm) -> ArmRun | None:
    """The run that stands for an arm; ``None`` before one has succeeded."""
    return next((run for run in arm.runs if run.folder == arm.shown_run), None)


def describe_progress(protocol: ProtocolResult) -> str:
    """How far a protocol has come that has not made every run; empty for all others."""
    runs = [run for arm in protocol.arms for run in arm.runs]
    if not protocol.planned_runs or len(runs) >= protocol.planned_runs:
        return ""
    failed = sum(run.status == "failed" for run in runs)
    words = f"{len(runs)} of {protocol.planned_runs} runs done"
    words += f", {failed} of them failed" if failed else ""
    if not protocol.pairs:
        return f"{words}, no pair yet."
    return f"{words}, {protocol.pairs} of {count_words(protocol.planned_pairs, 'pair')}."


def shown_rows(matrix: Matrix) -> list[MatrixRow]:
    """Those that say something, first those that decide.

    Not the unmeasured, not what is zero everywhere, and no ratio twice.
    """

    def importance(row: MatrixRow) -> tuple[bool, bool]:
        # Of rates that changed alike, the one that decides; tokens are what a trainer asks for.
        return any(cell.is_deciding for cell in row.cells), row.name == "tokens_per_second"

    rows: dict[tuple[object, ...], MatrixRow] = {}
    for row in matrix.rows:
        values = [format_value(finite(cell.value), row.unit) for cell in row.cells]
        if {*values} <= {format_value(None, row.unit), format_value(0.0, row.unit)}:
            continue
        key: tuple[object, ...] = (row.name,)
        others = row.cells[1:]
        if row.name.endswith(_RATES) and others and all(cell.ratio for cell in others):
            ends = (end for cell in others for end in (cell.ratio, cell.low, cell.high))
            key = tuple(f"{end:.3g}" for end in ends if end is not None)
        elif row.name.endswith("stall_fraction"):
            key = ("stall_fraction", *values)
        first = rows.setdefault(key, row)
        rows[key] = max(first, row, key=importance)
    shown = [row for row in matrix.rows if row in rows.values()]
    return sorted(shown, key=lambda row: not importance(row)[0])


def _answer_blocks(protocol: ProtocolResult) -> list[Block]:
    """A card for each variant: what became of it, one line to repeat, its figures, and advice."""
    blocks: list[Block] = []
    for line in filter(None, protocol.paragraph.split("\n")):
        at = next(
            (at for at, arm in enumerate(protocol.arms) if line.startswith(f"{arm.name}:")), 0
        )
        card = blocks[-1] if blocks else None
        if at:
            blocks.append(Card(badges=[_outcome_badge(protocol, at)], headline=line))
        elif isinstance(card, Card) and not card.text and line != protocol.dedupe.get("sentence"):
            text, _, action = _ADVICE.sub("\n", line).partition("\n")
            blocks[-1] = replace(card, text=text, action=action)
        else:
            blocks.append(Paragraph(line, "lead"))
    return blocks


def _outcome_badge(protocol: ProtocolResult, at: int) -> tuple[Tone, str]:
    """What the figures that decide say of a variant, in a word."""
    if protocol.are_losses_equal is False:
        return "bad", "Losses differ"
    cells = {row.name: row.cells[at] for row in protocol.matrix.rows if row.cells[at].is_deciding}
    whole = cells.get("duration_seconds")
    if whole is not None and whole.outcome in _TONES:
        cells = {whole.outcome: whole}
    outcomes = {cell.outcome for cell in cells.values()}
    if outcomes >= {"better", "worse"}:
        return "warn", "Better and worse"
    name = max(outcomes, key=lambda outcome: outcome in _TONES, default="not compared")
    return _TONES.get(name, "plain"), name.capitalize()


def _describe_changes(arms: Sequence[Arm], matrix: Matrix) -> Table | None:
    """The verdict and the step of each variant beside those of the baseline."""
    rows: list[Row] = []
    badges = [verdict_badge(*arm.verdict.partition(" ")[::2]) for arm in arms]
    if any(text for _, text in badges):
        rows.append(("verdict", *(Cell(text=text or "–", tone=tone) for tone, text in badges)))
    if all(arm.phases for arm in arms):
        for row in matrix.rows:
            if row.name == "step_p50_seconds":
                times = (format_value(cell.value, row.unit) for cell in row.cells)
                rows.append((row.label, *times))
        rows += phase_rows([arm.phases for arm in arms], [None] * len(arms))
    if len(arms) < 2 or not rows:
        return None
    return Table(header=("", *(arm.name for arm in arms)), rows=rows)


def _matrix_table(matrix: Matrix) -> Table:
    """Label, value of the baseline, and of each other arm the value and its change."""
    header = ["", *matrix.arms[:1]]
    given = shown_rows(matrix)
    # Single runs have none, and a note says so.
    cells_of_all = (cell for row in given for cell in row.cells)
    has_intervals = any((cell.low or cell.difference_low) is not None for cell in cells_of_all)
    for name in matrix.arms[1:]:
        header += [name, f"÷ {matrix.arms[0]}{' (95 % interval)' if has_intervals else ''}"]
    rows: list[Row] = []
    for row in given:
        cells: list[str | Cell] = [row.label, format_value(row.cells[0].value, row.unit)]
        for cell in row.cells[1:]:
            text, tone = _format_change(cell, row.unit), _TONES.get(cell.outcome, "")
            text = text if has_intervals else text.removesuffix(", no interval")
            cells.append(format_value(cell.value, row.unit))
            interval = None
            if cell.ratio and cell.low and cell.high and min(cell.low, cell.ratio) > 0:
                interval = cell.low, cell.ratio, cell.high
            cells.append(Cell(text=text, tone=tone, interval=interval))
        rows.append(cells)
    return Table(header=header, rows=rows)


def _format_change(cell: MatrixCell, unit: str) -> str:
    """``1.23× (1.20 – 1.26) better``."""
    if cell.ratio is not None:
        known = [value for value in (cell.ratio, cell.low, cell.high) if value is not None]
        ratio, *ends = (f"{one:,.{3 if one < 10 else 1 if one < 100 else 0}f}" for one in known)
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
        text += f" ({' – '.join(end.removesuffix(' points') for end in ends)})"
    if cell.outcome == "not compared":
        return f"{text}, no interval"
    is_beyond = cell.p_value is not None and cell.p_value <= _LEVEL
    if is_beyond and cell.p_adjusted is not None and cell.outcome == "no clear change":
        return f"{text} {cell.outcome} (p = {cell.p_adjusted:.2g} after Holm)"
    return f"{text} {cell.outcome}"


def _arm_card(protocol: ProtocolResult, arm: Arm) -> Card:
    """What an arm is, how often it ran, and the verdict of the run that stands for it."""
    badges = [verdict_badge(*arm.verdict.partition(" ")[::2])] if arm.verdict else []
    shown = shown_run(arm)
    done = sum(run.status == "done" for run in arm.runs)
    counted = len(_counted_runs(arm))
    parts = [count_words(counted, "measured run")]
    parts += [count_words(done - counted, "warm-up run")] if done > counted else []
    parts += [f"{len(arm.runs) - done} failed or not counted"] if len(arm.runs) > done else []
    notes = [f"{arm.text}; {', '.join(parts)}."]
    if arm.verdict and shown is not None:
        name = shown.folder.rstrip("/").rpartition("/")[2]
        notes.append(f"Verdict of run {name}{', a warm-up run' if shown.pair < 0 else ''}.")
    headline = arm.headline or _NO_RUN
    # Not what the answer has advised already.
    action = "" if arm.action in protocol.paragraph else arm.action
    return Card(name=arm.name, badges=badges, headline=headline, action=action, notes=notes)


def _facts(protocol: ProtocolResult) -> list[str]:
    """Everything else worth a line, in the order in which one asks for it."""
    lines = []
    if protocol.losses and protocol.are_losses_equal is not False:
        lines.append(protocol.losses)
    lines += [f"Different settings: {text}" for text in protocol.differing_settings]
    lines += _describe_missing(protocol.matrix)
    # Such as: 2 pairs, in the order A B B A (A x, B y); 3 min 02 s
    parts = [count_words(protocol.pairs, "pair")]
    if protocol.pairs < protocol.planned_pairs:
        parts = [f"{protocol.pairs} of {count_words(protocol.planned_pairs, 'pair')}"]
    if protocol.order:
        letters = {arm.name: chr(65 + at) for at, arm in enumerate(protocol.arms)}
        names = ", ".join(f"{letter} {name}" for name, letter in letters.items())
        order = " ".join(letters[name] for name in protocol.order)
        parts.append(f"in the order {order} ({names})")
    lines.append(f"{', '.join(parts)}; {format_duration(protocol.seconds)}")
    return [*lines, *protocol.notes, *protocol.matrix.notes]


def _describe_missing(matrix: Matrix) -> list[str]:
    """Why arms lack figures that others have: one sentence for each reason."""
    shown = shown_rows(matrix)
    missing: dict[str, dict[str, list[str]]] = {arm: {} for arm in matrix.arms}
    for row in shown:
        for arm, cell in zip(matrix.arms, row.cells, strict=False):
            if cell.value is None:
                missing[arm].setdefault(cell.reason or "not recorded", []).append(row.label)
    return [
        f"Nothing measured in {arm}: {reason}."
        if len(labels) == len(shown)
        else f"Not measured in {arm}: {'; '.join(labels)} ({reason})."
        for arm, by_reason in missing.items()
        for reason, labels in by_reason.items()
    ]


def _counted_runs(arm: Arm) -> list[ArmRun]:
    """Its runs that the matrix is of."""
    return [run for run in arm.runs if run.status == "done" and run.pair >= 0]
