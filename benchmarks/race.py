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
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.command import Tell
from benchmarks.result import Case, LeftOut, Timing
from fast_axolotl.cli import race as product
from fast_axolotl.cli.race import (
    Digest,
    Worker,
    WorkerError,
    difference,
    digest_columns,
    digest_items,
    interleave,
    one_line,
)
from fast_axolotl.errors import FastAxolotlError

AXOLOTL = "Axolotl"
EARLIER = "earlier package"

_PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Somebody in this process who may take part."""

    name: str
    gives: str
    """What it takes and gives, such as ``lists → numpy``."""
    rows: int | None = None
    """Rows of a pass: fewer than the case has where only the first are timed; ``None``: all."""
    prepare: Callable[[], Callable[[], Any]]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A peer in another process that may take part."""

    name: str
    gives: str
    rows: int | None = None
    process: Worker | LeftOut
    operation: str
    write: Callable[[Path], Path]
    """Writes the input into a folder, or says where it is."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rival: str
    unbounded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A case to be run: ours first, which the others are compared with."""

    name: str
    text: str
    rows: int | None = None
    """``None`` where the first pass tells."""
    unit: str = "rows"
    num_bytes: int | None = None
    entries: Sequence[Entry]
    remotes: Sequence[Remote] = ()
    first: Callable[[int], Any] | None = None
    """Our answer for the first rows alone, where a peer is timed on fewer."""
    left_out: Sequence[LeftOut] = ()


class Session:
    """What the cases of one race share: a folder, the peers' processes, how often, whom to tell."""

    def __init__(
        self, folder: Path, repeats: int, stack: ExitStack, tell: Tell, peer_python: str | None
    ) -> None:
        self.folder = folder
        self.repeats = repeats
        self.tell = tell
        self._stack = stack
        self._axolotl: Worker | LeftOut | None = None
        self.earlier: Worker | LeftOut = LeftOut(
            name=EARLIER, reason="no interpreter of its environment was given"
        )
        if peer_python is not None:
            self.earlier = self._start(EARLIER, peer_python)

    @property
    def versions(self) -> dict[str, str]:
        """Of the peer in another environment."""
        if isinstance(self.earlier, LeftOut):
            return {}
        return {EARLIER: self.earlier.hello["version"]}

    def axolotl(self) -> Worker | LeftOut:
        """Axolotl, started when it is first asked for: its import takes ten seconds and more."""
        if self._axolotl is None and find_spec("axolotl") is None:
            self._axolotl = LeftOut(name=AXOLOTL, reason="not installed: axolotl")
        elif self._axolotl is None:
            self.tell("starting Axolotl")
            self._axolotl = self._start(AXOLOTL, sys.executable)
        return self._axolotl

    def _start(self, name: str, python: str) -> Worker | LeftOut:
        # In isolated mode it sees neither our source folder nor PYTHONPATH.
        command = [python, "-I", str(_PEER), name, product.__file__]
        try:
            return self._stack.enter_context(Worker(command, self.folder / f"{name}.txt"))
        except WorkerError as error:
            return LeftOut(name=name, reason=str(error))


