"""``fast-axolotl read`` and ``warmup``: a dataset read once; kernels compiled once."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from fast_axolotl.cli.options import (
    AsJson,
    Format,
    Inputs,
    OnError,
    Split,
    describe_rejected,
    examples,
    parse_names,
    say,
)

READ_EXAMPLES = examples(
    "read train.jsonl.zst",
    "read data/ --split train --columns messages --head 3",
    "read 's3://bucket/*.parquet' --json",
)


WARMUP_EXAMPLES = (
    "Examples:\n\n  fast-axolotl warmup\n\n"
    "In a container image, with a cache folder that the container's user can write to:\n\n"
    "  ENV NUMBA_CACHE_DIR=/var/cache/numba\n\n"
    "  RUN pip install ./fast-axolotl && fast-axolotl warmup"
)


def read(
    paths: Inputs,
    columns: Annotated[
        str | None, typer.Option(help="Read only these columns (comma-separated).")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Print the first N rows as JSON lines and stop.", min=1)
    ] = None,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    infer: Annotated[
        Literal["auto", "scan"],
        typer.Option(
            help="scan reads JSON and CSV files twice, to know all types before the first row."
        ),
    ] = "auto",
) -> None:
    """Read a dataset once and report rows/s, MB/s, memory and the rows that could not be read.

    With --head, print the first rows instead. Formats: Parquet, Arrow, Feather, JSON, JSON lines,
    CSV and text, also compressed with gzip, zstd and others, from disk or from S3 and other stores.
    """
    from fast_axolotl.reading import convert, open_dataset
    from fast_axolotl.record.units import count_words, format_bytes, format_seconds
    from fast_axolotl.report.terminal import phase_progress, show_pairs
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
    rows_per_second = stats.rows / seconds if seconds else 0.0
    bytes_per_second = stats.num_bytes / seconds if seconds else 0.0
    types = {field.name: str(field.type) for field in reader.schema}
    rejections = [asdict(item) for item in stats.rejections]
    if as_json:
        summary = {
            "rows": stats.rows,
            "batches": stats.batches,
            "files": len(reader.files),
            "num_bytes": stats.num_bytes,
            "seconds": seconds,
            "first_batch_seconds": first,
            "rows_per_second": rows_per_second,
            "bytes_per_second": bytes_per_second,
            "peak_memory_bytes": peak_memory_bytes(),
            "rejected_rows": stats.rejected_rows,
            "rejections": rejections,
            "ignored_files": list(stats.ignored_files),
            "columns": types,
        }
        print(json.dumps(summary, ensure_ascii=False, indent=None if shown else 2))
    elif head is None:
        batches, files = count_words(stats.batches, "batch"), count_words(len(reader.files), "file")
        pairs = [
            ("rows", f"{stats.rows:,} in {batches} from {files}"),
            ("time", f"{format_seconds(seconds)}, first batch after {format_seconds(first)}"),
            ("rows/s", f"{rows_per_second:,.0f}"),
            ("bytes/s", f"{format_bytes(bytes_per_second)}/s (size of the files)"),
            ("peak memory", f"{format_bytes(peak_memory_bytes())} of this process"),
            ("rejected rows", describe_rejected(stats.rejected_rows, rejections)),
            ("columns", "\n".join(f"{name}: {kind}" for name, kind in types.items())),
        ]
        show_pairs("", pairs)
    if stats.rejections and not stats.rows:
        say("no row could be read")
        raise typer.Exit(1)


def warmup() -> None:
    """Compile all numba kernels now and cache them, so that no later run waits for it."""
    from fast_axolotl.errors import DataError
    from fast_axolotl.kernels.jit import all_kernels
    from fast_axolotl.record.units import format_seconds
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
