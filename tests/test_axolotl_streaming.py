"""Streams with our buffers: what Hugging Face and Axolotl give, and exact resume."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fast_axolotl.axolotl.patching import Final, NotAsked, Unfamiliar
from support.axolotl import STOCK_AXOLOTL, Later, config, log_lines, needs, word_tokenizer
from support.files import flat_rows, make_rows, write_csv, write_jsonl, write_parquet

pytestmark = [*STOCK_AXOLOTL, needs("stream")]

ROWS = 700

streaming = Later("fast_axolotl.axolotl.streaming")
sft = Later("axolotl.utils.data.sft")


tokenizer = functools.cache(word_tokenizer)


def jsonl(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    return write_jsonl(folder / "a.jsonl", make_rows(ROWS) if rows is None else rows)


FILES: dict[str, Callable[[Path], Path]] = {
    "json": jsonl,
    "parquet": lambda d: write_parquet(d / "a.parquet", make_rows(ROWS), 100),
    "csv": lambda d: write_csv(d / "a.csv", flat_rows(ROWS)),
}


def load(kind: str, path: Any, **options: Any) -> Any:
    from datasets import load_dataset

    paths = [str(item) for item in path] if isinstance(path, list) else str(path)
    return load_dataset(kind, data_files=paths, split="train", streaming=True, **options)


def exchange(dataset: Any, buffer_bytes: int = 1 << 30) -> Any:
    return streaming.bounded_files(dataset, {"fast_axolotl_buffer_bytes": buffer_bytes})


def pair(kind: str, path: Any) -> tuple[Any, Any]:
    return load(kind, path), exchange(load(kind, path))


def plain(dataset: Any) -> list[Any]:
    return [json.loads(json.dumps(row, default=_listed)) for row in dataset]


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def files_of(folder: Path, count: int) -> list[Path]:
    rows = make_rows(ROWS)
    cut = [rows[ROWS * i // count : ROWS * (i + 1) // count] for i in range(count)]
    return [write_jsonl(folder / f"{i}.jsonl", part) for i, part in enumerate(cut)]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_ranks_and_epochs_get_the_rows_that_hugging_face_gives_them(
    tmp_path: Path, count: int
) -> None:
    from datasets.distributed import split_dataset_by_node

    both = pair("json", files_of(tmp_path, count))
    seen = []
    for rank in range(2):
        theirs, mine = (list(split_dataset_by_node(x, rank=rank, world_size=2)) for x in both)
        assert mine == theirs
        seen += [row["id"] for row in mine]
    assert sorted(seen) == list(range(ROWS))
    # Mapped before, as Axolotl's merged streams are: datasets 5 shuffles files in another way.
    both = tuple(x.map(lambda row: row).shuffle(seed=5, buffer_size=20) for x in both)
    for epoch in range(3):
        for dataset in both:
            dataset.set_epoch(epoch)
        theirs, mine = ([row["id"] for row in dataset] for dataset in both)
        assert mine == theirs


PIPELINES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda d: d,
    "skip": lambda d: d.skip(11),
    "map by row": lambda d: d.map(lambda row: {"n": row["id"]}),
    "map by batch": lambda d: d.map(lambda rows: {"n": rows["id"]}, batched=True, batch_size=37),
    "filter, take and columns": lambda d: (
        d.filter(lambda row: row["id"] % 3 > 0)
        .select_columns(["id", "text"])
        .rename_column("text", "content")
        .remove_columns(["content"])
        .take(400)
    ),
    "filter by batch": lambda d: d.filter(
        lambda rows: [number % 3 > 0 for number in rows["id"]], batched=True, batch_size=37
    ),
    "shuffle": lambda d: d.shuffle(seed=3, buffer_size=40),
    "shuffle and map": lambda d: d.shuffle(seed=3, buffer_size=40).map(
        lambda rows: {"n": rows["id"]}, batched=True, batch_size=37
    ),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", PIPELINES)
def test_the_methods_of_a_dataset_give_the_same(tmp_path: Path, kind: str, name: str) -> None:
    theirs, mine = pair(kind, FILES[kind](tmp_path))
    assert (mine.features, mine.num_shards, mine.split) == (theirs.features, 1, theirs.split)
    expected, found = (PIPELINES[name](dataset) for dataset in (theirs, mine))
    assert type(found) is streaming.BoundedDataset
    assert found.column_names == expected.column_names
    assert plain(found) == plain(expected)
    assert plain(found.with_format("numpy")) == plain(expected.with_format("numpy"))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("buffer_bytes", [1 << 30, 2000])
def test_resume_at_any_row_and_again_gives_the_same_tail(
    tmp_path: Path, name: str, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_MARK_ROWS", 100)
    paths = files_of(tmp_path, 1 if "shuffle" in name else 2)  # see BoundedDataset.shuffle

    def make() -> Any:
        return PIPELINES[name](exchange(load("json", paths), buffer_bytes))

    expected = [row["id"] for row in make()]
    for stop in (0, 1, 37, 350, len(expected) - 20, len(expected) - 1):
        seen, state = list[int](), None
        for count in (stop, 19, len(expected)):
            dataset = make()
            dataset.load_state_dict(state or dataset.state_dict())
            seen += [row["id"] for row in islice(dataset, count)]
            state = json.loads(json.dumps(dataset.state_dict()))
        assert seen == expected, stop


def drawn(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Draws from torch's generator, as Axolotl's packing does."""
    import torch

    return {"n": rows["id"], "drawn": torch.randint(1000, (len(rows["id"]),)).tolist()}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_draws_the_numbers_of_hugging_face(tmp_path: Path, workers: int) -> None:
    import torch
    from torch.utils.data import DataLoader

    def read(dataset: Any) -> list[Any]:
        torch.manual_seed(7)
        mapped = dataset.map(drawn, batched=True, batch_size=37)
        loader = DataLoader(mapped, batch_size=None, num_workers=workers)
        return [[(row["n"], row["drawn"]) for row in loader] for _ in range(2)]

    theirs, mine = (read(dataset) for dataset in pair("json", files_of(tmp_path, 2)))
    assert mine == theirs
    assert mine[0] != mine[1]


