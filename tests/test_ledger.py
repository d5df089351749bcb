"""The wall clock of a run, divided once: parts that add up, goodput, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import Mark, RankRecord, RunRecord, RunSummary
from fast_axolotl.record.catalogue import LEDGER
from fast_axolotl.record.folder import read_training
from support.records import (
    START_TIME,
    make_rank,
    make_ranks,
    make_run,
    make_system,
    steady,
    write_run,
)


def add_spans(
    rank: RankRecord, spans: Mapping[str, float], *, start: float = 0.0, end: float = 0.0
) -> RankRecord:
    """Put stretches of time between the steps, evenly in ten pieces; and before and after them."""
    every, late = max(1, len(rank.blocks) // 10), start
    for number, block in enumerate(rank.blocks):
        own = {}
        if number % every == every - 1 and number // every < 10:
            own = {name: seconds / 10 for name, seconds in spans.items()}
        late += sum(own.values())
        rank.blocks[number] = replace(block, t=block.t + late, spans=own)
    rank.marks[:] = [Mark(t=start, name="first_fetch")]
    if rank.end is not None:
        rank.end = replace(rank.end, t=rank.end.t + late + end)
    return rank


def watched_from(rank: RankRecord, seconds: float) -> RunRecord:
    """A run whose command began so long before the record."""
    start = {"time": START_TIME - seconds, "source": "run"}
    return make_run(rank, system=make_system(samples=0, end=None, start=start))


def check_sum(summary: RunSummary) -> dict[str, float]:
    """The parts that took any time, once they are in order and add up."""
    assert sum(summary.ledger.values()) == pytest.approx(summary.duration_seconds, abs=1e-6)
    assert all(seconds >= 0 for seconds in summary.ledger.values())
    assert list(summary.ledger) == [part for part in LEDGER if part in summary.ledger]
    return {part: seconds for part, seconds in summary.ledger.items() if seconds > 1e-6}


def test_every_second_is_in_one_part() -> None:
    rank = make_rank(wait=steady(0.2), fetches=6000, warmup_steps=0, tokens=100)
    spans = {"evaluate": 10.0, "checkpoint": 20.0, "log": 5.0, "mine": 3.0}
    summary = summarise(watched_from(add_spans(rank, spans, start=7.0, end=4.0), 30.0))
    assert check_sum(summary) == pytest.approx(
        {
            "compute": 60.0,
            "data": 15.0,
            "evaluation": 10.0,
            "checkpoint": 20.0,
            "logging": 5.0,
            "startup": 37.0,
            "other": 7.0,
        }
    )
    assert summary.duration_seconds == pytest.approx(154.0)
    assert summary.tokens_per_second == pytest.approx(600_000 / 75)
    assert summary.goodput_tokens_per_second == pytest.approx(600_000 / 154)


def test_a_first_step_that_compiles_is_apart() -> None:
    rank = make_rank(fetches=600, warmup_steps=0)
    first = rank.blocks[0]
    walls = (30.0, *[0.01] * (first.steps - 1))
    rank.blocks[0] = replace(
        first, wall_seconds=sum(walls), walls=walls, hosts=(0.0,) * first.steps
    )
    rank.blocks[:] = [replace(block, t=block.t + 29.99) for block in rank.blocks]
    assert rank.end is not None
    rank.end, rank.marks[:] = replace(rank.end, t=36.0), [Mark(t=0.0, name="first_fetch")]
    parts = check_sum(summarise(make_run(rank)))
    assert parts["first_step"] == pytest.approx(30.0, abs=0.1)


def test_while_one_rank_saves_all_the_others_wait() -> None:
    ranks = make_ranks(4, fetches=6000)
    for rank in ranks[1:]:
        # They wait for rank 0 inside of their next step.
        rank.blocks[:] = [
            replace(block, t=1.5 * block.t, wall_seconds=1.5 * block.wall_seconds)
            for block in rank.blocks
        ]
        rank.end = replace(rank.end, t=1.5 * rank.end.t)
    add_spans(ranks[0], {"checkpoint": 30.025})
    summary = summarise(make_run(*ranks))
    parts = check_sum(summary)
    assert parts["checkpoint"] == pytest.approx(30.0, rel=0.01)
    assert parts["compute_and_communication"] == pytest.approx(60.05, rel=0.01)
    assert summary.verdict.kind == "checkpoint"
    # What one rank brackets alone is no training of the others.
    assert summary.samples_per_second == pytest.approx(4 * 6000 * 8 / 60, rel=0.01)


def test_a_second_training_of_a_command_begins_with_itself(tmp_path: Path) -> None:
    first = watched_from(make_rank(), 10.0)
    first.system.samples.extend(make_system(samples=600).samples)
    write_run(tmp_path / "run", first)
    later = make_run(make_rank(start={"time": START_TIME + 300}))
    write_run(tmp_path / "run-2", later)
    assert summarise(read_training(tmp_path / "run")).ledger["startup"] == pytest.approx(10.0)
    summary = summarise(read_training(tmp_path / "run-2"))
    assert summary.ledger["startup"] == 0.0
    assert summary.duration_seconds == pytest.approx(6.05)


def test_the_clock_is_that_of_one_machine() -> None:
    """Two nodes whose clocks are an hour apart; the rank that waits is on the second."""
    systems, ranks = {}, []
    for number, node in enumerate(("a", "b")):
        begin = START_TIME + 3600 * number
        start = {"host": node, "time": begin}
        wait = steady(0.3 * number)
        ranks.append(make_rank(rank=number, world_size=2, wait=wait, start=start))
        watched = {"host": node, "time": begin - 20 - number}
        systems[node] = make_system(samples=1, end=None, start=watched)
    summary = summarise(replace(make_run(*ranks), systems=systems))
    assert check_sum(summary)["startup"] == pytest.approx(21.0)
    assert summary.duration_seconds == pytest.approx(21.0 + 6.05 / 0.7, rel=0.01)


# Verdicts


@pytest.mark.parametrize(
    ("spans", "stall", "kind"),
    [
        ({"evaluate": 20.0}, 0.0, "evaluation"),
        ({"evaluate": 20.0, "checkpoint": 30.0}, 0.0, "checkpoint"),
        ({"resume": 90.0}, 0.0, "startup/resume"),
        ({"checkpoint": 20.0}, 0.4, "data/rate"),
        ({"checkpoint": 80.0}, 0.4, "checkpoint"),
        ({"log": 60.0}, 0.0, "compute"),
    ],
)
def test_the_larger_loss_decides(spans: dict[str, float], stall: float, kind: str) -> None:
    rank = make_rank(wait=steady(stall), fetches=6000)
    summary = summarise(make_run(add_spans(rank, spans)))
    verdict = summary.verdict
    assert check_sum(summary).get("resume", 0.0) == pytest.approx(spans.get("resume", 0.0))
    assert "/".join(filter(None, (verdict.kind, verdict.subtype))) == kind
    if kind == "data/rate":
        assert verdict.evidence[-1].startswith("checkpoints: 20")


@pytest.mark.parametrize(
    ("before", "stall", "kind"),
    [(300.0, 0.0, "startup"), (300.0, 0.3, "data"), (50.0, 0.0, "compute")],
)
def test_start_up_decides_where_nothing_in_the_loop_does(
    before: float, stall: float, kind: str
) -> None:
    rank = make_rank(wait=steady(stall), fetches=6000, source="axolotl")
    verdict = summarise(watched_from(add_spans(rank, {}), before)).verdict
    assert verdict.kind == kind
    assert ("axolotl preprocess" in verdict.action) is (kind == "startup")
    assert kind == "startup" or "start-up:" in " ".join(verdict.evidence)
