"""A report as one HTML file: no request to anywhere, everything it shows is inside.

The page is plain HTML with its tables and texts, the data and the figures as JSON, and Plotly,
packed. The browser unpacks it (4.9 MB become 1.9 MB in the file) and draws. A policy in the head of
the page forbids it every connection.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.record.codec import to_plain
from fast_axolotl.report.charts import Chart, Curves, Legend, Panel
from fast_axolotl.report.content import Report, describe_drawn
from fast_axolotl.report.detail_markup import detail_sections
from fast_axolotl.report.downsampling import keep_extremes
from fast_axolotl.report.markup import Safe, embed_json, join, named, plain_name, tag
from fast_axolotl.report.matrix_markup import matrix_section
from fast_axolotl.report.run_charts import make_charts
from fast_axolotl.report.series import MOST_POINTS, read_series, steps_together
from fast_axolotl.report.theme import theme_css
from fast_axolotl.report.values import format_date, format_length
from fast_axolotl.report.verdict_markup import verdict_section

__all__ = ["GENERATOR", "MOST_RUNS", "render_report", "report_data"]

GENERATOR = "fast-axolotl report"
"""What the page's head says of who made it."""

MOST_RUNS = 6
"""Runs with charts in one page."""

_MOST_DATA_BYTES = 900_000
_LEAST_POINTS = 100
_MOST_LOSSES = 200

_PLACES = {
    "verdict": "Verdict",
    "matrix": "Matrix",
    "charts": "Charts",
    "figures": "All figures",
    "runs": "Runs",
    "settings": "Settings",
    "environment": "Environment",
    "definitions": "What the words mean",
}
"""Sections that the head of the page leads to, by their name."""

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def render_report(report: Report) -> str:
    """The page."""
    library = _packed_plotly()
    data, embedded = _fitting_data(report)
    charts = make_charts(_curves(report, data))
    main = tag(
        "main",
        verdict_section(report),
        matrix_section(report),
        _chart_section(charts, report),
        detail_sections(report),
    )
    body = join(
        tag("a", "To the verdict", href="#verdict", class_="skip"),
        _header(report, [place for place in _PLACES if f'id="{place}"' in main]),
        main,
        _footer(report),
        embedded,
        embed_json("report-figures", _figures(charts)),
        Safe(f'<script type="text/plain" id="report-plotly">{library}</script>'),
        Safe(f"<script>{_asset('report.js')}</script>"),
    )
    return f'<!doctype html>\n<html lang="en">{_head(report)}<body>{body}</body></html>\n'


def report_data(report: Report, *, most_points: int = MOST_POINTS) -> dict[str, Any]:
    """What the page embeds, draws and offers to download."""
    protocol = None
    if report.protocol is not None:
        protocol = to_plain(report.protocol)
        for arm in protocol["arms"]:
            for run in arm["runs"]:
                losses = run["losses"]
                run["losses"] = [losses[row] for row in keep_extremes([losses], _MOST_LOSSES)]
    shown = report.runs[:MOST_RUNS]
    pairs = [(run.record, run.summary) for run in shown]
    together = steps_together(pairs, most_points=most_points)
    found = {
        "title": report.title,
        "made": report.made,
        "version": report.version,
        "protocol": protocol,
        "runs": [
            {
                "name": run.name,
                "summary": asdict(run.summary),
                "series": read_series(
                    run.record, run.summary, most_points=most_points, together=steps
                ),
            }
            for run, steps in zip(shown, together, strict=True)
        ],
    }
    kept: dict[str, Any] = to_plain(found)
    return kept


def _fitting_data(report: Report) -> tuple[dict[str, Any], Safe]:
    """Fewer points where the data would grow beyond its share of the page."""
    points = MOST_POINTS
    while True:
        data = report_data(report, most_points=points)
        embedded = embed_json("report-data", data)
        if len(embedded) <= _MOST_DATA_BYTES or points <= _LEAST_POINTS:
            return data, embedded
        points //= 2


def _curves(report: Report, data: dict[str, Any]) -> list[Curves]:
    return [
        Curves(place=place, name=run.name, series=found["series"], summary=run.summary)
        for place, (run, found) in enumerate(zip(report.runs, data["runs"], strict=False))
    ]


def _head(report: Report) -> Safe:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=GENERATOR),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{report.title} · fast-axolotl"),
        Safe(f"<style>{theme_css()}{_asset('report.css')}</style>"),
    )


def _header(report: Report, places: Sequence[str]) -> Safe:
    links = [tag("a", _PLACES[place], href=f"#{place}") for place in places]
    name = "fast-axolotl-report.json"
    return tag(
        "header",
        tag(
            "div",
            tag("span", "fast-axolotl report", class_="brand"),
            tag(
                "div",
                tag("a", "Raw data", id="download", href="#report-data", download=name),
                tag("button", "Dark", id="theme", type="button", aria_label="Light or dark"),
                class_="tools",
            ),
            class_="bar",
        ),
        tag("h1", _title(report)),
        tag("p", _subtitle(report), class_="small"),
        tag("nav", links, aria_label="Sections"),
    )


