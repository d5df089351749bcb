"""Verdicts over time: a change is found where it is, and a steady run has none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RankRecord, RunRecord
from fast_axolotl.report.live_frame import make_frame
from fast_axolotl.report.live_layout import ViewState, format_line, lay_out
from fast_axolotl.report.page import render_report
from fast_axolotl.report.show import show_summary
from support.records import follow, make_rank, make_ranks, make_run, make_system, write_run
from support.reports import as_report, embedded, text_of

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
    assert last.first_step == pytest.approx(NINE_HOURS, abs=0.001 * NINE_HOURS)
    assert last.begin_seconds == first.end_seconds == pytest.approx(NINE_HOURS * 0.5025, rel=0.001)
    assert last.stall_fraction == pytest.approx(0.45, abs=0.01)
    assert last.tokens_per_second == pytest.approx(0.55 * 2000, rel=0.03)
    verdict = summary.verdict
    assert verdict.kind == "data"
    assert verdict.headline.startswith(
        f"Since step {last.first_step:,} (after 9.0 h), the loader is"
    )
    assert any("the stall of the whole run is 5." in line for line in verdict.evidence)
    assert any("the model was the limit, stall 0.5 %" in line for line in verdict.evidence)
    assert "num_workers" in verdict.action


def test_a_bad_patch_that_ended_is_a_line_of_evidence() -> None:
    summary = summarise(make_run(changing((30_000, 0.0), (4_000, 0.4), (40_000, 0.0))))
    assert [regime.kind for regime in summary.regimes] == ["compute", "data", "compute"]
    assert summary.verdict.kind == "compute"
    assert not summary.verdict.headline.startswith("Since")
    lines = [line for line in summary.verdict.evidence if "waiting for data" in line]
    assert len(lines) == 1
    assert "stall 40.0 %" in lines[0]


def test_a_bad_start_does_not_bind_the_whole_run() -> None:
    summary = summarise(make_run(changing((10_000, 0.5), (30_000, 0.01))))
    assert (summary.stall_fraction or 0.0) > 0.1
    assert summary.verdict.kind == "compute"
    assert summary.verdict.headline.startswith("Since step 10,0")


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
    "even": lambda chance: chance.uniform(0.0, 0.2),
    "bell": lambda chance: max(0.0, chance.gauss(0.08, 0.06)),
    "bursts": lambda chance: 0.6 if chance.random() < 0.1 else 0.01,
    "tail": lambda chance: min(0.9, chance.expovariate(12)),
    "pareto": lambda chance: min(0.9, 0.02 * chance.paretovariate(1.5)),
}


@pytest.mark.parametrize("name", NOISE)
def test_a_steady_run_has_one_regime_however_noisy(name: str) -> None:
    for seed in range(6):
        chance = random.Random(seed)
        shares = [NOISE[name](chance) for _ in range(chance.choice((10, 40, 60, 150)))]
        regimes = summarise(make_run(minutes(*shares))).regimes
        assert len(regimes) == 1, (seed, regimes)


@pytest.mark.parametrize("place", [20, 58, 59])
@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_moment_at_the_end_of_an_epoch_is_no_regime(place: int, slow: int) -> None:
    shares = [0.5 if place <= number < place + slow else 0.01 for number in range(60)]
    summary = summarise(make_run(minutes(*shares)))
    assert len(summary.regimes) == 1
    assert summary.verdict.kind == "compute"


def test_waits_with_every_epoch_are_one_regime() -> None:
    shares = [0.6 if number % 4 == 3 else 0.0 for number in range(80)]
    assert [one.kind for one in summarise(make_run(minutes(*shares))).regimes] == ["data"]


@pytest.mark.parametrize("before", [0.09, 0.04])
def test_a_step_across_a_threshold_is_no_change(before: float) -> None:
    summary = summarise(make_run(changing((8_000, before), (8_000, before + 0.02))))
    assert len(summary.regimes) == 1


@pytest.mark.parametrize("steps", [0, 1, 100, 200])
def test_a_short_run_has_one_regime_at_most(steps: int) -> None:
    summary = summarise(make_run(changing((5 + steps // 2, 0.0), (5 + steps // 2, 0.5))))
    assert len(summary.regimes) <= 1


# What is shown


def test_the_terminal_tells_what_bounded_the_run_when(late: RunRecord) -> None:
    text = " ".join(text_of(show_summary, summarise(late)).split())
    assert "over time Compute-bound from step 5 · " in text
    assert "9 h 02 min in · stall 4" in text
    steady = make_run(changing((9_000, 0.01)))
    assert "over time" not in text_of(show_summary, summarise(steady))


def test_the_page_has_a_strip_of_regimes_with_a_mark_at_the_change(late: RunRecord) -> None:
    page = render_report(as_report(late))
    layout = embedded(page, "report-figures")["stall-0"]["layout"]
    strips = [shape for shape in layout["shapes"] if shape.get("y0") == 0.33]
    roles = [shape["fillcolor"]["role"] for shape in strips]
    assert roles == ["good", "bad"]
    assert strips[0]["x1"] == strips[1]["x0"] == pytest.approx(9.05, abs=0.02)
    marks = [shape for shape in layout["shapes"] if shape["line"].get("color") == {"role": "ink"}]
    assert [mark["x0"] for mark in marks] == [strips[1]["x0"]]
    assert {"Compute-bound", "Data-bound"} <= {one["text"] for one in layout["annotations"]}
    assert "Data-bound from step 64,8" in page


def test_the_live_view_says_since_when_also_where_old_blocks_were_condensed(
    tmp_path: Path, late: RunRecord
) -> None:
    record = make_run(replace(late.ranks[0], end=None), system=make_system(samples=3, end=None))
    write_run(tmp_path, record)
    kept = follow(tmp_path).record
    assert len(kept.ranks[0].blocks) < len(late.ranks[0].blocks)
    frame = make_frame(kept, summarise(kept), title="runs/a")
    lines = [line.plain for line in lay_out(frame, ViewState(), width=100)]
    since = next(line for line in lines if line.startswith("since"))
    assert "Data-bound from step 64," in since
    assert next(line for line in lines if line.startswith("before")).count("Compute-bound") == 1
    assert "Data-bound (rate) since step 64," in format_line(frame)
