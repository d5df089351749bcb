"""Options, parsing and printing that several commands share."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from string import ascii_letters
from typing import Annotated, Any

from typer import Argument, Option

from fast_axolotl.errors import UsageError
from fast_axolotl.record.folder import next_folder
from fast_axolotl.record.units import format_bytes, format_duration, format_seconds, format_share
from fast_axolotl.report.document import Document, Table

Inputs = Annotated[list[str], Argument(help="Files, folders, globs or URIs, read in this order.")]
DataPath = Annotated[
    Path | None, Option(help="Training data, to measure the read speed of its disk.", exists=True)
]
Columns = Annotated[str | None, Option(help="Columns (comma-separated). Default: all.")]
RunsFolder = Annotated[
    Path | None, Option("--output", "-o", help="Folder of the runs. An interrupted one continues.")
]
ShowAll = Annotated[bool, Option("--all", help="Print every row and note.")]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]

Matters = Annotated[str | None, Option(help="Smallest change that counts. Default: 1%.")]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
_OPTIONS = "columns|format|infer|memory|memory_budget|on_error|overwrite|split"
_ARGUMENT = re.compile(
    rf"\b({_OPTIONS})(?:=[\"'](\w+)[\"']|=True(?: \(--\w+\))?|(?= must )|\b(?<=get|ror))"
)
"""An argument of Python that is an option here: with a value, or by its name alone."""

_MOST = 1_000_000
_MOST_LINES = 20
"""Of a list, such as the rows that could not be read."""


def parse_amount(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    """A number above 0 with one of these units, in any case; ``what`` is for the error."""
    number = text.strip().rstrip(f"{ascii_letters} ")
    try:
        amount = float(number) * units[text.strip()[len(number) :].strip().lower()]
    except (ValueError, KeyError):
        amount = 0.0
    if not 0 < amount < math.inf:
        raise UsageError(f"cannot read {what}; write {example}")
    return amount


def parse_size(text: str) -> int:
    """``256MiB``, ``1.5 GB`` or a plain number of bytes."""
    return int(parse_amount(text, _UNITS, f"{text!r} as a size", "256MiB or 1GB"))


def parse_counts(option: str, text: str) -> list[int]:
    """Comma-separated whole numbers above 0."""
    counts = [int(name) if name.isdecimal() else 0 for name in parse_names(text)]
    if not counts or min(counts) < 1 or max(counts) > _MOST:
        raise UsageError(f"cannot read {option} {text!r}; write 8,16,64; at most {_MOST:,}")
    return counts


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


def unused_folder(root: str, name: str = "") -> Path:
    """``root/TIME-NAME``; with a number behind it where that is there already."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}{name and '-'}{name}"
    folders = (next_folder(Path(root, name), number) for number in count(1))
    return next(folder for folder in folders if not folder.exists())


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


def print_result(result: Any, document: Document, *, as_json: bool) -> None:
    """What a command found: as JSON, or as the document that is made of it."""
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.report.terminal import print_document

    print(to_json(result)) if as_json else print_document(document)


def summary_document(found: Mapping[str, Any], *before: Table, title: str = "") -> Document:
    """The values of a summary by their names, each in its unit, without those that are empty."""
    rows = []
    for name, value in found.items():
        if value is not None and value not in ("", [], (), {}):
            label = re.sub(r"^num_|_(bytes|seconds)$", "", name.replace("_per_second", "/s"))
            rows.append((label.replace("_", " "), _in_words(name, value)))
    return Document(title=title, blocks=[*before, Table(rows=rows)])


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_in_words('', item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        lines = [_describe_rejection(one) if isinstance(one, dict) else one for one in value]
        more = [f"… {len(lines) - _MOST_LINES} more; --json lists them"]
        return "\n".join([*lines[:_MOST_LINES], *(more if len(lines) > _MOST_LINES else [])])
    if value is None or isinstance(value, str):
        return value or "–"
    if name.endswith("share"):
        return format_share(value)
    if "bytes" in name:
        return format_bytes(value) + ("/s" if name.endswith("_per_second") else "")
    if name.endswith("seconds"):
        return format_seconds(value) if value < 60 else format_duration(value)
    return f"{value:,.0f}"


def _describe_rejection(rejection: Mapping[str, Any]) -> str:
    """Where and why. How to skip a row is left out, since that was done."""
    reason = re.sub(r"; [^;]*on_error=.*", "", rejection["reason"])
    unknown = " (an unknown number of rows)" if rejection["num_rows"] is None else ""
    return f"{rejection['path']}, {rejection['place']}: {reason}{unknown}"


def name_options(message: str) -> str:
    """A message about arguments of Python in terms of the command line.

    >>> name_options('pass on_error="skip" or overwrite=True')
    'pass --on-error skip or --overwrite'
    """

    return _ARGUMENT.sub(
        lambda found: f"--{found[1].replace('_', '-')} {found[2] or ''}".rstrip(), message
    )
