"""``fast-axolotl pack``: token lists packed to one length, on all cores or on a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fast_axolotl.cli.options import (
    Address,
    AsJson,
    Format,
    Inputs,
    JsonField,
    OnError,
    Restart,
    Split,
    Work,
    WorkerMemory,
    Workers,
    examples,
    job_options,
    parse_names,
)

PACK_EXAMPLES = examples(
    "pack data/*.parquet -o packed --length 4096",
    "pack tokens.jsonl -o packed --length 2048 --long cut",
    "pack s3://bucket/tokens -o s3://bucket/packed --length 8192 --engine ray",
)


def pack(
    inputs: Inputs,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Folder or URL for the Parquet files.")
    ],
    length: Annotated[int, typer.Option(help="Maximum number of tokens per pack.", min=1)],
    column: Annotated[str, typer.Option(help="The column of token ids.")] = "input_ids",
    others: Annotated[
        str | None,
        typer.Option(
            help="Other columns with one value per token (comma-separated). Default: labels, if "
            "the data has them."
        ),
    ] = None,
    long: Annotated[
        Literal["error", "drop", "cut"],
        typer.Option(help="For a row longer than --length: stop, drop the row, or cut it."),
    ] = "error",
    method: Annotated[
        Literal["first_fit", "first_fit_decreasing", "best_fit_decreasing", "sequential"],
        typer.Option(help="Packing algorithm. The decreasing ones place long rows first."),
    ] = "first_fit",
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where the work runs: processes of this machine, or a Ray cluster."),
    ] = "local",
    address: Address = None,
    workers: Workers = 0,
    memory: WorkerMemory = "4GiB",
    work: Work = None,
    restart: Restart = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.")
    ] = False,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    json_field: JsonField = None,
) -> None:
    """Pack tokenised rows into packs of up to --length tokens, without splitting a row.

    The output has the columns input_ids, labels (if the data has them), position_ids that start at
    0 for every sequence, and the sequence lengths. Packs are not padded. If it is interrupted, the
    same command continues where it stopped.
    """
    from fast_axolotl.cli.job_progress import run_job
    from fast_axolotl.cluster.tables import pack_on

    job = job_options(
        engine, address=address, workers=workers, memory=memory, work=work, restart=restart
    )
    run_job(
        f"pack to {output}",
        pack_on,
        as_json=as_json,
        inputs=inputs,
        output=output,
        length=length,
        column=column,
        others=None if others is None else parse_names(others),
        long=long,
        method=method,
        overwrite=overwrite,
        **job,
        format=format,
        split=split,
        on_error=on_error,
        json_field=json_field,
    )
