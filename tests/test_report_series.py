"""The curves of a report: bounded, with every extreme, and with no number that is none."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fast_axolotl.measure.job import fold_job
from fast_axolotl.measure.rank_figures import fold_rank
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunRecord
from fast_axolotl.record.codec import to_plain
from fast_axolotl.report.series import (
    MOST_POINTS,
    StepPoint,
    Windows,
    keep_extremes,
    merge_steps,
    read_series,
    round_figures,
    steps_together,
)
from support.records import every, make_rank, make_run, make_system, steady
from support.reports import drained_run, lively_run, long_run, many_ranks, one_step, with_nans

NUMBERS = some.one_of(some.none(), some.floats(allow_nan=True, allow_infinity=True))


def series_of(record: RunRecord, **options: Any) -> dict[str, Any]:
    return read_series(record, summarise(record), **options)


@given(some.lists(NUMBERS, max_size=300), some.integers(2, 40))
def test_the_least_and_the_largest_are_always_kept(values: list[float | None], limit: int) -> None:
    kept = keep_extremes([values], limit)
    known = [value for value in values if value is not None and math.isfinite(value)]
    assert kept == sorted(set(kept))
    assert len(kept) <= max(limit, 2) + 2
    if known:
        left = [values[row] for row in kept]
        assert min(known) in left
        assert max(known) in left


def test_few_points_are_all_kept() -> None:
    assert keep_extremes([[3.0, None, 1.0]], 10) == [0, 1, 2]
    assert keep_extremes([[]], 10) == []
    assert keep_extremes([], 10) == []


def test_every_column_keeps_its_own_extremes() -> None:
    one, two = [0.0] * 1000, [0.0] * 1000
    one[313], two[777] = 5.0, -2.0
    kept = keep_extremes([one, two], 40)
    assert {313, 777} <= set(kept)
    assert len(kept) <= 42


def test_numbers_of_a_page_are_short_and_finite() -> None:
    assert round_figures([1 / 3, 2.0, math.nan, math.inf, None]) == [0.33333, 2, None, None, None]
    assert json.dumps(round_figures([123456.789, 1e-9])) == "[123460, 1e-09]"


@given(some.lists(some.integers(1, 9), min_size=1, max_size=60), some.integers(1, 50))
def test_merged_steps_lose_no_step_no_time_and_no_extreme(counts: list[int], steps: int) -> None:
    points = [
        StepPoint(
            t=float(place),
            phase="steady" if place else "warmup",
            first_step=sum(counts[:place]),
            steps=count,
            wall_seconds=float(count),
            wait_seconds=0.5 * count,
            low=1.0 / (place + 1),
            high=float(place),
            high_step=place,
        )
        for place, count in enumerate(counts)
    ]
    low, high = min(one.low for one in points), max(one.high for one in points)
    merged = list(merge_steps(points, steps))
    assert sum(one.steps for one in merged) == sum(counts)
    assert sum(one.wall_seconds for one in merged) == pytest.approx(sum(counts))
    assert (min(one.low for one in merged), max(one.high for one in merged)) == (low, high)
    assert all(one.high_step == one.high for one in merged)
    assert [one.phase for one in merged].count("warmup") == 1


def test_windows_share_out_what_lies_across_them() -> None:
    windows = Windows.over(0.0, 4.0, most=10)
    windows.spread(0.5, 2.5, rows=20.0, wall=2.0)
    windows.spread(3.0, 3.0, rows=1.0, wall=0.0)
    assert windows.sums["rows"] == pytest.approx([5.0, 10.0, 5.0, 1.0])
    assert windows.ratio("rows", "wall") == pytest.approx([10.0, 10.0, 10.0, None])
    assert windows.ratio("rows", "missing") == [None] * 4


def test_single_steps_are_points_of_their_own_while_they_are_few() -> None:
    found = series_of(lively_run(seconds=60))["steps"]
    assert "low" not in found
    assert found["step"] == list(range(len(found["t"])))
    assert found["t"] == sorted(found["t"])


def test_the_stall_curve_agrees_with_the_figure() -> None:
    record = make_run(make_rank(wait=steady(0.3), fetches=3000))
    stall = series_of(record)["stall"]["host"]
    assert stall == pytest.approx([0.3] * len(stall), abs=0.002)


def test_throughput_is_the_sum_of_all_ranks_that_fetch() -> None:
    ranks = [make_rank(rank=n, world_size=2, fetches=3000, tokens=100) for n in (0, 1)]
    record = make_run(*ranks)
    found = series_of(record)["throughput"]
    summary = summarise(record)
    middle = len(found["t"]) // 2
    assert found["samples_per_second"][middle] == pytest.approx(
        summary.samples_per_second, rel=0.01
    )
    tokens = found["real_tokens_per_second"][middle]
    assert tokens == pytest.approx(summary.tokens_per_second, rel=0.01)


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
    record = make_run(*ranks)
    chosen, _ = fold_job([fold_rank(rank) for rank in ranks])
    assert chosen is not None
    assert series_of(record)["rank"] == chosen.rank == (0 if dispatcher else 1)


def test_outliers_and_shards_keep_their_place_in_time() -> None:
    found = series_of(lively_run(seconds=90, share=0.3))
    assert len(found["slow"]["t"]) <= 200
    assert found["slow"]["t"] == sorted(found["slow"]["t"])
    assert max(found["slow"]["t"]) <= max(found["steps"]["t"])
    assert found["marks"]["shard"]["all"] == len(found["marks"]["shard"]["t"]) > 1


def test_the_watchers_clock_and_the_ranks_clock_are_one() -> None:
    system = make_system(samples=20)
    early = replace(system.start, time=system.start.time - 7.0)
    record = make_run(make_rank(fetches=300), system=replace(system, start=early))
    found = series_of(record)
    assert found["memory"]["t"][0] == 0
    assert found["stall"]["t"][0] > 7.0


def test_rates_of_the_disk_come_from_counters() -> None:
    system = make_system(samples=30, read_bytes=5e6, swap_in_bytes=1e6)
    found = series_of(make_run(system=system))["disk"]
    assert set(found["read_bytes_per_second"]) == {5_000_000}
    assert set(found["swap_in_bytes_per_second"]) == {1_000_000}


def test_shares_of_the_waits_add_up() -> None:
    found = series_of(make_run(make_rank(wait=every(16, 0.3))))["waits"]
    assert sum(found["fetch_share"]) == pytest.approx(1.0, abs=1e-3)
    assert sum(found["wait_share"]) == pytest.approx(1.0, abs=1e-3)
    assert found["wait_share"][-1] > 0.9


def test_waits_that_no_fetch_had_are_bars_of_no_height() -> None:
    found = series_of(make_run(make_rank(wait=every(16, 0.3))))["waits"]
    ratios = [b / a for a, b in zip(found["seconds"], found["seconds"][1:], strict=False)]
    assert max(ratios[1:]) == pytest.approx(min(ratios[1:]), rel=1e-3)
    assert found["fetch_share"].count(0) > 5
    assert found["wait_share"].count(0) > 5


def test_runs_beside_each_other_merge_their_steps_alike() -> None:
    records = [long_run(9_000), long_run(4_000)]
    pairs = [(record, summarise(record)) for record in records]
    assert steps_together(pairs) == [3, 3]
    assert steps_together(pairs[1:]) == [2]
    short = one_step()
    assert steps_together([pairs[0], (short, summarise(short))]) == [3, 1]
    assert steps_together([]) == []


def test_only_steady_steps_are_called_so() -> None:
    found = series_of(lively_run(seconds=20))["steps"]
    assert found["is_steady"][:6] == [False] * 5 + [True]
    assert all(found["is_steady"][5:])


def test_steps_that_a_full_queue_hid_are_warm_up_as_in_the_figures() -> None:
    record = drained_run()
    summary = summarise(record)
    hidden = [
        block
        for block in record.ranks[0].blocks
        if block.phase == "steady" and block.first_step < (summary.first_steady_step or 0)
    ]
    assert len(hidden) > 10
    found = series_of(record)
    steps = found["steps"]
    assert (
        sum(
            count
            for count, is_steady in zip(steps["steps"], steps["is_steady"], strict=True)
            if is_steady
        )
        == summary.steps
    )
    assert found["waits"]["fetches"] == summary.fetches
    assert [phase["name"] for phase in found["phases"]] == ["warmup"]
    assert found["phases"][0]["end"] == hidden[-1].t
    assert len(found["slow"]["fetch"]) > 0
    assert min(found["slow"]["fetch"]) >= (summary.first_steady_step or 0)


def test_a_summary_without_steady_steps_has_no_steady_curve() -> None:
    record = make_run(make_rank())
    found = read_series(record, replace(summarise(record), first_steady_step=None))
    assert not any(found["steps"]["is_steady"])
    assert "waits" not in found


def test_what_comes_before_a_later_warm_up_is_warm_up() -> None:
    record = make_run(make_rank(fetches=600))
    blocks = record.ranks[0].blocks
    blocks[-2] = replace(blocks[-2], phase="warmup")
    [only] = series_of(record)["phases"]
    assert only["end"] == blocks[-2].t


def test_nans_reach_no_curve() -> None:
    found = series_of(with_nans())
    json.dumps(to_plain(found), allow_nan=False)
    numbers = [value for column in found["steps"].values() for value in column]
    assert all(value is None or math.isfinite(value) for value in numbers)
    assert found["losses"]["not_finite"] > 0
    assert found["losses"]["first_not_finite"] == 300
    rates = [rate for rate in found["throughput"]["samples_per_second"] if rate is not None]
    assert max(rates) < 200


def test_a_million_steps_become_few_points_and_the_longest_stays() -> None:
    record = long_run(1_000_000)
    begin = time.perf_counter()
    found = series_of(record)
    assert time.perf_counter() - begin < 10.0
    assert len(found["steps"]["t"]) <= MOST_POINTS + 2
    assert sum(found["steps"]["steps"]) == 1_000_000
    assert max(found["steps"]["high"]) == 5
    assert found["steps"]["high_step"][found["steps"]["high"].index(5)] == 500_000
    assert len(found["memory"]["t"]) <= MOST_POINTS
    assert len(json.dumps(to_plain(found))) < 400_000


def test_blocks_without_single_steps_show_the_longest_by_their_histogram() -> None:
    record = make_run(make_rank(wait=every(50, 0.5), fetches=2000))
    found = series_of(record)["steps"]
    assert found["steps"][2] > 1
    assert all(low <= mean <= high for low, mean, high in zip(*_columns(found), strict=True))


def _columns(found: dict[str, Any]) -> list[list[float]]:
    return [found[name] for name in ("low", "mean", "high")]


def test_one_step_sixty_four_ranks_and_no_rank_at_all() -> None:
    assert len(series_of(one_step())["steps"]["t"]) == 1
    assert series_of(many_ranks(64, 10))["rank"] == 17
    assert series_of(make_run(system=make_system()))["rank"] is None
    assert series_of(make_run(make_rank(fetches=0, warmup_steps=0))).get("steps") is None
