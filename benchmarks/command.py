"""What every race does around itself: options, the machine, a scratch folder, saving, printing.

Needs the standard library alone: ``meter_gpu`` runs where nothing else of ours is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import Result, require_new, result_tables
from fast_axolotl import __version__
from fast_axolotl.errors import FastAxolotlError, UsageError
from fast_axolotl.system import describe

Tell = Callable[[str], None]
Run = Callable[[argparse.Namespace, Path, Tell], Result]

_PEERS = ("datasets", "polars", "duckdb", "torch", "transformers", "accelerate", "axolotl")


def race_parser(title: str, text: str | None) -> argparse.ArgumentParser:
    """The options that every race has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{title.replace('-', '_')}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work-dir", type=Path, help="where data is generated; temporary if none")
    parser.add_argument("-o", "--output", type=Path, help="write the result to this JSON file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(title=title)
    return parser


def names(text: str) -> list[str]:
    """``a,b`` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def check_names(what: str, chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    """The chosen ones in the order of the known ones; all of them where none is chosen."""
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UsageError(f"no {what} is called {unknown[0]!r}; choose from {', '.join(known)}")
    return [name for name in known if not chosen or name in chosen]


def execute(
    parser: argparse.ArgumentParser, run: Run, arguments: Sequence[str] | None = None
) -> None:
    """Runs a race, saves and prints its result; a mistake of the caller is one line."""
    options = parser.parse_args(arguments)
    try:
        if options.output is not None:
            require_new(options.output)
        if options.work_dir is not None:
            options.work_dir.mkdir(parents=True, exist_ok=True)
        machine = describe_machine()
        with TemporaryDirectory(
            prefix="fast-axolotl-bench-", dir=options.work_dir, ignore_cleanup_errors=True
        ) as folder:
            tell = partial(print, file=sys.stderr, flush=True)
            result = run(options, Path(folder).absolute(), tell)
    except FastAxolotlError as error:
        parser.error(str(error))
    machine["versions"] |= result.versions
    result = replace(
        result,
        title=options.title,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_command(parser, options),
        machine=machine,
    )
    if options.output is not None:
        result.save(options.output)
    if options.json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
        return
    for table in result_tables(result):
        try:
            from fast_axolotl.report.document import Bullets, Document
            from fast_axolotl.report.document import Table as Shown
            from fast_axolotl.report.terminal import print_document
        except ImportError:
            # A machine that has a GPU and torch, and nothing of ours installed.
            lines = (" | ".join(cells) for cells in (table.header, *table.rows))
            print("\n".join((table.title, *lines, *table.notes)))
        else:
            shown = Shown(header=table.header, rows=table.rows)
            print_document(Document(title=table.title, blocks=[shown, Bullets(table.notes, True)]))


def describe_machine() -> dict[str, Any]:
    """This machine, as far as it says. Nothing that names it."""
    found = describe()
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = None
    versions = {"fast-axolotl": __version__}
    for name in ("numpy", "numba", "pyarrow", *_PEERS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        **{key: found.get(key) for key in ("cpu", "cores", "memory_bytes", "system")},
        "python": platform.python_version(),
        "versions": versions,
        "load_average": load,
    }


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """What reproduces the figures: every option but where things lie."""
    parts = [parser.prog]
    for name, value in vars(options).items():
        if name in ("title", "work_dir", "output", "json") or value in (None, (), []):
            continue
        if isinstance(value, bool):
            parts += [f"--{name}"] * value
            continue
        text = {"peer_python": "PYTHON", "keep": "FILE"}.get(name, value)
        text = ",".join(map(str, text)) if isinstance(text, list | tuple) else str(text)
        parts.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    return " ".join(parts)
