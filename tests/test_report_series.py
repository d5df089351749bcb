"""The curves of a report: bounded, with every extreme, and with no number that is none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fast_axolotl.measure.ranks import fold_job, fold_rank
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunRecord
from fast_axolotl.record.codec import to_plain
from fast_axolotl.report.series import MOST_POINTS, Track, read_series, round_figures
from support.records import make_rank, make_run, make_system, steady
from support.reports import golden_run, long_run, one_step

NUMBERS = some.one_of(some.none(), some.floats(-1e6, 1e6), some.just(math.nan))
STRETCHES = some.lists(
    some.tuples(some.floats(0.01, 5.0), some.floats(0.5, 9.0), NUMBERS), min_size=1, max_size=300
)


def series_of(record: RunRecord) -> dict[str, Any]:
    return read_series(record, summarise(record))


@given(STRETCHES, some.integers(1, 40))
def test_folding_loses_no_extreme_and_keeps_the_mean(
    stretches: list[tuple[float, float, float | None]], most: int
) -> None:
    track, t = Track(), 0.0
    for length, weight, value in stretches:
        track.add(t, t + length, weight, value=value)
        t += length
    known = [(w, v) for _, w, v in stretches if v is not None and math.isfinite(v)]
    means, lows, highs = track.fold("value", 0.0, t / most, most)
    assert len(means) == most
    if not known:
        assert set(means) == {None}
        return
    values = [value for _, value in known]
    assert min(low for low in lows if low is not None) == min(values)
    assert max(high for high in highs if high is not None) == max(values)
    for mean, low, high in zip(means, lows, highs, strict=True):
        if mean is not None and low is not None and high is not None:
            assert low - 1e-6 <= mean <= high + 1e-6
    thin = track.thin(most)
    assert len(thin["t"]) <= max(most, 1)


def test_what_lies_across_windows_is_shared_out_where_there_are_many_points() -> None:
    track = Track()
    track.add(0.5, 2.5, 2.0, rate=10.0)
    track.add(3.0, 3.5, 0.5, rate=2.0)
    means, _, _ = track.fold("rate", 0.0, 1.0, 4)
    assert means == pytest.approx([10.0, 10.0, 10.0, 2.0])
    # Few points are all kept, and unknown columns left out.
    track = Track()
    for t, value in enumerate((3.0, None, 1.0)):
        track.add(t, t + 1, one=value, other=None)
    assert track.thin(3) == {"t": [1, 2, 3], "one": [3, None, 1]}
    assert Track().thin() == {}
    numbers = [1 / 3, 2.0, math.nan, math.inf, None, 123456.789, 1e-9]
    assert json.dumps(round_figures(numbers)) == "[0.33333, 2, null, null, null, 123460, 1e-09]"


def test_single_steps_are_points_and_many_become_few_of_which_the_longest_stays() -> None:
    record = golden_run("lively")
    walls = [wall for block in record.ranks[0].blocks for wall in block.walls or ()]
    assert series_of(record)["steps"]["mean"] == pytest.approx(walls, rel=1e-4)
    found = series_of(long_run(30_000))
    assert len(found["steps"]["t"]) == MOST_POINTS
    assert max(found["steps"]["mean_high"]) == 5
    assert found["steps"]["t"] == sorted(found["steps"]["t"])
    assert len(found["memory"]["t"]) <= MOST_POINTS
    assert len(json.dumps(to_plain(found))) < 400_000


def test_curves_agree_with_the_figures_over_all_ranks() -> None:
    ranks = [
        make_rank(rank=n, world_size=2, wait=steady(0.3), fetches=3000, tokens=100) for n in (0, 1)
    ]
    record = make_run(*ranks)
    found, summary = series_of(record), summarise(record)
    stall, rates = found["stall"]["host"], found["throughput"]
    assert stall == pytest.approx([0.3] * len(stall), abs=0.002)
    middle = len(rates["t"]) // 2
    assert rates["samples"][middle] == pytest.approx(summary.samples_per_second, rel=0.01)
    assert rates["tokens"][middle] == pytest.approx(summary.tokens_per_second, rel=0.01)


@pytest.mark.parametrize("dispatcher", [False, True])
def test_the_curves_are_of_the_rank_that_the_summary_is_of(dispatcher: bool) -> None:
    ranks = [
        make_rank(
            rank=number,
            world_size=3,
            wait=steady(0.1 + 0.1 * (number == 1)),
            settings={"dispatcher": dispatcher},
        )
        for number in range(3)
    ]
    chosen = fold_job([fold_rank(rank) for rank in ranks]).chosen
    assert chosen is not None
    assert series_of(make_run(*ranks))["rank"] == chosen.rank == (0 if dispatcher else 1)


def test_what_was_seen_from_outside_has_rates_and_the_clock_of_the_ranks() -> None:
    system = make_system(samples=30, read_bytes=5e6, swap_in_bytes=1e6)
    early = replace(system.start, time=system.start.time - 7.0)
    found = series_of(make_run(make_rank(fetches=300), system=replace(system, start=early)))
    assert found["memory"]["t"][0] == 0
    assert found["stall"]["t"][0] > 7.0
    assert set(found["disk"]["read_bytes"]) == {5_000_000}
    assert set(found["disk"]["swap_in_bytes"]) == {1_000_000}


def test_steps_that_a_full_queue_hid_are_warm_up_as_in_the_figures() -> None:
    record = golden_run("queue-ran-dry")
    first = summarise(record).first_steady_step or 0
    hidden = [
        block
        for block in record.ranks[0].blocks
        if block.phase == "steady" and block.first_step < first
    ]
    assert hidden
    assert len(record.ranks[0].blocks) > len(hidden)
    [phase] = series_of(record)["phases"]
    assert phase["name"] == "warmup"
    assert phase["end"] == pytest.approx(hidden[-1].t, abs=1e-3)


def test_what_is_no_number_reaches_no_curve() -> None:
    record = golden_run("lively")
    rank, nan = record.ranks[0], math.nan
    rank.blocks[5] = replace(rank.blocks[5], wall_seconds=nan, host_wait_seconds=nan)
    rank.blocks[6] = replace(rank.blocks[6], walls=tuple(nan for _ in rank.blocks[6].walls or ()))
    rank.logs[3:] = [replace(log, values={"loss": nan}) for log in rank.logs[3:]]
    assert record.system is not None
    record.system.samples[3] = replace(record.system.samples[3], pss_bytes=nan)  # type: ignore[arg-type]
    found = series_of(record)
    json.dumps(found, allow_nan=False)
    assert max(rate for rate in found["throughput"]["samples"] if rate is not None) < 200


def test_one_step_is_a_point_and_without_any_there_is_no_curve() -> None:
    assert len(series_of(one_step())["steps"]["t"]) == 1
    assert "rank" not in series_of(make_run(system=make_system()))
    assert "steps" not in series_of(make_run(make_rank(fetches=0, warmup_steps=0)))
