"""The race that ``pack`` and ``pad`` share: token sequences in, rows of one width out.

Everybody starts from the same tokens, as Python's lists or as arrays. Millions of lists do not fit
into memory: above ``MOST_LISTS`` sequences, whoever takes lists is timed on the first hundred
thousand, which the result says, and array output has 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.children import peak_goal, peak_of_call
from benchmarks.operations import (
    ARRAYS,
    LISTS,
    PLAIN,
    PLAIN_TENSORS,
    TENSORS,
    TO_NUMPY,
    Target,
    earlier_remote,
    size_goals,
    size_name,
)
from benchmarks.race import Contest, Entry, Session, peer_module, run_contest
from benchmarks.result import Case, LeftOut
from benchmarks.workloads import Sequences

MOST_LISTS = 1_000_000
"""Sequences that fit into memory as Python's lists."""
FEW_LISTS = 100_000
"""Sequences that whoever takes lists is timed on, where there are too many."""
TARGETS: tuple[Target, ...] = (
    (LISTS, PLAIN, 1.0, None),
    (TO_NUMPY, PLAIN_TENSORS, 4.0, None),
    (TENSORS, PLAIN_TENSORS, 4.0, None),
    (ARRAYS, PLAIN_TENSORS, 25.0, None),
)
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
    bytes_per_sequence: int
    """Input and output as arrays of 32 bits, on average."""
    columns: Callable[[Any], Mapping[str, Any]]
    text: str


def token_case(operation: TokenOperation, size: int, module: str, session: Session) -> Case:
    """The race, and the memory of each of ours and of plain Python in a fresh process."""
    contest = token_contest(operation, size, session)
    free = psutil.virtual_memory().available
    needed = round(size * operation.bytes_per_sequence * _SLACK)
    if size > MOST_LISTS and free < needed:
        reason = f"needs {needed / 1e9:.1f} GB of free memory, and there are {free / 1e9:.1f}"
        return Case(
            name=contest.name,
            text=contest.text,
            rows=size,
            unit=contest.unit,
            left_out=(LeftOut(name=f"{size:,} sequences", reason=reason),),
        )
    names = [ARRAYS] if size > MOST_LISTS else [ARRAYS, LISTS, TO_NUMPY, PLAIN]
    measurements = []
    for name in names:
        session.tell(f"{contest.name}: memory of {name}")
        measurements.append(peak_of_call(module, name, size))
    case = run_contest(contest, session)
    goals = size_goals(TARGETS, size, case.timings)
    goals += [peak_goal(item) for item in measurements if item.name != PLAIN]
    return replace(case, goals=tuple(goals), measurements=tuple(measurements))


def token_contest(operation: TokenOperation, size: int, session: Session) -> Contest:
    """Ours in four ways, plain Python in two, and the earlier package."""
    sequences = Sequences(size, operation.low, operation.high)
    few = _list_count(size)
    earlier = earlier_remote(
        session,
        f"{operation.name}_sequences",
        "lists → lists",
        few,
        lambda folder: sequences.write(folder / "sequences.tokens", few),
        operation.settings,
    )
    settings = {**operation.settings, **_array_settings(size)}
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
    few = _list_count(size)
    whole = partial(Entry, columns=operation.columns, rows=size)
    listed = partial(Entry, columns=operation.columns, rows=few)
    settings = operation.settings

    def from_arrays() -> Callable[[], Any]:
        flat = given.flat
        return partial(operation.function, flat, **settings, **_array_settings(size))

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


def _list_count(size: int) -> int:
    return size if size <= MOST_LISTS else min(size, FEW_LISTS)


def _array_settings(size: int) -> dict[str, str]:
    dtype = "int64" if size <= MOST_LISTS else "int32"
    return {"output": "numpy", "dtype": dtype}


def _tensors(torch: Any, run: Callable[[], Any]) -> Any:
    """One tensor a column, as training code makes them from lists."""
    made = run()
    if isinstance(made, Mapping):
        return {name: torch.tensor(column) for name, column in made.items()}
    return torch.tensor(made)


def plain_pack(
    sequences: Iterable[Sequence[int]],
    max_length: int,
    pad_token_id: int,
    eos_token_id: int,
    label_pad_id: int = -100,
) -> Mapping[str, list[list[int]]]:
    """Rows in order, each sequence followed by EOS and PAD; labels and masks from the full rows."""
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    separators = (eos_token_id, pad_token_id)

    def close(ids: list[int], ends: list[int]) -> None:
        missing = max_length - len(ids)
        labels, mask = ids[:], [1] * len(ids)
        for end in ends:
            labels[end] = label_pad_id
            mask[end] = 0
        packed["input_ids"].append(ids + [pad_token_id] * missing)
        packed["labels"].append(labels + [label_pad_id] * missing)
        packed["attention_mask"].append(mask + [0] * missing)

    ids: list[int] = []
    ends: list[int] = []
    for sequence in sequences:
        if len(ids) + len(sequence) + 2 > max_length:
            close(ids, ends)
            ids, ends = [], []
        ids += sequence
        ids += separators
        ends.append(len(ids) - 1)
    if ids:
        close(ids, ends)
    return packed
