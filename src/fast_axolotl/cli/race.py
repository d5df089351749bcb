"""A race between libraries that must give one result: equality first, then alternating repeats.

The result of one pass is digested, which is the warm-up: it imports and compiles. A library that
gives another result than ours is not timed. The others repeat in the order A B C, A B C: what else
the machine does affects all alike. A repeat is one pass, or the median of as many as take 0.2 s.

This file needs the standard library alone to be imported, so that a process of another environment
can use the digests.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from statistics import median
from typing import Any

LEAST_SECONDS = 0.2
_MOST_PASSES = 50
_REPEATS = 5
_BLOCK = 4096

_encode = json.JSONEncoder(
    sort_keys=True,
    separators=(",", ":"),
    ensure_ascii=False,
    check_circular=False,
    default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value),
).encode


@dataclass(frozen=True)
class Digest:
    """A result, small enough to compare and to send between processes."""

    rows: int
    columns: dict[str, str]
    """Column to the SHA-256 of its values in order."""


def digest_items(items: Iterable[Any], kind: str) -> Digest:
    """What a reader gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``.

    A column's digest is over the canonical JSON of its values, so it does not depend on where
    batches end. Costs about 8 µs for a row of a kilobyte.
    """
    hashes: dict[str, Any] = {}
    rows = 0
    for columns in _as_columns(iter(items), kind):
        for name, values in columns.items():
            text = _encode(values)[1:-1].encode("utf-8", "surrogatepass")
            hashes.setdefault(name, hashlib.sha256()).update(text + b",")
        rows += max(map(len, columns.values()), default=0)
    return Digest(rows, {name: item.hexdigest() for name, item in hashes.items()})


def digest_columns(columns: Mapping[str, Any], rows: int) -> Digest:
    """A result of texts, integers or rows of integers, whatever holds them."""
    digests: dict[str, str] = {}
    for name, values in columns.items():
        blocks = _blocks(iter(values.tolist() if hasattr(values, "tolist") else values))
        digests |= digest_items(({name: block} for block in blocks), "python").columns
    return Digest(rows, digests)


def difference(ours: Digest, other: Digest) -> str | None:
    """How the other result differs from ours, in one line; ``None`` where they are equal."""
    if ours.rows != other.rows:
        return f"{other.rows:,} of {ours.rows:,} rows"
    if ours.columns.keys() != other.columns.keys():
        return f"columns {sorted(other.columns)} in place of {sorted(ours.columns)}"
    names = [name for name in ours.columns if ours.columns[name] != other.columns[name]]
    return f"other values in {', '.join(names)}" if names else None


def _as_columns(items: Iterator[Any], kind: str) -> Iterator[Mapping[str, list[Any]]]:
    if kind == "python":
        yield from items
    elif kind == "arrow":
        yield from (batch.to_pydict() for batch in items)
    else:
        for block in _blocks(items):
            yield {name: [row.get(name) for row in block] for name in block[0]}


def _blocks(values: Iterator[Any]) -> Iterator[list[Any]]:
    while block := list(islice(values, _BLOCK)):
        yield block


@dataclass(frozen=True)
class Contender:
    """A library that may take part, with the rows in its own form."""

    name: str
    gives: str
    """What it takes and returns."""
    run: Callable[[], Any]
    """One pass: gives the result, or an iterator that makes it."""
    digest: Callable[[Any], Digest]
    against: str | None = None
    """Which of ours does the same work; ``None`` for ours."""
    package: str | None = None
    """What has to be installed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The result of one contender."""

    contender: Contender
    rows: int
    seconds: Sequence[float]
    """Every repeat, in the order run."""
    ratio: tuple[float, float, float] | None = None
    """Our speed over its, repeat by repeat: median, least, most; above 1 we are faster."""


def timed_pass(run: Callable[[], Any]) -> float:
    """Seconds of one pass; garbage is collected before, and the result is freed afterwards."""
    gc.collect()
    start = time.perf_counter()
    result = run()
    if isinstance(result, Iterator):
        deque(result, maxlen=0)
    return time.perf_counter() - start


def interleave(
    timed: Mapping[str, Callable[[], float]], repeats: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of every repeat, alternating: each the median of as many passes as take 0.2 s."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        for name, run in timed.items():
            passes = [run()]
            while sum(passes) < LEAST_SECONDS and len(passes) < _MOST_PASSES:
                passes.append(run())
            seconds[name].append(median(passes))
    return seconds


def run_race(
    contenders: Sequence[Contender],
    *,
    repeats: int = _REPEATS,
    progress: Callable[[str], None],
) -> tuple[list[Timing], dict[str, str]]:
    """Timings, and who took no part with the reason; raises where ours cannot take part."""
    from fast_axolotl.errors import DataError, FastAxolotlError

    ready: dict[str, tuple[Contender, Digest]] = {}
    left_out: dict[str, str] = {}
    for one in contenders:
        progress(f"{one.name}: first pass, checking the result")
        if one.package is not None and find_spec(one.package) is None:
            left_out[one.name] = f"{one.package} is not installed"
            continue
        try:
            digest = one.digest(one.run())
        except (FastAxolotlError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Panics of other libraries are BaseExceptions; a peer may fail in any way.
            reason = " ".join(str(error).split())[:200]
            if not isinstance(error, NotImplementedError):
                reason = f"{type(error).__name__}: {reason}"
            if one.against is None:
                raise DataError(f"{one.name} failed: {reason}") from error
            left_out[one.name] = reason
            continue
        if one.against is not None and (other := difference(ready[one.against][1], digest)):
            left_out[one.name] = f"another answer: {other}"
        else:
            ready[one.name] = one, digest
    # What the imported packages hold is nobody's garbage.
    gc.collect()
    gc.freeze()
    try:
        timed = {name: partial(timed_pass, one.run) for name, (one, _) in ready.items()}
        seconds = interleave(timed, repeats, progress)
    finally:
        gc.unfreeze()
    timings = []
    for name, (one, digest) in ready.items():
        pairs = zip(seconds[name], seconds.get(one.against or "", ()), strict=False)
        ratios = [theirs / ours for theirs, ours in pairs]
        ratio = (median(ratios), min(ratios), max(ratios)) if ratios else None
        timings.append(Timing(contender=one, rows=digest.rows, seconds=seconds[name], ratio=ratio))
    return timings, left_out
