"""The fields of a summary while it is made, each missing one with its reason."""

from __future__ import annotations

from typing import Any

from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.record import RunRecord, RunSummary, Verdict
from fast_axolotl.record.catalogue import FIGURES


class SummaryBuilder:
    """Takes figures as they are found, and a reason for each that is missing."""

    def __init__(self, record: RunRecord, chosen: RankFigures | None) -> None:
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        ranks = list(record.ranks.values())
        if chosen is not None:
            ranks.append(chosen.record)
        self._recorded = {name: text for rank in ranks for name, text in rank.reasons.items()}
        self._is_outside = not ranks
        """Nobody recorded from inside the training process."""
        self.unseen = ""
        """Why there is no steady phase, if there is none."""
        if ranks and (chosen is None or not chosen.steady.steps):
            self.unseen = "no step of the steady phase was recorded"

    def put(
        self, name: str, value: Any, reason: str = "", *sources: str, is_system: bool = False
    ) -> None:
        """Set a field. Where the value is missing, the reason is the one that the meter recorded
        under the field's name or that of one of its sources, else the one given here, else the
        catalogue's."""
        self.values[name] = value
        if value is not None:
            return
        recorded = [self._recorded[key] for key in (name, *sources) if key in self._recorded]
        if recorded and not is_system:
            self.reasons[name] = recorded[0]
        elif self._is_outside and not is_system:
            self.reasons[name] = "the training process was not measured from inside"
        else:
            self.reasons[name] = reason or FIGURES[name].missing

    def put_steady(self, name: str, value: Any, reason: str = "", *sources: str) -> None:
        """Set a field that takes steps of the steady phase."""
        self.put(name, value, self.unseen or reason, *sources)

    def build(self) -> RunSummary:
        """The summary, its verdict still empty."""
        figures = {name: self.values.pop(name, None) for name in FIGURES}
        del figures["start_to_step_seconds"]  # which only a protocol sees
        for name, value in figures.items():
            if value is None:
                self.reasons.setdefault(name, FIGURES[name].missing)
        for name in ("straggler_rank", "data_parallel_size", "replacements"):
            if self.values.get(name) is None:
                self.reasons.setdefault(name, "not recorded")
        nothing = Verdict(kind="inconclusive", headline="")
        return RunSummary(verdict=nothing, figures=figures, reasons=self.reasons, **self.values)
