"""``mix_datasets``: proportions at every row, the end of a pass, resume, even batches, types."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl import MixedReader, mix_datasets, open_dataset
from fast_axolotl.errors import ResumeError
from fast_axolotl.reading.mixing import Draws
from support.files import SMALL_BUDGET, write_jsonl
from support.golden import check_calls

pytestmark = pytest.mark.filterwarnings("ignore::fast_axolotl.reading.order.ShardWarning")

SIZES = {"a": 700, "b": 230, "c": 23}
Mix = Callable[..., MixedReader]


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Mix:
    """Opens three sources of very different size, with weights that make ``a`` last longest."""
    folder = tmp_path_factory.mktemp("sources")
    for name, size in SIZES.items():
        ids = [f"{name}{row}" for row in range(size)]
        write(folder / f"{name}.parquet", {"id": ids}, row_group_size=20)

    def open_mix(weights: tuple[float, ...] = (10, 6, 1), **options: Any) -> MixedReader:
        opened = {key: options.pop(key, None) for key in ("shard", "shuffle", "even")}
        readers = [
            open_dataset(folder / f"{name}.parquet", batch_size=33, num_threads=1, **opened)
            for name in SIZES
        ]
        pairs = zip(readers, weights, strict=True)
        return mix_datasets(dict(zip(SIZES, pairs, strict=True)), **{"batch_size": 16, **options})

    return open_mix


def ids_of(batches: Any) -> list[str]:
    return [value for batch in batches for value in batch.column("id").to_pylist()]


def as_saved(mixed: MixedReader) -> Any:
    return json.loads(json.dumps(mixed.state_dict()))


def deviation(drawn: Any, weights: Any) -> float:
    """The most rows that any source is off its weight after any number of rows."""
    shares = np.array(weights) / sum(weights)
    rows = np.arange(1, len(drawn) + 1)
    return max(
        float(abs(np.cumsum(drawn == index) - rows * share).max())
        for index, share in enumerate(shares)
    )


# Which source comes next.


@pytest.mark.parametrize(
    "weights",
    [
        *((1, 1), (0.9, 0.1), (3, 1e-3), (7, 11, 13), (0.62, 0.07, 0.31), (1, 2, 3, 5)),
        *((0.5, 0.29, 0.2, 0.01), (3, 1, 4, 1, 5), (0.6, 0.25, 0.1, 0.04, 0.01)),
    ],
)
def test_after_any_number_of_rows_every_source_is_within_two_rows_of_its_weight(
    weights: tuple[float, ...],
) -> None:
    for seed in range(10):
        drawn = Draws(weights, seed, epoch=seed % 3).draw(np.zeros(len(weights), np.int64), 5_000)
        assert deviation(drawn, weights) <= 2


@pytest.mark.parametrize("start", [0, 999, 10**9])
def test_draws_go_on_from_any_row_and_the_row_of_every_turn_is_known(start: int) -> None:
    weights = (5, 3, 1.7, 0.2)
    draws = Draws(weights, seed=1, epoch=0)
    given = (np.array(weights) / sum(weights) * start).astype(np.int64)
    drawn = draws.draw(given, 3_000)
    parts, now = [], given.copy()
    for _ in range(30):
        parts.append(draws.draw(now, 100))
        now += np.bincount(parts[-1], minlength=4)

    assert np.array_equal(drawn, np.concatenate(parts))
    for source in range(4) if start == 0 else ():
        places = np.flatnonzero(drawn == source).tolist()
        assert [draws.place(source, rows) for rows in range(len(places))] == places


# What a pass delivers.


@pytest.mark.parametrize("shuffle", [None, 5])
@pytest.mark.parametrize(
    ("stop", "epochs"), [("first", {"a": 1, "b": 1, "c": 1}), ("all", {"a": 1, "b": 2, "c": 4})]
)
def test_a_pass_ends_with_the_first_or_the_last_source_and_repeats_only_whole_epochs(
    mix: Mix, stop: str, epochs: dict[str, int], shuffle: Any
) -> None:
    mixed = mix(shuffle=shuffle, stop=stop, source_column="source")

    table = pa.Table.from_batches(list(mixed))
    ids, sources = table.column("id").to_pylist(), table.column("source").to_pylist()

    assert len(ids) == mixed.num_rows == sum(mixed.rows.values())
    assert [value[0] for value in ids] == sources
    assert deviation(np.array(["abc".index(source) for source in sources]), (10, 6, 1)) <= 2
    assert mixed.rows["a"] / len(ids) == pytest.approx(
        10 / 17, abs=0.002 if stop == "all" else 0.02
    )
    assert mixed.schema.names == table.schema.names == ["id", "source"]
    for name, size in SIZES.items():
        own = [value for value in ids if value[0] == name]
        passes = [own[start : start + size] for start in range(0, len(own), size)]
        assert all(len(set(one)) == len(one) for one in passes)
        assert len(passes) == epochs[name]
        assert shuffle is None or len(passes) == 1 or passes[0] != passes[1]
    last = "c" if stop == "first" else "a"
    assert mixed.rows[last] == SIZES[last]


def test_epochs_differ_and_each_can_be_had_again(mix: Mix) -> None:
    mixed = mix(shuffle=1)
    first = ids_of(mixed)
    assert ids_of(mixed) == first
    mixed.set_epoch(1)
    second = ids_of(mixed)

    assert second != first
    assert ids_of(mix(shuffle=1, epoch=1)) == second
    assert [value[0] for value in ids_of(mix(seed=9))] != [value[0] for value in ids_of(mix())]


# Resume.


@pytest.mark.parametrize("even", [None, "pad"])
@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("shuffle", [None, 5])
def test_resume_after_every_batch_gives_the_same_tail(
    mix: Mix, stop: str, shuffle: Any, even: Any
) -> None:
    options = {"stop": stop, "shuffle": shuffle, "even": even, "batch_size": 61, "shard": (1, 2)}
    mixed = mix(**options)
    states, batches = [as_saved(mixed)], []
    for batch in mixed:
        batches.append(batch)
        states.append(as_saved(mixed))

    for done, state in enumerate(states):
        other = mix(**options)
        other.load_state_dict({"loader": [state]})
        assert as_saved(other)["given"] == state["given"]
        assert list(other) == batches[done:]
        assert other.rows == mixed.rows


def test_sources_that_are_used_up_in_one_batch_lose_no_rows(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.parquet", {"id": [f"{n}{i}" for i in range(5)]}) for n in "ab"]
    for batch_size in range(1, 30):
        pairs = [(open_dataset(path), weight) for path, weight in zip(paths, (5, 4), strict=True)]
        ids = ids_of(mix_datasets(pairs, stop="all", batch_size=batch_size))
        assert {f"{n}{i}" for n in "ab" for i in range(5)} <= set(ids)


def test_a_source_of_large_rows_whose_columns_grow_is_mixed(tmp_path: Path) -> None:
    """Its reader gives several batches for one of the mix, and the later ones have more columns."""
    rows = [{"id": n, "text": "x" * 600_000} | ({"late": n} if n > 20 else {}) for n in range(40)]
    large = write_jsonl(tmp_path / "large.jsonl", rows)
    small = write(tmp_path / "small.parquet", {"id": [100] * 20})
    pairs = [(open_dataset(large, memory_budget=SMALL_BUDGET), 3), (open_dataset(small), 1)]

    found = [row for batch in mix_datasets(pairs, batch_size=40) for row in batch.to_pylist()]

    assert [row["id"] for row in found if row["id"] < 100] == list(range(40))
    assert [row["late"] for row in found if row.get("late")] == list(range(21, 40))


def test_states_that_do_not_fit_are_refused(mix: Mix) -> None:
    shards = [mix(stop="all", shard=(index, 2)) for index in range(2)]
    assert ids_of(shards[0])
    states, state = [as_saved(mixed) for mixed in shards], as_saved(mix())
    for open_mix, found, reason in (
        (mix, {"epoch": 1}, "not a state of a mix"),
        (partial(mix, stop="all"), state, "stop='first' and this mix stop='all'"),
        (partial(mix, weights=(1, 1, 1)), state, "weights"),
        (partial(mix, stop="all"), states, "number of ranks and workers"),
    ):
        with pytest.raises(ResumeError, match=reason):
            open_mix().load_state_dict(found)
    shards[1].load_state_dict(states)


# Even batches.


@pytest.mark.parametrize("even", ["drop", "pad"])
@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_even_readers_give_every_shard_the_same_batches(
    mix: Mix, count: int, stop: str, even: str
) -> None:
    options = {"stop": stop, "even": even, "shuffle": 3, "batch_size": 7, "seed": 4}
    shards = [mix(shard=(index, count), **options) for index in range(count)]

    sizes = {tuple(batch.num_rows for batch in mixed) for mixed in shards}

    assert {sum(of_shard) for of_shard in sizes} == {mixed.num_rows for mixed in shards}
    assert len(sizes) == 1


# Types, and what cannot be mixed.


def test_columns_are_joined_and_what_a_source_lacks_is_null(tmp_path: Path) -> None:
    view = pa.array(["x", "y"] * 5, type=pa.string_view())
    left = write(tmp_path / "l.parquet", {"n": [1] * 10, "tokens": [[1, 2]] * 10, "view": view})
    right = write(
        tmp_path / "r.parquet", {"n": [0.5] * 10, "kind": pa.array(["k"] * 10).dictionary_encode()}
    )

    mixed = mix_datasets([(open_dataset(left), 1), (open_dataset(right), 1)])
    rows = [row for batch in mixed for row in batch.to_pylist()]

    assert {len(rows)} <= {19, 20}
    assert {json.dumps(row, sort_keys=True) for row in rows} == {
        '{"kind": "k", "n": 0.5, "tokens": null, "view": null}',
        '{"kind": null, "n": 1.0, "tokens": [1, 2], "view": "x"}',
        '{"kind": null, "n": 1.0, "tokens": [1, 2], "view": "y"}',
    }


def test_what_cannot_be_meant_or_mixed_is_named(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"text": {"id": ["x"]}, "number": {"id": [1]}}
    columns["none"] = {"id": pa.array([], pa.string())}
    paths = {name: write(tmp_path / f"{name}.parquet", found) for name, found in columns.items()}

    def read(name: str, **options: Any) -> Any:
        return open_dataset(paths[name], **options)

    check_calls("mixing", read=read, reader=read("text"))
