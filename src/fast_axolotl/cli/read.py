"""``fast-axolotl read``: read a dataset once and report rows, throughput and memory."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

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
    parse_shard,
    parse_size,
    say,
)

READ_EXAMPLES = examples(
    "read train.jsonl.zst",
    "read data/ --split train --columns messages --head 3",
    "read 's3://bucket/*.parquet' --shard 0/8 --json",
)


def read(
    paths: Inputs,
    columns: Annotated[
        str | None, typer.Option(help="Read only these columns (comma-separated).")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = 1000,
    shard: Annotated[
        str | None, typer.Option(help="Read only one shard: 0/8 is the first of eight.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Print the first N rows as JSON lines and stop.", min=1)
    ] = None,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    shuffle: Annotated[
        int | None, typer.Option(help="Shuffle the rows with this seed.", min=0)
    ] = None,
    on_error: OnError = "raise",
    on_conflict: OnConflict = "raise",
    infer: Annotated[
        Literal["auto", "scan"],
        typer.Option(
            help="scan reads JSON and CSV files twice, to know all types before the first row."
        ),
    ] = "auto",
    json_field: JsonField = None,
    num_threads: Annotated[
        int, typer.Option(help="Decoding threads; 0 uses every core of this process.")
    ] = 0,
    memory_budget: Annotated[
        str, typer.Option(help="Memory for reading ahead, for example 256MiB.")
    ] = "256MiB",
) -> None:
    """Read a dataset once and report rows/s, MB/s, memory and the rows that could not be read.

    With --head, print the first rows instead. Formats: Parquet, Arrow, Feather, JSON, JSON lines,
    CSV and text, also compressed with gzip, zstd and others, from disk or from S3 and other stores.
    """
    from fast_axolotl.cli.resident_peak import ResidentPeak
    from fast_axolotl.reading import convert, open_dataset
    from fast_axolotl.report.terminal import phase_progress

    start = time.perf_counter()
    reader = open_dataset(
        list(paths),
        format=format,
        columns=None if columns is None else parse_names(columns),
        batch_size=batch_size,
        num_threads=num_threads,
        memory_budget=parse_size(memory_budget),
        shard=None if shard is None else parse_shard(shard),
        shuffle=shuffle,
        on_error=on_error,
        on_conflict=on_conflict,
        infer=infer,
        split=split,
        json_field=json_field,
    )
    shown: list[str] = []
    total = reader.num_bytes
    first: float | None = None
    with reader, ResidentPeak() as memory, phase_progress() as update:
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
    summary = {
        "rows": stats.rows,
        "batches": stats.batches,
        "files": len(reader.files),
        "num_bytes": stats.num_bytes,
        "seconds": seconds,
        "first_batch_seconds": first,
        "rows_per_second": stats.rows / seconds if seconds else None,
        "bytes_per_second": stats.num_bytes / seconds if seconds else None,
        "working_set_bytes": memory.above_start_bytes,
        "working_set_reason": memory.reason,
        "rejected_rows": stats.rejected_rows,
        "rejections": [asdict(item) for item in stats.rejections],
        "ignored_files": list(stats.ignored_files),
        "columns": {field.name: str(field.type) for field in reader.schema},
    }
    if as_json:
        print(json.dumps(summary, ensure_ascii=False, indent=None if shown else 2))
    elif head is None:
        _print_summary(summary)
    if stats.rejections and not stats.rows:
        say("no row could be read")
        raise typer.Exit(1)


def _print_summary(summary: dict[str, Any]) -> None:
    from fast_axolotl.record.units import count_words, format_bytes, format_seconds
    from fast_axolotl.report.terminal import show_pairs

    files = count_words(summary["files"], "file")
    first = format_seconds(summary["first_batch_seconds"])
    reason, size = summary["working_set_reason"], format_bytes(summary["working_set_bytes"])
    pairs = [
        ("rows", f"{summary['rows']:,} in {count_words(summary['batches'], 'batch')} from {files}"),
        ("time", f"{format_seconds(summary['seconds'])}, first batch after {first}"),
        ("rows/s", f"{summary['rows_per_second'] or 0:,.0f}"),
        ("bytes/s", f"{format_bytes(summary['bytes_per_second'])}/s (size of the files)"),
        ("working set", f"– ({reason})" if reason else size),
        ("rejected rows", describe_rejected(summary["rejected_rows"], summary["rejections"])),
        ("columns", "\n".join(f"{name}: {kind}" for name, kind in summary["columns"].items())),
    ]
    show_pairs("", pairs)
