"""When waits come: the pattern and the period of slow fetches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.measure.stall_pattern import DEEPEST_QUEUE, find_pattern, is_burst_of_accumulation
from fast_axolotl.record import Histogram, Mark, SlowFetch


def slow_at(places: list[int], seconds: float = 0.1, samples: int = 8) -> list[SlowFetch]:
    return [SlowFetch(fetch=place, row=place * samples, seconds=seconds) for place in places]


def waits_of(slow: int, seconds: float, others: int, short: float) -> Histogram:
    found = Histogram()
    for _ in range(slow):
        found.add(seconds)
    for _ in range(others):
        found.add(short)
    return found


def test_no_slow_fetches_are_a_steady_pattern() -> None:
    found = find_pattern([], 1000)
    assert (found.kind, found.period_fetches, found.period_of) == ("steady", None, "")


@pytest.mark.parametrize("period", [3, 8, 16, 63, 64])
def test_a_period_that_a_queue_can_hide_is_a_burst(period: int) -> None:
    found = find_pattern(slow_at(list(range(5, 3000, period))), 3000, 8)
    assert (found.kind, found.period_fetches) == ("burst", period)
    assert found.period_rows == 8 * period
    assert found.period_of == "rows"


@pytest.mark.parametrize("period", [DEEPEST_QUEUE + 1, 125, 700])
def test_a_longer_period_is_periodic(period: int) -> None:
    found = find_pattern(slow_at(list(range(0, 6 * period, period))), 6 * period, 8)
    assert (found.kind, found.period_fetches) == ("periodic", period)


def test_a_period_of_rows_that_batches_do_not_divide_is_found_in_rows() -> None:
    places = [int(number * 62.5) for number in range(1, 40)]
    found = find_pattern(slow_at(places, samples=16), 2500, 16)
    assert found.period_fetches == pytest.approx(62.5, abs=0.1)
    assert found.period_rows == pytest.approx(1000, abs=2)


def test_neighbours_that_are_slow_too_belong_to_one_event() -> None:
    places = [place for start in range(0, 2000, 20) for place in (start, start + 1, start + 3)]
    assert find_pattern(slow_at(places), 2000, 8).period_fetches == 20


def test_a_wait_that_is_felt_one_fetch_late_now_and_then_leaves_the_period() -> None:
    places = [start + (start % 48 == 0) for start in range(0, 1600, 16)]
    assert find_pattern(slow_at(places), 1600, 8).period_fetches == 16


def test_a_record_that_kept_few_of_the_slow_fetches_still_shows_the_period() -> None:
    chosen = random.Random(1)
    places = sorted(chosen.sample(range(0, 16 * 2000, 16), 300))
    assert find_pattern(slow_at(places), 32_000, 8).period_fetches == 16


def test_stray_slow_fetches_do_not_hide_the_period() -> None:
    slow = slow_at(list(range(0, 4000, 100))) + slow_at([33, 250, 251, 777, 1234], seconds=0.02)
    assert find_pattern(slow, 4000, 8).period_fetches == 100
    slow = slow_at(list(range(0, 4000, 100))) + slow_at([33, 250, 777, 1234, 3050])
    assert find_pattern(slow, 4000, 8).period_fetches == 100


def test_slow_fetches_that_hold_little_of_the_waiting_are_steady() -> None:
    places = list(range(0, 1600, 16))
    waits = waits_of(len(places), 0.02, 1500, 0.01)
    assert find_pattern(slow_at(places, 0.02), 1600, 8, waits=waits).kind == "steady"


def test_long_waits_at_no_regular_distance_are_a_burst_without_a_period() -> None:
    chosen = random.Random(3)
    places = sorted(chosen.sample(range(3000), 60))
    waits = waits_of(len(places), 0.5, 2940, 1e-5)
    found = find_pattern(slow_at(places, 0.5), 3000, 8, waits=waits)
    assert (found.kind, found.period_fetches) == ("burst", None)


@pytest.mark.parametrize("name", ["epoch", "shard"])
def test_waits_that_come_with_marks_are_named_after_them(name: str) -> None:
    starts = [0, 210, 380, 700, 905]
    marks = [Mark(t=0.0, name=name, fetch=start) for start in starts]
    found = find_pattern(slow_at(starts), 1000, 8, marks)
    assert (found.kind, found.period_of) == ("periodic", name)


def test_a_period_of_one_step_is_named_after_the_step() -> None:
    found = find_pattern(slow_at(list(range(7, 1600, 8))), 1600, 4, accumulation=8)
    assert (found.period_fetches, found.period_of) == (8, "step")


def test_without_samples_there_is_no_period_in_rows() -> None:
    found = find_pattern(slow_at(list(range(0, 800, 16))), 800)
    assert (found.period_fetches, found.period_rows, found.period_of) == (16, None, "")


def test_a_long_run_is_looked_at_in_bounded_time() -> None:
    found = find_pattern(slow_at(list(range(0, 4_000_000, 16))), 4_000_000, 8)
    assert found.period_fetches == 16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), max_size=60))
def test_any_slow_fetches_give_an_answer(slow: list[tuple[int, float]]) -> None:
    lines = [SlowFetch(fetch=fetch, row=8 * fetch, seconds=seconds) for fetch, seconds in slow]
    found = find_pattern(lines, 5001, 8)
    assert found.kind in ("steady", "burst", "periodic")
    assert found.period_fetches is None or found.period_fetches > 0


def test_a_reader_fast_enough_on_average_starves_a_trainer_that_fetches_in_bursts() -> None:
    # A reader 25 % faster than demand, 8 micro-batches fetched at once, 2 of them ready.
    own, per_batch = 1.0, 0.8 / 8
    assert is_burst_of_accumulation(
        accumulation=8, capacity=2, wait_seconds=6 * per_batch, own_seconds=own
    )


def test_a_reader_slower_than_demand_is_no_burst() -> None:
    per_batch = 1.25 / 8
    assert not is_burst_of_accumulation(
        accumulation=8, capacity=2, wait_seconds=6 * per_batch, own_seconds=1.0
    )


@pytest.mark.parametrize(("accumulation", "capacity"), [(1, 2), (8, 0), (8, 8), (8, 16)])
def test_without_a_queue_smaller_than_accumulation_there_is_no_such_burst(
    accumulation: int, capacity: int
) -> None:
    assert not is_burst_of_accumulation(
        accumulation=accumulation, capacity=capacity, wait_seconds=0.1, own_seconds=1.0
    )
