"""A race between libraries that must give one answer: equality first, then alternating repeats.

Every contender is built twice: on a few rows, which imports and compiles, timed apart; then on all
of them. One pass is digested, which is the warm-up. Whoever gives another answer than ours is not
timed. The others make their repeats interleaved, A B C, A B C: what else the machine does falls on
all alike. A repeat is one pass, or the median of as many passes as take 0.2 s; garbage is collected
before it, outside the timing.

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
from importlib.util import find_spec
from itertools import islice
from statistics import median
from typing import Any

LEAST_SECONDS = 0.2
MOST_PASSES = 50
_FEW_ROWS = 200
_BLOCK = 4096
_SAMPLE_CHARACTERS = 60

_encode = json.JSONEncoder(
    sort_keys=True,
    separators=(",", ":"),
    ensure_ascii=False,
    check_circular=False,
    default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value),
).encode


@dataclass(frozen=True)
class Digest:
    """An answer, small enough to compare and to send between processes."""

    rows: int
    columns: dict[str, str]
    """Column to the SHA-256 of its values in order."""
    first: dict[str, str]
    """Column to the beginning of its first value, to show where columns differ."""


def digest_items(items: Iterable[Any], kind: str, limit: int | None = None) -> Digest:
    """What a reader gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``.

    A column's digest is over the canonical JSON of its values, so it does not depend on where
    batches end. Costs about 8 µs for a row of a kilobyte.
    """
    hashes: dict[str, Any] = {}
    first: dict[str, str] = {}
    rows = 0
    iterator = iter(items)
    while limit is None or rows < limit:
        columns: Mapping[str, list[Any]] = {}
        if kind == "rows":
            block = list(islice(iterator, 1000))
            columns = {name: [row.get(name) for row in block] for name in block[0]} if block else {}
        elif kind == "python":
            columns = next(iterator, {})
        elif (batch := next(iterator, None)) is not None:
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        count = max((len(values) for values in columns.values()), default=0)
        if not count:
            break
        count = count if limit is None else min(count, limit - rows)
        for name, values in columns.items():
            if name not in hashes:
                hashes[name] = hashlib.sha256()
                first[name] = _encode(values[0])[:_SAMPLE_CHARACTERS]
            text = _encode(values[:count])[1:-1]
            hashes[name].update(text.encode("utf-8", "surrogatepass") + b",")
        rows += count
    return Digest(rows, {name: item.hexdigest() for name, item in hashes.items()}, first)


def digest_columns(columns: Mapping[str, Any], rows: int) -> Digest:
    """An answer of texts, integers or rows of integers, whatever holds them."""
    found = [
        digest_items(({name: block} for block in _blocks(values)), "python")
        for name, values in columns.items()
    ]
    digests = {name: text for one in found for name, text in one.columns.items()}
    return Digest(rows, digests, {name: text for one in found for name, text in one.first.items()})


def difference(ours: Digest, other: Digest) -> str | None:
    """How the other answer differs from ours, in one line; ``None`` where they are equal."""
    if (ours.rows, ours.columns) == (other.rows, other.columns):
        return None
    if ours.rows != other.rows:
        return f"{other.rows:,} of {ours.rows:,} rows"
    if ours.columns.keys() != other.columns.keys():
        return f"columns {sorted(other.columns)} in place of {sorted(ours.columns)}"
    names = [name for name in ours.columns if ours.columns[name] != other.columns[name]]
    name = next((name for name in names if ours.first[name] != other.first[name]), names[0])
    if ours.first[name] == other.first[name]:
        return f"column {name} differs after its first row"
    return f"column {name} begins {other.first[name]} in place of {ours.first[name]}"


def _blocks(values: Any) -> Iterator[Sequence[Any]]:
    if hasattr(values, "tolist"):
        for start in range(0, len(values), _BLOCK):
            yield values[start : start + _BLOCK].tolist()
        return
    source = iter(values)
    while block := list(islice(source, _BLOCK)):
        yield block


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody who is ready, with the rows in a form of their own."""

    run: Callable[[], Any]
    """One pass: gives the answer, or an iterator that makes it."""
    digest: Callable[[Any], Digest]
    is_stream: bool = False
    """Whether ``run`` gives an iterator, whose first item has a time of its own."""
    version: str | None = None


