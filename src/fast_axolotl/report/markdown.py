"""Runs as Markdown, for a pull request: every verdict, and the figures beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from fast_axolotl.report.alarms import find_alarms
from fast_axolotl.report.content import ReportRun
from fast_axolotl.report.matrix import describe_missing
from fast_axolotl.report.matrix_markup import compare_plainly
from fast_axolotl.report.show import verdict_title
from fast_axolotl.report.values import escape_markdown, format_value

__all__ = ["runs_markdown"]


def runs_markdown(runs: Sequence[ReportRun]) -> str:
    """Verdicts, what to do next, a table, and why it has dashes."""
    lines = []
    for run in runs:
        verdict = run.summary.verdict
        name = f"{escape_markdown(run.name)}: " if len(runs) > 1 else ""
        for alarm in find_alarms(run.summary, run.record):
            lines += [f"> **{name}{escape_markdown(alarm)}**", ""]
        title, headline = map(escape_markdown, (verdict_title(verdict), verdict.headline))
        lines += [f"**{name}{title}.** {headline}", ""]
        lines += [f"- {escape_markdown(line)}" for line in verdict.evidence]
        lines += [""] if verdict.evidence else []
        if verdict.action:
            lines += [f"**Next:** {escape_markdown(verdict.action)}", ""]
    matrix = compare_plainly(runs)
    lines.append("| figure | " + " | ".join(map(escape_markdown, matrix.arms)) + " |")
    lines.append("| --- |" + " ---: |" * len(matrix.arms))
    for row in matrix.rows:
        if any(cell.value is not None for cell in row.cells):
            values = [format_value(cell.value, row.unit) for cell in row.cells]
            lines.append(f"| {escape_markdown(row.label)} | " + " | ".join(values) + " |")
    missing = [f"- {escape_markdown(line)}" for line in describe_missing(matrix)]
    lines += ["", *missing] if missing else []
    return "\n".join(lines) + "\n"
