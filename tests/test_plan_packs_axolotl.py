"""First-fit and sequential packs are those of the real Axolotl, bin by bin.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.packing import plan_packs
from support.axolotl import AGAINST_AXOLOTL

pytestmark = AGAINST_AXOLOTL


@pytest.fixture(scope="module")
def multipack(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.samplers.multipack")


def theirs(multipack: Any, lengths: list[int], **limits: Any) -> list[list[int]]:
    packs = multipack.pack_parallel(np.array(lengths, np.int32), **limits)
    return [[int(index) for index in pack] for pack in packs]


def ours(lengths: list[int], **limits: Any) -> list[list[int]]:
    return plan_packs(
        lengths,
        limits["bin_capacity"],
        max_rows=limits["bin_size"],
        group_size=limits["group_size"],
    ).tolist()


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], dict[str, int]]:
    capacity = draw(st.integers(1, 60))
    length = st.integers(0, capacity + 3) | st.sampled_from([0, capacity, capacity + 1])
    return draw(st.lists(length, max_size=150)), {
        "bin_capacity": capacity,
        "group_size": draw(st.integers(1, 200)),
        "bin_size": draw(st.integers(1, 8) | st.just(200)),
    }


@pytest.mark.parametrize("safe_mode", [True, False])
@settings(deadline=None, max_examples=300)
@given(problem=problems())
def test_first_fit_gives_the_bins_of_pack_parallel(
    multipack: Any, problem: tuple[list[int], dict[str, int]], safe_mode: bool
) -> None:
    lengths, limits = problem
    expected = theirs(multipack, lengths, num_processes=1, safe_mode=safe_mode, **limits)
    assert ours(lengths, **limits) == expected


EDGES = {
    "nothing": [],
    "zeros": [0] * 9,
    "all as long as a pack": [10] * 5,
    "all too long": [11, 99, 11],
    "zeros after one too long": [11, 0, 0, 10, 0],
    "one": [3],
}


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize(("group_size", "bin_size"), [(1, 1), (2, 1), (2, 3), (100, 1), (100, 200)])
def test_edges_are_those_of_pack_parallel(
    multipack: Any, lengths: list[int], group_size: int, bin_size: int
) -> None:
    limits = {"bin_capacity": 10, "group_size": group_size, "bin_size": bin_size}
    assert ours(lengths, **limits) == theirs(multipack, lengths, num_processes=1, **limits)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_the_number_of_processes_does_not_change_the_bins(
    multipack: Any, num_processes: int
) -> None:
    lengths = np.random.default_rng(3).integers(0, 700, 5_000).tolist()
    limits = {"bin_capacity": 600, "group_size": 1_300, "bin_size": 5}
    expected = theirs(multipack, lengths, num_processes=num_processes, **limits)
    assert ours(lengths, **limits) == expected
    assert max(map(len, expected)) == 5


def test_the_bins_of_the_sampler_are_ours(multipack: Any) -> None:
    from torch.utils.data import SequentialSampler

    lengths = np.random.default_rng(4).integers(1, 400, 3_000)
    for is_sequential in (False, True):
        sampler = multipack.MultipackBatchSampler(
            SequentialSampler(lengths),
            batch_size=1,
            batch_max_len=1024,
            lengths=lengths,
            bin_size=200,
            group_size=1_000,
            sequential=is_sequential,
        )
        plan = plan_packs(
            lengths,
            1024,
            max_rows=None if is_sequential else 200,
            method="sequential" if is_sequential else "first_fit",
            group_size=None if is_sequential else 1_000,
        )
        assert [batch[0] for batch in sampler.generate_batches(set_stats=True)] == plan.tolist()
        assert sampler.efficiency() == plan.efficiency


@settings(deadline=None, max_examples=300)
@given(problem=problems())
def test_sequential_gives_the_bins_of_allocate_sequentially(
    multipack: Any, problem: tuple[list[int], dict[str, int]]
) -> None:
    lengths, limits = problem
    capacity = limits["bin_capacity"]
    if not lengths:  # theirs cannot be compiled for a list that nothing is ever added to
        assert plan_packs(lengths, capacity, method="sequential").tolist() == []
        return
    packs, used, slots = multipack.allocate_sequentially(np.array(lengths), 0, capacity, 1)
    plan = plan_packs(lengths, capacity, method="sequential")
    assert plan.tolist() == [list(pack) for pack in packs]
    assert (plan.total_length, len(plan) * capacity) == (used, slots)
