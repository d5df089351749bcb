"""``fast-axolotl bench``: how this package fares on the user's own files, in this environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fast_axolotl.cli.options import Inputs, examples
from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.cli.race import Timing
    from fast_axolotl.report.document import Table

BENCH_EXAMPLES = examples(
    "bench reader data.jsonl",
    "bench hash data.jsonl --column text",
    "bench dedupe data.jsonl --column prompt --column answer",
    "bench pack tokens.parquet --sequence-len 4096",
    "bench pad tokens.parquet",
)

_DOES = {"reader": "reads", "hash": "hashes", "dedupe": "dedupes", "pack": "packs", "pad": "pads"}
_TOKENS = "lists of token ids", r"(large_|fixed_size_)?list<\w+: u?int"
_NEEDS = {"hash": ("text", r"(large_)?string$"), "pack": _TOKENS, "pad": _TOKENS}
"""What the column has to be: in words, and as the beginning of the name of its type."""
_VERSIONS = ("fast-axolotl", "numpy", "numba", "pyarrow", "datasets")


def bench(
    operation: Annotated[
        Literal["reader", "hash", "dedupe", "pack", "pad"],
        typer.Argument(
            help="reader: read all columns; hash: SHA-256 of a text column; dedupe: exact "
            "deduplication; pack and pad: lists of token ids.",
            metavar="OPERATION",
        ),
    ],
    paths: Inputs,
    column: Annotated[
        list[str] | None,
        typer.Option(help="The column to use; dedupe takes several. Default: input_ids, or all."),
    ] = None,
    sequence_len: Annotated[int, typer.Option(help="Tokens per pack.", min=1)] = 2048,
    rows: Annotated[
        int, typer.Option(help="Use at most this many rows, from the start.", min=1)
    ] = 20_000,
    share: Annotated[
        bool,
        typer.Option("--share", help="Print Markdown to share, without paths, names or values."),
    ] = False,
) -> None:
    """Compare this package with other installed libraries on your own files.

    Results are compared first: a library that returns another result is not timed. Then repeats
    alternate.
    """
    from fast_axolotl.cli.contenders import CONTENDERS
    from fast_axolotl.cli.race import run_race
    from fast_axolotl.report.document import Block, Bullets, Document
    from fast_axolotl.report.markdown import document_markdown
    from fast_axolotl.report.terminal import print_document

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
    table = _table(timings)
    if share:
        blocks: list[Block] = [Bullets(_shared_facts(request)), table]
        print(document_markdown(Document(title=f"fast-axolotl bench {operation}", blocks=blocks)))
        return
    files = "this file" if len(request["files"]) == 1 else f"these {len(request['files'])} files"
    print("\n".join(_sentences(f"{_DOES[operation]} {files}", timings)))
    measured = f"{timings[0].rows:,} rows with a value, of the first {rows:,} at most (--rows)."
    notes = [
        measured,
        *(f"{item.contender.name}: not equal: {item.reason}" for item in timings if item.reason),
    ]
    notes += [f"{name}: not measured: {reason}" for name, reason in left_out.items()]
    notes += [
        "ours ÷ theirs: ratio of throughputs, above 1 if fast-axolotl is faster, between libraries "
        "that return the same kind of result.",
        "Not included: imports, compiling or loading kernels, and a first pass over a few rows.",
    ]
    print_document(Document(title=f"bench {operation}", blocks=[table, Bullets(notes, True)]))


def _look(
    operation: str, paths: Sequence[str], columns: list[str] | None, most_rows: int
) -> dict[str, Any]:
    """What is there, before anything starts: files, columns, rows; or what is wrong with it."""
    from fast_axolotl.reading import open_dataset

    paths = [p if "://" in p else str(Path(p).expanduser().absolute()) for p in paths]
    names = ", ".join(paths)
    rows = 0
    with open_dataset(paths) as reader:
        for batch in reader:
            rows += len(batch)
            if rows >= most_rows:
                break
        types = {field.name: str(field.type) for field in reader.schema}
        files = [file.source.path for file in reader.files]
        formats = {file.format for file in reader.files}
        num_bytes = reader.stats.num_bytes
    if not rows:
        raise DataError(f"{names}: no rows to measure; pass files that contain rows")
    for name in columns or ():
        if name not in types:
            raise UsageError(f"{names}: no column {name!r}; there are {', '.join(types)}")
    wanted, pattern = _NEEDS.get(operation, ("", ""))
    if columns and not re.match(pattern, types[columns[0]]):
        raise UsageError(
            f"{names}: column {columns[0]!r} has the type {types[columns[0]]}, but bench "
            f"{operation} needs {wanted}; choose another column with --column"
        )
    return {
        "paths": paths,
        "files": files,
        "format": formats.pop() if len(formats) == 1 else "mixed",
        "types": types,
        "columns": columns,
        "rows": min(rows, most_rows),
        "num_bytes": num_bytes,
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


def _table(timings: Sequence[Timing]) -> Table:
    from fast_axolotl.record.units import format_seconds
    from fast_axolotl.report.document import Table

    rows = []
    for timing in timings:
        cells, result = ["–", "–"], "–" if timing.contender.against is None else "not equal"
        if timing.reason is None:
            seconds = median(timing.seconds)
            cells = [format_seconds(seconds), f"{timing.rows / seconds:,.0f}"]
        if timing.ratio is not None:
            result = "{}× ({}–{})".format(*map(_format_ratio, timing.ratio))
        rows.append([timing.contender.name, timing.contender.gives, *cells, result])
    header = ["", "returns", "median", "rows/s", "ours ÷ theirs"]
    return Table(header=header, rows=rows)


def _shared_facts(request: dict[str, Any]) -> list[str]:
    """About the machine and the data, and nothing about whose they are.

    Paths, names, values and the kernel's release stay out; so do reasons, which may quote them.
    """
    from fast_axolotl.record.units import count_words, format_bytes
    from fast_axolotl.system import describe

    machine = describe()
    memory = min(machine["memory_bytes"], machine.get("limit_bytes", machine["memory_bytes"]))
    installed = machine["versions"]
    versions = [f"{name} {installed[name]}" for name in _VERSIONS if name in installed]
    return [
        f"Machine: {machine.get('cpu', 'unknown processor')}, {machine['cores']} cores, "
        f"{format_bytes(memory)} of memory, {sys.platform}",
        f"Versions: Python {machine['python']}, {', '.join(versions)}",
        f"Data: {request['format']}, {count_words(len(request['files']), 'file')}, "
        f"{count_words(len(request['types']), 'column')}, {request['rows']:,} rows, "
        f"{format_bytes(request['num_bytes'])} read",
        "Alternating repeats, after the results were compared",
    ]
