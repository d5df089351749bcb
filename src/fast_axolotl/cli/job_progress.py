"""What people see of a job: how far its stages are, its plan before, its summary after.

In a terminal a display on stderr is redrawn four times per second, and lines that others print
appear above it. Elsewhere a line is written when a stage begins, every 30 s, and when it ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from fast_axolotl.cli.job_record import JobRecord
from fast_axolotl.cli.options import say
from fast_axolotl.record.units import count_words, format_bytes, format_count, format_duration
from fast_axolotl.report.terminal import (
    StageBar,
    describe_left,
    show_matrix,
    show_pairs,
    stage_display,
)

if TYPE_CHECKING:
    from fast_axolotl.cluster.job import JobPlan, JobSummary
    from fast_axolotl.cluster.tasks import Event

_LINE_SECONDS = 30.0
_MOST_NODES = 16
_SUMMED = ("rows", "tokens", "bytes_in", "bytes_out")


@dataclass(slots=True)
class _Stage:
    """What was heard of one stage: sums, and the tasks that run now."""

    name: str
    begun: float
    total: int = 0
    done: int = 0
    done_before: int = 0
    retried: int = 0
    reason: str = ""
    sums: Counter[str] = field(default_factory=Counter)
    """Rows, tokens and bytes of all its tasks that are done."""
    tokens_now: int = 0
    """Tokens of the tasks that this run has done."""
    peak_bytes: int = 0
    running: set[str] = field(default_factory=set)
    started: float | None = None
    """When its first task of this run began."""
    seconds: float | None = None
    """Of a stage that has ended."""

    def describe(self, now: float, num_nodes: int) -> tuple[str, ...]:
        """What it has done so far, and who is at it."""
        until = now if self.seconds is None else self.begun + self.seconds
        seconds = until - (self.started or self.begun)
        sums, done_now = self.sums, self.done - self.done_before
        rate = self.tokens_now / seconds if seconds > 0 else 0.0
        work = {
            f"{sums['rows']:,} rows": sums["rows"],
            f"{format_bytes(sums['bytes_in'])} read": sums["bytes_in"],
            f"{format_bytes(sums['bytes_out'])} written": sums["bytes_out"],
            f"{sums['tokens']:,} tokens": sums["tokens"],
            f"{format_count(rate)} tokens/s": rate,
        }
        # As long as the first round of tasks runs, their rate is not known.
        is_steady = self.seconds is None and done_now >= max(1, len(self.running))
        who = {
            describe_left(seconds / max(1, done_now) * (self.total - self.done)): is_steady,
            f"{count_words(len(self.running), 'task')} running": self.seconds is None,
            f"{self.done_before:,} done before": self.done_before,
            count_words(num_nodes, "node"): num_nodes,
            f"{format_bytes(self.peak_bytes)} in one process": self.peak_bytes,
            f"{self.retried:,} retried (last: {self.reason})": self.retried,
        }
        return tuple(
            " · ".join(text for text, is_there in part.items() if is_there) for part in (work, who)
        )


class JobProgress:
    """How far a job is, from what it tells."""

    def __init__(
        self, title: str, *, out: IO[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._stages: dict[str, _Stage] = {}
        self._nodes: set[str] = set()
        self._out = out or sys.stderr
        self._live = stage_display(title, self._draw, self._out)
        self._written = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> JobProgress:
        # Stdout is for results; what Ray and Axolotl print goes elsewhere, as with the display.
        self._stack.enter_context(self._live or redirect_stdout(self._out))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._live is not None:
            # How far a job had come that failed stays on the screen.
            self._live.transient = kind is None
        for stage in self._stages.values():
            if stage.seconds is None:
                stage.seconds = self._clock() - stage.begun
                self._write(stage, "stopped at ")
        self._stack.close()

    def hear(self, event: Event) -> None:
        """Take up what happened."""
        now = self._clock()
        stage = self._stages.setdefault(event.stage, _Stage(event.stage, now))
        name = event.task.name if event.task is not None else ""
        if event.kind == "stage":
            stage.total += event.total
            stage.seconds = None
            self._write(stage, "starting, ")
        elif event.kind == "started":
            stage.running.add(name)
            stage.started = stage.started or now
        elif event.kind == "retried":
            stage.retried += 1
            stage.reason = event.reason
        else:
            answer = event.answer or {}
            stage.done += 1
            stage.sums.update({key: answer.get(key) or 0 for key in _SUMMED})
            if event.is_earlier:
                stage.done_before += 1
            else:
                stage.running.discard(name)
                stage.tokens_now += answer.get("tokens") or 0
                ran = answer.get("ran") or {}
                stage.peak_bytes = max(stage.peak_bytes, ran.get("peak_bytes") or 0)
                self._nodes.update([ran["node"]] if "node" in ran else [])
        if stage.done >= stage.total and stage.seconds is None:
            stage.seconds = now - stage.begun
            self._write(stage, "done, ")
        elif now - self._written >= _LINE_SECONDS:
            self._write(stage, "")

    def _draw(self) -> tuple[list[StageBar], list[str]]:
        """A bar for each stage, and what the last one does."""
        now = self._clock()
        stages = list(self._stages.values())
        bars: list[StageBar] = []
        for stage in stages:
            seconds = now - stage.begun if stage.seconds is None else stage.seconds
            words = (f"{stage.done:,}/{stage.total:,} tasks", format_duration(seconds))
            bars.append((stage.name, stage.done, stage.total, words))
        below = stages[-1].describe(now, len(self._nodes)) if stages else ("starting",)
        return bars, [line for line in below if line]

    def _write(self, stage: _Stage, word: str) -> None:
        """A plain line, where there is no display."""
        if self._live is not None:
            return
        now = self._clock()
        self._written = now
        tasks = f"{stage.done:,}/{stage.total:,} tasks"
        if stage.seconds is not None:
            tasks += f" in {format_duration(stage.seconds)}"
        described = stage.describe(now, len(self._nodes)) if stage.done else ()
        line = " · ".join([f"{stage.name}: {word}{tasks}", *filter(None, described)])
        print(f"fast-axolotl: {line}", file=self._out, flush=True)


def watch_job(title: str, job: Callable[..., JobSummary], **arguments: Any) -> JobSummary:
    """Does a job, and shows how far it is."""
    try:
        with JobProgress(title) as progress:
            return job(**arguments, heard=progress.hear)
    except KeyboardInterrupt:
        say("finished work is kept: the same command continues, --restart starts again")
        raise


def run_job(title: str, job: Callable[..., JobSummary], *, as_json: bool, **arguments: Any) -> None:
    """Does a job, shows how far it is, and prints what it did."""
    started = time.time()
    summary = watch_job(title, job, **arguments)
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
    else:
        summary_table(JobRecord(title=title, started=started, settings={}, summary=summary))


def summary_table(job: JobRecord) -> None:
    """Print what a job has done: its stages, its nodes, its rows."""
    show_matrix("", *job.stages())
    header, rows = job.nodes()
    rest = f"… {len(rows) - _MOST_NODES} more nodes with lower peaks; --json lists all"
    show_matrix("", header, rows[:_MOST_NODES], [rest] if len(rows) > _MOST_NODES else [])
    show_pairs("", job.pairs())


def plan_table(plan: JobPlan) -> None:
    """Print what a job would do."""
    notes = [
        f"{one.path} is first loaded completely on this machine: {one.whole}."
        for one in plan.datasets
        if one.whole is not None
    ]
    rows = [
        (one.path, one.split, f"{one.units:,}", format_bytes(one.num_bytes))
        for one in plan.datasets
    ]
    show_matrix("", ("dataset", "split", "units", "size"), rows, notes)
    between = plan.bytes_between
    stages = [(name, f"{n:,}", format_bytes(between.get(name))) for name, n in plan.stages.items()]
    show_matrix("", ("stage", "tasks", "written for the next stage"), stages)
    free = "unknown" if plan.disk_free is None else format_bytes(plan.disk_free)
    pairs = [
        ("rows", f"about {plan.rows:,}, estimated from the first rows"),
        ("tokens", f"about {plan.tokens:,}" if plan.tokens else "– (rows are not tokenised)"),
        ("output", "\n".join(plan.outputs)),
        ("output size", f"about {format_bytes(plan.bytes_out)}"),
        ("work folder", plan.work),
        ("disk", f"about {format_bytes(plan.disk_needed)} at most, {free} free"),
        ("memory here", f"about {format_bytes(plan.coordinator_bytes)} in addition to the tasks"),
    ]
    show_pairs("", pairs)
