"""Packs and packed rows are those of the real Axolotl.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_axolotl import pack_sequences, plan_packs
from support.axolotl import AGAINST_AXOLOTL
from support.sequences import as_lists, flat

pytestmark = AGAINST_AXOLOTL


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
