"""The charts of a report: steps and stall, ranks, throughput, the machine, waits and losses.

Each function answers one question with one panel for each run; ``None`` where there is nothing to
draw. Beside every panel stands in words what it shows.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence

from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.thresholds import DATA_STALL
from fast_axolotl.record.units import count_words, format_count, format_seconds, format_share
from fast_axolotl.report.plot import (
    Chart,
    Curves,
    Figure,
    Legend,
    Panel,
    Scale,
    across,
    area,
    axis,
    choose_scale,
    colour,
    dots_if,
    largest,
    line,
    phase_shapes,
    plain_name,
    time_axes,
    words,
)
from fast_axolotl.report.system_charts import disk_chart, gpu_chart, memory_chart

__all__ = [
    "loss_chart",
    "make_charts",
    "rank_chart",
    "stall_chart",
    "throughput_chart",
    "waits_chart",
]

_LEAST_MARKED = 20
_MOST_DWARFING = 5
"""Steps that may lie beyond the scale: such as the first ones, which compile."""
_MOST_DEMAND = 3.0
"""Times the rows a second, up to which the line of the demand is drawn."""
_RUN_ROLES = ("muted", "accent", "step", "pss", "anon", "hwm")
_PHASE_WORDS = {"warmup": "warm-up", "replay": "cached batch"}
_WAIT_TICKS = {
    1e-6: "1 µs",
    1e-5: "10 µs",
    1e-4: "100 µs",
    1e-3: "1 ms",
    1e-2: "10 ms",
    1e-1: "100 ms",
    1.0: "1 s",
    10.0: "10 s",
    100.0: "100 s",
    1000.0: "1,000 s",
}

Beyond = list[tuple[float, str, float]]
"""Points beyond the scale: when, at which step, and how long the longest one took."""


def make_charts(runs: Sequence[Curves]) -> list[Chart]:
    """The charts that there is something to draw for."""
    charts = (
        stall_chart(runs),
        rank_chart(runs),
        throughput_chart(runs),
        memory_chart(runs),
        disk_chart(runs),
        waits_chart(runs),
        gpu_chart(runs),
        loss_chart(runs),
    )
    return [chart for chart in charts if chart is not None]


def stall_chart(runs: Sequence[Curves]) -> Chart | None:
    """Step time above, share of waiting below, on one time axis."""
    shown = [run for run in runs if run.has("steps")]
    if not shown:
        return None
    times, axes = time_axes(runs, "steps")
    # The scale ends above all steady steps, unless a handful of them dwarfs the rest.
    top = 0.0
    for run in shown:
        longest = _longest_steps(run)
        pairs = zip(longest, run.series["steps"]["is_steady"], strict=True)
        ordered = sorted([high for high, is_steady in pairs if is_steady] or longest, reverse=True)
        is_dwarfed = len(ordered) > 4 * _MOST_DWARFING and ordered[0] > 5 * ordered[_MOST_DWARFING]
        top = max(top, 1.5 * ordered[_MOST_DWARFING] if is_dwarfed else 1.08 * ordered[0])
    top = top or 1.0
    scale = choose_scale("seconds", top)
    stalls = [run.series["stall"] for run in runs if run.has("stall")]
    share = max((largest([one["host"], one.get("device", [])]) for one in stalls), default=0.0)
    panels = []
    for run, time in zip(runs, axes, strict=True):
        if not run.has("steps"):
            text = "No step was recorded, so there is nothing to draw."
            panels.append(Panel(name=run.name, text=text))
            continue
        beyond = _points_beyond(run, top)
        layout: Figure = {
            "xaxis": {**time, "anchor": "y2"},
            "yaxis": axis("step time", scale.unit, domain=[0.42, 1], range=[0, top * scale.by]),
            "yaxis2": axis(
                "stall",
                domain=[0, 0.32],
                range=[0, min(1.0, max(0.25, 1.15 * share))],
                tickformat=".0%",
                nticks=4,
            ),
            "shapes": phase_shapes(run, times),
            "annotations": [],
        }
        marks = [t * times.by for one in run.series.get("marks", {}).values() for t in one["t"]]
        dotted: Figure = {"axis": "x", "alpha": 0.55, "layer": "below", "width": 1, "dash": "dot"}
        layout["shapes"] += [across(t, "accent", **dotted) for t in marks]
        layout["shapes"].append(across(DATA_STALL, "muted", axis="y2", width=1.2, dash="dash"))
        place = {"xref": "paper", "yref": "y2", "xanchor": "left", "yanchor": "middle"}
        label = words(f"{100 * DATA_STALL:.0f} %", "muted", 1, DATA_STALL, **place)
        layout["annotations"].append(label)
        for phase in run.series.get("phases", []):
            name = html.escape(plain_name(_PHASE_WORDS.get(phase["name"], phase["name"])))
            label = words(name, "muted", phase["begin"] * times.by, 1, xanchor="left")
            layout["annotations"].append(label)
        traces = _step_traces(run, times, scale)
        traces += _mark_traces(run, times, scale, top, beyond)
        if run.has("stall"):
            x, host = run.ref("stall", "t", times.by), run.ref("stall", "host")
            dots = dots_if(len(run.series["stall"]["t"]) == 1, size=8)
            more = {"yaxis": "y2", "form": ".1%", **dots}
            if "device" in run.series["stall"]:
                device = run.ref("stall", "device")
                traces.append(area(x, device, "wait", "stall of the device", **more))
                name = "by the host's clock"
                traces.append(line(x, host, "host", name, width=1.2, dash="dot", **more))
            else:
                traces.append(area(x, host, "wait", "stall", **more))
        figure = {"traces": traces, "layout": layout, "height": 380, "right": 40}
        panels.append(Panel(name=run.name, text=_stall_text(run, beyond), figure=figure))
    legend = [Legend(role="step", label="time of a step")]
    if any("low" in run.series["steps"] for run in shown):
        spread = "shortest to longest step of a point"
        legend.append(Legend(role="step", label=spread, shape="area"))
    legend.append(Legend(role="wait", label="of it waiting for data", shape="area"))
    if any(run.has("slow") for run in runs):
        outlier = "outlier: a fetch that waited far longer than most"
        legend.append(Legend(role="wait", label=outlier, shape="mark"))
    if any("device" in one for one in stalls):
        legend.append(Legend(role="host", label="waiting by the host's clock", shape="dashed"))
    if any(run.has("marks") for run in runs):
        legend.append(Legend(role="accent", label="new shard or epoch", shape="dashed"))
    return Chart(
        name="stall",
        title="Step time and stall",
        text="Above, how long a step took; below, which share of the time went into waiting for "
        "data. Shaded stretches are left out of the figures.",
        legend=tuple(legend),
        panels=tuple(panels),
    )


def _longest_steps(run: Curves) -> list[float]:
    """Of every point."""
    steps = run.series["steps"]
    return [value or 0.0 for value in steps.get("high", steps["mean"])]


def _points_beyond(run: Curves, top: float) -> Beyond:
    steps = run.series["steps"]
    numbers = steps.get("high_step", steps["step"])
    points = []
    for row, high in enumerate(_longest_steps(run)):
        if high > top:
            where, first = f"at step {numbers[row] or 0:,}", steps["step"][row]
            if numbers[row] is None:
                where = f"among steps {first:,} to {first + steps['steps'][row] - 1:,}"
            points.append((steps["t"][row], where, high))
    return points


def _step_traces(run: Curves, times: Scale, scale: Scale) -> list[Figure]:
    x, unit = run.ref("steps", "t", times.by), f" {scale.unit}"
    dots = dots_if(len(run.series["steps"]["t"]) == 1, size=8)

    def numbers(column: str) -> Figure:
        """The number of the step behind its time, where every one is known."""
        if None in run.series["steps"][column]:
            return {}
        hover = f"%{{y:,.4~g}}{unit} at step %{{customdata:,}}"
        return {"customdata": run.ref("steps", column), "hovertemplate": hover}

    traces = []
    has_spread = "low" in run.series["steps"]
    if has_spread:
        low, high = run.ref("steps", "low", scale.by), run.ref("steps", "high", scale.by)
        fill = {"fill": "tonexty", "fillcolor": colour("step", 0.22)}
        longest = {"unit": unit, **fill, **numbers("high_step")}
        traces.append(line(x, low, "step", "shortest", width=0, unit=unit))
        traces.append(line(x, high, "step", "longest", width=0.8, **longest))
    mean = {"unit": unit, **dots, **({} if has_spread else numbers("step"))}
    traces.append(line(x, run.ref("steps", "mean", scale.by), "step", "step", **mean))
    wait = run.ref("steps", "wait", scale.by)
    traces.append(area(x, wait, "wait", "waiting", unit=unit, width=1, alpha=0.35, **dots))
    return traces


def _mark_traces(
    run: Curves, times: Scale, scale: Scale, top: float, beyond: Beyond
) -> list[Figure]:
    """Outliers among the fetches, and steps beyond the scale."""
    mark = {"type": "scatter", "mode": "markers", "cliponaxis": False, "hovertemplate": "%{text}"}
    traces: list[Figure] = []
    outliers = _outliers(run)
    if outliers:
        traces.append(
            {
                **mark,
                "name": "outlier",
                "x": [t * times.by for t, *_ in outliers],
                "y": [min(seconds, top) * scale.by for *_, seconds in outliers],
                "text": [
                    f"{format_seconds(seconds)} at fetch {fetch:,}, sample {row:,}"
                    for _, fetch, row, seconds in outliers
                ],
                "marker": {
                    "symbol": "diamond",
                    "size": 7,
                    "color": colour("wait"),
                    "line": {"color": colour("card"), "width": 1},
                },
            }
        )
    if beyond:
        traces.append(
            {
                **mark,
                "name": "beyond the scale",
                "x": [t * times.by for t, _, _ in beyond],
                "y": [0.985 * top * scale.by] * len(beyond),
                "text": [f"{format_seconds(high)} {where}" for _, where, high in beyond],
                "marker": {"symbol": "triangle-up", "size": 9, "color": colour("step")},
            }
        )
    return traces


def _outliers(run: Curves) -> list[tuple[float, int, int, float]]:
    """Outliers longer than a usual step, or else the longest few: where, fetch, sample, wait."""
    if not run.has("slow"):
        return []
    slow = run.series["slow"]
    points = list(zip(slow["t"], slow["fetch"], slow["row"], slow["seconds"], strict=True))
    usual = run.summary.step_p50_seconds
    long = [point for point in points if usual is not None and point[3] > usual]
    return long or sorted(sorted(points, key=lambda point: -point[3])[:_LEAST_MARKED])


def _stall_text(run: Curves, beyond: Beyond) -> str:
    summary = run.summary
    parts = []
    if summary.world_size > 1:
        parts.append(f"Rank {run.series['rank']} of {summary.world_size}, which decides.")
    if summary.step_p50_seconds is not None:
        parts.append(
            f"Half of the steps took {format_seconds(summary.step_p50_seconds)} or less, 95 % took "
            f"{format_seconds(summary.step_p95_seconds)} or less."
        )
    together = max(run.series["steps"].get("steps", [1]))
    if together > 1:
        parts.append(f"Up to {together:,} steps are one point.")
    if summary.stall_fraction is not None:
        whose = "the device" if summary.stall_source == "device" else "the loop"
        share = format_share(summary.stall_fraction)
        parts.append(f"For {share} of the time {whose} waited for data.")
    if run.has("slow"):
        slow, marked = run.series["slow"], len(_outliers(run))
        count = f"{slow['all']:,} fetches" if slow["all"] > 1 else "One fetch"
        which = "the longest is" if marked == 1 else f"the {marked:,} longest are"
        drawn = f"; {which} marked" if marked < slow["all"] else ""
        longest = format_seconds(max(slow["seconds"]))
        parts.append(f"{count} waited far longer than most, up to {longest}{drawn}.")
    for name, marks in run.series.get("marks", {}).items():
        few = f", one in {marks['every']:,} drawn" if marks["every"] > 1 else ""
        parts.append(f"{marks['all']:,} {name} boundaries{few}.")
    if beyond:
        _, where, high = max(beyond, key=lambda point: point[2])
        more = f" and {len(beyond) - 1:,} more points" if len(beyond) > 1 else ""
        parts.append(f"Beyond the scale (▲): {format_seconds(high)} {where}{more}.")
    return " ".join(parts) or "No step was recorded, so there is nothing to draw."


def rank_chart(runs: Sequence[Curves]) -> Chart | None:
    """The stall of every rank."""
    if all(len(run.summary.ranks) < 2 for run in runs):
        return None
    stalls = [[finite(rank.stall_fraction) for rank in run.summary.ranks] for run in runs]
    top = largest(stalls)
    panels = []
    for run, column in zip(runs, stalls, strict=True):
        ranks, deciding = run.summary.ranks, run.series.get("rank")
        if len(ranks) < 2:
            panels.append(Panel(name=run.name, text="There is one rank."))
            continue
        roles = ["wait" if rank.rank == deciding else "step" for rank in ranks]
        bars = {
            "type": "bar",
            "name": "waiting",
            "x": [rank.rank for rank in ranks],
            "y": column,
            "marker": {"color": [colour(role, 0.8) for role in roles]},
            "hovertemplate": "rank %{x}: %{y:.1%}<extra></extra>",
        }
        last = max(rank.rank for rank in ranks)
        layout = {
            "xaxis": axis("rank", range=[-0.7, last + 0.7], tickformat="d"),
            "yaxis": axis("stall", range=[0, max(0.05, min(1.0, 1.12 * top))], tickformat=".0%"),
            "hovermode": "closest",
            "bargap": 0.25,
        }
        known = sorted(value for value in column if value is not None)
        text = f"{len(column)} ranks, none of which has steady steps."
        if known:
            median = format_share(statistics.median_low(known))
            text = (
                f"{len(column)} ranks: from {format_share(known[0])} to {format_share(known[-1])}, "
                f"half of them {median} or less."
            )
            text += f" Rank {deciding} decides." if deciding is not None else ""
        figure = {"traces": [bars], "layout": layout, "height": 220}
        panels.append(Panel(name=run.name, text=text, figure=figure))
    return Chart(
        name="ranks",
        title="Ranks",
        text="How much each rank waited for data. The slowest rank sets the pace of all.",
        legend=(
            Legend(role="step", label="share of waiting, a rank", shape="bar"),
            Legend(role="wait", label="the rank that decides", shape="bar"),
        ),
        panels=tuple(panels),
    )


def throughput_chart(runs: Sequence[Curves]) -> Chart | None:
    """Rows a second at the boundary of loader and model, and tokens."""
    columns = {
        run.place: next(
            (name for name in ("rows", "samples") if f"{name}_per_second" in throughput), ""
        )
        for run in runs
        if (throughput := run.series.get("throughput"))
    }
    if not any(columns.values()):
        return None
    shown = [run for run in runs if columns.get(run.place)]
    times, axes = time_axes(runs, "throughput")
    rows = largest(run.series["throughput"][f"{columns[run.place]}_per_second"] for run in shown)
    tokens = largest(
        run.series["throughput"].get("real_tokens_per_second", [])
        for run in runs
        if run.has("throughput")
    )
    nouns = {
        run.place: "rows"
        if run.summary.rows_per_second is not None or columns[run.place] == "rows"
        else "samples"
        for run in runs
        if run.has("throughput")
    }
    panels, has_demand = [], False
    for run, time in zip(runs, axes, strict=True):
        column = columns.get(run.place)
        if not column:
            panels.append(Panel(name=run.name, text="No row was counted."))
            continue
        throughput, noun = run.series["throughput"], nouns[run.place]
        x = run.ref("throughput", "t", times.by)
        more = {"form": ",.4~s", "alpha": 0.16, **dots_if(len(throughput["t"]) <= 1)}
        y = run.ref("throughput", f"{column}_per_second")
        traces = [area(x, y, "step", f"{noun}/s", **more)]
        shapes = phase_shapes(run, times)
        # Not where the line of the demand would press the rows to the ground.
        demand = run.summary.demand_rows_per_second
        top = rows
        if demand is not None and noun == "rows" and 0 < demand < _MOST_DEMAND * rows:
            shapes.append(across(demand, "muted", width=1.2, dash="dash"))
            top, has_demand = max(rows, demand), True
        layout: Figure = {
            "xaxis": {**time, "anchor": "y2" if tokens else "y"},
            "yaxis": axis(
                f"{noun}/s",
                range=[0, top * 1.12 or 1.0],
                tickformat="~s",
                domain=[0.5 if tokens else 0, 1],
            ),
            "shapes": shapes,
        }
        if tokens:
            ends = [0, tokens * 1.12]
            layout["yaxis2"] = axis("tokens/s", tickformat="~s", range=ends, domain=[0, 0.4])
            if "real_tokens_per_second" in throughput:
                y = run.ref("throughput", "real_tokens_per_second")
                traces.append(area(x, y, "pss", "tokens/s", yaxis="y2", **more))
        figure = {"traces": traces, "layout": layout, "height": 320 if tokens else 240}
        summary = run.summary
        rate = summary.rows_per_second if noun == "rows" else summary.samples_per_second
        parts = []
        if rate is not None:
            parts.append(f"{format_count(rate)} {noun} a second in the steady phase.")
        if summary.tokens_per_second is not None:
            parts.append(f"{format_count(summary.tokens_per_second)} real tokens a second.")
        if noun == "rows" and demand is not None:
            parts.append(f"The model would take {format_count(demand)} rows a second.")
        if summary.free_rows_per_second is not None:
            parts.append(f"The loader alone gave {format_count(summary.free_rows_per_second)}.")
        text = " ".join(parts) or "The run has no steady phase; the curve is of its warm-up."
        panels.append(Panel(name=run.name, text=text, figure=figure))
    label = f"{' or '.join(sorted(set(nouns.values())))} a second"
    legend = [Legend(role="step", label=label, shape="area")]
    if tokens:
        legend.append(Legend(role="pss", label="real tokens a second", shape="area"))
    if has_demand:
        legend.append(Legend(role="muted", label="what the model would take", shape="dashed"))
    return Chart(
        name="throughput",
        title="Reader throughput",
        text="What crosses the boundary between loader and model, all ranks together.",
        legend=tuple(legend),
        panels=tuple(panels),
    )


def waits_chart(runs: Sequence[Curves]) -> Chart | None:
    """The distribution of the waits of single fetches."""
    waits = [run.series["waits"] for run in runs if run.has("waits")]
    if not waits:
        return None
    seconds = [value for one in waits for value in one["seconds"]]
    top = min(1.0, 1.1 * max(largest([one["fetch_share"], one["wait_share"]]) for one in waits))
    ends = math.log10(min(seconds)) - 0.15, math.log10(max(seconds)) + 0.15
    if ends[1] - ends[0] < 2:
        middle = sum(ends) / 2
        ends = middle - 1, middle + 1
    layout = {
        "xaxis": axis(
            "wait of a fetch",
            type="log",
            range=list(ends),
            tickvals=list(_WAIT_TICKS),
            ticktext=list(_WAIT_TICKS.values()),
            hoverformat=".2~s",
            unifiedhovertitle={"text": "%{x:.2~s}s"},
        ),
        "yaxis": axis("share", range=[0, top], tickformat=".0%"),
        "bargap": 0.1,
    }
    panels = []
    for run in runs:
        if not run.has("waits"):
            text = "No fetch of a steady phase was recorded, so there is nothing to draw."
            panels.append(Panel(name=run.name, text=text))
            continue
        own = run.series["waits"]["seconds"]
        x = run.ref("waits", "seconds")
        bars = {
            "type": "bar",
            "name": "fetches",
            "x": x,
            "y": run.ref("waits", "fetch_share"),
            "width": [0.2 * value for value in own],
            "text": list(map(_format_wait, own)),
            "textposition": "none",
            "marker": {"color": colour("step", 0.65)},
            "hovertemplate": "%{y:.1%} near %{text}",
        }
        curve = line(x, run.ref("waits", "wait_share"), "wait", "waiting", form=".1%", width=2)
        if len(own) == 1:
            curve |= {"mode": "markers", "marker": {"size": 8, "color": colour("wait")}}
        figure = {"traces": [bars, curve], "layout": layout, "height": 260}
        summary = run.summary
        parts = [f"{count_words(run.series['waits']['fetches'], 'fetch')}."]
        if summary.wait_p50_seconds is not None and summary.wait_p95_seconds is not None:
            parts.append(
                f"Half waited {_format_wait(summary.wait_p50_seconds)} or less, 95 % "
                f"{_format_wait(summary.wait_p95_seconds)} or less, the longest "
                f"{_format_wait(summary.wait_max_seconds or 0.0)}."
            )
        if summary.worst_percent_share is not None:
            share = f"{100 * summary.worst_percent_share:.0f} %"
            parts.append(f"The worst 1 % of them make up {share} of all waiting.")
        panels.append(Panel(name=run.name, text=" ".join(parts), figure=figure))
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


def _format_wait(seconds: float) -> str:
    scale = choose_scale("seconds", seconds)
    return f"{format_count(seconds * scale.by)} {scale.unit}"


def loss_chart(runs: Sequence[Curves]) -> Chart | None:
    """The trainer's own losses, all runs in one figure: curves on top of each other are equal."""
    shown = [run for run in runs if run.has("losses")]
    if not shown:
        return None
    traces, legend, parts = [], [], []
    for number, run in enumerate(shown):
        losses = run.series["losses"]
        role = _RUN_ROLES[number % len(_RUN_ROLES)]
        traces.append(
            line(
                run.ref("losses", "step"),
                run.ref("losses", "loss"),
                role,
                html.escape(plain_name(run.name)),
                form=",.5~g",
                width=1.8 if number else 3,
                dash=("dash" if number % 2 else "dot") if number else "",
                **dots_if(len(losses["loss"]) == 1),
            )
        )
        legend.append(Legend(role=role, label=run.name, shape="dashed" if number else "line"))
        known = [value for value in losses["loss"] if value is not None]
        name = f"{plain_name(run.name)}: " if len(shown) > 1 else ""
        text = f"{name}no loss is a number."
        if known:
            text = f"{name}from {known[0]:,.4g} to {known[-1]:,.4g}."
            if losses["not_finite"]:
                first = losses["first_not_finite"]
                text += f" {losses['not_finite']:,} are NaN or infinite, first at step {first:,}."
        parts.append(text)
    ends = sorted({run.series["losses"]["first_not_finite"] for run in shown} - {None})
    layout = {
        "xaxis": axis("step", unifiedhovertitle={"text": "step %{x:,}"}),
        "yaxis": axis("loss"),
        "shapes": [across(step, "bad", axis="x", width=2) for step in ends],
        "annotations": [words(f"NaN or infinite: step {step:,}", "bad", step, 1) for step in ends],
    }
    figure = {"traces": traces, "layout": layout, "height": 260}
    same = " Where runs learned the same, their curves lie on each other." if parts[1:] else ""
    return Chart(
        name="losses",
        title="Loss",
        text=f"As the trainer logged it.{same}",
        legend=tuple(legend) if len(shown) > 1 else (),
        panels=(Panel(name="", text=" ".join(parts), figure=figure),),
    )
