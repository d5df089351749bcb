"""Dedupe of tokenized rows, a text column, a list of texts, and files: ``make bench-dedupe``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.children import RunError, run_child, warm_up
from benchmarks.operations import (
    LISTS,
    OURS,
    PLAIN,
    earlier_remote,
    run_operation,
    size_name,
    with_goals,
)
from benchmarks.race import AXOLOTL, Contest, Entry, Remote, Session, peer_module, run_contest
from benchmarks.result import Case, Goal, Measurement
from benchmarks.workloads import repeated_texts, short_texts, token_rows, write_lines
from fast_axolotl.cli.contenders import hash_rows
from fast_axolotl.cli.resident_peak import ResidentPeak
from fast_axolotl.dedupe import deduplicate_indices, unique_rows

_TOKENS_SHARE = 5
"""A tokenized row stands for five short ones."""
_MOST_TOKEN_ROWS = 100_000
_MOST_SLOW_ROWS = 20_000
"""Axolotl and plain Python take a tenth of a millisecond and more for a row of 365 tokens."""
_LEVEL_SIZE = 1_000_000
_ROWS_TOGETHER = 65_536

POLARS = "Polars"
DUCKDB = "DuckDB, in order"
_DUCKDB_IN_ORDER = "SELECT text FROM texts GROUP BY text ORDER BY min(rowid)"
_DUCKDB_DISTINCT = "SELECT DISTINCT text FROM texts"

_MOST_STATE_BYTES = 40.0
"""For each different row of a file."""
_MOST_PEAK_MEGABYTES = 1000.0
_LEAST_STATE_ROWS = 100_000
"""The smallest set weighs more for a few rows."""
_LARGE_ROWS = 10_000_000
_MOST_FILE_REPEATS = 3
_BUDGETS = {"1 GB": 10**9, "192 MiB": 192 * 1024**2}
"""Room for everything, and the least that is taken, where a large input goes over to disk."""


def main(arguments: Sequence[str] | None = None) -> None:
    run_operation("dedupe", __doc__, ("sha256.", "rowhash.", "digests."), dedupe_cases, arguments)


def dedupe_cases(sizes: Sequence[int], session: Session) -> Iterator[Case]:
    """The four kinds of input, each at every size that suits it."""
    for size in sorted({min(_MOST_TOKEN_ROWS, max(1, size // _TOKENS_SHARE)) for size in sizes}):
        case = run_contest(_tokens_contest(size, session), session)
        yield with_goals(case, ((OURS, AXOLOTL, 50.0, None),))
    for size in sizes:
        case = run_contest(_text_contest(size), session)
        name = "the faster of Polars and DuckDB in order"
        goal = case.fastest_goal(OURS, (POLARS, DUCKDB), 1.0, name)
        yield replace(case, goals=(goal,) if size == _LEVEL_SIZE else ())
    for size in sizes:
        yield run_contest(_list_contest(size, session), session)
    for size in sizes:
        yield _files_case(size, session)


def _tokens_contest(size: int, session: Session) -> Contest:
    """Whole rows of input_ids, attention_mask and labels, as Axolotl compares them."""
    table = token_rows(size)
    few = min(size, _MOST_SLOW_ROWS)
    entry = partial(Entry, columns=lambda found: {"index": found})

    def write(folder: Path) -> Path:
        path = folder / "tokens.arrow"
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table.slice(0, few))
        return path

    def plain() -> list[int]:
        """The loop of Axolotl over an Arrow table: every row as a dict, as text, as a hash."""
        first: dict[str, int] = {}
        batches = table.slice(0, few).to_batches(max_chunksize=1000)
        for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            first.setdefault(sha256(str(row).encode()).hexdigest(), index)
        return list(first.values())

    return Contest(
        name=f"tokens-{size_name(size)}",
        text=f"{size:,} tokenized rows, mean 365 tokens, a fifth repeated",
        rows=size,
        ours=entry(OURS, "Arrow → indices", lambda: lambda: unique_rows(table), size),
        others=(
            entry(PLAIN, "Arrow → indices", lambda: plain, few, rival=OURS),
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
    table = pa.table({"text": repeated_texts(size)})
    column = table["text"]
    entry = partial(Entry, rows=size, columns=_as_texts, rival=OURS)
    in_duckdb = partial(entry, gives="table → Arrow", package="duckdb")

    def plain_dict() -> Callable[[], Any]:
        texts = column.to_pylist()
        return lambda: list(dict.fromkeys(texts))

    def polars() -> Callable[[], Any]:
        frame = peer_module("polars").from_arrow(table)
        return lambda: frame.unique(maintain_order=True, keep="first")

    def duckdb(query: str) -> Callable[[], Any]:
        """Over a table of its own, which has row numbers to keep the order by."""
        connection = peer_module("duckdb").connect()
        connection.register("given", table)
        connection.execute("CREATE TABLE texts AS SELECT * FROM given")
        return lambda: connection.sql(query).to_arrow_table()

    def in_order(found: Any) -> Mapping[str, Any]:
        """Texts that came in any order, sorted by where each stands first."""
        texts = reversed(column.to_pylist())
        places = {text: -index for index, text in enumerate(texts)}
        return {"text": sorted(found["text"].to_pylist(), key=lambda text: places.get(text, 0))}

    return Contest(
        name=f"text-{size_name(size)}",
        text=f"a column of {size:,} texts, each of which comes twice",
        rows=size,
        ours=entry(OURS, "Arrow → Arrow", lambda: lambda: table.take(unique_rows(table))),
        others=(
            entry("pyarrow unique", "Arrow → Arrow", lambda: column.unique, package="pyarrow"),
            entry(POLARS, "frame → frame", polars, package="polars"),
            in_duckdb(DUCKDB, prepare=partial(duckdb, _DUCKDB_IN_ORDER)),
            in_duckdb(
                "DuckDB DISTINCT, any order",
                prepare=partial(duckdb, _DUCKDB_DISTINCT),
                columns=in_order,
            ),
            entry("Python dict", "list → list", plain_dict),
        ),
    )


def _as_texts(found: Any) -> Mapping[str, Any]:
    """Texts of a list, an Arrow column or table, or a frame."""
    column = found["text"] if hasattr(found, "columns") else found
    if isinstance(column, list):
        return {"text": column}
    parts = (column.slice(at, _ROWS_TOGETHER) for at in range(0, len(column), _ROWS_TOGETHER))
    lists = (part.to_pylist() if hasattr(part, "to_pylist") else part.to_list() for part in parts)
    return {"text": (text for texts in lists for text in texts)}


def _list_contest(size: int, session: Session) -> Contest:
    """A list of texts to indices and hashes, the earlier package's interface."""
    texts = repeated_texts(size).to_pylist()
    columns = lambda found: {"index": found[0], "hash": found[1]}  # noqa: E731
    entry = partial(Entry, gives="list → lists", rows=size, columns=columns)

    def plain() -> tuple[list[int], list[str]]:
        first: dict[str, int] = {}
        for index, digest in enumerate(hash_rows(texts)):
            first.setdefault(digest, index)
        return list(first.values()), list(first)

    return Contest(
        name=f"list-{size_name(size)}",
        text=f"a list of {size:,} texts, each of which comes twice, to indices and hashes",
        rows=size,
        ours=entry(LISTS, prepare=lambda: lambda: deduplicate_indices(texts)),
        others=(
            entry(PLAIN, prepare=lambda: plain, rival=LISTS),
            earlier_remote(
                session,
                "deduplicate_indices",
                "list → lists",
                size,
                lambda folder: write_lines(texts, folder / "texts.txt"),
            ),
        ),
    )


