"""Sequences of 10 to 256 tokens brought to 256: ``make bench-pad``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.operations import run_operation
from benchmarks.race import Session
from benchmarks.result import Case
from benchmarks.tokens import token_case


def main(arguments: Sequence[str] | None = None) -> None:
    run_operation("pad", __doc__, ("fill.",), pad_cases, arguments)


def pad_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    for size in sizes:
        yield token_case("pad", size, session)


if __name__ == "__main__":
    main()
