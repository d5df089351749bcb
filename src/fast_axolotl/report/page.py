"""A report as one HTML file: no request to anywhere, everything it shows is inside.

``assets/report.html`` is the page; here is what it is filled with: texts and tables, the data and
the figures as JSON, and Plotly, packed. The browser unpacks it (4.9 MB become 1.9 MB in the file)
and draws. A policy in the head of the page forbids it every connection.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import import_module
from itertools import accumulate, cycle
from typing import Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.catalogue import FIGURES, LEDGER
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.protocol_result import Cell, ProtocolResult
from fast_axolotl.record.units import count_words, format_date, format_duration, format_value
from fast_axolotl.report.charts import make_charts
from fast_axolotl.report.content import (
    VERDICTS,
    Report,
    ReportRun,
    counted_runs,
    describe_drawn,
    describe_gpus,
    describe_progress,
    describe_replacements,
    describe_run,
    divide_clock,
    find_alarms,
    no_counted_run,
    shown_run,
    verdict_title,
)
from fast_axolotl.report.figures import (
    GROUPS,
    Row,
    describe_value,
    format_row,
    member_tables,
    missing_reason,
    read_figure,
)
from fast_axolotl.report.matrix import compare_plainly, describe_change, measured_rows
from fast_axolotl.report.plot import Chart, Curves, plain_name
from fast_axolotl.report.series import MOST_POINTS, keep_extremes, read_series, steps_together

GENERATOR = "fast-axolotl report"
"""What the page's head says of who made it."""

MOST_RUNS = 6
"""Runs with charts in one page."""

COLOURS = {
    "page": ("#f6f6f3", "#14171a"),
    "card": ("#ffffff", "#1b1f24"),
    "ink": ("#1d2226", "#e6e8ea"),
    "muted": ("#59626b", "#a3adb7"),
    "line": ("#dcdeda", "#323840"),
    "grid": ("#ecedea", "#292f36"),
    "accent": ("#a13358", "#f29bb5"),
    "good": ("#1a6b42", "#74d3a0"),
    "good-wash": ("#e4f2ea", "#17301f"),
    "bad": ("#ab231c", "#ff938a"),
    "bad-wash": ("#fbe9e7", "#3a1d1b"),
    "warn": ("#7d5200", "#e8bb6b"),
    "warn-wash": ("#faf0dc", "#342914"),
    "plain-wash": ("#ecedea", "#282d33"),
    "step": ("#3a6bb0", "#86b2f0"),
    "wait": ("#c94f2a", "#ff9d73"),
    "host": ("#7b838c", "#8f99a4"),
    "pss": ("#237374", "#5cc8c2"),
    "anon": ("#7454ad", "#b79cf0"),
    "hwm": ("#93690d", "#d9b04f"),
    "limit": ("#ab231c", "#ff938a"),
    "calls": ("#7690b8", "#6d8aab"),
}
"""Role to its colour on a light and on a dark page. Text and what carries meaning has a contrast
of 4.5 or more against the page and its cards, lines of charts 3 or more (WCAG 2.1, AA)."""

_MOST_DATA_BYTES = 900_000
_LEAST_POINTS = 100
_MOST_LOSSES = 200
_MOST_LARGE = 320
"""Characters of an answer in large letters."""
_SHARED = 5
"""Cells of the matrix with the same reason from which on it is told once for all."""

_OUTCOME_TONES = {"better": "good", "worse": "bad", "changed": "warn"}

_TILES = (
    ("stall_fraction", "waiting for data"),
    ("tokens_per_second", "tokens, without padding"),
    ("rows_per_second", "reader"),
    ("step_p50_seconds", "step, median"),
    ("mfu", "MFU"),
    ("working_set_bytes", "working set"),
)

_ROLES = ("step", "step", "anon", "wait", "pss", "hwm", "good", "accent", "bad", "calls", "host")
_PARTS = {part: (role, LEDGER[part]) for part, role in zip(LEDGER, _ROLES, strict=True)}
"""How each part of a run's time is drawn: the role of its colour, and its label."""

_ONE_EACH = (
    "One run each: a difference may be noise. fast-axolotl protocol repeats the runs and computes "
    "intervals."
)
_READING = (
    "A ratio is the value of a variant divided by that of the baseline: the geometric mean over "
    "pairs of runs, with its 95 % interval. If the interval includes 1, there is no clear change."
)

