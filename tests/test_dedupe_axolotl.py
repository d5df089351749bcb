"""``unique_rows`` keeps exactly the rows that the real Axolotl keeps.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fast_axolotl import SeenRows, unique_rows
from support.axolotl import AGAINST_AXOLOTL

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
