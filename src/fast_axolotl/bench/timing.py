"""Equality first, then interleaved repeats: A B C, A B C, and so on.

Interleaving spreads whatever else the machine does over all readers alike. Every reader makes one
pass that is checked and one that is not counted, so imports, caches and allocators are warm; the
page cache is warm too. Garbage is collected between passes, outside the timing; what the imported
packages hold is frozen, so that a reader of Python objects does not pay for its rivals' modules.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from fast_axolotl.bench.earlier import EARLIER, EarlierPackage, PeerError
from fast_axolotl.bench.fingerprint import Fingerprint, difference, fingerprint
from fast_axolotl.bench.matrix import LeftOut, PeerTiming
from fast_axolotl.bench.peers import Pass, Peer
from fast_axolotl.errors import FastAxolotlError

__all__ = [
    "Contestant",
    "EarlierContestant",
    "LocalContestant",
    "Reference",
    "compare",
    "local_contestants",
    "one_line",
]

_LEAST_SECONDS = 0.2
_MOST_PASSES = 50
"""A repeat is as many passes as take 0.2 s, at most 50."""


class Contestant(Protocol):
    """A reader, or another function, with its input."""

    name: str
    version: str | None
    output: str
    most_rows: int | None
    unbounded: str | None

    def fingerprint(self) -> Fingerprint: ...

    def seconds(self) -> float: ...


class Reference(Contestant, Protocol):
    """Ours, which the others are compared with: also on its first rows alone."""

    def fingerprint(self, limit: int | None = None) -> Fingerprint: ...


@dataclass(slots=True, kw_only=True)
class LocalContestant:
    """A reader in this process."""

    name: str
    version: str | None
    output: str
    most_rows: int | None
    unbounded: str | None
    run: Pass

    def fingerprint(self, limit: int | None = None) -> Fingerprint:
        return fingerprint(self.run(), self.output, limit)

    def seconds(self) -> float:
        gc.collect()
        start = time.perf_counter()
        deque(self.run(), maxlen=0)
        return time.perf_counter() - start


@dataclass(slots=True, kw_only=True)
class EarlierContestant:
    """The earlier package in its own process."""

    package: EarlierPackage
    path: Path
    format: str
    version: str | None
    name: str = EARLIER
    output: str = "python"
    most_rows: int | None = None
    unbounded: str | None = "its stream is a finished list"

    def fingerprint(self) -> Fingerprint:
        return self.package.fingerprint(self.path, self.format)

    def seconds(self) -> float:
        return self.package.seconds(self.path, self.format)


def local_contestants(
    peers: Sequence[Peer], case: str, file_format: str, path: Path
) -> tuple[list[LocalContestant], list[LeftOut]]:
    """The readers that can take part, and those that cannot with the reason."""
    contestants, left_out = [], []
    for peer in peers:
        if peer.only and case not in peer.only:
            continue
        prepare = peer.formats.get(file_format)
        if prepare is None:
            reason = f"does not stream {file_format} files"
            left_out += [] if peer.variant else [LeftOut(name=peer.name, reason=reason)]
            continue
        try:
            run = prepare(path)
            version = peer.version
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; its reason is told
            left_out.append(LeftOut(name=peer.name, reason=one_line(error)))
            continue
        contestants.append(
            LocalContestant(
                name=peer.name,
                version=version,
                output=peer.output,
                most_rows=peer.most_rows,
                unbounded=peer.unbounded.get(case),
                run=run,
            )
        )
    return contestants, left_out


def compare(
    ours: Reference,
    others: Sequence[Contestant],
    repeats: int,
    progress: Callable[[str], None],
) -> tuple[list[PeerTiming], list[LeftOut]]:
    """Checks every reader against ours, then times all of them ``repeats`` times."""
    expected = ours.fingerprint()
    rows = {ours.name: expected.rows}
    differences: dict[str, str | None] = {ours.name: None}
    left_out: list[LeftOut] = []
    taking_part: list[Contestant] = [ours]
    for contestant in others:
        progress(f"checking {contestant.name}")
        try:
            found = contestant.fingerprint()
        except FastAxolotlError:
            raise
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; its reason is told
            left_out.append(LeftOut(name=contestant.name, reason=one_line(error)))
            continue
        wanted = expected
        if contestant.most_rows is not None and expected.rows > contestant.most_rows:
            wanted = ours.fingerprint(contestant.most_rows)
        differences[contestant.name] = difference(wanted, found)
        rows[contestant.name] = found.rows
        taking_part.append(contestant)
    seconds = _interleaved(taking_part, repeats, progress)
    timings = [
        PeerTiming(
            name=contestant.name,
            version=contestant.version,
            output=contestant.output,
            rows=rows[contestant.name],
            seconds=tuple(seconds[contestant.name]),
            equal=differences[contestant.name] is None,
            reason=differences[contestant.name],
            unbounded=contestant.unbounded,
        )
        for contestant in taking_part
    ]
    return timings, left_out


def _interleaved(
    contestants: Sequence[Contestant], repeats: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    gc.collect()
    gc.freeze()
    try:
        progress("warm-up")
        for contestant in contestants:
            contestant.seconds()
        for repeat in range(repeats):
            progress(f"repeat {repeat + 1} of {repeats}")
            for contestant in contestants:
                seconds[contestant.name].append(_one_repeat(contestant))
    finally:
        gc.unfreeze()
    return seconds


def _one_repeat(contestant: Contestant) -> float:
    """One pass, or the median of several where one is too short to be told from its noise."""
    passes = [contestant.seconds()]
    while sum(passes) < _LEAST_SECONDS and len(passes) < _MOST_PASSES:
        passes.append(contestant.seconds())
    return median(passes)


def one_line(error: Exception) -> str:
    """Why a peer takes no part."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, PeerError):
        return text
    if isinstance(error, ImportError):
        return f"not installed: {error.name}"
    return f"{type(error).__name__}: {text}"
