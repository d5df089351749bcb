"""``fast-axolotl bench``: compare this package with other libraries on your own files.

One function for each operation brings the rows into the form of each library, which is not timed.
Plain Python is written as a careful programmer writes it, and each package is used as its
documentation says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from typer import Argument, Option

from fast_axolotl.cli.options import AsJson, Inputs, print_result, say, summary_document
from fast_axolotl.cli.race import Contender, columns, digest, run_race
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record.units import format_seconds
from fast_axolotl.report.document import Document, Row, Table

BATCH_ROWS = 1000
_PAD_ROWS = 64
"""Rows padded together, to the longest of them: a batch of a training."""
_MOST_ROWS = 200
"""Axolotl's default: the most sequences in one pack."""

OURS, OURS_PYTHON, OURS_TORCH = "fast-axolotl", "fast-axolotl, Python", "fast-axolotl, torch"

_TOKENS = "lists of token ids", r"(large_|fixed_size_)?list<\w+: u?int"
_NEEDS = {"hash": ("text", r"(large_)?string$"), "pack": _TOKENS, "pad": _TOKENS}
"""What the column has to be: in words, and as the beginning of the name of its type."""

_VERSIONS = ("fast-axolotl", "numpy", "numba", "pyarrow", "datasets")

Request = Mapping[str, Any]


