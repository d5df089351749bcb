"""Make a document of recorded runs: verdict, time, figures, settings.

A figure that was not measured is no row; below its group stands the reason.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import IO, Any

from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.arithmetic import finite, ratio
from fast_axolotl.record.catalogue import FIGURES, GROUPS, LEDGER, STEP
from fast_axolotl.record.figures import VERDICTS
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_count,
    format_date,
    format_duration,
    format_seconds,
    format_share,
)
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
from fast_axolotl.report.terminal import print_document

_LEAST_PART = 0.0005
"""Share of the wall clock below which a part is not named: it would read 0.0 %."""
_ONE_SCREEN = (
    *("stall_fraction", "tokens_per_second", "samples_per_second", "step_p50_seconds"),
    *("step_p95_seconds", "mfu", "working_set_bytes", "working_set_peak_bytes", "limit_bytes"),
    *("limit_share", "first_step_seconds"),
)
_EXPECTED = (*_ONE_SCREEN[:4], "working_set_bytes", "first_step_seconds")
"""Of those: why another one is missing is not worth a line."""
LEAST_PHASE = 0.005
"""Of a step, to be shown."""
_WHERE = {"loading": "workers", "between": "between loops"}
"""Lines that lie in no step of the training, and what they are called."""
_NODE_FIGURES = (
    *("working_set_bytes", "limit_share", "cpu_cores", "swap_in_bytes_per_second"),
    *("psi_memory_full", "psi_io_full", "gpu_utilization", "gpu_clock_mhz"),
)
_RANK_COLUMNS = ("rank", "stall", "CPU-side wait", "steps", "step p50", "samples/s", "tokens/s", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One run of a report."""

    name: str
    """As it is called in the report: the arm's name, or the folder's."""
    record: RunRecord
    summary: RunSummary
    is_running: bool = False


def show_short_summary(run: ReportRun, *, file: IO[str] | None = None) -> None:
    """Print one screen to stdout, or a file: verdict, why, advice, and what matters most."""
    summary = run.summary
    pairs = figure_rows(_ONE_SCREEN, [summary])[0]
    reasons = figure_rows(_EXPECTED, [summary])[1]
    if clock := divide_clock(summary):
        parts = (f"{LEDGER[part]} {format_share(share)}" for part, share in clock.items())
        pairs.append(("wall clock", " · ".join(parts)))
    if summary.phases:
        phases = (f"{name} {format_share(share)}" for name, share in shown_phases(summary))
        pairs.append(("step", " · ".join(phases)))
    pairs += [("note", note) for note in summary.notes]
    blocks: list[Block] = [*verdict_blocks([run]), Table(rows=pairs), Bullets(reasons, True)]
    print_document(Document(title="", blocks=blocks), file=file)
    # Not folded by rich: a terminal wraps it, and it can still be copied whole.
    print(f"\nEvery figure: fast-axolotl show --all {shlex.quote(run.record.path)}", file=file)


def run_document(run: ReportRun) -> Document:
    """Every figure of one run, for the terminal."""
    return Document(title="", blocks=[*verdict_blocks([run]), *run_blocks([run])])


def verdict_blocks(runs: Sequence[ReportRun], *, is_named: bool = False) -> list[Block]:
    """What must be told before any verdict, then what bounds each run, why, and what to do.

    ``is_named``: a run has its name in front even where it is the only one.
    """
    is_single = len(runs) == 1 and not is_named
    blocks: list[Block] = []
    cards = []
    for run in runs:
        verdict, name = run.summary.verdict, "" if is_single else run.name
        alarms = find_alarms(run.summary, run.record, is_running=run.is_running)
        blocks += [Paragraph(f"{name}: {text}" if name else text, "alarm") for text in alarms]
        cards.append(
            Card(
                name=name,
                badges=[verdict_badge(verdict.kind, verdict.subtype)],
                headline=verdict.headline,
                evidence=verdict.evidence,
                action=verdict.action,
            )
        )
    if is_single:
        return [*blocks, *cards]
    return [*blocks, Section(title="Verdicts", blocks=cards, layout="cards")] if cards else blocks


