"""Write a document as one HTML file that works offline.

``assets/report.html`` draws the blocks; the data and the figures of charts are in it as JSON, and
Plotly, packed. The browser unpacks it (4.9 MB become 1.9 MB in the file) and draws. A policy in the
head of the page forbids it every connection.
"""

from __future__ import annotations

import base64
import gzip
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.record.units import format_date, format_duration
from fast_axolotl.report.charts import RunCurves, make_charts
from fast_axolotl.report.comparison import beside_each_other, protocol_document
from fast_axolotl.report.document import Block, Chart, Document, Paragraph, Section
from fast_axolotl.report.runs import ReportRun, describe_gpus, run_blocks, verdict_blocks
from fast_axolotl.report.series import read_series

GENERATOR = "fast-axolotl report"
"""What the page's head says of who made it."""


def report_document(
    title: str,
    runs: Sequence[ReportRun],
    *,
    protocol: ProtocolResult | None = None,
    arm_runs: int = 0,
    notes: Sequence[str] = (),
    made: float,
    version: str,
) -> Document:
    """Everything about runs, or about a protocol: one run of each arm, then runs beside it."""
    curves = []
    for place, run in enumerate(runs):
        series = read_series(run.record, run.summary)
        curves.append(RunCurves(place=place, name=run.name, series=series, summary=run.summary))
    data = {"title": title, "made": made, "version": version, "protocol": protocol, "runs": curves}
    charts: list[Block] = list(make_charts(curves))
    if charts:
        text = "Drag to zoom, double-click to reset. Keys: + and − zoom, arrows move, 0 resets."
        if protocol is not None:
            text += " One run of each variant: the one its verdict is of."
        charts = [Section(title="Charts", blocks=[Paragraph(text, "muted"), *charts])]
    if protocol is None:
        blocks = verdict_blocks(runs)
        blocks += beside_each_other(runs) if len(runs) > 1 else []
        blocks += run_blocks(runs, charts)
    else:
        blocks = [*protocol_document(protocol).blocks]
        blocks += verdict_blocks(runs[arm_runs:], is_named=True)
        blocks += run_blocks(runs, charts)
    # When it was, how long it took, and on which machine.
    parts = [describe_gpus(run.record) for run in runs]
    if protocol is not None:
        parts[:0] = [format_date(protocol.started), format_duration(protocol.seconds)]
        parts.append(protocol.environment.get("cpu", ""))
    elif runs:
        first = runs[0].summary
        parts[:0] = [format_date(first.started), format_duration(first.duration_seconds)]
    return Document(
        title=title,
        subtitle=" · ".join(dict.fromkeys(filter(None, parts))),
        blocks=blocks,
        footnotes=notes,
        data=data,
    )


def render_page(document: Document) -> str:
    """The page."""
    figures = dict(_figures(document.blocks))
    template, library = _load_assets(has_charts=bool(figures))
    page: str = template.render(
        document=document,
        made=format_date(document.data["made"]),
        data=to_plain(document.data),
        figures=to_plain(figures),
        library=library,
    )
    # White space between inline elements would show.
    return re.sub(r">\s+<", "><", page.strip()) + "\n"


def _figures(blocks: Iterable[Block]) -> Iterator[tuple[str, Any]]:
    """The figures of all charts by the id of the element that they are drawn in."""
    for block in blocks:
        if isinstance(block, Section):
            yield from _figures(block.blocks)
        elif isinstance(block, Chart):
            for number, panel in enumerate(block.panels):
                if panel.figure is not None:
                    yield f"{block.name}-{number}", panel.figure


def _draw_interval(interval: tuple[float, float, float]) -> dict[str, float]:
    """A ratio on a logarithmic scale from a half to the double, 104 wide: a bar and a dot. What
    lies beyond is drawn at the edge."""
    low, middle, high = (52 + 43 * max(-1.0, min(1.0, math.log2(value))) for value in interval)
    return {"low": low, "middle": middle, "width": max(2.0, high - low)}


@cache
def _load_assets(*, has_charts: bool) -> tuple[Any, str]:
    """The page, compiled, with what is the same for every document; and Plotly, packed."""
    try:
        jinja2 = import_module("jinja2")
        library = import_module("plotly.offline").get_plotlyjs() if has_charts else ""
    except ImportError as error:
        raise MissingExtraError(
            f"the HTML page of a report needs {error.name}, which is not installed: "
            "pip install plotly jinja2"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fast_axolotl.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "default": str}
    environment.filters.update(
        kind=lambda block: type(block).__name__,
        slug=lambda title: re.sub(r"\W+", "-", title.lower()).strip("-"),
        draw_interval=_draw_interval,
    )
    environment.globals.update(
        asset=lambda name: environment.loader.get_source(environment, name)[0],
        generator=GENERATOR,
    )
    packed = gzip.compress(library.encode(), 9, mtime=0) if library else b""
    return environment.get_template("report.html"), base64.b64encode(packed).decode()
