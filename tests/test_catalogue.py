"""The catalogue of figures: it is whole, its units are known, and the documentation shows it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

from fast_axolotl.record import RunSummary
from fast_axolotl.record.catalogue import FIGURES, MATRIX, PRIMARY, figures_table
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


def test_the_documentation_shows_the_catalogue_and_names_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    shown = text.partition("<!-- figures -->\n")[2].partition("<!-- /figures -->")[0]
    assert shown == figures_table(), "write figures_table() between the markers of docs/metrics.md"
    assert [item.name for item in fields(RunSummary) if f"`{item.name}`" not in text] == []
