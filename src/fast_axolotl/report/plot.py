"""What charts are made of: a run's curves, panels that share a scale, axes, lines and marks.

A figure is a plain dictionary in Plotly's form; no Plotly is needed to make one. Two things in it
are filled in by the page: ``{"ref": "runs/0/steps/t", "by": 1000}`` is a column of the embedded
data times a factor, and ``{"role": "wait", "alpha": 0.3}`` is a colour of the theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fast_axolotl.record import RunSummary
from fast_axolotl.record.arithmetic import finite

Figure = dict[str, Any]

_MOST_SPREAD = 6.0
"""Runs whose lengths differ by more than this have time axes of their own."""

_DIRECTIONS = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F))
"""Characters that turn the direction of the text behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A run as charts see it."""

    place: int
    """Its number in the embedded data."""
    name: str
    series: Mapping[str, Any]
    summary: RunSummary

    def has(self, name: str) -> bool:
        """Whether there is such a group of columns."""
        return bool(self.series.get(name))

    def ref(self, group: str, column: str, by: float = 1.0) -> Figure:
        """A column of the embedded data."""
        ref: Figure = {"ref": f"runs/{self.place}/series/{group}/{column}"}
        return ref if by == 1.0 else {**ref, "by": by}


class Legend(NamedTuple):
    """What a colour stands for."""

    role: str
    label: str
    shape: Literal["line", "dashed", "area", "mark", "bar"] = "line"


class Panel(NamedTuple):
    """One figure of a chart."""

    name: str
    """The run's; empty where the figure shows all of them."""
    text: str
    """What there is to see, in words."""
    figure: Figure | None = None
    """``None``: there is nothing to draw, and the text says why."""


@dataclass(slots=True)
class Chart:
    """A question and the panels that answer it."""

    name: str
    title: str
    text: str
    """How to read it."""
    legend: list[Legend] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    def add(self, name: str, text: str, **figure: Any) -> None:
        """A panel; with no figure, its text says why there is nothing to draw."""
        self.panels.append(Panel(name, text, figure or None))


class Scale(NamedTuple):
    """A unit that suits the numbers."""

    by: float
    unit: str


_SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "seconds": ((2.0, 1.0, "s"), (2e-3, 1e3, "ms"), (0.0, 1e6, "µs")),
    "time": ((7200.0, 1 / 3600, "h"), (600.0, 1 / 60, "min"), (0.0, 1.0, "s")),
    "bytes": ((1e9, 1e-9, "GB"), (0.0, 1e-6, "MB")),
    "rate": ((1e9, 1e-9, "GB/s"), (0.0, 1e-6, "MB/s")),
}


def choose_scale(kind: str, top: float) -> Scale:
    """The largest unit in which the largest number is no fraction."""
    return next(Scale(by, unit) for least, by, unit in _SCALES[kind] if top >= least)


def largest(columns: Iterable[Sequence[float | None]]) -> float:
    """The largest number of all columns; 0 where there is none."""
    return max((value for column in columns for value in column if value is not None), default=0.0)


def time_axes(runs: Sequence[Curves], group: str) -> tuple[Scale, list[Figure]]:
    """One unit of time for all panels, and their horizontal axes.

    An axis begins at the first point, or with the phase that this point is in. All are equally
    long, unless the runs' lengths differ much.
    """
    scale = choose_scale("time", largest(run.series[group]["t"] for run in runs if run.has(group)))
    bounds = []
    for run in runs:
        column = run.series[group]["t"] if run.has(group) else []
        times = [t for t in map(finite, column) if t is not None]
        begins = [phase["begin"] for phase in run.series.get("phases", [])[:1]]
        begin = max(0.0, min([times[0], *begins])) if times else 0.0
        bounds.append((begin, times[-1] if times else 0.0))
    lengths = [end - begin for begin, end in bounds if end > begin]
    is_shared = bool(lengths) and max(lengths) <= _MOST_SPREAD * min(lengths)
    axes = []
    for begin, end in bounds:
        length = (max(lengths) if is_shared else end - begin) or begin or 1.0
        ends = max(0.0, begin - 0.02 * length), begin + 1.03 * length
        axes.append(
            axis(
                "time",
                scale.unit,
                range=[one * scale.by for one in ends],
                hoverformat=",.1f",
                unifiedhovertitle={"text": f"%{{x:,.1f}} {scale.unit}"},
            )
        )
    return scale, axes


