"""Which rows repeat an earlier one: the same as a dict finds, however they are cut and dealt."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fast_axolotl.cluster.first_rows import find_repeated
from fast_axolotl.cluster.job import Job
from fast_axolotl.cluster.shards import split
from fast_axolotl.cluster.store import Store

MIB = 1024 * 1024


def digests_of(values: Any) -> Any:
    """Two words that look like a digest; equal for equal values."""
    both = np.stack([values, values], axis=1).astype(np.uint64)
    both *= np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
    return both ^ (both >> np.uint64(29))


def repeated_by_dict(values: Any, places: Any) -> list[int]:
    first: dict[int, int] = {}
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        first[value] = min(place, first.get(value, place))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return sorted(place for value, place in pairs if first[value] != place)


def find(store: Store, values: Any, sizes: Sequence[int], places: Any, memory: int) -> list[int]:
    """Repeated rows of so many parts with so many rows each."""
    tasks = {}
    for number, (size, stop) in enumerate(zip(sizes, np.cumsum(sizes).tolist(), strict=True)):
        store.write_array(f"digests/{number}", digests_of(values[stop - size : stop]))
        store.write_array(f"places/{number}", places[stop - size : stop].astype(np.int64))
        tasks[f"{number}"] = {"name": f"{number}", "units": [f"{number}"], "memory": memory}
    with closing(Job(lambda *_: None)) as job:
        runs = job.run(store, split, tasks)
        found = find_repeated(job, store, runs, num_rows=len(values), memory=memory)
    assert found.dtype == np.int64
    return list(found.tolist())


@pytest.mark.parametrize("memory", [1, MIB, 64 * MIB])
@pytest.mark.parametrize("sizes", [[20_000], [0, 7_000, 0, 1, 12_999, 0]])
def test_repeated_rows_are_those_a_dict_finds(
    tmp_path: Path, sizes: list[int], memory: int
) -> None:
    random = np.random.default_rng(1)
    values = random.integers(0, 15_000, 20_000)
    values[random.random(20_000) < 0.5] = 7  # half of all rows are equal
    places = random.permutation(40_000)[:20_000]
    store = Store(str(tmp_path))
    assert find(store, values, sizes, places, memory) == repeated_by_dict(values, places)


def test_no_rows_repeat_nothing(tmp_path: Path) -> None:
    for sizes in ([], [0, 0]):
        none = np.zeros(0, np.int64)
        assert find(Store(str(tmp_path)), none, sizes, none, MIB) == []


def test_buckets_too_large_for_memory_are_read_in_passes(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 2_500, 3_000) * 256  # few buckets
    places = np.arange(3_000)
    digests = digests_of(values)
    digests[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF00)  # one bucket
    store = Store(str(tmp_path))
    with mock.patch(f"{__name__}.digests_of", lambda some: digests[: len(some)]):
        assert find(store, values, [3_000], places, 1) == repeated_by_dict(values, places)


def test_a_group_takes_the_memory_it_is_given(tmp_path: Path) -> None:
    values = np.random.default_rng(3).integers(0, 300_000, 400_000)
    store, memory = Store(str(tmp_path)), 32 * MIB
    store.write_array("digests/0", digests_of(values))
    store.write_array("places/0", np.arange(400_000))
    tracemalloc.start()
    split(store, name="0", units=["0"], memory=memory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < memory
