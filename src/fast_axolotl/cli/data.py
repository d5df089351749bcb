"""``fast-axolotl read``, ``dedupe``, ``prepare`` and ``warmup``: work on a dataset.

A job of many tasks shows how far it is: in a terminal a bar for its stage; elsewhere a line when a
stage begins, every 30 s, and when it ends.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Exit, Option

from fast_axolotl.cli.options import (
    AsJson,
    Columns,
    Inputs,
    parse_names,
    parse_size,
    print_result,
    say,
    summary_document,
)
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record.units import format_duration, format_seconds
from fast_axolotl.report.document import Document, Table

if TYPE_CHECKING:
    from fast_axolotl.cluster.job import JobSummary, Stage

Format = Annotated[str, Option(help="auto, or parquet, arrow, feather, csv, json, jsonl or text.")]
Split = Annotated[str | None, Option(help="Which split to read; all reads every split.")]
OnError = Annotated[
    Literal["raise", "skip"],
    Option(help="Stop at a row that cannot be read, or skip and count it."),
]
Address = Annotated[str | None, Option(help="HOST:PORT of Ray. Default: that of this node.")]
Workers = Annotated[int, Option(help="Tasks that run at the same time; 0 uses every core.", min=0)]
WorkerMemory = Annotated[str, Option(help="Memory limit of one worker process.")]
Work = Annotated[
    str | None,
    Option(help="Folder that all nodes reach, for intermediate files. Default: OUTPUT.work."),
]
Restart = Annotated[bool, Option("--restart", help="Delete what an interrupted run left.")]

_LINE_SECONDS = 30.0


def read(
    paths: Inputs,
    columns: Columns = None,
    head: Annotated[int | None, Option(help="Print only N rows, as JSON lines.", min=1)] = None,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    infer: Annotated[
        Literal["auto", "scan"], Option(help="scan reads JSON and CSV twice, to know all types.")
    ] = "auto",
) -> None:
    """Read a dataset once and report rows/s, MB/s, memory and the rows that could not be read.

    With --head, print the first rows instead. Formats: Parquet, Arrow, Feather, JSON, JSON lines,
    CSV and text, also compressed with gzip, zstd and others, from disk or from S3 and other stores.
    """
    from fast_axolotl.reading import convert, open_dataset
    from fast_axolotl.report.terminal import phase_progress
    from fast_axolotl.system import peak_memory_bytes

    start = time.perf_counter()
    reader = open_dataset(
        list(paths),
        format=format,
        columns=None if columns is None else parse_names(columns),
        on_error=on_error,
        infer=infer,
        split=split,
    )
    shown: list[str] = []
    total = reader.num_bytes
    first: float | None = None
    with reader, phase_progress() as update:
        for batch in reader:
            first = time.perf_counter() - start if first is None else first
            if head is not None:
                values = convert(batch.slice(0, head - len(shown)), "python")
                for row in zip(*values.values(), strict=True):
                    named = dict(zip(values, row, strict=True))
                    shown.append(json.dumps(named, ensure_ascii=False, default=str))
                if len(shown) >= head:
                    break
            update("reading", reader.stats.num_bytes, total, reader.stats.rows)
        seconds = time.perf_counter() - start
    # After the bar has gone: it takes stdout over while it is drawn.
    for line in shown:
        print(line)
    stats = reader.stats
    found = {
        "rows": stats.rows,
        "batches": stats.batches,
        "files": len(reader.files),
        "num_bytes": stats.num_bytes,
        "seconds": seconds,
        "first_batch_seconds": first,
        "rows_per_second": stats.rows / seconds if seconds else 0.0,
        "bytes_per_second": stats.num_bytes / seconds if seconds else 0.0,
        "peak_memory_bytes": peak_memory_bytes(),
        "rejected_rows": stats.rejected_rows,
        "rejections": [asdict(item) for item in stats.rejections],
        "ignored_files": list(stats.ignored_files),
        "columns": {field.name: str(field.type) for field in reader.schema},
    }
    if as_json or head is None:
        print_result(found, summary_document(found), as_json=as_json)
    if stats.rejections and not stats.rows:
        say("no row could be read")
        raise Exit(1)


def warmup() -> None:
    """Compile all numba kernels now and cache them, so that no later run waits for it."""
    from fast_axolotl.kernels.jit import all_kernels
    from fast_axolotl.report.terminal import phase_progress

    start = time.perf_counter()
    kernels = all_kernels()
    with phase_progress("kernels") as progress:
        for index, kernel in enumerate(kernels):
            progress(kernel.name, index, len(kernels), index)
            kernel.compile()
    if not all(kernel.is_kept for kernel in kernels):
        raise DataError(
            "the compiled code could not be cached, because no cache folder is writable. Set "
            "NUMBA_CACHE_DIR to a writable folder, or every process compiles again"
        )
    print(f"{len(kernels)} kernels ready after {format_seconds(time.perf_counter() - start)}")


def dedupe(
    inputs: Inputs,
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            help="The file to write: .parquet, .arrow, .jsonl, .jsonl.gz or .jsonl.zst. With "
            "--engine: a folder or URL for Parquet files.",
        ),
    ],
    columns: Columns = None,
    against: Annotated[
        list[str] | None,
        Option(
            help="Also remove rows of this data, for example a test set. Repeatable; quote globs."
        ),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the output.")] = False,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    memory_budget: Annotated[str, Option(help="Memory; what exceeds it goes to disk.")] = "1GiB",
    engine: Annotated[
        Literal["local", "ray"] | None, Option(help="Work in processes here, or on a Ray cluster.")
    ] = None,
    address: Address = None,
    workers: Workers = 0,
    memory: WorkerMemory = "4GiB",
    work: Work = None,
    restart: Restart = False,
) -> None:
    """Remove duplicate rows: keep the first of equal rows, in order, in bounded memory.

    Rows are compared exactly, not approximately. With --engine, the same rows are written to a
    folder of Parquet files; if that is interrupted, the same command continues where it stopped.
    """
    from fast_axolotl.report.terminal import phase_progress
    from fast_axolotl.system import peak_memory_bytes

    settings: dict[str, Any] = {
        "columns": None if columns is None else parse_names(columns),
        "overwrite": overwrite,
        "format": format,
        "split": split,
        "on_error": on_error,
    }
    if engine is not None:
        if against or settings.pop("on_error") == "skip":
            raise UsageError("--against and --on-error skip do not work with --engine")
        job = _job_options(engine, address, workers, memory, work, restart)
        from fast_axolotl.cluster.tables import dedupe_on

        done = _watch_job(dedupe_on, inputs=inputs, output=output, **settings, **job)
        print_result(done, job_document(done), as_json=as_json)
        return
    if address is not None or work is not None or workers or restart:
        raise UsageError("--address, --workers, --work and --restart need --engine local or ray")
    from fast_axolotl.dedupe import dedupe_files

    with phase_progress() as progress:
        summary = dedupe_files(
            inputs,
            output,
            against=against or None,
            memory_budget=parse_size(memory_budget),
            progress=progress,
            **settings,
        )
    share, peak = summary.duplicates / max(1, summary.rows_in), peak_memory_bytes()
    found = summary.to_json() | {"duplicates_share": share, "peak_memory_bytes": peak}
    print_result(found, summary_document(found), as_json=as_json)


def prepare(
    config: Annotated[Path, Argument(help="The Axolotl configuration.", exists=True)],
    engine: Annotated[
        Literal["local", "ray"], Option(help="Work in processes here, or on a Ray cluster.")
    ] = "local",
    address: Address = None,
    memory: WorkerMemory = "4GiB",
    workers: Workers = 0,
    output: Annotated[
        str | None, Option("--output", "-o", help="Instead of dataset_prepared_path; may be a URL.")
    ] = None,
    work: Work = None,
    restart: Restart = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check data, types and memory; count the rows.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Do what axolotl preprocess does, on all cores or on a Ray cluster, in bounded memory.

    The result is the same folder with the same rows in the same order, for any number of nodes and
    workers. axolotl train finds the dataset there and starts at once.

    If it is interrupted, the same command continues where it stopped. If a node fails, its tasks
    run again on another node.
    """
    job = _job_options(engine, address, workers, memory, work, restart)
    from fast_axolotl.cluster.prepare import prepare as prepare_dataset

    job |= {"config": str(config), "output": output, "dry_run": dry_run}
    summary = _watch_job(prepare_dataset, **job)
    if dry_run:
        print_result(summary, job_document(summary), as_json=as_json)
        return
    # Axolotl opens a prepared dataset from a path only.
    is_remote = output is not None and "://" in output
    place = ["--dataset-prepared-path", "FOLDER" if is_remote else output] if output else []
    command = shlex.join(["axolotl", "train", str(config), *place])
    command = f"copy {output} to FOLDER, then {command}" if is_remote else command
    found = summary.to_json() | {"next_command": command}
    print_result(found, job_document(summary, command), as_json=as_json)


