"""``fast-axolotl bench dedupe``: tokenized rows, a text column, a list of texts, and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.bench import plain
from fast_axolotl.bench.contest import (
    AXOLOTL,
    Contest,
    Entry,
    Remote,
    Session,
    peer_module,
    run_contest,
)
from fast_axolotl.bench.dedupe_files import files_case
from fast_axolotl.bench.goals import fastest_goal
from fast_axolotl.bench.operation_goals import LISTS, OURS, PLAIN, operation_goals
from fast_axolotl.bench.operation_result import OperationCase
from fast_axolotl.bench.sizes import size_name
from fast_axolotl.bench.workloads import repeated_texts, token_rows, write_lines

__all__ = ["KERNELS", "dedupe_cases"]

KERNELS = ("sha256.", "rowhash.", "digests.")

_TOKENS_SHARE = 5
"""A tokenized row stands for five short ones."""
_MOST_TOKEN_ROWS = 100_000
_MOST_SLOW_ROWS = 20_000
"""Axolotl and plain Python take a tenth of a millisecond and more for a row of 365 tokens."""
_LEVEL_SIZE = 1_000_000
_ROWS_TOGETHER = 65_536

POLARS = "Polars"
DUCKDB = "DuckDB, in order"
DUCKDB_DISTINCT = "DuckDB DISTINCT, any order"
_DUCKDB_QUERIES = {
    DUCKDB: "SELECT text FROM texts GROUP BY text ORDER BY min(rowid)",
    DUCKDB_DISTINCT: "SELECT DISTINCT text FROM texts",
}


def dedupe_cases(sizes: Sequence[int], session: Session) -> Iterator[OperationCase]:
    """The four kinds of input, each at every size that suits it."""
    for size in sorted({min(_MOST_TOKEN_ROWS, max(1, size // _TOKENS_SHARE)) for size in sizes}):
        case = run_contest(_tokens_contest(size, session), session)
        yield replace(case, goals=tuple(operation_goals("tokens", size, case.timings)))
    for size in sizes:
        case = run_contest(_text_contest(size), session)
        yield replace(case, goals=tuple(_text_goals(size, case)))
    for size in sizes:
        yield run_contest(_list_contest(size, session), session)
    for size in sizes:
        yield files_case(size, session)


def _tokens_contest(size: int, session: Session) -> Contest:
    """Whole rows of input_ids, attention_mask and labels, as Axolotl compares them."""
    from fast_axolotl.dedupe import unique_rows

    table = token_rows(size)
    few = min(size, _MOST_SLOW_ROWS)
    entry = partial(Entry, columns=_as_index)

    def write(folder: Path) -> Path:
        path = folder / "tokens.arrow"
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table.slice(0, few))
        return path

    return Contest(
        name=f"tokens-{size_name(size)}",
        text=f"{size:,} tokenized rows, mean 365 tokens, a fifth repeated",
        rows=size,
        unit="rows",
        entries=(
            entry(
                name=OURS,
                gives="Arrow → indices",
                rows=size,
                prepare=lambda: lambda: unique_rows(table),
            ),
            entry(
                name=PLAIN,
                gives="Arrow → indices",
                rows=few,
                prepare=lambda: partial(plain.unique_rows, table.slice(0, few)),
                rival=OURS,
            ),
        ),
        remotes=(
            Remote(
                name=AXOLOTL,
                gives="Dataset → Dataset",
                rows=few,
                process=session.axolotl(),
                operation="deduplicate",
                write=write,
                rival=OURS,
            ),
        ),
        first=lambda count: unique_rows(table.slice(0, count)),
    )


def _text_contest(size: int) -> Contest:
    """A text column to the column of its first occurrences, in order."""
    from fast_axolotl.dedupe import unique_rows

    table = pa.table({"text": repeated_texts(size)})
    entry = partial(Entry, rows=size, columns=_as_texts)

    def plain_dict() -> Callable[[], Any]:
        texts = table["text"].to_pylist()
        return lambda: list(dict.fromkeys(texts))

    return Contest(
        name=f"text-{size_name(size)}",
        text=f"a column of {size:,} texts, each of which comes twice",
        rows=size,
        unit="rows",
        entries=(
            entry(
                name=OURS,
                gives="Arrow → Arrow",
                prepare=lambda: lambda: table.take(unique_rows(table)),
            ),
            entry(
                name="pyarrow unique",
                gives="Arrow → Arrow",
                prepare=lambda: lambda: table["text"].unique(),
                package="pyarrow",
                rival=OURS,
            ),
            entry(
                name=POLARS,
                gives="frame → frame",
                prepare=partial(_polars, table),
                package="polars",
                rival=OURS,
            ),
            *(
                entry(
                    name=name,
                    gives="table → Arrow",
                    prepare=partial(_duckdb, table, query),
                    columns=_as_texts if name == DUCKDB else partial(_in_order, table),
                    package="duckdb",
                    rival=OURS,
                )
                for name, query in _DUCKDB_QUERIES.items()
            ),
            entry(name="Python dict", gives="list → list", prepare=plain_dict, rival=OURS),
        ),
    )


def _polars(table: pa.Table) -> Callable[[], Any]:
    frame = peer_module("polars").from_arrow(table)
    return lambda: frame.unique(maintain_order=True, keep="first")


def _duckdb(table: pa.Table, query: str) -> Callable[[], Any]:
    """Over a table of its own, which has row numbers to keep the order by."""
    connection = peer_module("duckdb").connect()
    connection.register("given", table)
    connection.execute("CREATE TABLE texts AS SELECT * FROM given")
    return lambda: connection.sql(query).to_arrow_table()


def _text_goals(size: int, case: OperationCase) -> list[Any]:
    if size != _LEVEL_SIZE:
        return []
    timings = {timing.name: timing for timing in case.timings}
    name = "the faster of Polars and DuckDB in order"
    return [fastest_goal(OURS, (POLARS, DUCKDB), 1.0, timings, name)]


def _list_contest(size: int, session: Session) -> Contest:
    """A list of texts to indices and hashes, the earlier package's interface."""
    from fast_axolotl.dedupe import deduplicate_indices

    texts = repeated_texts(size).to_pylist()
    entry = partial(Entry, rows=size, gives="list → lists", columns=_as_index_and_hash)
    return Contest(
        name=f"list-{size_name(size)}",
        text=f"a list of {size:,} texts, each of which comes twice, to indices and hashes",
        rows=size,
        unit="rows",
        entries=(
            entry(name=LISTS, prepare=lambda: lambda: deduplicate_indices(texts)),
            entry(name=PLAIN, prepare=lambda: partial(plain.deduplicate, texts), rival=LISTS),
        ),
        remotes=(
            session.remote_earlier(
                "deduplicate_indices",
                gives="list → lists",
                rows=size,
                rival=LISTS,
                write=lambda folder: write_lines(texts, folder / "texts.txt"),
            ),
        ),
    )


def _as_index(found: Any) -> Mapping[str, Any]:
    return {"index": found}


def _as_index_and_hash(found: tuple[list[int], list[str]]) -> Mapping[str, Any]:
    return {"index": found[0], "hash": found[1]}


def _as_texts(found: Any) -> Mapping[str, Any]:
    """Texts of a list, an Arrow column or table, or a frame."""
    column = found["text"] if hasattr(found, "columns") else found
    return {"text": _texts(column)}


def _texts(column: Any) -> Iterator[str]:
    if isinstance(column, list):
        yield from column
        return
    for start in range(0, len(column), _ROWS_TOGETHER):
        part = column.slice(start, _ROWS_TOGETHER)
        yield from part.to_pylist() if hasattr(part, "to_pylist") else part.to_list()


def _in_order(table: pa.Table, found: Any) -> Mapping[str, Any]:
    """Texts that came in any order, sorted by where each stands first."""
    texts = table["text"].to_pylist()
    texts.reverse()
    places = {text: -index for index, text in enumerate(texts)}
    return {"text": sorted(found["text"].to_pylist(), key=lambda text: places.get(text, 0))}
