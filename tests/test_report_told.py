"""What a page says beside its figures: which run is drawn, how far it is, what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'fast-axolotl[report]'")

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import Log, Mark, RunRecord
from fast_axolotl.report.alarms import find_alarms
from fast_axolotl.report.charts import Chart, Curves
from fast_axolotl.report.live_frame import make_frame
from fast_axolotl.report.markdown import runs_markdown
from fast_axolotl.report.page import render_report
from fast_axolotl.report.run_charts import make_charts
from fast_axolotl.report.series import read_series
from support.records import make_rank, make_run, steady
from support.reports import (
    as_report,
    embedded,
    lively_run,
    make_protocol,
    middle_of_a_protocol,
    protocol_report,
    with_nans,
)


def test_charts_and_cards_say_which_run_of_an_arm_they_are_of() -> None:
    report = protocol_report()
    assert report.protocol is not None
    first, second, third = report.protocol.arms
    arms = (
        replace(first, shown_run=first.runs[2].folder),
        second,
        replace(third, shown_run=third.runs[0].folder, runs=third.runs[:1]),
    )
    report = replace(report, protocol=replace(report.protocol, arms=arms))
    html = render_report(report)
    cards, charts = html[: html.index('id="matrix"')], html[html.index('id="charts"') :]
    for words in (
        "07-baseline, the one nearest the median of 5",
        "14-drop-in, the last of 5",
        "03-streaming, the only one that counts",
    ):
        assert words in cards
        assert words in charts


def test_a_card_tells_the_stall_of_the_matrix_beside_that_of_its_run() -> None:
    html = render_report(protocol_report())
    assert "Median stall of its runs: 34.1 %." in html[: html.index('id="matrix"')]


def test_a_protocol_in_the_middle_says_how_far_it_is() -> None:
    protocol = middle_of_a_protocol()
    report = as_report(lively_run(seconds=10), names=["baseline"], protocol=protocol)
    html = render_report(report)
    top = html[: html.index('id="charts"')]
    assert "2 of 6 runs done, no pair yet." in top
    assert "No counted run yet." in top
    assert "No figure was measured" not in top
    assert top.count(">warm-up run</span>") == 2
    assert "01-baseline, a warm-up run" in html[html.index('id="charts"') :]
    assert '<a href="#runs">' in html
    whole = render_report(as_report(protocol=make_protocol()))
    assert "runs done" not in whole[: whole.index('id="report-data"')]


def test_a_protocol_that_was_stopped_is_not_called_running() -> None:
    protocol = replace(make_protocol(fails=False), planned_runs=30, planned_pairs=10)
    top = render_report(as_report(protocol=protocol)).partition('id="matrix"')[0]
    assert "15 of 30 runs done, 5 of 10 pairs." in top
    failed = tuple(replace(run, status="failed") for run in protocol.arms[0].runs)
    arms = (replace(protocol.arms[0], runs=failed), *protocol.arms[1:])
    top = render_report(as_report(protocol=replace(protocol, arms=arms)))
    assert "15 of 30 runs done, 5 of them failed, 5 of 10 pairs." in top


def test_losses_that_are_none_and_runs_that_were_cut_off_are_told_first() -> None:
    html = render_report(as_report(with_nans()))
    alarm = html.index("The losses are NaN from step 300 on.")
    assert alarm < html.index('class="headline"')
    layout = embedded(html, "report-figures")["losses-0"]["layout"]
    assert [shape["x0"] for shape in layout["shapes"]] == [300]
    cut = as_report(make_run(make_rank(end=None)), lively_run(seconds=10), names=["cut", "whole"])
    html = render_report(cut)
    words = "The run was cut off after 6.0 s, or still goes on"
    assert html.index(f"<bdi>cut</bdi>: {words}") < html.index('class="cards"')
    assert html.count('class="alarm"') == 1
    text = runs_markdown(cut.runs)
    assert text.startswith(f"> **cut: {words}")
    assert runs_markdown(as_report(with_nans()).runs).startswith("> **The losses are NaN")


def test_losses_that_come_back_and_infinite_ones_are_told_apart() -> None:
    record = lively_run(seconds=20)
    logs = record.ranks[0].logs
    logs[3] = replace(logs[3], values={"loss": math.inf})
    [alarm] = find_alarms(summarise(record), record)
    assert alarm == f"1 of {len(logs)} losses are infinite, the first at step 30."
    logs[5] = replace(logs[5], values={"loss": math.nan})
    [alarm] = find_alarms(summarise(record), record)
    assert "2 of" in alarm
    assert "NaN or infinite" in alarm


def test_how_a_run_ended_is_told_unless_it_finished() -> None:
    summary = summarise(make_run(make_rank()))
    assert find_alarms(summary, None) == []
    failed = replace(summary, end_reason="exception", error="KeyError: 'text'")
    assert find_alarms(failed, None)[0].startswith("An error ended the run after 6.0 s (KeyError")
    stopped = replace(summary, end_reason="interrupted")
    assert find_alarms(stopped, None)[0].startswith("The run was interrupted after 6.0 s:")


def charts_of(record: RunRecord, **changed: Any) -> dict[str, Chart]:
    summary = replace(summarise(record), **changed)
    series = read_series(record, summary)
    run = Curves(place=0, name="run", series=series, summary=summary)
    return {chart.name: chart for chart in make_charts([run])}


@pytest.mark.parametrize("number", [0, 1])
def test_losses_are_told_whichever_rank_logged_them(number: int) -> None:
    ranks = [make_rank(rank=n, world_size=2, wait=steady(0.1 + 0.2 * n)) for n in (0, 1)]
    ranks[number].add(Log(t=1.0, step=10, values={"loss": math.inf}))
    record = make_run(*ranks)
    summary = summarise(record)
    assert find_alarms(summary, record) == ["The losses are infinite from step 10 on."]
    assert "losses" in charts_of(record)
    assert make_frame(record, summary, title="").loss == math.inf


def test_half_of_two_ranks_is_one_of_them() -> None:
    ranks = [make_rank(rank=n, world_size=2, wait=steady(s)) for n, s in enumerate((0.01, 0.5))]
    [panel] = charts_of(make_run(*ranks))["ranks"].panels
    assert panel.text.startswith("2 ranks: from 1.0 % to 50.0 %, half of them 1.0 % or less.")


def test_marks_that_are_left_out_are_told() -> None:
    record = make_run(make_rank())
    for number in range(401):
        record.ranks[0].add(Mark(t=number / 100, name="shard"))
    text = charts_of(record)["stall"].panels[0].text
    assert "401 shard boundaries, one in 3 drawn." in text
    assert "For 0.0 % of the time the loop waited for data." in text


@pytest.mark.parametrize(("demand", "is_drawn"), [(1000.0, True), (5000.0, False)])
def test_a_demand_that_is_not_drawn_is_not_in_the_legend(demand: float, is_drawn: bool) -> None:
    record = make_run(make_rank(rows=800))
    chart = charts_of(record, rows_per_second=800.0, demand_rows_per_second=demand)["throughput"]
    assert ("what the model would take" in [one.label for one in chart.legend]) == is_drawn
    [panel] = chart.panels
    assert panel.figure is not None
    lines = [shape for shape in panel.figure["layout"]["shapes"] if shape["type"] == "line"]
    assert len(lines) == is_drawn


def test_the_name_of_a_phase_is_no_markup() -> None:
    record = make_run(make_rank())
    block = record.ranks[0].blocks[0]
    record.ranks[0].blocks[0] = replace(block, phase="<b>\u202ex</b>")  # type: ignore[arg-type]
    figure = charts_of(record)["stall"].panels[0].figure
    assert figure is not None
    words = [one["text"] for one in figure["layout"]["annotations"]]
    assert words == ["10 %", "&lt;b&gt;x&lt;/b&gt;"]


def test_runs_are_in_the_order_of_their_numbers() -> None:
    protocol = make_protocol(fails=False, names=("baseline", "drop-in"))
    numbers = {"baseline": (9, 100), "drop-in": (11, 99)}
    arms = []
    for arm in protocol.arms:
        folders = [f"runs/{number:02d}-{arm.name}" for number in numbers[arm.name]]
        runs = tuple(replace(arm.runs[0], folder=folder) for folder in folders)
        arms.append(replace(arm, runs=runs))
    html = render_report(as_report(protocol=replace(protocol, arms=tuple(arms))))
    shown = html[html.index('aria-label="Runs"') : html.index('id="report-data"')]
    names = ("09-baseline", "11-drop-in", "99-drop-in", "100-baseline")
    places = [shown.index(f"runs/{name}") for name in names]
    assert places == sorted(places)


def test_a_page_tells_what_a_figure_is_and_where_a_peak_comes_from() -> None:
    report = as_report(lively_run(seconds=10))
    summary = replace(report.runs[0].summary, peak_tflops=989.0, peak_source="the data sheet")
    html = render_report(replace(report, runs=(replace(report.runs[0], summary=summary),)))
    assert "989 TFLOP/s  (the data sheet)" in html
    assert "<bdi>padding<small>of all positions</small></bdi>" in html


def test_the_course_of_a_protocol_counts_as_one_counts() -> None:
    protocol = make_protocol(fails=False, names=("baseline", "drop-in"))
    first, second = protocol.arms
    arms = (replace(first, runs=first.runs[:1]), replace(second, runs=()))
    one = replace(protocol, pairs=1, planned_runs=2, planned_pairs=1, arms=arms)
    top = render_report(as_report(protocol=one)).partition('id="matrix"')[0]
    assert "One pair, 1 run that counts, in " in top
    assert "1 of 2 runs done, 1 of 1 pair." in top
    none = replace(protocol, pairs=0, arms=(), matrix=replace(protocol.matrix, arms=(), rows=()))
    top = render_report(as_report(protocol=none)).partition('id="matrix"')[0]
    assert "0 pairs" not in top
