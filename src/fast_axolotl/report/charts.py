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
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    format_share,
)
from fast_axolotl.report import plot
from fast_axolotl.report.content import VERDICTS, describe_regimes, verdict_title
from fast_axolotl.report.plot import Chart, Curves, Figure, Legend, Scale

_LEAST_MARKED = 20
_MOST_DWARFING = 5
"""Steps that may lie beyond the scale: such as the first ones, which compile."""
_MOST_DEMAND = 3.0
"""Times the rows a second, up to which the line of the demand is drawn."""
_NEAR = 3.0
"""A limit is drawn to scale where it is at most this many times the highest curve."""

_LEAST_SAMPLED = 0.7
"""Share of the run up to which a working set has to be sampled to be called that of the run."""

_MEMORY = (
    ("hwm_bytes", "hwm", "peak resident"),
    ("working_set_bytes", "pss", "working set"),
    ("anon_bytes", "anon", "anonymous"),
)
_SWAP = ("swap_in_bytes_per_second", "swap_out_bytes_per_second")
_UNWATCHED = (
    "Not sampled. To get this chart, start the command with fast-axolotl measure -- COMMAND."
)
_RUN_ROLES = ("muted", "accent", "step", "pss", "anon", "hwm")
_PHASE_WORDS = {"warmup": "warm-up", "replay": "cached batch"}
_WAIT_TICKS = [f"{count} {unit}" for unit in ("µs", "ms", "s") for count in (1, 10, 100)]

