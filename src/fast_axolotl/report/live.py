"""The live view: read the record, summarise it and draw it, until the run ends.

The record is read anew each time. *Now* is the summary of its last five seconds, by the same
function as the summary of all of it, so the two cannot contradict each other. A long record takes
longer to read: it is drawn less often then, so that watching takes at most a tenth of one core.

A terminal is drawn over each time; without one it is one line at a time. Nothing of the terminal is
changed and no key is read: however the view ends there is nothing to put back, the last moment
stays to be read, and Ctrl-C and Ctrl-Z mean what they always do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.units import format_bytes, format_duration, format_share
from fast_axolotl.report.runs import figure_rows, shown_phases, verdict_badge, where_rows
from fast_axolotl.report.terminal import BADGES, label_grid

NOW_SECONDS = 5.0
"""How far back *now* reaches: long enough to be calm, short enough to follow a change."""
_NOW_SAMPLES = 6
"""Of the machine: those of the same time, while there is one per second."""
_INTERVAL_SECONDS = 1.0
_MOST_SHARE = 0.1
"""Of one core, at most this for reading and summing up."""
_LONG_WITHOUT_STEP = 10.0
"""Seconds without a step, and at least so many times a step, before it is worth a word."""
_MANY_STEPS = 5.0
_MOST_RANKS = 8
_LABEL_WIDTH = 18
_HOST_STALL = "host_stall_fraction"
_FIGURES = (
    *("stall_fraction", _HOST_STALL, "rows_per_second", "tokens_per_second", "step_p50_seconds"),
    *("step_p95_seconds", "mfu", "queue_depth", "cpu_cores", "disk_share"),
    *("read_bytes_per_second", "swap_in_bytes_per_second", "swap_out_bytes_per_second"),
    *("gpu_utilization", "gpu_memory_bytes"),
)
"""In their order; the wait of the CPU only where the stall is that of the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything that is drawn at one time."""

    title: str
    """What is watched: a folder, or a process."""
    record: RunRecord
    summary: RunSummary
    now: RunSummary
    """Of the last seconds of the record."""
    clock: float
    """Seconds since 1970."""
    log: Sequence[str] = ()
    """The last lines that the command printed."""
    ending: str = ""
    """Why there will be nothing newer."""
    last_step: tuple[int, float] | None = None
    """The newest step and when it ended; ``None`` before there is one."""


def take_moment(
    title: str, record: RunRecord, summarise: Callable[..., RunSummary], **known: Any
) -> Moment:
    """Sum up a record, and its last seconds; ``known`` is the rest of the moment."""
    ends = [
        (block.first_step + block.steps, rank.start.time + block.t)
        for rank in record.ranks.values()
        for block in rank.blocks
        if math.isfinite(block.t)
    ]
    since = max((end for _, end in ends), default=0.0) - NOW_SECONDS
    known["last_step"] = max(ends, default=None)
    newest = {
        node: replace(system, samples=system.samples[-_NOW_SAMPLES:])
        for node, system in record.systems.items()
    }
    now = summarise(replace(record, systems=newest), since=since)
    return Moment(title=title, record=record, summary=summarise(record), now=now, **known)


def lay_out(moment: Moment) -> Group:
    """What matters most comes first: a terminal that is too low cuts off the end."""
    verdict = moment.summary.verdict
    tone, badge = verdict_badge(verdict.kind, verdict.subtype)
    state = describe_state(moment)
    header = Text.assemble(
        ("fast-axolotl ", "bold cyan"),
        (moment.title, "bold"),
        "  ",
        " · ".join(_course(moment)),
        (" · ", "dim"),
        (state, "green" if state == "running" else "bold"),
    )
    so_far = "" if moment.ending else "so far "
    headline = Text.assemble(
        (f" {badge} ", BADGES[tone]), (f" {so_far}", "dim"), (verdict.headline, "bold")
    )
    rows = [(label, " · ".join(parts)) for label, parts in _figures(moment)]
    shown: list[RenderableType] = [header, headline, Text()]
    shown.append(label_grid(rows, "cyan", width=_LABEL_WIDTH))
    if verdict.action:
        shown.append(Text.assemble(("→ ", "cyan"), verdict.action))
    if moment.log:
        shown.append(Rule(style="dim"))
        shown += [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in moment.log]
    return Group(*shown)


def format_line(moment: Moment) -> str:
    """Everything in one line, for a file or a pipe."""
    verdict = moment.summary.verdict
    parts = [_course(moment)[0], verdict_badge(verdict.kind, verdict.subtype)[1]]
    state = describe_state(moment)
    parts += [state] if state != "running" else []
    parts += _course(moment)[1:]
    parts += [f"{label} {', '.join(texts)}" for label, texts in _figures(moment)]
    return "  ".join(parts)


def describe_state(moment: Moment) -> str:
    """What goes on, in a few words."""
    if moment.ending:
        return moment.ending
    ends = [rank.end for rank in moment.record.ranks.values()]
    if ends and None not in ends and len(ends) >= moment.summary.world_size:
        # The command may still save, or another run follow.
        reasons = {end.reason for end in ends if end is not None}
        return "training failed" if "exception" in reasons else "training has ended"
    step = moment.summary.step_p50_seconds or 0.0
    if moment.last_step is not None:
        quiet = moment.clock - moment.last_step[1]
        if quiet > max(_LONG_WITHOUT_STEP, _MANY_STEPS * step):
            return f"no step for {format_duration(quiet)}"
    return "running"


def _course(moment: Moment) -> list[str]:
    """How long, how far, with which loss, on how many ranks."""
    summary = moment.summary
    parts = [format_duration(summary.duration_seconds)]
    if moment.last_step is not None:
        parts.append(f"step {moment.last_step[0]:,}")
    losses = moment.record.find_losses()
    if losses:
        parts.append(f"loss {losses[-1].values['loss']:.4g}")
    if summary.world_size > 1:
        nodes = f" on {len(summary.nodes)} nodes" if len(summary.nodes) > 1 else ""
        parts.append(f"{len(moment.record.ranks)} of {summary.world_size} ranks{nodes}")
    return parts


def _figures(moment: Moment) -> list[tuple[str, list[str]]]:
    """A label and its parts; what is unknown is no row."""
    summary, now = moment.summary, moment.now
    when = "at the end" if moment.ending else "now"
    names = [name for name in _FIGURES if getattr(now, name) or getattr(summary, name)]
    names = [name for name in names if name != _HOST_STALL or summary.stall_source == "device"]
    rows: list[tuple[str, list[str]]] = []
    for label, latest, overall in figure_rows(names, (now, summary))[0]:
        # Quantiles, and what else has several parts, are those of the whole run.
        is_whole = latest == overall or " · " in overall
        parts = [overall] if is_whole else [f"{latest} {when}", f"{overall} overall"]
        rows.append((label, [part for part in parts if not part.startswith("–")]))
    if len(summary.ranks) > 1:
        # Those that stall most.
        ranks = sorted(summary.ranks, key=lambda one: -(one.stall_fraction or 0.0))[:_MOST_RANKS]
        stalls = [f"{one.rank}: {format_share(one.stall_fraction)}" for one in ranks]
        rows.insert(1, ("stall by rank", stalls))
    phases = [f"{name} {format_share(share)}" for name, share in shown_phases(now)]
    where = [f"{label}: {place} {share}" for label, place, share in where_rows(summary)[:2]]
    rows += [("step", phases), ("", where)]
    system = moment.record.systems.get(summary.node, moment.record.system)
    if system is not None and system.samples:
        # From the first sample on, not only in the steady phase.
        # Shared pages are counted less often; where they never were, all of them count.
        sizes = [one.working_set_bytes for one in system.samples]
        sizes = sizes if any(sizes) else [one.rss_bytes for one in system.samples]
        memory = [format_bytes(next((size for size in reversed(sizes) if size), None))]
        for name, before in (("working_set_peak_bytes", "peak"), ("limit_bytes", "limit")):
            if (size := getattr(summary, name)) is not None:
                memory.append(f"{before} {format_bytes(size)}")
        rows.append(("working set", memory))
        rows.append(("processes", [f"{system.samples[-1].processes:,}"]))
    return [row for row in rows if row[1]]


def follow(
    read: Callable[[], RunRecord],
    summarise: Callable[..., RunSummary],
    display: Display,
    *,
    title: str,
    ending: Callable[[RunRecord], str],
    read_log: Callable[[], Sequence[str]] = tuple,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show a record until its run ends, the time is up, or Ctrl-C; what ended it.

    ``ending`` tells in a few words why it is over once it is.
    """
    end = math.inf if seconds is None else clock() + seconds
    with display:
        try:
            while True:
                begin = clock()
                record = read()
                over = ending(record) or ("the time was up" if begin >= end else "")
                now, log = time.time(), read_log()
                display.show(take_moment(title, record, summarise, clock=now, log=log, ending=over))
                if over:
                    return over
                due = begin + max(_INTERVAL_SECONDS, (clock() - begin) / _MOST_SHARE)
                sleep(max(0.0, min(due, end) - clock()))
        except KeyboardInterrupt:
            return "Ctrl-C"


class Display:
    """A place of a terminal that is drawn over; anywhere else a line for each moment."""

    def __init__(self, file: IO[str]) -> None:
        self._console = Console(file=file, highlight=False, markup=False)
        self.is_screen = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Display:
        if self.is_screen:
            self._live.start()
            self._console.show_cursor()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, moment: Moment) -> None:
        """Draw it."""
        if self.is_screen:
            self._live.update(lay_out(moment), refresh=True)
        else:
            print(format_line(moment), file=self._console.file, flush=True)
