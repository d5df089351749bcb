"""``fast-axolotl bench …``: one command for each benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fast_axolotl.cli.parsing import parse_names

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Benchmarks against the peers that are installed.", no_args_is_help=True
)


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
        cases=parse_names(cases) if cases else (),
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
