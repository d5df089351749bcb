"""``fast-axolotl prepare``: what ``axolotl preprocess`` does, on all cores or on a cluster."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
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
)
from fast_axolotl.errors import UsageError, mask_words

PREPARE_EXAMPLES = examples(
    "prepare config.yml",
    "prepare config.yml --memory 2GiB --workers 8 --set sequence_len=8192",
    "prepare config.yml --engine ray --work s3://bucket/work",
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
    restart: Restart = False,
    as_json: AsJson = False,
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
    if find_spec("axolotl") is None:
        raise UsageError(
            "prepare reads the configuration and tokenises with Axolotl, which is not installed "
            "here: pip install axolotl"
        )
    from fast_axolotl.cli.job_progress import print_summary, watch_job
    from fast_axolotl.cluster.prepare import prepare as prepare_dataset

    summary = watch_job(
        prepare_dataset, config=str(config), overrides=settings, output=output, **job
    )
    print_summary(summary, as_json=as_json, next_command=_train_command(config, settings, output))


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