_LEAST_LABELLED = 0.08
"""Share of the time axis that the words on a regime take."""
_REGIME_ROLES = {
    kind: "muted" if look.tone == "plain" else look.tone for kind, look in VERDICTS.items()
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
    times, axes = plot.time_axes(runs, "steps")
    # The scale ends above all steady steps, unless a handful of them dwarfs the rest.
    top = 0.0
    longest: dict[int, list[float]] = {}
    for run in shown:
        steps = run.series["steps"]
        highs = longest[run.place] = [value or 0.0 for value in steps.get("high", steps["mean"])]
        pairs = zip(highs, steps["is_steady"], strict=True)
        ordered = sorted([high for high, is_steady in pairs if is_steady] or highs, reverse=True)
        is_dwarfed = len(ordered) > 4 * _MOST_DWARFING and ordered[0] > 5 * ordered[_MOST_DWARFING]
        top = max(top, 1.5 * ordered[_MOST_DWARFING] if is_dwarfed else 1.08 * ordered[0])
    top = top or 1.0
    scale = plot.choose_scale("seconds", top)
    stalls = [run.series["stall"] for run in runs if run.has("stall")]
    talks = [run.series["communication"]["exposed"] for run in runs if run.has("communication")]
    waits = [column for one in stalls for column in (one["host"], one.get("device", []))]
    share = plot.largest([*waits, *talks])
    chart = Chart(
        "stall",
        "Step time and stall",
        "Top: time per step. Bottom: share of the time spent waiting for data. Shaded parts are "
        "not counted in the figures.",
        [Legend("step", "time per step")],
    )
    if any("low" in run.series["steps"] for run in shown):
        chart.legend.append(Legend("step", "shortest to longest step in a point", "area"))
    chart.legend.append(Legend("wait", "time spent waiting for data", "area"))
    if any(run.has("slow") for run in runs):
        outlier = "outlier: a fetch that waited far longer than most"
        chart.legend.append(Legend("wait", outlier, "mark"))
    if any("device" in one for one in stalls):
        chart.legend.append(Legend("host", "CPU-side wait", "dashed"))
    if talks:
        chart.legend.append(Legend("hwm", "exposed communication in a profiler window"))
    if any(len(run.summary.regimes) > 1 for run in runs):
        chart.legend.append(Legend("ink", "the limit of the run changes here"))
    if any(run.has("marks") for run in runs):
        chart.legend.append(Legend("accent", "new shard or epoch", "dashed"))
    for run, time in zip(runs, axes, strict=True):
        if not run.has("steps"):
            chart.add(run.name, "No step was recorded.")
            continue
        steps, beyond = run.series["steps"], []
        for row, high in enumerate(longest[run.place]):
            if high > top:
                number, first = steps.get("high_step", steps["step"])[row], steps["step"][row]
                where = f"at step {number or 0:,}"
                if number is None:
                    where = f"among steps {first:,} to {first + steps['steps'][row] - 1:,}"
                beyond.append((steps["t"][row], where, high))
        regimes = run.summary.regimes if len(run.summary.regimes) > 1 else ()
        marks = [t * times.by for one in run.series.get("marks", {}).values() for t in one["t"]]
        dotted: Figure = {"axis": "x", "alpha": 0.55, "layer": "below", "width": 1, "dash": "dot"}
        shapes = plot.phase_shapes(run, times)
        shapes += [plot.across(t, "accent", **dotted) for t in marks]
        shapes.append(plot.across(DATA_STALL, "muted", axis="y2", width=1.2, dash="dash"))
        place = {"xref": "paper", "yref": "y2", "xanchor": "left", "yanchor": "middle"}
        labels = [plot.words(f"{100 * DATA_STALL:.0f} %", "muted", 1, DATA_STALL, **place)]
        for phase in run.series.get("phases", []):
            name = html.escape(plot.plain_name(_PHASE_WORDS.get(phase["name"], phase["name"])))
            labels.append(plot.words(name, "muted", phase["begin"] * times.by, 1, xanchor="left"))
        for number, regime in enumerate(regimes):
            role, begin = _REGIME_ROLES[regime.kind], regime.begin_seconds * times.by
            strip = {"x0": begin, "x1": regime.end_seconds * times.by, "y0": 0.33, "y1": 0.36}
            fill = {"fillcolor": plot.colour(role, 0.8), "line": {"width": 0}}
            shapes.append({"type": "rect", "xref": "x", "yref": "paper", **strip, **fill})
            lasted = regime.end_seconds - regime.begin_seconds
            if lasted >= _LEAST_LABELLED * regimes[-1].end_seconds:
                title = verdict_title(regime.kind, "")
                labels.append(plot.words(title, role, begin, 0.36, xanchor="left"))
            if number:
                shapes.append(plot.across(begin, "ink", axis="x", width=1.5))
        ends = [0, min(1.0, max(0.25, 1.15 * share))]
        layout = {
            "xaxis": {**time, "anchor": "y2"},
            "yaxis": plot.axis(
                "step time", scale.unit, domain=[0.42, 1], range=[0, top * scale.by]
            ),
            "yaxis2": plot.axis("stall", domain=[0, 0.32], range=ends, tickformat=".0%", nticks=4),
            "shapes": shapes,
            "annotations": labels,
        }
        traces = _step_traces(run, times, scale, top, beyond)
        if run.has("stall"):
            x, host = run.ref("stall", "t", times.by), run.ref("stall", "host")
            dots = plot.dots_if(len(run.series["stall"]["t"]) == 1, size=8)
            more = {"yaxis": "y2", "form": ".1%", **dots}
            if "device" in run.series["stall"]:
                device = run.ref("stall", "device")
                traces.append(plot.area(x, device, "wait", "GPU idle, waiting for data", **more))
                name = "CPU-side wait"
                traces.append(plot.line(x, host, "host", name, width=1.2, dash="dot", **more))
            else:
                traces.append(plot.area(x, host, "wait", "stall", **more))
        if run.has("communication"):
            x, y = run.ref("communication", "t", times.by), run.ref("communication", "exposed")
            more = {"yaxis": "y2", "form": ".1%", "mode": "lines+markers"}
            traces.append(plot.line(x, y, "hwm", "exposed communication", **more))
        text = _stall_text(run, beyond)
        chart.add(run.name, text, traces=traces, layout=layout, height=380, right=40)
    return chart


def _step_traces(
    run: Curves, times: Scale, scale: Scale, top: float, beyond: Beyond
) -> list[Figure]:
    """Steps and their waits, outliers among the fetches, and steps beyond the scale."""
    x, unit = run.ref("steps", "t", times.by), f" {scale.unit}"
    dots = plot.dots_if(len(run.series["steps"]["t"]) == 1, size=8)

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
        fill = {"fill": "tonexty", "fillcolor": plot.colour("step", 0.22)}
        longest = {"unit": unit, **fill, **numbers("high_step")}
        traces.append(plot.line(x, low, "step", "shortest", width=0, unit=unit))
        traces.append(plot.line(x, high, "step", "longest", width=0.8, **longest))
    mean = {"unit": unit, **dots, **({} if has_spread else numbers("step"))}
    traces.append(plot.line(x, run.ref("steps", "mean", scale.by), "step", "step", **mean))
    wait = run.ref("steps", "wait", scale.by)
    traces.append(plot.area(x, wait, "wait", "waiting", unit=unit, width=1, alpha=0.35, **dots))
    marks = {"type": "scatter", "mode": "markers", "cliponaxis": False, "hovertemplate": "%{text}"}
    if outliers := _outliers(run):
        edge = {"line": {"color": plot.colour("card"), "width": 1}}
        outlier_marks = {
            "name": "outlier",
            "x": [t * times.by for t, *_ in outliers],
            "y": [min(seconds, top) * scale.by for *_, seconds in outliers],
            "text": [
                f"{format_seconds(seconds)} at fetch {fetch:,}, sample {row:,}"
                for _, fetch, row, seconds in outliers
            ],
            "marker": {"symbol": "diamond", "size": 7, "color": plot.colour("wait"), **edge},
        }
        traces.append({**marks, **outlier_marks})
    if beyond:
        beyond_marks = {
            "name": "beyond the scale",
            "x": [t * times.by for t, _, _ in beyond],
            "y": [0.985 * top * scale.by] * len(beyond),
            "text": [f"{format_seconds(high)} {where}" for _, where, high in beyond],
            "marker": {"symbol": "triangle-up", "size": 9, "color": plot.colour("step")},
        }
        traces.append({**marks, **beyond_marks})
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
        parts.append(f"Rank {run.series['rank']} of {summary.world_size}, the slowest to get data.")
    if summary.step_p50_seconds is not None:
        parts.append(
            f"Half of the steps took {format_seconds(summary.step_p50_seconds)} or less, 95 % took "
            f"{format_seconds(summary.step_p95_seconds)} or less."
        )
    together = max(run.series["steps"].get("steps", [1]))
    if together > 1:
        parts.append(f"A point covers up to {together:,} steps.")
    if summary.stall_fraction is not None:
        whose = "the GPU" if summary.stall_source == "device" else "the training loop"
        share = format_share(summary.stall_fraction)
        parts.append(f"For {share} of the time {whose} waited for data.")
    if run.has("communication"):
        exposed = format_share(summary.exposed_communication_fraction)
        parts.append(f"For {exposed} of the profiled time only communication ran.")
    if run.has("slow"):
        slow, marked = run.series["slow"], len(_outliers(run))
        count = f"{slow['all']:,} fetches" if slow["all"] > 1 else "One fetch"
        which = "the longest is" if marked == 1 else f"the {marked:,} longest are"
        drawn = f"; {which} marked" if marked < slow["all"] else ""
        longest = format_seconds(max(slow["seconds"]))
        parts.append(f"{count} waited far longer than most, up to {longest}{drawn}.")
    for name, marks in run.series.get("marks", {}).items():
        few = f", one in {marks['every']:,} drawn" if marks["every"] > 1 else ""
        noun = "boundary" if marks["all"] == 1 else "boundaries"
        parts.append(f"{marks['all']:,} {name} {noun}{few}.")
    parts += [f"{', '.join(regime)}." for regime in describe_regimes(summary)]
    if beyond:
        _, where, high = max(beyond, key=lambda point: point[2])
        more = f" and {len(beyond) - 1:,} more points" if len(beyond) > 1 else ""
        parts.append(f"Beyond the scale (▲): {format_seconds(high)} {where}{more}.")
    return " ".join(parts) or "No step was recorded."


def rank_chart(runs: Sequence[Curves]) -> Chart | None:
    """The stall of every rank."""
    if all(len(run.summary.ranks) < 2 for run in runs):
        return None
    stalls = [[finite(rank.stall_fraction) for rank in run.summary.ranks] for run in runs]
    ends = [0, max(0.05, min(1.0, 1.12 * plot.largest(stalls)))]
    chart = Chart(
        "ranks",
        "Ranks",
        "How much each rank waited for data. Every step takes as long as the rank that waits "
        "longest in it, so all ranks together lose more than any single rank waits.",
        [
            Legend("step", "stall of a rank", "bar"),
            Legend("wait", "slowest rank to get data", "bar"),
        ],
    )
    for run, column in zip(runs, stalls, strict=True):
        ranks, deciding = run.summary.ranks, run.series.get("rank")
        if len(ranks) < 2:
            chart.add(run.name, "Only one rank.")
            continue
        roles = ["wait" if rank.rank == deciding else "step" for rank in ranks]
        bars = {
            "type": "bar",
            "name": "waiting",
            "x": [rank.rank for rank in ranks],
            "y": column,
            "marker": {"color": [plot.colour(role, 0.8) for role in roles]},
            "hovertemplate": "rank %{x}: %{y:.1%}<extra></extra>",
        }
        last = max(rank.rank for rank in ranks)
        layout = {
            "xaxis": plot.axis(
                "rank", range=[-0.7, last + 0.7], tick0=0, dtick=max(1, (last + 1) // 16)
            ),
            "yaxis": plot.axis("stall", range=ends, tickformat=".0%"),
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
            together = format_share(run.summary.stall_fraction)
            text += f" Together they lose {together}."
            text += f" Rank {deciding} is the slowest to get data." if deciding is not None else ""
        chart.add(run.name, text, traces=[bars], layout=layout, height=220)
    return chart


def throughput_chart(runs: Sequence[Curves]) -> Chart | None:
    """Rows a second at the boundary of loader and model, and tokens."""
    columns = {}
    """Of each run that counted any: its rows, or else its samples, and what to call them."""
    for run in runs:
        throughput = run.series.get("throughput", {})
        column = next((one for one in ("rows", "samples") if f"{one}_per_second" in throughput), "")
        if column:
            noun = "rows" if run.summary.rows_per_second is not None else column
            columns[run.place] = f"{column}_per_second", noun
    if not columns:
        return None
    times, axes = plot.time_axes(runs, "throughput")
    counted = [run.series["throughput"] for run in runs if run.has("throughput")]
    shown = [run for run in runs if run.place in columns]
    rows = plot.largest(run.series["throughput"][columns[run.place][0]] for run in shown)
    tokens = plot.largest(throughput.get("real_tokens_per_second", []) for throughput in counted)
    lower = plot.axis("tokens/s", tickformat="~s", range=[0, tokens * 1.12]) if tokens else None
    label = f"{' or '.join(sorted({noun for _, noun in columns.values()}))} per second"
    chart = Chart(
        "throughput",
        "Reader throughput",
        "What the model receives from the loader, all ranks together.",
        [Legend("step", label, "area")],
    )
    if tokens:
        chart.legend.append(Legend("pss", "real tokens per second", "area"))
    has_demand = False
    for run, time in zip(runs, axes, strict=True):
        if run.place not in columns:
            chart.add(run.name, "No row was counted.")
            continue
        summary, throughput = run.summary, run.series["throughput"]
        column, noun = columns[run.place]
        x, y = run.ref("throughput", "t", times.by), run.ref("throughput", column)
        more = {"form": ",.4~s", "alpha": 0.16, **plot.dots_if(len(throughput["t"]) <= 1)}
        traces = [plot.area(x, y, "step", f"{noun}/s", **more)]
        if "real_tokens_per_second" in throughput and tokens:
            y = run.ref("throughput", "real_tokens_per_second")
            traces.append(plot.area(x, y, "pss", "tokens/s", yaxis="y2", **more))
        demand = summary.demand_rows_per_second if noun == "rows" else None
        # Not where its line would press the rows to the ground.
        drawn = demand if demand is not None and 0 < demand < _MOST_DEMAND * rows else 0.0
        upper = plot.axis(f"{noun}/s", range=[0, max(rows, drawn) * 1.12 or 1.0], tickformat="~s")
        layout = plot.stacked_layout(run, times, time, upper, lower)
        if drawn:
            layout["shapes"].append(plot.across(drawn, "muted", width=1.2, dash="dash"))
            has_demand = True
        rate = summary.rows_per_second if noun == "rows" else summary.samples_per_second
        parts = []
        if rate is not None:
            parts.append(f"{format_count(rate)} {noun} per second after the warm-up.")
        if summary.tokens_per_second is not None:
            parts.append(f"{format_count(summary.tokens_per_second)} real tokens per second.")
        if demand is not None:
            parts.append(f"The model could consume {format_count(demand)} rows per second.")
        if summary.free_rows_per_second is not None:
            parts.append(f"The loader alone delivers {format_count(summary.free_rows_per_second)}.")
        text = " ".join(parts) or "All recorded steps are warm-up."
        height = 320 if tokens else 240
        chart.add(run.name, text, traces=traces, layout=layout, height=height)
    if has_demand:
        chart.legend.append(Legend("muted", "what the model could consume", "dashed"))
    return chart


def memory_chart(runs: Sequence[Curves]) -> Chart | None:
    """Working set, anonymous memory, high-water mark and the limit."""
    shown = [run for run in runs if run.has("memory")]
    if not shown:
        return None
    times, axes = plot.time_axes(runs, "memory")
    highest = plot.largest(
        run.series["memory"].get(name, []) for run in shown for name, _, _ in _MEMORY
    )
    limits = [run.summary.limit_bytes for run in shown if run.summary.limit_bytes]
    near = [limit for limit in limits if limit <= _NEAR * highest]
    top = 1.1 * max([highest, *near]) or 1.0
    scale = plot.choose_scale("bytes", top)
    chart = Chart(
        "memory",
        "Working set",
        "Memory of all processes of the run. The working set counts shared pages once. Peak "
        "resident memory far above it means a short spike.",
        [
            Legend("pss", "working set", "area"),
            Legend("anon", "anonymous (heap)"),
            Legend("hwm", "peak resident memory (sum over processes)"),
        ],
    )
    if near:
        chart.legend.append(Legend("limit", "limit", "dashed"))
    for run, time in zip(runs, axes, strict=True):
        if not run.has("memory"):
            chart.add(run.name, _UNWATCHED)
            continue
        summary, memory, traces = run.summary, run.series["memory"], []
        for name, role, label in _MEMORY:
            if name in memory:
                # The working set is sampled more seldom than the rest.
                draw = plot.area if name == "working_set_bytes" else plot.line
                x, y = run.ref("memory", "t", times.by), run.ref("memory", name, scale.by)
                is_single = sum(value is not None for value in memory[name]) == 1
                more = {"unit": f" {scale.unit}", "connectgaps": True, **plot.dots_if(is_single)}
                traces.append(draw(x, y, role, label, **more))
        layout: Figure = {
            "xaxis": time,
            "yaxis": plot.axis("memory", scale.unit, range=[0, top * scale.by]),
            "shapes": plot.phase_shapes(run, times),
            "annotations": [],
        }
        if summary.limit_bytes and summary.limit_bytes <= top:
            _add_limit(layout, summary.limit_bytes * scale.by, "limit")
        parts = []
        if summary.working_set_bytes is not None:
            parts.append(
                f"Working set {format_bytes(summary.working_set_bytes)}, peak "
                f"{format_bytes(summary.working_set_peak_bytes)}."
            )
        if parts and summary.limit_bytes is not None and summary.limit_share is not None:
            share = format_share(summary.limit_share)
            parts.append(f"That is {share} of the limit, {format_bytes(summary.limit_bytes)}.")
        if summary.hwm_bytes is not None:
            spike = summary.spike_ratio
            ratio = "" if spike is None else f", {spike:.2f} times the resident size"
            parts.append(f"Peak resident memory {format_bytes(summary.hwm_bytes)}{ratio}.")
        # Reading the working set costs time, so that it may be sampled seldom.
        samples = zip(memory["t"], memory.get("working_set_bytes", []), strict=False)
        sampled = [t for t, value in samples if value is not None]
        if sampled and sampled[-1] < _LEAST_SAMPLED * memory["t"][-1]:
            last, end = format_duration(sampled[-1]), format_duration(memory["t"][-1])
            parts.append(f"The working set was last sampled at {last} of {end}.")
        text = " ".join(parts) or "Memory was not sampled."
        chart.add(run.name, text, traces=traces, layout=layout, height=260)
    return chart


def disk_chart(runs: Sequence[Curves]) -> Chart | None:
    """Reads against the capacity of the device, and swap where there was any."""
    shown = [run for run in runs if run.has("disk")]
    if not shown:
        return None
    times, axes = plot.time_axes(runs, "disk")
    device = plot.largest(run.series["disk"].get("read_bytes_per_second", []) for run in shown)
    calls = plot.largest(run.series["disk"].get("read_chars_per_second", []) for run in shown)
    capacity = max(run.summary.disk_bytes_per_second or 0.0 for run in shown)
    # Calls that the page cache answers can be many times what any disk gives.
    asked = min(calls, _NEAR * max(device, capacity)) if capacity else calls
    top = 1.12 * max(device, capacity, asked) or 1e6
    swapped = {
        run.place: plot.largest(run.series["disk"].get(name, []) for name in _SWAP) for run in shown
    }
    swap = max(swapped.values())
    reads, swaps = plot.choose_scale("rate", top), plot.choose_scale("rate", swap)
    drawn = (
        ("read_chars_per_second", plot.line, "calls", "file reads", reads, "y"),
        ("read_bytes_per_second", plot.area, "step", "from disk", reads, "y"),
        ("swap_in_bytes_per_second", plot.area, "wait", "swap in", swaps, "y2"),
        ("swap_out_bytes_per_second", plot.line, "hwm", "swap out", swaps, "y2"),
    )
    upper = plot.axis("reads", reads.unit, range=[0, top * reads.by])
    lower = plot.axis("swap", swaps.unit, range=[0, 1.12 * swap * swaps.by]) if swap else None
    chart = Chart(
        "disk",
        "Disk and swap",
        "Reads of all processes compared with the speed of the data's disk. If nothing is read "
        "from disk, the page cache held the data.",
        [
            Legend("step", "read from disk", "area"),
            Legend("calls", "all file reads, page cache included"),
        ],
    )
    if capacity:
        chart.legend.append(Legend("limit", "speed of the disk", "dashed"))
    if swap:
        chart.legend.append(Legend("wait", "swapped in", "area"))
        chart.legend.append(Legend("hwm", "swapped out"))
    for run, time in zip(runs, axes, strict=True):
        if not run.has("disk"):
            chart.add(run.name, _UNWATCHED)
            continue
        summary, disk = run.summary, run.series["disk"]
        x = run.ref("disk", "t", times.by)
        traces = []
        for name, draw, role, label, scale, yaxis in drawn:
            if name in disk and (swap or yaxis == "y"):
                y = run.ref("disk", name, scale.by)
                traces.append(draw(x, y, role, label, unit=f" {scale.unit}", yaxis=yaxis))
        layout = plot.stacked_layout(run, times, time, upper, lower) | {"annotations": []}
        if summary.disk_bytes_per_second:
            _add_limit(layout, summary.disk_bytes_per_second * reads.by, "capacity")
        parts = []
        if summary.read_bytes_per_second is not None:
            share = ""
            if summary.disk_share is not None and summary.disk_bytes_per_second is not None:
                most = format_bytes(summary.disk_bytes_per_second)
                used = format_share(summary.disk_share)
                share = f", {used} of the {most}/s that the disk can deliver"
            parts.append(f"{format_bytes(summary.read_bytes_per_second)}/s from disk{share}.")
        if summary.read_chars_per_second is not None:
            parts.append(
                f"{format_bytes(summary.read_chars_per_second)}/s of file reads, with page cache."
            )
        if any(disk.get(name) for name in _SWAP) and not swapped[run.place]:
            parts.append("The machine did not swap.")
        elif summary.swap_in_bytes_per_second is not None:
            parts.append(f"Swapped in {format_bytes(summary.swap_in_bytes_per_second)}/s.")
        text = " ".join(parts) or "Not recorded."
        height = 320 if swap else 240
        chart.add(run.name, text, traces=traces, layout=layout, height=height)
    return chart


def gpu_chart(runs: Sequence[Curves]) -> Chart | None:
    """Utilisation and memory as NVML tells; none where no run had a GPU."""
    shown = [run for run in runs if run.has("gpus")]
    if not shown:
        return None
    times, axes = plot.time_axes(runs, "gpus")
    memory = plot.largest(run.series["gpus"]["memory_bytes"] for run in shown)
    scale = plot.choose_scale("bytes", memory)
    upper = plot.axis("utilisation", range=[0, 1.03], tickformat=".0%")
    lower = plot.axis("memory", scale.unit, range=[0, 1.12 * memory * scale.by or 1.0])
    chart = Chart(
        "gpu",
        "GPU",
        "Top: share of time in which a kernel was running, which does not say how efficient it is. "
        "Bottom: memory in use.",
        [
            Legend("step", "utilisation, mean of all GPUs", "area"),
            Legend("anon", "memory of the fullest GPU", "area"),
        ],
    )
    for run, time in zip(runs, axes, strict=True):
        summary = run.summary
        if not run.has("gpus"):
            reason = summary.reasons.get("gpu_utilization", "no GPU was sampled")
            chart.add(run.name, f"Not recorded: {reason}.")
            continue
        x, busy = run.ref("gpus", "t", times.by), run.ref("gpus", "utilization")
        used, unit = run.ref("gpus", "memory_bytes", scale.by), f" {scale.unit}"
        traces = [
            plot.area(x, busy, "step", "utilisation", form=".0%", alpha=0.16),
            plot.area(x, used, "anon", "memory", alpha=0.16, yaxis="y2", unit=unit),
        ]
        layout = plot.stacked_layout(run, times, time, upper, lower)
        parts = []
        if summary.gpu_utilization is not None:
            parts.append(f"A kernel ran for {format_share(summary.gpu_utilization)} of the time.")
        if summary.gpu_memory_bytes is not None:
            parts.append(f"Peak memory of one GPU: {format_bytes(summary.gpu_memory_bytes)}.")
        if summary.gpu_power_watts is not None:
            parts.append(f"{summary.gpu_power_watts:,.0f} W per GPU.")
        text = " ".join(parts) or "No figure was recorded."
        chart.add(run.name, text, traces=traces, layout=layout, height=320)
    return chart


def _add_limit(layout: Figure, value: float, text: str) -> None:
    """A dashed line over the whole width, and the words on it."""
    label = plot.words(text, "limit", 1, value, xref="paper", yref="y", xanchor="right")
    layout["shapes"].append(plot.across(value, "limit", width=1.2, dash="dash"))
    layout["annotations"].append(label)


def waits_chart(runs: Sequence[Curves]) -> Chart | None:
    """The distribution of the waits of single fetches."""
    waits = [run.series["waits"] for run in runs if run.has("waits")]
    if not waits:
        return None
    seconds = [value for one in waits for value in one["seconds"]]
    highest = max(plot.largest([one["fetch_share"], one["wait_share"]]) for one in waits)
    ends = math.log10(min(seconds)) - 0.15, math.log10(max(seconds)) + 0.15
    if ends[1] - ends[0] < 2:
        middle = sum(ends) / 2
        ends = middle - 1, middle + 1
    layout = {
        "xaxis": plot.axis(
            "wait per fetch",
            type="log",
            range=list(ends),
            tickvals=[10.0**power for power in range(-6, 4)],
            ticktext=[*_WAIT_TICKS, "1,000 s"],
            hoverformat=".2~s",
            unifiedhovertitle={"text": "%{x:.2~s}s"},
        ),
        "yaxis": plot.axis("share", range=[0, min(1.0, 1.1 * highest)], tickformat=".0%"),
        "bargap": 0.1,
    }
    chart = Chart(
        "waits",
        "Wait per fetch",
        "The bars show how long most fetches wait. The line shows which waits cost the most time. "
        "If they are far apart, a few long waits cause the stall.",
        [
            Legend("step", "share of the fetches", "bar"),
            Legend("wait", "share of all waiting time"),
        ],
    )
    for run in runs:
        if not run.has("waits"):
            text = "No fetch was recorded after the warm-up."
            chart.add(run.name, text)
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
            "marker": {"color": plot.colour("step", 0.65)},
            "hovertemplate": "%{y:.1%} near %{text}",
        }
        curve = plot.line(x, run.ref("waits", "wait_share"), "wait", "waiting", form=".1%", width=2)
        if len(own) == 1:
            curve |= {"mode": "markers", "marker": {"size": 8, "color": plot.colour("wait")}}
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
            parts.append(f"The longest 1 % account for {share} of all waiting.")
        chart.add(run.name, " ".join(parts), traces=[bars, curve], layout=layout, height=260)
    return chart


def _format_wait(seconds: float) -> str:
    scale = plot.choose_scale("seconds", seconds)
    return f"{format_count(seconds * scale.by)} {scale.unit}"


def loss_chart(runs: Sequence[Curves]) -> Chart | None:
    """The trainer's own losses, all runs in one figure: curves on top of each other are equal."""
    shown = [run for run in runs if run.has("losses")]
    if not shown:
        return None
    same = (
        " If the runs learned the same, the curves lie on top of each other." if shown[1:] else ""
    )
    chart = Chart("losses", "Loss", f"As logged by the trainer.{same}")
    traces, parts = [], []
    for number, run in enumerate(shown):
        losses = run.series["losses"]
        role = _RUN_ROLES[number % len(_RUN_ROLES)]
        traces.append(
            plot.line(
                run.ref("losses", "step"),
                run.ref("losses", "loss"),
                role,
                html.escape(plot.plain_name(run.name)),
                form=",.5~g",
                width=1.8 if number else 3,
                dash=("dash" if number % 2 else "dot") if number else "",
                **plot.dots_if(len(losses["loss"]) == 1),
            )
        )
        if shown[1:]:
            chart.legend.append(Legend(role, run.name, "dashed" if number else "line"))
        known = [value for value in losses["loss"] if value is not None]
        name = f"{plot.plain_name(run.name)}: " if len(shown) > 1 else ""
        text = f"{name}no loss is a number."
        if known:
            text = f"{name}from {known[0]:,.4g} to {known[-1]:,.4g}."
            if losses["not_finite"]:
                first = losses["first_not_finite"]
                text += f" {losses['not_finite']:,} are NaN or infinite, first at step {first:,}."
        parts.append(text)
    ends = sorted({run.series["losses"]["first_not_finite"] for run in shown} - {None})
    layout = {
        "xaxis": plot.axis("step", unifiedhovertitle={"text": "step %{x:,}"}),
        "yaxis": plot.axis("loss"),
        "shapes": [plot.across(step, "bad", axis="x", width=2) for step in ends],
        "annotations": [
            plot.words(f"NaN or infinite: step {step:,}", "bad", step, 1) for step in ends
        ],
    }
    chart.add("", " ".join(parts), traces=traces, layout=layout, height=260)
    return chart