def run_blocks(runs: Sequence[ReportRun], charts: Sequence[Block] = ()) -> list[Block]:
    """Where the time went, charts where there are any, every figure, and the settings."""
    if not runs:
        return []
    blocks: list[Block] = [*_clock_section(runs), *step_section(runs), *charts]
    blocks += _course_section(runs)
    figures: list[Section] = []
    for title, names in GROUPS.items():
        group, last = figure_group(title, names, runs), figures[-1:]
        if last and len(group.blocks) == 1 and group.blocks == last[0].blocks:
            # Nothing is known of either, for the same reason.
            group = replace(group, title=f"{figures.pop().title} · {title}")
        figures.append(group)
    is_single = len(runs) == 1
    blocks.append(Section(title="All figures", blocks=figures, is_open=is_single, layout="groups"))
    tables = [table for run in runs for table in _member_tables(run, is_named=not is_single)]
    if tables:
        blocks.append(Section(title="Nodes and ranks", blocks=tables, is_open=False))
    for title in ("settings", "environment"):
        values: list[dict[str, Any]] = [getattr(run.summary, title) for run in runs]
        rows = [
            (key, *(describe_value(one[key], key) if key in one else "–" for one in values))
            for key in dict.fromkeys(key for one in values for key in one)
        ]
        table = _side_by_side(rows, runs)
        if all(len(set(row[1:])) == 1 for row in rows):
            # One column where all are the same.
            table = Table(rows=[row[:2] for row in rows])
        if rows:
            blocks.append(Section(title=title.title(), blocks=[table]))
    return blocks


def _side_by_side(rows: Sequence[Row], runs: Sequence[ReportRun]) -> Table:
    """Labels, and a column for each run; the only one of a single run has no header."""
    return Table(header=("", *(run.name for run in runs)) if len(runs) > 1 else (), rows=rows)


def _share_cell(share: float | None, whole: float | None) -> str | Cell:
    """A share, and how long that is where it is known how long the whole is."""
    if share is None:
        return "–"
    length = "" if whole is None else f" · {format_seconds(share * whole)}"
    return Cell(text=f"{format_share(share)}{length}", share=share)


def _clock_section(runs: Sequence[ReportRun]) -> list[Block]:
    """Where the time of the runs went."""
    clocks = [(divide_clock(run.summary), sum(run.summary.ledger.values())) for run in runs]
    rows: list[Row] = []
    for part, label in LEDGER.items():
        if any(part in clock for clock, _ in clocks):
            shares = ((clock.get(part, 0.0) if clock else None, whole) for clock, whole in clocks)
            rows.append((label, *(_share_cell(share, whole) for share, whole in shares)))
    text = Paragraph("Each second of a run belongs to exactly one part.", "muted")
    return [Section(title="Wall clock", blocks=[text, _side_by_side(rows, runs)])] if rows else []


def shown_phases(summary: RunSummary) -> list[tuple[str, float]]:
    """The phases of a step that are worth a line."""
    return [(name, share) for name, share in summary.phases.items() if share >= LEAST_PHASE]


def phase_rows(phases: Sequence[Mapping[str, float]], means: Sequence[float | None]) -> list[Row]:
    """The phases of a step as its branches, for each run; ``means`` is how long its step takes."""
    names = [name for name in STEP if any(one.get(name, 0.0) >= LEAST_PHASE for one in phases)]
    rows: list[Row] = []
    for name in names:
        cells = (_share_cell(one.get(name), mean) for one, mean in zip(phases, means, strict=True))
        rows.append((f"{'└─' if name == names[-1] else '├─'} {name}", *cells))
    return rows


