"""Filling rows with sequences, and deciding which share one: ``make bench-pack``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.operations import LISTS, OURS, PLAIN, run_operation, size_goals, size_name
from benchmarks.race import AXOLOTL, Contest, Entry, Remote, Session, run_contest
from benchmarks.result import Case, Measurement, most_goal
from benchmarks.tokens import TokenOperation, plain_pack, token_case, token_entries
from benchmarks.workloads import DISTRIBUTIONS, draw_lengths
from fast_axolotl.cli.contenders import first_fit
from fast_axolotl.packing import pack_sequences, plan_packs
from fast_axolotl.packing.plan import Method

PACK = TokenOperation(
    name="pack",
    function=pack_sequences,
    plain=plain_pack,
    settings={"max_length": 512, "pad_token_id": 0, "eos_token_id": 2},
    low=10,
    high=100,
    bytes_per_sequence=4 * 55 + 3 * 4 * 60,
    columns=dict,
    text="sequences of 10–100 tokens into rows of 512",
)
"""The earlier package's benchmark."""

_PLAN_KIND = "lognormal, mean 365"
_GROUP_SIZE = 100_000
_MOST_ROWS = 200
"""Both are Axolotl's defaults."""
_MOST_PLAIN_LENGTHS = 10_000
_MOST_METHOD_LENGTHS = 1_000_000
_GROWTH_SIZES = (1_000_000, 10_000_000)
_MOST_GROWTH = 15.0
"""Of the time to plan ten million lengths over that for one."""


def main(arguments: Sequence[str] | None = None) -> None:
    run_operation("pack", __doc__, ("fill.", "binpack."), pack_cases, arguments)


def memory_entries(size: int) -> tuple[Entry, ...]:
    """For ``children``, in a fresh process."""
    return token_entries(PACK, size)


def pack_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """Rows filled at every size, then plans at every size, then what each method comes to."""
    for size in sizes:
        yield token_case(PACK, size, "benchmarks.pack", session)
    plans: dict[int, Case] = {}
    for size in sizes:
        case = run_contest(_plan_contest(size, session), session)
        goals = size_goals(((OURS, AXOLOTL, 30.0, 100_000),), size, case.timings)
        small, large = _GROWTH_SIZES
        if size == large and small in plans:
            before, after = plans[small].timings[0], case.timings[0]
            ratio = after.median_seconds / before.median_seconds
            text = f"{OURS}, time over that of {small:,} lengths"
            goals.append(most_goal(text, _MOST_GROWTH, "×", ratio))
        plans[size] = replace(case, goals=tuple(goals))
        yield plans[size]
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

    entries = [
        entry(name=OURS, gives="array → plan", prepare=lambda: partial(plan, lengths)),
        entry(name=LISTS, gives="array → lists", prepare=lambda: lambda: plan(lengths).tolist()),
    ]
    if size <= _MOST_PLAIN_LENGTHS:
        entries.append(
            entry(
                name=PLAIN,
                gives="list → lists",
                prepare=lambda: partial(first_fit, lengths.tolist(), capacity, _MOST_ROWS),
                rival=OURS,
            )
        )
    remotes = []
    if size <= _GROUP_SIZE:
        settings = {"bin_capacity": capacity, "group_size": _GROUP_SIZE, "bin_size": _MOST_ROWS}
        remotes.append(
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
        entries=entries,
        remotes=remotes,
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
        measurements=tuple(measurements),
    )


if __name__ == "__main__":
    main()
