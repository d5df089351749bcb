"""What several commands share: options with their help, how values are read, and phrases."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fast_axolotl.errors import UsageError
from fast_axolotl.record.units import count_words

Inputs = Annotated[
    list[str], typer.Argument(help="Files, folders, globs or URIs, read in this order.")
]
Format = Annotated[
    str, typer.Option(help="auto, or parquet, arrow, feather, csv, json, jsonl or text.")
]
Split = Annotated[
    str | None,
    typer.Option(help="Which split to read from a folder with several; all reads every split."),
]
OnError = Annotated[
    Literal["raise", "skip"],
    typer.Option(help="For a row that cannot be read: stop, or skip it and count it."),
]
DataPath = Annotated[
    Path | None,
    typer.Option(help="The training data, to measure the read speed of its disk.", exists=True),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
ResultAsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Matters = Annotated[
    str | None, typer.Option(help="Smallest change that counts as a change. Default: 1%.")
]

Address = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of the Ray cluster. Default: the cluster of this node."),
]
Workers = Annotated[
    int, typer.Option(help="Tasks that run at the same time; 0 uses every core.", min=0)
]
WorkerMemory = Annotated[str, typer.Option(help="Memory limit of one worker process.")]
Work = Annotated[
    str | None,
    typer.Option(
        help="Folder for intermediate files: a path or URL that every node can reach. "
        "Default: the output's name with .work appended."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Delete the files of an interrupted run and start again.")
]


def job_options(
    engine: str,
    *,
    address: str | None,
    workers: int,
    memory: str,
    work: str | None,
    restart: bool,
) -> dict[str, Any]:
    """What a job on data is given, whichever it is."""
    if address is not None and engine != "ray":
        raise UsageError("--address names a Ray cluster: add --engine ray")
    return {
        "engine": engine,
        "address": address or "auto",
        "workers": workers,
        "memory": parse_size(memory),
        "work": work,
        "restart": restart,
    }


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
_MOST_REJECTIONS = 20
_ARGUMENTS = "memory_budget|on_error"
_WORDS = "columns|format|infer|memory|overwrite|split"
_ARGUMENT = re.compile(
    rf"\b({_ARGUMENTS}|{_WORDS})=(?:[\"'](\w+)[\"']|True(?: \(--\w+\))?)"
    rf"|\b({_ARGUMENTS})\b|^({_WORDS})(?= must )"
)
"""An argument of Python that is an option here: with a value, or by its name alone."""
_SKIPPING = re.compile(r"; [^;]*on_error=.*")
"""How to skip a row, which was done."""


def examples(*commands: str) -> str:
    """The examples below the help of a command."""
    return "\n\n".join(["Examples:", *(f"  fast-axolotl {command}" for command in commands)])


def parse_size(text: str) -> int:
    """``256MiB``, ``1.5 GB`` or a plain number of bytes."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"cannot read {text!r} as a size; write 256MiB or 1GB") from None


def parse_percent(text: str) -> float:
    """``1%``, ``1 %`` or ``1`` as 0.01."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"cannot read {text!r} as a percentage; write 1% or 0.5%")
    return share


def parse_names(text: str) -> list[str]:
    """Comma-separated names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def unused_folder(root: str, name: str) -> Path:
    """``root/name``; with a number behind it where that is there already."""
    folder = Path(root) / name
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    return folder


def latest_run(root: str = "fast-axolotl-runs") -> Path:
    """The folder that was written to last among the records of this folder."""
    found = [(file.stat().st_mtime, file.parent) for file in Path(root).glob("*/*.json*")]
    if not found:
        raise UsageError(
            f"there is no record in {root}/ here: name the folder of one, or record a run with "
            "fast-axolotl measure -- COMMAND"
        )
    return max(found)[1]


def say(line: str) -> None:
    """One line of this program beside what a command prints."""
    print(f"fast-axolotl: {line}", file=sys.stderr, flush=True)


def name_options(message: str) -> str:
    """A message about arguments of Python in terms of the command line.

    >>> name_options('pass on_error="skip" or overwrite=True')
    'pass --on-error skip or --overwrite'
    """

    def write(found: re.Match[str]) -> str:
        name = found[1] or found[3] or found[4]
        return f"--{name.replace('_', '-')} {found[2] or ''}".rstrip()

    return _ARGUMENT.sub(write, message)


def describe_rejected(num_rows: int, rejections: Sequence[Mapping[str, Any]]) -> str:
    """How many rows could not be read, then where and why, line by line."""
    shown = rejections[:_MOST_REJECTIONS]
    unknown = sum(item["num_rows"] is None for item in rejections)
    more = f", and an unknown number in {count_words(unknown, 'place')}" if unknown else ""
    lines = [f"{num_rows:,}{more}"]
    for item in shown:
        reason = name_options(_SKIPPING.sub("", item["reason"]))
        lines.append(f"{item['path']}, {item['place']}: {reason}")
    if len(rejections) > len(shown):
        lines.append(f"… {len(rejections) - len(shown)} more; --json lists them")
    return "\n".join(lines)
