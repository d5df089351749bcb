"""Rows kept, packs and packed rows are those of the real Axolotl.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_axolotl import SeenRows, pack_sequences, plan_packs, unique_rows
from support.axolotl import AGAINST_AXOLOTL
from support.sequences import as_lists, flat

pytestmark = AGAINST_AXOLOTL

NAN = float("nan")

ROWS: dict[str, list[Any]] = {
    "text": ["a", "b", None, "", "a", "'", '"', "\\", "\n", "é", "e\u0301"],
    "floats": [0.0, -0.0, NAN, -NAN, 1.0, math.inf, -math.inf, None, 1e-323, 0.1, 0.1 + 1e-17],
    "lists": [[1, 2], [1], None, [], [1, None], [None, 1], [1, 2]],
    "lists of floats": [[0.0], [-0.0], [NAN], [NAN], None, []],
    "bools": [True, False, None, True],
    "structs": [{"a": 1, "b": "x"}, {"a": None, "b": None}, None, {"a": 1, "b": "x"}],
    "chats": [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": "hi"}],
        [],
        None,
    ],
}


@pytest.fixture(scope="module")
def deduplicate(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.data.utils")._deduplicate_dataset


def kept_by(deduplicate: Any, dataset: Any, seen: set[str] | None = None) -> list[int]:
    kept, _ = deduplicate(dataset, seen)
    if kept._indices is None:  # nothing was dropped, or nothing but the end
        return list(range(len(kept)))
    return [int(index) for index in kept._indices.column(0).to_pylist()]


@pytest.mark.parametrize("name", ROWS)
def test_the_same_rows_are_kept(deduplicate: Any, name: str) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"x": ROWS[name] * 2})
    assert unique_rows(dataset.data.table).tolist() == kept_by(deduplicate, dataset)


def test_tokenised_rows_of_two_datasets(deduplicate: Any) -> None:
    from datasets import Dataset, Features, Sequence, Value

    rng = np.random.default_rng(7)
    features = Features(
        {
            "input_ids": Sequence(Value("int32")),
            "attention_mask": Sequence(Value("int8")),
            "labels": Sequence(Value("int64")),
        }
    )

    def make(count: int) -> Any:
        ids = [rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in range(count)]
        rows = [{"input_ids": i, "attention_mask": [1] * len(i), "labels": i} for i in ids]
        return Dataset.from_list(rows, features=features)

    seen_hashes: set[str] = set()
    seen = SeenRows()
    for dataset in (make(600), make(400)):
        theirs = kept_by(deduplicate, dataset, seen_hashes)
        assert unique_rows(dataset.data.table, seen=seen).tolist() == theirs
    assert len(seen) == len(seen_hashes)


@pytest.fixture(scope="module")
def multipack(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.samplers.multipack")


def theirs(multipack: Any, lengths: list[int], **limits: Any) -> list[list[int]]:
    packs = multipack.pack_parallel(np.array(lengths, np.int32), **limits)
    return [[int(index) for index in pack] for pack in packs]


def ours(lengths: list[int], bin_capacity: int, bin_size: int, group_size: int) -> list[list[int]]:
    return plan_packs(lengths, bin_capacity, max_rows=bin_size, group_size=group_size).tolist()


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
@example(problem=([], {"bin_capacity": 10, "group_size": 2, "bin_size": 1}))
@example(problem=([0] * 9, {"bin_capacity": 10, "group_size": 2, "bin_size": 3}))
@example(problem=([11, 0, 0, 10, 0, 99], {"bin_capacity": 10, "group_size": 100, "bin_size": 200}))
def test_first_fit_gives_the_bins_of_pack_parallel(
    multipack: Any, problem: tuple[list[int], dict[str, int]], safe_mode: bool
) -> None:
    lengths, limits = problem
    expected = theirs(multipack, lengths, num_processes=1, safe_mode=safe_mode, **limits)
    assert ours(lengths, **limits) == expected


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
    first_fit = {"max_rows": 200, "group_size": 1_000}
    for is_sequential, method in ((False, first_fit), (True, {"method": "sequential"})):
        sampler = multipack.MultipackBatchSampler(
            SequentialSampler(lengths),
            batch_size=1,
            batch_max_len=1024,
            lengths=lengths,
            bin_size=200,
            group_size=1_000,
            sequential=is_sequential,
        )
        plan = plan_packs(lengths, 1024, **method)
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


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def __call__(self, texts: list[str], max_length: int, **_: Any) -> dict[str, Any]:
        ids = [json.loads(text)[:max_length] for text in texts]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}


def test_packed_rows_are_those_of_encode_streaming(stock: Callable[[str], Any]) -> None:
    encode_streaming = stock("axolotl.utils.data.streaming").encode_streaming
    chance = random.Random(0)
    for _ in range(60):
        # Not empty: of an empty text, Axolotl makes a tensor of floats.
        rows = [
            [chance.randrange(2, 999) for _ in range(chance.randint(1, 12))]
            for _ in range(chance.randrange(30))
        ]
        width = chance.randint(3, 20)
        texts = [json.dumps(row) for row in rows]
        theirs = encode_streaming({"text": texts}, Tokenizer(), width)
        # Axolotl's tokenizer cuts what is too long, as "truncate" does.
        assert pack_sequences(rows, width, 0, 1, too_long="truncate") == theirs
        options = {"too_long": "truncate", "output": "numpy", "dtype": "int32"}
        assert as_lists(pack_sequences(flat(rows), width, 0, 1, **options)) == theirs
