"""The record of a job on data: one file, ``job.json``, that ``show`` and ``report`` open.

It is no record of a training, which is made of steps: there are none. What reads those says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_axolotl import __version__
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
from fast_axolotl.report.document import Bar, Card, Document, Section, Table
from fast_axolotl.report.page import write_text
from fast_axolotl.report.runs import describe_value, settings_section

_SCHEMA = 1
_ROLES = ("step", "anon", "wait", "pss", "hwm", "good", "accent", "calls", "host")
"""Of the colours of its stages."""
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
    version: str = __version__
    settings: dict[str, Any]
    next_command: str = ""
    price_per_hour: float | None = None
    """Of all nodes together."""
    summary: JobSummary

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        write_text(folder / JOB_FILE, mask_secrets(to_json(self)))

    @classmethod
    def read(cls, folder: Path) -> JobRecord:
        """The record of a folder."""
        path = folder / JOB_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}")
            return from_plain(cls, data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"not the record of a job ({error})", path=str(path)) from error

    def pairs(self) -> list[tuple[str, str]]:
        """What was done, in words: a label and its value, line by line."""
        done, price = self.summary, self.price_per_hour
        # Rows that an earlier run has prepared were paid for then, and took no time now.
        earlier = sum(stage.done_before for stage in done.stages)
        is_whole = not earlier and done.tokens > 0 and done.seconds > 0
        rate = f" ({format_count(done.tokens / done.seconds)} tokens/s)" if is_whole else ""
        shares = [
            f"{count:,} ({format_share(count / max(1, done.rows_in))})"
            for count in (sum(done.dropped.values()), done.duplicates)
        ]
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in done.dropped.items())
        pairs = {
            "rows in": f"{done.rows_in:,} ({format_bytes(done.bytes_in)})",
            "dropped": ": ".join(filter(None, (shares[0], reasons))),
            "duplicates": shares[1],
            "rows out": f"{done.rows_out:,} ({format_bytes(done.bytes_out)})",
            "tokens": f"{done.tokens:,}{rate}" if done.tokens else "– (rows are not tokenised)",
            "time": format_duration(done.seconds),
        }
        if earlier:
            pairs["time"] += f"; {count_words(earlier, 'task')} done by an earlier run"
        if price is not None:
            cost = price * done.seconds / 3600
            pairs["cost"] = f"{format_count(cost)} at {price:,g} per hour for all nodes together"
            if is_whole:
                pairs["cost"] += f"; {format_count(cost / done.tokens * 1e6)} per million tokens"
        pairs |= {name.replace("_", " "): describe_value(one) for name, one in done.extra.items()}
        pairs |= {"output": ", ".join(done.outputs), "next": self.next_command}
        return [(label, value) for label, value in pairs.items() if value]

    def stages(self) -> Rows:
        """Its stages, with a header."""
        rows = []
        for one in self.summary.stages:
            counts = (f"{number:,}" for number in (one.tasks, one.done_before, one.retried))
            times = map(format_duration, (one.seconds, one.task_seconds))
            rows.append((one.name, *counts, *times, format_bytes(one.bytes_out)))
        return ("stage", "tasks", "done before", "retried", "time", "task time", "written"), rows

    def nodes(self) -> Rows:
        """The machines that worked, with a header, the highest peak first."""
        nodes = sorted(self.summary.nodes, key=lambda node: -node.peak_bytes)
        rows = [(node.name, f"{node.tasks:,}", format_bytes(node.peak_bytes)) for node in nodes]
        return ("node", "tasks", "peak of one process"), rows

    def document(self, *, made: float = 0.0) -> Document:
        """What was made, where the time went, every stage and node."""
        done, took = self.summary, format_duration(self.summary.seconds)
        tokens = f" ({done.tokens:,} tokens)" if done.tokens else ""
        before = any(stage.done_before for stage in done.stages)
        ledger = {stage.name: stage.seconds for stage in done.stages}
        ledger["other"] = max(0.0, done.seconds - sum(ledger.values()))
        whole = sum(ledger.values()) or 1.0
        peak = max((node.peak_bytes for node in done.nodes), default=None)
        card = Card(
            badges=[("good", "Finished")],
            headline=f"{done.rows_out:,} of {done.rows_in:,} rows{tokens} written in {took}"
            f"{', continuing an earlier run' if before else ''}.",
            action=self.next_command,
            tiles=[
                ("rows dropped", f"{sum(done.dropped.values()):,}"),
                ("duplicates", f"{done.duplicates:,}"),
                ("written", format_bytes(done.bytes_out)),
                ("largest process", format_bytes(peak)),
            ],
        )
        parts = [
            (part, seconds / whole, _ROLES[number % len(_ROLES)])
            for number, (part, seconds) in enumerate(ledger.items())
        ]
        (stages, stage_rows), (nodes, node_rows) = self.stages(), self.nodes()
        settings = settings_section("Settings", [""], [self.settings])
        return Document(
            title=self.title,
            subtitle=f"{format_date(self.started)} · {count_words(len(done.nodes), 'node')}",
            blocks=[
                card,
                Section(title="Wall clock", blocks=[Bar(name=self.title, parts=parts)]),
                Section(title="Result", blocks=[Table(rows=self.pairs())]),
                Section(title="Stages", blocks=[Table(header=stages, rows=stage_rows)]),
                Section(title="Nodes", blocks=[Table(header=nodes, rows=node_rows)]),
                *settings,
            ],
            data=to_plain(self),
            made=made,
            version=self.version,
        )
