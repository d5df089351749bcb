"""The first chart: how long steps take, and which share of the time is waiting for data."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

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
from fast_axolotl.report.figures import DATA_STALL
from fast_axolotl.report.markup import plain_name
from fast_axolotl.report.terminal import format_seconds, format_share

__all__ = ["stall_chart"]

_LEAST_MARKED = 20
_MOST_DWARFING = 5
"""Steps that may lie beyond the scale: such as the first ones, which compile."""

_UNSEEN = "No step was recorded, so there is nothing to draw."


def stall_chart(runs: Sequence[Curves]) -> Chart:
    """Step time above, share of waiting below, on one time axis."""
    times = time_scale(runs, "steps")
    axes = time_axes(runs, "steps", times)
    top = max((_top_of(run) for run in runs if run.has("steps")), default=0.0) or 1.0
    scale = choose_scale("seconds", top)
    share = max(
        (largest([one.get("host", []), one.get("device", [])]) for one in _stalls(runs)), default=0
    )
    panels = [
        _stall_panel(run, time, times, scale, top, share)
        for run, time in zip(runs, axes, strict=True)
    ]
    legend = [
        Legend(role="step", label="time of a step"),
        Legend(role="wait", label="of it waiting for data", shape="area"),
    ]
    if any(run.has("slow") for run in runs):
        label = "outlier: a fetch that waited far longer than most"
        legend.append(Legend(role="wait", label=label, shape="mark"))
    if any(run.has("steps") and "low" in run.series["steps"] for run in runs):
        label = "shortest to longest step of a point"
        legend.insert(1, Legend(role="step", label=label, shape="area"))
    if any("device" in one for one in _stalls(runs)):
        legend.append(Legend(role="host", label="waiting by the host's clock", shape="dashed"))
    if any(run.series.get("marks") for run in runs):
        legend.append(Legend(role="accent", label="new shard or epoch", shape="dashed"))
    return Chart(
        name="stall",
        title="Step time and stall",
        text="Above, how long a step took; below, which share of the time went into waiting for "
        "data. Shaded stretches are left out of the figures.",
        legend=tuple(legend),
        panels=tuple(panels),
    )


def _stalls(runs: Sequence[Curves]) -> list[dict[str, Any]]:
    return [run.series["stall"] for run in runs if run.has("stall")]


def _highs(run: Curves) -> list[float]:
    """The longest step of every point."""
    steps = run.series["steps"]
    return [value or 0.0 for value in steps.get("high", steps["mean"])]


def _top_of(run: Curves) -> float:
    """Where the scale ends: above all steady steps, unless a handful of them dwarfs the rest."""
    highs = _highs(run)
    steady = zip(highs, run.series["steps"]["is_steady"], strict=True)
    ordered = sorted([high for high, is_steady in steady if is_steady] or highs, reverse=True)
    if len(ordered) > 4 * _MOST_DWARFING and ordered[0] > 5 * ordered[_MOST_DWARFING]:
        return 1.5 * ordered[_MOST_DWARFING]
    return 1.08 * ordered[0]


def _points_above(run: Curves, top: float) -> list[tuple[float, str, float]]:
    """Points beyond the scale: when, at which step, and how long the longest one took."""
    steps = run.series["steps"]
    numbers = steps.get("high_step", steps["step"])
    found = []
    for row, (t, high, number) in enumerate(zip(steps["t"], _highs(run), numbers, strict=True)):
        if high <= top:
            continue
        where = f"at step {number:,}" if number is not None else ""
        if not where:
            first, count = steps["step"][row], steps["steps"][row]
            where = f"among steps {first:,} to {first + count - 1:,}"
        found.append((t, where, high))
    return found


def _stall_panel(
    run: Curves, time: Figure, times: Scale, scale: Scale, top: float, share: float
) -> Panel:
    if not run.has("steps"):
        return Panel(name=run.name, text=_UNSEEN, figure=None)
    over = _points_above(run, top)
    threshold, words = level(DATA_STALL, "muted", axis="y2", text=f"{100 * DATA_STALL:.0f} %")
    words |= {"xanchor": "left", "yanchor": "middle"}
    layout = {
        "xaxis": {**time, "anchor": "y2"},
        "yaxis": axis("step time", scale.unit, domain=[0.42, 1], range=[0, top * scale.by]),
        "yaxis2": axis(
            "stall",
            domain=[0, 0.32],
            range=[0, min(1.0, max(0.25, 1.15 * share))],
            tickformat=".0%",
            nticks=4,
        ),
        "shapes": [*phase_shapes(run, times), *_mark_shapes(run, times), threshold],
        "annotations": [words, *_phase_words(run, times)],
    }
    traces = [
        *_step_traces(run, times, scale),
        *_outlier_traces(run, times, scale, top, over),
        *_stall_traces(run, times),
    ]
    figure = {"traces": traces, "layout": layout, "height": 380, "right": 40}
    return Panel(name=run.name, text=_stall_text(run, over), figure=figure)


def _step_traces(run: Curves, times: Scale, scale: Scale) -> list[Figure]:
    x = run.ref("steps", "t", times.by)
    unit = f" {scale.unit}"
    found = []
    dots: Figure = {}
    if len(run.series["steps"]["t"]) == 1:
        dots = {"mode": "lines+markers", "marker": {"size": 8}}
    mean = {"unit": unit, **dots}
    if "low" in run.series["steps"]:
        low, high = run.ref("steps", "low", scale.by), run.ref("steps", "high", scale.by)
        fill = {"fill": "tonexty", "fillcolor": colour("step", 0.22)}
        longest = {"unit": unit, **fill, **_numbers(run, "high_step", unit)}
        found.append(line(x, low, "step", "shortest", width=0, unit=unit))
        found.append(line(x, high, "step", "longest", width=0.8, **longest))
    else:
        mean |= _numbers(run, "step", unit)
    found.append(line(x, run.ref("steps", "mean", scale.by), "step", "step", **mean))
    wait = run.ref("steps", "wait", scale.by)
    found.append(area(x, wait, "wait", "waiting", unit=unit, width=1, alpha=0.35, **dots))
    return found


def _numbers(run: Curves, column: str, unit: str) -> Figure:
    """The number of the step behind its time, where every one is known."""
    if None in run.series["steps"][column]:
        return {}
    words = f"%{{y:,.4~g}}{unit} at step %{{customdata:,}}"
    return {"customdata": run.ref("steps", column), "hovertemplate": words}


def _outlier_traces(
    run: Curves, times: Scale, scale: Scale, top: float, over: list[tuple[float, str, float]]
) -> list[Figure]:
    found: list[Figure] = []
    mark = {"type": "scatter", "mode": "markers", "cliponaxis": False}
    marked = _marked(run)
    if marked:
        found.append(
            {
                **mark,
                "name": "outlier",
                "x": [one[0] * times.by for one in marked],
                "y": [min(one[3], top) * scale.by for one in marked],
                "text": [
                    f"{format_seconds(seconds)} at fetch {fetch:,}, sample {row:,}"
                    for _, fetch, row, seconds in marked
                ],
                "hovertemplate": "%{text}",
                "marker": {
                    "symbol": "diamond",
                    "size": 7,
                    "color": colour("wait"),
                    "line": {"color": colour("card"), "width": 1},
                },
            }
        )
    if over:
        found.append(
            {
                **mark,
                "name": "beyond the scale",
                "x": [t * times.by for t, _, _ in over],
                "y": [0.985 * top * scale.by] * len(over),
                "text": [f"{format_seconds(high)} {where}" for _, where, high in over],
                "hovertemplate": "%{text}",
                "marker": {"symbol": "triangle-up", "size": 9, "color": colour("step")},
            }
        )
    return found


def _marked(run: Curves) -> list[tuple[float, int, int, float]]:
    """Outliers longer than a usual step, or else the longest few: where, fetch, sample, wait."""
    slow = run.series.get("slow")
    if not slow:
        return []
    found = list(zip(slow["t"], slow["fetch"], slow["row"], slow["seconds"], strict=True))
    usual = run.summary.step_p50_seconds
    long = [one for one in found if usual is not None and one[3] > usual]
    return long or sorted(sorted(found, key=lambda one: -one[3])[:_LEAST_MARKED])


def _stall_traces(run: Curves, times: Scale) -> list[Figure]:
    if not run.has("stall"):
        return []
    x = run.ref("stall", "t", times.by)
    more = {"yaxis": "y2", "form": ".1%"}
    if len(run.series["stall"]["t"]) == 1:
        more |= {"mode": "lines+markers", "marker": {"size": 8}}  # type: ignore[dict-item]
    host = run.ref("stall", "host")
    if "device" not in run.series["stall"]:
        return [area(x, host, "wait", "stall", **more)]
    dotted = {"style": {"dash": "dot"}, "width": 1.2}
    return [
        area(x, run.ref("stall", "device"), "wait", "stall of the device", **more),
        line(x, host, "host", "by the host's clock", **more, **dotted),
    ]


def _phase_words(run: Curves, times: Scale) -> list[Figure]:
    words = {"warmup": "warm-up", "replay": "cached batch"}
    return [
        {
            "text": html.escape(plain_name(words.get(phase["name"], phase["name"]))),
            "xref": "x",
            "x": phase["begin"] * times.by,
            "xanchor": "left",
            "yref": "paper",
            "y": 1,
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"color": colour("muted"), "size": 11},
        }
        for phase in run.series.get("phases", [])
    ]


def _mark_shapes(run: Curves, times: Scale) -> list[Figure]:
    return [
        {
            "type": "line",
            "xref": "x",
            "x0": t * times.by,
            "x1": t * times.by,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": colour("accent", 0.55), "width": 1, "dash": "dot"},
            "layer": "below",
        }
        for marks in run.series.get("marks", {}).values()
        for t in marks["t"]
    ]


def _stall_text(run: Curves, over: list[tuple[float, str, float]]) -> str:
    one = run.summary
    parts = []
    if one.world_size > 1:
        parts.append(f"Rank {run.series['rank']} of {one.world_size}, which decides.")
    if one.step_p50_seconds is not None:
        parts.append(
            f"Half of the steps took {format_seconds(one.step_p50_seconds)} or less, 95 % took "
            f"{format_seconds(one.step_p95_seconds)} or less."
        )
    together = max(run.series["steps"].get("steps", [1]))
    if together > 1:
        parts.append(f"Up to {together:,} steps are one point.")
    if one.stall_fraction is not None:
        whose = "the device" if one.stall_source == "device" else "the loop"
        share = format_share(one.stall_fraction)
        parts.append(f"For {share} of the time {whose} waited for data.")
    if run.has("slow"):
        parts.append(_outliers_text(run))
    for name, marks in run.series.get("marks", {}).items():
        few = f", one in {marks['every']:,} drawn" if marks["every"] > 1 else ""
        parts.append(f"{marks['all']:,} {name} boundaries{few}.")
    if over:
        _, where, high = max(over, key=lambda item: item[2])
        parts.append(
            f"Beyond the scale (▲): {format_seconds(high)} {where}"
            + (f" and {len(over) - 1:,} more points." if len(over) > 1 else ".")
        )
    return " ".join(parts) or _UNSEEN


def _outliers_text(run: Curves) -> str:
    slow = run.series["slow"]
    longest = max(slow["seconds"])
    count = f"{slow['all']:,} fetches" if slow["all"] > 1 else "One fetch"
    few = len(_marked(run))
    which = "the longest is" if few == 1 else f"the {few:,} longest are"
    drawn = f"; {which} marked" if few < slow["all"] else ""
    return f"{count} waited far longer than most, up to {format_seconds(longest)}{drawn}."
