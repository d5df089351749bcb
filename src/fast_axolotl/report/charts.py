"""The charts of a report, declared as data.

A chart has one panel for each run, on scales that all panels share, and below every panel stand
the figures that it shows. A figure of Plotly's is a plain dictionary; no Plotly is needed to make
one. Two things in it are filled in by the page: ``{"ref": "runs/0/series/steps/t", "by": 1000}`` is
a column of the embedded data times a factor, and ``{"role": "wait", "alpha": 0.3}`` is a colour of
the theme.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fast_axolotl.record import RunSummary
from fast_axolotl.record.catalogue import FIGURES
from fast_axolotl.record.thresholds import DATA_STALL
from fast_axolotl.record.units import format_share
from fast_axolotl.report.document import Chart, Legend, Panel
from fast_axolotl.report.runs import figure_rows, read_figure

Figure = dict[str, Any]

_MOST_DWARFING = 5
"""Steps that may lie beyond the scale: such as the first ones, which compile."""
_NEAR = 3.0
"""A limit is drawn to scale where it is at most this many times the highest curve."""
_LEAST_SHARE = 0.25
"""Where the scale of a share ends at least."""
_HEIGHT = 260
_DISK = "disk_bytes_per_second"
_SWAP = ("swap_in_bytes_per_second", "swap_out_bytes_per_second")
_RUN_ROLES = ("muted", "accent", "step", "pss", "anon", "hwm")
_SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "time": ((7200.0, 1 / 3600, "h"), (600.0, 1 / 60, "min"), (0.0, 1.0, "s")),
    "s": ((2.0, 1.0, "s"), (2e-3, 1e3, "ms"), (0.0, 1e6, "µs")),
    "bytes": ((1e9, 1e-9, "GB"), (0.0, 1e-6, "MB")),
    "bytes/s": ((1e9, 1e-9, "GB/s"), (0.0, 1e-6, "MB/s")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """A run as charts see it."""

    place: int
    """Its number in the embedded data."""
    name: str
    series: Mapping[str, Any]
    summary: RunSummary

    def column(self, path: str) -> Sequence[float | None]:
        """``memory/anon_bytes``; empty where there is no such column."""
        group, _, name = path.partition("/")
        found: Sequence[float | None] = self.series.get(group, {}).get(name, ())
        return found

    def ref(self, path: str, by: float = 1.0) -> Figure:
        """A column of the embedded data."""
        ref: Figure = {"ref": f"runs/{self.place}/series/{path}"}
        return ref if by == 1.0 else {**ref, "by": by}


@dataclass(frozen=True, slots=True)
class Curve:
    """A column of a run's series as a curve."""

    path: str
    label: str
    role: str
    style: Literal["line", "area", "dashed"] = "line"


@dataclass(frozen=True, slots=True)
class Lane:
    """One vertical axis and its curves."""

    title: str
    unit: str
    """``s``, ``bytes`` and ``bytes/s`` are scaled, ``share`` is in percent."""
    columns: str | tuple[str, ...]
    """What the paths of its curves begin with."""
    limit: str | float = ""
    """A line across: a share, or the figure of the run that it is."""

    @property
    def curves(self) -> list[Curve]:
        """What is drawn."""
        return [curve for curve in CURVES if curve.path.startswith(self.columns)]


@dataclass(frozen=True, slots=True)
class TimeChart:
    """A question about the course of a run."""

    name: str
    title: str
    text: str
    lanes: tuple[Lane, ...]
    """Above each other on one axis of time. Where the first has no curve there is no chart; where
    another has none, or only zeros, it is left out."""
    figures: tuple[str, ...]
    """Those that stand below it."""


