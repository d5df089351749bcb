"""The page of a report, as text: what it holds, in which order, and that nothing breaks it."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.measure.ranks import fold_job, fold_rank
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import Log, Mark, RunRecord
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report import page
from fast_axolotl.report.charts import RunCurves, make_charts
from fast_axolotl.report.document import Chart
from fast_axolotl.report.page import render_page
from fast_axolotl.report.runs import find_alarms
from fast_axolotl.report.series import MOST_POINTS, Track, read_series, round_figures
from support.golden import GOLDEN, Page
from support.records import make_rank, make_run, make_system, steady, with_figures
from support.reports import (
    as_report,
    golden_run,
    long_run,
    make_protocol,
    one_step,
    protocol_report,
)

pytest.importorskip("plotly", reason="plotly is not installed: pip install plotly jinja2")

EVIL = '\u202e</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028"'


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["ref"]] if "ref" in value else []
        return own + [ref for one in value.values() for ref in references(one)]
    if isinstance(value, list):
        return [ref for one in value for ref in references(one)]
    return []


REPORTS = {
    "a run with everything": lambda: as_report(golden_run("lively")),
    "two runs": lambda: as_report(golden_run("compute-everything"), golden_run("nan")),
    "a protocol": protocol_report,
    "ranks": lambda: as_report(golden_run("mixed-unseen-communication")),
    "one step": lambda: as_report(one_step()),
    "no step": lambda: as_report(make_run(make_rank(fetches=0, warmup_steps=0))),
    "no loop": lambda: as_report(make_run(system=make_system())),
    "a protocol in the middle": lambda: as_report(
        protocol=ProtocolResult.read(GOLDEN / "protocols" / "in-the-middle")
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_every_kind_of_report_is_whole(name: str) -> None:
    html = render_page(REPORTS[name]())
    parsed = Page(html)
    names = [attributes["id"] for _, attributes in parsed.elements if attributes.get("id")]
    assert len(names) == len(set(names)), "an id stands for one element"
    links = [a["href"] for tag_name, a in parsed.elements if tag_name == "a"]
    assert {link[1:] for link in links if link and link.startswith("#")} <= set(names)
    data, figures = parsed.data["report-data"], parsed.data["report-figures"]
    for ref in references(figures):
        node = data
        for key in ref.split("/"):
            node = node[int(key)] if isinstance(node, list) else node[key]
        assert isinstance(node, list)
    plots = [a for _, a in parsed.elements if "plot" in (a.get("class") or "").split()]
    assert set(figures) == {a["id"] for a in plots}
    for attributes in plots:
        assert (attributes["role"], attributes["tabindex"]) == ("img", "0")
        assert len(attributes["aria-label"] or "") > 20, "it says in words what it shows"
    for figure in figures.values():
        axes = {key: one for key, one in figure["layout"].items() if "axis" in key}
        assert len(axes) >= 2
        assert all(one["title"]["text"] for one in axes.values()), "an axis says what it shows"
    packed = html.index('id="report-plotly"')
    outside = html[:packed] + html[html.index("</script>", packed) :]
    assert not re.findall("https?:", outside), "no address of the network"
    assert "default-src &#x27;none&#x27;" in outside
    assert len(html) < 6_000_000
    assert len(json.dumps(data)) < 1_000_000


def test_losses_that_differ_come_before_everything_else() -> None:
    html = render_page(protocol_report(are_losses_equal=False))
    assert html.index("DIFFERENT: at step 12") < html.index("Streaming helps")
    assert html.index("1 failed or not counted") < html.index("&lt;b&gt;KeyError&lt;/b&gt;")
    assert 'class="alarm"' in html
    html = render_page(protocol_report())
    assert 'class="alarm"' not in html
    data = Page(html).data["report-data"]
    assert data["protocol"]["matrix"]["arms"] == ["baseline", "drop-in", "streaming"]
    assert [run["summary"]["verdict"]["kind"] for run in data["runs"]] == [
        *["inconclusive"] * 2,
        "memory",
    ]


def test_what_comes_from_outside_is_escaped_everywhere() -> None:
    record = make_run(make_rank(source=EVIL, reasons={"mfu": EVIL}), system=make_system())
    record.ranks[0].blocks[0] = replace(record.ranks[0].blocks[0], phase=EVIL)  # type: ignore[arg-type]
    record.ranks[0].marks.append(Mark(t=1.0, name="error", text=EVIL))
    record = replace(record, path=EVIL)
    protocol = replace(
        make_protocol(names=(EVIL, "two", "three")),
        title=EVIL,
        paragraph=EVIL,
        notes=(EVIL,),
        environment={EVIL: EVIL},
    )
    html = render_page(as_report(record, names=[EVIL], protocol=protocol))
    elements = Page(html).elements
    assert not [a for _, a in elements if "onerror" in a or "src" in a]
    words = [
        one["label"]["text"]
        for figure in Page(html).data["report-figures"].values()
        for one in figure["layout"].get("shapes", ())
    ]
    assert "&lt;/script&gt;" in "".join(words)
    assert not [text for text in words if "<" in text]
    assert [name for name, _ in elements].count("script") == 4
    assert "<img" not in html
    assert Page(html).data["report-data"]["title"] == EVIL


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("place", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(place: int) -> None:
    def contrast(one: str, other: str) -> float:
        """Of two roles by WCAG 2.1, 1 to 21."""
        light, dark = sorted(luminance(colours[role][place]) for role in (one, other))[::-1]
        return (light + 0.05) / (dark + 0.05)

    sheet = Path(page.__file__).with_name("assets") / "report.css"
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", sheet.read_text())
    colours = {role: both for role, *both in pairs}
    for ground in ("page", "card"):
        for name in ("ink", "muted", "accent", "good", "bad", "warn", "limit"):
            assert contrast(name, ground) >= 4.5, (name, ground)
    for name in ("good", "bad", "warn"):
        assert contrast(name, f"{name}-wash") >= 4.5, name
    assert contrast("muted", "plain-wash") >= 4.5
    for name in ("step", "wait", "host", "pss", "anon", "hwm", "calls"):
        assert contrast(name, "card") >= 3.0, name


@pytest.mark.parametrize("name", ["plotly.offline", "jinja2"])
def test_without_the_extra_the_error_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page._load_assets.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="pip install plotly jinja2") as error:
        render_page(as_report(one_step()))
    assert name.partition(".")[0] in str(error.value)


def test_a_slow_step_neither_flattens_the_chart_nor_gets_lost_in_it() -> None:
    record = golden_run("lively")
    blocks = record.ranks[0].blocks
    assert blocks[0].walls is not None
    blocks[0] = replace(blocks[0], walls=(30.0, *blocks[0].walls[1:]))
    [panel] = charts_of(record)["stall"].panels
    assert panel.figure is not None
    axis = panel.figure["layout"]["yaxis"]
    assert (axis["title"]["text"], axis["range"][1] < 3000) == ("step time (ms)", True)

    figure = charts_of(long_run(9_000))["stall"].panels[0].figure
    assert figure is not None
    longest = next(trace for trace in figure["traces"] if trace["name"] == "highest")
    assert longest["y"]["ref"] == "runs/0/series/steps/mean_high"


def test_a_protocol_that_was_stopped_is_not_called_running() -> None:
    protocol = replace(make_protocol(fails=False), planned_runs=30, planned_pairs=10)
    assert "15 of 30 runs done, 5 of 10 pairs." in render_page(as_report(protocol=protocol))
    failed = tuple(replace(run, status="failed") for run in protocol.arms[0].runs)
    arms = (replace(protocol.arms[0], runs=failed), *protocol.arms[1:])
    top = render_page(as_report(protocol=replace(protocol, arms=arms)))
    assert "15 of 30 runs done, 5 of them failed, 5 of 10 pairs." in top


def charts_of(record: RunRecord, **changed: Any) -> dict[str, Chart]:
    summary = with_figures(summarise(record), **changed)
    series = read_series(record, summary)
    run = RunCurves(place=0, name="run", series=series, summary=summary)
    return {chart.name: chart for chart in make_charts([run])}


@pytest.mark.parametrize("number", [0, 1])
def test_losses_are_told_whichever_rank_logged_them(number: int) -> None:
    ranks = [make_rank(rank=n, world_size=2, wait=steady(0.1 + 0.2 * n)) for n in (0, 1)]
    ranks[number].add(Log(t=1.0, step=10, values={"loss": math.inf}))
    ranks[number].add(Log(t=2.0, step=20, values={"loss": 2.5}))
    record = make_run(*ranks)
    [alarm] = find_alarms(summarise(record), record)
    assert alarm == "1 of 2 losses are NaN or infinite, the first at step 10."
    [panel] = charts_of(record)["losses"].panels
    assert panel.text == "from 2.5 to 2.5."


@pytest.mark.parametrize(("demand", "is_drawn"), [(1000.0, True), (9000.0, False)])
def test_a_limit_far_above_the_curves_is_not_drawn(demand: float, is_drawn: bool) -> None:
    record = make_run(make_rank(rows=800))
    [panel] = charts_of(record, demand_rows_per_second=demand)["throughput"].panels
    assert panel.figure is not None
    lines = [shape for shape in panel.figure["layout"]["shapes"] if shape["type"] == "line"]
    assert len(lines) == is_drawn


def test_cards_say_which_run_they_are_of() -> None:
    html = render_page(as_report(protocol=make_protocol()))
    for words in ("13-baseline", "14-drop-in"):
        assert f"Verdict of run {words}." in html


# The curves: bounded, with every extreme, and with no number that is none.


NUMBERS = some.one_of(some.none(), some.floats(-1e6, 1e6), some.just(math.nan))
STRETCHES = some.lists(
    some.tuples(some.floats(0.01, 5.0), some.floats(0.5, 9.0), NUMBERS), min_size=1, max_size=300
)


def series_of(record: RunRecord) -> dict[str, Any]:
    return read_series(record, summarise(record))


@given(STRETCHES, some.integers(1, 40))
def test_folding_loses_no_extreme_and_keeps_the_mean(
    stretches: list[tuple[float, float, float | None]], most: int
) -> None:
    track, t = Track(), 0.0
    for length, weight, value in stretches:
        track.add(t, t + length, weight, value=value)
        t += length
    known = [(w, v) for _, w, v in stretches if v is not None and math.isfinite(v)]
    means, lows, highs = track.fold("value", 0.0, t / most, most)
    assert len(means) == most
    if not known:
        assert set(means) == {None}
        return
    values = [value for _, value in known]
    assert min(low for low in lows if low is not None) == min(values)
    assert max(high for high in highs if high is not None) == max(values)
    for mean, low, high in zip(means, lows, highs, strict=True):
        if mean is not None and low is not None and high is not None:
            assert low - 1e-6 <= mean <= high + 1e-6
    thin = track.thin(most)
    assert len(thin["t"]) <= max(most, 1)


def test_what_lies_across_windows_is_shared_out_where_there_are_many_points() -> None:
    track = Track()
    track.add(0.5, 2.5, 2.0, rate=10.0)
    track.add(3.0, 3.5, 0.5, rate=2.0)
    means, _, _ = track.fold("rate", 0.0, 1.0, 4)
    assert means == pytest.approx([10.0, 10.0, 10.0, 2.0])
    # Few points are all kept, and unknown columns left out.
    track = Track()
    for t, value in enumerate((3.0, None, 1.0)):
        track.add(t, t + 1, one=value, other=None)
    assert track.thin(3) == {"t": [1, 2, 3], "one": [3, None, 1]}
    assert Track().thin() == {}
    numbers = [1 / 3, 2.0, math.nan, math.inf, None, 123456.789, 1e-9]
    assert json.dumps(round_figures(numbers)) == "[0.33333, 2, null, null, null, 123460, 1e-09]"


def test_single_steps_are_points_and_many_become_few_of_which_the_longest_stays() -> None:
    record = golden_run("lively")
    walls = [wall for block in record.ranks[0].blocks for wall in block.walls or ()]
    assert series_of(record)["steps"]["mean"] == pytest.approx(walls, rel=1e-4)
    found = series_of(long_run(30_000))
    assert len(found["steps"]["t"]) == MOST_POINTS
    assert max(found["steps"]["mean_high"]) == 5
    assert found["steps"]["t"] == sorted(found["steps"]["t"])
    assert len(found["memory"]["t"]) <= MOST_POINTS
    assert len(json.dumps(to_plain(found))) < 400_000


def test_curves_agree_with_the_figures_over_all_ranks() -> None:
    ranks = [
        make_rank(rank=n, world_size=2, wait=steady(0.3), fetches=3000, tokens=100) for n in (0, 1)
    ]
    record = make_run(*ranks)
    found, summary = series_of(record), summarise(record)
    stall, rates = found["stall"]["host"], found["throughput"]
    assert stall == pytest.approx([0.3] * len(stall), abs=0.002)
    middle = len(rates["t"]) // 2
    assert rates["samples"][middle] == pytest.approx(summary.samples_per_second, rel=0.01)
    assert rates["tokens"][middle] == pytest.approx(summary.tokens_per_second, rel=0.01)


@pytest.mark.parametrize("dispatcher", [False, True])
def test_the_curves_are_of_the_rank_that_the_summary_is_of(dispatcher: bool) -> None:
    ranks = [
        make_rank(
            rank=number,
            world_size=3,
            wait=steady(0.1 + 0.1 * (number == 1)),
            settings={"dispatcher": dispatcher},
        )
        for number in range(3)
    ]
    chosen = fold_job([fold_rank(rank) for rank in ranks]).chosen
    assert chosen is not None
    assert series_of(make_run(*ranks))["rank"] == chosen.rank == (0 if dispatcher else 1)


def test_what_was_seen_from_outside_has_rates_and_the_clock_of_the_ranks() -> None:
    system = make_system(samples=30, read_bytes=5e6, swap_in_bytes=1e6)
    early = replace(system.start, time=system.start.time - 7.0)
    found = series_of(make_run(make_rank(fetches=300), system=replace(system, start=early)))
    assert found["memory"]["t"][0] == 0
    assert found["stall"]["t"][0] > 7.0
    assert set(found["disk"]["read_bytes"]) == {5_000_000}
    assert set(found["disk"]["swap_in_bytes"]) == {1_000_000}


def test_steps_that_a_full_queue_hid_are_warm_up_as_in_the_figures() -> None:
    record = golden_run("queue-ran-dry")
    first = summarise(record).first_steady_step or 0
    hidden = [
        block
        for block in record.ranks[0].blocks
        if block.phase == "steady" and block.first_step < first
    ]
    assert hidden
    assert len(record.ranks[0].blocks) > len(hidden)
    [phase] = series_of(record)["phases"]
    assert phase["name"] == "warmup"
    assert phase["end"] == pytest.approx(hidden[-1].t, abs=1e-3)


def test_what_is_no_number_reaches_no_curve() -> None:
    record = golden_run("lively")
    rank, nan = record.ranks[0], math.nan
    rank.blocks[5] = replace(rank.blocks[5], wall_seconds=nan, host_wait_seconds=nan)
    rank.blocks[6] = replace(rank.blocks[6], walls=tuple(nan for _ in rank.blocks[6].walls or ()))
    rank.logs[3:] = [replace(log, values={"loss": nan}) for log in rank.logs[3:]]
    assert record.system is not None
    record.system.samples[3] = replace(record.system.samples[3], pss_bytes=nan)  # type: ignore[arg-type]
    found = series_of(record)
    json.dumps(found, allow_nan=False)
    assert max(rate for rate in found["throughput"]["samples"] if rate is not None) < 200


def test_one_step_is_a_point_and_without_any_there_is_no_curve() -> None:
    assert len(series_of(one_step())["steps"]["t"]) == 1
    assert "rank" not in series_of(make_run(system=make_system()))
    assert "steps" not in series_of(make_run(make_rank(fetches=0, warmup_steps=0)))
