"""Memory of this process by phase: resident size at a phase's end, and the highest inside it.

The kernel keeps one high-water mark a process, which is set back at the end of every phase, so that
each has its own. Costs some 100 µs a phase.
"""

from __future__ import annotations

from pathlib import Path

from fast_axolotl.measure.journal import Journal
from fast_axolotl.measure.procfs import has_procfs, read_memory, reset_high_water
from fast_axolotl.record import Phase
from fast_axolotl.system import PROC

__all__ = ["PhaseLog"]


class PhaseLog:
    """Notes the ends of phases."""

    def __init__(self, journal: Journal, proc: Path = PROC) -> None:
        self.start = 0.0
        """When the present phase began, in seconds since the record did."""
        self._journal = journal
        self._proc = proc
        self._is_fresh = True

    def end(self, name: str, at: float | None = None) -> None:
        """The present phase ends, and has this name."""
        found = read_memory(proc=self._proc)
        t = self._journal.since_start(at)
        self._journal.write(
            Phase(
                t=t,
                name=name,
                seconds=round(t - self.start, 6),
                rss_bytes=None if found is None else found.rss_bytes,
                hwm_bytes=found.hwm_bytes if found is not None and self._is_fresh else None,
            )
        )
        self.start = t
        self._is_fresh = reset_high_water(proc=self._proc)
        if not has_procfs(self._proc):
            self._explain("this system has no /proc, and keeps no high-water mark")
        elif not self._is_fresh:
            self._explain("the high-water mark could not be set back: clear_refs is not writable")

    def _explain(self, sentence: str) -> None:
        self._journal.reason("hwm_by_phase", sentence)
