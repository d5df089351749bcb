"""A protocol as text: what comes first, what is left out, and data that tries to be markup."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from fast_axolotl.record.protocol_result import Cell, Matrix, MatrixRow
from fast_axolotl.report.comparison import comparison_document, protocol_document
from fast_axolotl.report.markdown import document_markdown, escape_markdown
from support.reports import make_protocol, text_of


def test_markdown_is_a_table_whatever_the_data_says() -> None:
    nasty = replace(make_protocol(fails=False), title="<script>alert(1)</script> | `x`\n# heading")
    text = document_markdown(protocol_document(nasty))
    assert "<script>" not in text
    assert text.splitlines()[0].endswith("# heading")
    lines = text.splitlines()
    tables = [list(own) for is_row, own in groupby(lines, lambda line: line[:1] == "|") if is_row]
    for rows in tables:
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    rows = [line for table in tables for line in table]
    assert any(line.startswith("| real tokens |") and "**" in line for line in rows)


CHANGES = (
    ((1.426, 1.38, 1.471), "better", "1.426× (1.380 – 1.471) better"),
    ((1.004, 1.002, 1.006), "better", "1.004× (1.002 – 1.006) better"),
    ((1.0, 0.999, 1.002), "no clear change", "1.000× (0.999 – 1.002) no clear change"),
    ((1234.5, 1100.0, 1400.0), "better", "1,234× (1,100 – 1,400) better"),
    ((12.34, 11.0, 14.0), "better", "12.3× (11.0 – 14.0) better"),
    ((0.0123, 0.011, 0.014), "worse", "0.012× (0.011 – 0.014) worse"),
)


@pytest.mark.parametrize(("numbers", "outcome", "text"), CHANGES)
def test_no_change_is_rounded_to_one_and_none_is_a_power_of_ten(
    numbers: tuple[float, float, float], outcome: Any, text: str
) -> None:
    ratio, low, high = numbers
    cell = Cell(value=1.0, ratio=ratio, low=low, high=high, outcome=outcome)
    names: Any = {"name": "rows_per_second", "label": "reader", "unit": "", "better": "higher"}
    row = MatrixRow(**names, cells=(Cell(value=100.0), cell))
    lines = text_of(comparison_document(Matrix(arms=("a", "b"), rows=(row,)))).splitlines()
    [line] = [line for line in lines if "reader" in line]
    assert line.split("│")[-2].strip() == text


def test_a_row_that_is_unclear_for_the_number_of_rows_says_so() -> None:
    protocol = make_protocol()
    cell = Cell(value=1.0, ratio=1.2, low=1.1, high=1.3, outcome="no clear change")
    cell = replace(cell, p_value=0.01, p_adjusted=0.12)
    rows = [replace(row, cells=(row.cells[0], cell, cell)) for row in protocol.matrix.rows]
    text = text_of(comparison_document(replace(protocol.matrix, rows=tuple(rows))), width=200)
    assert "1.200× (1.100 – 1.300) no clear change (p = 0.12 after Holm)" in text


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
    text = document_markdown(protocol_document(protocol))
    for name in ("\\*base\\*", "\\`drop\\`", "\\_stream\\_"):
        assert f"| {name} |" in text
    assert "\\_stream\\_, runs/06-\\_stream\\_ failed; the end of its log:" in text
    assert "| **1.310× (1.284 – 1.336) better** |" in text
    assert "> **x &lt; 1**" in document_markdown(
        comparison_document(protocol.matrix, checks=[("x < 1", True)])
    )


def test_an_arm_without_any_figure_is_told_in_one_line() -> None:
    unknown = Cell(value=None, outcome="not compared", reason="no run of it counts")
    protocol = make_protocol()
    rows = tuple(replace(row, cells=(*row.cells[:2], unknown)) for row in protocol.matrix.rows)
    changed = replace(protocol, matrix=replace(protocol.matrix, rows=rows))
    text = text_of(protocol_document(changed), width=400)
    assert "• Nothing measured in streaming: no run of it counts." in text
    assert "measured in streaming: reader" not in text
