"""Dedupe, saving, lengths, filters and position ids are those of the real Axolotl, caches included,
on every kind of dataset.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl import unique_rows
from fast_axolotl.axolotl import data, passes
from fast_axolotl.axolotl.data import (
    deduplicate_and_log_datasets,
    get_dataset_lengths,
    row_numbers,
    save_preprocessed_dataset,
)
from fast_axolotl.axolotl.passes import (
    handle_long_seq_in_dataset,
    process_datasets_for_packing,
)
from fast_axolotl.axolotl.patching import Final, Unfamiliar, _is_replaced
from fast_axolotl.axolotl.self_check import Check
from support.axolotl import (
    EQUAL_TO_STOCK,
    RELEASE,
    STOCK_AXOLOTL,
    VARIANTS,
    Later,
    assert_same_dataset,
    config,
    log_lines,
    subclassed,
    tokenised,
    variant,
)

pytestmark = STOCK_AXOLOTL

NAN = float("nan")


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    import datasets

    datasets.enable_caching()  # which ``prepare`` turns off for its process
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


utils = Later("axolotl.utils.data.utils")
shared = Later("axolotl.utils.data.shared")
samplers = Later("axolotl.utils.samplers.utils")


class Step:
    """One of Axolotl's functions and ours."""

    def __init__(self, module: str, ours: Callable[..., Any]) -> None:
        self.module, self.ours = Later(module), ours

    @property
    def stock(self) -> Any:
        return getattr(self.module, self.ours.__name__)

    def same(self, *args: Any) -> Any:
        """Our result, found equal with all that is logged and drawn; caches are not shared.

        ``None`` where both raise the same error.
        """
        states = random_states()
        try:
            with log_lines(self.module.__name__, level=logging.INFO) as our_lines:
                ours = self.ours(*args)
        except Final as final:
            with pytest.raises(type(final.error), match=re.escape(str(final.error))):
                self.stock(*args)
            return None
        assert random_states() == states
        for item in args:
            clear_caches(item)
        with log_lines(self.module.__name__, level=logging.INFO) as their_lines:
            theirs = self.stock(*args)
        assert our_lines == their_lines
        if not isinstance(theirs, tuple):
            assert_same_dataset(ours, theirs)
            return ours
        for left, right in zip(ours, theirs, strict=True):
            if right is None:
                assert left is None
            else:
                assert_same_dataset(left, right)
        return ours


DEDUPE = Step("axolotl.utils.data.utils", data.deduplicate_and_log_datasets)
LONG = Step("axolotl.utils.data.utils", passes.handle_long_seq_in_dataset)
PACKING = Step("axolotl.utils.trainer", passes.process_datasets_for_packing)


def random_states() -> Any:
    import torch

    numbers = np.random.get_state()
    return random.getstate(), numbers[1].tolist(), numbers[2:], torch.get_rng_state().tolist()


