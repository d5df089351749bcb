"""Is what the meter reports true? ``make bench-meter``.

Loops whose waits are injected, so that the truth is known. A cell is a host (a bare loop, a torch
``DataLoader``, an HF ``Trainer``), its loader workers and gradient accumulation, and waits: how
much of the wall time, and in which pattern. The cells of a host run in a process of their own:
``python -m benchmarks.meter --child …`` prints one JSON object for each. The truth comes from this
module's own clock, never from the meter: the waits as slept in a bare loop, and the time inside the
base iterator's ``__next__`` in torch, which collates and hands over as well; over the wall time of
the same fetches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.children import offline_environment, run_child
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Result, Table
from fast_axolotl.errors import UsageError
from fast_axolotl.measure import measure

_FETCHES = 640
"""Five times a period of 1,000 rows, and a little."""
_SIDE_BY_SIDE = 3
"""Processes at a time: they sleep nearly always."""
_CHILD_SECONDS = 1920
_NEEDS = {"loader": "torch", "trainer": "transformers"}
HOSTS = ("loop", "loader", "trainer")

BATCH_ROWS = 8
BURST_FETCHES = 16
PERIOD_ROWS = 1000
TOLERANCE = 0.015
"""How far a reported stall fraction may be from the true one."""
_PERIOD_TOLERANCE = 0.02

_SHARES = (0.02, 0.05, 0.10, 0.30, 0.60)
_SUBTYPES = {"steady": "rate", "burst": "burst", "periodic": "periodic"}
"""Pattern of the waits to what the verdict calls it."""
_QUEUED = 4
"""Batches that two workers with torch's prefetch factor of 2 hold ready: what a long wait must
outlast before it is felt."""
_DATA_BOUND, _COMPUTE_BOUND = 0.10, 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("meter", __doc__)
    parser.add_argument("--hosts", type=names, default=[], help=f"of {', '.join(HOSTS)}")
    parser.add_argument("--fetches", type=int, default=_FETCHES, help="of every cell, 300 or more")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """The cells of the hosts that are named, or of all."""
    if options.fetches < 300:
        raise UsageError(f"a verdict needs 300 fetches, not {options.fetches}")
    hosts = check_names("host", options.hosts, HOSTS)
    missing = [host for host in hosts if host in _NEEDS and find_spec(_NEEDS[host]) is None]
    # A bare loop has no workers.
    children = [
        (host, str(workers), str(accumulation))
        for host in hosts
        if host not in missing
        for workers in ((0,) if host == "loop" else (0, 2))
        for accumulation in (1, 8)
    ]

    def run_cells(child: tuple[str, str, str]) -> list[dict[str, Any]]:
        place = folder / "-".join(child)
        place.mkdir()
        printed = run_child(
            "benchmarks.meter",
            *("--child", *child, str(place), str(options.fetches)),
            env=offline_environment(place, place),
            timeout=_CHILD_SECONDS,
        )
        return [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]

    cells: list[dict[str, Any]] = []
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        for child, done in zip(children, pool.map(run_cells, children), strict=True):
            tell("{}, {} workers, accumulation {}".format(*child))
            cells += done
    left_out = [f"{host}: {_NEEDS[host]} is not installed" for host in missing]
    facts = {"tolerance": TOLERANCE, "cells": cells, "left_out": left_out}
    return Result(facts=facts, tables=[_cell_table(cells, left_out)])


def _cell_table(cells: Sequence[dict[str, Any]], left_out: Sequence[str]) -> Table:
    """By host and pattern, with what is wrong."""
    by_row: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        columns = ("host", "workers", "accumulation", "pattern")
        by_row.setdefault(tuple(str(cell[name]) for name in columns), []).append(cell)
    rows = []
    for key, found in by_row.items():
        worst = max(abs(cell["stall_fraction"] - cell["true_stall"]) for cell in found)
        wrong = [
            f"{cell['planned_share']:.0%}: {', '.join(cell['wrong'])}"
            for cell in found
            if cell["wrong"]
        ]
        true = " ".join(f"{100 * cell['true_stall']:.1f}" for cell in found)
        said = " ".join(f"{100 * cell['stall_fraction']:.1f}" for cell in found)
        rows.append((*key, true, said, f"{100 * worst:.2f}", "; ".join(wrong) or "all right"))
    right = sum(not cell["wrong"] for cell in cells)
    note = (
        f"right: within {100 * TOLERANCE:.1f} points, and the verdict, the pattern and its "
        "period as made; on a threshold, within the tolerance, either verdict is right"
    )
    return Table(
        title=f"bench meter: {right} of {len(cells)} cells right",
        header=("host", "workers", "accum.", "waits", "true stall %", "reported %", "worst", ""),
        rows=rows,
        notes=(note, *left_out),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A loop, and the waits that are injected."""

    host: str
    workers: int
    accumulation: int
    pattern: str
    """``none``, ``steady``, ``burst`` or ``periodic``."""
    planned_share: float
    """Of wall time."""

    @property
    def step_seconds(self) -> float:
        """What the model takes for a batch. Collating a batch and handing it over from another
        process cost up to a millisecond on a busy machine, a wait like any other: the step has to
        dwarf it."""
        if self.workers:
            return 0.02
        return 0.005 if self.host == "loop" else 0.01

    def wait_before(self, fetch: int) -> float:
        """Seconds to wait inside the fetch of this number."""
        step, workers = self.step_seconds, self.workers
        mean = step * self.planned_share / (1 - self.planned_share)
        if self.pattern == "none":
            return 0.0
        if self.pattern == "steady":
            # So many workers wait side by side; together they must be slower than the model.
            return mean if not workers else workers * (step + mean)
        hidden = _QUEUED * step if workers else 0.0
        if self.pattern == "burst":
            is_last = fetch % BURST_FETCHES == BURST_FETCHES - 1
            return BURST_FETCHES * mean + hidden if is_last else 0.0
        before, after = fetch * BATCH_ROWS, (fetch + 1) * BATCH_ROWS
        is_over = before // PERIOD_ROWS != after // PERIOD_ROWS
        return PERIOD_ROWS / BATCH_ROWS * mean + hidden if is_over else 0.0


