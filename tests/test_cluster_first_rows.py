"""Which rows repeat an earlier one: the same as a dict finds, however they are cut and dealt."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fast_axolotl.cluster import first_rows
from fast_axolotl.cluster.engines import open_engine
from fast_axolotl.cluster.first_rows import Part, find_repeated
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


def write_parts(
    store: Store, values: Any, sizes: Sequence[int], places: Any | None = None
) -> list[Part]:
    parts = []
    for number, (size, stop) in enumerate(zip(sizes, np.cumsum(sizes).tolist(), strict=True)):
        start = stop - size
        files = {"digests": digests_of(values[start:stop])}
        if places is not None:
            files["places"] = places[start:stop].astype(np.int64)
        for folder, array in files.items():
            with store.writing(f"{folder}/{number}.npy") as path, path.open("wb") as file:
                np.save(file, array)
        first = start if places is None else None
        parts.append(Part(name=str(number), num_rows=size, first_place=first))
    return parts


def find(store: Store, parts: list[Part], memory: int = MIB) -> list[int]:
    found = find_repeated(open_engine("local"), store, parts, memory=memory, heard=lambda _: None)
    assert found.dtype == np.int64
    return list(found.tolist())


@pytest.mark.parametrize("memory", [1, MIB, 64 * MIB])
@pytest.mark.parametrize("sizes", [[20_000], [0, 7_000, 0, 1, 12_999, 0], [100] * 200])
@pytest.mark.parametrize("has_places", [False, True])
def test_repeated_rows_are_those_a_dict_finds(
    tmp_path: Path, sizes: list[int], memory: int, has_places: bool
) -> None:
    random = np.random.default_rng(1)
    values = random.integers(0, 15_000, 20_000)
    values[random.random(20_000) < 0.5] = 7  # half of all rows are equal
    places = random.permutation(40_000)[:20_000] if has_places else None
    store = Store(str(tmp_path))
    parts = write_parts(store, values, sizes, places)
    expected = repeated_by_dict(values, np.arange(20_000) if places is None else places)
    assert find(store, parts, memory) == expected


def test_no_rows_repeat_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert find(store, []) == []
    assert find(store, write_parts(store, np.zeros(0, np.int64), [0, 0])) == []


def test_a_bucket_too_large_for_memory_is_read_in_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "_MOST_BUCKETS", 2)
    values = np.random.default_rng(2).integers(0, 25_000, 30_000)
    store = Store(str(tmp_path))
    parts = write_parts(store, values, [30_000])
    assert find(store, parts, 1) == repeated_by_dict(values, np.arange(30_000))
    assert len(store.names("unique")) == 2


def test_digests_that_share_a_half_are_different_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    digests = np.array([[1, 2], [1, 3], [4, 3], [1, 2]], np.uint64)
    with store.writing("digests/a.npy") as path, path.open("wb") as file:
        np.save(file, digests)
    assert find(store, [Part(name="a", num_rows=4, first_place=10)]) == [13]


def test_a_job_begun_again_does_only_what_is_missing(tmp_path: Path) -> None:
    values = np.arange(10_000) % 4_000
    store = Store(str(tmp_path))
    parts = write_parts(store, values, [10_000])
    found = find(store, parts, 1)
    (tmp_path / "unique" / "1024-00001.json").unlink()
    kept = tmp_path / "split" / "1024-00001.json"
    before = kept.stat().st_mtime_ns
    assert find(store, parts, 1) == found
    assert kept.stat().st_mtime_ns == before
    assert find(store, parts, 2 * MIB) == found  # other memory, other tasks, the same rows


def test_a_group_takes_the_memory_it_is_given(tmp_path: Path) -> None:
    values = np.random.default_rng(3).integers(0, 300_000, 400_000)
    parts = write_parts(store := Store(str(tmp_path)), values, [400_000])
    tracemalloc.start()
    find(store, parts, memory := 32 * MIB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < memory
