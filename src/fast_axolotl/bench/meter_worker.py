"""One group of cells in a process of its own: ``python -m fast_axolotl.bench.meter_worker JSON``.

Prints one JSON object a cell. The truth comes from this module's own clock, never from the meter:
the waits as slept in a bare loop, and the time inside the base iterator's ``__next__`` in torch,
which collates and hands over as well; over the wall time of the same fetches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fast_axolotl.bench.meter_cells import (
    BATCH_ROWS,
    Cell,
    Group,
    cells_of,
    judge_cell,
    step_seconds,
    wait_before,
)

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

__all__ = ["Waits", "main", "run_cell"]


class Waits:
    """A dataset of batches of which some take their time, and what they took."""

    def __init__(self, cell: Cell, group: Group, fetches: int) -> None:
        self.cell = cell
        self.group = group
        self.fetches = fetches
        self.slept: list[float] = []
        self.begun: list[float] = []

    def __len__(self) -> int:
        return self.fetches * BATCH_ROWS

    def __iter__(self) -> Iterator[list[int]]:
        for fetch in range(self.fetches):
            yield self.fetch(fetch)

    def __getitems__(self, indices: list[int]) -> list[int]:
        return self.fetch(indices[0] // BATCH_ROWS)

    def __getitem__(self, index: int) -> int:
        raise NotImplementedError("batches are asked for whole")

    def fetch(self, fetch: int) -> list[int]:
        """The rows of one batch, after its wait."""
        begun = time.perf_counter()
        seconds = wait_before(self.cell, fetch, self.group)
        if seconds:
            time.sleep(seconds)
        self.begun.append(begun)
        self.slept.append(time.perf_counter() - begun)
        return list(range(BATCH_ROWS))


def main() -> None:
    """Runs the cells of the group that the argument tells."""
    given = json.loads(sys.argv[1])
    group = Group(**given["group"])
    for number, cell in enumerate(cells_of()):
        folder = Path(given["folder"]) / str(number)
        found = run_cell(group, cell, folder, given["fetches"])
        print(json.dumps(found), flush=True)


def run_cell(group: Group, cell: Cell, folder: Path, fetches: int) -> dict[str, Any]:
    """Runs one cell and compares what was reported with the truth."""
    waits = Waits(cell, group, fetches)
    runs = {"loop": _run_loop, "loader": _run_loader, "trainer": _run_trainer}
    begun, waited = runs[group.host](group, waits, folder)
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run

    summary = summarise(read_run(folder))
    first = summary.warmup_steps * group.accumulation
    # The last fetch begins where the last step that is whole ends.
    truth = sum(waited[first:-1]) / (begun[-1] - begun[first])
    found: dict[str, Any] = {
        "stall_fraction": summary.stall_fraction,
        "verdict": summary.verdict.kind,
        "subtype": summary.verdict.subtype,
        "period_fetches": summary.stall_period_fetches,
        "period_rows": summary.stall_period_rows,
    }
    return {
        "host": group.host,
        "workers": group.workers,
        "accumulation": group.accumulation,
        "pattern": cell.pattern,
        "planned_share": cell.share,
        "true_stall": truth,
        **found,
        "overhead_seconds_per_fetch": summary.overhead_seconds_per_fetch,
        "wrong": judge_cell(cell, truth, found),
    }


def _run_loop(group: Group, waits: Waits, folder: Path) -> tuple[list[float], list[float]]:
    from fast_axolotl.measure import measure

    with measure(folder, accumulation=group.accumulation, sample_system=False) as meter:
        for _ in meter.watch(waits):
            time.sleep(step_seconds(group))
    return waits.begun, waits.slept


def _run_loader(group: Group, waits: Waits, folder: Path) -> tuple[list[float], list[float]]:
    from fast_axolotl.measure import measure

    loader = _loader(group, waits)
    metered = measure(folder, accumulation=group.accumulation, sample_system=False)
    with metered as meter, _timed_iterators() as (begun, waited):
        for _ in _watched(meter, loader):
            time.sleep(step_seconds(group))
    return begun, waited


def _watched(meter: Meter, loader: Any) -> Iterator[Any]:
    from fast_axolotl.integrations.torch_meter import watch_torch

    with watch_torch(meter):
        yield from loader


def _run_trainer(group: Group, waits: Waits, folder: Path) -> tuple[list[float], list[float]]:
    from transformers import Trainer, TrainingArguments

    from fast_axolotl.integrations.transformers_meter import MeterCallback

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH_ROWS,
        gradient_accumulation_steps=group.accumulation,
        dataloader_num_workers=group.workers,
        num_train_epochs=1,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=_sleeping_model(step_seconds(group)),
        args=arguments,
        train_dataset=waits,
        data_collator=_collate,
        callbacks=[MeterCallback(folder, sample_system=False)],
    )
    trainer._get_train_sampler = lambda *_: None
    with _timed_iterators() as (begun, waited):
        trainer.train()
    return begun, waited


def _loader(group: Group, waits: Waits) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        waits,
        batch_size=BATCH_ROWS,
        num_workers=group.workers,
        collate_fn=_collate,
    )


def _collate(rows: list[int]) -> dict[str, Any]:
    import torch

    return {"x": torch.ones(len(rows), 1)}


def _sleeping_model(seconds: float) -> Any:
    import torch

    class Sleeping(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> dict[str, Any]:
            time.sleep(seconds)
            return {"loss": (x * self.weight).mean()}

    return Sleeping()


@contextmanager
def _timed_iterators() -> Iterator[tuple[list[float], list[float]]]:
    """When each call of a base iterator began, and how long it took."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    begun: list[float] = []
    waited: list[float] = []
    original = _BaseDataLoaderIter.__next__

    def timed(self: Any) -> Any:
        begun.append(time.perf_counter())
        try:
            return original(self)
        finally:
            waited.append(time.perf_counter() - begun[-1])

    _BaseDataLoaderIter.__next__ = timed
    try:
        yield begun, waited
    finally:
        _BaseDataLoaderIter.__next__ = original


if __name__ == "__main__":
    main()