def where_rows(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Phase, line of code and its share of the phase, where most of the time was spent."""
    large = {name for name, _ in shown_phases(summary)} | {"loading"}
    if (ratio(summary.ledger.get("between"), summary.duration_seconds) or 0.0) >= LEAST_PHASE:
        large.add("between")
    return [
        (
            _WHERE.get(line.phase, line.phase),
            line.place + (f" → {line.call}" if line.call else ""),
            format_share(line.share),
        )
        for line in summary.where
        if line.phase in large
    ]


def step_section(runs: Sequence[ReportRun]) -> list[Block]:
    """A step of each run as a tree, and the lines of code that its parts were spent in."""
    phases = [run.summary.phases for run in runs]
    if not any(phases):
        return []
    means = [ratio(1.0, run.summary.steps_per_second) for run in runs]
    pairs = zip(phases, means, strict=True)
    whole = ("step", *(_share_cell(1.0 if own else None, mean) for own, mean in pairs))
    blocks: list[Block] = [_side_by_side([whole, *phase_rows(phases, means)], runs)]
    for run in runs:
        if where := where_rows(run.summary):
            of_run = f"line of code, {run.name}" if len(runs) > 1 else "line of code"
            blocks.append(Table(header=("phase", of_run, "share of the phase"), rows=where))
    return [Section(title="Where the time of a step goes", blocks=blocks)]


def _course_section(runs: Sequence[ReportRun]) -> list[Block]:
    """What was run, when, how it ended, and how much of it was measured."""
    courses = []
    for run in runs:
        one = run.summary
        ranks = ""
        if one.world_size > 1 and one.deciding_rank is not None:
            ranks = f" on rank {one.deciding_rank}, the slowest of {one.world_size} to get data"
        courses.append(
            {
                "folder": one.run_dir,
                "GPU": describe_gpus(run.record),
                "started": format_date(one.started),
                "ended": f"{'still running' if run.is_running else one.end_reason}"
                f"{f': {one.error}' if one.error else ''}, after "
                f"{format_seconds(one.duration_seconds)}",
                "measured": f"{count_words(one.steps, 'step')}, {count_words(one.fetches, 'fetch')}"
                f" in {format_seconds(one.measured_seconds)}{ranks}; "
                f"{count_words(one.warmup_steps, 'step')} of warm-up not counted",
                "replaced": ", ".join(one.replacements or ()),
                "FLOPs": one.flops_convention,
                "notes": " ".join(f"{note}." for note in one.notes),
            }
        )
    rows = [
        (key, *(course[key] or "–" for course in courses))
        for key in courses[0]
        if any(course[key] for course in courses)
    ]
    title = "The run" if len(runs) == 1 else "The runs"
    return [Section(title=title, blocks=[_side_by_side(rows, runs)])]


def figure_group(title: str, names: Sequence[str], runs: Sequence[ReportRun]) -> Section:
    """Figures run by run, and why some are missing."""
    rows, reasons = figure_rows(names, [run.summary for run in runs])
    blocks: list[Block] = [_side_by_side(rows, runs)] if rows else []
    return Section(title=title, blocks=[*blocks, Bullets(reasons, True)])


def figure_rows(
    names: Sequence[str], summaries: Sequence[RunSummary]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Figures run by run, and why some are missing: one line for all that share the reason."""
    rows: list[tuple[str, ...]] = []
    for head, own in groupby(names, key=lambda name: FIGURES[name].label.partition(", ")[0]):
        line = list(own)
        label = head if len(line) > 1 else FIGURES[line[0]].label
        texts = [_format_figures(summary, line) for summary in summaries]
        if any(texts):
            rows.append((label, *(text or "–" for text in texts)))
    missing: dict[str, dict[str, None]] = {}
    for name in names:
        for summary in summaries:
            if read_figure(summary, name) is None:
                reason = summary.reasons.get(name) or FIGURES[name].missing
                missing.setdefault(reason, {})[FIGURES[name].label] = None
    is_nothing = not rows and len(missing) == 1
    reasons = [
        reason if is_nothing else f"{'; '.join(labels)}: {reason}"
        for reason, labels in missing.items()
    ]
    return rows, reasons


def _format_figures(summary: RunSummary, names: Sequence[str]) -> str:
    """Values that share a line, each behind what sets it apart; empty where there is none."""
    texts = []
    for name in names:
        value = read_figure(summary, name)
        if value is not None:
            part = FIGURES[name].label.partition(", ")[2] if len(names) > 1 else ""
            texts.append(f"{part} {FIGURES[name].format(value)}".strip())
    return " · ".join(texts)


def _member_tables(run: ReportRun, *, is_named: bool) -> Iterator[Section]:
    """The nodes of a run, and its ranks, where there are several."""
    summary, whose = run.summary, f" of {run.name}" if is_named else ""
    if len(summary.nodes) > 1:
        rows = []
        for node in summary.nodes:
            ranks = ", ".join(map(str, node["ranks"])) or "–"
            texts = [FIGURES[name].format(node[name]) for name in _NODE_FIGURES]
            rows.append((node["node"], ranks, *texts))
        header = ("node", "ranks", *(FIGURES[name].label for name in _NODE_FIGURES))
        yield Section(title=f"Nodes{whose}", blocks=[Table(header=header, rows=rows)])
    if len(summary.ranks) > 1:
        lines = [
            (
                str(rank.rank),
                format_share(rank.stall_fraction),
                format_share(rank.host_stall_fraction),
                f"{rank.steps:,}",
                format_seconds(rank.step_p50_seconds),
                format_count(rank.samples_per_second),
                format_count(rank.tokens_per_second),
                "" if rank.is_finished else "unfinished",
            )
            for rank in summary.ranks
        ]
        yield Section(title=f"Ranks{whose}", blocks=[Table(header=_RANK_COLUMNS, rows=lines)])


def read_figure(summary: RunSummary, name: str) -> Any:
    """A field of a summary; ``None`` for a number that is none."""
    value = getattr(summary, name)
    return finite(value) if isinstance(value, float) else value


def describe_value(value: Any, name: str = "") -> str:
    """A setting, whatever it is, in one line; bytes by its name."""
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {describe_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(describe_value, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return format_bytes(value) if name.endswith("_bytes") else f"{value:,}"
    return str(value)


def verdict_badge(kind: str, subtype: str) -> tuple[Tone, str]:
    """``Data-bound (burst)``, and its tone."""
    title, tone = VERDICTS.get(kind, (kind, "plain"))
    return tone, f"{title} ({subtype})" if subtype else title


def divide_clock(summary: RunSummary) -> dict[str, float]:
    """The parts of the wall clock that took any of it, and their shares."""
    whole = sum(summary.ledger.values())
    least = _LEAST_PART * whole
    return {part: own / whole for part, own in summary.ledger.items() if own >= least > 0}


def describe_gpus(record: RunRecord) -> str:
    """``8 × NVIDIA H200``; empty where there is none, or none was recorded."""
    names = [name for system in record.systems.values() for name in system.start.gpu_names]
    if not names:
        models = [rank.models[-1] for rank in record.ranks.values() if rank.models]
        names = [
            one.device_name for one in models if one.device_name for _ in range(one.num_devices)
        ]
    counts = Counter(names)
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in counts.items())


def find_alarms(summary: RunSummary, record: RunRecord, *, is_running: bool = False) -> list[str]:
    """What must be told before any verdict: losses that are no numbers, a run that ended badly.

    One sentence each; none for a run that ended well. A record that goes on looks like one cut off.
    """
    alarms = []
    logs = record.find_losses()
    wrong = [line for line in logs if not math.isfinite(line.values["loss"])]
    if wrong:
        alarms.append(
            f"{len(wrong):,} of {len(logs):,} losses are NaN or infinite, the first at step "
            f"{wrong[0].step:,}."
        )
    after = format_duration(summary.duration_seconds)
    error = f" ({' '.join(summary.error.split())})" if summary.error else ""
    ends = {
        "exception": f"An error ended the run after {after}{error}",
        "interrupted": f"The run was interrupted after {after}{error}",
        "cut off": f"The run stopped without a final record after {after}, or is still running",
    }
    if summary.end_reason in ends and not is_running:
        alarms.append(f"{ends[summary.end_reason]}: the figures cover what was recorded.")
    return alarms
