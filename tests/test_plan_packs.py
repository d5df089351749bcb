"""Packs are those of a plain-Python search, for every method, and bad lengths are named."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_axolotl.packing import PackPlan, plan_packs
from fast_axolotl.packing.plan import Method
from support.golden import check_calls

pytestmark = pytest.mark.kernels

METHODS = get_args(Method)


def searched_packs(
    lengths: list[int], capacity: int, max_rows: int | None, method: str, group_size: int | None
) -> list[list[int]]:
    """The oracle: every pack is looked at for every length."""
    packs: list[list[int]] = []
    free: list[int] = []
    size = group_size or max(1, len(lengths))
    for start in range(0, len(lengths), size):
        first = len(packs)
        order = list(range(start, min(start + size, len(lengths))))
        if method == "first_fit_decreasing":
            order.sort(key=lambda index: -lengths[index])
        for index in order:
            seen = range(
                max(first, len(packs) - 1) if method == "sequential" else first, len(packs)
            )
            fits = [
                pack
                for pack in seen
                if free[pack] >= lengths[index] and len(packs[pack]) < (max_rows or size)
            ]
            if not fits:
                packs.append([index])
                free.append(capacity - lengths[index])
                continue
            packs[fits[0]].append(index)
            free[fits[0]] -= lengths[index]
    return packs


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    capacity = draw(st.integers(1, 40))
    length = st.one_of(
        st.integers(0, capacity),
        st.integers(0, capacity // 4 + 1),
        st.sampled_from([0, capacity, capacity + 1, 3 * capacity, capacity // 2]),
        st.just(capacity // 2 + 1),
    )
    lengths = draw(st.lists(length, max_size=80))
    # A unit as large as this leaves no table of counts: the lengths are sorted the other way.
    unit = draw(st.sampled_from([1, 1, 1, 1 << 40]))
    return {
        "lengths": [unit * value for value in lengths],
        "capacity": unit * capacity,
        "max_rows": draw(st.none() | st.integers(1, 6)),
        "group_size": draw(st.none() | st.integers(1, 100)),
    }


def numbers(low: int, high: int, **more: Any) -> dict[str, Any]:
    limits = {"capacity": 10, "max_rows": None, "group_size": None}
    return {"lengths": list(range(low, high)), **limits, **more}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=200)
@given(problem=problems())
@example(problem=numbers(0, 0))
@example(problem=numbers(0, 0, group_size=3, max_rows=1))
@example(problem=numbers(0, 30, group_size=1))
@example(problem=numbers(0, 30, max_rows=1))
@example(problem=numbers(11, 40))
@example(problem=numbers(0, 30, group_size=1 << 60, max_rows=1 << 60))
def test_packs_are_those_of_the_plain_search(method: Method, problem: dict[str, Any]) -> None:
    plan = plan_packs(method=method, **problem)
    assert plan.tolist() == searched_packs(method=method, **problem)
    assert_is_whole(plan, **problem)


def assert_is_whole(
    plan: PackPlan,
    lengths: list[int],
    capacity: int,
    max_rows: int | None,
    group_size: int | None,
) -> None:
    """Each index once; no pack over a limit, but those of one over-long length; true totals."""
    assert sorted(plan.indices.tolist()) == list(range(len(lengths)))
    assert (plan.indices.dtype, plan.offsets.dtype) == (np.int64, np.int64)
    long = [index for index, length in enumerate(lengths) if length > capacity]
    assert plan.over_long.tolist() == long
    for pack in plan.tolist():
        assert 1 <= len(pack) <= (max_rows or len(lengths))
        is_long = len(pack) == 1 and pack[0] in long
        assert is_long or sum(lengths[index] for index in pack) <= capacity
        assert len({index // (group_size or len(lengths)) for index in pack}) == 1
    assert plan.total_length == sum(lengths)
    filled = sum(min(length, capacity) for length in lengths)
    fitting = filled - len(long) * capacity
    assert plan.lower_bound == len(long) + -(-fitting // capacity) <= len(plan)
    assert plan.efficiency == (filled / (len(plan) * capacity) if lengths else None)


def test_a_plan_is_a_frozen_sequence_of_packs() -> None:
    plan = plan_packs([4, 7, 6, 3], 10, max_rows=2)
    assert (len(plan), plan.capacity, plan.method) == (2, 10, "first_fit")
    assert [pack.tolist() for pack in plan] == plan.tolist() == [[0, 2], [1, 3]]
    assert plan[1].tolist() == plan[-1].tolist() == [1, 3]
    assert plan.offsets.tolist() == [0, 2, 4]
    assert {type(index) for pack in plan.tolist() for index in pack} == {int}
    with pytest.raises(IndexError):
        plan[2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.capacity = 3  # type: ignore[misc]
    plan = plan_packs([4, 99, 0, 6, 3], 10)
    assert (plan.tolist(), plan.over_long.tolist()) == ([[0, 2, 3], [1], [4]], [1])
    empty = plan_packs([], 2048, method="sequential")
    assert (empty.tolist(), empty.offsets.tolist(), empty.efficiency) == ([], [0], None)


LENGTHS = [3, 9, 0, 10, 4, 5, 5]
INTEGERS = ("b", "h", "i", "q", "B", "H", "I", "Q", ">i4", "<u8")
FORMS: list[Any] = [
    *(np.array(LENGTHS, kind) for kind in INTEGERS),
    np.repeat(np.array(LENGTHS), 2)[::2],
    tuple(LENGTHS),
    [np.int32(length) for length in LENGTHS],
    pa.array(LENGTHS, pa.uint8()),
    pa.array([1, *LENGTHS], pa.int64())[1:],
    pa.chunked_array([LENGTHS[:2], [], LENGTHS[2:]], pa.int32()),
]


@pytest.mark.parametrize("method", METHODS)
def test_every_form_of_integers_gives_the_same_packs_and_stays_as_it_is(method: Method) -> None:
    expected = plan_packs(LENGTHS, 10, method=method, group_size=3).tolist()
    for lengths in FORMS:
        if isinstance(lengths, np.ndarray):
            lengths.flags.writeable = False
        assert plan_packs(lengths, 10, method=method, group_size=3).tolist() == expected
        assert plan_packs(lengths[:0], 10, group_size=2, max_rows=1).tolist() == []


def test_bad_lengths_limits_and_methods_are_named() -> None:
    check_calls("plan_packs")
