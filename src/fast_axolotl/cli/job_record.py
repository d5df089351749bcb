"""The record of a job on data: one file, ``job.json``, that ``show`` and ``report`` open.

It is no record of a training, which is made of steps: there are none. What reads those says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_axolotl.cluster.job import JobSummary
from fast_axolotl.errors import DataError, mask_secrets
from fast_axolotl.record.codec import from_plain, to_json, to_plain
from fast_axolotl.record.folder import JOB_FILE
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_count,
    format_date,
    format_duration,
    format_share,
)
from fast_axolotl.report.content import Report
from fast_axolotl.report.figures import describe_value
from fast_axolotl.report.matrix import escape_markdown
from fast_axolotl.report.picture import written_beside

__all__ = ["JobRecord", "describe_summary", "node_table", "stage_table"]

_SCHEMA = 1
Rows = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
"""The header of a table and its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What a finished job leaves."""

    schema: int = _SCHEMA
    title: str
    """The command and what it was given: prepare chat.yml."""
    started: float
    """Seconds since 1970."""
    version: str
    """Version of this package."""
    settings: dict[str, Any]
    next_command: str = ""
    price_per_hour: float | None = None
    """Of all nodes together."""
    summary: JobSummary

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        with written_beside(folder / JOB_FILE) as beside:
            text = mask_secrets(to_json(self))
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")

    @classmethod
    def read(cls, folder: Path) -> JobRecord:
        """The record of a folder."""
        path = folder / JOB_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}")
            return from_plain(cls, data)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"cannot be read: {reason}", path=str(path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"not the record of a job ({error})", path=str(path)) from error

    def markdown(self) -> str:
        """A table for a pull request."""
        pairs = describe_summary(self.summary, self.price_per_hour, self.next_command)
        rows = [f"| {label} | {escape_markdown(value)} |" for label, value in pairs]
        head = [f"## {escape_markdown(self.title)}", "", "| | |", "| --- | --- |"]
        return "\n".join([*head, *rows])

    def page(self, *, now: float) -> str:
        """One HTML file: what was made, where the time went, every stage and node."""
        from fast_axolotl.report.page import render_job

        done, took = self.summary, format_duration(self.summary.seconds)
        peaks = [node.peak_bytes for node in done.nodes]
        tokens = f", {done.tokens:,} tokens" if done.tokens else ""
        headline = f"{done.rows_out:,} of {done.rows_in:,} rows were written in {took}{tokens}."
        ledger = {stage.name: stage.seconds for stage in done.stages}
        ledger["other"] = max(0.0, done.seconds - sum(ledger.values()))
        return render_job(
            Report(title=self.title, runs=(), made=now, version=self.version),
            subtitle=f"{format_date(self.started)} · {took} · {count_words(len(peaks), 'node')}",
            answer={"tone": "good", "badges": [("good", "Finished")], "evidence": ()}
            | {"headline": headline, "action": self.next_command},
            tiles=[
                ("rows dropped", f"{sum(done.dropped.values()):,}"),
                ("duplicates", f"{done.duplicates:,}"),
                ("written", format_bytes(done.bytes_out)),
                ("largest process", format_bytes(max(peaks, default=None))),
            ],
            ledger=ledger,
            tables={
                "Result": ((), describe_summary(done, self.price_per_hour, self.next_command)),
                "Stages": stage_table(done),
                "Nodes": node_table(done),
                "Settings": (
                    (),
                    [(key, describe_value(one)) for key, one in self.settings.items()],
                ),
            },
            data=to_plain(self),
        )


def describe_summary(
    summary: JobSummary, price_per_hour: float | None = None, next_command: str = ""
) -> list[tuple[str, str]]:
    """A job in words: a label and its value, line by line. The price is for all nodes together."""

    def of_rows(count: int) -> str:
        return f"{count:,} ({format_share(count / max(1, summary.rows_in))})"

    # Rows that an earlier run has prepared were paid for then, and took no time now.
    done_before = sum(stage.done_before for stage in summary.stages)
    is_whole = not done_before and summary.tokens > 0 and summary.seconds > 0
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.dropped.items())
    rate = f", {format_count(summary.tokens / summary.seconds)} tokens/s" if is_whole else ""
    earlier = f"; {count_words(done_before, 'task')} done by an earlier run" if done_before else ""
    pairs = [
        ("rows in", f"{summary.rows_in:,} ({format_bytes(summary.bytes_in)})"),
        ("dropped", ": ".join(filter(None, (of_rows(sum(summary.dropped.values())), reasons)))),
        ("duplicates", of_rows(summary.duplicates)),
        ("rows out", f"{summary.rows_out:,} ({format_bytes(summary.bytes_out)})"),
        ("tokens", f"{summary.tokens:,}{rate}" if summary.tokens else "– (rows are not tokenised)"),
        ("time", f"{format_duration(summary.seconds)}{earlier}"),
    ]
    if price_per_hour is not None:
        cost = price_per_hour * summary.seconds / 3600
        text = f"{format_count(cost)} at {price_per_hour:,g} per hour for all nodes together"
        if is_whole:
            text += f"; {format_count(cost / summary.tokens * 1e6)} per million tokens"
        pairs.append(("cost", f"{text}{', this run only' if done_before else ''}"))
    pairs += [(name.replace("_", " "), describe_value(one)) for name, one in summary.extra.items()]
    pairs.append(("output", ", ".join(summary.outputs)))
    return pairs + ([("next", next_command)] if next_command else [])


def stage_table(summary: JobSummary) -> Rows:
    """The stages of a job."""
    header = ("stage", "tasks", "done before", "retried", "time", "sum over tasks", "written")
    rows = []
    for one in summary.stages:
        counts = (f"{number:,}" for number in (one.tasks, one.done_before, one.retried))
        times = map(format_duration, (one.seconds, one.task_seconds))
        rows.append((one.name, *counts, *times, format_bytes(one.bytes_out)))
    return header, rows


def node_table(summary: JobSummary) -> Rows:
    """The machines that worked, the highest peak first."""
    nodes = sorted(summary.nodes, key=lambda node: -node.peak_bytes)
    header = ("node", "tasks", "peak of one process")
    return header, [(node.name, f"{node.tasks:,}", format_bytes(node.peak_bytes)) for node in nodes]
