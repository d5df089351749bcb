"""Passes over the data: what one leaves behind for the next, and what counts where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl import open_dataset
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.reader import Reader
from support.files import read_rows, write_jsonl


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Ten rows."""
    return write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(10)])


def values(reader: Reader, column: str) -> list[Any]:
    return [value for batch in reader for value in batch.column(column).to_pylist()]


@pytest.mark.parametrize("by", ["a new iteration", "a restored state"])
def test_a_pass_ends_the_one_before(path: Path, by: str) -> None:
    reader = open_dataset(path, batch_size=3)
    first = iter(reader)
    next(first)
    if by == "a restored state":
        reader.load_state_dict(reader.state_dict())
    second = iter(reader)
    next(second)
    state = reader.state_dict()
    with pytest.raises(UsageError, match="no longer valid"):
        next(first)
    assert reader.state_dict() == state
    assert [len(batch) for batch in second] == ([3, 1] if by == "a restored state" else [3, 3, 1])


def test_batches_cut_by_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n' * 40_000 + '{"b":1.5}\n' + '{"a":1}\n' * 300_000)
    sizes = []
    for threads in (1, 4):
        reader = open_dataset(path, batch_size=10**6, memory_budget=16 * 2**20, num_threads=threads)
        sizes.append([len(batch) for batch in reader])
    assert sizes[0] == sizes[1]


def test_ranks_that_saw_clashing_types_name_the_clash(tmp_path: Path) -> None:
    for index in range(40):  # types are inferred from every third file
        row = {"a": index} | ({"b": True} if index == 4 else {"b": {"z": 1}} if index == 35 else {})
        (tmp_path / f"{index:02}.jsonl").write_text(json.dumps(row).ljust(60) + "\n")
    states = []
    for shard in range(2):
        reader = open_dataset(tmp_path, shard=(shard, 2))
        list(reader)
        states.append(reader.state_dict())
    with pytest.raises(DataError, match="column 'b'"):
        open_dataset(tmp_path).load_state_dict(states)


@pytest.mark.parametrize(
    "content", [b"a,b\r1,2\r3,4\r", b'a,"b\rc"\n1,2\n3,4\n', b"a,b\r1,2\n3,4\n"]
)
def test_a_lone_return_in_a_csv_header_loses_no_row(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert [tuple(row.values()) for row in read_rows(path)] == [(1, 2), (3, 4)]


def test_a_file_uri_is_unquoted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a b.jsonl", [{"a": 1}])
    assert values(open_dataset(path.as_uri()), "a") == [1]
