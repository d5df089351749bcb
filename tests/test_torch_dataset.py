"""The torch face: ranks and workers, fork and spawn, and torchdata's stateful loader."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.children import run_ranks
from support.files import SMALL_BUDGET, make_rows, write_jsonl, write_parquet

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import DataLoader  # noqa: E402

from fast_axolotl.errors import ResumeError, UsageError  # noqa: E402
from fast_axolotl.integrations.torch import TorchDataset  # noqa: E402
from support import torch_layouts  # noqa: E402

NUM_ROWS = 1200
ALL = list(range(NUM_ROWS))

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
"""torchdata's own, more workers than processors, and Python 3.12's word on fork."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    return write_jsonl(folder / "rows.jsonl", make_rows(NUM_ROWS, 800))


def dataset(path: Path, **options: Any) -> TorchDataset:
    settings = {"batch_size": 50, "memory_budget": SMALL_BUDGET, "num_threads": 1}
    return TorchDataset(path, **{**settings, **options})


def ids_of(items: Any) -> list[int]:
    """Of batches or of single rows."""
    return [n for item in items for n in torch.as_tensor(item["id"]).reshape(-1).tolist()]


def collate(rows: list[Any]) -> dict[str, Any]:
    return {"id": [row["id"] for row in rows]}


def test_ranks_come_from_the_environment_and_workers_divide_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    of_ranks: list[int] = []
    of_workers: list[int] = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        data = dataset(path, num_threads=2)
        batches = iter(data)
        own = ids_of([next(batches)])
        of_workers += ids_of(DataLoader(data, batch_size=None, num_workers=2))
        own += ids_of(batches)  # workers may follow a read in the parent
        assert own == ids_of(DataLoader(data, batch_size=None))
        assert own == ids_of(dataset(path, shard=(rank, 2)))
        of_ranks += own

    assert sorted(of_ranks) == sorted(of_workers) == ALL


