"""The goals set for the reader, and what a result says about each. Recorded, never asserted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fast_axolotl.bench.earlier import EARLIER
from fast_axolotl.bench.matrix import (
    OURS_ARROW,
    OURS_PYTHON,
    Goal,
    MemoryRun,
    PeerTiming,
)

__all__ = ["Ratio", "fastest_goal", "memory_goals", "most_goal", "ratio_goal", "timing_goals"]

RIVALS = ("pyarrow", "pyarrow pages", "pyarrow mapped", "Polars", "Polars views", "DuckDB")
LEAST_OF_FASTEST = 0.8
MOST_FIRST_BATCH_SECONDS = 0.5
MOST_GROWTH_PERCENT = 15.0
MOST_MEMORY_MEGABYTES = (256 * 1024**2 + 100_000_000) / 1_000_000
"""The default ``memory_budget`` and 100 MB."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """So many times a peer's rows per second, at least."""

    ours: str
    peer: str
    least: float


_RATIOS: dict[str, tuple[Ratio, ...]] = {
    "sample-parquet": (
        Ratio(OURS_PYTHON, EARLIER, 1.3),
        Ratio(OURS_ARROW, EARLIER, 5),
        Ratio(OURS_ARROW, "HF load + rows", 100),
    ),
    "messages-parquet": (
        Ratio(OURS_ARROW, EARLIER, 4),
        Ratio(OURS_ARROW, "HF streaming", 25),
    ),
    "messages-jsonl": (
        Ratio(OURS_ARROW, EARLIER, 1.8),
        Ratio(OURS_ARROW, "HF streaming", 10),
    ),
    "messages-csv": (Ratio(OURS_ARROW, EARLIER, 1.5),),
    "messages-arrow": (Ratio(OURS_ARROW, EARLIER, 20),),
}


def timing_goals(case: str, timings: Sequence[PeerTiming]) -> list[Goal]:
    """The goals of a timed case."""
    by_name = {timing.name: timing for timing in timings}
    goals = [ratio_goal(ratio, by_name) for ratio in _RATIOS.get(case, ())]
    if case.startswith("messages-"):
        name = "the fastest in bounded memory"
        goals.append(fastest_goal(OURS_ARROW, RIVALS, LEAST_OF_FASTEST, by_name, name))
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
            most_goal(f"memory above the start, {file}", MOST_MEMORY_MEGABYTES, "MB", peaks[file])
        )
        goals.append(
            most_goal(f"first batch, {file}", MOST_FIRST_BATCH_SECONDS, "s", median(waits)),
        )
    if len(files) > 1:
        small, large = peaks[files[0]], peaks[files[-1]]
        growth = 100 * abs(large - small) / small
        goals.append(
            most_goal("memory, large file against small", MOST_GROWTH_PERCENT, "%", growth),
        )
    return goals


def most_goal(
    text: str, target: float, unit: str, measured: float | None, detail: str | None = None
) -> Goal:
    """Something that must not be more than the target."""
    return Goal(
        text=text, target=target, at_least=False, unit=unit, measured=measured, detail=detail
    )


def ratio_goal(ratio: Ratio, timings: Mapping[str, PeerTiming]) -> Goal:
    """What the timings, by name, say about a ratio."""
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


def fastest_goal(
    ours: str,
    rivals: Sequence[str],
    least: float,
    timings: Mapping[str, PeerTiming],
    name: str,
) -> Goal:
    """Against the fastest of some rivals that gives equal rows and is bounded in memory."""
    found = [timings[rival] for rival in rivals if rival in timings]
    fair = [timing for timing in found if timing.equal and timing.unbounded is None]
    fastest = max(fair, key=lambda timing: timing.rows_per_second, default=None)
    measured, detail = None, "none took part"
    if fastest is not None:
        measured = timings[ours].rows_per_second / fastest.rows_per_second
        detail = fastest.name
    return Goal(
        text=f"{ours} over {name}",
        target=least,
        at_least=True,
        unit="×",
        measured=measured,
        detail=detail,
    )
