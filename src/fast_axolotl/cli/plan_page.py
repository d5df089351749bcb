"""A plan as a document: time and cost, and tokens/s by number of GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fast_axolotl import __version__
from fast_axolotl.plan.predict import Candidate, Plan
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.units import (
    format_bytes,
    format_count,
    format_duration,
    format_share,
    format_value,
)
from fast_axolotl.report.charts import Figure, axis, choose_scale, colour, points
from fast_axolotl.report.document import (
    Block,
    Bullets,
    Card,
    Chart,
    Document,
    Legend,
    Panel,
    Section,
    Table,
)

_ROLES = ("step", "anon", "pss", "hwm", "wait", "accent")


def plan_document(plan: Plan, run: Path | None) -> Document:
    """The fastest and the cheapest candidate, all of them, and what is assumed."""
    possible = [one for one in plan.candidates if one.tokens_per_second is not None]
    headline = "No candidate fits into GPU memory."
    if possible:
        priced = [one for one in possible if one.dollars is not None]
        best = {"Fastest": max(possible, key=lambda one: one.tokens_per_second.value)}  # type: ignore[union-attr]
        if priced:
            best["Cheapest"] = min(priced, key=lambda one: one.dollars.value)  # type: ignore[union-attr]
        if best.get("Cheapest") == best["Fastest"]:
            best = {"Fastest and cheapest" if len(possible) > 1 else "Predicted": best["Fastest"]}
        texts = (f"{word}: {_names([one])}, {_describe(one)}." for word, one in best.items())
        headline = " ".join(texts)
    card = Card(badges=[("plain", "Prediction, 90 % intervals")], headline=headline)
    header = ["GPUs", "tokens/s", "90 %", "memory", "communication", "time", "cost", "limited by"]
    has_energy = any(one.energy_kwh is not None for one in plan.candidates)
    rows = []
    for one in plan.candidates:
        rate, lasts, cost = one.tokens_per_second, one.seconds, one.dollars
        span = "–" if rate is None else f"{format_count(rate.low)} to {format_count(rate.high)}"
        price = "–"
        if cost is not None:
            price = f"{_money(cost.value)} ({_money(cost.low)} to {_money(cost.high)})"
        row = [
            str(one.gpus) if one.gpu == plan.gpu else _names([one]),
            format_count(None if rate is None else rate.value),
            span,
            format_bytes(one.memory_bytes),
            format_share(one.communication_share, decimals=0),
            "–" if lasts is None else format_duration(lasts.value),
            price,
            one.binds,
        ]
        rows.append(row + [format_value(one.energy_kwh, "kWh")] * has_energy)
    table = Table(header=header + ["energy"] * has_energy, rows=rows)
    charts: list[Block] = [chart for chart in (_money_chart(plan), _rate_chart(plan)) if chart]
    title = f"Plan: {format_count(plan.parameters / 1e9)} B parameters on {plan.gpu}"
    tokens = "" if plan.tokens is None else f", {format_count(plan.tokens / 1e9)} B tokens"
    return Document(
        title=title + tokens,
        subtitle="without a record" if run is None else f"calibrated by {run.absolute().name}",
        blocks=[
            card,
            *([Section(title="Charts", blocks=charts)] if charts else []),
            Section(title="Candidates", blocks=[table]),
            Section(title="Notes", blocks=[Bullets(_notes(plan))]),
        ],
        data=to_plain(plan),
        made=time.time(),
        version=__version__,
    )


def _notes(plan: Plan) -> list[str]:
    """Warnings, what each candidate had to change, what is assumed, and the prices."""
    notes = list(plan.notes)
    changes: dict[str, list[Candidate]] = {}
    for one in plan.candidates:
        if one.reason or one.changes:
            text = one.reason or f"fits if it {', '.join(one.changes)}"
            changes.setdefault(text, []).append(one)
    notes += [f"{_names(ones)}: {text}." for text, ones in changes.items()]
    best = [one for one in plan.candidates if one.is_pareto]
    if len(best) > 1:
        notes.append(f"Best trade-offs (no other is both faster and cheaper): {_names(best)}.")
    notes += plan.assumptions
    if plan.tokens is None:
        notes.append("Pass --tokens or --epochs to get time and cost.")
    else:
        notes += [f"Dollars per GPU and hour: {'; '.join(plan.prices)}."] if plan.prices else []
        priced = {one.gpu for one in plan.candidates if one.dollars is not None}
        missing = {one.gpu for one in plan.candidates if one.seconds is not None} - priced
        notes += [f"The price of {gpu} is unknown; pass --price." for gpu in sorted(missing)]
    return notes


def _by_gpu(ones: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    names = dict.fromkeys(one.gpu for one in ones)
    return {name: [one for one in ones if one.gpu == name] for name in names}


def _names(ones: Sequence[Candidate]) -> str:
    """``8, 16 × H100-SXM; 8 × B200``."""
    return "; ".join(
        f"{', '.join(str(one.gpus) for one in own)} × {gpu}" for gpu, own in _by_gpu(ones).items()
    )


def _describe(one: Candidate) -> str:
    words = []
    if one.tokens_per_second is not None:
        words.append(f"{format_count(one.tokens_per_second.value)} tokens/s")
    words += [] if one.seconds is None else [format_duration(one.seconds.value)]
    words += [] if one.dollars is None else [_money(one.dollars.value)]
    return ", ".join(words)


def _money(value: float) -> str:
    return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"


def _money_chart(plan: Plan) -> Chart | None:
    """Hours to the right, dollars upwards."""
    shown = [one for one in plan.candidates if one.seconds and one.dollars]
    if not shown:
        return None
    by, unit = choose_scale("time", max(one.seconds.value for one in shown))  # type: ignore[union-attr]
    traces, legend = [], []
    for role, (name, ones) in zip(_ROLES, _by_gpu(shown).items(), strict=False):
        lasts = [one.seconds for one in ones if one.seconds]
        costs = [one.dollars for one in ones if one.dollars]
        bars: Figure = {
            key: {
                "type": "data",
                "array": [(one.high - one.value) * scale for one in ranges],
                "arrayminus": [(one.value - one.low) * scale for one in ranges],
                "color": colour(role, 0.45),
                "thickness": 1,
            }
            for key, ranges, scale in (("error_x", lasts, by), ("error_y", costs, 1.0))
        }
        symbols = ["diamond" if one.is_pareto else "circle" for one in ones]
        more: Figure = {
            "text": [str(one.gpus) for one in ones],
            "textposition": "top right",
            "marker": {"color": colour(role), "size": 10, "symbol": symbols},
            "hovertemplate": f"%{{text}} × {name}: %{{x:,.4~g}} {unit}, $%{{y:,.4~g}}",
        }
        x, y = [one.value * by for one in lasts], [one.value for one in costs]
        traces.append(points(x, y, role, name, "markers+text", **more, **bars))
        legend.append(Legend(role=role, label=name, shape="mark"))
    best = "; ".join(f"{_names([one])}: {_describe(one)}" for one in shown if one.is_pareto)
    layout = {"xaxis": axis("time", unit, type="log"), "yaxis": axis("cost", "dollars", type="log")}
    figure = {"traces": traces, "layout": layout, "height": 380}
    return Chart(
        name="money",
        title="Time and cost",
        text="One mark per number of GPUs; the lines show the 90 % interval. Diamonds mark the "
        "best trade-offs. Errors of time and cost go together: a faster run is also cheaper.",
        legend=legend,
        panels=[Panel(text=f"Best: {best}.", figure=figure)],
    )


def _rate_chart(plan: Plan) -> Chart | None:
    """GPUs to the right, tokens/s upwards, both in logarithms."""
    shown = [one for one in plan.candidates if one.tokens_per_second]
    if len(shown) < 2:
        return None
    traces, legend = [], []
    for role, (name, ones) in zip(_ROLES, _by_gpu(shown).items(), strict=False):
        counts = [one.gpus for one in ones]
        rates = [one.tokens_per_second for one in ones if one.tokens_per_second]
        values = [rate.value for rate in rates]
        lows, highs = [rate.low for rate in rates], [rate.high for rate in rates]
        band: Figure = {
            "fill": "toself",
            "fillcolor": colour(role, 0.18),
            "hoverinfo": "skip",
            "width": 0,
        }
        traces.append(points(counts + counts[::-1], highs + lows[::-1], role, "90 %", **band))
        traces.append(points(counts, values, role, name, "lines+markers"))
        ideal = [values[0] * count / counts[0] for count in counts]
        traces.append(points(counts, ideal, role, "perfect scaling", dash="dash", width=1.0))
        legend.append(Legend(role=role, label=name))
        legend.append(Legend(role=role, label=f"{name}, perfect scaling", shape="dashed"))
    last = max(shown, key=lambda one: one.gpus)
    ticks = sorted({one.gpus for one in shown})
    layout = {
        "xaxis": axis("GPUs", type="log", tickvals=ticks),
        "yaxis": axis("tokens/s", type="log"),
    }
    figure = {"traces": traces, "layout": layout, "height": 380}
    return Chart(
        name="rate",
        title="Tokens/s by number of GPUs",
        text="The band is the 90 % interval. The dashed line is perfect scaling from the smallest "
        "number of GPUs; the gap is lost to communication, small batches or data.",
        legend=legend,
        panels=[
            Panel(
                text=f"{_names([last])}: {_describe(last)}, limited by {last.binds}.",
                figure=figure,
            )
        ],
    )
