"""The command line: parse, one call, print.

Errors that the package raises on purpose become one line on stderr: exit code 1 for the data, 2 for
the way the command was called. Everything heavy is imported inside the commands, so that ``--help``
is quick.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fast_axolotl import __version__
from fast_axolotl.errors import FastAxolotlError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.bench.tally import ReadTally
    from fast_axolotl.reading import Reader

__all__ = ["app", "main"]

app = typer.Typer(
    name="fast-axolotl",
    help="Measure a fine-tune honestly, accelerate its data path, prove the difference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench_app = typer.Typer(
    help="Benchmarks against the peers that are installed.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}


def main() -> None:
    """The console script."""
    warnings.showwarning = _show_warning
    try:
        app(standalone_mode=False)
    except FastAxolotlError as error:
        code = 2 if isinstance(error, UsageError) else 1
        sys.exit(_fail(str(error), code))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_fail("interrupted", 130))
    except Exception as error:
        _exit_on_usage_error(error)
        raise


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fast-axolotl {__version__}")
        raise typer.Exit


@app.command(
    epilog="Examples:\n\n  fast-axolotl read train.jsonl.zst\n\n"
    "  fast-axolotl read data/ --split train --columns messages --head 3\n\n"
    "  fast-axolotl read 's3://bucket/*.parquet' --shard 0/8 --json"
)
def read(
    paths: Annotated[
        list[str], typer.Argument(help="Files, folders, globs or URIs, read in this order.")
    ],
    columns: Annotated[
        str | None, typer.Option(help="Only these columns: names with commas between.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in a batch.")] = 1000,
    shard: Annotated[
        str | None, typer.Option(help="Only one share of the rows: 0/8 is the first of eight.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Print so many rows as JSON lines and stop.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    format: Annotated[str, typer.Option(help="auto, or a format's name.")] = "auto",
    split: Annotated[
        str | None, typer.Option(help="The split of a folder that has several; all for all.")
    ] = None,
    shuffle: Annotated[int | None, typer.Option(help="Shuffle with this seed.", min=0)] = None,
    on_error: Annotated[
        Literal["raise", "skip"], typer.Option(help="What to do with rows that cannot be read.")
    ] = "raise",
    on_conflict: Annotated[
        Literal["raise", "json"],
        typer.Option(help="What to do with a column of clashing types: stop, or JSON text."),
    ] = "raise",
    infer: Annotated[
        Literal["auto", "scan"],
        typer.Option(help="scan reads JSON and CSV twice, to know the final types at once."),
    ] = "auto",
    json_field: Annotated[
        str | None, typer.Option(help="The field of a JSON document that holds the rows.")
    ] = None,
    num_threads: Annotated[
        int, typer.Option(help="Decode threads; 0 takes what this process may use.")
    ] = 0,
    memory_budget: Annotated[
        str, typer.Option(help="What reading ahead may hold, such as 256MiB.")
    ] = "256MiB",
) -> None:
    """Read a dataset through and report rows/s, MB/s, working set and rejected rows."""
    from fast_axolotl.reading import open_dataset

    start = time.perf_counter()
    reader = open_dataset(
        list(paths),
        format=format,
        columns=None if columns is None else _names(columns),
        batch_size=batch_size,
        num_threads=num_threads,
        memory_budget=_parse_size(memory_budget),
        shard=None if shard is None else _parse_shard(shard),
        shuffle=shuffle,
        on_error=on_error,
        on_conflict=on_conflict,
        infer=infer,
        split=split,
        json_field=json_field,
    )
    summary, rows = _read_with_progress(reader, head, start)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False, default=str))
    if as_json:
        print(json.dumps(summary.to_json(), ensure_ascii=False, indent=None if rows else 2))
    elif head is None:
        _print_tally(summary)


@bench_app.command("reader")
def bench_reader(
    cases: Annotated[
        str | None, typer.Option(help="Only these cases: names with commas between.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats of every peer.", min=1)] = 5,
    scale: Annotated[
        float, typer.Option(help="Shrinks the data: 0.1 is a tenth of the rows.", min=0.0001)
    ] = 1.0,
    peer_python: Annotated[
        str | None,
        typer.Option(help="Python of an environment that holds the earlier package (0.2.0)."),
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="Where data is generated; a temporary folder by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result to this JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Time the reader against its peers on the same files, after checking that rows are equal."""
    from fast_axolotl.bench.reader import run_reader_bench

    result = run_reader_bench(
        cases=_names(cases) if cases else (),
        repeats=repeats,
        scale=scale,
        peer_python=peer_python,
        work_dir=work_dir,
        progress=_say,
    )
    _finish_bench(result, output, as_json)


