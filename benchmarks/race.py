"""Equal answers first, then interleaved repeats, in this process and in those of peers.

An ``Entry`` is somebody in this process who may take part: ``prepare`` imports what it needs and
brings the input into its form, which is not timed; what it gives back makes one pass. A ``Remote``
is a peer in another process (``peer``), asked over a pipe and timed inside it. Who is not installed
or fails is left out with the reason; who gives another answer is timed all the same, and marked.

Every contestant makes one pass that is checked and one that is not counted, so imports, caches and
allocators are warm; the page cache is warm, too. Garbage is collected between passes, outside the
timing; what the imported packages hold is frozen, so that nobody pays for its rivals' modules. What
a pass gives is freed after the clock has stopped.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.command import Tell
from benchmarks.result import Case, Timing
from benchmarks.worker import Worker, WorkerError, one_line
from fast_axolotl.cli import race as product
from fast_axolotl.cli.race import (
    Contender,
    Digest,
    difference,
    digest_columns,
    digest_items,
    interleave,
    timed_pass,
)
from fast_axolotl.errors import FastAxolotlError

AXOLOTL = "Axolotl"
EARLIER = "earlier package"

_PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Somebody who is ready."""

    version: str | None
    digest: Callable[[], Digest]
    seconds: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Entry:
    """Somebody in this process who may take part."""

    name: str
    gives: str
    """What it takes and gives, such as ``lists → numpy``."""
    prepare: Callable[[], Callable[[], Any]]
    rows: int | None = None
    """Rows of a pass: fewer than the case has where only the first are timed; ``None``: all."""
    columns: Callable[[Any], Mapping[str, Any]] | None = None
    """The answer in a form that can be compared; ``None`` for a reader, whose batches are."""
    kind: str = ""
    """What a reader gives: ``arrow``, ``python`` or ``rows``."""
    package: str | None = None
    """Its distribution, for the version."""
    rival: str | None = None
    """Which of ours does the same work; ``None`` for ours."""
    unbounded: str | None = None
    """Why its memory grows with the file."""

    def digest(self, answer: Any, rows: int | None) -> Digest:
        if self.columns is None:
            return digest_items(answer, self.kind, rows)
        assert rows is not None
        return digest_columns(self.columns(answer), rows)

    def ready(self, _: Path) -> Contestant:
        run = self.prepare()
        contender = Contender(
            run=run,
            digest=lambda answer: self.digest(answer, self.rows),
            is_stream=self.columns is None,
        )

        def seconds() -> float:
            gc.collect()
            return timed_pass(contender)[0]

        version = None if self.package is None else metadata.version(self.package)
        return Contestant(version=version, digest=lambda: contender.digest(run()), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A peer in another process that may take part."""

    name: str
    gives: str
    rows: int | None = None
    process: Worker | str
    """Or why it could not be started."""
    operation: str
    write: Callable[[Path], Path]
    """Writes the input into a folder, or says where it is."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rival: str
    unbounded: str | None = None

    def ready(self, folder: Path) -> Contestant:
        process = self.process
        if isinstance(process, str):
            raise WorkerError(process)
        path, settings = str(self.write(folder)), dict(self.settings)
        process.ask("load", operation=self.operation, path=path, settings=settings)

        def digest() -> Digest:
            found = Digest(**process.ask("digest"))
            return found if self.rows is None else replace(found, rows=self.rows)

        return Contestant(
            version=process.hello["version"],
            digest=digest,
            seconds=lambda: float(process.ask("seconds")["seconds"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A case to be run."""

    name: str
    text: str
    rows: int | None = None
    """``None`` where the first pass tells."""
    unit: str = "rows"
    num_bytes: int | None = None
    ours: Entry
    """The one that all others are compared with."""
    others: Sequence[Entry | Remote]
    first: Callable[[int], Any] | None = None
    """Our answer for the first rows alone, where a peer is timed on fewer."""
    left_out: Mapping[str, str] = field(default_factory=dict)


class Session:
    """What the cases of one race share: a folder, the peers' processes, how often, whom to tell."""

    def __init__(
        self, folder: Path, repeats: int, stack: ExitStack, tell: Tell, peer_python: str | None
    ) -> None:
        self.folder = folder
        self.repeats = repeats
        self.tell = tell
        self._stack = stack
        self._axolotl: Worker | str | None = None
        self.earlier: Worker | str = "no interpreter of its environment was given"
        if peer_python is not None:
            self.earlier = self._start(EARLIER, peer_python)

    @property
    def versions(self) -> dict[str, str]:
        """Of the peer in another environment."""
        return {} if isinstance(self.earlier, str) else {EARLIER: self.earlier.hello["version"]}

    def axolotl(self) -> Worker | str:
        """Axolotl, started when it is first asked for: its import takes ten seconds and more."""
        if self._axolotl is None and find_spec("axolotl") is None:
            self._axolotl = "not installed: axolotl"
        elif self._axolotl is None:
            self.tell("starting Axolotl")
            self._axolotl = self._start(AXOLOTL, sys.executable)
        return self._axolotl

    def _start(self, name: str, python: str) -> Worker | str:
        # In isolated mode it sees neither our source folder nor PYTHONPATH.
        command = [python, "-I", str(_PEER), name, product.__file__]
        try:
            return self._stack.enter_context(Worker(command, self.folder / f"{name}.txt"))
        except WorkerError as error:
            return str(error)


def peer_module(name: str) -> Any:
    """A package that need not be there; what is missing is named by the error."""
    return importlib.import_module(name)


def run_contest(contest: Contest, session: Session) -> Case:
    """Checks and times everybody who can take part."""

    def tell(text: str) -> None:
        session.tell(f"{contest.name}: {text}")

    tell("making the input")
    ours, left_out = contest.ours, dict(contest.left_out)
    ready = {ours.name: ours.ready(session.folder)}
    for entry in contest.others:
        try:
            ready[entry.name] = entry.ready(session.folder)
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; it is reported
            left_out[entry.name] = one_line(error)
    expected = ready[ours.name].digest()
    reasons: dict[str, str | None] = {ours.name: None}
    rows = {ours.name: expected.rows}
    for entry in contest.others:
        if entry.name not in ready:
            continue
        tell(f"checking {entry.name}")
        try:
            found = ready[entry.name].digest()
        except FastAxolotlError:
            raise
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; it is reported
            left_out[entry.name] = one_line(error)
            continue
        wanted = expected
        if entry.rows is not None and entry.rows < expected.rows:
            answer = contest.first(entry.rows) if contest.first else ours.prepare()()
            wanted = ours.digest(answer, entry.rows)
        reasons[entry.name] = difference(wanted, found)
        rows[entry.name] = found.rows
    timed = {name: ready[name].seconds for name in reasons}
    gc.collect()
    gc.freeze()
    try:
        tell("warm-up")
        for run in timed.values():
            run()
        seconds = interleave(timed, session.repeats, tell)
    finally:
        gc.unfreeze()
        for entry in contest.others:
            if isinstance(entry, Remote) and isinstance(entry.process, Worker):
                with suppress(WorkerError):
                    entry.process.ask("forget")

    def clean(text: str) -> str:
        """Messages of peers name the input; the folder it was in means nothing to a reader."""
        return text.replace(f"{session.folder}/", "")

    def timing(entry: Entry | Remote) -> Timing:
        reason = reasons[entry.name]
        return Timing(
            name=entry.name,
            version=ready[entry.name].version,
            output=entry.gives,
            rows=rows[entry.name],
            seconds=tuple(seconds[entry.name]),
            reason=None if reason is None else clean(reason),
            unbounded=entry.unbounded,
        )

    return Case(
        name=contest.name,
        text=contest.text,
        rows=contest.rows or expected.rows,
        unit=contest.unit,
        num_bytes=contest.num_bytes,
        timings=[timing(entry) for entry in (ours, *contest.others) if entry.name in reasons],
        rivals={entry.name: entry.rival for entry in contest.others if entry.rival is not None},
        left_out={name: clean(reason) for name, reason in left_out.items()},
    )
