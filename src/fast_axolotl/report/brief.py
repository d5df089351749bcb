"""Shorten the result of a protocol or a comparison to what a terminal shows by default.

At most seven rows stay: a rate, the stall, the step, the start, the memory, the whole run, and what
decides. Rows that are zero or not measured in every variant go, and so do the notes on how figures
are made. The whole result is in the report, and under ``--all``.
"""

from __future__ import annotations

from dataclasses import replace

from fast_axolotl.record.protocol_result import Matrix, ProtocolResult

_RATES = ("tokens_per_second", "samples_per_second", "rows_per_second")
"""The first of them that is known is shown."""
_ROWS = (
    *("working_set_bytes", "stall_fraction", "step_p50_seconds", "start_to_step_seconds"),
    "duration_seconds",
)


def brief_protocol(protocol: ProtocolResult) -> ProtocolResult:
    """The result without the rows, the notes and the order of runs that change no belief."""
    return replace(protocol, matrix=brief_matrix(protocol.matrix), order=())


def brief_matrix(matrix: Matrix) -> Matrix:
    """The rows that matter most, in their order, without the notes on how they were made."""
    known = [row for row in matrix.rows if any(cell.value for cell in row.cells)]
    names = {row.name for row in known}
    shown = {*_ROWS, *[name for name in _RATES if name in names][:1]}
    shown |= {row.name for row in known if any(cell.is_deciding for cell in row.cells)}
    rows = tuple(row for row in known if row.name in shown)
    return replace(matrix, rows=rows, notes=("More rows and notes: --all, and the report.",))
