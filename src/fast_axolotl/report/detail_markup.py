"""The lower part of a page: every figure, the runs, settings and environment, and what is what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fast_axolotl.record import RunSummary
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.content import Report, ReportRun, describe_drawn
from fast_axolotl.report.figures import GROUPS, Group, Row, format_row, read_figure
from fast_axolotl.report.markup import Safe, join, named, tag
from fast_axolotl.report.values import (
    count_words,
    describe_value,
    format_date,
    format_length,
    format_value,
)

__all__ = ["detail_sections"]

_DEFINITIONS = (
    (
        "stall",
        "Waiting for data ÷ time, sums over the steady phase. Of the device where CUDA events "
        "told, else of the host. The host's alone is too high on a GPU whose work is queued ahead.",
    ),
    (
        "steady phase",
        "Warm-up is left out, and evaluation, checkpoints and logging are taken out of the time.",
    ),
    (
        "working set",
        "Proportional set size, summed over the process tree: a page that four workers share "
        "counts once.",
    ),
    (
        "tokens",
        "Real tokens are those of the attention mask; trainable ones have a label; padded ones "
        "are all positions.",
    ),
    ("MFU", "FLOPs that the model needs ÷ the dense peak of the device. None if it is unknown."),
    (
        "interval",
        "Runs are repeated in the order A B B A …; the interval is that of a t-test on the "
        "logarithms of the pairs' ratios, at 95 %.",
    ),
)


def detail_sections(report: Report) -> list[Safe]:
    """Everything below the charts."""
    found = [_figures(report), _ranks(report.runs)]
    if report.protocol is not None:
        found += [_dedupe(report.protocol.dedupe), _protocol_runs(report.protocol)]
    found += [_courses(report), _settings(report), _environment(report), _definitions()]
    return [section for section in found if section is not None]


def _section(name: str, title: str, *children: Safe | None, is_open: bool = True) -> Safe:
    heading = tag("summary", tag("h2", title, id=name))
    kept = [child for child in children if child is not None]
    return tag("details", heading, kept, class_="section", open=is_open)


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], label: str) -> Safe:
    """A name and its values, run by run."""
    top = tag("tr", [tag("th", named(name), scope="col") for name in head])
    body = [
        tag("tr", tag("th", named(name), scope="row"), [tag("td", value) for value in values])
        for name, values in rows
    ]
    table = tag("table", tag("thead", top) if any(head) else None, tag("tbody", body))
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def _figures(report: Report) -> Safe | None:
    if not report.runs:
        return None
    groups = [_group(group, report.runs) for group in GROUPS]
    is_open = len(report.runs) == 1
    whose = describe_drawn(report)
    words = tag("p", whose, class_="small") if whose else None
    grid = tag("div", groups, class_="groups")
    return _section("figures", "All figures", words, grid, is_open=is_open)


def _group(group: Group, runs: Sequence[ReportRun]) -> Safe:
    rows = []
    for row in group.rows:
        values = [format_row(run.summary, row) for run in runs]
        if any(value != "–" for value in values):
            rows.append((_label(row), values))
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    reasons = [tag("li", f"{names}: {reason}") for reason, names in _reasons(group, runs)]
    return tag(
        "div",
        tag("h3", group.title),
        _table(head, rows, group.title) if rows else None,
        tag("ul", reasons, class_="reasons") if reasons else None,
        class_="group",
    )


def _label(row: Row) -> Safe:
    return join(row.label, tag("small", row.note) if row.note else None)


def _reasons(group: Group, runs: Sequence[ReportRun]) -> list[tuple[str, str]]:
    """Why figures are missing, one line for all that share the reason."""
    told: dict[str, dict[str, None]] = {}
    for row in group.rows:
        for name in row.fields:
            for run in runs:
                if read_figure(run.summary, name) is None:
                    reason = run.summary.reasons.get(name, "it was not recorded")
                    told.setdefault(reason, {})[row.label] = None
    is_all = len(told) == 1 and all(
        read_figure(run.summary, name) is None
        for row in group.rows
        for name in row.fields
        for run in runs
    )
    return [(reason, "All" if is_all else ", ".join(names)) for reason, names in told.items()]


def _ranks(runs: Sequence[ReportRun]) -> Safe | None:
    several = [run for run in runs if len(run.summary.ranks) > 1]
    if not several:
        return None
    tables = []
    head = ("rank", "stall", "host wait", "steps", "step p50", "samples/s", "tokens/s", "")
    for run in several:
        rows = [
            (
                str(rank.rank),
                (
                    format_value(rank.stall_fraction, "share"),
                    format_value(rank.host_stall_fraction, "share"),
                    f"{rank.steps:,}",
                    format_value(rank.step_p50_seconds, "s"),
                    format_value(rank.samples_per_second, ""),
                    format_value(rank.tokens_per_second, ""),
                    "" if rank.is_finished else "unfinished",
                ),
            )
            for rank in run.summary.ranks
        ]
        if len(runs) > 1:
            tables.append(tag("h3", named(run.name)))
        tables.append(_table(head, rows, f"Ranks of {run.name}"))
    return _section("ranks", "Rank by rank", *tables, is_open=False)


def _dedupe(found: Mapping[str, Any]) -> Safe | None:
    if not found:
        return None
    sentence = tag("p", str(found.get("sentence", "")))
    rows = [
        (name.replace("_", " "), [describe_value(value)])
        for name, value in found.items()
        if name not in ("sentence", "log_tail") and value not in (None, "", [], {})
    ]
    log = found.get("log_tail")
    return _section(
        "dedupe",
        "Dedupe on its own",
        sentence,
        _table((), rows, "Dedupe"),
        tag("pre", str(log), tabindex="0") if log else None,
    )


def _protocol_runs(protocol: ProtocolResult) -> Safe:
    head = ("run", "arm", "pair", "state", "took", "page cache before")
    rows = []
    logs: list[Safe] = []
    for arm in protocol.arms:
        for run in arm.runs:
            state = run.status if run.exit_code in (None, 0) else f"{run.status} ({run.exit_code})"
            took = "–" if run.seconds is None else format_length(run.seconds)
            pair = "warm-up" if run.pair < 0 else str(run.pair + 1)
            rows.append((run.folder, (arm.name, pair, state, took, run.page_cache or "–")))
            if run.log_tail:
                logs.append(tag("h3", f"The end of the log of {run.folder}"))
                logs.append(tag("pre", run.log_tail, tabindex="0"))
    rows.sort(key=lambda row: _run_number(row[0]))
    commands = [(arm.name, [" ".join(arm.command)]) for arm in protocol.arms]
    return _section(
        "runs",
        "Runs of the protocol",
        _table((), commands, "Commands"),
        tag("p", f"Order: {', '.join(protocol.order)}." if protocol.order else "No run was made."),
        _table(head, rows, "Runs"),
        *logs,
        is_open=bool(logs),
    )


def _run_number(folder: str) -> tuple[int, str]:
    """Of ``runs/07-baseline``; a folder without a number comes first."""
    number = folder.rpartition("/")[2].partition("-")[0]
    return (int(number) if number.isdecimal() else -1), folder


def _courses(report: Report) -> Safe | None:
    if not report.runs:
        return None
    summaries = [run.summary for run in report.runs]
    rows: list[tuple[str, Sequence[str]]] = [
        ("folder", [one.run_dir for one in summaries]),
        ("started", [format_date(one.started) for one in summaries]),
        ("ended", [_ending(one) for one in summaries]),
        ("ranks", [str(one.world_size) for one in summaries]),
        ("measured", [_measured(one) for one in summaries]),
        ("spans taken out", [_spans(one) for one in summaries]),
        ("FLOPs", [one.flops_convention or "–" for one in summaries]),
        ("notes", [" ".join(f"{note}." for note in one.notes) or "–" for one in summaries]),
    ]
    kept = [row for row in rows if any(value != "–" for value in row[1])]
    head = ["", *(run.name for run in report.runs)] if len(report.runs) > 1 else []
    title = "The runs with charts" if len(report.runs) > 1 else "The run"
    return _section("course", title, _table(head, kept, title), is_open=len(report.runs) == 1)


def _ending(one: RunSummary) -> str:
    error = f": {one.error}" if one.error else ""
    return f"{one.end_reason}{error}, after {format_length(one.duration_seconds)}"


def _measured(one: RunSummary) -> str:
    return (
        f"{count_words(one.steps, 'step')}, {count_words(one.fetches, 'fetch')} in "
        f"{format_length(one.measured_seconds)}; "
        f"{count_words(one.warmup_steps, 'step')} of warm-up left out"
    )


def _spans(one: RunSummary) -> str:
    spans = [f"{name} {format_length(seconds)}" for name, seconds in one.span_seconds.items()]
    return " · ".join(spans) or "–"


def _settings(report: Report) -> Safe | None:
    return _by_name("settings", "Settings", report, [run.summary.settings for run in report.runs])


def _environment(report: Report) -> Safe | None:
    values = [run.summary.environment for run in report.runs]
    if report.protocol is not None and not any(values):
        values = [report.protocol.environment] if report.protocol.environment else []
    return _by_name("environment", "Environment", report, values)


def _by_name(
    name: str, title: str, report: Report, values: Sequence[Mapping[str, Any]]
) -> Safe | None:
    """One column if all agree, else one for each run."""
    names = list(dict.fromkeys(key for one in values for key in one))
    if not names:
        return None
    rows = [
        (key, [describe_value(one[key]) if key in one else "–" for one in values]) for key in names
    ]
    if all(len(set(shown)) == 1 for _, shown in rows):
        return _section(name, title, _table((), [(k, shown[:1]) for k, shown in rows], title))
    head = ["", *(run.name for run in report.runs)]
    return _section(name, title, _table(head, rows, title))


def _definitions() -> Safe:
    items = [(tag("dt", name), tag("dd", text)) for name, text in _DEFINITIONS]
    body = tag("dl", [part for pair in items for part in pair], class_="definitions")
    return _section("definitions", "What the words mean", body, is_open=False)
