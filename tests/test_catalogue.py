"""The catalogue of figures: it is whole, its units are known, and the documentation shows it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

from fast_axolotl.record import RunSummary
from fast_axolotl.record.catalogue import FIGURES, MATRIX, PRIMARY
from fast_axolotl.record.units import format_value

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"

NOT_FIGURES = {
    *("started", "is_finished", "world_size", "deciding_rank", "first_steady_step"),
    *("steps", "fetches", "warmup_steps", "measured_seconds", "span_seconds", "hwm_by_phase"),
    *("straggler_rank", "data_parallel_size", "waits_by_cause", "ledger"),
}
"""What the summary says in numbers beside its figures: what they are of, and tables."""


def test_every_number_of_a_summary_is_in_the_catalogue_and_nothing_else() -> None:
    hints = get_type_hints(RunSummary)
    kinds = {name: {hint, *get_args(hint)} - {type(None)} for name, hint in hints.items()}
    numbers = {name for name, kind in kinds.items() if kind & {int, float, bool}}
    assert set(FIGURES) - {"start_to_step_seconds"} == numbers - NOT_FIGURES
    assert {figure.name for figure in MATRIX} | set(PRIMARY) <= set(FIGURES)


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
    assert [item.name for item in fields(RunSummary) if f"`{item.name}`" not in text] == []
