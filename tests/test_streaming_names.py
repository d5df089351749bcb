"""The streaming names of the earlier package: code written for it runs unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fast_axolotl import (
    RustStreamingDataset,
    create_rust_streaming_dataset,
    should_use_rust_streaming,
    streaming_dataset_reader,
)
from support.files import make_rows, write_parquet


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_parquet(tmp_path / "rows.parquet", make_rows(250)))


# streaming_dataset_reader


def test_batches_are_dicts_of_lists(path: str) -> None:
    batches = list(streaming_dataset_reader(path, "parquet", batch_size=100, num_threads=2))

    assert [len(batch["id"]) for batch in batches] == [100, 100, 50]
    rows = make_rows(250)
    assert batches[0] == {name: [row[name] for row in rows[:100]] for name in rows[0]}


# RustStreamingDataset


@pytest.mark.parametrize("make", [RustStreamingDataset, create_rust_streaming_dataset])
def test_a_dataset_keeps_its_arguments_and_opens_nothing(make: Any) -> None:
    dataset = make("no/such.parquet", "parquet", 7, 2, True)

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
