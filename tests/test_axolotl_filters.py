"""Length filters, truncation and position ids are those of the real Axolotl, caches included."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.axolotl import data, filters
from fast_axolotl.axolotl.filters import (
    handle_long_seq_in_dataset,
    process_datasets_for_packing,
)
from fast_axolotl.axolotl.patching import Unfamiliar
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

FILLED = [name for name in VARIANTS if name not in ("no rows", "one row")]
FORKED = ["shuffled", "subclass"]
"""With several processes, which take a second each time."""


class Step:
    """One of Axolotl's functions and ours."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = Later(module), name
        self.ours = getattr(filters, name)

    @property
    def stock(self) -> Any:
        return getattr(self.module, self.name)

    def same(self, *args: Any) -> Any:
        """Our result, found equal with all that is logged and drawn; caches are not shared."""
        states = random_states()
        with log_lines(self.module.LOG.logger.name) as our_lines:
            ours = self.ours(*args)
        assert random_states() == states
        for item in args:
            clear_caches(item)
        with log_lines(self.module.LOG.logger.name) as their_lines:
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

    def refuses(self, *args: Any) -> None:
        """Ours does, and has logged nothing."""
        with log_lines(self.module.LOG.logger.name) as lines, pytest.raises(Unfamiliar):
            self.ours(*args)
        assert lines == []


LONG = Step("axolotl.utils.data.utils", "handle_long_seq_in_dataset")
PACKING = Step("axolotl.utils.trainer", "process_datasets_for_packing")


def random_states() -> Any:
    import torch

    numbers = np.random.get_state()
    return random.getstate(), numbers[1].tolist(), numbers[2:], torch.get_rng_state().tolist()


def clear_caches(dataset: Any) -> None:
    own = {Path(file["filename"]) for file in getattr(dataset, "cache_files", None) or ()}
    for folder in {path.parent for path in own}:
        for cached in {*folder.glob("cache-*.arrow")} - own:
            cached.unlink()


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


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
    {"excess_length_strategy": "raise"},
    {"dataset_num_proc": 2},
]


@on_every_variant(STRATEGIES)
def test_rows_out_of_range_are_handled_as_by_stock(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (data, filters):
        monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    longest = 9 if options.get("excess_length_strategy") == "raise" else 3
    LONG.same(rows_of(name, tmp_path), longest, config({"is_preprocess": True, **options}))


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
    lengths = np.array([len(row) for row in rows])
    least = shortest or 2
    if not ((lengths >= least) & (lengths <= longest)).any():
        with pytest.raises(Unfamiliar, match="no row is left"):
            handle_long_seq_in_dataset(dataset, longest, cfg)
        return
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
        ({"input_ids": [[1, 2]]}, 1, {"excess_length_strategy": "raise"}),
        ({"input_ids": pa.array([], pa.list_(pa.int64()))}, 1, {}),
        ({"input_ids": [[1, 2]]}, 1, {"excess_length_strategy": "truncate"}),
    ],
)
def test_odd_lengths_are_left_to_stock(dataset: Any, longest: Any, options: dict[str, Any]) -> None:
    from datasets import Dataset

    LONG.refuses(Dataset(pa.table(dataset)), longest, config(options))


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
    is_masked = any(set(chain(*item["labels"])) == {-100} for item in (train, evaluation))
    if is_masked and RELEASE >= (0, 19):
        with pytest.raises(Unfamiliar, match="no row is left"):
            process_datasets_for_packing(cfg, train, evaluation)
        return
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


def test_existing_columns_are_written_over_in_place() -> None:
    from datasets import Dataset

    columns = {"position_ids": [[5, 5]], "length": [9], "labels": [[1, 2]], "input_ids": [[3, 4]]}
    ours, _ = PACKING.same(config({"sample_packing": True}), Dataset.from_dict(columns), None)
    assert ours.column_names == list(columns)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        pytest.param(
            {"input_ids": [[1]], "labels": [[-100]]},
            {},
            marks=pytest.mark.skipif(RELEASE < (0, 19), reason="every row is kept"),
        ),
        ({"input_ids": [[1]], "labels": [None]}, {}),
        ({"input_ids": [[1]], "labels": [[1, None]]}, {}),
        ({"input_ids": [[1]], "labels": [[1.5]]}, {}),
        ({"input_ids": [[1]], "labels": [1]}, {}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"use_pose": True}),
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
def test_odd_packings_are_left_to_stock(columns: Any, options: dict[str, Any]) -> None:
    from datasets import Dataset

    dataset = Dataset(pa.table(columns))
    before = (dataset._fingerprint, dataset.data.table)
    PACKING.refuses(config(options), dataset, None)
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
    for folder, first, second in ((ours_first, filters, stock), (stock_first, stock, filters)):
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


def test_an_error_midway_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_from_disk

    def fail(_: Any) -> None:
        raise MemoryError

    tokenised(50).save_to_disk(str(tmp_path))
    dataset = load_from_disk(str(tmp_path))
    monkeypatch.setattr(filters, "_token_lengths", fail)
    with pytest.raises(MemoryError):
        process_datasets_for_packing(config({"sample_packing": True}), dataset, None)
    left = {path.name for path in tmp_path.iterdir()}
    assert {name for name in left if not name.startswith("cache-")} == {
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    }


def test_the_process_is_left_as_by_a_fork() -> None:
    """The library switches off the threads of tokenizers when it has forked, past os.environ."""
    import ctypes

    read = ctypes.CDLL(None).getenv
    read.restype = ctypes.c_char_p
    os.unsetenv("TOKENIZERS_PARALLELISM")
    handle_long_seq_in_dataset(tokenised(9), 9, config({"min_sample_len": 1}))
    assert read(b"TOKENIZERS_PARALLELISM") is None
    cfg = config({"min_sample_len": 1, "dataset_num_proc": 2})
    handle_long_seq_in_dataset(tokenised(9), 9, cfg)
    assert read(b"TOKENIZERS_PARALLELISM") == b"false"
    os.unsetenv("TOKENIZERS_PARALLELISM")
