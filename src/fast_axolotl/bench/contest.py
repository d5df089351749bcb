"""A race between functions: the same input, equal answers first, then interleaved repeats.

An ``Entry`` is somebody who may take part. ``prepare`` imports what it needs and brings the input
into its form, which is not timed; what it gives back is one pass. A peer that is not installed, or
fails, is left out with its reason. Equality and timing are those of the readers (``timing``), with
answers in place of rows. What a pass returns is freed after the clock has stopped, for all alike.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fast_axolotl.bench.answers import digest_columns
from fast_axolotl.bench.earlier import EARLIER, EarlierPackage, PeerError
from fast_axolotl.bench.fingerprint import Fingerprint
from fast_axolotl.bench.matrix import LeftOut, PeerTiming
from fast_axolotl.bench.operation_result import OperationCase
from fast_axolotl.bench.peer_process import PeerProcess
from fast_axolotl.bench.timing import Contestant, compare, one_line

__all__ = ["AXOLOTL", "Contest", "Entry", "Remote", "Session", "peer_module", "run_contest"]

AXOLOTL = "Axolotl"

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Somebody in this process who may take part."""

    name: str
    gives: str
    """What it takes and gives, such as ``lists → numpy``."""
    rows: int
    """Rows of a pass: fewer than the case has where only the first are timed."""
    prepare: Callable[[], Run]
    columns: Callable[[Any], Mapping[str, Any]]
    """The answer in a form that ``answers`` can compare."""
    package: str | None = None
    """Its distribution, for the version."""
    rival: str | None = None
    """Which of ours does the same work; ``None`` for ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A peer in another process that may take part."""

    name: str
    gives: str
    rows: int
    process: PeerProcess | LeftOut
    operation: str
    write: Callable[[Path], Path]
    """Writes the input into a folder, as the process reads it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rival: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A case to be run: ours first, which the others are compared with."""

    name: str
    text: str
    rows: int
    unit: str
    entries: Sequence[Entry]
    remotes: Sequence[Remote] = ()
    first: Callable[[int], Any] | None = None
    """Our answer for the first rows alone, where a peer is timed on fewer."""


class Session:
    """What the cases of one benchmark share: a folder, the peers' processes, how often, whom to
    tell."""

    def __init__(
        self,
        *,
        folder: Path,
        repeats: int,
        earlier: EarlierPackage | LeftOut,
        axolotl: Callable[[], PeerProcess | LeftOut],
        progress: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.repeats = repeats
        self.earlier = earlier
        self.tell = progress
        self._start_axolotl = axolotl
        self._axolotl: PeerProcess | LeftOut | None = None

    def axolotl(self) -> PeerProcess | LeftOut:
        """Axolotl, started when it is first asked for: its import takes ten seconds and more."""
        if self._axolotl is None:
            self._axolotl = self._start_axolotl()
        return self._axolotl

    def remote_earlier(
        self,
        operation: str,
        *,
        gives: str,
        rows: int,
        rival: str,
        write: Callable[[Path], Path],
        settings: Mapping[str, Any] | None = None,
    ) -> Remote:
        """The earlier package on one of its operations."""
        return Remote(
            name=EARLIER,
            gives=gives,
            rows=rows,
            process=self.earlier,
            operation=operation,
            write=write,
            settings=settings or {},
            rival=rival,
        )


def peer_module(name: str) -> Any:
    """A package that need not be there; what is missing is named by the error."""
    return importlib.import_module(name)


def run_contest(contest: Contest, session: Session) -> OperationCase:
    """Checks and times everybody who can take part."""

    def tell(text: str) -> None:
        session.tell(f"{contest.name}: {text}")

    tell("making the input")
    reference, *entries = contest.entries
    ours = _Local.of(reference, contest.first)
    others: list[Contestant] = []
    left_out: list[LeftOut] = []
    for entry in entries:
        try:
            others.append(_Local.of(entry))
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; its reason is told
            left_out.append(LeftOut(name=entry.name, reason=one_line(error)))
    loaded: list[_Away] = []
    for remote in contest.remotes:
        try:
            loaded.append(_Away.of(remote, session.folder))
        except PeerError as error:
            left_out.append(LeftOut(name=remote.name, reason=str(error)))
    try:
        timings, failed = compare(ours, [*others, *loaded], session.repeats, tell)
    finally:
        for away in loaded:
            away.forget()
    return _as_case(contest, timings, [*left_out, *failed])


def _as_case(
    contest: Contest, timings: Sequence[PeerTiming], left_out: Sequence[LeftOut]
) -> OperationCase:
    everybody: list[Entry | Remote] = [*contest.entries, *contest.remotes]
    return OperationCase(
        name=contest.name,
        text=contest.text,
        rows=contest.rows,
        unit=contest.unit,
        timings=tuple(timings),
        rivals={item.name: item.rival for item in everybody if item.rival is not None},
        left_out=tuple(left_out),
    )


@dataclass(slots=True, kw_only=True)
class _Local:
    """An entry that is ready."""

    name: str
    version: str | None
    output: str
    rows: int
    most_rows: int | None
    run: Run
    columns: Callable[[Any], Mapping[str, Any]]
    first: Callable[[int], Any] | None
    unbounded: str | None = None

    @classmethod
    def of(cls, entry: Entry, first: Callable[[int], Any] | None = None) -> _Local:
        return cls(
            name=entry.name,
            version=None if entry.package is None else metadata.version(entry.package),
            output=entry.gives,
            rows=entry.rows,
            most_rows=entry.rows,
            run=entry.prepare(),
            columns=entry.columns,
            first=first,
        )

    def fingerprint(self, limit: int | None = None) -> Fingerprint:
        if limit is None:
            rows, answer = self.rows, self.run()
        else:
            assert self.first is not None, "a peer is timed on fewer rows, and ours cannot be"
            rows, answer = limit, self.first(limit)
        return Fingerprint(rows, *digest_columns(self.columns(answer)))

    def seconds(self) -> float:
        gc.collect()
        start = time.perf_counter()
        answer = self.run()
        taken = time.perf_counter() - start
        del answer
        return taken


@dataclass(slots=True, kw_only=True)
class _Away:
    """A peer in another process, with its input loaded."""

    name: str
    version: str | None
    output: str
    rows: int
    most_rows: int | None
    process: PeerProcess
    unbounded: str | None = None

    @classmethod
    def of(cls, remote: Remote, folder: Path) -> _Away:
        if isinstance(remote.process, LeftOut):
            raise PeerError(remote.process.reason)
        path = remote.write(folder)
        remote.process.ask(
            task="load",
            operation=remote.operation,
            path=str(path),
            settings=dict(remote.settings),
        )
        path.unlink()
        return cls(
            name=remote.name,
            version=remote.process.version,
            output=remote.gives,
            rows=remote.rows,
            most_rows=remote.rows,
            process=remote.process,
        )

    def fingerprint(self) -> Fingerprint:
        reply = self.process.ask(task="answer")
        return Fingerprint(self.rows, reply["columns"], reply["first"])

    def seconds(self) -> float:
        return float(self.process.ask(task="seconds")["seconds"])

    def forget(self) -> None:
        """Frees its input; a process that has ended holds none."""
        with suppress(PeerError):
            self.process.ask(task="forget")
