"""A stall that begins or ends late is found, and a steady run has no change."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RankRecord
from support.records import make_rank, make_run

OWN = 0.5
"""Seconds of the model's work in a step."""


def changing(*stretches: tuple[int, float], **options: int) -> RankRecord:
    """A rank of so many steps with this stall, and then so many with that."""
    waits = [OWN * share / (1 - share) for count, share in stretches for _ in range(count)]
    return make_rank(
        wait=lambda fetch: waits[min(fetch, len(waits) - 1)],
        own_seconds=OWN,
        fetches=len(waits) - 5,
        **options,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_stalls_at_its_end_is_judged_by_its_end(ranks: int) -> None:
    records = [
        changing((9_000, 0.005), (800, 0.45 * (rank == 0)), rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    summary = summarise(make_run(*records))
    assert summary.stall_fraction < 0.1
    verdict = summary.verdict
    assert verdict.kind == "data"
    assert verdict.headline.startswith("Since step 9,")
    assert "before, the stall was 0.5 %, and that of the whole run is 6." in verdict.evidence[-1]
    assert "num_workers" in verdict.action


NOISE: dict[str, Callable[[random.Random], float]] = {
    "bell": lambda chance: max(0.0, chance.gauss(0.08, 0.06)),
    "bursts": lambda chance: 0.6 if chance.random() < 0.1 else 0.01,
    "tail": lambda chance: min(0.9, chance.expovariate(12)),
}


@pytest.mark.parametrize("name", NOISE)
def test_a_steady_run_has_no_change_however_noisy(name: str) -> None:
    for seed in range(3):
        chance = random.Random(seed)
        shares = [NOISE[name](chance) for _ in range(chance.choice((40, 60, 150)))]
        minutes = ((round(60 * (1 - share) / OWN), share) for share in shares)
        verdict = summarise(make_run(changing(*minutes))).verdict
        assert "of the whole run" not in verdict.evidence[-1], seed


@pytest.mark.parametrize(
    "stretches",
    [
        *(((9_000, before), (1_000, before + 0.02)) for before in (0.09, 0.04)),
        *(((6 + 9 * steps, 0.0), (5 + steps, 0.5)) for steps in (0, 1, 100)),
    ],
)
def test_a_small_step_or_a_short_run_is_no_change(stretches: tuple[tuple[int, float], ...]) -> None:
    verdict = summarise(make_run(changing(*stretches))).verdict
    assert not verdict.headline.startswith("Since")
