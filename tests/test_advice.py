"""Settings are taken out of an advice as a reader would take them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fast_axolotl.bench.advice import AdviceResult, Round, advice_tables, find_settings
from fast_axolotl.bench.machine import describe_machine

ADVICE = {
    "Set dataloader_num_workers: 2; now the training process itself reads.": {
        "dataloader_num_workers": 2
    },
    "Set dataloader_num_workers: 2 and dataloader_prefetch_factor: 8; 16 batches are ready.": {
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 8,
    },
    "Pack the next rows while these are trained on: set dataset_use_rust_streaming: true, "
    "fast_axolotl_streaming_force: true, and start Axolotl by fast-axolotl run --.": {
        "dataset_use_rust_streaming": True,
        "fast_axolotl_streaming_force": True,
    },
    "Pack fewer rows at a time: set streaming_multipack_buffer_size: 1000 (now 10,000).": {
        "streaming_multipack_buffer_size": 1000
    },
    "Leave the data path as it is: a faster loader would change nothing.": {},
}


@pytest.mark.parametrize("advice", ADVICE)
def test_settings_of_an_advice(advice: str) -> None:
    assert find_settings(advice) == ADVICE[advice]


def test_every_round_is_a_row_and_the_advice_stands_below(tmp_path: Path) -> None:
    first, last = (
        Round(
            settings=settings,
            is_accelerated=bool(settings),
            verdict=verdict,
            headline="",
            action=action,
            stall_fraction=stall,
            wait_max_seconds=None,
            tokens_per_second=5000.0,
            losses="Losses: equal.",
            seconds=60.0,
        )
        for settings, verdict, action, stall in (
            ({}, "data/periodic", "Set a_key: true.", 0.2),
            ({"a_key": True}, "compute", "Leave it.", 0.01),
        )
    )
    result = AdviceResult(
        machine=describe_machine(),
        date="2030-01-31",
        command="fast-axolotl bench advice",
        rounds=(first, last),
        is_cured=True,
        seconds=120.0,
    )
    (table,) = advice_tables(result)
    assert [row[1] for row in table.rows] == ["as it is", "a_key: true"]
    assert "round 1: Set a_key: true." in table.notes
    assert any("cured" in note for note in table.notes)
    result.save(tmp_path / "advice.json")
    assert (tmp_path / "advice.json").exists()
