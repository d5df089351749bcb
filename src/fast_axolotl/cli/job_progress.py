"""What people see of a job: how far its stages are, and its summary after.

In a terminal a bar shows the stage; elsewhere a line is written when a stage begins, every 30 s,
and when it ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from fast_axolotl.cli.options import say
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_count,
    format_duration,
    format_share,
)
from fast_axolotl.report.terminal import phase_progress, show_matrix, show_pairs

if TYPE_CHECKING:
    from fast_axolotl.cluster.job import JobSummary, Stage

_LINE_SECONDS = 30.0
_MOST_NODES = 16
_MOST_REJECTIONS = 20


class JobProgress:
    """How far a job is, from what it tells.

    ``update`` takes a stage, its tasks done and in all, and rows; ``write`` takes lines.
    """

    def __init__(
        self,
        update: Callable[[str, int, int, int], None],
        write: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._update, self._write, self._clock = update, write, clock
        self._written = 0.0

    def hear(self, stage: Stage, what: str) -> None:
        """Take up how far a stage is, and what happened."""
        now = self._clock()
        self._update(stage.name, stage.done, stage.tasks, stage.rows)
        if what or now - self._written >= _LINE_SECONDS:
            self._written = now
            rows = f", {stage.rows:,} rows" if stage.rows else ""
            took = f" in {format_duration(stage.seconds)}" if stage.done else ""
            tasks = f"{stage.done:,}/{stage.tasks:,} tasks"
            self._write(f"{stage.name}: {what}{', ' if what else ''}{tasks}{rows}{took}")


def watch_job(job: Callable[..., JobSummary], **arguments: Any) -> JobSummary:
    """Does a job, and shows how far it is."""
    write = (lambda _: None) if sys.stderr.isatty() else say
    try:
        # Stdout is for results; what Ray and Axolotl print goes elsewhere.
        with redirect_stdout(sys.stderr), phase_progress() as update:
            return job(**arguments, heard=JobProgress(update, write).hear)
    except KeyboardInterrupt:
        say("finished work is kept: the same command continues, --restart starts again")
        raise


def print_summary(job: JobSummary, *, as_json: bool, next_command: str = "") -> None:
    """Print what a job has done: its stages, its nodes, its rows."""
    if as_json:
        print(json.dumps(job.to_json() | {"next_command": next_command}, indent=2))
        return
    stages = [
        (
            stage.name,
            f"{stage.tasks:,}",
            f"{stage.done_before:,}",
            f"{stage.retried:,}",
            format_duration(stage.seconds),
            format_duration(stage.task_seconds),
            format_bytes(stage.bytes_out),
        )
        for stage in job.stages
    ]
    header = ("stage", "tasks", "done before", "retried", "time", "task time", "written")
    show_matrix("", header, stages)
    nodes = sorted(job.nodes, key=lambda node: -node.peak_bytes)
    rest = f"… {len(nodes) - _MOST_NODES} more nodes with lower peaks; --json lists all"
    rows = [(node.name, f"{node.tasks:,}", format_bytes(node.peak_bytes)) for node in nodes]
    notes = [rest] if len(rows) > _MOST_NODES else []
    show_matrix("", ("node", "tasks", "peak of one process"), rows[:_MOST_NODES], notes)
    # Rows that an earlier run has prepared took no time now.
    earlier = sum(stage.done_before for stage in job.stages)
    rate = f" ({format_count(job.tokens / job.seconds)} tokens/s)" if not earlier else ""
    dropped = sum(job.dropped.values())
    reasons = "".join(f", {count:,} {reason}" for reason, count in job.dropped.items())
    pairs = [
        ("rows in", f"{job.rows_in:,} ({format_bytes(job.bytes_in)})"),
        ("dropped", f"{dropped:,} ({format_share(dropped / max(1, job.rows_in))}){reasons}"),
        (
            "duplicates",
            f"{job.duplicates:,} ({format_share(job.duplicates / max(1, job.rows_in))})",
        ),
        ("rows out", f"{job.rows_out:,} ({format_bytes(job.bytes_out)})"),
        ("tokens", f"{job.tokens:,}{rate}" if job.tokens else "– (rows are not tokenised)"),
        (
            "time",
            format_duration(job.seconds)
            + (f"; {count_words(earlier, 'task')} done by an earlier run" if earlier else ""),
        ),
        ("rejected", "\n".join(job.extra.get("rejections", ())[:_MOST_REJECTIONS])),
        ("output", ", ".join(job.outputs)),
        ("next", next_command),
    ]
    show_pairs("", [(label, value) for label, value in pairs if value])
