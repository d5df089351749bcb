"""What a report is made of: runs with their summaries, and a protocol where there was one."""

from __future__ import annotations

from dataclasses import dataclass

from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.comparison import Protocol

__all__ = ["Report", "ReportRun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One run of a report."""

    name: str
    """As it is called on the page: the arm's name, or the folder's."""
    record: RunRecord
    summary: RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a page shows."""

    title: str
    runs: tuple[ReportRun, ...]
    """The runs with charts; of a protocol, one of each arm."""
    protocol: Protocol | None = None
    notes: tuple[str, ...] = ()
    """What was left out, one sentence each."""
    made: float
    """When the page was made, in seconds since 1970."""
    version: str
    """Version of this package."""
