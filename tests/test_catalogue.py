"""The catalogue of figures: it is whole, its units are known, and the documentation shows it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.compare import parse_check
from fast_axolotl.record import RunSummary
from fast_axolotl.record.catalogue import FIGURES, MATRIX, PRIMARY
from fast_axolotl.record.units import format_value
from support.records import make_run

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def test_a_summary_has_every_figure_of_the_catalogue_and_nothing_twice() -> None:
    summary = summarise(make_run())
    assert set(summary.figures) == set(FIGURES) - {"start_to_step_seconds"}
    assert not {item.name for item in fields(summary)} & set(FIGURES)
    assert {figure.name for figure in MATRIX} | set(PRIMARY) <= set(FIGURES)
    assert summary.stall_fraction is summary.figures["stall_fraction"]
    with pytest.raises(AttributeError, match="no figure 'stall'"):
        _ = summary.stall


def test_the_headline_figure_is_in_the_matrix_and_can_have_a_limit() -> None:
    limit = parse_check("stall_fraction > +0.02")
    assert (limit.figure, limit.bound, limit.is_difference) == ("stall_fraction", 0.02, True)


def test_units_are_ones_that_a_value_can_be_written_in() -> None:
    counted = {"fetches", "batches", "samples", "tokens", "rows", "steps", "cores", "processes"}
    counted |= {f"{noun}/s" for noun in counted} | {"batches/step", "×", "W", "MHz", "TFLOP/s"}
    scaled = {"share", "s", "bytes", "bytes/s", "FLOP", "FLOP/s", "yes/no"}
    assert {figure.unit for figure in FIGURES.values()} <= counted | scaled
    for figure in FIGURES.values():
        assert figure.format(None) == "–"
        assert figure.unit in scaled or figure.format(3.0) == f"3 {figure.unit}"
    written = [format_value(1e9, unit) for unit in ("bytes", "bytes/s", "FLOP", "yes/no")]
    assert written == ["1 GB", "1 GB/s", "1 GFLOP", "yes"]


def test_the_documentation_explains_every_figure_in_short_sentences() -> None:
    """What it tells, how it is measured, when it is blank or misleading: a paragraph each."""
    text = DOCS.read_text(encoding="utf-8")
    sections = {}
    for title, body in re.findall(r"(?ms)^#### (.+?)\n\n(.+?)(?=\n#|\Z)", text):
        sections |= dict.fromkeys(re.findall(r"`(\w+)`", title), body.strip())
    assert set(sections) == set(FIGURES)
    directions = {"higher": "; higher is better.", "lower": "; lower is better.", "": "."}
    for name, figure in FIGURES.items():
        tells, method, caveat = (" ".join(part.split()) for part in sections[name].split("\n\n"))
        label = figure.label if "Label: " in tells else figure.label.split(", ")[-1]
        assert re.search(rf"Labels?: .*[*]([^*]*, )?{re.escape(label)}[*]", tells), name
        unit = "percent" if figure.unit == "share" else figure.unit
        assert tells.endswith(f" Unit: {unit}{directions[figure.better]}"), name
        assert method.startswith("**How it is measured.** "), name
        assert caveat.startswith("**When it is blank or misleading.** "), name
        assert figure.missing in caveat or figure.missing == "not recorded", name
        for sentence in re.split(r"[.] ", f"{tells} {method} {caveat}"):
            assert len(sentence.split()) <= 30, sentence


def test_the_documentation_names_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    names = {item.name for item in fields(RunSummary)} - {"figures"} | set(FIGURES)
    assert [name for name in names if f"`{name}`" not in text] == []