TableRow = tuple[str, Sequence[str], str]
"""A label, its values run by run, and what it is in a few words."""


def render_report(report: Report) -> str:
    """The page."""
    template, library = _load_assets()
    # Fewer points where the data would grow beyond its share of the page.
    points = MOST_POINTS
    data = report_data(report, most_points=points)
    while len(embedded := _script_json(data)) > _MOST_DATA_BYTES and points > _LEAST_POINTS:
        points //= 2
        data = report_data(report, most_points=points)
    charts = make_charts(
        [
            Curves(place=place, name=run.name, series=own["series"], summary=run.summary)
            for place, (run, own) in enumerate(zip(report.runs, data["runs"], strict=False))
        ]
    )
    protocol, matrix, tables = report.protocol, _matrix(report), _tables(report)
    clock = _clock([(run.name, run.summary.ledger) for run in report.runs], _PARTS)
    subtitle = [format_date(report.made)]
    about = protocol or (report.runs[0].summary if report.runs else None)
    if about is not None:
        seconds = about.seconds if isinstance(about, ProtocolResult) else about.duration_seconds
        machine = [about.environment.get(name) for name in ("cpu", "cpu_model", "gpu", "os")]
        subtitle = [format_date(about.started), format_duration(seconds)]
        subtitle += dict.fromkeys(filter(None, (describe_gpus(one.record) for one in report.runs)))
        subtitle += [value for value in machine if isinstance(value, str) and value]
    places = {
        "verdict": ("Verdict", True),
        "matrix": ("Comparison", matrix),
        "clock": ("Wall clock", clock),
        "charts": ("Charts", charts),
        "figures": ("All figures", report.runs),
        "runs": ("Runs", protocol),
        **{one["name"]: (one["title"], True) for one in tables if one["name"] != "course"},
        "definitions": ("Glossary", True),
    }
    page: str = template.render(
        report=report,
        protocol=protocol,
        made=format_date(report.made),
        subtitle=" · ".join(subtitle),
        links=[(name, title) for name, (title, is_there) in places.items() if is_there],
        **(_run_parts(report.runs) if protocol is None else _protocol_parts(report, protocol)),
        clock=clock,
        matrix=matrix,
        charts=charts,
        drawn=describe_drawn(report),
        run_names=["", *(run.name for run in report.runs)] if len(report.runs) > 1 else [],
        groups=[_group(*group, report.runs) for group in GROUPS.items()] if report.runs else [],
        members=[
            (title, run.name, columns, [(name, values, "") for name, *values in rows])
            for run in report.runs
            for title, columns, rows in member_tables(run.summary)
        ],
        tables=tables,
        data=embedded,
        figures=_script_json(to_plain(_figures(charts))),
        library=library,
    )
    # White space between inline elements would show.
    return re.sub(r">\s+<", "><", page.strip()) + "\n"


def render_page(
    head: Report,
    *,
    subtitle: str,
    headline: str,
    action: str,
    badge: tuple[str, str],
    evidence: Sequence[str] = (),
    tiles: Sequence[tuple[str, str]],
    ledger: Mapping[str, float] | None = None,
    charts: Sequence[Chart] = (),
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]],
    data: Any,
) -> str:
    """The page of what is no training: an answer, where its time went, charts and tables."""
    template, library = _load_assets(has_charts=bool(charts))
    roles = cycle(dict.fromkeys(_ROLES))
    looks = {part: (next(roles), part) for part in ledger or ()}
    clock = _clock([(head.title, ledger)], looks) if ledger else None
    shown: list[dict[str, Any]] = [
        {"name": title.lower(), "title": title, "head": header, "is_open": True}
        | {"rows": [(label, values, "") for label, *values in rows]}
        for title, (header, rows) in tables.items()
    ]
    places = {"clock": ("Wall clock", clock), "charts": ("Charts", charts)}
    links = [(name, title) for name, (title, is_there) in places.items() if is_there]
    page: str = template.render(
        report=head,
        made=format_date(head.made),
        subtitle=subtitle,
        links=links + [(one["name"], one["title"]) for one in shown],
        answer={"headline": headline, "action": action, "tone": badge[0], "evidence": evidence}
        | {"badges": [badge]},
        tiles=tiles,
        clock=clock,
        charts=charts,
        tables=shown,
        data=_script_json(data),
        figures=_script_json(to_plain(_figures(charts))),
        library=library,
        **dict.fromkeys(("protocol", "matrix", "groups", "members", "drawn"), ""),
    )
    return re.sub(r">\s+<", "><", page.strip()) + "\n"


