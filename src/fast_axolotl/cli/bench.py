"""``fast-axolotl bench``: compare this package with other libraries on your own files.

One function for each operation brings the rows into the form of each library, which is not timed.
Plain Python is written as a careful programmer writes it, and each package is used as its
documentation says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from typer import Argument, Option

from fast_axolotl.cli.options import AsJson, Inputs, print_result, say, summary_document
from fast_axolotl.cli.race import Contender, columns, digest, run_race
from fast_axolotl.errors import DataError
from fast_axolotl.record.units import format_count, format_seconds
from fast_axolotl.report.document import Document, Row, Table

BATCH_ROWS = 1000
OURS, OURS_PYTHON = "fast-axolotl", "fast-axolotl, Python"

_VERSIONS = ("fast-axolotl", "numpy", "numba", "pyarrow", "datasets")

Request = Mapping[str, Any]


def bench(
    operation: Annotated[
        Literal["reader", "dedupe"], Argument(help="What to time.", metavar="OPERATION")
    ],
    paths: Inputs,
    column: Annotated[
        list[str] | None, Option(help="A column. Repeatable. Default: all columns.")
    ] = None,
    rows: Annotated[int, Option(help="Use at most this many rows.", min=1)] = 20_000,
    as_json: AsJson = False,
) -> None:
    """Compare this package with other installed libraries on your own files.

    Results are compared first: a library that returns another result is not timed. Then repeats
    alternate. A ratio is our throughput over theirs, where both return the same kind of result;
    imports, compiling and a first pass are not included.

    The result names no paths, columns or values, so you can share it.
    """
    from fast_axolotl.system import describe

    request = _look(paths, column, rows)
    # What other libraries print is no part of the result.
    with redirect_stdout(sys.stderr):
        libraries, left_out = run_race(CONTENDERS[operation](request), progress=say)
    for name, reason in left_out.items():
        # Apart from the result, because it may quote paths and values.
        say(f"{name}: not measured: {reason}")
    machine = describe()
    versions = machine["versions"]
    found: dict[str, Any] = {name: request[name] for name in ("rows", "format", "num_bytes")}
    found |= {
        "operation": operation,
        "files": len(request["files"]),
        "libraries": libraries,
        "machine": {name: machine.get(name) for name in ("cpu", "cores", "python")},
        "versions": {name: versions[name] for name in _VERSIONS if name in versions},
        "not_measured": list(left_out),
    }
    print_result(found, bench_document(found), as_json=as_json)


def _look(paths: Sequence[str], names: list[str] | None, most_rows: int) -> dict[str, Any]:
    """The rows to work on, before anything starts; or what is wrong with them."""
    import pyarrow as pa

    from fast_axolotl.reading import open_dataset

    paths = [p if "://" in p else str(Path(p).expanduser().absolute()) for p in paths]
    with open_dataset(paths, columns=names) as reader:
        batches = list(_cut(reader, most_rows))
        formats = {file.format for file in reader.files}
    if not batches:
        raise DataError(f"{', '.join(paths)}: no rows to measure; pass files that contain rows")
    table = pa.Table.from_batches(batches).combine_chunks()
    return {
        "rows": len(table),
        "num_bytes": reader.stats.num_bytes,
        "format": formats.pop() if len(formats) == 1 else "mixed",
        "paths": paths,
        "files": [file.source.path for file in reader.files],
        "table": table,
    }


def bench_document(found: Mapping[str, Any]) -> Document:
    """The answer against each library, the times, and what was measured where."""
    answer: list[str] = []
    table: list[Row] = []
    for one in found["libraries"]:
        seconds, ratio = median(one["seconds"]), "–"
        if one["ours_over_theirs"] is not None:
            middle, low, high = map(format_count, one["ours_over_theirs"])
            ratio, (_, least, most) = f"{middle}× ({low}–{high})", one["ours_over_theirs"]
            how = "faster than" if least > 1 else "slower than" if most < 1 else "about as fast as"
            answer.append(f"fast-axolotl is {how} {one['name']}: {middle}× ({low}–{high}×).")
        rate = f"{found['rows'] / seconds:,.0f}"
        table.append([one["name"], one["returns"], format_seconds(seconds), rate, ratio])
    nothing = "No other library gave the same result here, so there is nothing to compare with."
    header = ["", "returns", "median", "rows/s", "ours ÷ theirs"]
    facts, title = {**found, "libraries": None}, "\n".join(answer or [nothing])
    return summary_document(facts, Table(header=header, rows=table), title=title)


def read(request: Request) -> list[Contender]:
    """Readers of the files, stopped after the rows that are asked for; opening is timed."""
    from fast_axolotl.reading import convert, open_dataset

    rows, form, files = request["rows"], request["format"], request["files"]

    def ours() -> Iterator[Any]:
        return _cut(open_dataset(request["paths"], batch_size=BATCH_ROWS), rows)

    def in_python() -> Iterator[Any]:
        return (convert(batch, "python") for batch in ours())

    def datasets() -> Iterator[Any]:
        package = import_module("datasets")
        package.disable_progress_bars()
        name = {"jsonl": "json", "feather": "arrow"}.get(form, form)
        found = package.load_dataset(name, data_files=files, split="train", streaming=True)
        return islice(found, rows)

    def pyarrow() -> Iterator[Any]:
        from pyarrow import csv, dataset
        from pyarrow import json as pa_json

        if form == "jsonl":
            return _cut(chain.from_iterable(map(pa_json.open_json, files)), rows)
        named: Any = {"arrow": "ipc"}.get(form, form)
        if form == "csv":
            named = dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True))
        return _cut(dataset.dataset(files, format=named).to_batches(), rows)

    def plain() -> Iterator[Any]:
        if form != "jsonl":
            raise NotImplementedError("it reads JSON lines only")
        for file in files:
            with Path(file).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)

    def answer(kind: str) -> Callable[[Any], str]:
        return lambda items: digest(columns(items, kind))

    arrow, dicts = answer("arrow"), answer("rows")
    return [
        Contender(OURS, "Arrow batches", ours, answer=arrow),
        Contender(OURS_PYTHON, "dicts of lists", in_python, answer=answer("python")),
        Contender("HF datasets, streaming", "rows", datasets, OURS_PYTHON, "datasets", dicts),
        Contender("pyarrow", "Arrow batches", pyarrow, OURS, answer=arrow),
        Contender("plain Python", "rows", lambda: islice(plain(), rows), OURS_PYTHON, None, dicts),
    ]


def _cut(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """The first rows, in batches of at most the same size."""
    for batch in batches:
        for start in range(0, min(rows, len(batch)), BATCH_ROWS):
            yield batch.slice(start, min(BATCH_ROWS, rows - start))
        rows -= len(batch)
        if rows <= 0:
            return


def dedupe(request: Request) -> list[Contender]:
    """The numbers of the rows that are the first of their kind."""
    from fast_axolotl.dedupe import unique_rows

    table = request["table"]
    values = [column.to_pylist() for column in table.columns]
    rows = values[0] if len(values) == 1 else list(zip(*values, strict=True))

    def plain() -> list[int]:
        # The rows as text, where they are no texts; the first of equal ones is written last.
        keys = rows if isinstance(rows[0], str) else [*map(str, rows)]
        first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        return sorted(first.values())

    return [
        Contender(OURS, "Arrow → rows", lambda: unique_rows(table)),
        Contender("Python set", "lists → rows", plain, OURS),
    ]


CONTENDERS = {"reader": read, "dedupe": dedupe}
"""Operation to its libraries; the first peer is the one that the answer begins with."""