def test_a_batch_that_is_made_again_draws_what_it_drew_before(tmp_path: Path) -> None:
    import torch

    path = files_of(tmp_path, 1)

    def make() -> Any:
        return exchange(load("json", path)).map(drawn, batched=True, batch_size=37)

    torch.manual_seed(7)
    expected = list(make())
    torch.manual_seed(7)
    dataset = make()
    iterator = iter(dataset)
    head = [next(iterator) for _ in range(80)]
    state, now = dataset.state_dict(), torch.get_rng_state()
    torch.manual_seed(8)
    again = make()
    again.load_state_dict(state)
    rest = iter(again)
    torch.set_rng_state(now)
    assert head + list(rest) == expected


def test_what_is_not_plainly_files_is_refused(tmp_path: Path) -> None:
    from datasets import Image, IterableDataset

    rows = load("json", jsonl(tmp_path))
    decoded = load("json", jsonl(tmp_path))
    decoded._ex_iterable.generate_tables_fn.__self__.info.features["text"] = Image()
    made = IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    for dataset in (made, rows.with_format("numpy"), rows.map(dict), decoded):
        with pytest.raises(Unfamiliar):
            exchange(dataset)


def test_buffers_of_large_rows_end_at_their_bytes(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"id": i, "text": "x" * 50_000} for i in range(60)])
    sizes: list[int] = []

    def note(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        sizes.append(len(rows["text"]))
        return {"id": rows["id"]}

    mine = exchange(load("json", path), 200_000)
    mapped = mine.shuffle(seed=1, buffer_size=10_000).map(note, batched=True, batch_size=10_000)
    assert sorted(row["id"] for row in mapped) == list(range(60))
    assert max(sizes) <= 4


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_a_pretraining_stream_gives_the_batches_of_axolotl(
    tmp_path: Path, packed: bool, shuffled: bool
) -> None:
    import torch

    path = jsonl(tmp_path, [{"text": t, "id": i} for i, t in enumerate(texts(400))])
    found = []
    for load_streaming in (sft._load_streaming_dataset, streaming.load_streaming_dataset):
        cfg = pretraining(path, sample_packing=packed, shuffle_merged_datasets=shuffled)
        torch.manual_seed(11)
        dataset = load_streaming(sft._extract_pretraining_config(cfg), cfg, tokenizer())
        rows = [{name: value.tolist() for name, value in row.items()} for row in dataset]
        found.append((rows, dataset.column_names, cfg.micro_batch_size, torch.rand(1).item()))
    assert found[1] == found[0]
    assert found[0][0], "there is something to compare"


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        " ".join(f"w{n}" for n in rng.integers(0, 50, rng.integers(1, 60))) for _ in range(count)
    ]


