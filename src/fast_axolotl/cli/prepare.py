"""``fast-axolotl prepare``: what ``axolotl preprocess`` does, on all cores or on a cluster."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fast_axolotl.cli.options import (
    Address,
    AsJson,
    Restart,
    Work,
    WorkerMemory,
    Workers,
    examples,
    job_options,
    say,
    unused_folder,
)
from fast_axolotl.errors import UsageError, mask_words

PREPARE_EXAMPLES = examples(
    "prepare config.yml --dry-run",
    "prepare config.yml --memory 2GiB --workers 8 --set sequence_len=8192",
    "prepare config.yml --engine ray --work s3://bucket/work --price 12.8",
    "prepare config.yml --engine ray --address 10.0.0.1:6379 --output /shared/prepared",
)


def prepare(
    config: Annotated[
        Path, typer.Argument(help="The Axolotl configuration.", metavar="CONFIG", exists=True)
    ],
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where the work runs: processes of this machine, or a Ray cluster."),
    ] = "local",
    address: Address = None,
    memory: WorkerMemory = "4GiB",
    workers: Workers = 0,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Path or URL, instead of dataset_prepared_path."),
    ] = None,
    work: Work = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the configuration. Repeatable."
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="Price of all nodes together per hour, to compute the cost.", min=0.0),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan (units, stages, disk space) and stop."),
    ] = False,
    restart: Restart = False,
    as_json: AsJson = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Folder of the record. Default: fast-axolotl-runs/TIME-prepare."),
    ] = None,
) -> None:
    """Do what axolotl preprocess does, on all cores or on a Ray cluster, in bounded memory.

    The result is the same folder with the same rows in the same order, for any number of nodes and
    workers. axolotl train finds the dataset there and starts at once.

    If it is interrupted, the same command continues where it stopped. If a node fails, its tasks
    run again on another node.
    """
    settings = _parse_overrides(overrides or ())
    job = job_options(
        engine, address=address, workers=workers, memory=memory, work=work, restart=restart
    )
    folder = record or unused_folder("fast-axolotl-runs", f"{datetime.now():%Y%m%d-%H%M%S}-prepare")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists; pass an empty folder with --record")
    if find_spec("axolotl") is None:
        raise UsageError(
            "prepare reads the configuration and tokenises with Axolotl, which is not installed "
            "here: pip install axolotl"
        )
    from fast_axolotl.cli.job_progress import plan_table, summary_table, watch_job
    from fast_axolotl.cli.job_record import JobRecord
    from fast_axolotl.cluster.prepare import plan_preparation
    from fast_axolotl.cluster.prepare import prepare as prepare_dataset

    common: Any = {"overrides": settings, "output": output}
    if dry_run:
        plan = plan_preparation(str(config), **common, memory=job["memory"], work=work)
        print(json.dumps(plan.to_json(), indent=2)) if as_json else plan_table(plan)
        plan.require_disk()
        return
    started = time.time()
    summary = watch_job(f"prepare {config}", prepare_dataset, config=str(config), **common, **job)
    made = JobRecord(
        title=f"prepare {config.name}",
        started=started,
        settings={
            "config": str(config.absolute()),
            "engine": f"ray at {address or 'auto'}" if engine == "ray" else engine,
            "workers": workers or "every core",
            "memory of a process": memory,
        },
        next_command=_train_command(config, settings, output),
        price_per_hour=price,
        summary=summary,
    )
    if as_json:
        beside = {"price_per_hour": price, "next_command": made.next_command, "record": str(folder)}
        print(json.dumps(summary.to_json() | beside, indent=2))
    else:
        summary_table(made)
    made.write(folder)
    say(f"as an HTML report: fast-axolotl report {shlex.quote(str(folder))}")


def _parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """``sequence_len=4096`` as a number, ``sample_packing=true`` as a truth, else a text."""
    settings: dict[str, Any] = {}
    for word in words:
        key, mark, text = word.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and mark):
            raise UsageError(f"cannot read --set {word!r}; write --set sequence_len=4096")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if value is None or isinstance(value, dict | list):
            raise UsageError(
                f"--set {key} takes a number, true, false or a text, not {text!r}; "
                "edit the configuration instead"
            )
        settings[key] = value
    return settings


def _train_command(config: Path, settings: Mapping[str, Any], output: str | None) -> str:
    """How to train on it: with the same settings, or Axolotl looks for another dataset."""
    words = ["axolotl", "train", str(config)]
    # Axolotl opens a prepared dataset from a path only.
    is_remote = output is not None and "://" in output
    folder = {"dataset_prepared_path": "FOLDER" if is_remote else output}
    for key, value in {**settings, **folder}.items():
        name = key.replace("_", "-")
        truth = {True: [f"--{name}"], False: [f"--no-{name}"]}
        if value is not None:
            words += truth[value] if isinstance(value, bool) else [f"--{name}", str(value)]
    command = shlex.join(mask_words(words))
    return f"copy {output} to FOLDER, then {command}" if is_remote else command
