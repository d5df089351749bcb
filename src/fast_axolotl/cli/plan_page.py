"""A plan in words and as a page: time and cost, and tokens/s by number of GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fast_axolotl import __version__
from fast_axolotl.cli.report import check_targets, write_page
from fast_axolotl.plan.predict import Candidate, Plan
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.units import (
    format_bytes,
    format_count,
    format_duration,
    format_share,
    format_value,
)
from fast_axolotl.report.content import Report
from fast_axolotl.report.page import render_page
from fast_axolotl.report.plot import Chart, Figure, Legend, axis, choose_scale, colour, line

_ROLES = ("step", "anon", "pss", "hwm", "wait", "accent")
_HEIGHT = 380


def plan_title(plan: Plan) -> str:
    title = f"{format_count(plan.parameters / 1e9)} B parameters on {plan.gpu}"
    return title if plan.tokens is None else f"{title}, {format_count(plan.tokens / 1e9)} B tokens"


def plan_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """The table: a header, and a line for each candidate."""
    header = ["GPUs", "tokens/s", "90 %", "memory", "communication", "time", "cost", "limited by"]
    has_energy = any(one.energy_kwh is not None for one in plan.candidates)
    rows = []
    for one in plan.candidates:
        rate, lasts, cost = one.tokens_per_second, one.seconds, one.dollars
        span = "–" if rate is None else f"{format_count(rate.low)} to {format_count(rate.high)}"
        row = [
            str(one.gpus) if one.gpu == plan.gpu else _names([one]),
            format_count(None if rate is None else rate.value),
            span,
            format_bytes(one.memory_bytes),
            format_share(one.communication_share, decimals=0),
            "–" if lasts is None else format_duration(lasts.value),
            "–"
            if cost is None
            else f"{_money(cost.value)} ({_money(cost.low)} to {_money(cost.high)})",
            one.binds,
        ]
        rows.append(row + [format_value(one.energy_kwh, "kWh")] * has_energy)
    return header + ["energy"] * has_energy, rows


def plan_notes(plan: Plan) -> list[str]:
    """Warnings, what each candidate had to change, what is assumed, and the prices."""
    notes = [f"! {note}" for note in plan.notes]
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


def write_plan(plan: Plan, path: Path, run: Path | None) -> None:
    """The page, as one HTML file that opens offline."""
    check_targets(output=path)
    possible = [one for one in plan.candidates if one.tokens_per_second is not None]
    headline, tiles = "No candidate fits into GPU memory.", list[tuple[str, str]]()
    if possible:
        priced = [one for one in possible if one.dollars is not None]
        best = {"Fastest": max(possible, key=lambda one: one.tokens_per_second.value)}  # type: ignore[union-attr]
        if priced:
            best["Cheapest"] = min(priced, key=lambda one: one.dollars.value)  # type: ignore[union-attr]
        if best.get("Cheapest") == best["Fastest"]:
            best = {"Fastest and cheapest" if len(possible) > 1 else "Predicted": best["Fastest"]}
        texts = (f"{word}: {_names([one])}, {_describe(one)}." for word, one in best.items())
        headline = " ".join(texts)
        tiles = [
            (f"limited by {kind}", _names([one for one in possible if one.binds == kind]))
            for kind in dict.fromkeys(one.binds for one in possible)
        ]
    charts = [chart for chart in (_money_chart(plan), _rate_chart(plan)) if chart is not None]
    header, rows = plan_rows(plan)
    page = render_page(
        Report(title=f"Plan: {plan_title(plan)}", runs=(), made=time.time(), version=__version__),
        subtitle="without a record" if run is None else f"calibrated by {run.absolute().name}",
        headline=headline,
        action="",
        badge=("plain", "Prediction, 90 % intervals"),
        evidence=plan_notes(plan),
        tiles=tiles,
        charts=charts,
        tables={"Candidates": (header, rows)},
        data=to_plain(plan),
    )
    write_page(path, page)


def _names(ones: Sequence[Candidate]) -> str:
    """``8, 16 × H100-SXM; 8 × B200``."""
    return "; ".join(
        f"{', '.join(str(one.gpus) for one in own)} × {gpu}"
        for gpu, (_, own) in _kinds(ones).items()
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


def _kinds(ones: Sequence[Candidate]) -> dict[str, tuple[str, list[Candidate]]]:
    """Of each kind of GPU, the role of its colour and its candidates."""
    names = dict.fromkeys(one.gpu for one in ones)
    return {
        name: (_ROLES[place % len(_ROLES)], [one for one in ones if one.gpu == name])
        for place, name in enumerate(names)
    }


def _money_chart(plan: Plan) -> Chart | None:
    """Hours to the right, dollars upwards."""
    shown = [one for one in plan.candidates if one.seconds and one.dollars]
    if not shown:
        return None
    times = choose_scale("time", max(one.seconds.value for one in shown))  # type: ignore[union-attr]
    chart = Chart(
        "money",
        "Time and cost",
        "One mark per number of GPUs; the lines show the 90 % interval. Diamonds mark the best "
        "trade-offs. Errors of time and cost go together: a faster run is also cheaper.",
    )
    data: list[Figure] = []
    for name, (role, ones) in _kinds(shown).items():
        chart.legend.append(Legend(role, name))
        lasts = [one.seconds for one in ones if one.seconds]
        costs = [one.dollars for one in ones if one.dollars]
        bars = {}
        for key, ranges, by in (("error_x", lasts, times.by), ("error_y", costs, 1.0)):
            bars[key] = {
                "type": "data",
                "array": [(one.high - one.value) * by for one in ranges],
                "arrayminus": [(one.value - one.low) * by for one in ranges],
                "color": colour(role, 0.45),
                "thickness": 1,
            }
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": name,
                "x": [one.value * times.by for one in lasts],
                "y": [one.value for one in costs],
                "text": [str(one.gpus) for one in ones],
                "textposition": "top right",
                "marker": {
                    "color": colour(role),
                    "size": [12 if one.is_pareto else 8 for one in ones],
                    "symbol": ["diamond" if one.is_pareto else "circle" for one in ones],
                },
                "hovertemplate": f"%{{text}} × {name}: %{{x:,.4~g}} {times.unit}, $%{{y:,.4~g}}",
                **bars,
            }
        )
    best = "; ".join(f"{_names([one])}: {_describe(one)}" for one in shown if one.is_pareto)
    layout = {
        "xaxis": axis("time", times.unit, type="log"),
        "yaxis": axis("cost", "dollars", type="log"),
    }
    chart.add("", f"Best: {best}.", traces=data, layout=layout, height=_HEIGHT)
    return chart


def _rate_chart(plan: Plan) -> Chart | None:
    """GPUs to the right, tokens/s upwards, both in logarithms."""
    shown = [one for one in plan.candidates if one.tokens_per_second]
    if len(shown) < 2:
        return None
    chart = Chart(
        "rate",
        "Tokens/s by number of GPUs",
        "The band is the 90 % interval. The dashed line is perfect scaling from the smallest "
        "number of GPUs; the gap is lost to communication, small batches or data.",
    )
    data: list[Figure] = []
    for name, (role, ones) in _kinds(shown).items():
        chart.legend += [Legend(role, name), Legend(role, f"{name}, perfect scaling", "dashed")]
        counts = [one.gpus for one in ones]
        rates = [one.tokens_per_second for one in ones if one.tokens_per_second]
        shape = {
            "x": counts + counts[::-1],
            "y": [r.high for r in rates] + [r.low for r in rates][::-1],
        }
        look = {"fill": "toself", "fillcolor": colour(role, 0.18), "line": {"width": 0}}
        data.append({"type": "scatter", "mode": "lines", "hoverinfo": "skip", **shape, **look})
        values, marker = [one.value for one in rates], {"color": colour(role), "size": 7}
        data.append(
            line(counts, values, role, name, unit=" tokens/s", mode="lines+markers", marker=marker)
        )
        ideal = [values[0] * count / counts[0] for count in counts]
        data.append(line(counts, ideal, role, f"{name}, perfect scaling", dash="dash", width=1.0))
    last = max(shown, key=lambda one: one.gpus)
    layout = {
        "xaxis": axis("GPUs", type="log", tickvals=sorted({one.gpus for one in shown})),
        "yaxis": axis("tokens/s", type="log"),
    }
    words = f"{_names([last])}: {_describe(last)}, limited by {last.binds}."
    chart.add("", words, traces=data, layout=layout, height=_HEIGHT)
    return chart
