"""``fast-axolotl dedupe``: the rows of a dataset that come for the first time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import (
    AsJson,
    Format,
    Inputs,
    JsonField,
    OnConflict,
    OnError,
    Split,
    describe_rejected,
    examples,
    parse_names,
    parse_size,
)

if TYPE_CHECKING:
    from fast_axolotl.cli.resident_peak import ResidentPeak
    from fast_axolotl.dedupe import DedupeSummary

__all__ = ["DEDUPE_EXAMPLES", "dedupe"]

DEDUPE_EXAMPLES = examples(
    "dedupe train.jsonl -o clean.jsonl",
    "dedupe data/*.parquet -o clean.parquet --columns messages",
    "dedupe train.parquet -o clean.parquet --against test.parquet --report duplicates.parquet",
)


def dedupe(
    inputs: Inputs,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A .parquet, .arrow, .jsonl, .jsonl.gz or .jsonl.zst."),
    ],
    columns: Annotated[
        str | None, typer.Option(help="Compare these columns only: names with commas between.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave out the rows of this data, too; can be given more than once. Put a glob in "
            "quotes, or its second file counts as input."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="List what was dropped, and which row it repeats, in this file."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output and the report.")
    ] = False,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    on_conflict: OnConflict = "raise",
    json_field: JsonField = None,
    num_threads: Annotated[
        int, typer.Option(help="Threads; 0 takes what this process may use.", min=0)
    ] = 0,
    memory_budget: Annotated[
        str, typer.Option(help="What this work may hold; beyond it, it goes on on disk.")
    ] = "1GiB",
    temp_dir: Annotated[
        Path | None, typer.Option(help="Where that is; beside the output by default.")
    ] = None,
) -> None:
    """Write the rows that come for the first time, in order, exactly, in bounded memory."""
    from fast_axolotl.cli.resident_peak import ResidentPeak
    from fast_axolotl.dedupe import dedupe_files
    from fast_axolotl.kernels import digests, rowhash
    from fast_axolotl.report.terminal import phase_progress

    # Before memory is measured: the compiler is not part of the work.
    for kernel in (rowhash.absorb, digests.insert, digests.place):
        kernel.compile()
    with ResidentPeak() as memory, phase_progress() as progress:
        summary = dedupe_files(
            inputs,
            output,
            columns=None if columns is None else parse_names(columns),
            against=against or None,
            report=report,
            overwrite=overwrite,
            memory_budget=parse_size(memory_budget),
            num_threads=num_threads,
            temp_dir=temp_dir,
            progress=progress,
            format=format,
            split=split,
            on_error=on_error,
            on_conflict=on_conflict,
            json_field=json_field,
        )
    _print_summary(summary, memory, as_json=as_json)


def _print_summary(summary: DedupeSummary, memory: ResidentPeak, *, as_json: bool) -> None:
    from fast_axolotl.record.units import count_words, format_bytes, format_seconds
    from fast_axolotl.report.terminal import show_pairs

    if as_json:
        peak = {"peak_memory_bytes": memory.above_start_bytes, "peak_memory_reason": memory.reason}
        print(json.dumps(summary.to_json() | peak, indent=2))
        return
    share = summary.duplicates / summary.rows_in if summary.rows_in else 0.0
    dropped = f"{summary.duplicates:,} ({share:.1%})"
    if summary.duplicates_of_others:
        dropped += f", {summary.duplicates_of_others:,} of them of the other data"
    if summary.files_against:
        dropped += f" ({count_words(summary.files_against, 'file')} to leave out)"
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
            f"{format_bytes(memory.above_start_bytes)}, "
            f"{format_bytes(summary.state_bytes)} of it for the rows seen{spilled}",
        ),
        ("output", summary.output),
    ]
    if summary.rejections:
        listed = [asdict(item) for item in summary.rejections]
        pairs.insert(1, ("rejected rows", describe_rejected(summary.rejected_rows, listed)))
    if summary.report is not None:
        pairs.append(("report", summary.report))
    show_pairs("", pairs)
