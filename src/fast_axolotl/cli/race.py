"""Compare libraries fairly: check that results are equal, then time them in alternating order.

The result of one pass is digested, which is the warm-up: it imports and compiles. A library that
gives another result than ours is not timed. The others repeat in the order A B C, A B C: what else
the machine does affects all alike. A repeat is the mean of as many passes as take 0.2 s.

This file needs the standard library alone to be imported, so that a process of another environment
can use the digests.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from timeit import Timer
from typing import Any


def digest(answer: Any) -> str:
    """Of the canonical JSON: small enough to compare, and to send between processes."""

    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        return list(value) if isinstance(value, Iterable) else repr(value)

    text = json.dumps(answer, sort_keys=True, ensure_ascii=False, default=plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def columns(items: Iterable[Any], kind: str) -> dict[str, list[Any]]:
    """What a reader gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``."""
    found: dict[str, list[Any]] = {}
    for item in items:
        batch = item.to_pydict() if kind == "arrow" else item
        for name, values in batch.items():
            found.setdefault(name, []).extend([values] if kind == "rows" else values)
    return found


@dataclass(frozen=True)
class Contender:
    """A library that may take part, with the rows in its own form."""

    name: str
    gives: str
    """What it takes and returns."""
    run: Callable[[], Any]
    """One pass: gives the result, or an iterator that makes it."""
    against: str | None = None
    """Which of ours does the same work; ``None`` for ours."""
    package: str | None = None
    """What has to be installed."""
    answer: Callable[[Any], str] = digest
    """The digest of a result."""


def run_race(
    contenders: Sequence[Contender], *, repeats: int = 5, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What was timed, and who took no part with the reason; raises where ours cannot take part.

    ``ours_over_theirs`` is the ratio of speeds, repeat by repeat: median, least and most.
    """
    from fast_axolotl.errors import DataError, FastAxolotlError

    answers: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for one in contenders:
        progress(f"{one.name}: first pass, checking the result")
        try:
            if one.package is not None and find_spec(one.package) is None:
                raise NotImplementedError(f"{one.package} is not installed")
            answer = one.answer(one.run())
            if one.against is not None and answer != answers[one.against]:
                raise NotImplementedError("it gives another answer")
            answers[one.name] = answer
        except (FastAxolotlError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Panics of other libraries are BaseExceptions; a peer may fail in any way.
            reason = " ".join(str(error).split())[:200]
            if not isinstance(error, NotImplementedError):
                reason = f"{type(error).__name__}: {reason}"
            if one.against is None and one.package is None:
                raise DataError(f"{one.name} failed: {reason}") from error
            left_out[one.name] = reason
    timed = [one for one in contenders if one.name in answers]

    def pass_over(one: Contender) -> None:
        result = one.run()
        if isinstance(result, Iterator):
            deque(result, maxlen=0)

    timers = {one.name: Timer(partial(pass_over, one)) for one in timed}
    passes = {name: timer.autorange()[0] for name, timer in timers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        for name, timer in timers.items():
            seconds[name].append(timer.timeit(passes[name]) / passes[name])
    libraries = []
    for one in timed:
        theirs, ours = seconds[one.name], seconds.get(one.against or "", ())
        ratios = [their / our for their, our in zip(theirs, ours, strict=False)]
        ratio = [median(ratios), min(ratios), max(ratios)] if ratios else None
        library = {"name": one.name, "returns": one.gives, "seconds": theirs}
        libraries.append(library | {"ours_over_theirs": ratio})
    return libraries, left_out