CURVES = (
    Curve("steps/mean", "time per step", "step"),
    Curve("steps/wait", "time waiting for data", "wait", "area"),
    Curve("stall/device", "GPU idle while waiting for data", "wait", "area"),
    Curve("stall/host", "CPU-side wait", "host", "dashed"),
    Curve("throughput/rows", "rows per second", "step", "area"),
    Curve("throughput/samples", "samples per second", "step", "area"),
    Curve("throughput/tokens", "real tokens per second", "pss", "area"),
    Curve("memory/working_set_bytes", "working set", "pss", "area"),
    Curve("memory/anon_bytes", "anonymous (heap)", "anon"),
    Curve("memory/hwm_bytes", "peak resident memory (sum over processes)", "hwm"),
    Curve("disk/read_bytes", "read from disk", "step", "area"),
    Curve("disk/read_chars", "all file reads, page cache included", "calls"),
    Curve("disk/swap_in_bytes", "swapped in", "wait", "area"),
    Curve("disk/swap_out_bytes", "swapped out", "hwm"),
    Curve("gpu/utilization", "GPU utilisation, mean of all GPUs", "step", "area"),
    Curve("gpu/memory_bytes", "memory of the fullest GPU", "anon", "area"),
)
"""Every curve over time."""

TIME_CHARTS = (
    TimeChart(
        "stall",
        "Step time and stall",
        "Top: time per step. Bottom: share of the time spent waiting for data. Shaded parts are "
        "not counted in the figures.",
        (
            Lane("step time", "s", "steps/"),
            Lane("stall", "share", "stall/", DATA_STALL),
        ),
        (
            *("step_p50_seconds", "step_p95_seconds", "device_stall_fraction"),
            *("host_stall_fraction", "exposed_communication_fraction"),
        ),
    ),
    TimeChart(
        "throughput",
        "Reader throughput",
        "What the model receives from the loader, all ranks together.",
        (
            Lane("rows/s", "", ("throughput/rows", "throughput/samples"), "demand_rows_per_second"),
            Lane("tokens/s", "", "throughput/tokens"),
        ),
        ("rows_per_second", "tokens_per_second", "demand_rows_per_second"),
    ),
    TimeChart(
        "memory",
        "Working set",
        "Memory of all processes of the run. The working set counts shared pages once. Peak "
        "resident memory far above it means a short spike.",
        (Lane("memory", "bytes", "memory/", "limit_bytes"),),
        ("working_set_bytes", "working_set_peak_bytes", "limit_bytes", "limit_share", "hwm_bytes"),
    ),
    TimeChart(
        "disk",
        "Disk and swap",
        "Reads of all processes compared with the speed of the data's disk. If nothing is read "
        "from disk, the page cache held the data.",
        (
            Lane("reads", "bytes/s", "disk/read", _DISK),
            Lane("swap", "bytes/s", "disk/swap"),
        ),
        ("read_bytes_per_second", "disk_share", _DISK, *_SWAP),
    ),
    TimeChart(
        "gpu",
        "GPU",
        "Top: share of time in which a kernel was running, which does not say how efficient it "
        "is. Bottom: memory in use.",
        (
            Lane("GPU utilisation", "share", "gpu/utilization"),
            Lane("GPU memory", "bytes", "gpu/memory"),
        ),
        ("gpu_utilization", "gpu_memory_bytes", "gpu_power_watts"),
    ),
)


def make_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """The charts that there is something to draw for."""
    charts = [*(time_chart(spec, runs) for spec in TIME_CHARTS), loss_chart(runs)]
    return [chart for chart in charts if chart is not None]