@bench_app.command("demo")
def bench_demo(
    work_dir: Annotated[
        Path | None, typer.Option(help="Where data is generated; a temporary folder by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read generated data in every format, beside plain Python and pyarrow: make demo."""
    from fast_axolotl.bench.demo import run_demo

    _finish_bench(run_demo(work_dir, _say), None, as_json)


def _parse_size(text: str) -> int:
    """``256MiB``, ``1.5 GB`` or a plain number of bytes."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"cannot read {text!r} as a size; write 256MiB or 1GB") from None


def _parse_shard(text: str) -> tuple[int, int]:
    """``0/8`` as (0, 8)."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise UsageError(f"cannot read {text!r} as a shard; write 0/8 for the first of 8") from None
    return index, count


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _read_with_progress(
    reader: Reader, head: int | None, start: float
) -> tuple[ReadTally, list[dict[str, Any]]]:
    from fast_axolotl.bench.tally import tally
    from fast_axolotl.report.terminal import reading_progress

    with reading_progress(reader.num_bytes) as progress:
        return tally(reader, head=head, progress=progress, start=start)


def _print_tally(summary: ReadTally) -> None:
    from fast_axolotl.report.terminal import format_bytes, format_seconds, show_pairs

    rejected = f"{summary.rejected_rows:,}"
    rejected += "".join(
        f"\n{item['path']}, {item['place']}: {item['reason']}" for item in summary.rejections[:20]
    )
    if len(summary.rejections) > 20:
        rejected += f"\n… {len(summary.rejections) - 20} more; --json lists them"
    pairs = [
        (
            "rows",
            f"{summary.rows:,} in {summary.batches:,} batches from {_count(summary.files, 'file')}",
        ),
        (
            "time",
            f"{format_seconds(summary.seconds)}, first batch after "
            f"{format_seconds(summary.first_batch_seconds)}",
        ),
        ("rows/s", f"{summary.rows_per_second or 0:,.0f}"),
        ("bytes/s", f"{format_bytes(summary.bytes_per_second)} encoded"),
        (
            "working set",
            format_bytes(summary.working_set_bytes)
            if summary.working_set_reason is None
            else f"– ({summary.working_set_reason})",
        ),
        ("rejected rows", rejected),
        ("columns", "\n".join(f"{name}: {kind}" for name, kind in summary.columns.items())),
    ]
    show_pairs("", pairs)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _finish_bench(result: Any, output: Path | None, as_json: bool) -> None:
    from fast_axolotl.bench.matrix import matrix_rows
    from fast_axolotl.report.terminal import show_matrix

    if output is not None:
        result.save(output)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    for table in matrix_rows(result):
        show_matrix(table.title, table.header, table.rows, table.notes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> int:
    print(f"fast-axolotl: {' '.join(message.split())}", file=sys.stderr)
    return code


def _exit_on_usage_error(error: Exception) -> None:
    """typer's own complaints about flags and arguments."""
    show, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if show is not None and code is not None:
        message = show().rstrip(".")
        sys.exit(_fail(f"{message}; see --help", 2) if message else 2)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    print(f"fast-axolotl: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
