"""``fast-axolotl run`` and ``fast-axolotl status``: Axolotl, accelerated, and what that means."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fast_axolotl.cli.parsing import parse_names
from fast_axolotl.errors import UsageError

__all__ = ["RUN_EXAMPLES", "STATUS_EXAMPLES", "run", "status"]

RUN_EXAMPLES = "\n\n".join(
    [
        "Examples:",
        "  fast-axolotl run -- axolotl preprocess config.yml",
        "  fast-axolotl run -- axolotl train config.yml --launcher torchrun",
        "  fast-axolotl run --skip collators,fetch -- axolotl train config.yml",
    ]
)
STATUS_EXAMPLES = "Examples:\n\n  fast-axolotl status\n\n  fast-axolotl status --json"

_Skip = Annotated[
    str | None,
    typer.Option(help="Replacements to leave out, names with commas between: see status."),
]


def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The command with its arguments, after --.", metavar="COMMAND"),
    ],
    skip: _Skip = None,
) -> None:
    """Run a command with every Axolotl in its process tree accelerated, results unchanged.

    Nothing has to be edited: it survives accelerate launch, torchrun and spawned workers.

    One line tells what is replaced, and what is not and why; another, at the end, what was used.

    FAST_AXOLOTL=0 in the environment turns everything off.
    """
    from fast_axolotl.integrations.launch import find_program, launch_environment, status_line

    names = parse_names(skip) if skip else ()
    _check_names(names)
    environment = launch_environment(os.environ, names)
    program = find_program(command[0], environment)
    os.environ.update(environment)
    print(f"fast-axolotl: {status_line(environment)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # The command takes this process over: signals and the exit code are its own.
    os.execve(program, command, environment)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show what would be replaced in the Axolotl that is installed, without importing it."""
    from fast_axolotl.integrations.axolotl import check
    from fast_axolotl.integrations.launch import axolotl_version, status_line
    from fast_axolotl.report.terminal import show_table

    version = axolotl_version()
    patches = check() if version is not None else ()
    if as_json:
        found = {"axolotl": version, "patches": [patch._asdict() for patch in patches]}
        print(json.dumps(found, indent=2))
        return
    if patches:
        rows = [
            [item.name, item.target.removeprefix("axolotl."), item.state, item.reason]
            for item in patches
        ]
        show_table(["name", "function of Axolotl", "state", "reason"], rows)
    print(status_line(os.environ, patches if version is not None else None))


def _check_names(names: Sequence[str]) -> None:
    from fast_axolotl.integrations.axolotl_patches import REPLACEMENTS

    known = tuple(dict.fromkeys(item.name for item in REPLACEMENTS))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no replacement is named {unknown[0]!r}; there are {', '.join(known)}")
