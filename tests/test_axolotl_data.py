"""Dedupe, saving and lengths are those of the real Axolotl, on every kind of dataset."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import unique_rows
from fast_axolotl.axolotl import data
from fast_axolotl.axolotl.data import (
    deduplicate_and_log_datasets,
    get_dataset_lengths,
    row_numbers,
    save_preprocessed_dataset,
)
from fast_axolotl.axolotl.patching import Unfamiliar
from support.axolotl import (
    EQUAL_TO_STOCK,
    STOCK_AXOLOTL,
    VARIANTS,
    Later,
    assert_same_dataset,
    config,
    log_lines,
    tokenised,
    variant,
)

pytestmark = STOCK_AXOLOTL

NAN = float("nan")


utils = Later("axolotl.utils.data.utils")
shared = Later("axolotl.utils.data.shared")
samplers = Later("axolotl.utils.samplers.utils")

# Dedupe.

VALUES: dict[str, list[Any]] = {
    "text": ["a", "b", None, "", "a", "'", '"', "\\", "\n", "é", "é", "e\u0301", "None"],
    "floats": [0.0, -0.0, NAN, -NAN, 1.0, math.inf, -math.inf, None, 1e-323, 0.1, 0.1 + 1e-17],
    "lists of floats": [[0.0], [-0.0], [NAN], [NAN], None, []],
    "lists": [[1, 2], [1], None, [], [1, None], [None, 1], [1, 2]],
    "bools": [True, False, None, True],
    "structs": [{"a": 1, "b": "x"}, {"a": None, "b": None}, None, {"a": 1, "b": "x"}],
    "chats": [[{"role": "u", "content": "hi"}], [], None, [{"role": "u", "content": None}]],
    "nulls": [None, None],
    "bytes": [b"a", b"", None, b"a"],
}


def same_dedupe(*datasets: Any) -> None:
    """Both functions keep the same rows, and log the same lines."""
    found = []
    for function in (deduplicate_and_log_datasets, utils.deduplicate_and_log_datasets):
        with log_lines("axolotl.utils.data.utils", level=logging.INFO) as lines:
            found.append((function(*datasets), lines))
    (ours, own_lines), (theirs, lines) = found
    assert own_lines == lines
    for one, other in zip(ours, theirs, strict=True):
        if one is not None or other is not None:
            assert_same_dataset(one, other)


@pytest.mark.parametrize("name", VARIANTS)
def test_dedupe_keeps_the_rows_that_stock_keeps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_ROWS_AT_ONCE", 4)
    same_dedupe(variant(name, tmp_path))


@pytest.mark.parametrize("name", VALUES)
def test_dedupe_agrees_on_every_kind_of_value(name: str) -> None:
    from datasets import Dataset

    values = VALUES[name] * 2
    dataset = Dataset.from_dict({"x": values, "y": [0] * len(values)})
    same_dedupe(dataset)
    kept = deduplicate_and_log_datasets(dataset)[0]
    numbers = range(len(kept)) if kept._indices is None else row_numbers(kept)
    assert unique_rows(dataset.data.table).tolist() == [*numbers]


@EQUAL_TO_STOCK
@given(st.lists(st.tuples(st.floats(), st.text(max_size=2), st.lists(st.integers(0, 1)))))
def test_dedupe_of_any_rows(rows: list[tuple[float, str, list[int]]]) -> None:
    from datasets import Dataset

    columns = dict(zip("abc", map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    dataset = Dataset.from_dict(columns or {"a": pa.array([], pa.int64())})
    same_dedupe(dataset)
    if rows:
        drawn = np.random.default_rng(len(rows)).integers(0, 3, 3) % len(rows)
        same_dedupe(dataset.select(drawn))


def test_a_second_dataset_loses_the_rows_of_the_first() -> None:
    same_dedupe(tokenised(60), tokenised(60, seed=6).shuffle(seed=1), "one", "two")


def images() -> Any:
    from datasets import Dataset, Features, Image

    return Dataset.from_dict({"x": [None]}, features=Features({"x": Image()}))


def test_dedupe_refuses_what_it_cannot_compare() -> None:
    from datasets import Dataset, Features, IterableDataset, Value

    rows = tokenised(5)
    times = Dataset(pa.table({"t": pa.array([1, 2], pa.timestamp("s"))}))
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    text = Dataset(pa.table({"x": broken}), info=None)
    text._info.features = Features({"x": Value("string")})
    stream = IterableDataset.from_generator(list)
    before = (rows._fingerprint, rows.format, rows[:])
    others = (rows.with_format("numpy"), times, images(), [], stream, tokenised(5, width="int64"))
    for pair in (*((dataset,) for dataset in others[:-1]), (rows, others[-1])):
        with pytest.raises(Unfamiliar):
            deduplicate_and_log_datasets(*pair)
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        deduplicate_and_log_datasets(text)
    assert (rows._fingerprint, rows.format, rows[:]) == before


# Lengths.


@pytest.mark.parametrize("name", VARIANTS)
def test_lengths_are_those_of_stock(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Value

    monkeypatch.setattr(data, "_ROWS_AT_ONCE", 4)
    rows = variant(name, tmp_path)
    lengths = [len(row) for row in rows["input_ids"]]
    known = rows.add_column("length", lengths, feature=Value("int64"))
    for dataset, from_arrow in itertools.product((rows, known), (False, True)):
        if from_arrow and dataset is rows and not len(dataset.data):
            with pytest.raises(Unfamiliar):
                get_dataset_lengths(dataset, from_arrow)
            continue
        theirs = samplers.get_dataset_lengths(dataset, from_arrow)
        ours = get_dataset_lengths(dataset, from_arrow)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tolist() == theirs.tolist()
        assert ours.flags.writeable
        assert ours.flags.owndata or ours.base.flags.owndata
        assert type(ours) is np.ndarray


@pytest.mark.parametrize("kind", ["int8", "int32", "uint16", "int64"])
def test_lengths_of_any_width_are_int64(kind: str) -> None:
    from datasets import Dataset, Features, Value

    dataset = Dataset.from_dict({"length": [3, 1, 2]}, features=Features({"length": Value(kind)}))
    ours, theirs = get_dataset_lengths(dataset), samplers.get_dataset_lengths(dataset)
    assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


@pytest.mark.parametrize(
    "columns",
    [
        {"length": [1, None]},
        {"length": [1.5]},
        {"length": [True]},
        {"length": ["x"]},
        {"length": pa.array([1], pa.uint64())},
        {"position_ids": [[0]], "input_ids": [[3]]},
        {"input_ids": [[1], None]},
        {"input_ids": ["text"]},
        {"input_ids": [[1.5]]},
        {"text": ["x"]},
    ],
)
def test_odd_lengths_are_left_to_stock(columns: dict[str, Any]) -> None:
    from datasets import Dataset

    odd = Dataset(pa.table(columns))
    for dataset in (odd, tokenised(3).with_format("torch"), [1, 2]):
        for from_arrow in (False, True):
            with pytest.raises(Unfamiliar):
                get_dataset_lengths(dataset, from_arrow)


# Saving.


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock saves with as many shards, but without starting processes for every test."""
    from datasets import Dataset

    real = Dataset.save_to_disk

    def save(
        self: Any, path: str, num_shards: Any = None, num_proc: int = 1, max_shard_size: None = None
    ) -> None:
        if num_shards is None and num_proc > 1:
            num_shards = min(len(self.data), num_proc)
        real(self, path, num_shards=num_shards, max_shard_size=max_shard_size)

    monkeypatch.setattr(Dataset, "save_to_disk", save)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def save_both(dataset: Any, folder: Path, **options: Any) -> Any:
    """Saves with stock and with ours, checks that all files are alike, and gives their folder."""
    done = []
    for name, save in (
        ("theirs", shared.save_preprocessed_dataset),
        ("ours", save_preprocessed_dataset),
    ):
        cfg = config({"dataset_prepared_path": str(folder / name), **options})
        assert save(cfg, dataset, "hash", "train") is None
        done.append(folder / name)
    theirs, ours = done
    assert files_in(ours) == files_in(theirs)
    modes = [{path.name: path.stat().st_mode for path in item.rglob("*")} for item in done]
    assert modes[0] == modes[1]
    return ours / "hash"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "no rows"])
