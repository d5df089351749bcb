"""Length filters, truncation and position ids are those of the real Axolotl, caches included.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fast_axolotl.axolotl import data as axolotl_data
from fast_axolotl.axolotl import filters as axolotl_filters
from fast_axolotl.axolotl.filters import (
    handle_long_seq_in_dataset,
    process_datasets_for_packing,
)
from fast_axolotl.axolotl.patching import Unfamiliar
from support.axolotl import AGAINST_AXOLOTL
from test_axolotl_data import VARIANTS, assert_same_dataset, subclassed, tokenised, variants

pytestmark = AGAINST_AXOLOTL

EQUAL_TO_STOCK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FILLED = [name for name in VARIANTS if name not in ("no rows", "one row")]


@pytest.fixture(scope="module")
def utils(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.data.utils")


@pytest.fixture(scope="module")
def trainer(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.trainer")


@pytest.fixture(scope="module")
def config(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.dict").DictDefault


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@contextmanager
def logged(module: Any) -> Iterator[list[tuple[int, str]]]:
    """The lines that a module of Axolotl logs."""
    lines: list[tuple[int, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    handler = Keep()
    module.LOG.logger.addHandler(handler)
    try:
        yield lines
    finally:
        module.LOG.logger.removeHandler(handler)


def random_states() -> Any:
    import torch

    numbers = np.random.get_state()
    return random.getstate(), numbers[1].tolist(), numbers[2:], torch.get_rng_state().tolist()


def both(module: Any, stock: Callable[..., Any], ours: Callable[..., Any], *args: Any) -> Any:
    """Results of the two, with all that they log and draw compared; the caches are not shared."""
    states = random_states()
    with logged(module) as our_lines:
        our_result = ours(*args)
    assert random_states() == states
    clear_caches(args)
    with logged(module) as their_lines:
        their_result = stock(*args)
    assert our_lines == their_lines
    return our_result, their_result


def clear_caches(args: Any) -> None:
    for dataset in args:
        for file in getattr(dataset, "cache_files", None) or ():
            for cached in Path(file["filename"]).parent.glob("cache-*.arrow"):
                if str(cached) not in {item["filename"] for item in dataset.cache_files}:
                    cached.unlink()


# Lengths out of range.

STRATEGIES: list[dict[str, Any]] = [
    {},
    {"min_sample_len": 1},
    {"min_sample_len": 0, "excess_length_strategy": "DROP"},
    {"excess_length_strategy": "truncate"},
    {"excess_length_strategy": "truncate", "min_sample_len": 1, "dataset_num_proc": 2},
    {"excess_length_strategy": "raise"},
    {"dataset_num_proc": 2},
]


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", FILLED)
def test_rows_out_of_range_are_handled_as_by_stock(
    utils: Any, config: Any, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    dataset = in_memory_indices(variants(tmp_path)[name])
    cfg = config({"is_preprocess": True, **options})
    longest = 9 if options.get("excess_length_strategy") == "raise" else 3
    ours, theirs = both(
        utils,
        utils.handle_long_seq_in_dataset,
        handle_long_seq_in_dataset,
        dataset,
        longest,
        cfg,
    )
    assert_same_dataset(ours, theirs)


def in_memory_indices(dataset: Any) -> Any:
    """The same rows, with no indices in a cache file that a test is about to clear."""
    from datasets.table import InMemoryTable

    if dataset._indices is not None:
        dataset._indices = InMemoryTable(
            pa.table({"indices": pa.array(dataset._indices.column(0).to_pylist(), pa.uint64())})
        )
    return dataset


ROWS = st.lists(
    st.lists(st.sampled_from([-100, 1, 2]), min_size=1, max_size=6), min_size=1, max_size=12
)


@EQUAL_TO_STOCK
@given(
    ROWS, st.integers(1, 6), st.sampled_from([None, 1, 3]), st.sampled_from(["drop", "truncate"])
)
def test_any_lengths_are_handled_as_by_stock(
    utils: Any, config: Any, rows: Any, longest: int, shortest: int | None, strategy: str
) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"labels": rows, "input_ids": [row[::-1] for row in rows]})
    dataset = dataset.select(np.random.default_rng(longest).permutation(len(rows)).tolist())
    cfg = config({"min_sample_len": shortest, "excess_length_strategy": strategy})
    lengths = np.array([len(row) for row in rows])
    least = shortest or 2
    if not ((lengths >= least) & ((lengths <= longest) | (strategy == "truncate"))).any():
        with pytest.raises(Unfamiliar, match="no row is left"):
            handle_long_seq_in_dataset(dataset, longest, cfg)
        return
    ours = handle_long_seq_in_dataset(dataset, longest, cfg)
    assert_same_dataset(ours, utils.handle_long_seq_in_dataset(dataset, longest, cfg))


def test_truncation_cuts_the_columns_that_stock_cuts(utils: Any, config: Any) -> None:
    from datasets import Dataset

    columns = {
        "input_ids": [[1, 2, 3, 4], [1, 2], [1, 2, 3]],
        "labels": [[1, 2], [1, 2, 3, 4, 5], [1, None, 3]],
        "attention_mask": [[1] * 4, [], [1] * 3],
        "position_ids": [[0, 1, 2, 3], [0, 1], [0, 1, 2]],
        "token_type_ids": [[0] * 4, [0] * 2, [0] * 3],
        "length": [4, 2, 3],
        "text": ["a", None, "c"],
    }
    cfg = config({"excess_length_strategy": "truncate"})
    ours, theirs = both(
        utils,
        utils.handle_long_seq_in_dataset,
        handle_long_seq_in_dataset,
        Dataset.from_dict(columns),
        2,
        cfg,
    )
    assert_same_dataset(ours, theirs)
    assert ours["token_type_ids"][0] == [0] * 4


@pytest.mark.parametrize(
    ("dataset", "longest", "options"),
    [
        ({"text": ["x"]}, 9, {}),
        ({"input_ids": [[1, 2], None]}, 9, {}),
        ({"input_ids": [[1.5, 2.5]]}, 9, {}),
        ({"input_ids": [[1, 2]]}, 9.5, {}),
        ({"input_ids": [[1, 2]]}, 0, {}),
        ({"input_ids": [[1, 2]]}, 9, {"min_sample_len": "2"}),
        ({"input_ids": [[1, 2]]}, 9, {"dataset_num_proc": 0}),
        ({"input_ids": [[1, 2]]}, 1, {"excess_length_strategy": "raise"}),
        ({"input_ids": [[1, 2]]}, 1, {}),
        ({"input_ids": pa.array([], pa.list_(pa.int64()))}, 1, {}),
        ({"input_ids": [[1, 2]], "labels": [[1.5]]}, 1, {"excess_length_strategy": "truncate"}),
        ({"input_ids": [[1, 2]], "labels": [None]}, 1, {"excess_length_strategy": "truncate"}),
    ],
)
def test_odd_lengths_are_left_to_stock(
    utils: Any, config: Any, dataset: Any, longest: Any, options: dict[str, Any]
) -> None:
    from datasets import Dataset

    with logged(utils) as lines, pytest.raises(Unfamiliar):
        handle_long_seq_in_dataset(Dataset(pa.table(dataset)), longest, config(options))
    assert lines == []


# Packing.

PACKINGS: list[dict[str, Any]] = [
    {},
    {"sample_packing": True},
    {"sample_packing": True, "eval_sample_packing": True, "dataset_num_proc": 2},
    {"group_by_length": True},
    {"group_by_length": True, "sample_packing": True},
    {"model_config_type": "gemma3", "sample_packing": True},
    {"model_config_type": "mistral", "sample_packing": True, "eval_sample_packing": True},
]


@pytest.mark.parametrize("options", PACKINGS, ids=str)
@pytest.mark.parametrize("name", FILLED)
def test_packing_prepares_what_stock_prepares(
    trainer: Any, config: Any, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    dataset = variants(tmp_path)[name]
    lengths = [len(row) for row in dataset["input_ids"]]
    dataset = dataset.select([row for row, length in enumerate(lengths) if length])
    dataset = in_memory_indices(dataset)
    cfg = config({"is_preprocess": True, **options})
    other = tokenised(20, seed=8).filter(lambda row: len(row["input_ids"]))
    ours, theirs = both(
        trainer,
        trainer.process_datasets_for_packing,
        process_datasets_for_packing,
        cfg,
        dataset,
        other,
    )
    for left, right in zip(ours, theirs, strict=True):
        assert_same_dataset(left, right)


@EQUAL_TO_STOCK
@given(ROWS, ROWS)
def test_any_labels_are_judged_as_by_stock(
    trainer: Any, config: Any, train: Any, evaluation: Any
) -> None:
    from datasets import Dataset

    train, evaluation = (
        Dataset.from_dict({"input_ids": [[7] * len(row) for row in rows], "labels": rows})
        for rows in (train, evaluation)
    )
    cfg = config({"sample_packing": True, "eval_sample_packing": True})
    if any(set(chain(*item["labels"])) == {-100} for item in (train, evaluation)):
        with pytest.raises(Unfamiliar, match="no row is left"):
            process_datasets_for_packing(cfg, train, evaluation)
        return
    ours = process_datasets_for_packing(cfg, train, evaluation)
    theirs = trainer.process_datasets_for_packing(cfg, train, evaluation)
    for left, right in zip(ours, theirs, strict=True):
        assert_same_dataset(left, right)


def test_rows_without_labels_stay_in_the_evaluation_only(trainer: Any, config: Any) -> None:
    from datasets import Dataset, Features, List, Value

    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int64"))})
    columns = {"input_ids": [[1], [], [2], [3, 4]], "labels": [[], [], [-100], [-100, 3]]}
    dataset = Dataset.from_dict(columns, features=features)
    ours, theirs = both(
        trainer,
        trainer.process_datasets_for_packing,
        process_datasets_for_packing,
        config({}),
        dataset,
        dataset,
    )
    for left, right in zip(ours, theirs, strict=True):
        assert_same_dataset(left, right)
    assert [len(item) for item in ours] == [1, 3]


@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
def test_position_ids_across_batches(trainer: Any, config: Any, count: int) -> None:
    from datasets import Dataset

    rng = np.random.default_rng(count)
    rows = [rng.integers(-100, -98, rng.integers(1, 9)).tolist() for _ in range(count)]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows, "n": list(range(count))})
    cfg = config({"sample_packing": True})
    for item in (dataset, dataset.shuffle(seed=1), subclassed(dataset)):
        ours, none = process_datasets_for_packing(cfg, item, None)
        theirs, _ = trainer.process_datasets_for_packing(cfg, item, None)
        assert none is None
        assert_same_dataset(ours, theirs)
        assert [str(kind) for kind in (ours.features["position_ids"], ours.features["length"])] == [
            "List(Value('int64'))",
            "Value('int64')",
        ]


def test_the_fingerprint_is_that_of_stock_also_when_stock_is_wrapped(
    trainer: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer.process_datasets_for_packing

    @functools.wraps(real)
    def wrapper(*args: Any) -> Any:
        raise AssertionError("not called")

    monkeypatch.setattr(trainer, "process_datasets_for_packing", wrapper)
    ours, _ = process_datasets_for_packing(config({}), tokenised(9), None)
    theirs, _ = real(config({}), tokenised(9), None)
    assert_same_dataset(ours, theirs)


@pytest.mark.parametrize("name", FILLED)
def test_steps_of_few_rows_change_nothing(
    utils: Any, config: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(axolotl_data, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(axolotl_filters, "_ROWS_AT_ONCE", 4)
    dataset = in_memory_indices(variants(tmp_path)[name])
    args = dataset, 3, config({"excess_length_strategy": "truncate"})
    ours, theirs = both(utils, utils.handle_long_seq_in_dataset, handle_long_seq_in_dataset, *args)
    assert_same_dataset(ours, theirs)


def test_existing_columns_are_written_over_in_place(trainer: Any, config: Any) -> None:
    from datasets import Dataset

    columns = {"position_ids": [[5, 5]], "length": [9], "labels": [[1, 2]], "input_ids": [[3, 4]]}
    dataset = Dataset.from_dict(columns)
    cfg = config({"sample_packing": True})
    ours, _ = process_datasets_for_packing(cfg, dataset, None)
    theirs, _ = trainer.process_datasets_for_packing(cfg, dataset, None)
    assert_same_dataset(ours, theirs)
    assert ours.column_names == list(columns)


def test_an_empty_evaluation_is_given_back(trainer: Any, config: Any) -> None:
    dataset, empty = tokenised(20), tokenised(3).select([])
    for other in (None, empty):
        _, given_back = process_datasets_for_packing(config({}), dataset, other)
        assert given_back is other


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"input_ids": [[1]], "labels": [[-100]]}, {}),
        ({"input_ids": [[1]], "labels": [None]}, {}),
        ({"input_ids": [[1]], "labels": [[1, None]]}, {}),
        ({"input_ids": [[1]], "labels": [[1.5]]}, {}),
        ({"input_ids": [[1]], "labels": [1]}, {}),
        ({"input_ids": [[1]], "labels": [[[1]]]}, {}),
        ({"input_ids": [[1]]}, {}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"use_pose": True}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"dataset_num_proc": -1}),
        ({"input_ids": [[1]], "labels": [[1]]}, {"model_config_type": "mamba"}),
        ({"input_ids": [[]], "labels": [[1]]}, {"sample_packing": True}),
        ({"input_ids": [None], "labels": [[1]]}, {"group_by_length": True}),
        ({"input_ids": [[1, None]], "labels": [[1]]}, {"sample_packing": True}),
        ({"labels": [[1]]}, {"sample_packing": True}),
        ({"input_ids": [[1]], "labels": [[1]], "length": ["x"]}, {"group_by_length": True}),
    ],
    ids=str,
)
def test_odd_packings_are_left_to_stock(
    trainer: Any, config: Any, columns: Any, options: dict[str, Any]
) -> None:
    from datasets import Dataset

    dataset = Dataset(pa.table(columns))
    before = (dataset._fingerprint, dataset.data.table)
    with logged(trainer) as lines, pytest.raises(Unfamiliar):
        process_datasets_for_packing(config(options), dataset, None)
    assert lines == []
    assert (dataset._fingerprint, dataset.data.table) == before


def test_other_kinds_of_datasets_are_left_to_stock(config: Any) -> None:
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


def prepare(module: Any, folder: Path, config: Any, **options: Any) -> Any:
    """Both steps on a dataset on disk, by stock's functions or by ours."""
    from datasets import load_from_disk

    dataset = load_from_disk(str(folder))
    cfg = config({"sample_packing": True, "min_sample_len": 1, **options})
    steps = module.handle_long_seq_in_dataset, module.process_datasets_for_packing
    dataset = steps[0](dataset, 3, cfg)
    return steps[1](cfg, dataset, None)[0]


