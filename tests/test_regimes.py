"""Verdicts over time: a change is found where it is, and a steady run has none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RankRecord, RunRecord
from support.records import make_rank, make_ranks, make_run

OWN = 0.5
"""Seconds of the model's work in a step."""
NINE_HOURS, ONE_HOUR = 64_800, 4_000


def stalled(share: float) -> float:
    return OWN * share / (1 - share)


def changing(*stretches: tuple[int, float], **options: Any) -> RankRecord:
    """A rank of so many steps with this stall, and then so many with that."""
    waits = [stalled(share) for count, share in stretches for _ in range(count)]
    return make_rank(
        wait=lambda fetch: waits[min(fetch, len(waits) - 1)],
        own_seconds=OWN,
        fetches=len(waits) - 5,
        tokens=1000,
        **options,
    )


def minutes(*shares: float) -> RankRecord:
    """A rank with this stall in the first minute, that in the second."""
    return changing(*((round(60 * (1 - share) / OWN), share) for share in shares))


@pytest.fixture(scope="module")
def late() -> RunRecord:
    return make_run(changing((NINE_HOURS, 0.005), (ONE_HOUR, 0.45)))


def test_a_run_that_stalls_at_its_end_is_judged_by_its_end(late: RunRecord) -> None:
    summary = summarise(late)
    assert summary.stall_fraction == pytest.approx(0.05, abs=0.01)
    first, last = summary.regimes
    assert (first.kind, last.kind) == ("compute", "data")
    assert last.first_step == pytest.approx(NINE_HOURS, rel=0.02)
    assert last.begin_seconds == pytest.approx(first.end_seconds)
    assert last.begin_seconds == pytest.approx(NINE_HOURS * 0.5025, rel=0.02)
    assert last.stall_fraction == pytest.approx(0.45, abs=0.01)
    assert last.tokens_per_second == pytest.approx(0.55 * 2000, rel=0.03)
    verdict = summary.verdict
    assert verdict.kind == "data"
    assert verdict.headline.startswith(
        f"Since step {last.first_step:,} (after 9 h 03 min), the loader is"
    )
    assert any("the stall of the whole run is 5." in line for line in verdict.evidence)
    assert any("the model was the limit, stall 0." in line for line in verdict.evidence)
    assert "num_workers" in verdict.action


def test_checkpoints_that_become_slow_are_a_regime() -> None:
    rank = changing((20_000, 0.01))
    late = 0.0
    for number, block in enumerate(rank.blocks):
        seconds = 0.0
        if number % 20 == 0:
            seconds = 1.0 if number < 0.7 * len(rank.blocks) else 20.0
        late += seconds
        spans = {"checkpoint": seconds} if seconds else {}
        rank.blocks[number] = replace(block, t=block.t + late, spans=spans)
    rank.end = None
    summary = summarise(make_run(rank))
    assert [regime.kind for regime in summary.regimes] == ["compute", "checkpoint"]
    assert summary.verdict.kind == "checkpoint"
    assert summary.verdict.headline.startswith("Since step 14,0")


def test_ranks_that_stall_one_after_the_other_are_one_regime_and_together_too_late() -> None:
    swapped = [
        changing((5_000, 0.3), (5_000, 0.0), rank=0, world_size=2),
        changing((5_000, 0.0), (5_000, 0.3), rank=1, world_size=2),
    ]
    # A step takes as long on both: they meet in it.
    for rank in swapped:
        for number, block in enumerate(rank.blocks):
            wall = block.steps * OWN / 0.7
            t = (block.first_step + block.steps) * OWN / 0.7
            rank.blocks[number] = replace(block, t=t, wall_seconds=wall)
    assert [regime.kind for regime in summarise(make_run(*swapped)).regimes] == ["data"]
    together = [
        changing((6_000, 0.0), (2_000, share), rank=rank, world_size=2)
        for rank, share in enumerate((0, 0.4))
    ]
    kinds = [regime.kind for regime in summarise(make_run(*together)).regimes]
    assert kinds == ["mixed", "data"]


def test_ranks_that_are_late_in_different_steps_are_judged_together() -> None:
    """From step 9,000 on, each of four ranks waits 1 s in every 20th step, each in another."""
    ranks = make_ranks(4, own_seconds=0.1, fetches=12_000, end=None)
    for number, rank in enumerate(ranks):
        t = 0.0
        for place, block in enumerate(rank.blocks):
            steps = range(block.first_step, block.first_step + block.steps)
            walls = tuple(0.1 + (step >= 9_000 and step % 5 == 0) for step in steps)
            hosts = tuple(float(step >= 9_000 and step % 20 == 5 * number) for step in steps)
            t += sum(walls)
            known = {"walls": walls, "hosts": hosts, "t": t, "wall_seconds": sum(walls)}
            rank.blocks[place] = replace(block, **known, host_wait_seconds=sum(hosts))
    summary = summarise(make_run(*ranks))
    assert [regime.kind for regime in summary.regimes] == ["mixed", "data"]
    assert summary.regimes[-1].stall_fraction == pytest.approx(2 / 3, abs=0.01)
    assert "66.5 % of the time is spent waiting" in summary.verdict.headline
    assert summary.ledger["data"] == pytest.approx(601, abs=1)


NOISE: dict[str, Callable[[random.Random], float]] = {
    "bell": lambda chance: max(0.0, chance.gauss(0.08, 0.06)),
    "bursts": lambda chance: 0.6 if chance.random() < 0.1 else 0.01,
    "tail": lambda chance: min(0.9, chance.expovariate(12)),
    "pareto": lambda chance: min(0.9, 0.02 * chance.paretovariate(1.5)),
}


@pytest.mark.parametrize("name", NOISE)
def test_a_steady_run_has_one_regime_however_noisy(name: str) -> None:
    for seed in range(3):
        chance = random.Random(seed)
        shares = [NOISE[name](chance) for _ in range(chance.choice((10, 40, 60, 150)))]
        regimes = summarise(make_run(minutes(*shares))).regimes
        assert len(regimes) == 1, (seed, regimes)


@pytest.mark.parametrize(("place", "slow"), [(20, 2), (58, 2), (59, 1)])
def test_a_slow_moment_at_the_end_of_an_epoch_is_no_regime(place: int, slow: int) -> None:
    shares = [0.5 if place <= number < place + slow else 0.01 for number in range(60)]
    summary = summarise(make_run(minutes(*shares)))
    assert len(summary.regimes) == 1
    assert summary.verdict.kind == "compute"


@pytest.mark.parametrize("before", [0.09, 0.04])
def test_a_step_across_a_threshold_is_no_change(before: float) -> None:
    summary = summarise(make_run(changing((8_000, before), (8_000, before + 0.02))))
    assert len(summary.regimes) == 1


@pytest.mark.parametrize("steps", [0, 1, 100, 200])
def test_a_short_run_has_one_regime_at_most(steps: int) -> None:
    summary = summarise(make_run(changing((5 + steps // 2, 0.0), (5 + steps // 2, 0.5))))
    assert len(summary.regimes) <= 1
