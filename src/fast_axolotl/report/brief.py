"""What a terminal shows of several runs by default: a line each, or the short answer of a protocol.

Of a protocol or a comparison, at most seven rows stay: a rate, the stall, the step, the start, the
memory, the whole run, and what decides. Rows that are zero or not measured in every variant go, and
so do the notes on how figures are made. The whole result is in the report, and under ``--all``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fast_axolotl.record.protocol_result import Matrix, ProtocolResult
from fast_axolotl.record.units import format_count, format_date, format_share
from fast_axolotl.report.document import Document, Table
from fast_axolotl.report.runs import ReportRun, verdict_badge

_ROWS = (
    *("tokens_per_second", "samples_per_second", "rows_per_second", "working_set_bytes"),
    *("stall_fraction", "step_p50_seconds", "start_to_step_seconds", "duration_seconds"),
)
"""Rates that changed alike are one row."""


def brief_protocol(protocol: ProtocolResult) -> ProtocolResult:
    """The result without the rows, the notes and the order of runs that change no belief."""
    return replace(protocol, matrix=brief_matrix(protocol.matrix), order=())


def brief_matrix(matrix: Matrix) -> Matrix:
    """The rows that matter most, in their order, without the notes on how they were made."""
    rows = tuple(
        row
        for row in matrix.rows
        if row.name in _ROWS or any(cell.is_deciding for cell in row.cells)
    )
    return replace(matrix, rows=rows, notes=("More rows and notes: --all, and the report.",))


def run_line(run: ReportRun) -> dict[str, str]:
    """When a run began, what came of it, and what was run."""
    summary, parts = run.summary, [run.record.system, *run.record.ranks.values()]
    commands = (part.start.command for part in parts if part is not None)
    return {
        "run": run.name,
        "started": format_date(summary.started),
        "verdict": verdict_badge(summary.verdict.kind, summary.verdict.subtype)[1],
        "tokens/s": format_count(summary.tokens_per_second),
        "stall": format_share(summary.stall_fraction),
        "command": shlex.join(next(filter(None, commands), ())),
    }


def list_document(lines: Sequence[Mapping[str, str]]) -> Document:
    """A table of runs."""
    rows = [list(line.values()) for line in lines]
    return Document(title="", blocks=[Table(header=list(lines[0]), rows=rows)])
