"""Samples, tokens and bytes of batches of every make."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.measure.batch_counts import BatchCount, BatchCounter
from support.children import run_python

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["torch", "numpy"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def array(values: Any, kind: str) -> Any:
    return torch.tensor(values) if kind == "torch" else np.array(values)


def columns(kind: str, **values: Any) -> dict[str, Any]:
    return {name: array(value, kind) for name, value in values.items()}


def count(batch: Any) -> BatchCount:
    return BatchCounter().count(batch)


def tokens(found: BatchCount) -> tuple[int, int | None, int | None, int | None]:
    """Samples, then real, trainable and padded tokens."""
    return found.samples, found.real_tokens, found.trainable_tokens, found.padded_tokens


def packed_row(lengths: list[int], width: int) -> tuple[list[int], list[int], list[int]]:
    """Position ids, mask ids and plain mask of one packed row, padded with zeros."""
    padding = [0] * (width - sum(lengths))
    positions = [place for length in lengths for place in range(length)]
    ids = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return positions + padding, ids + padding, [1] * sum(lengths) + padding


def test_the_three_kinds_of_tokens_are_told_apart(kind: str) -> None:
    ids, mask = [[5, 6, 7, 0], [5, 6, 0, 0]], [[1, 1, 1, 0], [1, 1, 0, 0]]
    labels = [[-100, 6, 7, -100], [-100, 6, -100, -100]]
    found = count(columns(kind, input_ids=ids, attention_mask=mask, labels=labels))
    assert tokens(found) == (2, 5, 3, 8)
    assert found.num_bytes == 3 * 8 * 8
    assert (found.sequence_tokens, found.sequence_squares) == (5, 9 + 4)


@given(rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4))
def test_packed_sequences_are_found_by_positions(kind: str, rows: list[list[int]]) -> None:
    width = max(map(sum, rows)) + 3
    packed = [packed_row(lengths, width) for lengths in rows]
    positions, ids, mask = (array([row[part] for row in packed], kind) for part in range(3))
    every = [length for lengths in rows for length in lengths]
    tokens = {"input_ids": ids + 10}
    by_positions = tokens | {"attention_mask": mask, "position_ids": positions}
    for batch in (by_positions, by_positions | {"attention_mask": ids}):
        found = count(batch)
        assert found.real_tokens == found.sequence_tokens == sum(every)
        assert found.sequence_squares == sum(length**2 for length in every)
        assert found.rows == len(every)


def test_without_a_mask_every_position_is_real(kind: str) -> None:
    counter = BatchCounter()
    found = counter.count({"input_ids": array([[5, 6, 7, 8, 9]], kind)})
    assert (found.real_tokens, found.padded_tokens) == (5, 5)
    assert (found.sequence_tokens, found.sequence_squares) == (5, 25)
    assert set(counter.reasons) == {"real_tokens", "trainable_tokens_per_second"}


def test_packs_without_a_mask_end_where_their_padding_begins(kind: str) -> None:
    counter = BatchCounter()
    counter.pad_token_id = 0
    ids = [[5, 6, 7, 5, 6, 0, 0, 0], [0, 5, 6, 7, 8, 5, 6, 0], [0] * 8]
    positions = [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 0], [0] * 8]
    found = counter.count(columns(kind, input_ids=ids, position_ids=positions))
    assert (found.real_tokens, found.padded_tokens) == (5 + 7, 24)
    assert (found.rows, found.sequence_tokens) == (4, 12)
    assert found.sequence_squares == 9 + 4 + 25 + 4
    assert "tokens_per_second" not in counter.reasons


@pytest.mark.parametrize(
    ("mask", "positions", "rows"),
    [
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [[0, 1, 0, 1], [0, 1, 2, 3]], 3),
        ([[1, 1, 0, 0], [1, 1, 1, 0]], [[0, 1, 2, 3], [0, 1, 2, 3]], 2),
        ([[0, 0, 1, 1], [0, 1, 1, 1]], [[0, 1, 2, 3], [0, 1, 2, 3]], 2),
        ([[0, 0, 1, 1], [0, 1, 1, 1]], [[1, 1, 0, 1], [1, 0, 1, 2]], 2),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [[0, 1, 2, 3], [4, 5, 6, 7]], 1),
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], 0),
        ([[], []], [[], []], 0),
    ],
    ids=["packed", "right", "left", "padded left", "continued", "padding", "empty"],
)
def test_a_row_begins_where_positions_do_not_grow_or_padding_ends(
    kind: str, mask: list[list[int]], positions: list[list[int]], rows: int
) -> None:
    found = count(columns(kind, input_ids=mask, attention_mask=mask, position_ids=positions))
    assert (found.rows, found.real_tokens) == (rows, sum(map(sum, mask)))


def test_packs_of_unknown_padding_have_no_real_tokens_and_no_rows(kind: str) -> None:
    counter = BatchCounter()
    ids = [[5, 6, 0, 0]]
    found = counter.count(columns(kind, input_ids=ids, position_ids=[[0, 1, 0, 1]]))
    assert (found.real_tokens, found.rows) == (None, None)
    for name in ("tokens_per_second", "rows_per_second"):
        assert "pad_token_id" in counter.reasons[name]
    counter = BatchCounter()
    counter.count(columns(kind, input_ids=ids, position_ids=[[0, 1, 2, 3]]))
    assert "rows_per_second" not in counter.reasons


def test_a_mask_of_a_strange_type_counts_and_one_of_another_shape_does_not() -> None:
    batch = columns("torch", input_ids=[[5, 6, 5, 0]], position_ids=[[0, 1, 0, 0]])
    found = count(batch | {"attention_mask": torch.tensor([[1, 1, 1, 0]], dtype=torch.bfloat16)})
    assert (found.real_tokens, found.padded_tokens, found.rows) == (3, 4, 2)
    shapes = {"input_ids": (2, 3), "attention_mask": (2, 1, 3, 3), "position_ids": (3, 2, 3)}
    found = count({name: torch.ones(shape, dtype=torch.long) for name, shape in shapes.items()})
    assert (found.real_tokens, found.sequence_squares) == (6, 18)


def test_sequence_lengths_are_looked_at_in_every_sixteenth_batch() -> None:
    counter = BatchCounter()
    batch = {"input_ids": np.ones((2, 3)), "attention_mask": np.ones((2, 3))}
    looked_at = [counter.count(batch).sequence_tokens for _ in range(33)]
    assert [place for place, number in enumerate(looked_at) if number] == [0, 16, 32]


def test_a_tensor_on_a_device_is_never_read() -> None:
    counter = BatchCounter()
    ids = torch.empty(4, 8, dtype=torch.long, device="meta")  # raises wherever it is read
    found = counter.count({"input_ids": ids, "attention_mask": ids, "labels": ids})
    assert tokens(found) == (4, None, None, 32)
    for name in ("tokens_per_second", "trainable_tokens_per_second"):
        assert "on the GPU" in counter.reasons[name]
    found = count({"input_ids": torch.ones(4, 8, dtype=torch.long), "labels": ids})
    assert (found.real_tokens, found.trainable_tokens) == (32, None)


@pytest.mark.parametrize(
    ("batch", "samples", "num_bytes"),
    [
        (np.zeros((5, 2)), 5, 80),
        (torch.zeros(5, 2), 5, 40),
        (torch.tensor(1.0), 1, 4),
        ([torch.zeros(3, 2), torch.zeros(3)], 3, 36),
        ((np.zeros((3, 2)), np.zeros(3)), 3, 72),
        (["a", "b", "c"], 3, None),
        ([{"text": "a"}, {"text": "b"}], 2, None),
        ([], 0, None),
        ({}, 1, None),
        ({"text": ["a", "b"]}, 2, None),
        ({"input_ids": [[5, 6, 7], [5, 6]]}, 2, None),
        ({"text": "one row"}, 1, None),
        ({"pixels": torch.zeros(7, 1), "ids": [1] * 7}, 7, 28),
        ({"ids": ["x"] * 7, "pixels": torch.zeros(7, 1)}, 7, 28),
        (pa.record_batch({"a": pa.array([1, 2, 3])}), 3, 24),
        (pa.table({"a": pa.array([1, 2, 3])}), 3, 24),
        ("a row of text", 1, None),
        (7, 1, None),
        (None, 1, None),
    ],
)
def test_batches_of_every_make_have_samples_and_bytes(
    batch: Any, samples: int, num_bytes: int | None
) -> None:
    counter = BatchCounter()
    found = counter.count(batch)
    assert (found.samples, found.num_bytes, found.real_tokens) == (samples, num_bytes, None)
    assert set(counter.reasons) == {"tokens_per_second"}


@dataclass(slots=True)
class Inputs:
    input_ids: Any
    target: Any


X, Y = torch.zeros(32, 8), torch.zeros(32)
ROW = {"x": torch.zeros(8), "mask": torch.zeros(8)}
JOINED = torch.zeros(400, dtype=torch.long)

OF_32: list[Any] = [
    Inputs(X, Y),
    SimpleNamespace(x=X, y=Y),
    ({"input_ids": X, "attention_mask": X}, Y),
    [{"input_ids": X}, Y],
    [{"x": X}, {"y": Y}],
    ((X, X), Y),
    {"inputs": {"input_ids": X, "mask": X}, "target": Y},
    {"a": {"b": {"input_ids": X}}, "y": Y},
    [ROW] * 32,
    [(torch.zeros(8), 1)] * 32,
    ["text"] * 32,
    {"text": ["text"] * 32, "x": X},
]
"""A batch of 32 however it is built, whatever is known of the loader."""


@pytest.mark.parametrize(
    ("batch", "batch_size", "samples"),
    [
        *((batch, size, 32) for batch in OF_32 for size in (0, 32, None)),
        # The loader makes no batches: the dataset's, or its rows.
        (torch.zeros(8), None, None),
        (torch.zeros(8, 16), None, None),
        (ROW, None, None),
        ({"image": torch.zeros(3, 9, 9), "label": 4}, None, None),
        ({"x": X, "y": Y}, None, 32),
        ({"x": X, "y": Y}, 0, 32),
        (torch.zeros(8), 0, None),
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, 0, None),
        # Rows that are joined into one.
        ({"input_ids": JOINED, "labels": JOINED}, 32, None),
        ({"input_ids": JOINED, "labels": Y}, 32, 32),
        ({"input_ids": JOINED}, 0, None),
        # The last batch of an epoch, and one of images as they are.
        ({"x": torch.zeros(5, 8)}, 32, 5),
        ([torch.zeros(3, 9, 9)] * 4, 4, 4),
        (torch.zeros(32), 32, 32),
    ],
)
def test_what_may_be_a_row_or_a_batch_has_samples_or_a_reason(
    batch: Any, batch_size: int | None, samples: int | None
) -> None:
    counter = BatchCounter()
    counter.batch_size = batch_size
    assert counter.count(batch).samples == (samples or 0)
    assert ("samples" in counter.reasons) == (samples is None)


def test_a_mapping_that_is_no_dictionary_is_one_all_the_same() -> None:
    batch = UserDict({"input_ids": torch.ones(2, 3, dtype=torch.long)})
    assert count(batch).padded_tokens == 6
    transformers = pytest.importorskip("transformers")
    assert count(transformers.BatchEncoding({"input_ids": torch.ones(2, 3)})).padded_tokens == 6


def test_what_is_missing_in_one_batch_is_missing_in_the_sum() -> None:
    known = BatchCount(samples=2, real_tokens=5, padded_tokens=8, num_bytes=10, sequence_tokens=3)
    unknown = BatchCount(samples=1, padded_tokens=4)
    total = known + unknown
    assert (*tokens(total), total.num_bytes) == (3, None, None, 12, None)
    assert (known + known).real_tokens == 10
    assert total.sequence_tokens == 3


def test_counting_imports_neither_torch_nor_numpy() -> None:
    done = run_python(
        "import sys\n"
        "from fast_axolotl.measure.batch_counts import BatchCounter\n"
        "BatchCounter().count({'input_ids': [[1, 2]]})\n"
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules), sys.modules"
    )
    assert done.returncode == 0, done.stderr


class Broken:
    @property
    def shape(self) -> Any:
        raise ZeroDivisionError("a batch of a strange make")


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("layout", ["strided", "jagged", "sparse", "broken"])
def test_a_batch_that_cannot_be_counted_has_a_reason_and_the_next_one_counts(layout: str) -> None:
    if layout in ("sparse", "broken"):
        ids: Any = Broken() if layout == "broken" else torch.eye(2).to_sparse()
    else:
        rows = [torch.ones(3), torch.ones(5)]
        ids = torch.nested.nested_tensor(rows, layout=getattr(torch, layout))
    counter = BatchCounter()
    found = counter.count({"input_ids": ids, "attention_mask": ids})
    assert (found.real_tokens, found.trainable_tokens) == (None, None)
    assert "could not be counted" in counter.reasons["tokens_per_second"]
    whole = torch.ones(2, 3)
    assert counter.count({"input_ids": whole, "attention_mask": whole}).real_tokens == 6