def stacked_layout(
    run: Curves, times: Scale, time: Figure, upper: Figure, lower: Figure | None
) -> Figure:
    """Two axes above each other on one of time, or the upper one alone; phases are shaded."""
    layout: Figure = {
        "xaxis": {**time, "anchor": "y2" if lower else "y"},
        "yaxis": {**upper, "domain": [0.5 if lower else 0, 1]},
        "shapes": phase_shapes(run, times),
    }
    if lower:
        layout["yaxis2"] = {**lower, "domain": [0, 0.4]}
    return layout


def axis(name: str, unit: str = "", **more: Any) -> Figure:
    """An axis that says what it shows, and in which unit."""
    return {"title": {"text": f"{name} ({unit})" if unit else name}, **more}


def colour(role: str, alpha: float = 1.0) -> Figure:
    """A colour of the theme."""
    return {"role": role} if alpha == 1.0 else {"role": role, "alpha": alpha}


def line(
    x: Any,
    y: Any,
    role: str,
    name: str,
    *,
    unit: str = "",
    form: str = ",.4~g",
    width: float = 1.6,
    dash: str = "",
    **more: Any,
) -> Figure:
    """A curve; ``unit`` stands behind the number that hovering shows, which has the form."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": colour(role), "width": width, **({"dash": dash} if dash else {})},
        "hovertemplate": f"%{{y:{form}}}{unit}",
        **more,
    }


def area(x: Any, y: Any, role: str, name: str, *, alpha: float = 0.25, **more: Any) -> Figure:
    """A curve, filled down to 0."""
    return line(x, y, role, name, fill="tozeroy", fillcolor=colour(role, alpha), **more)


def dots_if(is_single: bool, **marker: Any) -> Figure:
    """A curve of one point is no line: it needs a mark."""
    if not is_single:
        return {}
    return {"mode": "lines+markers", **({"marker": marker} if marker else {})}


def across(
    value: float, role: str, *, axis: str = "y", alpha: float = 1.0, layer: str = "", **style: Any
) -> Figure:
    """A line over the whole width at a height, or over the whole height at a place."""
    at, along = ("y", "x") if axis[0] == "y" else ("x", "y")
    return {
        "type": "line",
        f"{along}ref": "paper",
        f"{along}0": 0,
        f"{along}1": 1,
        f"{at}ref": axis,
        f"{at}0": value,
        f"{at}1": value,
        "line": {"color": colour(role, alpha), **style},
        **({"layer": layer} if layer else {}),
    }


def words(text: str, role: str, x: float, y: float, **place: str) -> Figure:
    """A few words at a place of a figure."""
    font = {"color": colour(role), "size": 11}
    at = {"xref": "x", "x": x, "yref": "paper", "y": y, "yanchor": "bottom", **place}
    return {"text": text, "showarrow": False, "font": font, **at}


def phase_shapes(run: Curves, times: Scale) -> list[Figure]:
    """Stretches that are no steady training, shaded."""
    look = {"line": {"width": 0}, "fillcolor": colour("muted", 0.10), "layer": "below"}
    shapes = []
    for phase in run.series.get("phases", []):
        ends = {"x0": phase["begin"] * times.by, "x1": phase["end"] * times.by}
        shapes.append(
            {"type": "rect", "xref": "x", **ends, "yref": "paper", "y0": 0, "y1": 1, **look}
        )
    return shapes


def plain_name(name: str) -> str:
    """A name of the user's for a sentence: whatever its direction, the text keeps its own."""
    return name.translate(_DIRECTIONS)