def clear_caches(dataset: Any) -> None:
    own = {Path(file["filename"]) for file in getattr(dataset, "cache_files", None) or ()}
    for folder in {path.parent for path in own}:
        for cached in {*folder.glob("cache-*.arrow")} - own:
            cached.unlink()


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


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_kept_lengths_and_saved_files_are_those_of_stock(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Value

    monkeypatch.setattr(data, "ROWS_AT_ONCE", 4)
    rows = variant(name, tmp_path)
    DEDUPE.same(rows)
    lengths = [len(row) for row in rows["input_ids"]]
    known = rows.add_column("length", lengths, feature=Value("int64"))
    for dataset, from_arrow in itertools.product((rows, known), (False, True)):
        if from_arrow and dataset is rows and not len(dataset.data):
            with pytest.raises(Unfamiliar):
                get_dataset_lengths(dataset, from_arrow)
            continue
        theirs = samplers.get_dataset_lengths(dataset, from_arrow)
        ours = get_dataset_lengths(dataset, from_arrow)
        assert (type(ours), ours.dtype, ours.shape) == (np.ndarray, theirs.dtype, theirs.shape)
        assert ours.tolist() == theirs.tolist()
        assert ours.flags.writeable
        assert ours.flags.owndata or ours.base.flags.owndata
    for folder, num_shards in (("auto", None), ("three", min(len(rows), 3))) * bool(len(rows)):
        options = {"dataset_num_proc": 2, "num_dataset_shards_to_save": num_shards}
        save_both(rows, tmp_path / folder, **options)


@pytest.mark.parametrize("name", VALUES)
def test_dedupe_agrees_on_every_kind_of_value(name: str) -> None:
    from datasets import Dataset

    values = VALUES[name] * 2
    dataset = Dataset.from_dict({"x": values, "y": [0] * len(values)})
    DEDUPE.same(dataset)
    kept = deduplicate_and_log_datasets(dataset)[0]
    numbers = range(len(kept)) if kept._indices is None else row_numbers(kept)
    assert unique_rows(dataset.data.table).tolist() == [*numbers]


@EQUAL_TO_STOCK
@given(st.lists(st.tuples(st.floats(), st.text(max_size=2), st.lists(st.integers(0, 1)))))
def test_dedupe_of_any_rows(rows: list[tuple[float, str, list[int]]]) -> None:
    from datasets import Dataset

    columns = dict(zip("abc", map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    dataset = Dataset.from_dict(columns or {"a": pa.array([], pa.int64())})
    DEDUPE.same(dataset)
    if rows:
        drawn = np.random.default_rng(len(rows)).integers(0, 3, 3) % len(rows)
        DEDUPE.same(dataset.select(drawn))


def test_a_second_dataset_loses_the_rows_of_the_first() -> None:
    DEDUPE.same(tokenised(60), tokenised(60, seed=6).shuffle(seed=1), "one", "two")


def images() -> Any:
    from datasets import Dataset, Features, Image

    return Dataset.from_dict({"x": [None]}, features=Features({"x": Image()}))


def test_dedupe_refuses_what_it_cannot_compare() -> None:
    from datasets import Dataset, IterableDataset

    rows = tokenised(5)
    times = Dataset(pa.table({"t": pa.array([1, 2], pa.timestamp("s"))}))
    stream = IterableDataset.from_generator(list)
    before = (rows._fingerprint, rows.format, rows[:])
    others = (rows.with_format("numpy"), times, images(), [], stream, tokenised(5, width="int64"))
    for pair in (*((dataset,) for dataset in others[:-1]), (rows, others[-1])):
        with pytest.raises(Unfamiliar):
            deduplicate_and_log_datasets(*pair)
    assert (rows._fingerprint, rows.format, rows[:]) == before


# Lengths.


def test_lengths_of_any_width_are_int64() -> None:
    from datasets import Dataset

    for kind in ("int8", "int32", "uint16", "int64"):
        dataset = Dataset(pa.table({"length": pa.array([3, 1, 2], kind)}))
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


def test_unknown_code_is_compared_without_processes_and_whatever_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tokenised(60).filter(lambda row: len(row["input_ids"]))
    keys = {"sample_packing": True, "is_preprocess": True, "dataset_num_proc": 2}
    cfg = config({**keys, "dataset_prepared_path": str(tmp_path)})
    Check("rows:train_dataset", PACKING.stock).before(PACKING.ours, (cfg, rows, None), {})
    monkeypatch.setattr("datasets.arrow_dataset.mp", None)
    save = Check("folder:dataset", shared.save_preprocessed_dataset)
    save.before(save_preprocessed_dataset, (cfg, rows, "hash", "train"), {})
    assert not [*tmp_path.iterdir()]


def test_passes_of_datasets_are_ours_only_while_the_function_runs() -> None:
    from datasets import Dataset

    def fail() -> None:
        assert Dataset.map is not before[0]
        assert not _is_replaced("datasets.arrow_dataset")  # by other code than ours
        raise OSError("in stock")

    before = Dataset.map, Dataset.filter
    with pytest.raises(Final, match="in stock"):
        passes.run_with({}, "long", fail)
    assert (Dataset.map, Dataset.filter) == before


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_save_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "rows_between", stop)
    if existing:
        (tmp_path / "hash").mkdir()
    cfg = config({"dataset_prepared_path": str(tmp_path), "dataset_num_proc": 2})
    with pytest.raises(KeyboardInterrupt):
        save_preprocessed_dataset(cfg, tokenised(9), "hash", "train")
    assert [path.name for path in tmp_path.rglob("*")] == ["hash"] * existing


def test_a_save_removes_what_a_killed_one_left_a_day_ago_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def left(name: str, age: float) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "state.json").write_text("{}")
        for path in (folder / "state.json", folder):
            os.utime(path, (time.time() - age,) * 2)
        return folder.name

    dead = left(f".hash.{'a' * 32}", 2 * 86_400)
    kept = [left(f".hash.{'c' * 32}", 3_600), left(".hash.mine", 9e6)]
    cfg = config({"dataset_prepared_path": str(tmp_path), "dataset_num_proc": 1})
    save_preprocessed_dataset(cfg, tokenised(9), "hash", "train")
    assert {path.name for path in tmp_path.iterdir()} == {"hash", *kept}
    assert dead in caplog.text


def test_odd_settings_and_datasets_are_left_to_stock_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import IterableDataset, load_from_disk

    monkeypatch.chdir(tmp_path)
    tokenised(3).save_to_disk(str(tmp_path / "own" / "hash"))
    itself = load_from_disk(str(tmp_path / "own" / "hash"))
    before = files_in(tmp_path)
    odd: list[tuple[Any, dict[str, Any]]] = [
        (tokenised(9), {"push_dataset_to_hub": "me/data"}),
        (tokenised(9), {"num_dataset_shards_to_save": 99}),
        (tokenised(9), {"num_dataset_shards_to_save": 0}),
        (tokenised(9), {"dataset_num_proc": -1}),
        (tokenised(9), {"dataset_prepared_path": "~/x"}),
        (tokenised(9), {"dataset_prepared_path": "s3://bucket"}),
        *((rows, {}) for rows in (itself, images(), tokenised(3).select([]))),
        (IterableDataset.from_generator(list), {}),
    ]
    for dataset, options in odd:
        usual = {"dataset_prepared_path": str(tmp_path / "own"), "dataset_num_proc": 1}
        with pytest.raises(Unfamiliar):
            save_preprocessed_dataset(config({**usual, **options}), dataset, "hash", "train")
    assert files_in(tmp_path) == before


# Filters.

FILLED = [name for name in VARIANTS if name not in ("no rows", "one row")]
FORKED = ["shuffled", "subclass"]
"""With several processes, which take a second each time."""


def rows_of(name: str, folder: Path) -> Any:
    """Rows with no indices in a cache file that a test is about to clear."""
    from datasets.table import InMemoryTable

    dataset = variant(name, folder)
    if dataset._indices is not None:
        numbers = pa.array(dataset._indices.column(0).to_pylist(), pa.uint64())
        dataset._indices = InMemoryTable(pa.table({"indices": numbers}))
    return dataset


def on_every_variant(settings: list[dict[str, Any]]) -> Any:
    pairs = [
        (name, options)
        for options in settings
        for name in (FORKED if "dataset_num_proc" in options else FILLED)
    ]
    return pytest.mark.parametrize(("name", "options"), pairs, ids=str)


# Lengths out of range.

STRATEGIES: list[dict[str, Any]] = [
    {},
    {"min_sample_len": 1},
    {"min_sample_len": 0, "excess_length_strategy": "DROP"},
    {"dataset_num_proc": 2},
]


@on_every_variant(STRATEGIES)
def test_rows_out_of_range_are_handled_as_by_stock(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (data, passes):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)
    LONG.same(rows_of(name, tmp_path), 3, config({"is_preprocess": True, **options}))


ROWS = st.lists(
    st.lists(st.sampled_from([-100, 1, 2]), min_size=1, max_size=6), min_size=1, max_size=12
)


@EQUAL_TO_STOCK
@given(ROWS, st.integers(1, 6), st.sampled_from([None, 1, 3]))
def test_any_lengths_are_handled_as_by_stock(rows: Any, longest: int, shortest: int | None) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"labels": rows, "input_ids": [row[::-1] for row in rows]})
    dataset = dataset.select(np.random.default_rng(longest).permutation(len(rows)).tolist())
    cfg = config({"min_sample_len": shortest})
    LONG.same(dataset, longest, cfg)


