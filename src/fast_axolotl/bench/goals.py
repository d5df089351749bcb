"""The goals set for the reader, and what a result says about each. Recorded, never asserted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fast_axolotl.bench.matrix import (
    OURS_ARROW,
    OURS_PYTHON,
    Goal,
    MemoryRun,
    PeerTiming,
)
from fast_axolotl.bench.timing import EARLIER

__all__ = ["memory_goals", "timing_goals"]

RIVALS = ("pyarrow", "pyarrow pages", "pyarrow mapped", "Polars", "Polars views", "DuckDB")
LEAST_OF_FASTEST = 0.8
MOST_FIRST_BATCH_SECONDS = 0.5
MOST_GROWTH_PERCENT = 15.0
MOST_MEMORY_MEGABYTES = (256 * 1024**2 + 100_000_000) / 1_000_000
"""The default ``memory_budget`` and 100 MB."""


@dataclass(frozen=True, slots=True)
class _Ratio:
    ours: str
    peer: str
    least: float


_RATIOS: dict[str, tuple[_Ratio, ...]] = {
    "sample-parquet": (
        _Ratio(OURS_PYTHON, EARLIER, 1.3),
        _Ratio(OURS_ARROW, EARLIER, 5),
        _Ratio(OURS_ARROW, "HF load + rows", 100),
    ),
    "messages-parquet": (
        _Ratio(OURS_ARROW, EARLIER, 4),
        _Ratio(OURS_ARROW, "HF streaming", 25),
    ),
    "messages-jsonl": (
        _Ratio(OURS_ARROW, EARLIER, 1.8),
        _Ratio(OURS_ARROW, "HF streaming", 10),
    ),
    "messages-csv": (_Ratio(OURS_ARROW, EARLIER, 1.5),),
    "messages-arrow": (_Ratio(OURS_ARROW, EARLIER, 20),),
}


def timing_goals(case: str, timings: Sequence[PeerTiming]) -> list[Goal]:
    """The goals of a timed case."""
    by_name = {timing.name: timing for timing in timings}
    goals = [_ratio_goal(ratio, by_name) for ratio in _RATIOS.get(case, ())]
    if case.startswith("messages-"):
        goals.append(_fastest_goal(by_name))
    return goals


def memory_goals(runs: Sequence[MemoryRun]) -> list[Goal]:
    """The goals of our passes over large files, the smallest file first."""
    files = list(dict.fromkeys(run.file for run in runs))
    peaks = {
        file: max(run.above_bytes for run in runs if run.file == file) / 1_000_000 for file in files
    }
    goals = []
    for file in files:
        waits = [run.first_batch_seconds for run in runs if run.file == file]
        goals.append(
            _most(f"memory above the start, {file}", MOST_MEMORY_MEGABYTES, "MB", peaks[file])
        )
        goals.append(
            _most(f"first batch, {file}", MOST_FIRST_BATCH_SECONDS, "s", median(waits)),
        )
    if len(files) > 1:
        small, large = peaks[files[0]], peaks[files[-1]]
        growth = 100 * abs(large - small) / small
        goals.append(
            _most("memory, large file against small", MOST_GROWTH_PERCENT, "%", growth),
        )
    return goals


def _most(text: str, target: float, unit: str, measured: float) -> Goal:
    return Goal(text=text, target=target, at_least=False, unit=unit, measured=measured, detail=None)


def _ratio_goal(ratio: _Ratio, timings: dict[str, PeerTiming]) -> Goal:
    ours, peer = timings.get(ratio.ours), timings.get(ratio.peer)
    measured: float | None = None
    detail: str | None = f"{ratio.peer} took no part"
    if ours is not None and peer is not None and peer.rows:
        measured = ours.rows_per_second / peer.rows_per_second
        detail = None if peer.equal else "its rows differ"
    return Goal(
        text=f"{ratio.ours} over {ratio.peer}",
        target=ratio.least,
        at_least=True,
        unit="×",
        measured=measured,
        detail=detail,
    )


def _fastest_goal(timings: dict[str, PeerTiming]) -> Goal:
    """Against the fastest that gives equal rows as Arrow batches in bounded memory."""
    rivals = [
        timings[name]
        for name in RIVALS
        if name in timings and timings[name].equal and timings[name].unbounded is None
    ]
    fastest = max(rivals, key=lambda timing: timing.rows_per_second, default=None)
    measured, detail = None, "none took part"
    if fastest is not None:
        measured = timings[OURS_ARROW].rows_per_second / fastest.rows_per_second
        detail = fastest.name
    return Goal(
        text=f"{OURS_ARROW} over the fastest in bounded memory",
        target=LEAST_OF_FASTEST,
        at_least=True,
        unit="×",
        measured=measured,
        detail=detail,
    )
