"""``fast-axolotl bench pack``: filling rows, and deciding which sequences share one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fast_axolotl.bench import plain
from fast_axolotl.bench.contest import AXOLOTL, Contest, Entry, Remote, Session, run_contest
from fast_axolotl.bench.operation_goals import LISTS, OURS, PLAIN, growth_goal, operation_goals
from fast_axolotl.bench.operation_result import Measurement, OperationCase
from fast_axolotl.bench.sizes import size_name
from fast_axolotl.bench.tokens import TokenOperation, token_case, token_entries
from fast_axolotl.bench.workloads import DISTRIBUTIONS, draw_lengths

__all__ = ["KERNELS", "memory_entries", "pack_cases", "pack_operation"]

KERNELS = ("fill.", "binpack.")

_PLAN_KIND = "lognormal, mean 365"
_GROUP_SIZE = 100_000
_MOST_ROWS = 200
"""Both are Axolotl's defaults."""
_MOST_PLAIN_LENGTHS = 10_000
_MOST_METHOD_LENGTHS = 1_000_000
_GROWTH_SIZES = (1_000_000, 10_000_000)


def pack_operation() -> TokenOperation:
    """The earlier package's benchmark: sequences of 10 to 100 tokens into rows of 512."""
    from fast_axolotl.packing import pack_sequences

    return TokenOperation(
        name="pack",
        function=pack_sequences,
        plain=plain.pack,
        settings={"max_length": 512, "pad_token_id": 0, "eos_token_id": 2},
        low=10,
        high=100,
        most_lists=1_000_000,
        bytes_per_sequence=4 * 55 + 3 * 4 * 60,
        columns=dict,
        text="sequences of 10–100 tokens into rows of 512",
    )


def memory_entries(size: int) -> tuple[Entry, ...]:
    """For ``peaks``, in a fresh process."""
    return token_entries(pack_operation(), size)


def pack_cases(sizes: Sequence[int], session: Session) -> Iterator[OperationCase]:
    """Rows filled at every size, then plans at every size, then what each method comes to."""
    for size in sizes:
        yield token_case(pack_operation(), size, __name__, session)
    plans: dict[int, OperationCase] = {}
    for size in sizes:
        case = run_contest(_plan_contest(size, session), session)
        goals = operation_goals("plan", size, case.timings)
        if size == _GROWTH_SIZES[1] and _GROWTH_SIZES[0] in plans:
            goals.append(growth_goal(plans[_GROWTH_SIZES[0]], case))
        plans[size] = replace(case, goals=tuple(goals))
        yield plans[size]
    yield _method_case(min(sizes[-1], _MOST_METHOD_LENGTHS), session)


def _plan_contest(size: int, session: Session) -> Contest:
    """Ours at any size; Axolotl on the first group, plain Python where it is small."""
    from fast_axolotl.packing import plan_packs

    lengths = draw_lengths(_PLAN_KIND, size)
    capacity = DISTRIBUTIONS[_PLAN_KIND]
    plan = partial(plan_packs, capacity=capacity, max_rows=_MOST_ROWS, group_size=_GROUP_SIZE)
    entry = partial(Entry, rows=size, columns=_as_packs)
    entries = [
        entry(
            name=OURS,
            gives="array → plan",
            prepare=lambda: partial(plan, lengths),
        ),
        entry(
            name=LISTS,
            gives="array → lists",
            prepare=lambda: lambda: plan(lengths).tolist(),
        ),
    ]
    if size <= _MOST_PLAIN_LENGTHS:
        entries.append(
            entry(
                name=PLAIN,
                gives="list → lists",
                prepare=lambda: partial(plain.first_fit, lengths.tolist(), capacity, _MOST_ROWS),
                rival=OURS,
            )
        )
    remotes = [_axolotl(lengths, capacity, session)] if size <= _GROUP_SIZE else []
    return Contest(
        name=f"plan-{size_name(size)}",
        text=f"{size:,} lengths, {_PLAN_KIND}, into packs of {capacity:,} by first fit",
        rows=size,
        unit="lengths",
        entries=entries,
        remotes=remotes,
    )


def _axolotl(lengths: Any, capacity: int, session: Session) -> Remote:
    import numpy as np

    def write(folder: Path) -> Path:
        np.save(folder / "lengths.npy", lengths)
        return folder / "lengths.npy"

    return Remote(
        name=AXOLOTL,
        gives="array → lists",
        rows=len(lengths),
        process=session.axolotl(),
        operation="pack_parallel",
        write=write,
        settings={"bin_capacity": capacity, "group_size": _GROUP_SIZE, "bin_size": _MOST_ROWS},
        rival=OURS,
    )


def _as_packs(found: Any) -> dict[str, Any]:
    return {"packs": found.tolist() if hasattr(found, "tolist") else found}


def _method_case(size: int, session: Session) -> OperationCase:
    """Packs of each method on each kind of lengths: how full, how near to the least possible."""
    from fast_axolotl.packing.plan import Method, plan_packs

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
    return OperationCase(
        name="methods",
        text=f"{size:,} lengths of each kind",
        rows=size,
        unit="lengths",
        measurements=tuple(measurements),
    )
