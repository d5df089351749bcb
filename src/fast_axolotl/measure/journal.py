"""Write the record of one rank.

A file that another process is writing is left alone: see ``writers``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fast_axolotl.measure.writers import find_owner
from fast_axolotl.record import End, LineWriter, Log, Mark, Settings, Start
from fast_axolotl.record.schema import Reason

_ROOMY_BYTES = 3_000_000
"""Size of the record up to which single steps, shards and all that a trainer logs are written.
After that, a trainer's lines are a three-hundredth of the run's age apart, or a minute."""

_log = logging.getLogger("fast_axolotl.measure")


class Journal:
    """Writes ``RUN/rank-N.jsonl``. A disk that refuses ends the record, not the run."""

    def __init__(self, folder: Path, start: Start, *, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.start = start
        self.clock = clock
        self.origin = clock()
        """The clock when the record began: ``t = 0``."""
        self.values: dict[str, Any] = {}
        """The settings known by now."""
        self._reasons: dict[str, str] = {}
        self._log_due = 0.0
        self.path = path = folder / f"rank-{start.rank}.jsonl"
        owner = find_owner(path)
        refusal = ""
        if isinstance(owner, Start):
            refusal = f"process {owner.pid} on {owner.host} is already recording into it"
        self.is_refused = bool(refusal)
        """Whether the file is another process's, and nothing is written."""
        self._writer = LineWriter(path, refusal=refusal)
        self._is_failure_told = False
        self.write(start)

    @property
    def has_room(self) -> bool:
        """Whether the record is still small enough for every detail."""
        return self._writer.num_bytes < _ROOMY_BYTES

    def since_start(self, at: float | None = None) -> float:
        """Seconds since the first line."""
        return round((self.clock() if at is None else at) - self.origin, 6)

    def write(self, line: object) -> None:
        """Append a line."""
        self._writer.write(line)
        if self._writer.failure and not self._is_failure_told:
            self._is_failure_told = True
            what = "nothing is recorded" if self.is_refused else "recording has stopped"
            _log.warning("%s, but the run continues: %s", what, self._writer.failure)

    def mark(self, name: str, *, at: float | None = None, text: str = "", **place: int) -> None:
        """Note something that happened at a moment, and at which step, fetch and row."""
        self.write(Mark(t=self.since_start(at), name=name, text=text, **place))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the numbers that a trainer logged."""
        numbers = {
            key: float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        t = self.since_start()
        # A trainer may log every step of a long run.
        if numbers and (self.has_room or t >= self._log_due):
            self._log_due = t + min(t / 300, 60.0)
            self.write(Log(t=t, step=step, values=numbers))

    def settings(self, values: Mapping[str, Any]) -> None:
        """Note settings, where they are new."""
        plain = {key: as_json(value) for key, value in values.items()}
        known = self.values
        new = {key: plain[key] for key in plain if key not in known or known[key] != plain[key]}
        if new:
            self.values.update(new)
            self.write(Settings(t=self.since_start(), values=new))

    def reason(self, figure: str, sentence: str) -> None:
        """Note why a figure is missing, once."""
        if self._reasons.get(figure) != sentence:
            self._reasons[figure] = sentence
            self.write(Settings(t=self.since_start(), reasons={figure: sentence}))

    def end(self, reason: Reason, error: str, overhead_seconds: float, fetches: int) -> None:
        """Write the last line."""
        self.write(
            End(
                t=self.since_start(),
                reason=reason,
                error=error,
                overhead_seconds=round(overhead_seconds, 6),
                overhead_fetches=fetches,
            )
        )
        self._writer.close()


def as_json(value: Any) -> Any:
    """A value as JSON holds it; what JSON cannot hold becomes its text."""
    try:
        return json.loads(json.dumps(value, default=str))
    except (TypeError, ValueError):
        return str(value)