def bench(
    operation: Annotated[
        Literal["reader", "hash", "dedupe", "pack", "pad"],
        Argument(
            help="hash takes texts; pack and pad take lists of token ids.", metavar="OPERATION"
        ),
    ],
    paths: Inputs,
    column: Annotated[
        list[str] | None,
        Option(help="The column; dedupe takes several. Default: input_ids, or all columns."),
    ] = None,
    sequence_len: Annotated[int, Option(help="Tokens per pack.", min=1)] = 2048,
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

    if operation in ("pack", "pad"):
        column = column or ["input_ids"]
    elif operation == "hash" and not column:
        raise UsageError("bench hash needs --column, which names the column of texts to hash")
    request = _look(operation, paths, column, rows) | {"sequence_len": sequence_len}
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


def _look(
    operation: str, paths: Sequence[str], names: list[str] | None, most_rows: int
) -> dict[str, Any]:
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
    kind, (wanted, pattern) = str(table.schema.types[0]), _NEEDS.get(operation, ("", ""))
    if names and not re.match(pattern, kind):
        raise UsageError(
            f"{', '.join(paths)}: column {names[0]!r} has the type {kind}, but bench {operation} "
            f"needs {wanted}; choose another column with --column"
        )
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
            middle, low, high = map(_format_ratio, one["ours_over_theirs"])
            ratio, (_, least, most) = f"{middle}× ({low}–{high})", one["ours_over_theirs"]
            how = "faster than" if least > 1 else "slower than" if most < 1 else "about as fast as"
            answer.append(f"fast-axolotl is {how} {one['name']}: {middle}× ({low}–{high}×).")
        rate = f"{found['rows'] / seconds:,.0f}"
        table.append([one["name"], one["returns"], format_seconds(seconds), rate, ratio])
    nothing = "No other library gave the same result here, so there is nothing to compare with."
    header = ["", "returns", "median", "rows/s", "ours ÷ theirs"]
    facts, title = {**found, "libraries": None}, "\n".join(answer or [nothing])
    return summary_document(facts, Table(header=header, rows=table), title=title)


def _format_ratio(ratio: float) -> str:
    return f"{ratio:,.{2 if ratio < 1 else 1 if ratio < 10 else 0}f}"


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


def hash_texts(request: Request) -> list[Contender]:
    """SHA-256 of every text of a list."""
    from fast_axolotl.dedupe import parallel_hash_rows

    rows = request["table"].column(0).drop_null().to_pylist()

    def plain() -> list[str]:
        return [sha256(row.encode()).hexdigest() for row in rows]

    return [
        Contender(OURS, "list → list", lambda: parallel_hash_rows(rows)),
        Contender("hashlib", "list → list", plain, OURS),
    ]


def dedupe(request: Request) -> list[Contender]:
    """The numbers of the rows that are the first of their kind."""
    from fast_axolotl.dedupe import unique_rows

    table = request["table"]
    values = [column.to_pylist() for column in table.columns]
    rows = values[0] if len(values) == 1 else list(zip(*values, strict=True))
    frame = cache(table.to_pandas)

    def plain() -> list[int]:
        # The rows as text, where they are no texts; the first of equal ones is written last.
        keys = rows if isinstance(rows[0], str) else [*map(str, rows)]
        first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        return sorted(first.values())

    def pandas() -> Any:
        return (~frame().duplicated()).to_numpy().nonzero()[0]

    return [
        Contender(OURS, "Arrow → rows", lambda: unique_rows(table)),
        Contender("Python set", "lists → rows", plain, OURS),
        Contender("pandas", "frame → rows", pandas, OURS, "pandas"),
    ]


def plan(request: Request) -> list[Contender]:
    """Which rows of tokens share a pack, by first fit; longer ones count as full."""
    import numpy as np
    import pyarrow.compute as pc

    from fast_axolotl.packing import plan_packs

    capacity = request["sequence_len"]
    column = request["table"].column(0).drop_null()
    lengths = np.minimum(pc.list_value_length(column).to_numpy(), capacity).astype(np.int64)

    def plain() -> list[list[int]]:
        if len(lengths) > 20_000:
            raise NotImplementedError("it is quadratic: up to 20,000 rows only")
        free: list[int] = []
        packs: list[list[int]] = []
        for index, length in enumerate(lengths.tolist()):
            rooms = enumerate(free)
            fits = (at for at, room in rooms if room >= length and len(packs[at]) < _MOST_ROWS)
            if (place := next(fits, len(packs))) == len(packs):
                free.append(capacity)
                packs.append([])
            free[place] -= length
            packs[place].append(index)
        return packs

    def axolotl() -> Any:
        pack = import_module("axolotl.utils.samplers.multipack").pack_group
        return pack(lengths, 0, capacity, len(lengths), _MOST_ROWS)

    gives = "lengths → packs"
    return [
        Contender(OURS, gives, partial(plan_packs, lengths, capacity, max_rows=_MOST_ROWS)),
        Contender("Axolotl", gives, axolotl, OURS, "axolotl"),
        Contender("Python first fit", gives, plain, OURS),
    ]


def pad_rows(request: Request) -> list[Contender]:
    """Batch by batch, as a training pads: each is gone before the next one."""
    from fast_axolotl.packing import pad_sequences

    rows = request["table"].column(0).drop_null().to_pylist()
    batches = [rows[start : start + _PAD_ROWS] for start in range(0, len(rows), _PAD_ROWS)]

    def plain(sequences: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, sequences))
        return [row + [0] * (width - len(row)) for row in sequences]

    def torch(sequences: Sequence[list[int]]) -> Any:
        pad = import_module("torch.nn.utils.rnn").pad_sequence
        return pad([*map(import_module("torch").tensor, sequences)], batch_first=True)

    tensors = partial(pad_sequences, output="torch")
    return [
        Contender(OURS, "lists → lists", lambda: map(pad_sequences, batches)),
        Contender("plain Python", "lists → lists", lambda: map(plain, batches), OURS),
        Contender(OURS_TORCH, "lists → torch", lambda: map(tensors, batches), None, "torch"),
        Contender("torch", "lists → torch", lambda: map(torch, batches), OURS_TORCH, "torch"),
    ]


CONTENDERS: Mapping[str, Callable[[Request], list[Contender]]] = {
    "reader": read,
    "hash": hash_texts,
    "dedupe": dedupe,
    "pack": plan,
    "pad": pad_rows,
}
"""Operation to its libraries; the first peer is the one that the answer begins with."""
