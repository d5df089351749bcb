"""``fast-axolotl bench hash``: SHA-256 of many rows, from lists and from Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from fast_axolotl.bench import plain
from fast_axolotl.bench.contest import Contest, Entry, Remote, Session, run_contest
from fast_axolotl.bench.operation_goals import ARROW, HASHLIB, LISTS, operation_goals
from fast_axolotl.bench.operation_result import OperationCase
from fast_axolotl.bench.sizes import size_name
from fast_axolotl.bench.workloads import json_rows, long_rows, write_lines

__all__ = ["KERNELS", "hash_cases", "hash_contest"]

KERNELS = ("sha256.",)
LONG_SHARE = 50
"""A row of 4 KB stands for fifty of the short ones."""
_ROWS_TOGETHER = 65_536


def hash_cases(sizes: Sequence[int], session: Session) -> Iterator[OperationCase]:
    """Short rows at every size, then rows of 4 KB, fewer of them."""
    for size in sizes:
        yield _run("hash", size, json_rows, "rows of about 70 bytes", session)
    for size in sorted({max(1, size // LONG_SHARE) for size in sizes}):
        yield _run("hash-4kb", size, long_rows, "rows of 4 KB", session)


def hash_contest(name: str, rows: list[str], text: str, session: Session) -> Contest:
    """Ours from a list and from a column, the loop of hashlib, and the earlier package."""
    from fast_axolotl.dedupe import parallel_hash_rows

    entry = partial(Entry, rows=len(rows))

    def from_column() -> Callable[[], Any]:
        column = pa.array(rows, pa.large_string())
        return lambda: parallel_hash_rows(column)

    entries = (
        entry(
            name=LISTS,
            gives="list → list",
            prepare=lambda: lambda: parallel_hash_rows(rows),
            columns=_as_column,
        ),
        entry(name=ARROW, gives="Arrow → Arrow", prepare=from_column, columns=_hex_column),
        entry(
            name=HASHLIB,
            gives="list → list",
            prepare=lambda: lambda: plain.hash_rows(rows),
            columns=_as_column,
            rival=LISTS,
        ),
    )
    return Contest(
        name=name,
        text=f"{len(rows):,} {text}",
        rows=len(rows),
        unit="rows",
        entries=entries,
        remotes=(_earlier(rows, session),),
    )


def _run(
    kind: str, size: int, make: Callable[[int], list[str]], text: str, session: Session
) -> OperationCase:
    name = f"{kind}-{size_name(size)}"
    session.tell(f"{name}: making the input")
    case = run_contest(hash_contest(name, make(size), text, session), session)
    return replace(case, goals=tuple(operation_goals(kind, size, case.timings)))


def _earlier(rows: list[str], session: Session) -> Remote:
    return session.remote_earlier(
        "parallel_hash_rows",
        gives="list → list",
        rows=len(rows),
        rival=LISTS,
        write=lambda folder: write_lines(rows, folder / "rows.txt"),
    )


def _as_column(hashes: list[str]) -> dict[str, list[str]]:
    return {"hash": hashes}


def _hex_column(hashes: Any) -> dict[str, Iterator[str]]:
    return {"hash": _hex(hashes)}


def _hex(hashes: Any) -> Iterator[str]:
    for start in range(0, len(hashes), _ROWS_TOGETHER):
        part = hashes.slice(start, _ROWS_TOGETHER)
        yield from (digest.hex() for digest in part.to_pylist())
