"""Our reader and its peers on the same files: ``make bench-reader``.

Three kinds of cases. In a timed one everybody reads the same file, and gives the same rows first:
the contenders of ``fast-axolotl bench reader``, Polars, DuckDB and the earlier package. In a memory
case each pass over a large file is a fresh process, which imports, notes its memory,
reads once and reports; "cold" means the process, since the file has just been written and is in the
page cache: ``python -m benchmarks.reader --child READER FORMAT FILE``. The case ``start`` takes the
time from the first call in a fresh process to the first batch of a small file, imports included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.children import RunError, module_environment, run_child
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.corpus import (
    COMPRESSIONS,
    MESSAGE_ROWS,
    SAMPLE_ROWS,
    write_inputs,
    write_large_jsonl,
    write_large_parquet,
    write_sample,
)
from benchmarks.race import Session, add_race_options, open_session, run_case
from benchmarks.result import MEGABYTE, Case, Goal, Measurement, Result
from fast_axolotl.cli.bench import BATCH_ROWS, OURS, OURS_PYTHON, Request, read
from fast_axolotl.cli.race import Contender, columns, digest
from fast_axolotl.errors import UsageError
from fast_axolotl.reading import open_dataset
from fast_axolotl.system import peak_memory_bytes

NOTES = (
    "rows are compared with ours before anything is timed: a digest over canonical JSON",
    "one warm-up pass each, then alternating repeats, each the mean of as many passes as take "
    "0.2 s; ratios are of medians, in rows per second",
    "the page cache is warm: files have just been written and read",
    "batches of 1000 rows; opening the file is timed",
    "a memory case is a fresh process: the highest resident memory, above that after imports",
)

_POLARS_SCANS = {
    "parquet": "scan_parquet",
    "jsonl": "scan_ndjson",
    "csv": "scan_csv",
    "arrow": "scan_ipc",
    "text": "scan_lines",
}
_DUCKDB_READS = {
    "parquet": "read_parquet",
    "jsonl": "read_json",
    "csv": "read_csv",
    "text": "read_csv",
}
_DUCKDB_LINES = {
    "sep": "\x01",
    "quotechar": "",
    "escapechar": "",
    "header": False,
    "names": ["text"],
    "dtype": ["VARCHAR"],
}


def readers(request: Request) -> list[Contender]:
    """Also Polars and DuckDB, for speed and in bounded memory as their documentation says."""
    form, path = request["format"], request["paths"][0]

    def polars() -> Iterator[Any]:
        if form not in _POLARS_SCANS:
            raise NotImplementedError(f"it does not stream {form} files")
        package = importlib.import_module("polars")
        settings = {"name": "text"} if form == "text" else {}
        scan = getattr(package, _POLARS_SCANS[form])(path, **settings)
        for frame in scan.collect_batches(chunk_size=BATCH_ROWS):
            yield from frame.to_arrow(compat_level=package.CompatLevel.oldest()).to_batches()

    def duckdb() -> Iterator[Any]:
        if form not in _DUCKDB_READS:
            raise NotImplementedError(f"it does not stream {form} files")
        settings = _DUCKDB_LINES if form == "text" else {}
        connection = importlib.import_module("duckdb").connect()
        found = getattr(connection, _DUCKDB_READS[form])(path, **settings)
        return iter(found.to_arrow_reader(BATCH_ROWS))

    def answer(batches: Iterator[Any]) -> str:
        return digest(columns(batches, "arrow"))

    return [
        *read(request),
        Contender("Polars", "Arrow batches", polars, OURS, "polars", answer),
        Contender("DuckDB", "Arrow batches", duckdb, OURS, "duckdb", answer),
    ]


_RARE = ("lz4", "bz2", "xz")
TIMED = {
    "sample-parquet": ("sample.parquet", "parquet"),
    "messages-parquet": ("messages.parquet", "parquet"),
    "messages-parquet-one-group": ("messages-one-group.parquet", "parquet"),
    "messages-jsonl": ("messages.jsonl", "jsonl"),
    "messages-csv": ("messages.csv", "csv"),
    "messages-arrow": ("messages.arrow", "arrow"),
    "messages-arrow-stream": ("messages-stream.arrows", "arrow-stream"),
    "messages-text": ("messages.txt", "text"),
    "messages-jsonl-zst": ("messages.jsonl.zst", "jsonl"),
    "messages-jsonl-gz": ("messages.jsonl.gz", "jsonl"),
    "messages-parquet-zstd": ("messages-zstd.parquet", "parquet"),
    "messages-feather": ("messages.feather", "arrow"),
    **{
        f"messages-{form}-{suffix}": (f"messages.{ending}.{suffix}", form)
        for form, ending in (("csv", "csv"), ("text", "txt"))
        for suffix in ("zst", "gz")
    },
    **{f"messages-jsonl-{suffix}": (f"messages.jsonl.{suffix}", "jsonl") for suffix in _RARE},
}
"""Case to its file in the corpus, and what the peers know its format as."""

_GIGABYTE = 1_000_000_000
MEMORY: dict[str, dict[str, int]] = {
    "memory-jsonl": {"JSON lines, small": _GIGABYTE // 2, "JSON lines": 2 * _GIGABYTE},
    "memory-parquet": {"Parquet": 2 * _GIGABYTE},
    "memory-parquet-one-group": {"Parquet, one row group": _GIGABYTE},
}
"""Case to its files and their bytes, the largest last."""

START = "start"
CASES = (*TIMED, *MEMORY, START)
_LEAST_BYTES = 100_000
_MOST_MEMORY_REPEATS = 3
_CHILD_SECONDS = 300
_START_ROWS = 2000
_START_PROCESSES = 7
_START_PROGRAM = """
import sys, time
import fast_axolotl
called = time.perf_counter()
assert next(iter(fast_axolotl.open_dataset(sys.argv[1]))).num_rows
print(time.perf_counter() - called)
"""
"""``import fast_axolotl`` loads neither numpy nor pyarrow: the call does."""
_MOST_START_SECONDS = 0.25
_CHILD_MODULES = ("pyarrow.csv", "pyarrow.json", "pyarrow.parquet", "fast_axolotl.reading")
"""Every reader starts with the same modules at hand."""

_MOST_FIRST_BATCH_SECONDS = 0.5
_MOST_GROWTH_PERCENT = 15.0
_MOST_MEMORY_MEGABYTES = (256 * 1024**2 + 100_000_000) / MEGABYTE
"""The default ``memory_budget`` and 100 MB."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("reader", __doc__)
    parser.add_argument("--cases", type=names, default=[], help=f"of {', '.join(CASES)}")
    parser.add_argument("--scale", type=float, default=1.0, help="0.1 is a tenth of the rows")
    add_race_options(parser)
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every input is written before anything is timed, so that the objects behind it are gone."""
    chosen = check_names("case", options.cases, CASES)
    if not 0 < options.scale <= 1:
        raise UsageError("scale must be in (0, 1]")
    timed = [name for name in chosen if name in TIMED]
    cases = []
    with open_session(options, folder, tell) as session:
        tell(f"writing {len(timed)} inputs")
        files = [TIMED[name][0] for name in timed if name != "sample-parquet"]
        paths = write_inputs(folder, files, max(100, round(MESSAGE_ROWS * options.scale)))
        if "sample-parquet" in timed:
            rows = max(100, round(SAMPLE_ROWS * options.scale))
            paths["sample.parquet"] = write_sample(folder / "sample.parquet", rows)
        for name in timed:
            file, file_format = TIMED[name]
            cases.append(_timed_case(name, paths[file], file_format, session))
            paths[file].unlink()
        cases += [_memory_case(name, session, options.scale) for name in chosen if name in MEMORY]
        cases += [_start_case(session) for name in chosen if name == START]
        return Result(cases=cases, notes=NOTES, versions=session.versions)


def _timed_case(name: str, path: Path, file_format: str, session: Session) -> Case:
    with open_dataset(path) as reader:
        rows = sum(map(len, reader))
        types = {field.name: str(field.type) for field in reader.schema}
    # Compression it detects only by itself.
    own = "" if path.suffix in COMPRESSIONS else file_format.removesuffix("-stream")
    request = _request(path, file_format, rows, types)
    earlier = session.earlier(
        request, "streaming_dataset_reader", "dicts of lists", OURS_PYTHON, dataset_type=own
    )
    size = path.stat().st_size
    text = f"{path.name}, {size / MEGABYTE:,.1f} MB"
    contenders = [*readers(request), earlier]
    return run_case(session, name, text, contenders, rows=rows, num_bytes=size)


def _request(path: Path, file_format: str, rows: int, types: Mapping[str, str]) -> dict[str, Any]:
    file_format = file_format.removesuffix("-stream")
    files = [str(path)]
    return {"paths": files, "files": files, "format": file_format, "rows": rows, "types": types}


def _memory_case(name: str, session: Session, scale: float) -> Case:
    """Each file read by ours, some times, and by each Arrow peer once."""
    measurements, goals, peaks = [], [], []
    left_out: dict[str, str] = {}
    rows = num_bytes = 0
    for label, size in MEMORY[name].items():
        file_format = "jsonl" if "jsonl" in name else "parquet"
        path = session.folder / f"large.{file_format}"
        session.tell(f"{name}: writing {label}")
        scaled = max(_LEAST_BYTES, round(size * scale))
        if file_format == "jsonl":
            rows = write_large_jsonl(path, scaled)
        else:
            rows = write_large_parquet(path, scaled, one_group="one-group" in name)
        num_bytes = path.stat().st_size
        queue = [OURS] * min(session.repeats, _MOST_MEMORY_REPEATS)
        request = _request(path, file_format, rows, {})
        queue += [one.name for one in readers(request) if one.against == OURS]
        ours: list[dict[str, float]] = []
        for reader in queue:
            session.tell(f"{name}: {reader} reads {label}")
            arguments = ("--child", reader, file_format, str(path))
            try:
                printed = run_child("benchmarks.reader", *arguments, timeout=_CHILD_SECONDS)
            except RunError as error:
                left_out[reader] = str(error)
                continue
            figures = json.loads(printed)
            seconds = (figures.pop("seconds"),)
            text = f"{reader}: {label}, {num_bytes / MEGABYTE:,.0f} MB"
            measurements.append(Measurement(name=text, seconds=seconds, values=figures))
            if reader == OURS:
                ours.append(figures)
        path.unlink()
        if ours:
            peaks.append(max(run["peak_above_bytes"] or 0 for run in ours) / MEGABYTE)
            first = median(run["first_batch_seconds"] for run in ours)
            text = f"memory above the start, {label}"
            goals.append(Goal(text, _MOST_MEMORY_MEGABYTES, "MB", peaks[-1]))
            goals.append(Goal(f"first batch, {label}", _MOST_FIRST_BATCH_SECONDS, "s", first))
    if len(peaks) > 1:
        growth = 100 * abs(peaks[-1] - peaks[0]) / peaks[0]
        goals.append(Goal("memory, large file against small", _MOST_GROWTH_PERCENT, "%", growth))
    return Case(
        name=name,
        text="memory and first batch in a fresh process",
        rows=rows,
        num_bytes=num_bytes,
        measurements=measurements,
        goals=goals,
        left_out=left_out,
    )


def _start_case(session: Session) -> Case:
    """Fresh processes one after another; an extra one before them writes the bytecode."""
    path = write_sample(session.folder / "small.parquet", _START_ROWS)
    seconds = []
    for number in range(_START_PROCESSES + 1):
        session.tell(f"{START}: process {number} of {_START_PROCESSES}")
        done = subprocess.run(
            [sys.executable, "-c", _START_PROGRAM, str(path)],
            capture_output=True,
            text=True,
            check=True,
            env=module_environment(PYTHONPYCACHEPREFIX=str(session.folder / "bytecode")),
        )
        seconds.append(float(done.stdout))
    text = "first batch of a small Parquet file, imports included"
    return Case(
        name=START,
        text=text,
        rows=_START_ROWS,
        num_bytes=path.stat().st_size,
        measurements=[
            Measurement(
                name=OURS,
                seconds=tuple(seconds[1:]),
                values={"least_seconds": min(seconds[1:])},
            )
        ],
        goals=[Goal(text, _MOST_START_SECONDS, "s", median(seconds[1:]))],
    )


def child(reader: str, file_format: str, path: str) -> None:
    """Imports, then reads once, then prints what that cost in time and memory."""
    start = time.perf_counter()
    for name in _CHILD_MODULES:
        importlib.import_module(name)
    request = _request(Path(path), file_format, sys.maxsize, {})
    contender = next(one for one in readers(request) if one.name == reader)
    if contender.package is not None:
        importlib.import_module(contender.package)
    imported = time.perf_counter() - start
    before = peak_memory_bytes() or 0
    called = time.perf_counter()
    batches = contender.run()
    rows = next(batches).num_rows
    first = time.perf_counter() - called
    rows += sum(batch.num_rows for batch in batches)
    seconds = time.perf_counter() - called
    figures = {
        "rows": rows,
        "seconds": seconds,
        "first_batch_seconds": first,
        "with_imports_first_batch_seconds": imported + first,
        "peak_above_bytes": (peak_memory_bytes() or 0) - before,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