@pytest.mark.parametrize(
    ("dataset", "longest", "options"),
    [
        ({"text": ["x"]}, 9, {}),
        ({"input_ids": [[1, 2], None]}, 9, {}),
        ({"input_ids": [[1.5, 2.5]]}, 9, {}),
        ({"input_ids": [[1, 2]]}, 9.5, {}),
        ({"input_ids": [[1, 2]]}, 9, {"min_sample_len": "2"}),
        ({"input_ids": [[1, 2]]}, 9, {"dataset_num_proc": 0}),
        ({"input_ids": [[1, 2]]}, 9, {"excess_length_strategy": "raise"}),
        ({"input_ids": pa.array([], pa.list_(pa.int64()))}, 1, {}),
        ({"input_ids": [[1, 2]]}, 1, {"excess_length_strategy": "truncate"}),
    ],
)
def test_odd_lengths_are_left_to_stocks_own_pass(
    dataset: Any, longest: Any, options: dict[str, Any]
) -> None:
    from datasets import Dataset

    LONG.same(Dataset(pa.table(dataset)), longest, config(options))


# Packing.

PACKINGS: list[dict[str, Any]] = [
    {},
    {"sample_packing": True},
    {"sample_packing": True, "eval_sample_packing": True, "dataset_num_proc": 2},
    {"model_config_type": "gemma3", "sample_packing": True},
    {"model_config_type": "mistral", "sample_packing": True, "eval_sample_packing": True},
]