class Stock:
    def __init__(self, stock: Callable[[str], Any]) -> None:
        utils, trainer = stock("axolotl.utils.data.utils"), stock("axolotl.utils.trainer")
        self.handle_long_seq_in_dataset = utils.handle_long_seq_in_dataset
        self.process_datasets_for_packing = trainer.process_datasets_for_packing


def caches(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("cache-*")}


@pytest.mark.parametrize("num_proc", [None, 2])
def test_caches_serve_stock_and_ours_alike(
    stock: Callable[[str], Any], config: Any, tmp_path: Path, num_proc: int | None
) -> None:
    ours_first, stock_first = tmp_path / "ours", tmp_path / "stock"
    tokenised(50).save_to_disk(str(ours_first))
    shutil.copytree(ours_first, stock_first)
    ours: Any = axolotl_filters
    for folder, first, second in (
        (ours_first, ours, Stock(stock)),
        (stock_first, Stock(stock), ours),
    ):
        made = prepare(first, folder, config, dataset_num_proc=num_proc)
        files = caches(folder)
        assert files
        assert {Path(item["filename"]).parent for item in made.cache_files} == {folder}
        assert_same_dataset(prepare(second, folder, config, dataset_num_proc=num_proc), made)
        assert_same_dataset(prepare(first, folder, config, dataset_num_proc=num_proc), made)
        assert caches(folder) == files
    names = [{name.split("_")[0] for name in caches(item)} for item in (ours_first, stock_first)]
    assert {name.removesuffix(".arrow") for name in names[0]} == {
        name.removesuffix(".arrow") for name in names[1]
    }


