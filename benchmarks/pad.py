"""Sequences of 10 to 256 tokens brought to 256: ``make bench-pad``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.operations import run_operation
from benchmarks.race import Entry, Session
from benchmarks.result import Case
from benchmarks.tokens import TokenOperation, token_case, token_entries
from fast_axolotl.cli.contenders import pad
from fast_axolotl.packing import pad_sequences

PAD = TokenOperation(
    name="pad",
    function=pad_sequences,
    plain=pad,
    settings={"target_length": 256, "pad_value": 0},
    low=10,
    high=256,
    bytes_per_sequence=4 * 133 + 4 * 256,
    columns=lambda found: {"rows": found},
    text="sequences of 10–256 tokens to 256",
)
"""The earlier package's benchmark."""


def main(arguments: Sequence[str] | None = None) -> None:
    run_operation("pad", __doc__, ("fill.",), pad_cases, arguments)


def pad_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    for size in sizes:
        yield token_case(PAD, size, "benchmarks.pad", session)


def memory_entries(size: int) -> tuple[Entry, ...]:
    """For ``children``, in a fresh process."""
    return token_entries(PAD, size)


if __name__ == "__main__":
    main()
