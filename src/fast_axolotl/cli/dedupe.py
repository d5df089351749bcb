"""``fast-axolotl dedupe``: a dataset without its duplicate rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fast_axolotl.cli.options import (
    Address,
    AsJson,
    Format,
    Inputs,
    OnError,
    Restart,
    Split,
    Work,
    WorkerMemory,
    Workers,
    describe_rejected,
    examples,
    job_options,
    parse_names,
    parse_size,
)
from fast_axolotl.errors import UsageError

if TYPE_CHECKING:
    from fast_axolotl.dedupe import DedupeSummary

DEDUPE_EXAMPLES = examples(
    "dedupe train.jsonl -o clean.jsonl",
    "dedupe data/*.parquet -o clean.parquet --columns messages",
    "dedupe train.parquet -o clean.parquet --against test.parquet --report duplicates.parquet",
    "dedupe s3://bucket/raw/*.parquet -o s3://bucket/clean --engine ray",
)


def dedupe(
    inputs: Inputs,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="The file to write: .parquet, .arrow, .jsonl, .jsonl.gz or .jsonl.zst. With "
            "--engine: a folder or URL for Parquet files.",
        ),
    ],
    columns: Annotated[
        str | None, typer.Option(help="Compare only these columns (comma-separated).")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Also remove rows that occur in this data, for example a test set. Repeatable. "
            "Put a glob in quotes, or the shell passes its second file as input."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a list of the removed rows, each with the row it repeats."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output and report.")
    ] = False,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    memory_budget: Annotated[
        str, typer.Option(help="Memory for this work; spills to disk beyond this size.")
    ] = "1GiB",
    engine: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(help="Work in many processes: on this machine, or on a Ray cluster."),
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
    reading: dict[str, Any] = {
        "format": format,
        "split": split,
        "on_error": on_error,
    }
    names = None if columns is None else parse_names(columns)
    if engine is not None:
        if against or report is not None:
            raise UsageError("--against and --report do not work with --engine")
        job = job_options(
            engine, address=address, workers=workers, memory=memory, work=work, restart=restart
        )
        from fast_axolotl.cli.job_progress import print_summary, watch_job
        from fast_axolotl.cluster.tables import dedupe_on

        done = watch_job(
            dedupe_on,
            inputs=inputs,
            output=output,
            columns=names,
            overwrite=overwrite,
            **job,
            **reading,
        )
        print_summary(done, as_json=as_json)
        return
    if address is not None or work is not None or workers or restart:
        raise UsageError("--address, --workers, --work and --restart need --engine local or ray")
    from fast_axolotl.dedupe import dedupe_files
    from fast_axolotl.report.terminal import phase_progress

    with phase_progress() as progress:
        summary = dedupe_files(
            inputs,
            output,
            columns=names,
            against=against or None,
            report=report,
            overwrite=overwrite,
            memory_budget=parse_size(memory_budget),
            progress=progress,
            **reading,
        )
    _print_summary(summary, as_json=as_json)


def _print_summary(summary: DedupeSummary, *, as_json: bool) -> None:
    from fast_axolotl.record.units import count_words, format_bytes, format_seconds
    from fast_axolotl.report.terminal import show_pairs
    from fast_axolotl.system import peak_memory_bytes

    if as_json:
        print(json.dumps(summary.to_json() | {"peak_memory_bytes": peak_memory_bytes()}, indent=2))
        return
    share = summary.duplicates / summary.rows_in if summary.rows_in else 0.0
    dropped = f"{summary.duplicates:,} ({share:.1%})"
    if summary.duplicates_of_others:
        dropped += f", {summary.duplicates_of_others:,} of them also in --against"
    if summary.files_against:
        dropped += f" ({count_words(summary.files_against, 'file')} in --against)"
    spilled = f", {format_bytes(summary.spilled_bytes)} on disk" if summary.spilled_bytes else ""
    pairs = [
        (
            "rows in",
            f"{summary.rows_in:,} ({format_bytes(summary.bytes_in)}) from "
            f"{count_words(summary.files_in, 'file')}",
        ),
        ("duplicates", dropped),
        ("rows out", f"{summary.rows_out:,} ({format_bytes(summary.bytes_out)})"),
        ("time", f"{format_seconds(summary.seconds)}, {summary.rows_per_second or 0:,.0f} rows/s"),
        (
            "peak memory",
            f"{format_bytes(peak_memory_bytes())}, "
            f"{format_bytes(summary.state_bytes)} of it to remember rows{spilled}",
        ),
        ("output", summary.output),
    ]
    if summary.rejections:
        listed = [asdict(item) for item in summary.rejections]
        pairs.insert(1, ("rejected rows", describe_rejected(summary.rejected_rows, listed)))
    if summary.report is not None:
        pairs.append(("report", summary.report))
    show_pairs("", pairs)
