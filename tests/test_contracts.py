"""The reader's contracts, each over every format that can break it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl import Reader, open_dataset
from fast_axolotl.errors import DataError, ResumeError, UsageError
from fast_axolotl.reading.order import ShardWarning
from support.files import (
    COMPRESSIONS,
    SMALL_BUDGET,
    WRITERS,
    Rows,
    compress,
    counted_bytes,
    flat_rows,
    make_rows,
    read_rows,
    rows_for,
    write_arrow,
    write_as,
    write_jsonl,
    write_parquet,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*shards:fast_axolotl.reading.order.ShardWarning")

Open = Callable[..., Reader]

MEDIUM_KINDS = (
    "jsonl",
    "parquet groups",
    "parquet one group",
    "arrow file",
    "gzip",
    "json array",
    "csv",
)


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Open]:
    """About 2 MB of the same rows in the formats that are cut up differently."""
    folder = tmp_path_factory.mktemp("medium")
    rows = make_rows(3000, 600)
    jsonl = write_as(folder, "jsonl", rows)
    paths = {
        "jsonl": jsonl,
        "parquet groups": write_parquet(folder / "groups.parquet", rows, 200),
        "parquet one group": write_parquet(folder / "one.parquet", rows),
        "arrow file": write_as(folder, "arrow file", rows),
        "gzip": compress(jsonl, "gzip"),
        "json array": write_as(folder, "json array", rows),
        "csv": write_as(folder, "csv", flat_rows(3000, 600)),
    }
    return {
        kind: partial(open_dataset, path, memory_budget=SMALL_BUDGET, num_threads=2)
        for kind, path in paths.items()
    }


def ids_of(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch.column("id").to_pylist()]


# 1. Every format and compression yields the same rows in the same order.


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_and_compression_yields_the_same_rows(
    tmp_path: Path, kind: str, compression: str
) -> None:
    rows = rows_for(kind, 2300)
    names = list(rows[0])[1::-1]
    path = write_as(tmp_path, kind, rows, compression)

    batches = list(open_dataset(path, batch_size=500, num_threads=2))

    assert [row for batch in batches for row in batch.to_pylist()] == rows
    assert [batch.num_rows for batch in batches] == [500, 500, 500, 500, 300]
    chosen = [[(name, row[name]) for name in names] for row in rows]
    found = read_rows(path, columns=names)
    assert [list(row.items()) for row in found] == chosen
    if kind not in ("csv", "text"):
        assert read_rows(path.rename(tmp_path / "data")) == rows, "without an ending"


# 2. Shards partition the rows.


@pytest.mark.parametrize(("shuffle", "compression"), [(None, "none"), (7, "gzip")])
@pytest.mark.parametrize("num_rows", [0, 1, 200])
def test_64_shards_partition_a_tiny_file(
    tmp_path: Path, num_rows: int, compression: str, shuffle: int | None
) -> None:
    path = compress(write_jsonl(tmp_path / "tiny.jsonl", make_rows(num_rows)), compression)
    options = {"shuffle": shuffle, "num_threads": 1, "columns": ["id"] if num_rows else None}

    def read_shards(even: str | None) -> list[list[int]]:
        return [ids_of(open_dataset(path, shard=(n, 64), even=even, **options)) for n in range(64)]

    shards = read_shards(None)
    assert sorted(value for shard in shards for value in shard) == list(range(num_rows))
    assert max(map(len, shards)) <= num_rows // 64 + 1
    for even, of_each in (("drop", num_rows // 64), ("pad", -(-num_rows // 64))):
        assert [len(shard) for shard in read_shards(even)] == [of_each] * 64


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """About 12 MB of the same rows in the formats that can be cut, and as many small files."""
    folder = tmp_path_factory.mktemp("large")
    noise = random.Random(0)
    rows = [{"id": index, "text": noise.randbytes(480).hex()} for index in range(12_000)]
    jsonl = write_as(folder, "jsonl", rows)
    pieces = folder / "pieces"
    pieces.mkdir()
    for index in range(40):
        part = write_jsonl(pieces / f"{index:02}.jsonl", rows[index * 300 : (index + 1) * 300])
        compress(part, "gzip")
        part.unlink()
    parquet = folder / "groups.parquet"
    # Every shard reads the footer, and the bounds of long texts make that a large one.
    pq.write_table(pa.Table.from_pylist(rows), parquet, row_group_size=100, write_statistics=False)
    return {
        "jsonl": jsonl,
        "parquet": parquet,
        "arrow file": write_arrow(folder / "rows.arrow", rows, pa.ipc.new_file, 100),
        "arrow stream": write_arrow(folder / "stream.arrow", rows, pa.ipc.new_stream, 100),
        "gzip files": pieces,
        "csv": write_as(folder, "csv", rows),
    }


def size_of(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


LARGE_KINDS = ("jsonl", "parquet", "arrow file", "arrow stream", "gzip files")


@pytest.mark.parametrize(
    ("kind", "count", "shuffle"),
    [*product(LARGE_KINDS, [2, 16], [None, 5]), ("csv", 16, None)],
)
def test_shards_together_read_every_byte_about_once(
    large: dict[str, Path], kind: str, count: int, shuffle: int | None
) -> None:
    """But for a CSV file, which is first scanned once for its edges and once for its types."""
    options = {"memory_budget": SMALL_BUDGET, "shuffle": shuffle}
    size = size_of(large[kind])
    with counted_bytes() as opening:
        shards = [open_dataset(large[kind], shard=(n, count), **options) for n in range(count)]
    with counted_bytes() as reading:
        ids = [value for shard in shards for value in ids_of(shard)]

    assert sorted(ids) == list(range(12_000))
    assert sum(reading) <= 1.3 * size
    assert sum(opening) <= (2.3 * size if kind == "csv" else 1.3 * size - sum(reading))


def test_a_file_that_several_shards_must_read_is_reported_once_with_the_cure(
    tmp_path: Path,
) -> None:
    path = write_as(tmp_path, "json array", make_rows(2000, 900))

    with pytest.warns(
        ShardWarning, match="several of 4 shards each read all of this file.*more files"
    ) as told:
        ids = [
            value for index in range(4) for value in ids_of(open_dataset(path, shard=(index, 4)))
        ]

    assert sorted(ids) == list(range(2000))
    assert len(told) == 1


# The order is a pure function of files, seed and epoch.


@pytest.mark.parametrize("kind", MEDIUM_KINDS)
def test_a_shuffle_depends_on_seed_and_epoch_alone(medium: dict[str, Open], kind: str) -> None:
    def ids(**options: Any) -> list[int]:
        return ids_of(medium[kind](columns=["id"], **options))

    first = ids(shuffle=1)

    assert sorted(first) == list(range(3000))
    assert ids(shuffle=1, num_threads=3, batch_size=99) == first
    assert len({tuple(order) for order in (first, ids(shuffle=2), ids(shuffle=1, epoch=1))}) == 3
    assert first != list(range(3000))


# 3. Stop after any batch, restore, and the tail is identical.


def check_resume_after_every_batch(
    open_reader: Open, chosen: Callable[[Any], bool] = lambda state: True
) -> int:
    """Takes the state before and after every batch, and demands the identical tail from each."""
    reader = open_reader()
    states = [reader.state_dict()]
    whole: list[pa.RecordBatch] = []
    for batch in reader:
        whole.append(batch)
        states.append(reader.state_dict())
    assert len(whole) > 2
    kept = [(done, state) for done, state in enumerate(states) if chosen(state)]
    for done, state in kept:
        text = json.dumps(state)
        restored = open_reader()
        restored.load_state_dict(json.loads(text))
        assert json.dumps(restored.state_dict()) == text
        tail = list(restored)
        assert [batch.schema for batch in tail] == [batch.schema for batch in whole[done:]]
        assert tail == whole[done:]
    return len(kept)


@pytest.mark.parametrize("shuffle", [None, 11])
@pytest.mark.parametrize("kind", MEDIUM_KINDS)
def test_resume_after_every_batch_gives_the_same_tail(
    medium: dict[str, Open], kind: str, shuffle: int | None
) -> None:
    check_resume_after_every_batch(partial(medium[kind], batch_size=650, shuffle=shuffle))
    if kind == "jsonl":
        even = "pad" if shuffle else "drop"
        check_resume_after_every_batch(
            partial(medium[kind], batch_size=100, shard=(6, 7), even=even, shuffle=shuffle)
        )


def test_resume_between_two_windows_gives_the_same_tail(large: dict[str, Path]) -> None:
    options = {"memory_budget": SMALL_BUDGET, "batch_size": 100, "shuffle": 3}
    open_reader = partial(open_dataset, large["parquet"], **options)
    assert check_resume_after_every_batch(open_reader, lambda state: state["position"][2] < 0) > 4


def drifting_rows() -> Rows:
    """Over 1 MB in which a key comes late, a null becomes a struct, a struct gains a field."""
    filler = "x" * 500
    rows: Rows = [{"id": i, "n": i, "s": None, "t": filler} for i in range(1000)]
    rows += [{"id": i, "n": i, "s": {"a": i}, "t": filler} for i in range(1000, 2000)]
    return rows + [
        {"id": i, "n": i, "s": {"b": "late"}, "t": filler, "k": [i]} for i in range(2000, 3000)
    ]


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("shuffle", [None, 11])
def test_resume_after_the_schema_widened_gives_the_same_tail(
    tmp_path: Path, shuffle: int | None, compression: str
) -> None:
    path = compress(write_jsonl(tmp_path / "drift.jsonl", drifting_rows()), compression)
    open_reader = partial(open_dataset, path, memory_budget=SMALL_BUDGET, batch_size=400)
    schemas = {batch.schema.to_string() for batch in open_reader(shuffle=shuffle)}
    assert shuffle is not None or len(schemas) > 1
    check_resume_after_every_batch(partial(open_reader, shuffle=shuffle, num_threads=2))


@pytest.mark.parametrize("shuffle", [None, 11])
@pytest.mark.parametrize(
    ("first", "then"), [([1], [1, "x"]), (2**53 + 1, 0.5), (None, {"a": [1, "x"]})]
)
def test_resume_around_types_that_no_cast_joins_gives_the_same_tail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Any,
    then: Any,
    shuffle: int | None,
) -> None:
    monkeypatch.setattr("fast_axolotl.reading.reader.MIB", 1024)
    rows = [{"id": index, "v": first if index < 60 else then} for index in range(120)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    open_reader = partial(open_dataset, path, infer="scan", batch_size=7)

    check_resume_after_every_batch(partial(open_reader, shuffle=shuffle, num_threads=2))

    assert sorted(ids_of(open_reader(shuffle=shuffle))) == list(range(120))


def test_a_state_keeps_the_plan_of_the_reader_it_came_from(medium: dict[str, Open]) -> None:
    reader = medium["jsonl"](shuffle=5, batch_size=300)
    batches = iter(reader)
    next(batches)
    other = medium["jsonl"](batch_size=300, memory_budget=512 * 1024 * 1024)
    other.load_state_dict(reader.state_dict())
    assert ids_of(other) == ids_of(batches)


# 4. Restore on another number of shards.


def run_shards(
    open_reader: Open, count: int, state: Any, stops: Iterator[int]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Every shard continues and stops after so many batches: the ids delivered, and the states."""
    delivered: list[int] = []
    states = []
    for index in range(count):
        reader = open_reader(shard=(index, count))
        if state is not None:
            reader.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(reader)
        delivered += ids_of(islice(batches, next(stops)))
        states.append(reader.state_dict())
        reader.close()
    return delivered, states


