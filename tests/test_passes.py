"""Passes over the data: what one leaves behind for the next, and what counts where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl import open_dataset
from fast_axolotl.errors import DataError, ResumeError, UsageError
from fast_axolotl.reading.reader import Reader
from support.files import read_rows, write_jsonl


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Ten rows."""
    return write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(10)])


def values(reader: Reader, column: str) -> list[Any]:
    return [value for batch in reader for value in batch.column(column).to_pylist()]


def test_a_new_iteration_stops_the_one_before(path: Path) -> None:
    reader = open_dataset(path, batch_size=3)
    first = iter(reader)
    next(first)
    second = iter(reader)
    next(second)
    state = reader.state_dict()
    with pytest.raises(UsageError, match="no longer valid"):
        next(first)
    assert reader.state_dict() == state
    assert [len(batch) for batch in second] == [3, 3, 1]


def test_a_restored_reader_is_not_moved_by_an_old_iterator(path: Path) -> None:
    reader = open_dataset(path, batch_size=3)
    first = iter(reader)
    next(first)
    reader.load_state_dict(reader.state_dict())
    with pytest.raises(UsageError, match="no longer valid"):
        next(first)
    assert values(reader, "a") == [3, 4, 5, 6, 7, 8, 9]


def test_states_at_both_ends_restore(path: Path) -> None:
    reader = open_dataset(path)
    before = reader.state_dict()
    assert values(reader, "a") == list(range(10))
    after = reader.state_dict()
    reader.load_state_dict(after)
    assert values(reader, "a") == []
    reader.load_state_dict(before)
    assert values(reader, "a") == list(range(10))
    assert values(reader, "a") == list(range(10))


def test_a_state_holds_the_types_of_its_own_position(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"a": [1], "b": [1]}])
    write_jsonl(tmp_path / "2.jsonl", [{"a": [1, "x"], "b": [1]}])
    write_jsonl(tmp_path / "3.jsonl", [{"a": [1], "b": [1, "x"]}])
    reader = open_dataset(tmp_path)
    batches = iter(reader)
    next(batches)
    state = reader.state_dict()
    tail = list(batches)
    again = open_dataset(tmp_path)
    again.load_state_dict(state)
    restored = list(again)
    assert [batch.schema for batch in restored] == [batch.schema for batch in tail]
    assert [batch.to_pylist() for batch in restored] == [batch.to_pylist() for batch in tail]


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
    open_dataset(tmp_path, on_conflict="json").load_state_dict(states)


def test_a_state_given_twice_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}])
    reader = open_dataset(path)
    state = reader.state_dict()
    with pytest.raises(ResumeError, match="is there twice"):
        reader.load_state_dict([state, state])
    del state["plan"]
    with pytest.raises(ResumeError, match="incomplete"):
        reader.load_state_dict({**state, "extra": 1})


def test_shards_count_their_own_share_of_bytes_and_rejections(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(20)])
    path.write_text(path.read_text() + "{broken\n")
    stats = []
    for shard in range(4):
        reader = open_dataset(path, shard=(shard, 4), on_error="skip")
        list(reader)
        stats.append(reader.stats)
    assert sum(item.rows for item in stats) == 20
    assert sum(item.rejected_rows for item in stats) == 1
    assert sum(item.num_bytes for item in stats) <= path.stat().st_size


def test_a_bad_file_among_good_ones_is_skipped_and_listed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-20])
    pq.write_table(pa.table({"a": [3]}), tmp_path / "3.parquet")
    with pytest.raises(DataError, match=r"2\.parquet"):
        open_dataset(tmp_path)
    reader = open_dataset(tmp_path, on_error="skip")
    assert values(reader, "a") == [1, 2, 3]
    (rejection,) = reader.stats.rejections
    assert rejection.path.endswith("2.parquet")
    assert rejection.num_rows is None


def test_json_text_keeps_its_mark_across_blocks(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"c": "hi"}])
    write_jsonl(tmp_path / "2.jsonl", [{"c": "x"}, {"c": ["x"]}])
    write_jsonl(tmp_path / "3.jsonl", [{"c": '["x"]'}])
    reader = open_dataset(tmp_path, on_conflict="json", batch_size=1)
    found = [(batch.column("c")[0].as_py(), batch.schema.field("c").metadata) for batch in reader]
    mark = {b"fast_axolotl": b"json"}
    assert found == [(json.dumps(value), mark) for value in ("hi", "x", ["x"], '["x"]')]


def test_declared_columns_are_all_marked_and_all_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": ["x"], "b": ["y"], "c": [1]}), tmp_path / "2.parquet")
    reader = open_dataset(tmp_path, on_conflict="json", columns=["a", "c"])
    assert values(reader, "a") == ["1", '"x"']
    assert reader.schema.names == ["a", "c"]


@pytest.mark.parametrize(
    "content", [b"a,b\r1,2\r3,4\r", b'a,"b\rc"\n1,2\n3,4\n', b"a,b\r1,2\n3,4\n"]
)
def test_a_lone_return_in_a_csv_header_loses_no_row(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert [tuple(row.values()) for row in read_rows(path)] == [(1, 2), (3, 4)]


def test_a_json_field_is_found_whatever_the_name_says(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"data": [{"a": 1}, {"a": 2}]}\n')
    with pytest.warns(UserWarning, match="the content is json"):
        reader = open_dataset(path, json_field="data")
    assert values(reader, "a") == [1, 2]


def test_a_first_file_of_blank_lines_does_not_hide_the_columns(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text("\n\n")
    write_jsonl(tmp_path / "2.jsonl", [{"a": 1}])
    assert values(open_dataset(tmp_path, columns=["a"]), "a") == [1]


def test_a_file_uri_is_unquoted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a b.jsonl", [{"a": 1}])
    assert values(open_dataset(path.as_uri()), "a") == [1]


def test_a_cut_file_with_stray_quotes_still_says_that_it_is_cut(tmp_path: Path) -> None:
    text = "a,b\n" + "".join(f'{index},{index * 7919 % 10007}" pipe\n' for index in range(40_000))
    packed = gzip.compress(text.encode())
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(packed[: len(packed) * 9 // 10])
    with pytest.raises(DataError, match="corrupt or truncated"):
        list(open_dataset(path))
    reader = open_dataset(path, on_error="skip")
    assert sum(len(batch) for batch in reader) > 30_000
    assert len(reader.stats.rejections) == 1
