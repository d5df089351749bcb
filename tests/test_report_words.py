"""Figures in words, the same on a page, in a terminal and as Markdown; and progress in lines."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow, ProtocolResult
from fast_axolotl.report.charts import Curves
from fast_axolotl.report.live_frame import make_frame
from fast_axolotl.report.live_wording import describe_state, format_line, step_parts
from fast_axolotl.report.matrix import (
    comparison_markdown,
    protocol_markdown,
    render_protocol,
    show_comparison,
)
from fast_axolotl.report.protocol_progress import protocol_progress
from fast_axolotl.report.short_summary import show_short_summary
from fast_axolotl.report.show import render_summary
from fast_axolotl.report.stall_chart import stall_chart
from fast_axolotl.report.values import count_words, describe_change, escape_markdown
from support.records import make_rank, make_run
from support.reports import make_protocol, middle_of_a_protocol


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


def lines_of(protocol: ProtocolResult) -> list[str]:
    return [line for line in render_protocol(protocol, width=400).splitlines() if "•" in line]


def test_what_one_arm_alone_lacks_is_told_with_its_reason() -> None:
    protocol = make_protocol()
    line = "Not measured in streaming: swap in: nobody sampled the process tree."
    assert f"• {line}" in lines_of(protocol)
    assert f"- {line}\n" in protocol_markdown(protocol)
    file = io.StringIO()
    show_comparison(protocol.matrix, file=file)
    assert f"• {line}\n" in file.getvalue()
    assert f"- {line}\n" in comparison_markdown(protocol.matrix)
    assert "• Not measured: MFU: the peak of this device is not known." in lines_of(protocol)


def test_an_arm_without_any_figure_is_told_in_one_line() -> None:
    unknown = Cell(value=None, outcome="not compared", reason="no run of it counts")
    protocol = make_protocol()
    rows = tuple(replace(row, cells=(*row.cells[:2], unknown)) for row in protocol.matrix.rows)
    lines = lines_of(replace(protocol, matrix=replace(protocol.matrix, rows=rows)))
    assert "• Nothing was measured in streaming: no run of it counts." in lines
    assert not any("measured in streaming: reader" in line for line in lines)


def test_alarms_come_before_every_figure() -> None:
    matrix = make_protocol().matrix
    alarm = "DIFFERENT losses <b>: 1.8 and 1.9."
    file = io.StringIO()
    show_comparison(matrix, alarms=[alarm], checks=[("x < 1: FAILED", True)], file=file)
    assert file.getvalue().startswith(f"{alarm}\nx < 1: FAILED\n")
    text = comparison_markdown(matrix, alarms=[alarm])
    assert text.startswith("> **DIFFERENT losses &lt;b&gt;: 1.8 and 1.9.**\n\n|")


def test_an_alarm_is_red_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    show_comparison(make_protocol().matrix, alarms=["DIFFERENT losses"], file=file)
    assert "41m" in file.getvalue().splitlines()[0]


def test_warm_ups_are_told_apart_from_pairs() -> None:
    protocol = make_protocol(names=("stock", "ours"), fails=False)
    order = ("stock", "ours", "ours", "stock")
    arms = []
    for arm in protocol.arms:
        runs = tuple(replace(run, pair=at - 1) for at, run in enumerate(arm.runs[:3]))
        arms.append(replace(arm, runs=runs))
    two = replace(protocol, pairs=2, order=order, arms=tuple(arms))
    told = (
        "• 2 pairs, in the order A B B A (A stock, B ours), after 1 warm-up of each arm; 25.4 min"
    )
    assert told in lines_of(two)
    arms[0] = replace(arms[0], runs=(replace(arms[0].runs[0], folder="x"), *arms[0].runs))
    lines = lines_of(replace(two, arms=tuple(arms)))
    assert any("(A stock, B ours), after 3 warm-ups in all;" in line for line in lines)
    before = replace(middle_of_a_protocol(), order=())
    assert "• 0 of 2 pairs, after 1 warm-up of each arm; 25.4 min" in lines_of(before)


def test_where_no_arm_ran_nothing_is_told_of_pairs() -> None:
    none = Matrix(arms=(), rows=())
    protocol = replace(make_protocol(), arms=(), matrix=none, order=(), pairs=0, losses="")
    assert "pair" not in render_protocol(protocol)
    assert "pair" not in protocol_markdown(protocol)


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (1, "fetch", "1 fetch"),
        (2000, "fetch", "2,000 fetches"),
    ],
)
def test_one_is_not_many(number: int, noun: str, words: str) -> None:
    assert count_words(number, noun) == words


def test_one_step_and_one_outlier_are_told_as_one() -> None:
    summary = summarise(make_run(make_rank()))
    one = replace(summary, steps=1, fetches=1, warmup_steps=1)
    assert "1 step, 1 fetch in" in render_summary(one)
    assert "1 step of warm-up left out" in render_summary(one)
    slow = {"t": [1.0, 2.0], "fetch": [1, 2], "row": [8, 16], "seconds": [9.0, 1e-6], "all": 2}
    series = {
        "steps": {"t": [1.0], "mean": [0.1], "step": [0], "steps": [1], "is_steady": [True]},
        "slow": slow,
    }
    chart = stall_chart([Curves(place=0, name="run", series=series, summary=summary)])
    assert chart is not None
    assert "up to 9.00 s; the longest is marked." in chart.panels[0].text


def test_a_run_that_has_ended_is_not_said_to_make_no_step() -> None:
    for end, words in (
        ("finished", "training has ended"),
        ("exception", "training failed"),
        ("interrupted", "training was interrupted"),
    ):
        record = make_run(make_rank(end=end))
        frame = make_frame(record, summarise(record), title="", stepless_seconds=15.0)
        assert describe_state(frame, None, "") == (words, "bold")
        assert words in format_line(frame)
        assert describe_state(frame, None, "q was pressed")[0] == "q was pressed"
    for ranks in (
        [make_rank(world_size=2)],
        [make_rank(world_size=2), make_rank(rank=1, end=None)],
    ):
        record = make_run(*ranks)
        frame = make_frame(record, summarise(record), title="", stepless_seconds=15.0)
        assert describe_state(frame, None, "")[0] == "no step for 0:15"


def test_the_command_after_a_run_can_be_pasted() -> None:
    record = make_run(make_rank())
    record.path = "out dir ü/p [x]"
    file = io.StringIO()
    show_short_summary(summarise(record), record, file=file)
    assert "Every figure: fast-axolotl show 'out dir ü/p [x]'\n" in file.getvalue()