@pytest.mark.parametrize("shuffle", [None, 13])
@pytest.mark.parametrize("kind", MEDIUM_KINDS)
def test_elastic_restore_delivers_every_row_exactly_once(
    medium: dict[str, Open], kind: str, shuffle: int | None
) -> None:
    open_reader = partial(
        medium[kind], batch_size=70, shuffle=shuffle, columns=["id"], num_threads=1
    )
    for counts in [(1, 2, 4), (5, 2, 1)]:
        stops = iter([3, 0, 5, 1, 2, 1, 4, 0, 2])
        first, states = run_shards(open_reader, counts[0], None, stops)
        second, states = run_shards(open_reader, counts[1], {"ranks": states}, stops)
        rest, _ = run_shards(open_reader, counts[2], states, iter([10**6] * 4))
        assert sorted(first + second + rest) == list(range(3000)), counts


def test_elastic_restore_can_be_resumed_again_on_the_same_shards(medium: dict[str, Open]) -> None:
    open_reader = partial(medium["jsonl"], batch_size=100, shuffle=2)
    _, states = run_shards(open_reader, 3, None, iter([2, 5, 1]))

    def open_elastic() -> Reader:
        reader = open_reader(shard=(1, 2))
        reader.load_state_dict(states)
        return reader

    check_resume_after_every_batch(open_elastic)
    reader = open_elastic()
    assert len(ids_of(reader)) < 1500
    assert sorted(ids_of(open_reader(shard=(0, 2))) + ids_of(reader)) == list(range(3000))


