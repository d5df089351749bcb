"""The race that ``bench pack`` and ``bench pad`` share: token sequences in, rows of one width out.

Everybody starts from the same tokens, as Python's lists or as arrays. Millions of lists do not fit
into memory: above ``most_lists`` sequences, whoever takes lists is timed on the first hundred
thousand, which the result says, and array output has 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fast_axolotl.bench.contest import Contest, Entry, Session, peer_module, run_contest
from fast_axolotl.bench.machine import available_bytes
from fast_axolotl.bench.matrix import LeftOut
from fast_axolotl.bench.operation_goals import (
    ARRAYS,
    LISTS,
    MOST_PEAK_OVER_OUTPUT,
    PLAIN,
    PLAIN_TENSORS,
    TENSORS,
    TO_NUMPY,
    operation_goals,
)
from fast_axolotl.bench.operation_result import OperationCase
from fast_axolotl.bench.peaks import peak_goal, peak_of_call
from fast_axolotl.bench.sizes import size_name
from fast_axolotl.bench.workloads import Sequences

__all__ = ["TokenOperation", "token_case", "token_contest", "token_entries"]

FEW_LISTS = 100_000
"""Sequences that whoever takes lists is timed on, where there are too many."""
_SLACK = 1.3
"""Free memory over what is needed, for what else the machine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOperation:
    """Packing or padding, with what it is called with."""

    name: str
    function: Callable[..., Any]
    plain: Callable[..., Any]
    settings: Mapping[str, Any]
    """Keyword arguments that all three take: ours, plain Python and the earlier package."""
    low: int
    high: int
    """Tokens of a sequence."""
    most_lists: int
    bytes_per_sequence: int
    """Input and output as arrays of 32 bits, on average."""
    columns: Callable[[Any], Mapping[str, Any]]
    text: str


def token_case(
    operation: TokenOperation, size: int, module: str, session: Session
) -> OperationCase:
    """The race, and the memory of each of ours and of plain Python in a fresh process."""
    contest = token_contest(operation, size, session)
    missing = _absence(operation, size)
    if missing is not None:
        return OperationCase(
            name=contest.name,
            text=contest.text,
            rows=size,
            unit=contest.unit,
            left_out=(missing,),
        )
    names = [ARRAYS] if size > operation.most_lists else [ARRAYS, LISTS, TO_NUMPY, PLAIN]
    measurements = []
    for name in names:
        session.tell(f"{contest.name}: memory of {name}")
        measurements.append(peak_of_call(module, name, size))
    case = run_contest(contest, session)
    goals = operation_goals(operation.name, size, case.timings)
    goals += [peak_goal(item, MOST_PEAK_OVER_OUTPUT) for item in measurements if item.name != PLAIN]
    return replace(case, goals=tuple(goals), measurements=tuple(measurements))


def token_contest(operation: TokenOperation, size: int, session: Session) -> Contest:
    """Ours in four ways, plain Python in two, and the earlier package."""
    sequences = Sequences(size, operation.low, operation.high)
    few = _list_count(operation, size)
    earlier = session.remote_earlier(
        f"{operation.name}_sequences",
        gives="lists → lists",
        rows=few,
        rival=LISTS,
        write=lambda folder: sequences.write(folder / "sequences.tokens", few),
        settings=operation.settings,
    )
    settings = {**operation.settings, **_array_settings(operation, size)}
    return Contest(
        name=f"{operation.name}-{size_name(size)}",
        text=f"{size:,} {operation.text}",
        rows=size,
        unit="sequences",
        entries=token_entries(operation, size, sequences),
        remotes=(earlier,),
        first=lambda count: operation.function(sequences.first(count), **settings),
    )


def token_entries(
    operation: TokenOperation, size: int, sequences: Sequences | None = None
) -> tuple[Entry, ...]:
    """Everybody in this process; ours from arrays first."""
    given = sequences or Sequences(size, operation.low, operation.high)
    few = _list_count(operation, size)
    whole = partial(Entry, columns=operation.columns, rows=size)
    listed = partial(Entry, columns=operation.columns, rows=few)
    settings = operation.settings

    def from_arrays() -> Callable[[], Any]:
        flat = given.flat
        return partial(operation.function, flat, **settings, **_array_settings(operation, size))

    def from_lists(output: str) -> Callable[[], Any]:
        if output == "torch":
            peer_module("torch")
        return partial(operation.function, given.lists(few), **settings, output=output)

    def plainly() -> Callable[[], Any]:
        return partial(operation.plain, given.lists(few), **settings)

    def plain_tensors() -> Callable[[], Any]:
        return partial(_tensors, peer_module("torch"), plainly())

    arrays = "arrays → int32" if few < size else "arrays → numpy"
    return (
        whole(name=ARRAYS, gives=arrays, prepare=from_arrays),
        listed(name=LISTS, gives="lists → lists", prepare=partial(from_lists, "lists")),
        listed(name=TO_NUMPY, gives="lists → numpy", prepare=partial(from_lists, "numpy")),
        listed(name=TENSORS, gives="lists → torch", prepare=partial(from_lists, "torch")),
        listed(name=PLAIN, gives="lists → lists", prepare=plainly, rival=LISTS),
        listed(
            name=PLAIN_TENSORS,
            gives="lists → torch",
            prepare=plain_tensors,
            package="torch",
            rival=TENSORS,
        ),
    )


def _absence(operation: TokenOperation, size: int) -> LeftOut | None:
    """Why a size cannot be run on this machine, if so."""
    free = available_bytes()
    needed = round(size * operation.bytes_per_sequence * _SLACK)
    if size <= operation.most_lists or free is None or free >= needed:
        return None
    reason = f"needs {needed / 1e9:.1f} GB of free memory, and there are {free / 1e9:.1f}"
    return LeftOut(name=f"{size:,} sequences", reason=reason)


def _list_count(operation: TokenOperation, size: int) -> int:
    return size if size <= operation.most_lists else min(size, FEW_LISTS)


def _array_settings(operation: TokenOperation, size: int) -> dict[str, str]:
    dtype = "int64" if size <= operation.most_lists else "int32"
    return {"output": "numpy", "dtype": dtype}


def _tensors(torch: Any, run: Callable[[], Any]) -> Any:
    """One tensor a column, as training code makes them from lists."""
    made = run()
    if isinstance(made, Mapping):
        return {name: torch.tensor(column) for name, column in made.items()}
    return torch.tensor(made)
