"""The page of a report in a real Chromium: no error, no request, charts with points, the toggle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install plotly jinja2")

from fast_axolotl.record.protocol_result import Cell
from fast_axolotl.report.content import Report
from fast_axolotl.report.page import render_report
from fast_axolotl.report.picture import take_picture
from support.browser import COMMAND, MISSING, Browser, start_browser
from support.reports import as_report, lively_run, many_ranks, one_step, protocol_report, with_nans

pytestmark = pytest.mark.skipif(COMMAND is None, reason=MISSING)

POINTS = """
[...document.querySelectorAll(".plot")].map((plot) => ({
  id: plot.id,
  traces: plot.data.map((trace) => trace.x.length),
  drawn: plot.querySelectorAll(".scatterlayer path, .barlayer path").length,
}))
"""


OVERLAPS = """
[...document.querySelectorAll(".matrix td")].flatMap((cell) => {
  const parts = [...cell.querySelectorAll(".value, .picture, .ratio, .interval, .outcome, small")];
  const boxes = parts.map((one) => one.getBoundingClientRect()).filter((one) => one.width);
  return boxes.flatMap((one, place) => boxes.slice(place + 1).filter((other) =>
    one.left < other.right - 1 && other.left < one.right - 1 &&
    one.top < other.bottom - 1 && other.top < one.bottom - 1).map(() => cell.textContent));
})
"""
"""Cells of the matrix in which two parts lie on each other."""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.resize(1280, 900)
    chromium.prefer("light")
    chromium.call("Page.navigate", url="about:blank")
    chromium.messages.clear()
    chromium.requests.clear()
    return chromium


def show(browser: Browser, report: Report, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(render_report(report), encoding="utf-8")
    browser.open(path)
    return path


def outside(browser: Browser) -> list[str]:
    """Requests that are neither the page itself nor something inside it."""
    return [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))]


REPORTS: dict[str, Any] = {
    "a protocol": protocol_report,
    "a run with GPUs": lambda: as_report(lively_run(seconds=30, gpus=2)),
    "64 ranks": lambda: as_report(many_ranks(64, 10)),
    "one step": lambda: as_report(one_step()),
    "NaN": lambda: as_report(with_nans()),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_opens_without_errors_and_requests_and_draws_every_chart(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    show(browser, REPORTS[name](), tmp_path)
    assert browser.messages == []
    assert outside(browser) == []
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1
    charts = browser.evaluate(POINTS)
    assert len(charts) >= 3
    for chart in charts:
        assert chart["drawn"] > 0, chart
        assert max(chart["traces"]) > 0, chart


def test_the_toggle_changes_the_page_and_its_charts(browser: Browser, tmp_path: Path) -> None:
    show(browser, as_report(lively_run(seconds=20)), tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    curve = "document.querySelector('.plot').data.find((one) => one.name === 'step').line.color"
    light = browser.evaluate(ground), browser.evaluate(curve)
    browser.evaluate("document.getElementById('theme').focus()")
    browser.press("Enter")
    dark = browser.evaluate(ground), browser.evaluate(curve)
    assert light != dark
    assert light[0] == "rgb(246, 246, 243)"
    assert dark[0] == "rgb(20, 23, 26)"
    browser.evaluate("document.getElementById('theme').click()")
    assert (browser.evaluate(ground), browser.evaluate(curve)) == light


def test_the_systems_wish_for_dark_is_followed(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("dark")
    show(browser, as_report(one_step()), tmp_path)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert browser.evaluate("document.getElementById('theme').textContent") == "Light"


def test_a_chart_is_moved_with_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, as_report(lively_run(seconds=20)), tmp_path)
    span = "(([a, b]) => b - a)(document.querySelector('.plot').layout.xaxis.range)"
    whole = browser.evaluate(span)
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("+")
    assert browser.evaluate(span) < 0.8 * whole
    browser.press("0")
    assert browser.evaluate(span) == pytest.approx(whole)


def test_a_phone_shows_everything_without_scrolling_sideways(
    browser: Browser, tmp_path: Path
) -> None:
    browser.resize(390, 844, is_phone=True)
    show(browser, protocol_report(), tmp_path)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    widths = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map((one) => one.getBoundingClientRect().right)"
    )
    assert max(widths) <= 390
    assert browser.messages == []


def test_a_name_of_300_characters_widens_no_page(browser: Browser, tmp_path: Path) -> None:
    names = ["/long/" + "abcdefghij" * 30, "other"]
    report = as_report(lively_run(seconds=10), lively_run(seconds=10), names=names)
    widest = (
        "Math.max(...[...document.querySelectorAll('.answer *, .card *, .legend *, figcaption')]"
        ".map((one) => one.getBoundingClientRect().right))"
    )
    for width in (390, 1280):
        browser.resize(width, 844, is_phone=width < 400)
        show(browser, report, tmp_path)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(widest) <= width


def test_axes_show_their_titles_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    browser.resize(390, 844, is_phone=True)
    show(browser, as_report(lively_run(seconds=30, gpus=1)), tmp_path)
    titles = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map((plot) => "
        "[...plot.querySelectorAll('.g-xtitle text, .g-ytitle text, .g-y2title text')].map("
        "(one) => [one.textContent, one.getBoundingClientRect().left,"
        " one.getBoundingClientRect().right]))"
    )
    assert all(len(found) >= 2 for found in titles)
    places = [place for found in titles for place in found]
    assert {words for words, _, _ in places} >= {"step time (ms)", "time (s)", "memory (GB)"}
    assert all(0 <= left < right <= 390 for _, left, right in places)


def test_a_slide_fills_the_height_that_it_is_given(browser: Browser, tmp_path: Path) -> None:
    report = protocol_report()
    assert report.protocol is not None
    matrix = report.protocol.matrix
    by_difference = Cell(
        value=0.004,
        difference=-0.667,
        difference_low=-0.682,
        difference_high=-0.661,
        outcome="better",
        reason="compared by difference, because a run is near 0, where ratios mean nothing",
    )
    stall = replace(matrix.rows[2], cells=(matrix.rows[2].cells[0], by_difference, by_difference))
    small = Cell(value=51_196.0, ratio=0.99993, low=0.99988, high=0.99997, outcome="worse")
    tokens = replace(matrix.rows[3], cells=(*matrix.rows[3].cells[:2], small))
    matrix = replace(matrix, rows=(*matrix.rows[:2], stall, tokens, *matrix.rows[4:]))
    report = replace(report, protocol=replace(report.protocol, matrix=matrix))
    path = show(browser, report, tmp_path)
    browser.resize(1600, 757)
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=f"{path.as_uri()}#slide=900")
    browser.wait_for("document.documentElement?.dataset.drawn === ''")
    bottom = browser.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
    assert 860 < bottom <= 900
    starts = browser.evaluate(
        "[2, 3].map((place) => new Set([...document.querySelectorAll("
        "`.matrix td:nth-child(${place + 1}) .picture`)].map("
        "(one) => Math.round(one.getBoundingClientRect().left))).size)"
    )
    assert starts == [1, 1]
    assert browser.evaluate(OVERLAPS) == []
    assert browser.messages == []


def test_paper_is_light_narrow_and_unfolded(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("dark")
    show(browser, as_report(lively_run(seconds=20)), tmp_path)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.evaluate("document.querySelector('.plot').layout.width") <= 680
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate("document.documentElement.dataset.theme") is None
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") > 0
    browser.print_to(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_raw_data_can_be_downloaded(browser: Browser, tmp_path: Path) -> None:
    show(browser, as_report(one_step()), tmp_path)
    href = browser.evaluate("document.getElementById('download').href")
    assert href.startswith("blob:")
    text = browser.evaluate("document.getElementById('report-data').textContent")
    assert json.loads(text)["runs"][0]["name"] == "run-0"


def test_a_hostile_name_runs_no_script(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'><b>x"
    report = as_report(lively_run(seconds=20), lively_run(seconds=20), names=[evil, "other"])
    show(browser, report, tmp_path)
    assert browser.evaluate("window.hit") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert evil in browser.evaluate("document.querySelector('h1').textContent")
    assert outside(browser) == []


def test_a_slide_is_a_picture_of_the_top(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(protocol_report()), encoding="utf-8")
    picture = tmp_path / "slide.png"
    assert COMMAND is not None
    take_picture(page, picture, browser=COMMAND)
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert [int.from_bytes(head[at : at + 4], "big") for at in (16, 20)] == [3200, 1800]
