"""The fields of a summary while it is made, each missing one with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.record import RunRecord, RunSummary, Verdict

__all__ = ["Findings"]


class Findings:
    """The fields of a summary as they are found, each missing one with its reason."""

    def __init__(self, record: RunRecord, chosen: RankFigures | None) -> None:
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.given: dict[str, str] = {}
        ranks = list(record.ranks.values())
        if chosen is not None:
            ranks.append(chosen.record)
        for rank in ranks:
            self.given.update(rank.reasons)
        self.is_outside = not ranks
        """Nobody recorded from inside the training process."""
        self.unseen = ""
        """Why there is no steady phase, if there is none."""
        if ranks and (chosen is None or not chosen.steady.steps):
            self.unseen = "no step of the steady phase was recorded"

    def put(
        self,
        name: str,
        value: Any,
        reason: str | Mapping[str, str],
        *sources: str,
        is_system: bool = False,
    ) -> None:
        """Set a field; the reason counts where the value is missing, unless the meter gave one
        under the field's name or that of one of its sources."""
        self.values[name] = value
        if value is not None:
            return
        told = [self.given[key] for key in (name, *sources) if key in self.given and not is_system]
        sentence = reason if isinstance(reason, str) else reason.get(name, "")
        if self.is_outside and not is_system:
            sentence = "no training process was seen from inside"
        self.reasons[name] = (told or [sentence or "it was not recorded"])[0]

    def put_steady(self, name: str, value: Any, reason: str, *sources: str) -> None:
        """Set a field that takes steps of the steady phase."""
        self.put(name, value, self.unseen or reason, *sources)

    def build(self) -> RunSummary:
        """The summary, its verdict still empty."""
        nothing = Verdict(kind="inconclusive", headline="")
        return RunSummary(verdict=nothing, reasons=self.reasons, **self.values)