def cells_of(host: str, workers: int, accumulation: int) -> list[Cell]:
    """No wait at all, then every share in every pattern."""
    waits = [("none", 0.0), *((pattern, share) for pattern in _SUBTYPES for share in _SHARES)]
    return [
        Cell(
            host=host,
            workers=workers,
            accumulation=accumulation,
            pattern=pattern,
            planned_share=share,
        )
        for pattern, share in waits
    ]


def judge_cell(pattern: str, true_stall: float, found: dict[str, object]) -> list[str]:
    """What is wrong with the figures of a cell; empty where all is right."""
    stall = found["stall_fraction"]
    if not isinstance(stall, float):
        return ["no stall fraction"]
    wrong = []
    if abs(stall - true_stall) > TOLERANCE:
        wrong.append(f"stall off by {100 * (stall - true_stall):+.1f} points")
    if found["verdict"] not in right_verdicts(true_stall):
        wrong.append(f"verdict {found['verdict']}")
    if found["verdict"] == "data":
        if found["subtype"] != _SUBTYPES.get(pattern):
            wrong.append(f"called {found['subtype']}")
        made = {"burst": ("fetches", BURST_FETCHES), "periodic": ("rows", PERIOD_ROWS)}
        if pattern in made:
            unit, length = made[pattern]
            period = found[f"period_{unit}"]
            near = _PERIOD_TOLERANCE * length
            if not isinstance(period, float | int) or abs(period - length) > near:
                wrong.append(f"period of {period} {unit}")
    return wrong


def right_verdicts(true_stall: float) -> set[str]:
    """By the thresholds; on one of them, within the tolerance, either side is right."""
    low, high = true_stall - TOLERANCE, true_stall + TOLERANCE
    right = set()
    if low < _COMPUTE_BOUND:
        right.add("compute")
    if high >= _COMPUTE_BOUND and low < _DATA_BOUND:
        right.add("mixed")
    if high >= _DATA_BOUND:
        right.add("data")
    return right


class Waits:
    """A dataset of batches of which some take their time, and what they took."""

    def __init__(self, cell: Cell, fetches: int) -> None:
        self.cell = cell
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
        seconds = self.cell.wait_before(fetch)
        if seconds:
            time.sleep(seconds)
        self.begun.append(begun)
        self.slept.append(time.perf_counter() - begun)
        return list(range(BATCH_ROWS))


def child(host: str, workers: str, accumulation: str, folder: str, fetches: str) -> None:
    """Runs the cells of one host."""
    for number, cell in enumerate(cells_of(host, int(workers), int(accumulation))):
        found = run_cell(cell, Path(folder) / str(number), int(fetches))
        print(json.dumps(found), flush=True)


def run_cell(cell: Cell, folder: Path, fetches: int) -> dict[str, Any]:
    """Runs one cell and compares what was reported with the truth."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run

    runs = {"loop": _run_loop, "loader": _run_loader, "trainer": _run_trainer}
    begun, waited = runs[cell.host](cell, Waits(cell, fetches), folder)
    summary = summarise(read_run(folder))
    first = summary.warmup_steps * cell.accumulation
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
        **asdict(cell),
        "true_stall": truth,
        **found,
        "overhead_seconds_per_fetch": summary.overhead_seconds_per_fetch,
        "wrong": judge_cell(cell.pattern, truth, found),
    }


def _run_loop(cell: Cell, waits: Waits, folder: Path) -> tuple[list[float], list[float]]:
    with measure(folder, accumulation=cell.accumulation, sample_system=False) as meter:
        for _ in meter.watch(waits):
            time.sleep(cell.step_seconds)
    return waits.begun, waits.slept


def _run_loader(cell: Cell, waits: Waits, folder: Path) -> tuple[list[float], list[float]]:
    from torch.utils.data import DataLoader

    from fast_axolotl.integrations.torch_meter import watch_torch

    options = {"batch_size": BATCH_ROWS, "num_workers": cell.workers, "collate_fn": _collate}
    loader = DataLoader(waits, **options)
    metered = measure(folder, accumulation=cell.accumulation, sample_system=False)
    with metered as meter, _timed_iterators() as (begun, waited), watch_torch(meter):
        for _ in loader:
            time.sleep(cell.step_seconds)
    return begun, waited


def _run_trainer(cell: Cell, waits: Waits, folder: Path) -> tuple[list[float], list[float]]:
    from transformers import Trainer, TrainingArguments

    from fast_axolotl.integrations.transformers_meter import MeterCallback

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH_ROWS,
        gradient_accumulation_steps=cell.accumulation,
        dataloader_num_workers=cell.workers,
        num_train_epochs=1,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=_sleeping_model(cell.step_seconds),
        args=arguments,
        train_dataset=waits,
        data_collator=_collate,
        callbacks=[MeterCallback(folder, sample_system=False)],
    )
    trainer._get_train_sampler = lambda *_: None
    with _timed_iterators() as (begun, waited):
        trainer.train()
    return begun, waited


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
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