def _title(report: Report) -> Safe:
    if report.protocol is not None or not report.runs:
        return named(report.title)
    parts = [named(run.name) for run in report.runs]
    return join([part for name in parts for part in (", ", name)][1:])


def _subtitle(report: Report) -> str:
    if report.protocol is not None:
        started, seconds = report.protocol.started, report.protocol.seconds
        environment = report.protocol.environment
    elif report.runs:
        one = report.runs[0].summary
        started, seconds, environment = one.started, one.duration_seconds, one.environment
    else:
        return format_date(report.made)
    parts = [format_date(started), format_length(seconds)]
    for name in ("cpu", "cpu_model", "gpu", "os"):
        value = environment.get(name)
        if isinstance(value, str) and value:
            parts.append(value)
    return " · ".join(parts)


def _chart_section(charts: Sequence[Chart], report: Report) -> Safe | None:
    if not charts:
        return None
    hint = (
        "Drag to zoom, double-click to see all. With the keyboard: + and − zoom, arrows move, "
        "0 shows all."
    )
    count = len(report.runs)
    few = f"Charts are of the first {MOST_RUNS} of {count} runs." if count > MOST_RUNS else ""
    whose = describe_drawn(report)
    return tag(
        "section",
        tag("h2", "Charts", id="charts"),
        tag("p", hint, class_="small hint"),
        tag("p", few, class_="small") if few else None,
        tag("p", whose, class_="small") if whose else None,
        [_chart(chart) for chart in charts],
        class_="charts alone" if report.protocol is None and count == 1 else "charts",
        aria_labelledby="charts",
    )


def _chart(chart: Chart) -> Safe:
    name = f"chart-{chart.name}"
    panels = [
        _panel(chart, panel, number, len(chart.panels) > 1)
        for number, panel in enumerate(chart.panels)
    ]
    return tag(
        "section",
        tag("h3", chart.title, id=name),
        tag("p", chart.text),
        tag("ul", [_legend(one) for one in chart.legend], class_="legend")
        if chart.legend
        else None,
        tag("div", panels, class_="panels"),
        class_="chart",
        aria_labelledby=name,
    )


def _panel(chart: Chart, panel: Panel, number: int, is_named: bool) -> Safe:
    title = tag("h4", named(panel.name)) if is_named else None
    if panel.figure is None:
        return tag("figure", title, tag("p", panel.text, class_="nothing"))
    whose = f", {plain_name(panel.name)}" if panel.name and is_named else ""
    plot = tag(
        "div",
        id=f"{chart.name}-{number}",
        class_="plot",
        role="img",
        tabindex="0",
        aria_label=f"{chart.title}{whose}. {panel.text}",
        style=f"height:{panel.figure['height']}px",
    )
    return tag("figure", title, plot, tag("figcaption", panel.text))


def _legend(one: Legend) -> Safe:
    colour = f"var(--{one.role})"
    inside = {
        "line": tag("rect", x="0", y="5", width="22", height="2", fill=colour),
        "dashed": tag("path", d="M0 6H22", stroke=colour, stroke_width="2", stroke_dasharray="4 3"),
        "area": _box(colour, x=1, width=20, opacity=0.35),
        "mark": tag("path", d="M11 1L16 6L11 11L6 6Z", fill=colour),
        "bar": _box(colour, x=5, width=12, opacity=0.8),
    }[one.shape]
    picture = tag("svg", inside, width="22", height="12", aria_hidden="true")
    return tag("li", picture, named(one.label))


def _box(colour: str, *, x: int, width: int, opacity: float) -> Safe:
    """A surface that may be pale; its edge is not."""
    size = {"x": str(x), "y": "1", "width": str(width), "height": "10"}
    return tag("rect", **size, fill=colour, fill_opacity=str(opacity), stroke=colour)


def _footer(report: Report) -> Safe:
    return tag(
        "footer",
        [tag("p", note) for note in report.notes],
        tag(
            "p",
            f"Made by fast-axolotl {report.version} on {format_date(report.made)}. Everything is "
            "inside this file; it asks nothing of the network.",
        ),
        tag("noscript", "Without JavaScript there are no charts; their texts and all tables are."),
    )


def _figures(charts: Sequence[Chart]) -> dict[str, Any]:
    return {
        f"{chart.name}-{number}": panel.figure
        for chart in charts
        for number, panel in enumerate(chart.panels)
        if panel.figure is not None
    }


def _asset(name: str) -> str:
    return resources.files("fast_axolotl.report").joinpath(f"assets/{name}").read_text("utf-8")


@cache
def _packed_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError(
            "the charts of a report are drawn by plotly, which is not installed: "
            "pip install 'fast-axolotl[report]'"
        ) from error
    source: str = get_plotlyjs()
    return base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode()