def test_a_process_group_and_an_explicit_shard_win_over_the_variables(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert ids_of(dataset(path, shard=(0, 1))) == ALL
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        loader = DataLoader(
            dataset(path), batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        assert ids_of(dataset(path)) == ALL
        assert ids_of(loader) == ALL
    finally:
        torch.distributed.destroy_process_group()


def test_outputs_and_single_rows_have_the_same_values(tmp_path: Path) -> None:
    rows = make_rows(20)
    path = write_parquet(tmp_path / "rows.parquet", rows)

    batch = next(iter(DataLoader(TorchDataset(path), batch_size=None)))
    assert torch.equal(batch["id"], torch.arange(20))
    assert batch["tokens"]["offsets"].shape == (21,)
    assert isinstance(batch["text"][0], str)
    arrow = list(DataLoader(TorchDataset(path, output="arrow"), batch_size=None))
    assert arrow[0].to_pylist() == rows
    python = next(iter(TorchDataset(path, output="python")))
    assert [
        dict(zip(python, values, strict=True)) for values in zip(*python.values(), strict=True)
    ] == rows
    assert list(TorchDataset(path, rows=True, output="python", batch_size=7)) == rows
    for output in ("numpy", "torch"):
        found = list(TorchDataset(path, rows=True, output=output, batch_size=7))
        assert [row["tokens"].tolist() for row in found] == [row["tokens"] for row in rows]
        assert [int(row["id"]) for row in found] == [row["id"] for row in rows]
    with pytest.raises(UsageError, match="rows=True yields dicts"):
        TorchDataset(path, rows=True, output="arrow")


@pytest.mark.parametrize(("rows", "even"), [(False, "drop"), (True, "pad")])
def test_an_even_dataset_knows_its_length(path: Path, even: str, rows: bool) -> None:
    for workers in (0, 2):
        lengths = set()
        for rank in (0, 2):
            options = {"even": even, "rows": rows, "batch_size": 23, "num_workers": workers}
            data = dataset(path, shard=(rank, 3), **options)
            size = 50 if rows else None
            loader = DataLoader(data, batch_size=size, collate_fn=list, num_workers=workers)
            lengths |= {len(data), sum(len(batch) if rows else 1 for batch in loader)}
        assert len(lengths) == 1
    with pytest.raises(TypeError, match="only with even"):
        len(dataset(path))


def test_a_short_batch_in_mid_stream_is_refused_where_a_dispatcher_would_lose_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", pa.table({"id": range(300_000)}))
    data = dataset(path, batch_size=300_000)
    assert [len(batch["id"]) < 300_000 for batch in data] == [True, True]
    monkeypatch.setattr(TorchDataset, "_layout", lambda data: (0, 2, True))

    with pytest.raises(UsageError, match="pass a smaller batch_size, or even"):
        list(data)
    assert (
        sum(len(batch["id"]) for batch in dataset(path, batch_size=299_000, even="drop")) == 300_000
    )


# State.


def stateful_loader(data: TorchDataset, num_workers: int, state: Any = None, **options: Any) -> Any:
    options = {"batch_size": None, "num_workers": num_workers, **options}
    loader = stateful.StatefulDataLoader(data, **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def stop_after(loader: Any, count: int) -> tuple[list[int], Any]:
    """The rows of the first batches, and the state after them."""
    batches = iter(loader)
    return ids_of(islice(batches, count)), pickle.loads(pickle.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *(("in order", 2), ("shuffled", 0), ("shuffled", 2), ("rows", 0), ("rows", 2)),
        *(("a mix", 2), ("rows of a mix", 0)),
    ],
)
def test_a_stateful_loader_resumes_with_the_identical_tail(
    path: Path, sources: Any, kind: str, num_workers: int
) -> None:
    rows, is_mix = kind.startswith("rows"), kind.endswith("mix")
    options = {"batch_size": 7, "collate_fn": collate} if rows else {}

    def make(state: Any = None) -> Any:
        if is_mix:
            data = mixed(sources, rows=rows, even="pad")
        else:
            data = dataset(path, rows=rows, shuffle=None if kind == "in order" else 4)
        return stateful_loader(data, num_workers, state, **options)

    whole = ids_of(make())
    assert is_mix or sorted(whole) == ALL
    for stop in (0, 9):
        first, state = stop_after(make(), stop)
        resumed = make(state)
        again = make(resumed.state_dict())
        assert first + ids_of(resumed) == first + ids_of(again) == whole
        # The pass after a resumed one reads everything, and so does that after a finished one.
        if not is_mix:
            assert sorted(ids_of(resumed)) == ALL
    if not is_mix:
        assert sorted(ids_of(make(stop_after(make(), NUM_ROWS)[1]))) == ALL


def test_a_loaded_state_belongs_to_its_epoch(path: Path) -> None:
    data = dataset(path, shuffle=3, epoch=2)
    batches = iter(data)
    first = ids_of(islice(batches, 4))
    state = data.state_dict()
    resumed = dataset(path, shuffle=3)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)

    assert first + ids_of(resumed) == ids_of(dataset(path, shuffle=3, epoch=2))

    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    assert ids_of(resumed) == ids_of(dataset(path, shuffle=3, epoch=3))


@pytest.mark.parametrize(("num_workers", "keeps_workers"), [(0, False), (2, False), (2, True)])
def test_each_full_pass_is_another_epoch(path: Path, num_workers: int, keeps_workers: bool) -> None:
    options = {"num_workers": num_workers, "persistent_workers": keeps_workers}

    def read(epoch: int) -> list[int]:
        data = dataset(path, shuffle=3, epoch=epoch)
        return ids_of(DataLoader(data, batch_size=None, num_workers=num_workers))

    data = dataset(path, shuffle=3)
    loader = stateful_loader(data, **options)
    passes = [ids_of(loader) for _ in range(3)]
    assert passes == [read(epoch) for epoch in range(3)]
    assert len(set(map(tuple, passes))) == 3
    next(iter(loader))
    data.set_epoch(1)
    assert ids_of(loader) == passes[1]
    first, state = stop_after(loader, 5)
    resumed = stateful_loader(dataset(path, shuffle=3), state=state, **options)
    assert first + ids_of(resumed) == passes[2]
    assert ids_of(resumed) == read(3)


def test_states_that_cannot_be_continued_are_refused(path: Path) -> None:
    data = dataset(path)
    with pytest.raises(ResumeError, match="no state"):
        data.load_state_dict({})
    loader = stateful_loader(data, 2, snapshot_every_n_steps=5)
    next(iter(loader))
    with pytest.raises(ResumeError, match="snapshot_every_n_steps"):
        dataset(path).load_state_dict(loader.state_dict())
    alone = dataset(path, shard=(0, 2)).state_dict()
    data.load_state_dict(alone)
    with pytest.raises(ResumeError, match="shard 1 of 2 is missing"):
        iter(data)


# Mixes.

CHAT, CODE = range(700), range(700, 1000)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Two sources that last about equally long."""
    folder = tmp_path_factory.mktemp("mix")
    chat = pa.table({"id": CHAT, "only": ["chat"] * len(CHAT)})
    code = write_jsonl(folder / "code.jsonl", [{"id": number} for number in CODE])
    chats = write_parquet(folder / "chat.parquet", chat, row_group_size=10)
    return {"chat": (chats, 7), "code": ([code], 3)}


def mixed(sources: Any, **options: Any) -> TorchDataset:
    return dataset(sources, **{"stop": "all", "shuffle": 5, **options})


@pytest.mark.parametrize("rows", [False, True])
def test_workers_mix_their_shares_of_each_source(sources: Any, rows: bool) -> None:
    data = mixed(sources, rows=rows, source_column="source", even="drop", num_workers=2)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    found = list(loader)
    ids = ids_of(found)

    assert len(found) == len(data)
    assert set(ids) == {*CHAT, *CODE}
    assert len(ids) <= 1010
    assert abs(sum(number < 700 for number in ids[:100]) - 70) <= 4
    names = [name for item in found for name in ([item["source"]] if rows else item["source"])]
    assert names == ["chat" if number < 700 else "code" for number in ids]
    data.set_epoch(1)
    assert ids_of(islice(loader, 5)) != ids_of(found[:5])


# Two real ranks see every row in every layout, or both are told what to do instead.


ODD = list(range(403))
"""An odd number, so that no division is even."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    rows: list[dict[str, Any]] = [{"id": number, "score": number / 8} for number in ODD]
    write_parquet(folder / "flat.parquet", rows, row_group_size=40)
    for half in range(2):
        own = rows[200 * half : 200 + 203 * half]
        write_parquet(folder / f"mix-{half}.parquet", own, row_group_size=10)
    rows = [{**row, "tokens": ODD[: row["id"] % 5]} for row in rows]
    write_parquet(folder / "ragged.parquet", rows, row_group_size=40)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    job |= {"TORCHELASTIC_RUN_ID": "layouts"}
    run_ranks(sys.executable, torch_layouts.__file__, count=2, cwd=folder, **job)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in "01"]


@pytest.mark.parametrize("layout", torch_layouts.LAYOUTS)
def test_two_ranks_see_every_row_or_are_refused(seen: list[dict[str, Any]], layout: str) -> None:
    of_ranks = [rank[layout] for rank in seen]
    expected = torch_layouts.LAYOUTS[layout][0]
    if of_ranks[0] is None:
        pytest.skip("a package is missing")
    if expected == "same":
        assert of_ranks == [ODD, ODD]
    elif isinstance(expected, str):
        assert all(isinstance(said, str) and re.search(expected, said) for said in of_ranks)
    else:
        assert all(isinstance(ids, list) for ids in of_ranks), of_ranks
        has_epochs = isinstance(of_ranks[0][0], list)
        for first, second in zip(*of_ranks, strict=True) if has_epochs else [of_ranks]:
            counts = Counter([*first, *second])
            assert sorted(counts) == ODD
            assert sum(counts.values()) - len(ODD) <= expected
