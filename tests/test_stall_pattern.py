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
    [(4, "burst"), (16, "burst"), (62.5, "burst"), (64, "burst"), (DEEPEST_QUEUE + 1, "periodic")],
)
def test_a_period_that_a_queue_can_hide_is_a_burst(period: float, kind: str) -> None:
    places = [int(number * period) for number in range(1, 600)]
    assert find(slow_at(places)) == (kind, pytest.approx(period, rel=1e-3), "rows")
    # A record keeps the slowest of a second alone; that there were others its histogram tells.
    kept = places[::3]
    waits = Histogram()
    waits.add(0.1, len(kept) * 3 - 2)
    waits.add(0.0, max(places))
    found = find_pattern(slow_at(kept), waits, {})
    assert found.period_fetches == pytest.approx(period, rel=0.01)


def test_short_waits_in_between_change_nothing() -> None:
    regular = slow_at(list(range(0, 4000, 100)))
    strays = slow_at([33, 250, 251, 777, 1234], seconds=0.02)
    assert find(regular + strays).period_fetches == 100


def test_slow_fetches_that_hold_little_of_the_waiting_are_steady() -> None:
    assert find(slow_at(list(range(0, 1600, 16)), 0.02), 0.01).kind == "steady"
    chance, waits = random.Random(2), Histogram()
    slow = [SlowFetch(fetch=at, row=at, seconds=chance.expovariate(10)) for at in range(2000)]
    for one in slow:
        waits.add(one.seconds)
    assert find_pattern(slow, waits, {}).kind == "steady"


def test_long_waits_at_no_regular_distance_are_a_burst_of_their_mean_distance() -> None:
    places = sorted(random.Random(3).sample(range(3000), 60))
    found = find(slow_at(places, 0.5), 1e-5)
    assert (found.kind, found.period_fetches) == ("burst", pytest.approx(50, rel=0.05))


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
