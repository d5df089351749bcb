"""What several commands share: options with their help, how values are read, and phrases."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fast_axolotl.errors import UsageError

__all__ = [
    "Address",
    "AsJson",
    "AsMarkdown",
    "DataPath",
    "Format",
    "Inputs",
    "JsonField",
    "Matters",
    "OnConflict",
    "OnError",
    "Restart",
    "ResultAsJson",
    "Split",
    "Work",
    "WorkerMemory",
    "Workers",
    "describe_rejected",
    "examples",
    "job_options",
    "parse_duration",
    "parse_names",
    "parse_percent",
    "parse_shard",
    "parse_size",
    "say",
    "unused_folder",
]

Inputs = Annotated[
    list[str], typer.Argument(help="Files, folders, globs or URIs, read in this order.")
]
Format = Annotated[str, typer.Option(help="auto, or a format's name.")]
Split = Annotated[
    str | None, typer.Option(help="The split of a folder that has several; all for all.")
]
OnError = Annotated[
    Literal["raise", "skip"], typer.Option(help="What to do with rows that cannot be read.")
]
OnConflict = Annotated[
    Literal["raise", "json"],
    typer.Option(help="What to do with a column of clashing types: stop, or JSON text."),
]
JsonField = Annotated[
    str | None, typer.Option(help="The field of a JSON document that holds the rows.")
]
DataPath = Annotated[
    Path | None, typer.Option(help="Data whose disk is probed for its speed.", exists=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
ResultAsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the result as Markdown.")]

Matters = Annotated[
    str | None, typer.Option(help="Smallest change that matters, in percent. Default: 1%.")
]

Address = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster: HOST:PORT. Default: the one this node is in."),
]
Workers = Annotated[int, typer.Option(help="Tasks at a time; 0 takes every core there is.", min=0)]
WorkerMemory = Annotated[str, typer.Option(help="What one working process may hold.")]
Work = Annotated[
    str | None,
    typer.Option(
        help="The folder for files between stages, a path or a URL that every node sees. "
        "Default: the output with .work behind it."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Drop what an interrupted run has left, and begin again.")
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
        raise UsageError("--address is of a Ray cluster: add --engine ray")
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


def examples(*commands: str) -> str:
    """What stands below the help of a command."""
    return "\n\n".join(["Examples:", *(f"  fast-axolotl {command}" for command in commands)])


def parse_size(text: str) -> int:
    """``256MiB``, ``1.5 GB`` or a plain number of bytes."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"cannot read {text!r} as a size; write 256MiB or 1GB") from None


def parse_duration(text: str, *, least: float) -> float:
    """``90s``, ``10m`` or ``1.5h`` in seconds."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*([smh])", text.strip().lower())
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else -1.0
    if seconds < least:
        raise UsageError(f"{text!r} is no duration of {least:.0f}s or more; write 90s, 10m or 1h")
    return seconds


def parse_percent(text: str) -> float:
    """``1%``, ``1 %`` or ``1`` as 0.01."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"cannot read {text!r} as a percentage; write 1% or 0.5%")
    return share


def parse_shard(text: str) -> tuple[int, int]:
    """``0/8`` as (0, 8)."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise UsageError(f"cannot read {text!r} as a shard; write 0/8 for the first of 8") from None
    return index, count


def parse_names(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def unused_folder(root: str, name: str) -> Path:
    """``root/name``; with a number behind it where that is there already."""
    folder = Path(root) / name
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    return folder


def say(line: str) -> None:
    """One line of this program beside what a command prints."""
    print(f"fast-axolotl: {line}", file=sys.stderr, flush=True)


def describe_rejected(num_rows: int, rejections: Sequence[Mapping[str, Any]]) -> str:
    """How many rows could not be read, then where and why, line by line."""
    shown = rejections[:_MOST_REJECTIONS]
    lines = [f"{num_rows:,}"]
    lines += [f"{item['path']}, {item['place']}: {item['reason']}" for item in shown]
    if len(rejections) > len(shown):
        lines.append(f"… {len(rejections) - len(shown)} more; --json lists them")
    return "\n".join(lines)