@on_every_variant(PACKINGS)
def test_packing_prepares_what_stock_prepares(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    dataset = rows_of(name, tmp_path)
    filled = [row for row, ids in enumerate(dataset["input_ids"]) if ids]
    other = tokenised(20, seed=8).filter(lambda row: len(row["input_ids"]))
    PACKING.same(config({"is_preprocess": True, **options}), dataset.select(filled), other)


@EQUAL_TO_STOCK
@given(ROWS, ROWS)
def test_any_labels_are_judged_as_by_stock(train: Any, evaluation: Any) -> None:
    from datasets import Dataset

    train, evaluation = (
        Dataset.from_dict({"input_ids": [[7] * len(row) for row in rows], "labels": rows})
        for rows in (train, evaluation)
    )
    cfg = config({"sample_packing": True, "eval_sample_packing": True})
    PACKING.same(cfg, train, evaluation)


def test_rows_without_labels_stay_in_the_evaluation_only() -> None:
    from datasets import Dataset, Features, List, Value

    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int64"))})
    columns = {"input_ids": [[1], [], [2], [3, 4]], "labels": [[], [], [-100], [-100, 3]]}
    dataset = Dataset.from_dict(columns, features=features)
    # Until 0.18 a whole list is compared with -100, and every row kept.
    wanted = [1, 3] if RELEASE >= (0, 19) else [4, 4]
    assert [len(item) for item in PACKING.same(config({}), dataset, dataset)] == wanted


def test_position_ids_across_batches() -> None:
    from datasets import Dataset

    rng = np.random.default_rng(1)
    rows = [rng.integers(-100, -98, rng.integers(1, 9)).tolist() for _ in range(2501)]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows, "n": list(range(2501))})
    for item in (
        dataset.select(range(1000)),
        dataset,
        dataset.shuffle(seed=1),
        subclassed(dataset),
    ):
        ours, _ = PACKING.same(config({"sample_packing": True}), item, None)
        assert str(ours.features["position_ids"]) == "List(Value('int64'))"
        assert str(ours.features["length"]) == "Value('int64')"
    # Columns that are there already are written over in place.
    columns = {"position_ids": [[5, 5]], "length": [9], "labels": [[1, 2]], "input_ids": [[3, 4]]}
    ours, _ = PACKING.same(config({"sample_packing": True}), Dataset.from_dict(columns), None)
    assert ours.column_names == list(columns)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"input_ids": [[1]], "labels": [[-100]]}, {}),
        ({"input_ids": [[1]], "labels": [None]}, {}),
        ({"input_ids": [[1]], "labels": [[1, None]]}, {}),
        ({"input_ids": [[1]], "labels": [[1.5]]}, {}),
        ({"input_ids": [[1]], "labels": [1]}, {}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"dataset_num_proc": -1}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"model_config_type": "mamba"}),
        ({"input_ids": [[]], "labels": [[1]]}, {"sample_packing": True}),
        ({"input_ids": [None], "labels": [[1]]}, {"sample_packing": True}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"group_by_length": True}),
        ({"input_ids": [[1, None]], "labels": [[1]]}, {"sample_packing": True}),
        ({"input_ids": [[1]], "labels": [[1]], "length": ["x"]}, {"sample_packing": True}),
    ],
    ids=str,
)
def test_odd_packings_are_left_to_stocks_own_passes(columns: Any, options: dict[str, Any]) -> None:
    from datasets import Dataset

    dataset = Dataset(pa.table(columns))
    before = (dataset._fingerprint, dataset.data.table)
    PACKING.same(config(options), dataset, None)
    assert (dataset._fingerprint, dataset.data.table) == before


