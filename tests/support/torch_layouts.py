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
"""Layout → by how many rows both ranks may see more than all, or fewer where these are dropped; or
``same``: both ranks see the same; or a pattern of the refusal; and what to do."""


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

    def forward(self, id: Any, score: Any) -> dict[str, Any]:
        self.seen += id.tolist()
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
    try:
        return ids_of(data())
    finally:
        dist.destroy_process_group(group)


# accelerate.

OWN = {"dispatch_batches": False}
REFUSED = r"accelerate deals out .* each rank reads its own shard: do not pass .* shard=\(rank, "


def prepare(dataset: Any, config: Any = None, batch_size: Any = None, **options: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(**config or {})
    batches = DataLoader(dataset, batch_size=batch_size, **options)
    return Accelerator(cpu=True, dataloader_config=config).prepare(batches)


@layout("dispatched from workers", REFUSED, num_workers=2)
@layout("dispatched rows", REFUSED, batch_size=4, dataset={"rows": True})
@layout("dispatched and sharded", REFUSED, dataset={"shard": (RANK, 2)})
@layout("own batches", REFUSED, config=OWN, batch_size=1, collate_fn=identity)
@layout("own batches of workers", REFUSED, config=OWN, batch_size=4, num_workers=1)
def accelerate(dataset: Any = None, **options: Any) -> Ids:
    return ids_of(prepare(data(**dataset or {}), **options))


@layout("dispatched from a wrapper", REFUSED, wrapper=Changed)
@layout("dispatched from a hidden dataset", f"a Hidden, .*{REFUSED[26:]}", wrapper=Hidden)
def accelerate_wrapper(wrapper: Any) -> Ids:
    return ids_of(prepare(wrapper(data())))


@layout("a loader of its own beside a dispatched one")
def read_beside() -> Ids:
    found: Ids = []
    batches = iter(DataLoader(data(), batch_size=None, num_workers=1))
    for _ in prepare(torch.utils.data.TensorDataset(torch.arange(4)), batch_size=1):
        found += ids_of(islice(batches, 2))
    return found + ids_of(batches)


@layout("tensor parallel", REFUSED)
def accelerate_mesh() -> Ids:
    """accelerate makes such a mesh itself only where it finds devices."""
    from accelerate import Accelerator

    state = Accelerator(cpu=True).state
    state.device_mesh = mesh("tp")
    try:
        return ids_of(prepare(data()))
    finally:
        state.device_mesh = None


# Trainers.


@layout("Trainer", REFUSED, is_own=False)
@layout("Trainer with a loader of its own", -3, is_own=True)
def train_in_transformers(is_own: bool) -> Ids:
    from transformers import Trainer, TrainingArguments

    class OwnTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=5, num_workers=2)

    settings = {"max_steps": 40, "per_device_train_batch_size": 5, "disable_tqdm": True}
    settings |= {"use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "report_to": []}
    model = Model()
    arguments = TrainingArguments(f"trainer-{RANK}", dataloader_num_workers=2, **settings)
    rows = data(rows=True, even="drop")
    (OwnTrainer if is_own else Trainer)(model, arguments, train_dataset=rows).train()
    return model.seen


@layout("Lightning", -1)
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
    trainer.fit(module, DataLoader(data(even="drop"), batch_size=None))
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
