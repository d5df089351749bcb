"""One rank of two: reads the same rows in every layout and says what it saw, or was told, in each.

Run as rank ``RANK`` in a folder that holds ``flat.parquet`` and ``ragged.parquet``, and halves of
the rows in ``mix-0.parquet`` and ``mix-1.parquet``. Writes ``RANK.json``: layout → the ids that
this rank saw, one list or one for each epoch; or the refusal; or null where a package is missing. A
spawned worker imports this module, so accelerate and the trainers are imported where they are used.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from fast_axolotl.errors import FastAxolotlError
from fast_axolotl.integrations.torch import TorchDataset

Ids = list[int]
RANK = int(os.environ.get("RANK", "0"))
LAYOUTS: dict[str, tuple[int | str, Callable[[], Any]]] = {}
"""Layout → how many rows accelerate may repeat to fill up the last batch, or ``same``: both ranks
see the same, or a pattern of the refusal; and what to do."""


def layout(text: str, expected: int | str = 0, **options: Any) -> Callable[..., Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        LAYOUTS[text] = expected, lambda: function(**options)
        return function

    return add


def data(file: str = "flat", **options: Any) -> TorchDataset:
    options = {"batch_size": 10, "num_threads": 1, **options}
    if file == "mix":
        halves = {"first": ("mix-0.parquet", 200), "second": ("mix-1.parquet", 203)}
        return TorchDataset(halves, stop="all", **options)
    return TorchDataset(f"{file}.parquet", **options)


def ids_of(batches: Any) -> Ids:
    found: Ids = []
    for batch in batches:
        for item in batch if isinstance(batch, list) else [batch]:
            found += item["id"].reshape(-1).tolist()
    return found


def identity(value: Any) -> Any:
    return value


def only_id(batch: Any) -> Any:
    return {"id": batch["id"]}


class Model(torch.nn.Module):
    """Keeps the ids that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: Ids = []

    def forward(self, id: Any, score: Any, is_padding: Any = None) -> dict[str, Any]:
        self.seen += (id if is_padding is None else id[~is_padding]).tolist()
        return {"loss": self.layer(score.float().reshape(-1, 1)).sum()}


