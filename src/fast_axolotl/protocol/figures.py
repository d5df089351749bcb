"""The figures of a matrix: which ones, and how they come from a run's record.

Most are fields of ``RunSummary``. One is not: ``start_to_step_seconds`` counts from the start of
the process, because imports and the preparation of the data come before the first fetch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.run_folders import read_training

__all__ = ["FIGURES", "PRIMARY", "Figure", "RunFigures", "choose_primary", "read_figures", "sum_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the matrix."""

    name: str
    """Field of ``RunSummary``, or ``start_to_step_seconds``."""
    label: str
    unit: str
    """``/s`` and the like; ``share`` is shown in percent, ``bytes`` and ``s`` in their units."""
    better: Literal["higher", "lower", ""]
    near_zero: float | None = None
    """Of figures that can be 0: below this a value has no meaningful ratio."""
    resolution: float = 0.0
    """Share by which a ratio can be off for how the figure is recorded, however many pairs."""


_SHARE_NEAR_ZERO = 0.01
"""One point: ten times what the meter resolves."""
_RATE_NEAR_ZERO = 1e6
"""1 MB/s: less than any disk or swap device would notice."""
_LATE = ("meter", "watch")
"""Who begins to sample when the process has already run for a while."""
_BIN = 0.02
"""Width of the bins that quantiles come from: runs on both sides of an edge are so far apart."""

FIGURES = (
    Figure(name="rows_per_second", label="reader", unit="rows/s", better="higher"),
    Figure(name="samples_per_second", label="samples", unit="samples/s", better="higher"),
    Figure(
        name="working_set_bytes", label="working set (ΣPSS), steady", unit="bytes", better="lower"
    ),
    Figure(
        name="working_set_peak_bytes",
        label="working set (ΣPSS), highest",
        unit="bytes",
        better="lower",
    ),
    Figure(
        name="host_stall_fraction",
        label="stall, by the host",
        unit="share",
        better="lower",
        near_zero=_SHARE_NEAR_ZERO,
    ),
    Figure(
        name="device_stall_fraction",
        label="stall, by the device",
        unit="share",
        better="lower",
        near_zero=_SHARE_NEAR_ZERO,
    ),
    Figure(name="tokens_per_second", label="real tokens", unit="tokens/s", better="higher"),
    Figure(
        name="trainable_tokens_per_second",
        label="trainable tokens",
        unit="tokens/s",
        better="higher",
    ),
    Figure(
        name="padded_tokens_per_second", label="padded tokens", unit="tokens/s", better="higher"
    ),
    Figure(name="mfu", label="MFU", unit="share", better="higher"),
    Figure(name="step_p50_seconds", label="step, p50", unit="s", better="lower", resolution=_BIN),
    Figure(name="step_p95_seconds", label="step, p95", unit="s", better="lower", resolution=_BIN),
    Figure(
        name="start_to_step_seconds",
        label="start to first step",
        unit="s",
        better="lower",
    ),
    Figure(name="first_step_seconds", label="first fetch to first step", unit="s", better="lower"),
    Figure(
        name="disk_share",
        label="reads, of the disk's capacity",
        unit="share",
        better="",
        near_zero=_SHARE_NEAR_ZERO,
    ),
    Figure(
        name="swap_in_bytes_per_second",
        label="swap in",
        unit="bytes/s",
        better="lower",
        near_zero=_RATE_NEAR_ZERO,
    ),
    Figure(
        name="swap_out_bytes_per_second",
        label="swap out",
        unit="bytes/s",
        better="lower",
        near_zero=_RATE_NEAR_ZERO,
    ),
    Figure(name="duration_seconds", label="the whole run", unit="s", better="lower"),
)

PRIMARY = ("tokens_per_second", "samples_per_second", "rows_per_second", "duration_seconds")
"""Which figure answers the question: the first that both arms have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What one run gave."""

    summary: RunSummary
    values: Mapping[str, float | None]
    """By the name of a figure."""
    reasons: Mapping[str, str]
    """Why a value is missing."""
    losses: tuple[float, ...] = ()
    """As the trainer logged them."""

    @property
    def steps(self) -> int:
        """Recorded, warm-up included."""
        return self.summary.steps + self.summary.warmup_steps


def read_figures(folder: str | Path) -> RunFigures:
    """Reads a record and sums it up."""
    return sum_up(read_training(folder))


def sum_up(record: RunRecord) -> RunFigures:
    """All figures of a record."""
    summary = summarise(record)
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for figure in FIGURES:
        value, reason = _value(figure.name, record, summary)
        values[figure.name] = value
        if value is None:
            reasons[figure.name] = reason
    losses = tuple(line.values["loss"] for line in record.find_losses())
    return RunFigures(summary=summary, values=values, reasons=reasons, losses=losses)


def choose_primary(names: set[str]) -> str:
    """The first of ``PRIMARY`` among the names of figures that were measured; empty: none was."""
    return next((name for name in PRIMARY if name in names), "")


def _value(name: str, record: RunRecord, summary: RunSummary) -> tuple[float | None, str]:
    if name == "start_to_step_seconds":
        return _start_to_step(record)
    value = getattr(summary, name)
    if value is None or not math.isfinite(value):
        return None, summary.reasons.get(name, "it was not recorded")
    return float(value), ""


def _start_to_step(record: RunRecord) -> tuple[float | None, str]:
    if record.system is None or record.system.start.source in _LATE:
        return None, "nobody watched the process from its start"
    if not record.ranks:
        return None, "no training loop was seen in there"
    rank = record.ranks[min(record.ranks)]
    at = next((mark.t for mark in rank.marks if mark.name == "first_step"), None)
    if at is None:
        return None, "no step was recorded"
    seconds = rank.start.time + at - record.system.start.time
    return (seconds, "") if seconds > 0 else (None, "the wall clock was set during the run")
