"""All charts of a report in their order, and those of several ranks or runs in one figure."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence

from fast_axolotl.report.charts import Chart, Curves, Figure, Legend, Panel, axis, colour, line
from fast_axolotl.report.downsampling import finite
from fast_axolotl.report.markup import plain_name
from fast_axolotl.report.reader_charts import throughput_chart, waits_chart
from fast_axolotl.report.stall_chart import stall_chart
from fast_axolotl.report.system_charts import disk_chart, gpu_chart, memory_chart
from fast_axolotl.report.terminal import format_share

__all__ = ["make_charts"]

_RUN_ROLES = ("muted", "accent", "step", "pss", "anon", "hwm")


def make_charts(runs: Sequence[Curves]) -> list[Chart]:
    """The charts that there is something to draw for."""
    if not runs:
        return []
    found = [
        stall_chart(runs) if any(run.has("steps") for run in runs) else None,
        _rank_chart(runs),
        throughput_chart(runs),
        memory_chart(runs),
        disk_chart(runs),
        waits_chart(runs),
        gpu_chart(runs),
        _loss_chart(runs),
    ]
    return [chart for chart in found if chart is not None]


def _rank_chart(runs: Sequence[Curves]) -> Chart | None:
    """Stall and step time of every rank."""
    if all(len(run.summary.ranks) < 2 for run in runs):
        return None
    stalls = [_stalls(run) for run in runs]
    top = max((value or 0.0 for column in stalls for value in column), default=0.0)
    panels = [_rank_panel(run, stall, top) for run, stall in zip(runs, stalls, strict=True)]
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


def _stalls(run: Curves) -> list[float | None]:
    return [finite(rank.stall_fraction) for rank in run.summary.ranks]


def _rank_panel(run: Curves, stalls: list[float | None], top: float) -> Panel:
    ranks = run.summary.ranks
    if len(ranks) < 2:
        return Panel(name=run.name, text="There is one rank.", figure=None)
    deciding = run.series.get("rank")
    roles = ["wait" if rank.rank == deciding else "step" for rank in ranks]
    bars = {
        "type": "bar",
        "name": "waiting",
        "x": [rank.rank for rank in ranks],
        "y": stalls,
        "marker": {"color": [colour(role, 0.8) for role in roles]},
        "hovertemplate": "rank %{x}: %{y:.1%}<extra></extra>",
    }
    layout: Figure = {
        "xaxis": axis("rank", range=[-0.7, max(rank.rank for rank in ranks) + 0.7], tickformat="d"),
        "yaxis": axis("stall", range=[0, max(0.05, min(1.0, 1.12 * top))], tickformat=".0%"),
        "hovermode": "closest",
        "bargap": 0.25,
    }
    figure = {"traces": [bars], "layout": layout, "height": 220}
    return Panel(name=run.name, text=_rank_text(run, stalls), figure=figure)


def _rank_text(run: Curves, stalls: list[float | None]) -> str:
    known = sorted(value for value in stalls if value is not None)
    if not known:
        return f"{len(stalls)} ranks, none of which has steady steps."
    text = (
        f"{len(stalls)} ranks: from {format_share(known[0])} to {format_share(known[-1])}, "
        f"half of them {format_share(statistics.median_low(known))} or less."
    )
    if run.series.get("rank") is not None:
        text += f" Rank {run.series['rank']} decides."
    return text


def _loss_chart(runs: Sequence[Curves]) -> Chart | None:
    """The trainer's own losses, all runs in one figure: curves on top of each other are equal."""
    shown = [run for run in runs if run.has("losses")]
    if not shown:
        return None
    traces, legend, parts = [], [], []
    for number, run in enumerate(shown):
        role = _RUN_ROLES[number % len(_RUN_ROLES)]
        style = {} if number == 0 else {"dash": "dash" if number % 2 else "dot"}
        column = run.series["losses"]["loss"]
        traces.append(
            line(
                run.ref("losses", "step"),
                run.ref("losses", "loss"),
                role,
                html.escape(plain_name(run.name)),
                form=",.5~g",
                width=3 if number == 0 else 1.8,
                style=style,
                **({} if len(column) > 1 else {"mode": "lines+markers"}),
            )
        )
        legend.append(Legend(role=role, label=run.name, shape="dashed" if number else "line"))
        parts.append(_loss_text(run, len(shown) > 1))
    ends = {run.series["losses"]["first_not_finite"] for run in shown} - {None}
    marks = [_mark_end(step) for step in sorted(ends)]
    layout = {
        "xaxis": axis("step", unifiedhovertitle={"text": "step %{x:,}"}),
        "yaxis": axis("loss"),
        "shapes": [shape for shape, _ in marks],
        "annotations": [words for _, words in marks],
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


def _mark_end(step: int) -> tuple[Figure, Figure]:
    """A line over the whole height where losses stop being numbers, and the words on it."""
    shape = {
        "type": "line",
        "xref": "x",
        "x0": step,
        "x1": step,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": colour("bad"), "width": 2},
    }
    words = {
        "text": f"NaN or infinite: step {step:,}",
        "xref": "x",
        "x": step,
        "yref": "paper",
        "y": 1,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": colour("bad"), "size": 11},
    }
    return shape, words


def _loss_text(run: Curves, is_named: bool) -> str:
    losses = run.series["losses"]
    known = [value for value in losses["loss"] if value is not None]
    name = f"{plain_name(run.name)}: " if is_named else ""
    if not known:
        return f"{name}no loss is a number."
    text = f"{name}from {known[0]:,.4g} to {known[-1]:,.4g}."
    if losses["not_finite"]:
        first = losses["first_not_finite"]
        text += f" {losses['not_finite']:,} are NaN or infinite, first at step {first:,}."
    return text
