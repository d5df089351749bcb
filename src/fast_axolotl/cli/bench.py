"""``fast-axolotl bench``: how this package fares on the user's own files, in this environment.

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
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from typer import Argument, Option

from fast_axolotl.cli.options import Inputs
from fast_axolotl.cli.race import Contender, Timing, columns, run_race
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record.units import count_words, format_bytes, format_seconds
from fast_axolotl.report.document import Block, Bullets, Document, Row, Table

BATCH_ROWS = 1000
_PAD_ROWS = 64
"""Rows padded together, to the longest of them: a batch of a training."""
_MOST_PLAIN_ROWS = 20_000
"""For first fit in plain Python, which looks at every pack for every row."""
_MOST_ROWS = 200
"""Axolotl's default: the most sequences in one pack."""

OURS, OURS_PYTHON = "fast-axolotl", "fast-axolotl, Python"

_DOES = {"reader": "reads", "hash": "hashes", "dedupe": "dedupes", "pack": "packs", "pad": "pads"}
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
        Option(help="The column; dedupe takes several. Default: input_ids, or all."),
    ] = None,
    sequence_len: Annotated[int, Option(help="Tokens per pack.", min=1)] = 2048,
    rows: Annotated[int, Option(help="Use at most this many rows.", min=1)] = 20_000,
) -> None:
    """Compare this package with other installed libraries on your own files.

    Results are compared first: a library that returns another result is not timed. Then repeats
    alternate. The result names no paths, columns or values, so you can share it.
    """
    from fast_axolotl.report.terminal import print_document
    from fast_axolotl.system import describe

    if operation in ("pack", "pad"):
        column = column or ["input_ids"]
    elif operation == "hash" and not column:
        raise UsageError("bench hash needs --column, which names the column of texts to hash")
    request = _look(operation, paths, column, rows) | {"sequence_len": sequence_len}
    # What other libraries print is no part of the result.
    with redirect_stdout(sys.stderr):
        timings, left_out = run_race(
            CONTENDERS[operation](request),
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    for name, reason in left_out.items():
        # Apart from the result, because it may quote paths and values.
        print(f"{name}: not measured: {reason}", file=sys.stderr)
    files = count_words(len(request["files"]), "file")
    print("\n".join(_sentences(f"{_DOES[operation]} {files} of yours", timings)))
    table: list[Row] = []
    for one in timings:
        seconds = median(one.seconds)
        result = "{}× ({}–{})".format(*map(_format_ratio, one.ratio)) if one.ratio else "–"
        speed = [format_seconds(seconds), f"{request['rows'] / seconds:,.0f}", result]
        table.append([one.contender.name, one.contender.gives, *speed])
    machine = describe()
    installed = machine["versions"]
    versions = [f"{name} {installed[name]}" for name in _VERSIONS if name in installed]
    notes = [
        f"{request['rows']:,} rows, of the first {rows:,} at most (--rows).",
        f"Data: {request['format']}, {files}, {format_bytes(request['num_bytes'])} read.",
        f"Machine: {machine.get('cpu', 'unknown processor')}, {machine['cores']} cores, "
        f"Python {machine['python']}, {', '.join(versions)}.",
        *(f"{name}: not measured, for the reason above." for name in left_out),
        "ours ÷ theirs: ratio of throughputs, above 1 if fast-axolotl is faster, between libraries "
        "that return the same kind of result.",
        "Not included: imports, compiling or loading kernels, and a first pass over a few rows.",
    ]
    header = ["", "returns", "median", "rows/s", "ours ÷ theirs"]
    blocks: list[Block] = [Table(header=header, rows=table), Bullets(notes, True)]
    print_document(Document(title=f"bench {operation}", blocks=blocks))


def _look(
    operation: str, paths: Sequence[str], columns: list[str] | None, most_rows: int
) -> dict[str, Any]:
    """The rows to work on, before anything starts; or what is wrong with them."""
    import pyarrow as pa

    from fast_axolotl.reading import open_dataset

    paths = [p if "://" in p else str(Path(p).expanduser().absolute()) for p in paths]
    names = ", ".join(paths)
    with open_dataset(paths, columns=columns) as reader:
        batches = list(_cut(reader, most_rows))
        formats = {file.format for file in reader.files}
    if not batches:
        raise DataError(f"{names}: no rows to measure; pass files that contain rows")
    table = pa.Table.from_batches(batches).combine_chunks()
    kind, (wanted, pattern) = str(table.schema.types[0]), _NEEDS.get(operation, ("", ""))
    if columns and not re.match(pattern, kind):
        raise UsageError(
            f"{names}: column {columns[0]!r} has the type {kind}, but bench {operation} needs "
            f"{wanted}; choose another column with --column"
        )
    return {
        "paths": paths,
        "files": [file.source.path for file in reader.files],
        "format": formats.pop() if len(formats) == 1 else "mixed",
        "table": table,
        "rows": len(table),
        "num_bytes": reader.stats.num_bytes,
    }


def _sentences(does: str, timings: Sequence[Timing]) -> list[str]:
    """The answer first: against the first peer that is equal, then wherever we are not faster."""
    won, other = [], []
    for timing in timings:
        if timing.ratio is None:
            continue
        name, (ratio, low, high) = timing.contender.name, map(_format_ratio, timing.ratio)
        if timing.ratio[1] > 1:
            won.append(f"fast-axolotl {does} {ratio}× as fast as {name} ({low}–{high}×).")
        elif timing.ratio[2] < 1:
            other.append(f"fast-axolotl is slower than {name}: {ratio}× as fast ({low}–{high}×).")
        else:
            other.append(f"No clear difference from {name}: {ratio}× ({low}–{high}×).")
    nothing = "No other library gave the same result here, so there is nothing to compare with."
    return [*won[:1], *other] or [nothing]


def _format_ratio(ratio: float) -> str:
    digits = 2 if ratio < 1 else 1 if ratio < 10 else 0
    return f"{ratio:,.{digits}f}"


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
        from pyarrow import csv, dataset, input_stream
        from pyarrow import json as pa_json

        named: Any = {"arrow": "ipc", "feather": "feather", "parquet": "parquet"}.get(form)
        if form == "jsonl":
            # The fastest of 1, 2, 4 and 8 MiB on two cores.
            block = pa_json.ReadOptions(block_size=2 * 1024 * 1024)
            opened = (pa_json.open_json(input_stream(file), block) for file in files)
            return _cut(chain.from_iterable(opened), rows)
        if form == "csv":
            named = dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True))
        elif named is None:
            raise NotImplementedError(f"it does not stream {form} files")
        return _cut(dataset.dataset(files, format=named).to_batches(), rows)

    def plain() -> Iterator[Any]:
        if form != "jsonl":
            raise NotImplementedError("it reads JSON lines only")
        for file in files:
            with Path(file).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)

    def entry(name: str, gives: str, run: Any, kind: str, *against: str) -> Contender:
        return Contender(name, gives, run, partial(columns, kind=kind), *against)

    hf = "HF datasets, streaming"
    return [
        entry(OURS, "Arrow batches", ours, "arrow"),
        entry(OURS_PYTHON, "dicts of lists", in_python, "python"),
        entry(hf, "rows", datasets, "rows", OURS_PYTHON, "datasets"),
        entry("pyarrow", "Arrow batches", pyarrow, "arrow", OURS),
        entry("plain Python", "rows", lambda: islice(plain(), rows), "rows", OURS_PYTHON),
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
        Contender(OURS, "list → list", lambda: parallel_hash_rows(rows), list),
        Contender("hashlib", "list → list", plain, list, OURS),
    ]


