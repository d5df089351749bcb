"""Figures in words, the same on a page, in a terminal and as Markdown; and progress in lines."""

from __future__ import annotations

import io
from typing import Any

import pytest

from fast_axolotl.measure import thresholds
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.figures import FIGURES
from fast_axolotl.record.comparison import Cell, Matrix, MatrixRow
from fast_axolotl.report.figures import DATA_STALL, FREE_STALL
from fast_axolotl.report.live_frame import make_frame
from fast_axolotl.report.live_wording import step_parts
from fast_axolotl.report.matrix import comparison_markdown, protocol_markdown, show_comparison
from fast_axolotl.report.matrix_markup import ROWS
from fast_axolotl.report.protocol_progress import protocol_progress
from fast_axolotl.report.values import describe_change, escape_markdown
from records import make_rank, make_run
from reports import make_protocol


def row_of(cell: Cell) -> MatrixRow:
    return MatrixRow(
        name="rows_per_second",
        label="reader",
        unit="rows/s",
        better="higher",
        cells=(Cell(value=100.0), cell),
    )


def in_terminal(cell: Cell) -> str:
    file = io.StringIO()
    show_comparison(Matrix(arms=("a", "b"), rows=(row_of(cell),)), file=file)
    [line] = [line for line in file.getvalue().splitlines() if "reader" in line]
    return line.split("│")[-2].strip()


CHANGES = (
    ((1.426, 1.38, 1.471), "better", "×1.43 1.38 to 1.47", "1.426× (1.380 – 1.471) better"),
    ((1.004, 1.002, 1.006), "better", "×1.004 1.002 to 1.006", "1.004× (1.002 – 1.006) better"),
    (
        (0.9993, 0.9988, 0.99976),
        "worse",
        "×0.9993 0.9988 to 0.9998",
        "0.9993× (0.9988 – 0.9998) worse",
    ),
    (
        (1.0, 0.999, 1.002),
        "no detectable change",
        "×1.00 1.00 to 1.00",
        "1.000× (0.999 – 1.002) no detectable change",
    ),
    ((1234.5, 1100.0, 1400.0), "better", "×1,234 1,100 to 1,400", "1,234× (1,100 – 1,400) better"),
    ((12.34, 11.0, 14.0), "better", "×12.3 11.0 to 14.0", "12.3× (11.0 – 14.0) better"),
    ((0.0123, 0.011, 0.014), "worse", "×0.012 0.011 to 0.014", "0.012× (0.011 – 0.014) worse"),
)


@pytest.mark.parametrize(("numbers", "outcome", "page", "terminal"), CHANGES)
def test_no_change_is_rounded_to_one_and_none_is_a_power_of_ten(
    numbers: tuple[float, float, float], outcome: Any, page: str, terminal: str
) -> None:
    ratio, low, high = numbers
    cell = Cell(value=1.0, ratio=ratio, low=low, high=high, outcome=outcome)
    assert " ".join(describe_change(cell, row_of(cell))) == page
    assert in_terminal(cell) == terminal


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("tokens_per_second < 1", "tokens_per_second &lt; 1"),
        ("*a* _b_ __init__ `c`", "\\*a\\* \\_b\\_ \\_\\_init\\_\\_ \\`c\\`"),
        ("a|b\n# c", "a\\|b \\# c"),
        ("[x](y) & ~~z~~", "\\[x\\](y) &amp; \\~\\~z\\~\\~"),
    ],
)
def test_markdown_shows_texts_as_they_are(text: str, escaped: str) -> None:
    assert escape_markdown(text) == escaped


def test_names_of_arms_are_no_markdown() -> None:
    protocol = make_protocol(names=("*base*", "`drop`", "_stream_"))
    text = protocol_markdown(protocol)
    for name in ("\\*base\\*", "\\`drop\\`", "\\_stream\\_"):
        assert f"| {name} |" in text
    assert "\\_stream\\_, runs/06-\\_stream\\_ failed; its log ends so:" in text
    assert "| **1.310× (1.284 – 1.336) better** |" in text
    assert "- **x &lt; 1**" in comparison_markdown(protocol.matrix, checks=[("x < 1", True)])


def test_many_steps_a_second_are_a_number_to_read() -> None:
    summary = summarise(make_run(make_rank(own_seconds=0.0008, fetches=9000)))
    assert "1,250 steps/s" in step_parts(make_frame(make_run(), summary, title=""))


def test_runs_are_compared_by_the_figures_of_a_protocol() -> None:
    figures = [(one.name, one.label, one.unit, one.better) for one in FIGURES]
    assert list(ROWS) == [one for one in figures if one[0] != "start_to_step_seconds"]


def test_the_lines_of_the_charts_are_those_of_the_verdict() -> None:
    assert (FREE_STALL, DATA_STALL) == (thresholds.FREE_STALL, thresholds.DATA_STALL)


def test_runs_of_one_name_after_each_other_have_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with protocol_progress() as update:
        for done, arm in enumerate(("baseline", "candidate", "candidate", "baseline")):
            update(f"{arm}, warm-up", done, 4, 0.0, None)
            update(f"{arm}, warm-up", done, 4, 1.0, None)
        update("dedupe on its own", 4, 4, 0.0, None)
    assert capsys.readouterr().err.splitlines() == [
        "fast-axolotl: run 1 of 4: baseline, warm-up",
        "fast-axolotl: run 2 of 4: candidate, warm-up",
        "fast-axolotl: run 3 of 4: candidate, warm-up",
        "fast-axolotl: run 4 of 4: baseline, warm-up",
        "fast-axolotl: dedupe on its own",
    ]


def test_a_protocol_without_runs_counts_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with protocol_progress() as update:
        update("dedupe on its own", 0, 0, 0.0, None)
    assert capsys.readouterr().err == "fast-axolotl: dedupe on its own\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with protocol_progress() as update:
        update("dedupe on its own", 0, 0, 7.0, None)
    shown = capsys.readouterr().err
    assert "dedupe on its own, 7 s" in shown
    assert "runs" not in shown
