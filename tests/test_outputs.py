"""Record batches as Python values, numpy arrays and torch tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fast_axolotl import (
    RustStreamingDataset,
    create_rust_streaming_dataset,
    should_use_rust_streaming,
    streaming_dataset_reader,
)
from fast_axolotl.reading import OUTPUTS, convert
from fast_axolotl.reading.schema import MIXED
from support.arrays import ARRAYS
from support.files import make_rows, write_jsonl, write_parquet


def batch_of(*arrays: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(arrays), names=[f"c{i}" for i in range(len(arrays))])


def python_values(array: pa.Array) -> list[Any]:
    values: list[Any] = convert(batch_of(array), "python")["c0"]
    return values


def numpy_values(array: pa.Array) -> Any:
    return convert(batch_of(array), "numpy")["c0"]


# python


@pytest.mark.parametrize("bits", [b"", b"\x01"])
@pytest.mark.parametrize("output", ["python", "numpy"])
def test_an_empty_array_may_have_no_buffer_or_a_short_one(bits: bytes, output: str) -> None:
    numbers = pa.Array.from_buffers(pa.int64(), 0, [None, pa.py_buffer(bits)])
    none = pa.py_buffer(b"")
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 0, [None, none], children=[numbers])
    found = convert(batch_of(numbers, lists), output)
    values = found["c1"] if output == "python" else found["c1"]["values"]
    assert [len(found["c0"]), len(values)] == [0, 0]


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(array=ARRAYS, start=st.integers(0, 4), length=st.integers(0, 8))
def test_python_values_are_arrows_own(array: pa.Array, start: int, length: int) -> None:
    piece = array.slice(start, length)

    found = python_values(piece)

    assert found == piece.to_pylist()
    assert [type(value) for value in found] == [type(value) for value in piece.to_pylist()]


def test_values_under_a_null_list_do_not_shift_the_others() -> None:
    """Arrow allows a null entry to own values; they belong to nobody."""
    offsets = pa.array([0, 2, 4, 5], pa.int32())
    array = pa.ListArray.from_arrays(
        offsets, pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )

    assert python_values(array) == [[1, 2], None, [5]]
    assert python_values(array.slice(1)) == [None, [5]]
    assert numpy_values(array) == [[1, 2], None, [5]]


def test_mixed_values_are_values_also_inside_a_list() -> None:
    values = [[1, "x", None], {"a": 2**70}, None, 1.5, "text"]
    storage = pa.array([None if value is None else json.dumps(value) for value in values])
    array = pa.ExtensionArray.from_storage(MIXED, storage)
    assert python_values(array) == numpy_values(array) == values
    assert python_values(array.slice(1, 2)) == values[1:3]
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 5], pa.int32()), array)
    assert python_values(lists) == [values[:2], values[2:]]


# numpy and torch


def test_numbers_are_arrays_and_lists_are_values_and_offsets() -> None:
    batch = batch_of(pa.array([1, 2, 3]), pa.array([[1, 2], [], [3]]), pa.array(["a", "b", "c"]))
    found = convert(batch, "numpy")
    assert found["c0"].tolist() == [1, 2, 3]
    assert found["c1"]["values"].tolist() == [1, 2, 3]
    assert found["c1"]["offsets"].tolist() == [0, 2, 2, 3]
    assert found["c2"] == ["a", "b", "c"]
    nested = numpy_values(pa.array([[[1], [2, 3]], [], [[4]]]).slice(1))
    assert nested["offsets"].tolist() == [0, 0, 1]
    assert nested["values"]["offsets"].tolist() == [0, 1]
    assert nested["values"]["values"].tolist() == [4]
    floats = numpy_values(pa.array([1.5, None]))
    assert floats[0] == 1.5
    assert np.isnan(floats[1])
    empty = batch.slice(0, 0)
    assert convert(empty, "python") == {"c0": [], "c1": [], "c2": []}
    assert convert(empty, "numpy")["c1"]["offsets"].tolist() == [0]


@pytest.mark.parametrize("values", [[2**53 + 1, None, 3], [True, None], [None, "a"], [None, None]])
def test_integers_and_booleans_with_nulls_are_python_lists(values: list[Any]) -> None:
    """numpy would make floats of the integers, and round them."""
    assert numpy_values(pa.array(values)) == values
    assert numpy_values(pa.array([values, []]))["values" if values[0] else 0] == values


def test_torch_tensors_may_be_written_to() -> None:
    torch = pytest.importorskip("torch")
    batch = batch_of(
        pa.array([1, 2]), pa.array([[1, 2], [3]]), pa.array([True, False]), pa.array(["a", None])
    )

    found = convert(batch, "torch")
    found["c0"][0] = 9
    found["c1"]["values"][0] = 9

    assert torch.equal(found["c0"], torch.tensor([9, 2]))
    assert torch.equal(found["c1"]["offsets"], torch.tensor([0, 2, 3]))
    assert found["c2"].dtype == torch.bool
    assert found["c3"] == ["a", None]
    assert batch.column(0).to_pylist() == [1, 2]


# Through the earlier package's door.


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_every_output_of_the_streaming_reader(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torch")
    rows = make_rows(50)
    write = write_parquet if kind == "parquet" else write_jsonl
    path = write(tmp_path / f"rows.{kind}", rows)

    for output in OUTPUTS:
        batches = list(streaming_dataset_reader(str(path), kind, 20, 2, output=output))
        assert len(batches) == 3
        ids = [
            int(i) for b in batches for i in (b["id"] if output != "arrow" else b["id"].to_pylist())
        ]
        assert ids == list(range(50))
    python = streaming_dataset_reader(str(path), kind, 50)
    assert next(python) == {name: [row[name] for row in rows] for name in rows[0]}


# streaming_dataset_reader


# RustStreamingDataset


def test_a_dataset_keeps_its_arguments_and_opens_nothing() -> None:
    dataset: Any = create_rust_streaming_dataset("no/such.parquet", "parquet", 7, 2, True)

    assert isinstance(dataset, RustStreamingDataset)
    assert list(vars(dataset).values()) == ["no/such.parquet", "parquet", 7, 2, True]
    assert dataset.with_format("torch") is dataset
    with pytest.raises(RuntimeError):
        iter(dataset)


# should_use_rust_streaming

WANTED = {"dataset_use_rust_streaming": True, "sequence_len": 10_000}


@pytest.mark.parametrize(
    ("missing_bytes", "changes", "is_streamed"),
    [
        (0, {}, True),
        (1, {}, False),
        (0, {"dataset_use_rust_streaming": None}, False),
        (0, {"dataset_use_rust_streaming": False}, False),
        (0, {"dataset_keep_in_memory": True}, False),
        (0, {"sequence_len": 9_999}, False),
        (0, {"sequence_len": None}, False),
    ],
)
def test_large_files_of_long_sequences_are_streamed_when_it_is_asked_for(
    tmp_path: Path, missing_bytes: int, changes: dict[str, Any], is_streamed: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(1024**3 - missing_bytes)

    assert should_use_rust_streaming(str(path), {}, {**WANTED, **changes}) is is_streamed