def _files_case(size: int, session: Session) -> Case:
    """``dedupe_files`` on Parquet, each run in a fresh process, compared with ``unique_rows``."""
    name = f"files-{size_name(size)}"
    session.tell(f"{name}: writing the input")
    source = session.folder / "short.parquet"
    table = pa.table({"text": short_texts(size)})
    pq.write_table(table, source, row_group_size=100_000)
    expected = table.take(unique_rows(table))
    del table
    measurements = [
        _measure_files(source, expected, label, budget, session)
        for label, budget in _BUDGETS.items()
    ]
    source.unlink()
    roomy = measurements[0]
    goals = []
    if size >= _LEAST_STATE_ROWS:
        state = roomy.values.get("state_bytes_per_row")
        text = "set of rows seen, per kept row"
        goals.append(Goal(text, _MOST_STATE_BYTES, "bytes", state, roomy.reason))
    if size == _LARGE_ROWS:
        peak, spilled = roomy.values.get("peak_bytes"), roomy.values.get("spilled_bytes")
        megabytes = None if peak is None else peak / 1e6
        text = f"memory, {roomy.name}"
        goals.append(Goal(text, _MOST_PEAK_MEGABYTES, "MB", megabytes, roomy.reason))
        goals.append(Goal(f"spilled, {roomy.name}", 0.0, "MB", spilled, roomy.reason))
    return Case(
        name=name,
        text=f"a Parquet file of {size:,} short rows, one in a hundred repeated",
        rows=size,
        measurements=measurements,
        goals=goals,
    )


def _measure_files(
    source: Path, expected: pa.Table, label: str, budget: int, session: Session
) -> Measurement:
    name = f"budget {label}"
    runs: list[Mapping[str, Any]] = []
    is_equal = True
    for repeat in range(min(session.repeats, _MOST_FILE_REPEATS)):
        session.tell(f"{source.stem}, {name}: run {repeat + 1}")
        target = session.folder / f"unique-{budget}.parquet"
        arguments = ("--child", str(source), str(target), str(budget))
        try:
            runs.append(json.loads(run_child("benchmarks.dedupe", *arguments)))
        except RunError as error:
            return Measurement(name=name, reason=str(error))
        is_equal = is_equal and pq.read_table(target).equals(expected)
        target.unlink()
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return Measurement(
        name=name,
        seconds=tuple(run["seconds"] for run in runs),
        values={
            "rows_per_second": round(median(run["rows_per_second"] for run in runs)),
            "kept_rows": runs[0]["rows_out"],
            "state_bytes": runs[0]["state_bytes"],
            "state_bytes_per_row": runs[0]["state_bytes"] / runs[0]["rows_out"],
            "spilled_bytes": runs[0]["spilled_bytes"],
            "peak_bytes": max(peaks, default=None),
            "equal": is_equal,
        },
        reason=runs[0]["reason"],
    )


def child(source: str, target: str, budget: str) -> None:
    """Dedupes a file in this fresh process, and prints what that cost."""
    from fast_axolotl.dedupe.files import dedupe_files

    warm_up(("rowhash.", "digests."))
    with ResidentPeak() as memory:
        summary = dedupe_files(source, target, memory_budget=int(budget))
    measured = {"peak_bytes": memory.above_start_bytes, "reason": memory.reason}
    print(json.dumps({**asdict(summary), **measured}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
