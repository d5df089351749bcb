"""The page of a report in a real Chromium: no error, no request, charts with points, the toggle."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install plotly jinja2")

from fast_axolotl.report.document import Document
from fast_axolotl.report.page import render_page
from support.browser import COMMAND, MISSING, Browser, start_browser
from support.reports import as_report, golden_run, one_step, protocol_report

pytestmark = pytest.mark.skipif(COMMAND is None, reason=MISSING)

EVIL = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'><b>x"
POINTS = """
[...document.querySelectorAll(".plot")].map((plot) => ({
  id: plot.id,
  traces: plot.data.map((trace) => trace.x.length),
  drawn: plot.querySelectorAll(".scatterlayer path, .barlayer path").length,
}))
"""
TITLES = """
[...document.querySelectorAll('.plot')].map((plot) =>
  [...plot.querySelectorAll('.g-xtitle text, .g-ytitle text, .g-y2title text')].map((one) =>
    [one.textContent, one.getBoundingClientRect().left, one.getBoundingClientRect().right]))
"""


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


def show(browser: Browser, report: Document, folder: Path) -> None:
    path = folder / "report.html"
    path.write_text(render_page(report), encoding="utf-8")
    browser.open(path)
    assert browser.messages == []
    asked = [url for url in browser.requests if not url.startswith(("data:", "blob:"))]
    assert set(asked) <= {path.as_uri(), "about:blank"}, "nothing but the page itself"


def test_pages_open_without_errors_and_requests_and_draw_every_chart(
    browser: Browser, tmp_path: Path
) -> None:
    for report in (protocol_report(), as_report(golden_run("nan")), as_report(one_step())):
        show(browser, report, tmp_path)
        charts = browser.evaluate(POINTS)
        assert len(charts) >= 3
        for chart in charts:
            assert chart["drawn"] > 0, chart
            assert max(chart["traces"]) > 0, chart


def test_the_page_obeys_its_keys_its_toggle_and_paper(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("dark")
    show(browser, as_report(golden_run("lively")), tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    curve = "document.querySelector('.plot').data.find((one) => one.name === 'time per step').line"
    dark = browser.evaluate(ground), browser.evaluate(f"{curve}.color")
    assert dark[0] == "rgb(20, 23, 26)"
    assert browser.evaluate("document.getElementById('theme').textContent") == "Light"
    browser.evaluate("document.getElementById('theme').focus()")
    browser.press("Enter")
    assert browser.evaluate(ground) == "rgb(246, 246, 243)"
    assert browser.evaluate(f"{curve}.color") != dark[1]

    span = "(([a, b]) => b - a)(document.querySelector('.plot').layout.xaxis.range)"
    whole = browser.evaluate(span)
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("+")
    assert browser.evaluate(span) < 0.8 * whole
    browser.press("0")
    assert browser.evaluate(span) == pytest.approx(whole)

    browser.evaluate("document.getElementById('theme').click()")
    closed = browser.evaluate("document.querySelectorAll('details:not([open])').length")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.evaluate("document.querySelector('.plot').layout.width") <= 680
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == closed

    assert browser.evaluate("document.getElementById('download').href").startswith("blob:")
    text = browser.evaluate("document.getElementById('report-data').textContent")
    assert json.loads(text)["runs"][0]["name"] == "run-0"


def test_a_page_that_reloads_stays_as_it_was_left(browser: Browser, tmp_path: Path) -> None:
    report = as_report(golden_run("lively"))
    show(browser, replace(report, reload_seconds=3.0), tmp_path)
    browser.evaluate("document.getElementById('theme').click()")
    browser.evaluate("document.querySelector('details').open = false")
    later = render_page(replace(report, title="later"))
    (tmp_path / "report.html").write_text(later, encoding="utf-8")
    time.sleep(5)
    browser.wait_for("document.title.startsWith('later')")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("document.querySelector('details').open") is False


def test_a_phone_shows_everything_without_scrolling_sideways(
    browser: Browser, tmp_path: Path
) -> None:
    browser.resize(390, 844, is_phone=True)
    show(browser, protocol_report(), tmp_path)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    titles = browser.evaluate(TITLES)
    assert all(len(found) >= 2 for found in titles)
    places = [place for found in titles for place in found]
    assert {words for words, _, _ in places} >= {"step time (ms)", "time (s)", "memory (GB)"}
    assert all(0 <= left < right <= 390 for _, left, right in places)


def test_names_widen_no_page_and_run_no_script(browser: Browser, tmp_path: Path) -> None:
    names = ["/long/" + "abcdefghij" * 30, EVIL]
    report = as_report(golden_run("lively"), golden_run("nan"), names=names)
    widest = (
        "Math.max(...[...document.querySelectorAll('.card *, .legend *, figcaption')]"
        ".map((one) => one.getBoundingClientRect().right))"
    )
    for width in (390, 1280):
        browser.resize(width, 844, is_phone=width < 400)
        show(browser, report, tmp_path)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(widest) <= width
    assert browser.evaluate("window.hit") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.evaluate("document.querySelector('h1').textContent")
