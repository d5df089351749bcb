"""The folder of a job, which one process works in at a time, and the summary of what it did."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fast_axolotl.axolotl.save_folder import take_lock
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Event, Heard
from fast_axolotl.errors import UsageError


@contextmanager
def lock_job(work: str) -> Iterator[None]:
    """Nobody else works in a folder meanwhile, where it is one that can be locked."""
    if not (store := Store(work)).is_local:
        yield
        return
    mark = Path(f"{store.path('')}.lock")
    mark.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(mark, os.O_RDWR | os.O_CREAT)
    try:
        if take_lock(lock, mark) is False:
            raise UsageError(
                f"another job is using {work}; wait until it ends, or pass another --work and "
                "another --output"
            )
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)
    finally:
        os.close(lock)


def open_job(work: str, description: dict[str, Any], *, restart: bool = False) -> Store:
    """The folder of a job, empty or with what the same job has finished before."""
    store = Store(work)
    if restart:
        store.remove()
    names = ("axolotl", "datasets", "fast-axolotl", "pyarrow", "tokenizers", "transformers")
    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)

    def plain(value: Any) -> Any:
        return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)

    wanted = json.loads(json.dumps({**description, "versions": versions}, default=plain))
    if not store.exists("job.json"):
        store.write_json("job.json", wanted)
        return store
    found = store.read_json("job.json")
    other = [key for key in {*wanted, *found} if wanted.get(key) != found.get(key)]
    if other:
        raise UsageError(
            f"{work} has an unfinished job with other {', '.join(sorted(other))}; pass --restart "
            "to remove it and start over, or pass another --work"
        )
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    name: str
    tasks: int
    done_before: int
    """By an earlier run that was interrupted."""
    retried: int
    seconds: float
    task_seconds: float
    bytes_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    name: str
    tasks: int
    peak_bytes: int
    """The most that one working process held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What was read, dropped and written."""

    outputs: tuple[str, ...]
    rows_in: int
    dropped: Mapping[str, int]
    """Rows by the reason they were dropped for, duplicates not counted."""
    duplicates: int
    rows_out: int
    tokens: int
    """Of the rows written; 0 where rows are no tokens yet, as with preference data."""
    bytes_in: int
    bytes_out: int
    seconds: float
    stages: tuple[StageSummary, ...]
    nodes: tuple[NodeSummary, ...]
    extra: Mapping[str, Any]
    """What only one kind of job has: rows that could not be read."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """Adds up what is heard of stages and tasks, and passes it on."""

    def __init__(self, heard: Heard, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._heard, self._clock = heard, clock
        self._begin = clock()
        self._last = self._begin
        self._stages: dict[str, dict[str, Any]] = {}
        self._nodes: dict[str, tuple[int, int]] = {}

    def hear(self, event: Event) -> None:
        now = self._clock()
        fresh = dict.fromkeys(("tasks", "done_before", "retried", "bytes_out"), 0)
        stage = self._stages.setdefault(event.stage, {**fresh, "seconds": 0.0, "task_seconds": 0.0})
        if event.kind == "stage":
            stage["tasks"] += event.total
        else:
            stage["seconds"] += now - self._last
        self._last = now
        if event.kind == "retried":
            stage["retried"] += 1
        if event.answer is not None:
            ran = event.answer["ran"]
            stage["done_before"] += event.is_earlier
            stage["task_seconds"] += ran["seconds"]
            stage["bytes_out"] += event.answer.get("bytes_out", 0)
            tasks, peak = self._nodes.get(ran["node"], (0, 0))
            self._nodes[ran["node"]] = (tasks + 1, max(peak, ran["peak_bytes"]))
        self._heard(event)

    def summary(self, **figures: Any) -> JobSummary:
        """What was heard, with what only the job knows."""
        stages = (StageSummary(name=name, **stage) for name, stage in self._stages.items())
        nodes = (
            NodeSummary(name=name, tasks=tasks, peak_bytes=peak)
            for name, (tasks, peak) in sorted(self._nodes.items())
        )
        seconds = self._clock() - self._begin
        known: dict[str, Any] = {"stages": tuple(stages), "nodes": tuple(nodes), "seconds": seconds}
        return JobSummary(**known, **figures)
