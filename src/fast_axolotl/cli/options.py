"""Options that several commands share, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "AsJson",
    "DataPath",
    "Format",
    "Inputs",
    "JsonField",
    "OnConflict",
    "OnError",
    "Split",
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