def test_saved_files_are_those_of_stock_byte_for_byte(name: str, tmp_path: Path) -> None:
    dataset = variant(name, tmp_path)
    for folder, num_shards in (("auto", None), ("three", min(len(dataset), 3))):
        options = {"dataset_num_proc": 2, "num_dataset_shards_to_save": num_shards}
        save_both(dataset, tmp_path / folder, **options)


def test_saving_is_that_of_stock_with_its_processes(tmp_path: Path) -> None:
    from datasets import load_from_disk

    dataset = tokenised(2500).shuffle(seed=1)
    dataset.set_format("numpy", columns=["labels"])
    folder = save_both(dataset, tmp_path, dataset_num_proc=2)
    assert len(list(folder.glob("*.arrow"))) == 2
    loaded = load_from_disk(str(folder))
    assert loaded.format["type"] == "numpy"
    assert loaded.with_format(None)[:] == dataset.with_format(None)[:]


@pytest.mark.usefixtures("in_process")
def test_shards_by_size_splits_infos_and_nested_columns_are_saved_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from datasets import ClassLabel, Dataset, DatasetInfo, Features, Value

    monkeypatch.setattr(datasets.config, "MAX_SHARD_SIZE", "1KB")
    save_both(tokenised(80), tmp_path / "all", dataset_num_proc=1)
    some = tokenised(80).select(range(0, 80, 2))
    save_both(some, tmp_path / "some", dataset_num_proc=1)
    features = Features(
        {"c": ClassLabel(names=["a", "b"]), "m": [{"role": Value("string")}], "n": Value("null")}
    )
    rows = {"c": [0, 1, None], "m": [[{"role": "u"}], None, []], "n": [None] * 3}
    info = DatasetInfo(description="words", features=features, version="1.2.3")
    dataset = Dataset.from_dict(rows, info=info, split="train")
    folder = save_both(dataset, tmp_path / "nested", dataset_num_proc=1)
    assert json.loads((folder / "state.json").read_text())["_split"] == "train"


