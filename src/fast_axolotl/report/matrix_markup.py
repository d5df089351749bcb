"""The matrix of a page: every figure over all arms, each with its change and 95 % interval.

Beside a change stands its interval as a picture: a bar from its lower to its upper end on a
logarithmic scale, a dot for the ratio, and a line where nothing has changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow, ProtocolResult
from fast_axolotl.report.content import Report, ReportRun, counted_runs, no_counted_run
from fast_axolotl.report.downsampling import finite
from fast_axolotl.report.markup import Safe, named, tag
from fast_axolotl.report.values import describe_change, format_value

__all__ = ["ROWS", "compare_plainly", "matrix_section"]

ROWS = (
    ("rows_per_second", "reader", "rows/s", "higher"),
    ("samples_per_second", "samples", "samples/s", "higher"),
    ("working_set_bytes", "working set (ΣPSS), steady", "bytes", "lower"),
    ("working_set_peak_bytes", "working set (ΣPSS), highest", "bytes", "lower"),
    ("host_stall_fraction", "stall, by the host", "share", "lower"),
    ("device_stall_fraction", "stall, by the device", "share", "lower"),
    ("tokens_per_second", "real tokens", "tokens/s", "higher"),
    ("trainable_tokens_per_second", "trainable tokens", "tokens/s", "higher"),
    ("padded_tokens_per_second", "padded tokens", "tokens/s", "higher"),
    ("mfu", "MFU", "share", "higher"),
    ("step_p50_seconds", "step, p50", "s", "lower"),
    ("step_p95_seconds", "step, p95", "s", "lower"),
    ("first_step_seconds", "first fetch to first step", "s", "lower"),
    ("disk_share", "reads, of the disk's capacity", "share", ""),
    ("swap_in_bytes_per_second", "swap in", "bytes/s", "lower"),
    ("swap_out_bytes_per_second", "swap out", "bytes/s", "lower"),
    ("duration_seconds", "the whole run", "s", "lower"),
)
"""What single runs are held against each other by: field, label, unit, what is better. The figures
of a protocol, as far as they are fields of a summary; this layer cannot import them."""

_TONES = {"better": "good", "worse": "bad", "changed": "warn"}
_WIDTH, _HEIGHT = 104, 14
_WIDEST = math.log(2)
"""Half of the picture at most: larger changes are drawn at its edge."""

_SHARED = 5
"""Cells with the same reason from which on it is told once for all."""

_ONE_EACH = (
    "One run each: how much of a difference is chance cannot be told. "
    "fast-axolotl protocol repeats the runs and gives intervals."
)
_READING = (
    "A ratio is an arm's figure over the baseline's, as the geometric mean over pairs of runs; "
    "behind it the 95 % interval. Where the interval holds 1 there is no detectable change."
)


def matrix_section(report: Report) -> Safe | None:
    """Arms, or runs, beside each other; nothing for a single run."""
    if report.protocol is not None:
        matrix = report.protocol.matrix
        notes = [_READING, *matrix.notes, *report.protocol.differing_settings]
        notes += report.protocol.notes
    elif len(report.runs) > 1:
        matrix, notes = compare_plainly(report.runs), [_ONE_EACH]
    else:
        return None
    shown = [row for row in matrix.rows if any(_is_known(cell) for cell in row.cells)]
    missing = [row for row in matrix.rows if row not in shown]
    shown, shared = _take_out_shared(shown)
    notes[1:1] = shared
    if not shown:
        notes[0] = _nothing(report.protocol)
    return tag(
        "section",
        tag("h2", "Matrix", id="matrix"),
        _table(matrix.arms, shown) if shown else None,
        tag("ul", [tag("li", note) for note in notes], class_="notes"),
        _missing(missing),
        aria_labelledby="matrix",
    )


def _nothing(protocol: ProtocolResult | None) -> str:
    """Why there is no table."""
    if protocol is not None and not any(counted_runs(arm) for arm in protocol.arms):
        return no_counted_run(protocol)
    return "No figure was measured in any arm."


def compare_plainly(runs: Sequence[ReportRun]) -> Matrix:
    """Single runs beside each other, with no ratio and no judgement."""
    rows = []
    for name, label, unit, better in ROWS:
        cells = tuple(
            Cell(
                value=getattr(run.summary, name),
                reason=run.summary.reasons.get(name, "") if _is_none(run, name) else "",
            )
            for run in runs
        )
        rows.append(MatrixRow(name=name, label=label, unit=unit, better=better, cells=cells))  # type: ignore[arg-type]
    return Matrix(arms=tuple(run.name for run in runs), rows=tuple(rows))


def _take_out_shared(rows: Sequence[MatrixRow]) -> tuple[list[MatrixRow], list[str]]:
    """Reasons that stand in many cells are told once, below."""
    counts = Counter(cell.reason for row in rows for cell in row.cells if cell.reason)
    shared = [reason for reason, count in counts.items() if count >= _SHARED]
    kept = [
        replace(
            row,
            cells=tuple(
                replace(cell, reason="") if cell.reason in shared else cell for cell in row.cells
            ),
        )
        for row in rows
    ]
    return kept, [f"{reason[:1].upper()}{reason[1:]}." for reason in shared]


def _is_none(run: ReportRun, name: str) -> bool:
    return getattr(run.summary, name) is None


def _is_known(cell: Cell) -> bool:
    return finite(cell.value) is not None


def _table(arms: Sequence[str], rows: Sequence[MatrixRow]) -> Safe:
    half = _half_width(rows)
    head = tag(
        "tr",
        tag("th", "figure", scope="col", role="columnheader"),
        [tag("th", named(arm), scope="col", role="columnheader") for arm in arms],
        role="row",
    )
    body = [_row(row, arms, half) for row in rows]
    table = tag(
        "table",
        tag("thead", head, role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        class_="matrix",
        role="table",
        aria_labelledby="matrix",
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Matrix")


def _row(row: MatrixRow, arms: Sequence[str], half: float) -> Safe:
    better = f"{row.better} is better" if row.better else ""
    label = tag("th", row.label, tag("small", better), scope="row", role="rowheader")
    cells = zip(row.cells, arms, strict=False)
    return tag("tr", label, [_cell(cell, row, arm, half) for cell, arm in cells], role="row")


def _cell(cell: Cell, row: MatrixRow, arm: str, half: float) -> Safe:
    change, interval = describe_change(cell, row)
    value = tag("span", format_value(cell.value, row.unit), class_="value")
    outcome = None
    if cell.outcome and cell.outcome != "not compared":
        tone = _TONES.get(cell.outcome, "plain")
        outcome = tag("span", cell.outcome, class_=f"outcome {tone}")
    parts = [tag("span", value, outcome, class_="top")]
    if change:
        words = tag("span", change, class_="ratio")
        inside = tag("span", interval, class_="interval") if interval else None
        parts.append(tag("span", _picture(cell, half), words, inside, class_="change"))
    if cell.reason:
        parts.append(tag("small", cell.reason))
    return tag("td", tag("div", parts), role="cell", data_arm=arm)


def _half_width(rows: Sequence[MatrixRow]) -> float:
    """How far the pictures reach to either side, as a logarithm: the same for all."""
    ends = [
        abs(math.log(end))
        for row in rows
        for cell in row.cells
        for end in (cell.low, cell.high, cell.ratio)
        if end is not None and end > 0
    ]
    return min(_WIDEST, max([math.log(1.1), *ends]))


def _picture(cell: Cell, half: float) -> Safe | None:
    if not cell.ratio or not cell.low or not cell.high:
        return None
    low, middle, high = (_place(value, half) for value in (cell.low, cell.ratio, cell.high))
    y = _HEIGHT / 2
    return tag(
        "svg",
        tag("line", x1="8", x2=f"{_WIDTH - 8}", y1=f"{y:.0f}", y2=f"{y:.0f}", class_="track"),
        tag("line", x1="52", x2="52", y1="0", y2=f"{_HEIGHT}", class_="one"),
        tag(
            "rect",
            x=f"{low:.1f}",
            y=f"{y - 4:.1f}",
            width=f"{max(2.0, high - low):.1f}",
            height="8",
            rx="2",
            class_="span",
        ),
        _arrow(cell.ratio, half) or tag("circle", cx=f"{middle:.1f}", cy=f"{y:.1f}", r="2.5"),
        class_=f"picture {_TONES.get(cell.outcome, 'plain')}",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=f"{_WIDTH}",
        height=f"{_HEIGHT}",
        aria_hidden="true",
    )


def _arrow(ratio: float, half: float) -> Safe | None:
    """Points out of the picture where the ratio is beyond it."""
    if abs(math.log(ratio)) <= half:
        return None
    return tag("path", d="M98 2L103 7L98 12Z" if ratio > 1 else "M6 2L1 7L6 12Z")


def _place(ratio: float, half: float) -> float:
    share = max(-1.0, min(1.0, math.log(ratio) / half))
    return _WIDTH / 2 + share * (_WIDTH / 2 - 9)


def _missing(rows: Sequence[MatrixRow]) -> Safe | None:
    if not rows:
        return None
    told: dict[str, list[str]] = {}
    for row in rows:
        reason = next((cell.reason for cell in row.cells if cell.reason), "it was not recorded")
        told.setdefault(reason, []).append(row.label)
    items = [tag("li", f"{', '.join(labels)}: {reason}") for reason, labels in told.items()]
    return tag("details", tag("summary", "Not measured"), tag("ul", items))