# 5. Memory is bounded by the budget; see also ``test_prefetch`` and ``test_memory``.


@pytest.mark.parametrize("kind", ["jsonl", "json array", "csv"])
def test_rows_larger_than_a_block_come_in_smaller_batches(tmp_path: Path, kind: str) -> None:
    rows = [{"id": index, "t": "x" * 600_000} for index in range(20)]

    batches = list(open_dataset(write_as(tmp_path, kind, rows), memory_budget=SMALL_BUDGET))

    assert [row for batch in batches for row in batch.to_pylist()] == rows
    assert max(batch.nbytes for batch in batches) <= SMALL_BUDGET // 8


# 7. Every shard gives the same number of batches.


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("kind", MEDIUM_KINDS)
@pytest.mark.parametrize("even", ["drop", "pad"])
def test_shards_give_the_same_number_of_batches(
    medium: dict[str, Open], kind: str, even: str, shuffle: int | None
) -> None:
    for count in (1, 7):
        sizes, ids, repeated = set(), list[int](), 0
        for index in range(count):
            reader = medium[kind](batch_size=100, shard=(index, count), even=even, shuffle=shuffle)
            batches = list(reader)
            assert reader.num_rows == sum(batch.num_rows for batch in batches)
            sizes.add(tuple(batch.num_rows for batch in batches))
            for batch in batches:
                marks = batch.column("is_padding").to_pylist() if even == "pad" else ()
                repeated += sum(marks)
                values = batch.column("id").to_pylist()
                ids += [value for at, value in enumerate(values) if not marks or not marks[at]]
            assert reader.schema.equals(batches[0].schema)
        assert len(sizes) == 1
        if even == "pad":
            assert sorted(ids) == list(range(3000))
            assert repeated == -3000 % count
        else:
            assert len(set(ids)) == len(ids) == 3000 - 3000 % count