def test_preprocessing_writes_its_caches_anew(
    stock: Callable[[str], Any], config: Any, tmp_path: Path
) -> None:
    tokenised(50).save_to_disk(str(tmp_path / "rows"))
    ours: Any = axolotl_filters
    made = prepare(ours, tmp_path / "rows", config)
    before = caches(tmp_path / "rows")
    again = prepare(ours, tmp_path / "rows", config, is_preprocess=True)
    assert_same_dataset(again, made)
    after = caches(tmp_path / "rows")
    assert after.keys() == before.keys()
    assert all(after[name] > before[name] for name in before)


def test_without_caching_the_files_are_temporary(config: Any, tmp_path: Path) -> None:
    import datasets

    tokenised(50).save_to_disk(str(tmp_path / "rows"))
    ours: Any = axolotl_filters
    datasets.disable_caching()
    try:
        made = prepare(ours, tmp_path / "rows", config)
    finally:
        datasets.enable_caching()
    assert caches(tmp_path / "rows") == {}
    assert made.cache_files
    assert len(made) == len(prepare(ours, tmp_path / "rows", config))


def test_an_error_midway_leaves_no_file_behind(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_from_disk

    def fail(_: Any) -> None:
        raise MemoryError

    tokenised(50).save_to_disk(str(tmp_path / "rows"))
    dataset = load_from_disk(str(tmp_path / "rows"))
    monkeypatch.setattr(axolotl_filters, "_token_lengths", fail)
    with pytest.raises(MemoryError):
        process_datasets_for_packing(config({"group_by_length": True}), dataset, None)
    left = {path.name for path in (tmp_path / "rows").iterdir()}
    assert {name for name in left if not name.startswith("cache-")} == {
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    }


def test_the_process_is_left_as_by_a_fork(config: Any) -> None:
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


@pytest.mark.parametrize("num_proc", [None, 1, 2])
def test_a_split_is_kept_or_forgotten_as_by_stock(
    trainer: Any, config: Any, num_proc: int | None
) -> None:
    from datasets import Dataset

    plain = tokenised(40).filter(lambda row: len(row["input_ids"]))
    dataset = Dataset.from_dict(plain.to_dict(), split="train")
    cfg = config({"is_preprocess": True, "sample_packing": True, "dataset_num_proc": num_proc})
    ours, theirs = both(
        trainer,
        trainer.process_datasets_for_packing,
        process_datasets_for_packing,
        cfg,
        dataset,
        None,
    )
    assert_same_dataset(ours[0], theirs[0])