@pytest.mark.usefixtures("in_process")
def test_saving_over_other_files_leaves_them_as_stock_does(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        folder = tmp_path / name / "hash"
        folder.mkdir(parents=True)
        (folder / "other.txt").write_text("stays")
        (folder / "state.json").write_text("old")
    folder = save_both(tokenised(9), tmp_path, dataset_num_proc=1)
    assert (folder / "other.txt").read_text() == "stays"


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_save_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    monkeypatch.setattr(data, "rows_between", stop)
    if existing:
        (tmp_path / "hash").mkdir()
    cfg = config({"dataset_prepared_path": str(tmp_path), "dataset_num_proc": 2})
    with pytest.raises(Stop):
        save_preprocessed_dataset(cfg, tokenised(9), "hash", "train")
    assert [path.name for path in tmp_path.rglob("*")] == ["hash"] * existing


def test_a_save_removes_what_a_killed_one_left_a_day_ago_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def left(name: str, age: float, inside: str = "state.json") -> str:
        folder = tmp_path / f".other.{name * 32}"
        folder.mkdir()
        (folder / inside).write_text("{}")
        for path in (folder / inside, folder):
            os.utime(path, (time.time() - age,) * 2)
        return folder.name

    dead = left("a", 2 * 86_400)
    kept = [left("c", 3_600), left("e", 9e6, "mine.txt")]
    cfg = config({"dataset_prepared_path": str(tmp_path), "dataset_num_proc": 1})
    save_preprocessed_dataset(cfg, tokenised(9), "hash", "train")
    assert {path.name for path in tmp_path.iterdir()} == {"hash", *kept}
    assert dead in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"push_dataset_to_hub": "me/data"},
        {"num_dataset_shards_to_save": 99},
        {"num_dataset_shards_to_save": 0},
        {"dataset_num_proc": -1},
        {"dataset_prepared_path": "~/x"},
        {"dataset_prepared_path": "s3://bucket"},
    ],
    ids=str,
)
def test_odd_settings_of_saving_are_left_to_stock(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = config({"dataset_prepared_path": str(tmp_path), "dataset_num_proc": 1, **options})
    with pytest.raises(Unfamiliar):
        save_preprocessed_dataset(cfg, tokenised(9), "hash", "train")
    assert list(tmp_path.iterdir()) == []


def test_odd_datasets_are_left_to_stock_before_anything_is_written(tmp_path: Path) -> None:
    from datasets import IterableDataset, load_from_disk

    tokenised(3).save_to_disk(str(tmp_path / "own" / "hash"))
    itself = load_from_disk(str(tmp_path / "own" / "hash"))
    before = files_in(tmp_path)
    odd = [itself, images(), tokenised(3).select([]), IterableDataset.from_generator(list)]
    for dataset in odd:
        cfg = config({"dataset_prepared_path": str(tmp_path / "own"), "dataset_num_proc": 1})
        with pytest.raises(Unfamiliar):
            save_preprocessed_dataset(cfg, dataset, "hash", "train")
    assert files_in(tmp_path) == before
