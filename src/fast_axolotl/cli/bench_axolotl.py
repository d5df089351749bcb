"""``fast-axolotl bench axolotl``: the real Axolotl, stock and accelerated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fast_axolotl.cli.parsing import parse_names

__all__ = ["BENCH_AXOLOTL_EXAMPLES", "bench_axolotl"]

BENCH_AXOLOTL_EXAMPLES = "\n\n".join(
    [
        "Examples:",
        "  fast-axolotl bench axolotl --cases preprocess-chat,train",
        "  fast-axolotl bench axolotl --cases functions --rows 2000",
        "  fast-axolotl bench axolotl -o benchmarks/results/2030-01-31-axolotl.json",
    ]
)


def bench_axolotl(
    cases: Annotated[
        str | None, typer.Option(help="Only these cases: names with commas between.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of every dataset.", min=1)] = 20_000,
    repeats: Annotated[
        int, typer.Option(help="Timed runs of each, stock and accelerated.", min=1)
    ] = 3,
    stream_mb: Annotated[
        int, typer.Option(help="Size of the file that is streamed, in MB.", min=1)
    ] = 1200,
    functions: Annotated[
        str | None,
        typer.Option(help="Only these of the case functions: names with commas between."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Where data is generated; a temporary folder by default."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result to this JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run Axolotl as it is and accelerated, after checking that the results are equal."""
    from fast_axolotl.bench.axolotl_bench import run_axolotl_bench
    from fast_axolotl.bench.axolotl_result import axolotl_tables
    from fast_axolotl.bench.matrix import require_new
    from fast_axolotl.report.terminal import show_matrix

    if output is not None:
        require_new(output)
    result = run_axolotl_bench(
        cases=parse_names(cases) if cases else (),
        rows=rows,
        repeats=repeats,
        stream_megabytes=stream_mb,
        functions=parse_names(functions) if functions else (),
        work_dir=work_dir,
        progress=_say,
    )
    if output is not None:
        result.save(output)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    for table in axolotl_tables(result):
        show_matrix(table.title, table.header, table.rows, table.notes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