def dedupe(request: Request) -> list[Contender]:
    """The numbers of the rows that are the first of their kind."""
    from fast_axolotl.dedupe import unique_rows

    table = request["table"]
    columns = [column.to_pylist() for column in table.columns]
    rows = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def plain() -> list[int]:
        """A set of the values; of the rows as text, where they are no texts."""
        seen: set[Any] = set()
        first = []
        for index, value in enumerate(rows if isinstance(rows[0], str) else map(str, rows)):
            if value not in seen:
                seen.add(value)
                first.append(index)
        return first

    return [
        Contender(OURS, "Arrow → rows", lambda: unique_rows(table), list),
        Contender("Python set", "lists → rows", plain, list, OURS),
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
        if len(lengths) > _MOST_PLAIN_ROWS:
            raise NotImplementedError(f"it is quadratic: up to {_MOST_PLAIN_ROWS:,} rows only")
        return first_fit(lengths.tolist(), capacity, _MOST_ROWS)

    ours = partial(plan_packs, lengths, capacity, max_rows=_MOST_ROWS)
    return [
        Contender(OURS, "lengths → packs", ours, list),
        Contender("Python first fit", "lengths → packs", plain, list, OURS),
    ]


def first_fit(lengths: Iterable[int], capacity: int, max_rows: int) -> list[list[int]]:
    """Each length into the first pack that has room for it."""
    free: list[int] = []
    packs: list[list[int]] = []
    for index, length in enumerate(lengths):
        for place, room in enumerate(free):
            if room >= length and len(packs[place]) < max_rows:
                free[place] = room - length
                packs[place].append(index)
                break
        else:
            free.append(capacity - length)
            packs.append([index])
    return packs


def pad_rows(request: Request) -> list[Contender]:
    """Batch by batch, as a training pads: each is gone before the next one."""
    from fast_axolotl.packing import pad_sequences

    rows = request["table"].column(0).drop_null().to_pylist()
    batches = [rows[start : start + _PAD_ROWS] for start in range(0, len(rows), _PAD_ROWS)]

    return [
        Contender(OURS, "lists → lists", lambda: map(pad_sequences, batches), chain.from_iterable),
        Contender(
            "plain Python", "lists → lists", lambda: map(_pad, batches), chain.from_iterable, OURS
        ),
    ]


def _pad(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Every sequence with its padding behind it, which is made once for each length."""
    lengths = set(map(len, sequences))
    fillers = {length: [0] * (max(lengths) - length) for length in lengths}
    return [row + fillers[len(row)] for row in sequences]


CONTENDERS: Mapping[str, Callable[[Request], list[Contender]]] = {
    "reader": read,
    "hash": hash_texts,
    "dedupe": dedupe,
    "pack": plan,
    "pad": pad_rows,
}
"""Operation to its libraries; the first peer is the one that the answer begins with."""