def test_an_even_pass_continues_evenly_on_another_number_of_shards(
    medium: dict[str, Open],
) -> None:
    open_reader = partial(medium["jsonl"], batch_size=70, even="drop", shuffle=3)
    first, states = run_shards(open_reader, 3, None, iter([4, 4, 4]))
    second, states = run_shards(open_reader, 7, states, iter([2] * 7))
    rest: list[list[int]] = []
    for index in range(2):
        reader = open_reader(shard=(index, 2))
        reader.load_state_dict(states)
        rest.append(ids_of(reader))

    ids = [*first, *second, *rest[0], *rest[1]]
    assert len(ids) == len(set(ids)) == 3000
    assert len(rest[0]) == len(rest[1])
    with pytest.raises(ResumeError, match=r"with(out)? even"):
        medium["jsonl"](shard=(0, 2)).load_state_dict(states)


def test_what_is_rejected_is_reported_once_by_even_shards(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    (tmp_path / "1.jsonl").write_text('{bad}\n{"a": 4}\n{"a": 5}\n')
    (tmp_path / "2.parquet").write_bytes(b"PAR1xxxxPAR1")

    for even in ("drop", "pad"):
        readers = [
            open_dataset(tmp_path, shard=(index, 2), even=even, on_error="skip")
            for index in range(2)
        ]
        rows = [sum(batch.num_rows for batch in reader) for reader in readers]
        assert rows == ([2, 2] if even == "drop" else [3, 3])
        rejections = [item for reader in readers for item in reader.stats.rejections]
        assert {(Path(item.path).name, item.num_rows) for item in rejections} == {
            ("1.jsonl", 1),
            ("2.parquet", None),
        }
        assert len(rejections) == 2


@pytest.mark.parametrize("even", ["drop", "pad"])
def test_rows_that_vanish_after_they_were_counted_are_an_error(tmp_path: Path, even: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": index} for index in range(10)])
    reader = open_dataset(path, even=even)
    path.write_bytes(b'{"id": 1}' + b" " * (path.stat().st_size - 10) + b"\n")

    with pytest.raises(DataError, match=r"9 of .* counted rows are missing"):
        for _ in reader:
            pass


def test_rows_without_columns_are_rows_under_a_shuffle_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 10)

    shards = [open_dataset(path, shard=(index, 3), shuffle=1) for index in range(3)]

    assert sum(batch.num_rows for shard in shards for batch in shard) == 10


def test_a_state_that_does_not_fit_is_refused_with_the_reason(medium: dict[str, Open]) -> None:
    _, states = run_shards(medium["jsonl"], 3, None, iter([1, 1, 1]))
    own = medium["jsonl"]().state_dict()
    epochs = [medium["jsonl"](shard=(i, 2), shuffle=1, epoch=i).state_dict() for i in range(2)]
    partial_state = {key: value for key, value in own.items() if key != "plan"}
    for kind, state, reason in (
        ("jsonl", [states[0], states[2]], "shard 1 of 3 is missing"),
        ("jsonl", [states[0], states[0], states[2]], "is there twice"),
        ("csv", own, "other files"),
        ("jsonl", {"a": [1, {"b": None}]}, "not a state"),
        ("jsonl", epochs, "epoch differs"),
        ("jsonl", partial_state, "incomplete"),
        ("jsonl", {**own, "fast_axolotl_reader": 1}, "format 1, .* start the epoch again"),
    ):
        with pytest.raises(ResumeError, match=reason):
            medium[kind]().load_state_dict(state)


# Passes over the data: what one leaves behind for the next, and what counts where.


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten rows."""
    return write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(10)])


def values(reader: Reader, column: str) -> list[Any]:
    return [value for batch in reader for value in batch.column(column).to_pylist()]


@pytest.mark.parametrize("by", ["a new iteration", "a restored state"])
def test_a_pass_ends_the_one_before(ten: Path, by: str) -> None:
    reader = open_dataset(ten, batch_size=3)
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
        (tmp_path / f"{index:02}.jsonl").write_text(json.dumps(row).ljust(70_000) + "\n")
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
