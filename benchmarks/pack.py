"""Filling rows with sequences, and deciding which share one: ``make bench-pack``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.operations import LISTS, OURS, PLAIN, run_operation, size_name, with_goals
from benchmarks.race import AXOLOTL, Contest, Entry, Remote, Session, run_contest
from benchmarks.result import Case, Goal, Measurement
from benchmarks.tokens import token_case
from benchmarks.workloads import DISTRIBUTIONS, draw_lengths
from fast_axolotl.cli.contenders import first_fit
from fast_axolotl.packing import plan_packs
from fast_axolotl.packing.plan import Method

_PLAN_KIND = "lognormal, mean 365"
_GROUP_SIZE = 100_000
_MOST_ROWS = 200
"""Both are Axolotl's defaults."""
_MOST_PLAIN_LENGTHS = 10_000
_MOST_METHOD_LENGTHS = 1_000_000
_SMALL_SIZE, _LARGE_SIZE = 1_000_000, 10_000_000
_MOST_GROWTH = 15.0
"""Of the time to plan ten million lengths over that for one."""


def main(arguments: Sequence[str] | None = None) -> None:
    run_operation("pack", __doc__, ("fill.", "binpack."), pack_cases, arguments)


def pack_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """Rows filled at every size, then plans at every size, then what each method comes to."""
    for size in sizes:
        yield token_case("pack", size, session)
    plan_seconds: dict[int, float] = {}
    for size in sizes:
        case = run_contest(_plan_contest(size, session), session)
        plan_seconds[size] = case.timings[0].median_seconds
        growth = []
        if size == _LARGE_SIZE and _SMALL_SIZE in plan_seconds:
            ratio = plan_seconds[_LARGE_SIZE] / plan_seconds[_SMALL_SIZE]
            text = f"{OURS}, time over that of {_SMALL_SIZE:,} lengths"
            growth.append(Goal(text, _MOST_GROWTH, "×", ratio))
        yield with_goals(case, ((OURS, AXOLOTL, 30.0, 100_000),), *growth)
    yield _method_case(min(sizes[-1], _MOST_METHOD_LENGTHS), session)


def _plan_contest(size: int, session: Session) -> Contest:
    """Ours at any size; Axolotl on the first group, plain Python where it is small."""
    lengths = draw_lengths(_PLAN_KIND, size)
    capacity = DISTRIBUTIONS[_PLAN_KIND]
    plan = partial(plan_packs, capacity=capacity, max_rows=_MOST_ROWS, group_size=_GROUP_SIZE)
    entry = partial(
        Entry,
        rows=size,
        columns=lambda found: {"packs": found.tolist() if hasattr(found, "tolist") else found},
    )

    def write(folder: Path) -> Path:
        np.save(folder / "lengths.npy", lengths)
        return folder / "lengths.npy"

    others: list[Entry | Remote] = [
        entry(LISTS, "array → lists", lambda: lambda: plan(lengths).tolist())
    ]
    if size <= _MOST_PLAIN_LENGTHS:
        fit = partial(first_fit, lengths.tolist(), capacity, _MOST_ROWS)
        others.append(entry(PLAIN, "list → lists", lambda: fit, rival=OURS))
    if size <= _GROUP_SIZE:
        settings = {"bin_capacity": capacity, "group_size": _GROUP_SIZE, "bin_size": _MOST_ROWS}
        others.append(
            Remote(
                name=AXOLOTL,
                gives="array → lists",
                rows=size,
                process=session.axolotl(),
                operation="pack_parallel",
                write=write,
                settings=settings,
                rival=OURS,
            )
        )
    return Contest(
        name=f"plan-{size_name(size)}",
        text=f"{size:,} lengths, {_PLAN_KIND}, into packs of {capacity:,} by first fit",
        rows=size,
        unit="lengths",
        ours=entry(OURS, "array → plan", lambda: partial(plan, lengths)),
        others=others,
    )


def _method_case(size: int, session: Session) -> Case:
    """Packs of each method on each kind of lengths: how full, how near to the least possible."""
    measurements = []
    for kind, capacity in DISTRIBUTIONS.items():
        session.tell(f"methods: {kind}")
        lengths = draw_lengths(kind, size)
        for method in get_args(Method):
            seconds = []
            for _ in range(session.repeats):
                start = time.perf_counter()
                found = plan_packs(lengths, capacity, method=method)
                seconds.append(time.perf_counter() - start)
            measurements.append(
                Measurement(
                    name=f"{kind} into {capacity}: {method}",
                    seconds=tuple(seconds),
                    values={
                        "packs": len(found),
                        "lower_bound": found.lower_bound,
                        "efficiency": found.efficiency,
                    },
                )
            )
    return Case(
        name="methods",
        text=f"{size:,} lengths of each kind",
        rows=size,
        unit="lengths",
        measurements=measurements,
    )


if __name__ == "__main__":
    main()
