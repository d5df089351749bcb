"""``fast-axolotl bench …``: one command for each benchmark."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.cli.options import parse_names

if TYPE_CHECKING:
    from fast_axolotl.bench.matrix import Table

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Benchmarks against the peers that are installed.", no_args_is_help=True
)

_Repeats = Annotated[int, typer.Option(help="Timed repeats of every peer.", min=1)]
_PeerPython = Annotated[
    str | None,
    typer.Option(help="Python of an environment that holds the earlier package (0.2.0)."),
]
_WorkDir = Annotated[
    Path | None, typer.Option(help="Where data is generated; a temporary folder by default.")
]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result to this JSON file.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_Sizes = Annotated[
    str, typer.Option(help="Numbers of rows with commas between: 10k, 1M, or plain numbers.")
]
_SIZES = "10k,100k,1M"


def _examples(*commands: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  fast-axolotl bench {item}" for item in commands)


@bench_app.command(
    "reader",
    epilog=_examples(
        "reader --scale 0.01",
        "reader --cases messages-jsonl,messages-csv",
        "reader --peer-python other/bin/python -o benchmarks/results/2030-01-31-reader.json",
    ),
)
def bench_reader(
    cases: Annotated[
        str | None, typer.Option(help="Only these cases: names with commas between.")
    ] = None,
    repeats: _Repeats = 5,
    scale: Annotated[
        float, typer.Option(help="Shrinks the data: 0.1 is a tenth of the rows.", min=0.0001)
    ] = 1.0,
    peer_python: _PeerPython = None,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Time the reader against its peers on the same files, after checking that rows are equal."""
    from fast_axolotl.bench.matrix import matrix_rows
    from fast_axolotl.bench.reader import run_reader_bench

    _refuse_existing(output)
    result = run_reader_bench(
        cases=parse_names(cases) if cases else (),
        repeats=repeats,
        scale=scale,
        peer_python=peer_python,
        work_dir=work_dir,
        progress=_say,
    )
    _finish(result, matrix_rows(result), output, as_json)