def pretraining(path: Path, **options: Any) -> Any:
    source = {"path": "json", "data_files": str(path), "type": "pretrain", "split": "train"}
    return config(
        {
            "pretraining_dataset": [{**source, "name": None, "skip": 0, "text_column": "text"}],
            "sequence_len": 64,
            "micro_batch_size": 2,
            "sample_packing_bin_size": 200,
            "pretrain_multipack_attn": True,
            "pretraining_sample_concatenation": True,
            "streaming_multipack_buffer_size": 90,
            "seed": 42,
            "dataset_use_rust_streaming": True,
            **options,
        }
    )


def test_without_the_switch_and_with_rows_to_skip_axolotl_runs_untouched(tmp_path: Path) -> None:
    for switch, skip, wanted in ((None, 0, NotAsked), (True, 40, Unfamiliar)):
        cfg = pretraining(jsonl(tmp_path), sample_packing=True, dataset_use_rust_streaming=switch)
        before = dict(cfg)
        source = sft._extract_pretraining_config(cfg)
        source.update(skip=skip)
        with log_lines(sft.__name__) as lines, pytest.raises(wanted):
            streaming.load_streaming_dataset(source, cfg, tokenizer())
        assert (dict(cfg), lines) == (before, [])


@pytest.mark.parametrize("before", [True, False])
def test_streamed_datasets_are_merged_as_by_axolotl_and_resume(
    tmp_path: Path, before: bool
) -> None:
    paths = files_of(tmp_path, 3)
    cfg = config({"shuffle_before_merging_datasets": before, "shuffle_merged_datasets": True})
    cfg.seed = 3
    shared = Later("axolotl.utils.data.shared")
    loaded = [load("json", path).map(lambda row: row) for path in paths]
    expected = [row["id"] for row in shared.merge_datasets(loaded, cfg)]

    def make() -> Any:
        streams = [exchange(load("json", path)).map(lambda row: row) for path in paths]
        return streaming.merge_datasets(streams, cfg)

    dataset, again = make(), make()
    rows = iter(dataset)
    head = [next(rows)["id"] for _ in range(300)]
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert head + [row["id"] for row in again] == expected
    with pytest.raises(Unfamiliar):
        streaming.merge_datasets([make()], cfg)


def test_a_streamed_sft_dataset_is_that_of_axolotl(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": t} for t in texts(50)])
    found = []
    functions = (
        sft._load_and_process_single_dataset,
        streaming.load_and_process_single_dataset,
    )
    for function in functions:
        cfg = pretraining(path, train_on_inputs=True)
        source = config({"path": str(path), "type": "completion", "ds_type": "json"})
        dataset, _ = function(source, cfg, tokenizer(), "train", 42, streaming=True)
        found.append((list(dataset), dataset.column_names))
    assert found[1] == found[0]
    assert len(found[0][0]) == 50
    # Axolotl's own error is the caller's: it does not start again.
    unknown = config({**source, "type": "no such type"})
    with pytest.raises(Final, match="unhandled prompt tokenization strategy"):
        function(unknown, cfg, tokenizer(), "train", 42, streaming=True)
    assert sft.load_dataset_with_config.__module__ == "axolotl.utils.data.shared"
