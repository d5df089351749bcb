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


@pytest.mark.parametrize("period", [3, 16, 64])
def test_a_period_that_a_queue_can_hide_is_a_burst(period: int) -> None:
    found = find_pattern(slow_at(list(range(5, 3000, period))), 3000, 8)
    assert (found.kind, found.period_fetches) == ("burst", period)
    assert found.period_rows == 8 * period
    assert found.period_of == "rows"


@pytest.mark.parametrize("period", [DEEPEST_QUEUE + 1, 700])
def test_a_longer_period_is_periodic(period: int) -> None:
    found = find_pattern(slow_at(list(range(0, 6 * period, period))), 6 * period, 8)
    assert (found.kind, found.period_fetches) == ("periodic", period)


def test_a_period_of_rows_that_batches_do_not_divide_is_found_in_rows() -> None:
    places = [int(number * 62.5) for number in range(1, 40)]
    found = find_pattern(slow_at(places, samples=16), 2500, 16)
    assert found.period_fetches == pytest.approx(62.5, abs=0.1)
    assert found.period_rows == pytest.approx(1000, abs=2)


HUNDREDS = slow_at(list(range(0, 4000, 100)))


@pytest.mark.parametrize(
    ("slow", "fetches", "period"),
    [
        (slow_at([start + n for start in range(0, 2000, 20) for n in (0, 1, 3)]), 2000, 20),
        (slow_at([start + (start % 48 == 0) for start in range(0, 1600, 16)]), 1600, 16),
        (slow_at(sorted(random.Random(1).sample(range(0, 32_000, 16), 300))), 32_000, 16),
        (HUNDREDS + slow_at([33, 250, 251, 777, 1234], seconds=0.02), 4000, 100),
        (HUNDREDS + slow_at([33, 250, 777, 1234, 3050]), 4000, 100),
        (slow_at(list(range(0, 4_000_000, 16))), 4_000_000, 16),
    ],
    ids=["neighbours", "felt late", "few were kept", "strays", "long strays", "a long run"],
)
def test_the_period_is_found_whatever_lies_around_it(
    slow: list[SlowFetch], fetches: int, period: int
) -> None:
    assert find_pattern(slow, fetches, 8).period_fetches == period


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), max_size=60))
def test_any_slow_fetches_give_an_answer(slow: list[tuple[int, float]]) -> None:
    lines = [SlowFetch(fetch=fetch, row=8 * fetch, seconds=seconds) for fetch, seconds in slow]
    found = find_pattern(lines, 5001, 8)
    assert found.kind in ("steady", "burst", "periodic")
    assert found.period_fetches is None or found.period_fetches > 0


@pytest.mark.parametrize(
    ("accumulation", "capacity", "seconds_per_batch", "is_burst"),
    [
        # A reader 25 % faster than demand, 8 micro-batches fetched at once, 2 of them ready.
        (8, 2, 0.8 / 8, True),
        (8, 2, 1.25 / 8, False),
        (1, 2, 0.01, False),
        (8, 0, 0.01, False),
        (8, 8, 0.01, False),
        (8, 16, 0.01, False),
    ],
)
def test_a_reader_fast_enough_on_average_starves_a_trainer_that_fetches_more_than_is_ready(
    accumulation: int, capacity: int, seconds_per_batch: float, is_burst: bool
) -> None:
    wait_seconds = abs(accumulation - capacity) * seconds_per_batch
    assert is_burst == is_burst_of_accumulation(
        accumulation=accumulation, capacity=capacity, wait_seconds=wait_seconds, own_seconds=1.0
    )