@bench_app.command(
    "hash",
    epilog=_examples(
        "hash --sizes 100k",
        "hash --sizes 10k,100k,1M,10M --peer-python other/bin/python",
        "hash -o benchmarks/results/2030-01-31-hash.json",
    ),
)
def bench_hash(
    sizes: _Sizes = _SIZES,
    repeats: _Repeats = 5,
    peer_python: _PeerPython = None,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Time SHA-256 of many rows against the loop of hashlib, after checking the digests."""
    _bench_operation("hash", sizes, repeats, peer_python, work_dir, output, as_json)


@bench_app.command(
    "dedupe",
    epilog=_examples(
        "dedupe --sizes 100k",
        "dedupe --sizes 1M,10M --repeats 3",
        "dedupe --peer-python other/bin/python -o benchmarks/results/2030-01-31-dedupe.json",
    ),
)
def bench_dedupe(
    sizes: _Sizes = _SIZES,
    repeats: _Repeats = 5,
    peer_python: _PeerPython = None,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Time dedupe against Axolotl, Polars, DuckDB and plain Python, after checking what is kept."""
    _bench_operation("dedupe", sizes, repeats, peer_python, work_dir, output, as_json)


@bench_app.command(
    "pack",
    epilog=_examples(
        "pack --sizes 10k",
        "pack --sizes 10k,100k,1M,10M --peer-python other/bin/python",
        "pack -o benchmarks/results/2030-01-31-pack.json",
    ),
)
def bench_pack(
    sizes: _Sizes = _SIZES,
    repeats: _Repeats = 5,
    peer_python: _PeerPython = None,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Time packing, and planning packs, against plain Python, torch.tensor and Axolotl."""
    _bench_operation("pack", sizes, repeats, peer_python, work_dir, output, as_json)


@bench_app.command(
    "pad",
    epilog=_examples(
        "pad --sizes 10k",
        "pad --sizes 10k,100k,1M,10M --peer-python other/bin/python",
        "pad -o benchmarks/results/2030-01-31-pad.json",
    ),
)
def bench_pad(
    sizes: _Sizes = _SIZES,
    repeats: _Repeats = 5,
    peer_python: _PeerPython = None,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Time padding against plain Python and torch.tensor, after checking the rows."""
    _bench_operation("pad", sizes, repeats, peer_python, work_dir, output, as_json)


@bench_app.command("demo", epilog=_examples("demo", "demo --json"))
def bench_demo(work_dir: _WorkDir = None, as_json: _AsJson = False) -> None:
    """Read generated data in every format, then pack, hash and pad, beside plain Python."""
    from fast_axolotl.bench.demo import demo_tables, run_demo

    result = run_demo(work_dir, _say)
    _finish(result, demo_tables(result), None, as_json)


def _bench_operation(
    operation: str,
    sizes: str,
    repeats: int,
    peer_python: str | None,
    work_dir: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    from fast_axolotl.bench.operation_result import operation_tables
    from fast_axolotl.bench.operations import run_operation_bench
    from fast_axolotl.bench.sizes import parse_sizes

    _refuse_existing(output)
    result = run_operation_bench(
        operation,
        sizes=parse_sizes(sizes),
        repeats=repeats,
        peer_python=peer_python,
        work_dir=work_dir,
        progress=_say,
    )
    _finish(result, operation_tables(result), output, as_json)


@bench_app.command(
    "axolotl",
    epilog=_examples(
        "axolotl --cases preprocess-chat,train",
        "axolotl --cases functions --rows 2000",
        "axolotl -o benchmarks/results/2030-01-31-axolotl.json",
    ),
)
def bench_axolotl(
    cases: Annotated[
        str | None, typer.Option(help="Only these cases: names with commas between.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of every dataset.", min=1)] = 20_000,
    repeats: _Repeats = 3,
    stream_mb: Annotated[
        int, typer.Option(help="Size of the file that is streamed, in MB.", min=1)
    ] = 1200,
    functions: Annotated[
        str | None,
        typer.Option(help="Only these of the case functions: names with commas between."),
    ] = None,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Run Axolotl as it is and accelerated, after checking that the results are equal."""
    from fast_axolotl.bench.axolotl_bench import run_axolotl_bench
    from fast_axolotl.bench.axolotl_result import axolotl_tables

    _refuse_existing(output)
    result = run_axolotl_bench(
        cases=parse_names(cases) if cases else (),
        rows=rows,
        repeats=repeats,
        stream_megabytes=stream_mb,
        functions=parse_names(functions) if functions else (),
        work_dir=work_dir,
        progress=_say,
    )
    _finish(result, axolotl_tables(result), output, as_json)


@bench_app.command(
    "meter",
    epilog=_examples(
        "meter",
        "meter --hosts loop,loader",
        "meter --scenarios compute,disk,swap",
        "meter -o benchmarks/results/2030-01-31-meter.json",
    ),
)
def bench_meter(
    hosts: Annotated[
        str | None,
        typer.Option(help="Only these of loop, loader, trainer: names with commas between."),
    ] = None,
    scenarios: Annotated[
        str | None, typer.Option(help="Only these scenarios: names with commas between.")
    ] = None,
    fetches: Annotated[int, typer.Option(help="Fetches of every cell.", min=300)] = 640,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Inject waits of known size and compare what the meter reports; make machines run short."""
    from fast_axolotl.bench.meter_bench import meter_tables, run_meter_bench

    _refuse_existing(output)
    result = run_meter_bench(
        hosts=parse_names(hosts) if hosts else (),
        scenarios=parse_names(scenarios) if scenarios else (),
        fetches=fetches,
        work_dir=work_dir,
        progress=_say,
    )
    _finish(result, meter_tables(result), output, as_json)


@bench_app.command(
    "meter-gpu",
    epilog=_examples("meter-gpu", "meter-gpu -o benchmarks/results/2030-01-31-meter-gpu.json"),
)
def bench_meter_gpu(
    work_dir: _WorkDir = None, output: _Output = None, as_json: _AsJson = False
) -> None:
    """Compare the reported stall with what torch's profiler sees, on a GPU."""
    from fast_axolotl.bench.meter_gpu import gpu_meter_tables, run_gpu_meter_bench

    _refuse_existing(output)
    result = run_gpu_meter_bench(work_dir=work_dir, progress=_say)
    _finish(result, gpu_meter_tables(result), output, as_json)


@bench_app.command(
    "protocol",
    epilog=_examples("protocol", "protocol -o benchmarks/results/2030-01-31-protocol.json"),
)
def bench_protocol(
    same: Annotated[int, typer.Option(help="Protocols whose arms are equal.", min=0)] = 20,
    different: Annotated[int, typer.Option(help="Protocols with a slower arm.", min=0)] = 10,
    slower: Annotated[float, typer.Option(help="By how much it is slower.", min=0.0)] = 0.1,
    pairs: Annotated[int, typer.Option(help="Pairs of every protocol.", min=2)] = 5,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Count how often the protocol sees a change where there is none, and misses one."""
    from fast_axolotl.bench.protocol_bench import protocol_bench_tables, run_protocol_bench

    _refuse_existing(output)
    result = run_protocol_bench(
        same=same,
        different=different,
        slower=slower,
        pairs=pairs,
        work_dir=work_dir,
        progress=_say,
    )
    _finish(result, protocol_bench_tables(result), output, as_json)


@bench_app.command(
    "advice", epilog=_examples("advice", "advice -o benchmarks/results/2030-01-31-advice.json")
)
def bench_advice(
    steps: Annotated[int, typer.Option(help="Steps of every training.", min=250)] = 400,
    work_dir: _WorkDir = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Train the real Axolotl on a stream that is too slow, and do what the meter advises."""
    from fast_axolotl.bench.advice import advice_tables, run_advice_bench

    _refuse_existing(output)
    result = run_advice_bench(steps=steps, work_dir=work_dir, progress=_say)
    _finish(result, advice_tables(result), output, as_json)


def _refuse_existing(output: Path | None) -> None:
    """Before the minutes that a benchmark takes, rather than after."""
    from fast_axolotl.bench.matrix import require_new

    if output is not None:
        require_new(output)


def _finish(result: Any, tables: Sequence[Table], output: Path | None, as_json: bool) -> None:
    from fast_axolotl.report.terminal import show_matrix

    if output is not None:
        result.save(output)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    for table in tables:
        show_matrix(table.title, table.header, table.rows, table.notes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
