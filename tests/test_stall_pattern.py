"""How waits are spread: their pattern and period, and a stall that begins or ends late."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.measure.stall_pattern import DEEPEST_QUEUE, Pattern, find_pattern
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import Histogram, RankRecord
from support.records import make_rank, make_run


def find(*waits: tuple[float, int], **causes: float) -> Pattern:
    """The pattern of so many waits of these lengths."""
    histogram = Histogram()
    for seconds, count in waits:
        histogram.add(seconds, count)
    return find_pattern(histogram, causes)


@pytest.mark.parametrize(
    ("period", "kind"),
    [(4, "burst"), (16, "burst"), (62.5, "burst"), (64, "burst"), (DEEPEST_QUEUE + 1, "periodic")],
)
def test_a_period_that_a_queue_can_hide_is_a_burst(period: float, kind: str) -> None:
    long = (0.1, 600)
    assert find(long, (0.0, round(600 * period) - 600)) == (kind, pytest.approx(period), "rows")
    # Short waits in between change nothing.
    strays = find(long, (0.02, 60), (0.0, round(600 * period) - 660))
    assert strays == (kind, pytest.approx(period), "rows")


def test_waits_that_vary_by_chance_or_hold_little_are_steady() -> None:
    assert find((0.02, 100), (0.01, 1500)).kind == "steady"
    chance = random.Random(2)
    assert find(*((chance.expovariate(10), 1) for _ in range(2000))).kind == "steady"
    assert find() == find((0.5, 1), (0.0, 900)) == find((0.0, 900)) == Pattern()


@pytest.mark.parametrize("cause", ["epoch", "shard"])
def test_waits_with_one_cause_are_named_after_it(cause: str) -> None:
    assert find((0.1, 5), (0.0, 900), **{cause: 0.9}) == ("periodic", 181, cause)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000)), max_size=60))
def test_any_waits_give_an_answer(waits: list[tuple[float, int]]) -> None:
    found = find(*waits)
    assert found.kind in ("steady", "burst", "periodic")
    assert (found.period_fetches is None) is (found.kind == "steady")
    assert found.period_fetches is None or found.period_fetches >= 1


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
