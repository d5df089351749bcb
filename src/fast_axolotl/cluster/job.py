"""What a job tells people: its plan before, its summary after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DatasetPlan", "JobPlan", "JobSummary", "NodeSummary", "StageSummary"]


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
