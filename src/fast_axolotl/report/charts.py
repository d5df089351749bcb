"""What a chart of a page is: panels of curves that share a scale, a legend, and a text each.

A figure is a plain dictionary in Plotly's form; no Plotly is needed to make one. Two things in it
are filled in by the page: ``{"ref": "runs/0/steps/t", "by": 1000}`` is a column of the embedded
data times a factor, and ``{"role": "wait", "alpha": 0.3}`` is a colour of the theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fast_axolotl.record import RunSummary
from fast_axolotl.report.downsampling import finite

__all__ = [
    "Chart",
    "Curves",
    "Legend",
    "Panel",
    "Scale",
    "area",
    "axis",
    "choose_scale",
    "colour",
    "known",
    "largest",
    "level",
    "line",
    "phase_shapes",
    "time_axes",
    "time_scale",
]

Figure = dict[str, Any]

_MOST_SPREAD = 6.0
"""Runs whose lengths differ by more than this have time axes of their own."""


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
        found: Figure = {"ref": f"runs/{self.place}/series/{group}/{column}"}
        return found if by == 1.0 else {**found, "by": by}


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """What a colour stands for."""

    role: str
    label: str
    shape: Literal["line", "dashed", "area", "mark", "bar"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure of a chart."""

    name: str
    """The run's; empty where the figure shows all of them."""
    text: str
    """What there is to see, in words."""
    figure: Figure | None
    """``None``: there is nothing to draw, and the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A question and the panels that answer it."""

    name: str
    title: str
    text: str
    """How to read it."""
    legend: tuple[Legend, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
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
    for least, by, unit in _SCALES[kind]:
        if top >= least:
            return Scale(by=by, unit=unit)
    raise AssertionError(kind)


def largest(columns: Iterable[Sequence[float | None]]) -> float:
    """The largest number of all columns; 0 where there is none."""
    return max((value for column in columns for value in column if value is not None), default=0.0)


def time_scale(runs: Iterable[Curves], group: str) -> Scale:
    """One unit of time for all panels."""
    return choose_scale("time", largest(run.series[group]["t"] for run in runs if run.has(group)))


def time_axes(runs: Sequence[Curves], group: str, scale: Scale) -> list[Figure]:
    """The horizontal axes of panels, from their first point on: equally long for all, unless the
    runs' lengths differ much."""
    bounds = [_bounds(run, group) for run in runs]
    lengths = [end - begin for begin, end in bounds if end > begin]
    is_shared = bool(lengths) and max(lengths) <= _MOST_SPREAD * min(lengths)
    return [
        axis(
            "time",
            scale.unit,
            range=_stretch(begin, max(lengths) if is_shared else end - begin, scale),
            hoverformat=",.1f",
            unifiedhovertitle={"text": f"%{{x:,.1f}} {scale.unit}"},
        )
        for begin, end in bounds
    ]


def axis(name: str, unit: str = "", **more: Any) -> Figure:
    """An axis that says what it shows, and in which unit."""
    return {"title": {"text": f"{name} ({unit})" if unit else name}, **more}


def _bounds(run: Curves, group: str) -> tuple[float, float]:
    """From the first to the last point, and from the start of the phase that the first is in."""
    times = known(run.series[group]["t"]) if run.has(group) else []
    if not times:
        return 0.0, 0.0
    begins = [phase["begin"] for phase in run.series.get("phases", [])[:1]]
    return max(0.0, min([times[0], *begins])), times[-1]


def _stretch(begin: float, length: float, scale: Scale) -> list[float]:
    length = length or begin or 1.0
    return [max(0.0, begin - 0.02 * length) * scale.by, (begin + 1.03 * length) * scale.by]


def colour(role: str, alpha: float = 1.0) -> Figure:
    """A colour of the theme."""
    return {"role": role} if alpha == 1.0 else {"role": role, "alpha": alpha}


def line(x: Any, y: Any, role: str, name: str, **more: Any) -> Figure:
    """A curve; ``unit`` stands behind the number that hovering shows."""
    unit, form = more.pop("unit", ""), more.pop("form", ",.4~g")
    style = {"color": colour(role), "width": more.pop("width", 1.6), **more.pop("style", {})}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": style,
        "hovertemplate": f"%{{y:{form}}}{unit}",
        **more,
    }


def area(x: Any, y: Any, role: str, name: str, **more: Any) -> Figure:
    """A curve, filled down to 0."""
    fill = {"fill": "tozeroy", "fillcolor": colour(role, more.pop("alpha", 0.25))}
    return line(x, y, role, name, **fill, **more)


def level(value: float, role: str, *, axis: str = "y", text: str = "") -> tuple[Figure, Figure]:
    """A dashed horizontal line over the whole width, and the words on it."""
    shape = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "yref": axis,
        "y0": value,
        "y1": value,
        "line": {"color": colour(role), "width": 1.2, "dash": "dash"},
    }
    words = {
        "text": text,
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "yref": axis,
        "y": value,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": colour(role), "size": 11},
    }
    return shape, words


def phase_shapes(run: Curves, times: Scale) -> list[Figure]:
    """Stretches that are no steady training, shaded."""
    return [
        {
            "type": "rect",
            "xref": "x",
            "x0": phase["begin"] * times.by,
            "x1": phase["end"] * times.by,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"width": 0},
            "fillcolor": colour("muted", 0.10),
            "layer": "below",
        }
        for phase in run.series.get("phases", [])
    ]


def known(column: Iterable[float | None]) -> list[float]:
    """The numbers of a column."""
    return [value for value in map(finite, column) if value is not None]