def time_chart(spec: TimeChart, runs: Sequence[RunCurves]) -> Chart | None:
    """The panels of a chart over time; ``None`` where no run has anything for it."""
    if not any(run.column(curve.path) for run in runs for curve in spec.lanes[0].curves):
        return None
    tops = [_top_of(lane, runs) for lane in spec.lanes]
    lanes = [
        (number, lane, tops[number], choose_scale(lane.unit, tops[number]))
        for number, lane in enumerate(spec.lanes)
        if number == 0 or tops[number]
    ]
    # When the last point of a run was, for this chart; 0 where there is none.
    groups = {curve.path.partition("/")[0] for lane in spec.lanes for curve in lane.curves}
    lengths = {}
    for run in runs:
        last = (run.series[group]["t"][-1] for group in groups if run.series.get(group))
        lengths[run.place] = max(last, default=0.0)
    longest = max(lengths.values())
    by, time_unit = choose_scale("time", longest)
    legend = [
        Legend(role=curve.role, label=curve.label, shape=curve.style)
        for _, lane, *_ in lanes
        for curve in lane.curves
        if any(run.column(curve.path) for run in runs)
    ]
    panels = []
    for run in runs:
        figure = None
        if lengths[run.place]:
            layout: Figure = {
                "xaxis": axis(
                    "time",
                    time_unit,
                    range=[-0.02 * longest * by, 1.03 * longest * by],
                    anchor="y2" if lanes[1:] else "y",
                    hoverformat=",.1f",
                    unifiedhovertitle={"text": f"%{{x:,.1f}} {time_unit}"},
                ),
                "shapes": [],
            }
            traces: list[Figure] = []
            for number, lane, top, scale in lanes:
                which = "2" if number else ""
                domain = ([0.42, 1], [0, 0.32])[number] if lanes[1:] else [0, 1]
                percent = {"tickformat": ".0%"} if lane.unit == "share" else {}
                extent = [0, min(top, 1.03) * scale[0] if lane.unit == "share" else top * scale[0]]
                layout[f"yaxis{which}"] = axis(
                    lane.title, scale[1], domain=domain, range=extent, **percent
                )
                for curve in lane.curves:
                    if run.column(curve.path):
                        traces += _curve_traces(run, curve, by, scale, lane.unit, f"y{which}")
                limit = read_limit(run.summary, lane)
                if limit is not None and limit <= top:
                    # A dashed line over the whole width, and the words on it.
                    words = format_share(limit, decimals=0)
                    if isinstance(lane.limit, str):
                        words = FIGURES[lane.limit].label
                    value = limit * scale[0]
                    line: Figure = {"x0": 0, "x1": 1, "y0": value, "y1": value}
                    style = {"color": colour("limit"), "width": 1.2, "dash": "dash"}
                    line |= {"line": style, "label": _words(words, "limit", "end")}
                    on = {"type": "line", "xref": "paper", "yref": f"y{which}"}
                    layout["shapes"].append({**on, **line})
            _add_phases(layout, run, by)
            height = 340 if lanes[1:] else _HEIGHT
            figure = {"traces": traces, "layout": layout, "height": height, "right": 40}
        texts = map(": ".join, figure_rows(spec.figures, [run.summary])[0])
        text = "; ".join(texts) or "not recorded"
        panels.append(Panel(name=run.name, text=f"{text[0].upper()}{text[1:]}.", figure=figure))
    return Chart(name=spec.name, title=spec.title, text=spec.text, legend=legend, panels=panels)


def _top_of(lane: Lane, runs: Sequence[RunCurves]) -> float:
    """Where the scale of a lane ends, for all runs together; 0 where there is nothing to draw."""
    top = 0.0
    for run in runs:
        for curve in lane.curves:
            column = run.column(f"{curve.path}_high") or run.column(curve.path)
            values = sorted((one for one in column if one is not None), reverse=True)
            if not values:
                continue
            # A share near 0 is not blown up.
            top = max(top, _LEAST_SHARE if lane.unit == "share" else 0.0)
            # Above all values, unless a handful of them dwarfs the rest: such as the first steps.
            usual = values[min(_MOST_DWARFING, len(values) - 1)]
            is_dwarfed = len(values) > 4 * _MOST_DWARFING and values[0] > 5 * usual > 0
            top = max(top, 1.5 * usual if is_dwarfed else 1.08 * values[0])
    limits = [limit for run in runs if (limit := read_limit(run.summary, lane)) is not None]
    near = [1.1 * limit for limit in limits if top and limit <= _NEAR * top]
    return max([top, *near])


def read_limit(summary: RunSummary, lane: Lane) -> float | None:
    """The line across a lane; ``None`` where there is none."""
    if isinstance(lane.limit, float):
        return lane.limit
    return read_figure(summary, lane.limit) if lane.limit else None