class Changed(IterableDataset):  # type: ignore[type-arg]
    """What a user puts around a dataset to change its batches."""

    def __init__(self, inner: TorchDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return map(only_id, self.inner)


class Hidden(Changed):
    """The same, and the dataset inside cannot be seen."""

    def __init__(self, inner: TorchDataset) -> None:
        self.read = lambda: iter(inner)

    def __iter__(self) -> Iterator[Any]:
        return self.read()


# torch.


@layout("a mix of workers", 30)
def load_mix() -> Ids:
    return ids_of(DataLoader(data("mix"), batch_size=None, num_workers=2))


@layout("plain loop, with a warning")
def warn() -> list[Ids]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = data()
        passes = [ids_of(dataset), ids_of(dataset)]
    assert ['even="drop"' in str(item.message) for item in caught] == [True] * (RANK == 0)
    return passes


def mesh(*names: str, shape: tuple[int, ...] = (2,)) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


@layout("mesh dp and tp", names=("dp_shard", "tp"), shape=(2, 1))
def read_in_mesh(names: tuple[str, ...], **options: Any) -> Ids:
    return ids_of(data(device_mesh=mesh(*names, **options)))


@layout("a mesh that nobody passed", "group 'tp' must read the same rows; pass device_mesh")
def read_in_hidden_mesh() -> Ids:
    group = dist.new_group([0, 1], group_desc="mesh_tp")  # as init_device_mesh of a larger job
    dist.barrier()  # or one rank may leave the group while the other still enters it
    try:
        return ids_of(data())
    finally:
        dist.destroy_process_group(group)


# accelerate.

OWN = {"dispatch_batches": False}
ONE = {"batch_size": 1, "collate_fn": identity}
FOUR = {"batch_size": 4, "dataset": {"rows": True}}
STATEFUL = {"use_stateful_dataloader": True}


def prepare(dataset: Any, config: Any = None, batch_size: Any = None, **options: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(**config or {})
    batches = DataLoader(dataset, batch_size=batch_size, **options)
    return Accelerator(cpu=True, dataloader_config=config).prepare(batches)


@layout("dispatched from workers", 1, num_workers=2)
@layout("dispatched rows", 1, **FOUR)
@layout("dispatched ragged, collated", 1, dataset={"file": "ragged"}, collate_fn=only_id)
@layout(
    "dispatched ragged", "'tokens' of list.* collate_fn .* or do not", dataset={"file": "ragged"}
)
@layout(
    "dispatched and sharded", "already shards the rows; remove shard=", dataset={"shard": (RANK, 2)}
)
@layout("own batches", 10, config=OWN, **ONE)
@layout("own batches without a size", "a loader with a batch_size; set it, or do not", config=OWN)
def accelerate(dataset: Any = None, **options: Any) -> Ids:
    return ids_of(prepare(data(**dataset or {}), **options))


@layout("dispatched from a wrapper", 1, wrapper=Changed)
@layout("dispatched from a hidden dataset", r"a Hidden.* shard=\(0, 1\) if it", wrapper=Hidden)
def accelerate_wrapper(wrapper: Any) -> Ids:
    return ids_of(prepare(wrapper(data())))


@layout("own rows, resumed", 7)
def accelerate_resumed() -> Ids:
    config = {**OWN, **STATEFUL}
    loaders = [prepare(data(rows=True), config, 4, num_workers=1) for _ in range(2)]
    first = ids_of(islice(iter(loaders[0]), 5))
    loaders[1].load_state_dict(loaders[0].state_dict())
    return first + ids_of(loaders[1])


@layout("dispatched, two epochs of workers", 1, num_workers=1, persistent_workers=True)
def accelerate_twice(**options: Any) -> list[Ids]:
    dataset = data(shuffle=3)
    dataset.load_state_dict(data(shuffle=3, shard=(0, 1)).state_dict())
    batches = prepare(dataset, **options)
    return [ids_of(batches) for _ in range(2)]


@layout("a state under accelerate", "would lose batches; .*use_stateful_dataloader=True")
def accelerate_state() -> None:
    dataset = data()
    for _ in prepare(dataset):
        dataset.state_dict()


@layout("tensor parallel, dispatched", "same")
@layout("context parallel, dispatched", "dispatch_batches=False", name="cp")
def accelerate_mesh(name: str = "tp", **options: Any) -> Ids:
    """accelerate makes such a mesh itself only where it finds devices."""
    from accelerate import Accelerator

    state = Accelerator(cpu=True).state
    state.device_mesh = mesh(name)
    try:
        return ids_of(prepare(data(), **options))
    finally:
        state.device_mesh = None


# Trainers.


@layout("Trainer with workers", 1)
def train_in_transformers() -> Ids:
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 41, "per_device_train_batch_size": 5, "disable_tqdm": True}
    settings |= {"use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "report_to": []}
    model = Model()
    arguments = TrainingArguments(f"trainer-{RANK}", dataloader_num_workers=2, **settings)
    Trainer(model, arguments, train_dataset=data(rows=True)).train()
    return model.seen


@layout("Lightning")
def train_in_lightning() -> Ids:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1}
    module = Module()
    trainer = Trainer(**settings, **dict.fromkeys(quiet, False))
    trainer.fit(module, DataLoader(data(even="pad"), batch_size=None))
    return module.model.seen


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=RANK, world_size=2)
    found: dict[str, Any] = {}
    for name, (_, function) in LAYOUTS.items():
        try:
            found[name] = function()
        except FastAxolotlError as error:
            found[name] = str(error)
        except ModuleNotFoundError:
            found[name] = None
        dist.barrier()
    Path(f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