def test_other_kinds_of_datasets_are_left_to_stock() -> None:
    from datasets import IterableDataset

    good = tokenised(9)
    for odd in (good.with_format("torch"), IterableDataset.from_generator(list), [1]):
        with pytest.raises(Unfamiliar):
            process_datasets_for_packing(config({}), odd, None)
        with pytest.raises(Unfamiliar):
            process_datasets_for_packing(config({}), good, odd)
        with pytest.raises(Unfamiliar):
            handle_long_seq_in_dataset(odd, 9, config({}))


# Caches.


def prepare(steps: Any, folder: Path, **options: Any) -> Any:
    """Both steps on a dataset on disk, by stock's functions or by ours."""
    from datasets import load_from_disk

    cfg = config({"sample_packing": True, "min_sample_len": 1, **options})
    dataset = steps.handle_long_seq_in_dataset(load_from_disk(str(folder)), 3, cfg)
    return steps.process_datasets_for_packing(cfg, dataset, None)[0]


def caches(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("cache-*")}


@pytest.mark.parametrize("num_proc", [None, 2])
def test_caches_serve_stock_and_ours_alike(tmp_path: Path, num_proc: int | None) -> None:
    ours_first, stock_first = tmp_path / "ours", tmp_path / "stock"
    tokenised(50).save_to_disk(str(ours_first))
    shutil.copytree(ours_first, stock_first)
    stock = SimpleNamespace(
        handle_long_seq_in_dataset=LONG.stock, process_datasets_for_packing=PACKING.stock
    )
    for folder, first, second in ((ours_first, passes, stock), (stock_first, stock, passes)):
        made = prepare(first, folder, dataset_num_proc=num_proc)
        files = caches(folder)
        assert files
        assert {Path(item["filename"]).parent for item in made.cache_files} == {folder}
        assert_same_dataset(prepare(second, folder, dataset_num_proc=num_proc), made)
        assert_same_dataset(prepare(first, folder, dataset_num_proc=num_proc), made)
        assert caches(folder) == files
    names = [
        {name.split("_")[0].removesuffix(".arrow") for name in caches(item)}
        for item in (ours_first, stock_first)
    ]
    assert names[0] == names[1]
