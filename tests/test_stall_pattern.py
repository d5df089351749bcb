"""When waits come: the pattern and the period of slow fetches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.measure.stall_pattern import DEEPEST_QUEUE, Pattern, find_pattern
from fast_axolotl.record import Histogram, SlowFetch


def slow_at(places: list[int], seconds: float = 0.1) -> list[SlowFetch]:
    return [SlowFetch(fetch=place, row=8 * place, seconds=seconds) for place in places]


def find(slow: list[SlowFetch], short: float = 0.0, **causes: float) -> Pattern:
    """The pattern of these fetches, with short waits in between."""
    waits = Histogram()
    for fetch in slow:
        waits.add(fetch.seconds)
    waits.add(short, max((fetch.fetch for fetch in slow), default=0) + 1)
    return find_pattern(slow, waits, causes)


@pytest.mark.parametrize(
    ("period", "kind"),
    [(3, "burst"), (16, "burst"), (64, "burst"), (DEEPEST_QUEUE + 1, "periodic")],
)
def test_a_period_that_a_queue_can_hide_is_a_burst(period: int, kind: str) -> None:
    found = find(slow_at(list(range(5, 3000, period))))
    assert (found.kind, found.period_fetches, found.period_of) == (kind, period, "rows")


def test_a_period_of_rows_that_batches_do_not_divide_is_found() -> None:
    found = find(slow_at([int(number * 62.5) for number in range(1, 40)]))
    assert found.period_fetches == pytest.approx(62.5, abs=0.1)


HUNDREDS = slow_at(list(range(0, 4000, 100)))


@pytest.mark.parametrize(
    ("slow", "period"),
    [
        (slow_at([start + n for start in range(0, 2000, 20) for n in (0, 1, 3)]), 20),
        (slow_at([start + (start % 48 == 0) for start in range(0, 1600, 16)]), 16),
        (slow_at(sorted(random.Random(1).sample(range(0, 32_000, 16), 300))), 16),
        (HUNDREDS + slow_at([33, 250, 251, 777, 1234], seconds=0.02), 100),
        (HUNDREDS + slow_at([250, 777, 1234]), 100),
        (slow_at(list(range(0, 400_000, 16))), 16),
    ],
    ids=["neighbours", "felt late", "few were kept", "strays", "long strays", "a long run"],
)
def test_the_period_is_found_whatever_lies_around_it(slow: list[SlowFetch], period: int) -> None:
    assert find(slow).period_fetches == period


def test_slow_fetches_that_hold_little_of_the_waiting_are_steady() -> None:
    assert find(slow_at(list(range(0, 1600, 16)), 0.02), 0.01).kind == "steady"


def test_long_waits_at_no_regular_distance_are_a_burst_without_a_period() -> None:
    places = sorted(random.Random(3).sample(range(3000), 60))
    found = find(slow_at(places, 0.5), 1e-5)
    assert (found.kind, found.period_fetches) == ("burst", None)


@pytest.mark.parametrize("cause", ["epoch", "shard"])
def test_waits_with_one_cause_are_named_after_it(cause: str) -> None:
    found = find(slow_at([0, 210, 380, 700, 905]), **{cause: 0.9})
    assert (found.kind, found.period_of) == ("periodic", cause)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), max_size=60))
def test_any_slow_fetches_give_an_answer(slow: list[tuple[int, float]]) -> None:
    found = find([SlowFetch(fetch=at, row=at, seconds=seconds) for at, seconds in slow])
    assert found.kind in ("steady", "burst", "periodic")
    assert found.period_fetches is None or found.period_fetches > 0