def peer_module(name: str) -> Any:
    """A package that need not be there; what is missing is named by the error."""
    return importlib.import_module(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contestant:
    """Somebody who is ready."""

    entry: Entry | Remote
    version: str | None
    digest: Callable[[], Digest]
    seconds: Callable[[], float]


def run_contest(contest: Contest, session: Session) -> Case:
    """Checks and times everybody who can take part."""

    def tell(text: str) -> None:
        session.tell(f"{contest.name}: {text}")

    tell("making the input")
    ready: list[_Contestant] = []
    left_out = list(contest.left_out)
    runs: dict[str, Callable[[], Any]] = {}
    for entry in contest.entries:
        try:
            runs[entry.name] = entry.prepare()
            version = None if entry.package is None else metadata.version(entry.package)
        except Exception as error:  # a peer may fail in any way; its reason is reported
            if not ready:
                raise
            left_out.append(LeftOut(name=entry.name, reason=one_line(error)))
            continue
        ready.append(_local(entry, runs[entry.name], version))
    for remote in contest.remotes:
        try:
            ready.append(_away(remote, session.folder))
        except WorkerError as error:
            left_out.append(LeftOut(name=remote.name, reason=str(error)))
    reference = contest.entries[0]
    expected = ready[0].digest()
    reasons: dict[str, str | None] = {reference.name: None}
    rows = {reference.name: expected.rows}
    for contestant in ready[1:]:
        name = contestant.entry.name
        tell(f"checking {name}")
        try:
            found = contestant.digest()
        except FastAxolotlError:
            raise
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; it is reported
            left_out.append(LeftOut(name=name, reason=one_line(error)))
            continue
        wanted = expected
        limit = contestant.entry.rows
        if limit is not None and limit < expected.rows:
            if reference.columns is None:
                wanted = digest_items(runs[reference.name](), reference.kind, limit)
            else:
                assert contest.first is not None, (
                    "a peer is timed on fewer rows, and ours cannot be"
                )
                wanted = digest_columns(reference.columns(contest.first(limit)), limit)
        reasons[name] = difference(wanted, found)
        rows[name] = found.rows
    timed = {item.entry.name: item.seconds for item in ready if item.entry.name in reasons}
    gc.collect()
    gc.freeze()
    try:
        tell("warm-up")
        for run in timed.values():
            run()
        seconds = interleave(timed, session.repeats, tell)
    finally:
        gc.unfreeze()
        for item in ready:
            if isinstance(item.entry, Remote) and isinstance(item.entry.process, Worker):
                with suppress(WorkerError):
                    item.entry.process.ask("forget")

    def clean(text: str | None) -> str | None:
        """Messages of peers name the input; the folder it was in means nothing to a reader."""
        return None if text is None else text.replace(f"{session.folder}/", "")

    return Case(
        name=contest.name,
        text=contest.text,
        rows=contest.rows or expected.rows,
        unit=contest.unit,
        num_bytes=contest.num_bytes,
        timings=tuple(
            Timing(
                name=item.entry.name,
                version=item.version,
                output=item.entry.gives,
                rows=rows[item.entry.name],
                seconds=tuple(seconds[item.entry.name]),
                reason=clean(reasons[item.entry.name]),
                unbounded=item.entry.unbounded,
            )
            for item in ready
            if item.entry.name in reasons
        ),
        rivals={
            **{item.name: item.rival for item in contest.entries if item.rival is not None},
            **{item.name: item.rival for item in contest.remotes},
        },
        left_out=tuple(
            LeftOut(name=item.name, reason=clean(item.reason) or "") for item in left_out
        ),
    )


def _local(entry: Entry, run: Callable[[], Any], version: str | None) -> _Contestant:
    def digest() -> Digest:
        if entry.columns is None:
            return digest_items(run(), entry.kind, entry.rows)
        assert entry.rows is not None
        return digest_columns(entry.columns(run()), entry.rows)

    def seconds() -> float:
        gc.collect()
        start = time.perf_counter()
        answer = run()
        if entry.columns is None:
            deque(answer, maxlen=0)
        taken = time.perf_counter() - start
        del answer
        return taken

    return _Contestant(entry=entry, version=version, digest=digest, seconds=seconds)


def _away(remote: Remote, folder: Path) -> _Contestant:
    process = remote.process
    if isinstance(process, LeftOut):
        raise WorkerError(process.reason)
    path, settings = str(remote.write(folder)), dict(remote.settings)
    process.ask("load", operation=remote.operation, path=path, settings=settings)

    def digest() -> Digest:
        found = Digest(**process.ask("digest"))
        return found if remote.rows is None else Digest(remote.rows, found.columns, found.first)

    return _Contestant(
        entry=remote,
        version=process.hello["version"],
        digest=digest,
        seconds=lambda: float(process.ask("seconds")["seconds"]),
    )
