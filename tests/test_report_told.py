"""What a page says beside its figures: which run is drawn, how far it is, what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'fast-axolotl[report]'")

from fast_axolotl.measure.summary import summarise
from fast_axolotl.report.alarms import find_alarms
from fast_axolotl.report.markdown import runs_markdown
from fast_axolotl.report.page import render_report
from records import make_rank, make_run
from reports import (
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
