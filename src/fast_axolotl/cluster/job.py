"""What a job is: its plan before, its summary after, and the folder that it is continued from."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Event, Heard
from fast_axolotl.errors import UsageError

__all__ = [
    "DatasetPlan",
    "JobPlan",
    "JobSummary",
    "NodeSummary",
    "StageSummary",
    "Tally",
    "open_job",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPlan:
    """One entry of ``datasets:`` or ``test_datasets:``."""

    path: str
    split: str
    units: int
    num_bytes: int
    whole: str | None
    """Why it is loaded as a whole on this machine before it is dealt out; ``None`` where it is
    read in units by whoever works on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What will be done, from a look at the files and at some first rows."""

    datasets: tuple[DatasetPlan, ...]
    outputs: tuple[str, ...]
    """The folders that will be written."""
    work: str
    """Where files between stages lie."""
    stages: Mapping[str, int]
    """Tasks of each stage, in order; estimated where they depend on the data."""
    rows: int
    """Estimated from the first rows, as are tokens and bytes."""
    tokens: int
    bytes_between: Mapping[str, int]
    """What each stage leaves for the next, in the work folder."""
    bytes_out: int
    disk_needed: int
    """The most that the work folder and the output hold at one time."""
    disk_free: int | None
    coordinator_bytes: int
    """What the process that deals out the work needs itself: about 40 bytes a row."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    """What only one kind of job has: the efficiency of packs."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def open_job(work: str, description: Mapping[str, Any], *, restart: bool = False) -> Store:
    """The folder of a job, new or as an earlier run of the same job left it.

    Args:
        work: A path or a URL.
        description: All that the result depends on, as plain JSON values without secrets.
        restart: Removes what an earlier run left.
    """
    store = Store(work).anchored()
    if restart:
        store.remove()
    wanted = json.loads(json.dumps(description))
    if not store.exists("job.json"):
        if store.names(""):
            raise UsageError(
                f"{work} is not empty and belongs to no job: pass another folder as work (--work), "
                "or remove it"
            )
        store.write_json("job.json", wanted)
    known = store.read_json("job.json")
    other = next((key for key in known | wanted if known.get(key) != wanted.get(key)), None)
    if other is not None:
        values = [str(job.get(other))[:200] for job in (known, wanted)]
        raise UsageError(
            f"{work} was left by another job: its {other} is {values[0]}, and not {values[1]}. "
            "Run that job again to finish it, or pass restart=True (--restart) to begin from the "
            "start"
        )
    return store


@dataclass(slots=True)
class Tally:
    """Hears of stages and tasks, tells them on, and adds them up."""

    heard: Heard
    _stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    _nodes: dict[str, list[int]] = field(default_factory=dict)
    _started: set[tuple[str, str]] = field(default_factory=set)

    def hear(self, event: Event) -> None:
        now = time.perf_counter()
        names = ("tasks", "done_before", "retried", "seconds", "task_seconds", "bytes_out")
        stage = self._stages.setdefault(event.stage, dict.fromkeys(names, 0) | {"began": now})
        stage["tasks"] += event.total
        stage["retried"] += event.kind == "retried"
        if event.task is not None and event.kind == "started":
            self._started.add((event.stage, event.task.name))
        if event.task is not None and event.answer is not None:
            ran = event.answer["ran"]
            stage["done_before"] += (event.stage, event.task.name) not in self._started
            stage["task_seconds"] += ran["seconds"]
            stage["bytes_out"] += event.answer.get("bytes_out", 0)
            node = self._nodes.setdefault(ran["node"], [0, 0])
            node[0], node[1] = node[0] + 1, max(node[1], ran["peak_bytes"])
        stage["seconds"] = now - stage["began"]
        self.heard(event)

    def stages(self) -> tuple[StageSummary, ...]:
        return tuple(
            StageSummary(name=name, **{key: value for key, value in item.items() if key != "began"})
            for name, item in self._stages.items()
        )

    def nodes(self) -> tuple[NodeSummary, ...]:
        return tuple(
            NodeSummary(name=name, tasks=tasks, peak_bytes=peak)
            for name, (tasks, peak) in self._nodes.items()
        )