def _curve_traces(
    run: RunCurves, curve: Curve, by: float, scale: tuple[float, str], unit: str, yaxis: str
) -> list[Figure]:
    """A curve, and behind it from the lowest to the highest value where points were folded."""
    group = curve.path.partition("/")[0]
    x = run.ref(f"{group}/t", by)
    y = run.ref(curve.path, scale[0])
    form = ".1%" if unit == "share" else ",.4~g"
    more: Figure = {"yaxis": yaxis, "connectgaps": True}
    more["hovertemplate"] = f"%{{y:{form}}} {scale[1]}".strip()
    if curve.style == "area":
        more |= {"fill": "tozeroy", "fillcolor": colour(curve.role, 0.25)}
    known = sum(value is not None for value in run.column(curve.path))
    more["mode"] = "lines+markers" if known == 1 else "lines"
    dash = "dot" if curve.style == "dashed" else "solid"
    traces = []
    if run.column(f"{curve.path}_high"):
        low, high = run.ref(f"{curve.path}_low", scale[0]), run.ref(f"{curve.path}_high", scale[0])
        band = {"fill": "tonexty", "fillcolor": colour(curve.role, 0.22)}
        traces.append(points(x, low, curve.role, "lowest", **{**more, "fill": "none"}, width=0))
        traces.append(points(x, high, curve.role, "highest", **{**more, **band}, width=0.8))
    return [*traces, points(x, y, curve.role, curve.label, dash=dash, **more)]


def _add_phases(layout: Figure, run: RunCurves, by: float) -> None:
    """Stretches that are no steady training, shaded."""
    whole = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    for phase in run.series.get("phases", ()):
        ends = {"x0": phase["begin"] * by, "x1": phase["end"] * by}
        fill = {"line": {"width": 0}, "fillcolor": colour("muted", 0.10)}
        name = html.escape(phase["name"].replace("warmup", "warm-up"))
        fill["label"] = _words(name, "muted", "top left")
        layout["shapes"].append({**whole, **ends, **fill})


def loss_chart(runs: Sequence[RunCurves]) -> Chart | None:
    """The trainer's own losses, all runs in one figure: curves on top of each other are equal."""
    shown = [run for run in runs if run.column("losses/loss")]
    if not shown:
        return None
    traces, texts, legend = [], [], []
    for number, run in enumerate(shown):
        role = _RUN_ROLES[number % len(_RUN_ROLES)]
        known = [value for value in run.column("losses/loss") if value is not None]
        more: Figure = {"width": 1.8 if number else 3, "dash": "dash" if number else "solid"}
        more["mode"] = "lines+markers" if len(known) == 1 else "lines"
        x, y = run.ref("losses/t"), run.ref("losses/loss")
        more["hovertemplate"] = "%{y:,.5~g}"
        traces.append(points(x, y, role, html.escape(run.name), **more))
        legend.append(Legend(role=role, label=run.name, shape="dashed" if number else "line"))
        whose = f"{run.name}: " if shown[1:] else ""
        texts.append(f"{whose}from {known[0]:,.4g} to {known[-1]:,.4g}.")
    layout = {
        "xaxis": axis("step", unifiedhovertitle={"text": "step %{x:,}"}),
        "yaxis": axis("loss"),
    }
    same = " If the runs learned the same, the curves lie on top of each other." * bool(shown[1:])
    figure = {"traces": traces, "layout": layout, "height": _HEIGHT}
    return Chart(
        name="losses",
        title="Loss",
        text=f"As logged by the trainer.{same}",
        legend=legend if shown[1:] else (),
        panels=[Panel(text=" ".join(texts), figure=figure)],
    )


def choose_scale(unit: str, top: float) -> tuple[float, str]:
    """The largest unit in which the largest number is no fraction: a factor, and its name."""
    for least, by, name in _SCALES.get(unit, ()):
        if top >= least:
            return by, name
    return 1.0, ""


def axis(name: str, unit: str = "", **more: Any) -> Figure:
    """An axis that says what it shows, and in which unit."""
    return {"title": {"text": f"{name} ({unit})" if unit else name}, **more}


def colour(role: str, alpha: float = 1.0) -> Figure:
    """A colour of the theme."""
    return {"role": role} if alpha == 1.0 else {"role": role, "alpha": alpha}


def points(
    x: Figure, y: Figure, role: str, name: str, width: float = 1.6, dash: str = "solid", **more: Any
) -> Figure:
    """A curve."""
    line = {"color": colour(role), "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": line} | more


def _words(text: str, role: str, place: str) -> Figure:
    """A few words above a shape of a figure."""
    font = {"color": colour(role), "size": 11}
    return {"text": text, "textposition": place, "yanchor": "bottom", "font": font}
