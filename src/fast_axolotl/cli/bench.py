"""``fast-axolotl bench``: how this package fares on the user's own files, in this environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fast_axolotl.cli.options import Inputs, ResultAsJson, examples
from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.cli.race import Timing

BENCH_EXAMPLES = examples(
    "bench reader data.jsonl",
    "bench hash data.jsonl --column text",
    "bench dedupe data.jsonl --column prompt --column answer",
    "bench pack tokens.parquet --sequence-len 4096",
    "bench pad tokens.parquet",
)

_ROWS = {"reader": 200_000, "hash": 100_000, "dedupe": 100_000, "pack": 20_000, "pad": 20_000}
_DOES = {"reader": "reads", "hash": "hashes", "dedupe": "dedupes", "pack": "packs", "pad": "pads"}


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
        int | None, typer.Option(help="Use at most this many rows, from the start.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats per library.", min=1)] = 5,
    as_json: ResultAsJson = False,
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

    if operation in ("pack", "pad"):
        column = column or ["input_ids"]
    elif operation == "hash" and not column:
        raise UsageError("bench hash needs --column, which names the column of texts to hash")
    request = _look(operation, paths, column, rows or _ROWS[operation])
    os.environ.update({"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})
    # What other libraries print is no part of the result.
    with redirect_stdout(sys.stderr):
        timings, left_out = run_race(
            CONTENDERS[operation],
            {**request, "sequence_len": sequence_len},
            repeats=repeats,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    sentences = _sentences(operation, len(request["files"]), timings)
    if share:
        _share(operation, request, timings, repeats)
    elif as_json:
        measured = {name: request[name] for name in ("files", "num_bytes", "columns")}
        measured["rows"] = request["raced_rows"]
        found = {"operation": operation, "repeats": repeats, **measured, "answer": sentences}
        found |= {"timings": [asdict(one) for one in timings], "left_out": left_out}
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print("\n".join(sentences))
        _print(operation, request, timings, left_out)


def _look(
    operation: str, paths: Sequence[str], columns: list[str] | None, most_rows: int
) -> dict[str, Any]:
    """What is there, before anybody starts: files, columns, rows; or what is wrong with it."""
    from pyarrow import types as kinds

    from fast_axolotl.reading import open_dataset

    paths = [p if "://" in p else str(Path(p).expanduser().absolute()) for p in paths]
    names = ", ".join(paths)
    column = columns[0] if columns and operation != "dedupe" else None
    rows = raced = 0
    with open_dataset(paths) as reader:
        for batch in reader:
            if column is not None and column in batch.schema.names:
                # Rows without a value are nobody's work.
                raced -= batch.slice(0, max(0, most_rows - rows)).column(column).null_count
            rows += len(batch)
            if rows > most_rows:
                break
        raced += min(rows, most_rows)
        schema = {field.name: field.type for field in reader.schema}
        files = [file.source.path for file in reader.files]
        formats = {file.format for file in reader.files}
        num_bytes = reader.stats.num_bytes
    for name in columns or ():
        if rows and name not in schema:
            raise UsageError(f"{names}: no column {name!r}; there are {', '.join(schema)}")
    if rows and column is not None:
        kind = schema[column]
        if operation == "hash":
            wanted, fits = "text", kinds.is_string(kind) or kinds.is_large_string(kind)
        else:
            lists = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
            is_list = any(is_kind(kind) for is_kind in lists)
            wanted, fits = "lists of token ids", is_list and kinds.is_integer(kind.value_type)
        if not fits:
            raise UsageError(
                f"{names}: column {column!r} has the type {kind}, but bench {operation} needs "
                f"{wanted}; choose another column with --column"
            )
    if not raced:
        raise DataError(f"{names}: no rows to measure; pass files that contain rows")
    return {
        "paths": paths,
        "files": files,
        "format": formats.pop() if len(formats) == 1 else "mixed",
        "types": {name: str(kind) for name, kind in schema.items()},
        "columns": columns,
        "rows": min(rows, most_rows),
        "raced_rows": raced,
        "is_all": rows <= most_rows,
        "num_bytes": num_bytes,
    }


def _sentences(operation: str, num_files: int, timings: Sequence[Timing]) -> list[str]:
    """The answer first: against the first peer that is equal, then wherever we are not faster."""
    files = "this file" if num_files == 1 else f"these {num_files} files"
    won, other = [], []
    for timing in timings:
        if timing.ratio is None:
            continue
        ratio, low, high = map(_figure, timing.ratio)
        if timing.ratio[1] > 1:
            won.append(
                f"fast-axolotl {_DOES[operation]} {files} {ratio}× as fast as {timing.name} "
                f"({low}–{high}×)."
            )
        elif timing.ratio[2] < 1:
            other.append(
                f"fast-axolotl is slower than {timing.name} here: {ratio}× as fast ({low}–{high}×)."
            )
        else:
            other.append(f"No clear difference from {timing.name}: {ratio}× ({low}–{high}×).")
    nothing = "No other library gave the same result here, so there is nothing to compare with."
    return [*won[:1], *other] or [nothing]


def _figure(ratio: float) -> str:
    digits = 2 if ratio < 1 else 1 if ratio < 10 else 0
    return f"{ratio:,.{digits}f}"


def _table(
    operation: str, request: dict[str, Any], timings: Sequence[Timing]
) -> tuple[list[str], list[list[str]]]:
    from fast_axolotl.record.units import format_seconds

    header = ["", "returns", "median", "min – max", "rows/s"]
    header += ["MB/s", "first batch"] if operation == "reader" else []
    rows = []
    for timing in timings:
        cells = ["–"] * (len(header) - 2)
        result = "–" if timing.against is None else "not equal"
        if timing.reason is None:
            seconds = median(timing.seconds)
            ends = format_seconds(min(timing.seconds)), format_seconds(max(timing.seconds))
            cells = [format_seconds(seconds), " – ".join(ends)]
            cells.append(f"{request['raced_rows'] / seconds:,.0f}")
            if operation == "reader":
                first = median(timing.first_seconds) if timing.first_seconds else None
                cells += [f"{request['num_bytes'] / seconds / 1e6:,.0f}", format_seconds(first)]
        if timing.ratio is not None:
            result = "{}× ({}–{})".format(*map(_figure, timing.ratio))
        rows.append([timing.name, timing.gives, *cells, result])
    return [*header, "ours ÷ theirs"], rows


def _share(
    operation: str, request: dict[str, Any], timings: Sequence[Timing], repeats: int
) -> None:
    """The result as Markdown that says nothing about whose it is.

    Paths, file, column, user and host names, values, and the kernel's release stay out; so do
    reasons, which may quote them.
    """
    from fast_axolotl.record.units import count_words, format_bytes
    from fast_axolotl.system import describe

    machine = describe()
    memory = min(machine["memory_bytes"], machine.get("limit_bytes", machine["memory_bytes"]))
    needed = ("fast-axolotl", "numpy", "numba", "pyarrow", "datasets", "torch", "axolotl")
    versions = [
        f"{name} {machine['versions'][name]}" for name in needed if name in machine["versions"]
    ]
    header, rows = _table(operation, request, timings)
    print(
        f"### fast-axolotl bench {operation}\n\n"
        f"- Machine: {machine.get('cpu', 'unknown processor')}, {machine['cores']} cores, "
        f"{format_bytes(memory)} of memory, {sys.platform}\n"
        f"- Versions: Python {machine['python']}, {', '.join(versions)}\n"
        f"- Data: {request['format']}, {count_words(len(request['files']), 'file')}, "
        f"{count_words(len(request['types']), 'column')}, {request['raced_rows']:,} rows, "
        f"{format_bytes(request['num_bytes'])} read\n"
        f"- {repeats} repeats, alternating, after the results were compared\n"
    )
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |")


def _print(
    operation: str, request: dict[str, Any], timings: Sequence[Timing], left_out: dict[str, str]
) -> None:
    from fast_axolotl.record.units import format_seconds
    from fast_axolotl.report.terminal import show_matrix

    rows = f"{request['rows']:,} rows"
    nulls = request["rows"] - request["raced_rows"]
    notes = [f"All {rows}." if request["is_all"] else f"The first {rows}; change that with --rows."]
    notes += [f"{nulls:,} of them have no value and are not measured."] if nulls else []
    notes += [f"{item.name}: not equal: {item.reason}" for item in timings if item.reason]
    notes += [f"{name}: not measured: {reason}" for name, reason in left_out.items()]
    ours = max(item.first_call_seconds for item in timings if item.against is None)
    notes += [
        "ours ÷ theirs: ratio of throughputs, above 1 if fast-axolotl is faster, between libraries "
        "that return the same kind of result.",
        "Not included: imports, compiling or loading kernels, and a first pass over a few rows "
        f"({format_seconds(ours)} for fast-axolotl).",
    ]
    show_matrix(f"bench {operation}", *_table(operation, request, timings), notes)
