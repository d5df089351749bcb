"""The result of a protocol or comparison, as data.

A protocol's folder holds ``protocol.json`` and one record for every run:

    PROTOCOL/protocol.json
    PROTOCOL/runs/01-baseline/rank-0.jsonl …
    PROTOCOL/runs/02-drop-in/…
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fast_axolotl.errors import DataError
from fast_axolotl.record.catalogue import FIGURES, Better
from fast_axolotl.record.codec import from_plain

Outcome = Literal[
    "better",
    "worse",
    "changed",
    "no change that matters",
    "no clear change",
    "no detectable change",
    "not compared",
    "",
]
"""``no detectable change`` is of earlier versions, and stands for both of those above it."""

PROTOCOL_FILE = "protocol.json"
"""What makes a folder a protocol's."""
_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One run of an arm."""

    folder: str
    """Of its record, relative to the protocol's; of several trainings, the one with most steps."""
    trainings: int = 1
    """That it has recorded."""
    pair: int
    """Which pair it belongs to, from 0; warm-up runs are −1."""
    status: Literal["done", "failed", "left out"]
    exit_code: int | None = None
    seconds: float | None = None
    log_tail: str = ""
    """The end of the log; of failed runs only."""
    losses: tuple[float, ...] = ()
    """As the trainer logged them."""
    steps: int | None = None
    """Recorded, warm-up included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep over batch sizes."""

    micro_batch: int
    """Samples of one pass of one rank."""
    accumulation: int
    """Passes of a step."""
    outcome: Literal["ran", "out of memory", "failed"]
    reason: str = ""
    """Why it did not run, or has no rate."""
    folder: str = ""
    """Of its record."""
    ranks: int = 1
    """That read different samples."""
    rate: float | None = None
    """Tokens (or samples, see ``unit``) per second, warm-up left out."""
    low: float | None = None
    """Lower end of the 95 % interval over steps; runs differ by more."""
    high: float | None = None
    unit: str = "tokens/s"
    step_seconds: float | None = None
    stall: float | None = None
    """Share of the time that waits for data."""
    peak_bytes: int | None = None
    """Highest that torch has allocated on a GPU."""
    held_bytes: int | None = None
    """Highest that was taken of a GPU: by NVML, or reserved by torch."""
    total_bytes: int | None = None
    """Memory of the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A command that is compared with the others."""

    name: str
    text: str
    """What is different about it, in a few words."""
    command: tuple[str, ...]
    runs: tuple[ArmRun, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Loader settings as its runs recorded them: workers, prefetch, dispatcher, …"""
    steps: float | None = None
    """That a run recorded: the median of those that count."""
    shown_run: str = ""
    """Folder of the run that stands for the arm: of those that count, the one nearest the median of
    the figure that decides; before there is one, the last warm-up."""
    verdict: str = ""
    """Kind and subtype, of that run."""
    headline: str = ""
    action: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Share of the time of a step by phase, of that run; empty where no stack was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of one arm, beside the same figure of the baseline."""

    value: float | None
    """Median over the arm's runs."""
    values: tuple[float, ...] = ()
    """Of the single runs, in the order of the pairs."""
    ratio: float | None = None
    """Of arm ÷ baseline, over pairs, robust; ``None`` for the baseline itself."""
    mean_ratio: float | None = None
    """The geometric mean of all pairs, with the outliers; not kept by earlier versions."""
    low: float | None = None
    """Lower end of the 95 % interval of the ratio."""
    high: float | None = None
    difference: float | None = None
    """Of arm − baseline, over pairs, robust; of figures that can be 0 only. Where there is one and
    no ratio, a value is so near 0 that the difference decides."""
    difference_low: float | None = None
    """Lower end of its 95 % interval."""
    difference_high: float | None = None
    p_value: float | None = None
    """Probability of such a ratio (or difference, where that decides) without any change, at any
    look at the pairs."""
    p_adjusted: float | None = None
    """The same by Holm's correction, among the figures that decide or among all others."""
    error: float | None = None
    """Standard error of the ratio's logarithm, or of the difference where that decides."""
    degrees: float | None = None
    """Degrees of freedom of that error."""
    is_deciding: bool = False
    """Whether the figure answers the question whether the arm is better."""
    detectable: float | None = None
    """Share by which the figure must change for 80 % of such protocols to find it; of figures that
    decide."""
    outcome: Outcome = ""
    reason: str = ""
    """Why there is no value, or no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One figure over all arms."""

    name: str
    """Field of ``RunSummary``."""
    label: str
    unit: str
    better: Better
    cells: tuple[Cell, ...]
    """In the order of the arms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Every figure over all arms."""

    arms: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    spend: float = 1.0
    """Part of the 5 % of false findings for this look at the pairs."""
    matters: float = 0.01
    """Share below which a change does not matter; of figures that are shares, so many points."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolResult:
    """What a protocol did and found."""

    schema: int = _SCHEMA
    title: str
    started: float
    seconds: float
    pairs: int
    """Done."""
    planned_pairs: int = 0
    """At most."""
    seed: int | None = None
    """Of the order of the runs; earlier versions had a fixed order."""
    planned_runs: int = 0
    """Warm-up runs included, of pairs that turned out to be needed; 0 where an earlier version has
    not told."""
    order: tuple[str, ...] = ()
    """Arms in the order in which they were run: A B B A …"""
    arms: tuple[Arm, ...]
    matrix: Matrix
    losses: str = ""
    """Whether the losses are equal, in one sentence; ``DIFFERENT`` comes first if they are not."""
    are_losses_equal: bool | None = None
    differing_settings: tuple[str, ...] = ()
    """Loader settings that differ between the arms, one sentence each."""
    dedupe: dict[str, Any] = field(default_factory=dict)
    """Dedupe on its own, on the user's rows: figures and reasons."""
    paragraph: str = ""
    """The answer in plain words: for each arm a line to repeat, then its figures and what to do."""
    environment: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: str | Path) -> ProtocolResult:
        """Read the result of a protocol's folder, with the labels of today for its figures."""
        path = Path(folder) / PROTOCOL_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}")
            for line in data["matrix"]["rows"]:
                if line["name"] in FIGURES:
                    line["label"] = FIGURES[line["name"]].label
            result = from_plain(cls, data)
            if any(len(row.cells) != len(result.matrix.arms) for row in result.matrix.rows):
                raise ValueError("a row has not one cell for each arm")
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"not a protocol result ({error}); run fast-axolotl protocol again", path=str(path)
            ) from error
        return result
