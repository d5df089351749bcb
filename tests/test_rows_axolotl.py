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

from fast_axolotl import pack_sequences, plan_packs, unique_rows
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


def kept_by(deduplicate: Any, dataset: Any) -> list[int]:
    kept, _ = deduplicate(dataset)
    if kept._indices is None:  # nothing was dropped, or nothing but the end
        return list(range(len(kept)))
    return [int(index) for index in kept._indices.column(0).to_pylist()]


@pytest.mark.parametrize("name", ROWS)
def test_the_same_rows_are_kept(deduplicate: Any, name: str) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"x": ROWS[name] * 2})
    assert unique_rows(dataset.data.table).tolist() == kept_by(deduplicate, dataset)


@pytest.fixture(scope="module")
def multipack(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.samplers.multipack")


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], dict[str, int]]:
    capacity = draw(st.integers(1, 60))
    length = st.integers(0, capacity + 3) | st.sampled_from([0, capacity, capacity + 1])
    return draw(st.lists(length, max_size=150)), {
        "bin_capacity": capacity,
        "group_size": draw(st.integers(1, 200)),
        "bin_size": draw(st.integers(1, 8) | st.just(200)),
    }


@settings(deadline=None, max_examples=150)
@given(problem=problems(), safe_mode=st.booleans())
@example(problem=([], {"bin_capacity": 10, "group_size": 2, "bin_size": 1}), safe_mode=True)
@example(problem=([0] * 9, {"bin_capacity": 10, "group_size": 2, "bin_size": 3}), safe_mode=True)
def test_both_methods_give_the_bins_of_axolotl(
    multipack: Any, problem: tuple[list[int], dict[str, int]], safe_mode: bool
) -> None:
    lengths, limits = problem
    capacity, group = limits["bin_capacity"], limits["group_size"]
    packs = multipack.pack_parallel(
        np.array(lengths, np.int32), num_processes=1, safe_mode=safe_mode, **limits
    )
    plan = plan_packs(lengths, capacity, max_rows=limits["bin_size"], group_size=group)
    assert plan.tolist() == [[int(index) for index in pack] for pack in packs]
    plan = plan_packs(lengths, capacity, method="sequential")
    if not lengths:  # theirs cannot be compiled for a list that nothing is ever added to
        assert plan.tolist() == []
        return
    packs, used, slots = multipack.allocate_sequentially(np.array(lengths), 0, capacity, 1)
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
