"""Charts of the reader: rows and tokens a second, and how long single fetches waited."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fast_axolotl.report.charts import (
    Chart,
    Curves,
    Figure,
    Legend,
    Panel,
    Scale,
    area,
    axis,
    choose_scale,
    colour,
    largest,
    level,
    line,
    phase_shapes,
    time_axes,
    time_scale,
)
from fast_axolotl.report.values import count_words, format_count

__all__ = ["format_short", "throughput_chart", "waits_chart"]

_MOST_DEMAND = 3.0
"""Times the rows a second, up to which the line of the demand is drawn."""


def throughput_chart(runs: Sequence[Curves]) -> Chart | None:
    """Rows a second at the boundary of loader and model, and tokens."""
    shown = [run for run in runs if run.has("throughput")]
    names = {run.place: _reader_column(run) for run in shown}
    if not shown or not any(names.values()):
        return None
    times = time_scale(shown, "throughput")
    axes = time_axes(runs, "throughput", times)
    rows = largest(run.series["throughput"].get(names[run.place], []) for run in shown)
    tokens = largest(run.series["throughput"].get("real_tokens_per_second", []) for run in shown)
    panels = [
        _throughput_panel(run, time, times, rows, tokens)
        for run, time in zip(runs, axes, strict=True)
    ]
    nouns = {"rows" if _is_rows(run) else "samples" for run in shown}
    label = f"{' or '.join(sorted(nouns))} a second"
    legend = [Legend(role="step", label=label, shape="area")]
    if tokens:
        legend.append(Legend(role="pss", label="real tokens a second", shape="area"))
    if any(_drawn_demand(run, rows) for run in shown if names[run.place]):
        legend.append(Legend(role="muted", label="what the model would take", shape="dashed"))
    return Chart(
        name="throughput",
        title="Reader throughput",
        text="What crosses the boundary between loader and model, all ranks together.",
        legend=tuple(legend),
        panels=tuple(panels),
    )


def _reader_column(run: Curves) -> str:
    for name in ("rows_per_second", "samples_per_second"):
        if name in run.series["throughput"]:
            return name
    return ""


def _throughput_panel(run: Curves, time: Figure, times: Scale, rows: float, tokens: float) -> Panel:
    name = _reader_column(run) if run.has("throughput") else ""
    if not name:
        return Panel(name=run.name, text="No row was counted.", figure=None)
    noun = "rows" if _is_rows(run) else "samples"
    x = run.ref("throughput", "t", times.by)
    dots = {} if len(run.series["throughput"]["t"]) > 1 else {"mode": "lines+markers"}
    traces = [
        area(x, run.ref("throughput", name), "step", f"{noun}/s", form=",.4~s", alpha=0.16, **dots)
    ]
    demand = _drawn_demand(run, rows)
    top = max(rows, demand or 0.0) * 1.12 or 1.0
    layout: Figure = {
        "xaxis": {**time, "anchor": "y2" if tokens else "y"},
        "yaxis": axis(
            f"{noun}/s", range=[0, top], tickformat="~s", domain=[0.5 if tokens else 0, 1]
        ),
        "shapes": phase_shapes(run, times),
    }
    if demand is not None:
        shape, _ = level(demand, "muted")
        layout["shapes"].append(shape)
    if tokens:
        layout["yaxis2"] = axis(
            "tokens/s", range=[0, tokens * 1.12], tickformat="~s", domain=[0, 0.4]
        )
        if "real_tokens_per_second" in run.series["throughput"]:
            y = run.ref("throughput", "real_tokens_per_second")
            more = {"form": ",.4~s", "yaxis": "y2", "alpha": 0.16, **dots}
            traces.append(area(x, y, "pss", "tokens/s", **more))
    figure = {"traces": traces, "layout": layout, "height": 320 if tokens else 240}
    return Panel(name=run.name, text=_throughput_text(run, noun), figure=figure)


def _drawn_demand(run: Curves, rows: float) -> float | None:
    """What the model would take, unless a line there would press the rows to the ground."""
    demand = run.summary.demand_rows_per_second
    is_drawn = demand is not None and _is_rows(run) and 0 < demand < _MOST_DEMAND * rows
    return demand if is_drawn else None


def _is_rows(run: Curves) -> bool:
    return run.summary.rows_per_second is not None or "rows_per_second" in run.series["throughput"]


def _throughput_text(run: Curves, noun: str) -> str:
    one = run.summary
    rate = one.rows_per_second if noun == "rows" else one.samples_per_second
    parts = []
    if rate is not None:
        parts.append(f"{format_count(rate)} {noun} a second in the steady phase.")
    if one.tokens_per_second is not None:
        parts.append(f"{format_count(one.tokens_per_second)} real tokens a second.")
    if noun == "rows" and one.demand_rows_per_second is not None:
        demand = format_count(one.demand_rows_per_second)
        parts.append(f"The model would take {demand} rows a second.")
    if one.free_rows_per_second is not None:
        parts.append(f"The loader alone gave {format_count(one.free_rows_per_second)}.")
    return " ".join(parts) or "The run has no steady phase; the curve is of its warm-up."


def waits_chart(runs: Sequence[Curves]) -> Chart | None:
    """The distribution of the waits of single fetches."""
    shown = [run for run in runs if run.has("waits")]
    if not shown:
        return None
    waits = [run.series["waits"] for run in shown]
    seconds = [value for one in waits for value in one["seconds"]]
    top = max(largest([one["fetch_share"], one["wait_share"]]) for one in waits)
    ends = math.log10(min(seconds)) - 0.15, math.log10(max(seconds)) + 0.15
    if ends[1] - ends[0] < 2:
        middle = sum(ends) / 2
        ends = middle - 1, middle + 1
    panels = [_waits_panel(run, ends, min(1.0, 1.1 * top)) for run in runs]
    return Chart(
        name="waits",
        title="Waits of single fetches",
        text="Where the bars are tells how long a fetch usually waits; where the line is tells "
        "which waits cost the time. Far apart, they mean few long waits.",
        legend=(
            Legend(role="step", label="share of the fetches", shape="bar"),
            Legend(role="wait", label="share of all waiting"),
        ),
        panels=tuple(panels),
    )


_TICKS = (
    (1e-6, "1 µs"),
    (1e-5, "10 µs"),
    (1e-4, "100 µs"),
    (1e-3, "1 ms"),
    (1e-2, "10 ms"),
    (1e-1, "100 ms"),
    (1.0, "1 s"),
    (10.0, "10 s"),
    (100.0, "100 s"),
    (1000.0, "1,000 s"),
)


def _waits_panel(run: Curves, ends: tuple[float, float], top: float) -> Panel:
    if not run.has("waits"):
        text = "No fetch of a steady phase was recorded, so there is nothing to draw."
        return Panel(name=run.name, text=text, figure=None)
    labels = [format_short(value) for value in run.series["waits"]["seconds"]]
    x = run.ref("waits", "seconds")
    bars = {
        "type": "bar",
        "name": "fetches",
        "x": x,
        "y": run.ref("waits", "fetch_share"),
        "width": [0.2 * value for value in run.series["waits"]["seconds"]],
        "text": labels,
        "textposition": "none",
        "marker": {"color": colour("step", 0.65)},
        "hovertemplate": "%{y:.1%} near %{text}",
    }
    curve = line(x, run.ref("waits", "wait_share"), "wait", "waiting", form=".1%", width=2)
    if len(labels) == 1:
        curve |= {"mode": "markers", "marker": {"size": 8, "color": colour("wait")}}
    layout = {
        "xaxis": axis(
            "wait of a fetch",
            type="log",
            range=list(ends),
            tickvals=[value for value, _ in _TICKS],
            ticktext=[words for _, words in _TICKS],
            hoverformat=".2~s",
            unifiedhovertitle={"text": "%{x:.2~s}s"},
        ),
        "yaxis": axis("share", range=[0, top], tickformat=".0%"),
        "bargap": 0.1,
    }
    figure = {"traces": [bars, curve], "layout": layout, "height": 260}
    return Panel(name=run.name, text=_waits_text(run), figure=figure)


def format_short(seconds: float) -> str:
    """A duration in the unit that suits it."""
    scale = choose_scale("seconds", seconds)
    return f"{format_count(seconds * scale.by)} {scale.unit}"


def _waits_text(run: Curves) -> str:
    one = run.summary
    parts = [f"{count_words(run.series['waits']['fetches'], 'fetch')}."]
    if one.wait_p50_seconds is not None and one.wait_p95_seconds is not None:
        parts.append(
            f"Half waited {format_short(one.wait_p50_seconds)} or less, 95 % "
            f"{format_short(one.wait_p95_seconds)} or less, the longest "
            f"{format_short(one.wait_max_seconds or 0.0)}."
        )
    if one.worst_percent_share is not None:
        share = f"{100 * one.worst_percent_share:.0f} %"
        parts.append(f"The worst 1 % of them make up {share} of all waiting.")
    return " ".join(parts)