@dataclass(frozen=True)
class Entry:
    """Somebody who may take part."""

    build: Callable[[Mapping[str, Any]], Contender]
    """Takes the request, gives the contender; imported by its name, in the process."""
    who: str
    """Which of those that it builds."""
    name: str
    gives: str
    against: str | None = None
    """Which of ours does the same work; ``None`` for ours."""
    needs: str | None = None
    """A package that has to be installed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one contender came to."""

    name: str
    gives: str
    version: str | None
    against: str | None
    reason: str | None
    """How its answer differs from ours: then it is not timed."""
    seconds: tuple[float, ...]
    """Every repeat, in the order run."""
    first_seconds: tuple[float, ...]
    """Until the first batch, of every pass; empty where there is none."""
    first_call_seconds: float
    """Imports, compiling or loading kernels, and a pass over a few rows: before all of it."""
    ratio: tuple[float, float, float] | None = None
    """Our speed over its, repeat by repeat: median, least, most; above 1 we are faster."""


def timed_pass(contender: Contender) -> tuple[float, float | None]:
    """Seconds of one pass, and until its first item; the answer is freed after the clock stops."""
    first = None
    start = time.perf_counter()
    answer = contender.run()
    if contender.is_stream:
        next(answer, None)
        first = time.perf_counter() - start
        deque(answer, maxlen=0)
    return time.perf_counter() - start, first


def interleave(
    timed: Mapping[str, Callable[[], float]], repeats: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of every repeat, by turns: each the median of as many passes as take 0.2 s."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        for name, run in timed.items():
            passes = [run()]
            while sum(passes) < LEAST_SECONDS and len(passes) < MOST_PASSES:
                passes.append(run())
            seconds[name].append(median(passes))
    return seconds


def run_race(
    entries: Sequence[Entry],
    request: Mapping[str, Any],
    *,
    repeats: int,
    progress: Callable[[str], None],
) -> tuple[list[Timing], dict[str, str]]:
    """Who was timed, and who took no part with the reason; raises where ours cannot take part."""
    from fast_axolotl.errors import DataError, FastAxolotlError

    ready: dict[str, tuple[Entry, Contender, float, Digest]] = {}
    left_out: dict[str, str] = {}
    for entry in entries:
        progress(f"{entry.name}: loading, first pass, checking the result")
        if entry.needs is not None and find_spec(entry.needs) is None:
            left_out[entry.name] = f"{entry.needs} is not installed"
            continue
        own = {**request, "who": entry.who}
        try:
            start = time.perf_counter()
            timed_pass(entry.build({**own, "rows": min(request["rows"], _FEW_ROWS)}))
            first_call = time.perf_counter() - start
            contender = entry.build(own)
            ready[entry.name] = entry, contender, first_call, contender.digest(contender.run())
        except FastAxolotlError:
            raise
        except BaseException as error:
            # Panics of other libraries are BaseExceptions; a peer may fail in any way.
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())[:200]
            if not isinstance(error, NotImplementedError):
                reason = f"{type(error).__name__}: {reason}"
            if entry.against is None:
                raise DataError(f"{entry.name} failed: {reason}") from error
            left_out[entry.name] = reason
    reasons = {
        name: difference(ready[entry.against or name][3], digest)
        for name, (entry, _, _, digest) in ready.items()
    }
    firsts: dict[str, list[float]] = {name: [] for name in ready}

    def timed(name: str) -> Callable[[], float]:
        def run() -> float:
            gc.collect()
            seconds, first = timed_pass(ready[name][1])
            firsts[name] += [] if first is None else [first]
            return seconds

        return run

    equal = {name: timed(name) for name, reason in reasons.items() if reason is None}
    # What the imported packages hold is nobody's garbage.
    gc.collect()
    gc.freeze()
    try:
        seconds = interleave(equal, repeats, progress)
    finally:
        gc.unfreeze()
    timings = []
    for name, (entry, contender, first_call, _) in ready.items():
        own_seconds, ours = seconds.get(name, []), seconds.get(entry.against or "", [])
        ratios = [theirs / mine for theirs, mine in zip(own_seconds, ours, strict=False)]
        timing = Timing(
            name=name,
            gives=entry.gives,
            version=contender.version,
            against=entry.against,
            reason=reasons[name],
            seconds=tuple(own_seconds),
            first_seconds=tuple(firsts[name]),
            first_call_seconds=first_call,
            ratio=(median(ratios), min(ratios), max(ratios)) if ratios else None,
        )
        timings.append(timing)
    return timings, left_out
