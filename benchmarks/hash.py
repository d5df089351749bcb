"""SHA-256 of many rows, from lists and from Arrow columns: ``make bench-hash``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.operations import (
    ARROW,
    HASHLIB,
    LISTS,
    Target,
    earlier_remote,
    run_operation,
    size_name,
    with_goals,
)
from benchmarks.race import EARLIER, Contest, Entry, Session, run_contest
from benchmarks.result import Case
from benchmarks.workloads import json_rows, long_rows, write_lines
from fast_axolotl.cli.contenders import hash_rows
from fast_axolotl.dedupe import parallel_hash_rows

LONG_SHARE = 50
"""A row of 4 KB stands for fifty of the short ones."""
TARGETS: dict[str, tuple[Target, ...]] = {
    "hash": (
        (LISTS, HASHLIB, 2.0, 100_000),
        (LISTS, EARLIER, 1.5, 100_000),
        (ARROW, HASHLIB, 5.0, 1_000_000),
    ),
    "hash-4kb": ((LISTS, HASHLIB, 1.5, None), (ARROW, HASHLIB, 1.5, None)),
}
_ROWS_TOGETHER = 65_536


def main(arguments: Sequence[str] | None = None) -> None:
    run_operation("hash", __doc__, ("sha256.",), hash_cases, arguments)


def hash_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """Short rows at every size, then rows of 4 KB, fewer of them."""
    for size in sizes:
        yield _run("hash", size, json_rows, "rows of about 70 bytes", session)
    for size in sorted({max(1, size // LONG_SHARE) for size in sizes}):
        yield _run("hash-4kb", size, long_rows, "rows of 4 KB", session)


def _run(
    kind: str, size: int, make: Callable[[int], list[str]], text: str, session: Session
) -> Case:
    """Ours from a list and from a column, the loop of hashlib, and the earlier package."""
    rows = make(size)
    entry = partial(Entry, rows=size, columns=lambda found: {"hash": found})

    def from_column() -> Callable[[], Any]:
        column = pa.array(rows, pa.large_string())
        return lambda: parallel_hash_rows(column)

    def hex_column(hashes: Any) -> dict[str, Iterator[str]]:
        parts = (hashes.slice(at, _ROWS_TOGETHER) for at in range(0, size, _ROWS_TOGETHER))
        return {"hash": (digest.hex() for part in parts for digest in part.to_pylist())}

    contest = Contest(
        name=f"{kind}-{size_name(size)}",
        text=f"{size:,} {text}",
        rows=size,
        ours=entry(LISTS, "list → list", lambda: lambda: parallel_hash_rows(rows)),
        others=(
            entry(ARROW, "Arrow → Arrow", from_column, columns=hex_column),
            entry(HASHLIB, "list → list", lambda: lambda: hash_rows(rows), rival=LISTS),
            earlier_remote(
                session,
                "parallel_hash_rows",
                "list → list",
                size,
                lambda folder: write_lines(rows, folder / "rows.txt"),
            ),
        ),
    )
    return with_goals(run_contest(contest, session), TARGETS[kind])


if __name__ == "__main__":
    main()
