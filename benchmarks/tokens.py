"""The race that ``pack`` and ``pad`` share: token sequences in, rows of one width out.

Everybody starts from the same tokens, as Python's lists or as arrays. Millions of lists do not fit
into memory: above ``MOST_LISTS`` sequences, whoever takes lists is timed on the first hundred
thousand, which the result says, and array output has 32 bits. ``python -m benchmarks.tokens pack
NAME ROWS`` measures the memory of one call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.children import RunError, run_child
from benchmarks.operations import (
    ARRAYS,
    LISTS,
    PLAIN,
    PLAIN_TENSORS,
    TENSORS,
    TO_NUMPY,
    Target,
    earlier_remote,
    size_name,
    with_goals,
)
from benchmarks.race import Contest, Entry, Session, peer_module, run_contest
from benchmarks.result import Case, Goal, Measurement
from benchmarks.workloads import Sequences
from fast_axolotl.cli.contenders import pad
from fast_axolotl.cli.resident_peak import ResidentPeak
from fast_axolotl.packing import pack_sequences, pad_sequences

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
MOST_PEAK_OVER_OUTPUT = 2.0
_WARM_UP_ROWS = 200
_SLACK = 1.3
"""Free memory over what is needed, for what else the machine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOperation:
    """Packing or padding, with what it is called with."""

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


def token_case(name: str, size: int, session: Session) -> Case:
    """The race, and the memory of each of ours and of plain Python in a fresh process."""
    contest = token_contest(name, size, session)
    free = psutil.virtual_memory().available
    needed = round(size * OPERATIONS[name].bytes_per_sequence * _SLACK)
    if size > MOST_LISTS and free < needed:
        reason = f"needs {needed / 1e9:.1f} GB of free memory, and there are {free / 1e9:.1f}"
        return Case(
            name=contest.name,
            text=contest.text,
            rows=size,
            unit=contest.unit,
            left_out={f"{size:,} sequences": reason},
        )
    names = [ARRAYS] if size > MOST_LISTS else [ARRAYS, LISTS, TO_NUMPY, PLAIN]
    measurements, goals = [], []
    for who in names:
        session.tell(f"{contest.name}: memory of {who}")
        try:
            printed = run_child("benchmarks.tokens", name, who, str(size))
        except RunError as error:
            measured = Measurement(name=who, reason=str(error))
        else:
            measured = Measurement(name=who, **json.loads(printed))
        measurements.append(measured)
        if who != PLAIN:
            share = measured.values.get("peak_over_output")
            text = f"memory over output, {who}"
            goals.append(Goal(text, MOST_PEAK_OVER_OUTPUT, "×", share, measured.reason))
    case = run_contest(contest, session)
    return replace(with_goals(case, TARGETS, *goals), measurements=measurements)


def main(operation: str, who: str, rows: str) -> None:
    """One call in this fresh process, where nothing that ran before can hide its memory."""
    for count in (_WARM_UP_ROWS, int(rows)):
        entries = token_entries(operation, count, _sequences(operation, count))
        run = next(entry for entry in entries if entry.name == who).prepare()
        with ResidentPeak() as memory:
            answer = run()
    peak, size = memory.above_start_bytes, output_bytes(answer)
    share = None if peak is None else peak / size
    values = {"peak_bytes": peak, "output_bytes": size, "peak_over_output": share}
    print(json.dumps({"values": values, "reason": memory.reason}))


def output_bytes(output: Any) -> int:
    """What an answer takes: of lists the lists alone, since they share their integers."""
    if isinstance(output, Mapping):
        return sum(output_bytes(column) for column in output.values())
    if hasattr(output, "nbytes"):
        return int(output.nbytes)
    return sys.getsizeof(output) + sum(map(sys.getsizeof, output))


def token_contest(name: str, size: int, session: Session) -> Contest:
    """Ours in four ways, plain Python in two, and the earlier package."""
    operation, few = OPERATIONS[name], _list_count(size)
    sequences = _sequences(name, size)
    ours, *others = token_entries(name, size, sequences)
    earlier = earlier_remote(
        session,
        f"{name}_sequences",
        "lists → lists",
        few,
        lambda folder: sequences.write(folder / "sequences.tokens", few),
        operation.settings,
    )
    settings = {**operation.settings, **_array_settings(size)}
    return Contest(
        name=f"{name}-{size_name(size)}",
        text=f"{size:,} {operation.text}",
        rows=size,
        unit="sequences",
        ours=ours,
        others=(*others, earlier),
        first=lambda count: operation.function(sequences.first(count), **settings),
    )


def token_entries(name: str, size: int, sequences: Sequences) -> tuple[Entry, ...]:
    """Everybody in this process; ours from arrays first."""
    operation, few = OPERATIONS[name], _list_count(size)
    listed = partial(Entry, columns=operation.columns, rows=few)
    settings = operation.settings

    def from_arrays() -> Callable[[], Any]:
        flat = sequences.flat
        return partial(operation.function, flat, **settings, **_array_settings(size))

    def from_lists(output: str) -> Callable[[], Any]:
        if output == "torch":
            peer_module("torch")
        return partial(operation.function, sequences.lists(few), **settings, output=output)

    def plainly() -> Callable[[], Any]:
        return partial(operation.plain, sequences.lists(few), **settings)

    def plain_tensors() -> Callable[[], Any]:
        """One tensor a column, as training code makes them from lists."""
        torch, run = peer_module("torch"), plainly()

        def tensors() -> Any:
            made = run()
            if isinstance(made, Mapping):
                return {name: torch.tensor(column) for name, column in made.items()}
            return torch.tensor(made)

        return tensors

    arrays = "arrays → int32" if few < size else "arrays → numpy"
    return (
        Entry(ARRAYS, arrays, from_arrays, size, operation.columns),
        listed(LISTS, "lists → lists", partial(from_lists, "lists")),
        listed(TO_NUMPY, "lists → numpy", partial(from_lists, "numpy")),
        listed(TENSORS, "lists → torch", partial(from_lists, "torch")),
        listed(PLAIN, "lists → lists", plainly, rival=LISTS),
        listed(PLAIN_TENSORS, "lists → torch", plain_tensors, package="torch", rival=TENSORS),
    )


def _sequences(name: str, size: int) -> Sequences:
    return Sequences(size, OPERATIONS[name].low, OPERATIONS[name].high)


def _list_count(size: int) -> int:
    return size if size <= MOST_LISTS else min(size, FEW_LISTS)


def _array_settings(size: int) -> dict[str, str]:
    dtype = "int64" if size <= MOST_LISTS else "int32"
    return {"output": "numpy", "dtype": dtype}


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


OPERATIONS = {
    "pack": TokenOperation(
        function=pack_sequences,
        plain=plain_pack,
        settings={"max_length": 512, "pad_token_id": 0, "eos_token_id": 2},
        low=10,
        high=100,
        bytes_per_sequence=4 * 55 + 3 * 4 * 60,
        columns=dict,
        text="sequences of 10–100 tokens into rows of 512",
    ),
    "pad": TokenOperation(
        function=pad_sequences,
        plain=pad,
        settings={"target_length": 256, "pad_value": 0},
        low=10,
        high=256,
        bytes_per_sequence=4 * 133 + 4 * 256,
        columns=lambda found: {"rows": found},
        text="sequences of 10–256 tokens to 256",
    ),
}
"""Those of the earlier package's benchmark."""


if __name__ == "__main__":
    main(*sys.argv[1:])