def _job_options(
    engine: str, address: str | None, workers: int, memory: str, work: str | None, restart: bool
) -> dict[str, Any]:
    """What a job on data is given, whichever it is."""
    if address is not None and engine != "ray":
        raise UsageError("--address names a Ray cluster: add --engine ray")
    job = {"engine": engine, "address": address or "auto", "memory": parse_size(memory)}
    return {**job, "workers": workers, "work": work, "restart": restart}


def job_progress(
    update: Callable[[str, int, int, int], None],
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[Stage, str], None]:
    """What shows how far a job is, from what it reports: ``update`` takes a stage, its tasks done
    and in all, and rows; ``write`` takes lines."""
    written = 0.0

    def hear(stage: Stage, what: str) -> None:
        nonlocal written
        now = clock()
        update(stage.name, stage.done, stage.tasks, stage.rows)
        if what or now - written >= _LINE_SECONDS:
            written = now
            rows = f", {stage.rows:,} rows" if stage.rows else ""
            took = f" in {format_duration(stage.seconds)}" if stage.done else ""
            tasks = f"{stage.done:,}/{stage.tasks:,} tasks"
            write(f"{stage.name}: {what}{', ' if what else ''}{tasks}{rows}{took}")

    return hear


def _watch_job(job: Callable[..., JobSummary], **arguments: Any) -> JobSummary:
    """Does a job, and shows how far it is."""
    from fast_axolotl.report.terminal import phase_progress

    write = (lambda _: None) if sys.stderr.isatty() else say
    try:
        # Stdout is for results; what Ray and Axolotl print goes elsewhere.
        with redirect_stdout(sys.stderr), phase_progress() as update:
            return job(**arguments, heard=job_progress(update, write))
    except KeyboardInterrupt:
        say("finished work is kept: the same command continues, --restart starts again")
        raise


def job_document(job: JobSummary, next_command: str = "") -> Document:
    """What a job has done: its stages and its rows."""
    stages = [
        [
            stage.name,
            *(f"{count:,}" for count in (stage.tasks, stage.done_before, stage.retried)),
            format_duration(stage.seconds),
        ]
        for stage in job.stages
    ]
    header = ("stage", "tasks", "done before", "retried", "time")
    # Rows that an earlier run has prepared took no time now.
    is_whole = job.seconds and not any(stage.done_before for stage in job.stages)
    # The stages have a table; the rest is shown without what is None.
    found = job.to_json() | {
        **dict.fromkeys(("stages", "peak_bytes")),
        "peak_memory_bytes": job.peak_bytes,
        "tokens_per_second": job.tokens / job.seconds if job.tokens and is_whole else None,
        "next_command": next_command,
    }
    return summary_document(found, Table(header=header, rows=stages))