def _figures(charts: Sequence[Chart]) -> dict[str, Any]:
    return {
        f"{chart.name}-{number}": panel.figure
        for chart in charts
        for number, panel in enumerate(chart.panels)
        if panel.figure is not None
    }


def report_data(report: Report, *, most_points: int = MOST_POINTS) -> dict[str, Any]:
    """What the page embeds, draws and offers to download."""
    protocol = None
    if report.protocol is not None:
        protocol = to_plain(report.protocol)
        for arm in protocol["arms"]:
            for plain in arm["runs"]:
                losses = plain["losses"]
                plain["losses"] = [losses[row] for row in keep_extremes([losses], _MOST_LOSSES)]
    shown = report.runs[:MOST_RUNS]
    pairs = [(run.record, run.summary) for run in shown]
    together = steps_together(pairs, most_points=most_points)
    runs = []
    for run, steps in zip(shown, together, strict=True):
        series = read_series(run.record, run.summary, most_points=most_points, together=steps)
        runs.append({"name": run.name, "summary": run.summary, "series": series})
    head = {"title": report.title, "made": report.made, "version": report.version}
    data: dict[str, Any] = to_plain({**head, "protocol": protocol, "runs": runs})
    return data


def _run_parts(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """What bounds a run, why, and what to do; of several, a card each."""
    cards = []
    for run in runs:
        verdict = run.summary.verdict
        tone, title = VERDICTS[verdict.kind].tone, verdict_title(verdict.kind, verdict.subtype)
        cards.append({**asdict(verdict), "name": run.name, "tone": tone, "badges": [(tone, title)]})
    if len(runs) != 1:
        return {"answer": None, "cards": cards}
    tiles = [
        (label, FIGURES[name].format(value))
        for name, label in _TILES
        if (value := getattr(runs[0].summary, name)) is not None
    ]
    return {"answer": cards[0], "tiles": tiles}


def _protocol_parts(report: Report, protocol: ProtocolResult) -> dict[str, Any]:
    """A card for each arm, what was done, the runs in the order of their numbers, ends of logs."""
    cards = []
    sources = {run.name: run.summary.stall_source for run in reversed(report.runs)}
    for arm in protocol.arms:
        kind, _, subtype = arm.verdict.partition(" ")
        tone = VERDICTS[kind].tone if kind in VERDICTS else "plain"
        badges = [(tone, verdict_title(kind, subtype))] if kind in VERDICTS else []
        shown = shown_run(arm)
        if shown is not None and shown.pair < 0:
            badges.append(("plain", "warm-up run"))
        # What the matrix has of all runs; the headline is of the one that is shown.
        name = f"{sources.get(arm.name) or 'host'}_stall_fraction"
        stalls = [
            format_value(cell.value, "share")
            for row in protocol.matrix.rows
            for cell, column in zip(row.cells, protocol.matrix.arms, strict=False)
            if row.name == name and column == arm.name and finite(cell.value) is not None
        ]
        failed = sum(run.status == "failed" for run in arm.runs)
        cards.append(
            {
                "name": arm.name,
                "text": arm.text,
                "tone": tone,
                "badges": badges,
                "headline": arm.headline or no_counted_run(protocol),
                "action": arm.action,
                "which": describe_run(arm),
                "stall": f"Median stall of all its runs: {stalls[0]}, as in the table below."
                if stalls
                else "",
                "failed": f"{failed} of {len(arm.runs)} runs failed." if failed else "",
            }
        )
    counted = sum(len(counted_runs(arm)) for arm in protocol.arms)
    done = f"{count_words(counted, 'measured run')}"
    pairs = "One pair" if protocol.pairs == 1 else count_words(protocol.pairs, "pair")
    course = f"{pairs}, {done}, in {format_duration(protocol.seconds)}." if protocol.arms else ""
    if course and protocol.losses and protocol.are_losses_equal is not False:
        course += f" {protocol.losses}"
    runs: list[TableRow] = []
    for arm in protocol.arms:
        for run in arm.runs:
            state = run.status if run.exit_code in (None, 0) else f"{run.status} ({run.exit_code})"
            took = "–" if run.seconds is None else format_duration(run.seconds)
            pair = "warm-up" if run.pair < 0 else str(run.pair + 1)
            runs.append((run.folder, (arm.name, pair, state, took, run.page_cache or "–"), ""))

    def number(row: TableRow) -> tuple[int, str]:
        """Of ``runs/07-baseline``; a folder without a number comes first."""
        digits = row[0].rpartition("/")[2].partition("-")[0]
        return (int(digits) if digits.isdecimal() else -1), row[0]

    return {
        "answer": None,
        "cards": cards,
        "progress": describe_progress(protocol),
        "course": course,
        "commands": [(arm.name, [" ".join(arm.command)], "") for arm in protocol.arms],
        "protocol_runs": sorted(runs, key=number),
        "logs": [
            (run.folder, run.log_tail) for arm in protocol.arms for run in arm.runs if run.log_tail
        ],
        "dedupe_rows": [
            (name.replace("_", " "), [describe_value(value)], "")
            for name, value in protocol.dedupe.items()
            if name not in ("sentence", "log_tail") and value not in (None, "", [], {})
        ],
    }


def _clock(
    ledgers: Sequence[tuple[str, Mapping[str, float]]], looks: Mapping[str, tuple[str, str]]
) -> dict[str, Any] | None:
    """Where the time of the runs went: a bar for each, and a table with a column for each."""
    names = [name for name, ledger in ledgers if ledger]
    divided = [divide_clock(ledger) for _, ledger in ledgers if ledger]
    bars = []
    for parts in divided:
        ends = [0.0, *accumulate(100 * share for *_, share in parts)]
        bars.append(
            {
                "parts": [
                    (looks[part][0], begin, 100 * share)
                    for (part, _, share), begin in zip(parts, ends, strict=False)
                ],
                "words": ", ".join(
                    f"{looks[part][1]} {format_value(share, 'share')}" for part, _, share in parts
                ),
            }
        )
    rows = []
    for part, look in looks.items():
        columns = [[one for one in parts if one[0] == part] for parts in divided]
        if any(columns):
            values = [
                f"{format_value(one[0][2], 'share')} · {format_duration(one[0][1])}" if one else "–"
                for one in columns
            ]
            rows.append((*look, values))
    return {"names": names, "bars": bars, "rows": rows} if rows else None


def _matrix(report: Report) -> dict[str, Any] | None:
    """Every figure over all arms, or runs, beside each other; nothing for a single run."""
    protocol = report.protocol
    if protocol is not None:
        matrix = protocol.matrix
        notes = [_READING, *matrix.notes, *protocol.differing_settings, *protocol.notes]
    elif len(report.runs) > 1:
        matrix, notes = compare_plainly(report.runs), [_ONE_EACH]
    else:
        return None
    shown = measured_rows(matrix)
    reasons = Counter(cell.reason for row in shown for cell in row.cells if cell.reason)
    shared = [reason for reason, count in reasons.items() if count >= _SHARED]
    notes[1:1] = [f"{reason[:1].upper()}{reason[1:]}." for reason in shared]
    if not shown:
        notes[0] = "No figure was measured in any variant."
        if protocol is not None and not any(map(counted_runs, protocol.arms)):
            notes[0] = no_counted_run(protocol)
    missing: dict[str, list[str]] = {}
    for row in matrix.rows:
        if row not in shown:
            reason = next((cell.reason for cell in row.cells if cell.reason), "it was not recorded")
            missing.setdefault(reason, []).append(row.label)
    # How far the pictures of intervals reach to either side, as a logarithm: the same for all. At
    # most twice or half: larger changes are drawn at the edge.
    ends = [
        abs(math.log(end))
        for row in shown
        for cell in row.cells
        for end in (cell.low, cell.high, cell.ratio)
        if end is not None and end > 0
    ]
    return {
        "arms": matrix.arms,
        "rows": shown,
        "shared": shared,
        "half": min(math.log(2), max([math.log(1.1), *ends])),
        "notes": notes,
        "missing": [f"{'; '.join(labels)}: {reason}" for reason, labels in missing.items()],
    }


def interval_picture(cell: Cell, half: float) -> dict[str, Any] | None:
    """An interval on a logarithmic scale, 104 wide: a bar for it, and a dot for the ratio."""
    if not (cell.ratio and cell.low and cell.high):
        return None
    low, middle, high = (
        52 + 43 * max(-1.0, min(1.0, math.log(value) / half))
        for value in (cell.low, cell.ratio, cell.high)
    )
    arrow = "M98 2L103 7L98 12Z" if cell.ratio > 1 else "M6 2L1 7L6 12Z"
    is_beyond = abs(math.log(cell.ratio)) > half
    width = max(2.0, high - low)
    return {"low": low, "middle": middle, "width": width, "arrow": arrow if is_beyond else ""}


def _group(title: str, figures: Sequence[Row], runs: Sequence[ReportRun]) -> dict[str, Any]:
    """Figures run by run, and why some are missing, one line for all that share the reason."""
    rows: list[TableRow] = []
    missing: dict[str, dict[str, None]] = {}
    for row in figures:
        values = [format_row(run.summary, row) for run in runs]
        if any(value != "–" for value in values):
            rows.append((row.label, values, row.note))
        for name in row.fields:
            for run in runs:
                if read_figure(run.summary, name) is None:
                    reason = missing_reason(run.summary, name)
                    missing.setdefault(reason, {})[row.label] = None
    is_all = not rows and len(missing) == 1
    reasons = [
        f"{'All' if is_all else '; '.join(labels)}: {reason}" for reason, labels in missing.items()
    ]
    return {"title": title, "rows": rows, "reasons": reasons}


def _tables(report: Report) -> list[dict[str, Any]]:
    """The course of the runs, their settings, and the environment."""
    summaries = [run.summary for run in report.runs]
    courses = []
    for one in summaries:
        error = f": {one.error}" if one.error else ""
        course = {
            "folder": one.run_dir,
            "started": format_date(one.started),
            "ended": f"{one.end_reason}{error}, after {format_duration(one.duration_seconds)}",
            "ranks": str(one.world_size),
            "measured": f"{count_words(one.steps, 'step')}, {count_words(one.fetches, 'fetch')} in "
            f"{format_duration(one.measured_seconds)}; "
            f"{count_words(one.warmup_steps, 'step')} of warm-up not counted",
            "replacements active": describe_replacements(one),
            "FLOPs": one.flops_convention or "–",
            "notes": " ".join(f"{note}." for note in one.notes) or "–",
        }
        courses.append(course)
    environments = [one.environment for one in summaries]
    if report.protocol is not None and not any(environments):
        environments = [report.protocol.environment] if report.protocol.environment else []
    by_name: dict[str, Sequence[Mapping[str, Any]]] = {
        "course": courses,
        "settings": [one.settings for one in summaries],
        "environment": environments,
    }
    tables: list[dict[str, Any]] = []
    for name, values in by_name.items():
        rows = [
            (key, [describe_value(one[key]) if key in one else "–" for one in values], "")
            for key in dict.fromkeys(key for one in values for key in one)
        ]
        title, head = name.title(), ["", *(run.name for run in report.runs)]
        is_single = len(values) == 1
        if name == "course":
            title = "The run" if is_single else "Runs with charts"
            rows = [row for row in rows if any(value != "–" for value in row[1])]
        if is_single or (name != "course" and all(len(set(shown)) == 1 for _, shown, _ in rows)):
            # One column where all agree.
            head, rows = [], [(key, shown[:1], "") for key, shown, _ in rows]
        if rows:
            is_open = is_single or name != "course"
            table = {"name": name, "title": title, "head": head, "rows": rows, "is_open": is_open}
            tables.append(table)
    return tables


def _load(name: str, purpose: str) -> Any:
    """A module of the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose}, which is not installed: pip install plotly jinja2"
        ) from error


def _script_json(value: Any) -> str:
    """Nothing in it can end the script that it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&'"})


@cache
def _load_assets(*, has_charts: bool = True) -> tuple[Any, str]:
    """The page, compiled, with what is the same for every report; and Plotly, packed."""
    library = b""
    if has_charts:
        plotly = _load("plotly.offline", "the charts of a report need plotly")
        library = gzip.compress(plotly.get_plotlyjs().encode(), 9, mtime=0)
    jinja2 = _load("jinja2", "the HTML page of a report needs jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fast_axolotl.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["plain_name"] = plain_name
    environment.globals.update(
        asset=lambda name: environment.loader.get_source(environment, name)[0],
        colours=COLOURS,
        describe_change=describe_change,
        find_alarms=find_alarms,
        format_value=format_value,
        generator=GENERATOR,
        most_large=_MOST_LARGE,
        most_runs=MOST_RUNS,
        interval_picture=interval_picture,
        tones=_OUTCOME_TONES,
        zip=zip,
    )
    return environment.get_template("report.html"), base64.b64encode(library).decode()
