"""``fast-axolotl bench …``: how this package fares on the user's own files, in this environment."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.cli.options import Inputs, ResultAsJson, examples
from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.cli.race import RaceResult, Timing

bench_app = typer.Typer(
    help="Compare this package with other installed libraries on your own files.",
    no_args_is_help=True,
)

_Repeats = Annotated[int, typer.Option(help="Timed repeats per library.", min=1)]
_Rows = Annotated[int, typer.Option(help="Use at most this many rows, from the start.", min=1)]
_Share = Annotated[
    bool, typer.Option("--share", help="Print Markdown to share, without paths, names or values.")
]
_Tokens = Annotated[str, typer.Option("--column", help="The column with the token ids.")]

_READS = {"reader": 200_000, "hash": 100_000, "dedupe": 100_000, "pack": 20_000, "pad": 20_000}
_DOES = {"reader": "reads", "hash": "hashes", "dedupe": "dedupes", "pack": "packs", "pad": "pads"}


@bench_app.command(
    "reader",
    epilog=examples("bench reader data.jsonl", "bench reader 'shards/*.parquet' --rows 1000000"),
)
def bench_reader(
    paths: Inputs,
    rows: _Rows = _READS["reader"],
    repeats: _Repeats = 5,
    as_json: ResultAsJson = False,
    share: _Share = False,
) -> None:
    """Compare reading speed with HF datasets, pyarrow and plain Python."""
    _bench("reader", paths, None, rows, repeats, as_json, share)


@bench_app.command("hash", epilog=examples("bench hash data.jsonl --column text"))
def bench_hash(
    paths: Inputs,
    column: Annotated[str, typer.Option(help="The column of texts to hash.")],
    rows: _Rows = _READS["hash"],
    repeats: _Repeats = 5,
    as_json: ResultAsJson = False,
    share: _Share = False,
) -> None:
    """Compare SHA-256 hashing of a text column with a loop over hashlib."""
    _bench("hash", paths, [column], rows, repeats, as_json, share)


@bench_app.command(
    "dedupe",
    epilog=examples(
        "bench dedupe data.parquet", "bench dedupe data.jsonl --column prompt --column answer"
    ),
)
def bench_dedupe(
    paths: Inputs,
    column: Annotated[
        list[str] | None, typer.Option(help="Compare only this column. Repeatable.")
    ] = None,
    rows: _Rows = _READS["dedupe"],
    repeats: _Repeats = 5,
    as_json: ResultAsJson = False,
    share: _Share = False,
) -> None:
    """Compare exact deduplication with a Python set, pandas, pyarrow and Axolotl."""
    _bench("dedupe", paths, column or None, rows, repeats, as_json, share)


@bench_app.command("pack", epilog=examples("bench pack tokens.parquet --sequence-len 4096"))
def bench_pack(
    paths: Inputs,
    column: _Tokens = "input_ids",
    sequence_len: Annotated[int, typer.Option(help="Tokens per pack.", min=1)] = 2048,
    rows: _Rows = _READS["pack"],
    repeats: _Repeats = 5,
    as_json: ResultAsJson = False,
    share: _Share = False,
) -> None:
    """Compare sequence packing with plain Python and Axolotl."""
    _bench("pack", paths, [column], rows, repeats, as_json, share, sequence_len)


@bench_app.command(
    "pad", epilog=examples("bench pad tokens.parquet", "bench pad data.arrow --column ids")
)
def bench_pad(
    paths: Inputs,
    column: _Tokens = "input_ids",
    rows: _Rows = _READS["pad"],
    repeats: _Repeats = 5,
    as_json: ResultAsJson = False,
    share: _Share = False,
) -> None:
    """Compare padding of batches of 64 rows with plain Python and torch."""
    _bench("pad", paths, [column], rows, repeats, as_json, share)


def _bench(
    operation: str,
    paths: Sequence[str],
    columns: list[str] | None,
    most_rows: int,
    repeats: int,
    as_json: bool,
    share: bool,
    sequence_len: int | None = None,
) -> None:
    from fast_axolotl.cli.contenders import CONTENDERS
    from fast_axolotl.cli.race import run_race

    request = _look(operation, paths, columns, most_rows)
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-bench-") as folder:
        result = run_race(
            CONTENDERS[operation],
            {**request, "sequence_len": sequence_len, "folder": folder},
            Path(folder),
            repeats=repeats,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if share:
        print(_shared(operation, request, result, repeats))
        return
    sentences = _sentences(operation, request, result)
    if as_json:
        measured = {name: request[name] for name in ("files", "num_bytes", "columns")}
        measured["rows"] = request["raced_rows"]
        found = {"operation": operation, "repeats": repeats, **measured, "answer": sentences}
        print(json.dumps({**found, **asdict(result)}, indent=2, ensure_ascii=False))
        return
    for sentence in sentences:
        print(sentence)
    _print(operation, request, result)


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
        total_bytes = reader.num_bytes
        files = [file.source.path for file in reader.files]
        formats = {file.format for file in reader.files}
        read_bytes = reader.stats.num_bytes
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
        "num_bytes": read_bytes,
        "total_bytes": total_bytes,
    }


def _sentences(operation: str, request: dict[str, Any], result: RaceResult) -> list[str]:
    """The answer first: against the first peer that is equal, then wherever we are not faster."""
    compared = [timing for timing in result.timings if timing.ratio is not None]
    if not compared:
        return ["No other library gave the same result here, so there is nothing to compare with."]
    files = "this file" if len(request["files"]) == 1 else f"these {len(request['files'])} files"
    does, won, other = _DOES[operation], [], []
    for timing in compared:
        assert timing.ratio is not None
        ratio, low, high = map(_figure, timing.ratio)
        if timing.ratio[1] > 1:
            won.append(
                f"fast-axolotl {does} {files} {ratio}× as fast as {timing.name} ({low}–{high}×)."
            )
        elif timing.ratio[2] < 1:
            other.append(
                f"fast-axolotl is slower than {timing.name} here: {ratio}× as fast ({low}–{high}×)."
            )
        else:
            other.append(f"No clear difference from {timing.name}: {ratio}× ({low}–{high}×).")
    return [*won[:1], *other]


def _figure(ratio: float) -> str:
    digits = 2 if ratio < 1 else 1 if ratio < 10 else 0
    return f"{ratio:,.{digits}f}"


def _shared(operation: str, request: dict[str, Any], result: RaceResult, repeats: int) -> str:
    """The result as Markdown that says nothing about whose it is.

    Paths, file, column, user and host names, values, and the kernel's release stay out; so do
    reasons, which may quote them.
    """
    from fast_axolotl.cli.contenders import CONTENDERS
    from fast_axolotl.record.units import count_words, format_bytes, format_seconds
    from fast_axolotl.system import describe

    machine = describe()
    memory = min(machine["memory_bytes"], machine.get("limit_bytes", machine["memory_bytes"]))
    needed = ("fast-axolotl", "numpy", "numba", "pyarrow", "datasets", "torch", "axolotl")
    versions = [
        f"{name} {machine['versions'][name]}" for name in needed if name in machine["versions"]
    ]
    rows = []
    for item in result.timings:
        cells = ["–", "–", "–", "–" if item.against is None else "not equal"]
        if item.reason is None:
            spread = f"{format_seconds(min(item.seconds))} – {format_seconds(max(item.seconds))}"
            cells[:3] = [
                format_seconds(median(item.seconds)),
                spread,
                format_bytes(item.peak_bytes),
            ]
        if item.ratio is not None:
            cells[3] = "{}× ({}–{})".format(*map(_figure, item.ratio))
        rows.append((item.name, item.gives, *cells))
    known = [entry.name for entry in CONTENDERS[operation] if entry.name in result.left_out]
    header = ("", "gives", "median", "min – max", "peak memory", "ours ÷ theirs")
    table = [header, ("---",) * len(header), *rows]
    return "\n".join(
        [
            f"### fast-axolotl bench {operation}",
            "",
            f"- Machine: {machine.get('cpu', 'unknown processor')}, {machine['cores']} cores, "
            f"{format_bytes(memory)} of memory, {sys.platform}",
            f"- Versions: Python {machine['python']}, {', '.join(versions)}",
            f"- Data: {request['format']}, {count_words(len(request['files']), 'file')}, "
            f"{count_words(len(request['types']), 'column')}, {request['raced_rows']:,} rows, "
            f"{format_bytes(request['num_bytes'])} read",
            f"- {repeats} repeats, alternating, after the results were compared",
            *([f"- Not timed: {', '.join(known)}"] if known else []),
            "",
            *(f"| {' | '.join(row)} |" for row in table),
        ]
    )


def _print(operation: str, request: dict[str, Any], result: RaceResult) -> None:
    from fast_axolotl.record.units import format_bytes, format_seconds
    from fast_axolotl.report.terminal import show_matrix

    is_reader = operation == "reader"

    def cells(timing: Timing) -> tuple[str, ...]:
        if timing.reason is not None:
            blank = ("–",) * (5 if is_reader else 3)
            return (timing.name, timing.gives, *blank, format_bytes(timing.peak_bytes), "not equal")
        seconds = median(timing.seconds)
        reads = (
            f"{request['num_bytes'] / seconds / 1e6:,.0f}",
            format_seconds(median(timing.first_seconds)) if timing.first_seconds else "–",
        )
        ratio = timing.ratio
        return (
            timing.name,
            timing.gives,
            format_seconds(seconds),
            f"{format_seconds(min(timing.seconds))} – {format_seconds(max(timing.seconds))}",
            f"{request['raced_rows'] / seconds:,.0f}",
            *(reads if is_reader else ()),
            format_bytes(timing.peak_bytes),
            "–" if ratio is None else "{}× ({}–{})".format(*map(_figure, ratio)),
        )

    reads = ("MB/s", "first batch") if is_reader else ()
    header = (
        "",
        "returns",
        "median",
        "min – max",
        "rows/s",
        *reads,
        "peak memory",
        "ours ÷ theirs",
    )
    rows = f"{request['rows']:,} rows"
    nulls = request["rows"] - request["raced_rows"]
    notes = [f"All {rows}." if request["is_all"] else f"The first {rows}; change that with --rows."]
    notes += [f"{nulls:,} of them have no value and are not measured."] if nulls else []
    notes += [f"{item.name}: not equal: {item.reason}" for item in result.timings if item.reason]
    notes += [f"{name}: not measured: {reason}" for name, reason in result.left_out.items()]
    ours = max(item.first_call_seconds for item in result.timings if item.against is None)
    notes += [
        "ours ÷ theirs: ratio of throughputs, above 1 if fast-axolotl is faster, between libraries "
        "that return the same kind of result. Results are compared first; then repeats alternate.",
        "Each library runs in its own process. Peak memory is that of one pass, above what the "
        "process used before.",
        "Not included: imports, compiling or loading kernels, and a first pass over a few rows "
        f"({format_seconds(ours)} for fast-axolotl).",
    ]
    show_matrix(f"bench {operation}", header, [cells(item) for item in result.timings], notes)
