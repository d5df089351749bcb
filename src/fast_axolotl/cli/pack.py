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

__all__ = ["PACK_EXAMPLES", "pack"]

PACK_EXAMPLES = examples(
    "pack data/*.parquet -o packed --length 4096",
    "pack tokens.jsonl -o packed --length 2048 --long cut",
    "pack s3://bucket/tokens -o s3://bucket/packed --length 8192 --engine ray",
)


def pack(
    inputs: Inputs,
    output: Annotated[
        str, typer.Option("--output", "-o", help="A folder or URL, for Parquet files.")
    ],
    length: Annotated[int, typer.Option(help="Tokens that a pack holds at most.", min=1)],
    column: Annotated[str, typer.Option(help="The column of token ids.")] = "input_ids",
    others: Annotated[
        str | None,
        typer.Option(
            help="Columns with a value for each token: names with commas between. Default: labels, "
            "where the data has it."
        ),
    ] = None,
    long: Annotated[
        Literal["error", "drop", "cut"],
        typer.Option(help="Rows with more tokens than a pack holds: stop, drop them, or cut them."),
    ] = "error",
    method: Annotated[
        Literal["first_fit", "first_fit_decreasing", "best_fit_decreasing", "sequential"],
        typer.Option(help="How rows are placed. The decreasing ones put long rows first."),
    ] = "first_fit",
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Who does the work: processes of this machine, or a Ray cluster."),
    ] = "local",
    address: Address = None,
    workers: Workers = 0,
    memory: WorkerMemory = "4GiB",
    work: Work = None,
    restart: Restart = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    as_json: AsJson = False,
    format: Format = "auto",
    split: Split = None,
    on_error: OnError = "raise",
    json_field: JsonField = None,
) -> None:
    """Pack rows of token ids into rows of up to --length tokens, whole sequences each.

    The output has input_ids, labels if there are any, position_ids that begin at 0 for every
    sequence, and the lengths of the sequences. Packs are not padded. If it is interrupted, the same
    command continues where it stopped.
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
