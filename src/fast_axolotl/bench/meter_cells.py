"""The cells of ``bench meter``: loops whose waits are injected, so that the truth is known.

A cell is a host (a bare loop, a torch ``DataLoader``, an HF ``Trainer``), its loader workers and
gradient accumulation, and waits: how much of the wall time, and in which pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BATCH_ROWS",
    "BURST_FETCHES",
    "PERIOD_ROWS",
    "TOLERANCE",
    "Cell",
    "Group",
    "Pattern",
    "cells_of",
    "groups",
    "judge_cell",
    "right_verdicts",
    "step_seconds",
    "wait_before",
]

Pattern = Literal["none", "steady", "burst", "periodic"]

BATCH_ROWS = 8
BURST_FETCHES = 16
PERIOD_ROWS = 1000
TOLERANCE = 0.015
"""How far a reported stall fraction may be from the true one."""
_PERIOD_TOLERANCE = 0.02

_SHARES = (0.02, 0.05, 0.10, 0.30, 0.60)
_PATTERNS: tuple[Pattern, ...] = ("steady", "burst", "periodic")
_QUEUED = 4
"""Batches that two workers with torch's prefetch factor of 2 hold ready: what a long wait must
outlast before it is felt."""
_DATA_BOUND, _COMPUTE_BOUND = 0.10, 0.05
_SUBTYPES = {"steady": "rate", "burst": "burst", "periodic": "periodic"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells that one process runs, one after the other."""

    host: Literal["loop", "loader", "trainer"]
    workers: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Waits that are injected."""

    pattern: Pattern
    share: float
    """Of wall time, as planned."""


def groups() -> list[Group]:
    """Every host with its workers and accumulation; a bare loop has no workers."""
    return [
        Group(host=host, workers=workers, accumulation=accumulation)
        for host in ("loop", "loader", "trainer")
        for workers in ((0,) if host == "loop" else (0, 2))
        for accumulation in (1, 8)
    ]


def cells_of() -> list[Cell]:
    """No wait at all, then every share in every pattern."""
    waits = [Cell(pattern=pattern, share=share) for pattern in _PATTERNS for share in _SHARES]
    return [Cell(pattern="none", share=0.0), *waits]


def step_seconds(group: Group) -> float:
    """What the model takes for a batch. Collating a batch and handing it over from another process
    cost up to a millisecond on a busy machine, a wait like any other: the step has to dwarf it."""
    if group.workers:
        return 0.02
    return 0.005 if group.host == "loop" else 0.01


def wait_before(cell: Cell, fetch: int, group: Group) -> float:
    """Seconds to wait inside the fetch of this number."""
    if cell.pattern == "none":
        return 0.0
    step, workers = step_seconds(group), group.workers
    mean = step * cell.share / (1 - cell.share)
    if cell.pattern == "steady":
        # So many workers wait side by side; together they must be slower than the model.
        return mean if not workers else workers * (step + mean)
    hidden = _QUEUED * step if workers else 0.0
    if cell.pattern == "burst":
        return BURST_FETCHES * mean + hidden if fetch % BURST_FETCHES == BURST_FETCHES - 1 else 0.0
    before, after = fetch * BATCH_ROWS, (fetch + 1) * BATCH_ROWS
    is_over = before // PERIOD_ROWS != after // PERIOD_ROWS
    return PERIOD_ROWS / BATCH_ROWS * mean + hidden if is_over else 0.0


def judge_cell(cell: Cell, true_stall: float, found: dict[str, object]) -> list[str]:
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
        wrong += _wrong_pattern(cell, found)
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


def _wrong_pattern(cell: Cell, found: dict[str, object]) -> list[str]:
    wrong = []
    if found["subtype"] != _SUBTYPES.get(cell.pattern):
        wrong.append(f"called {found['subtype']}")
    if cell.pattern == "burst" and not _is_near(found["period_fetches"], BURST_FETCHES):
        wrong.append(f"period of {found['period_fetches']} fetches")
    if cell.pattern == "periodic" and not _is_near(found["period_rows"], PERIOD_ROWS):
        wrong.append(f"period of {found['period_rows']} rows")
    return wrong


def _is_near(period: object, made: float) -> bool:
    return isinstance(period, float | int) and abs(period - made) <= _PERIOD_TOLERANCE * made
