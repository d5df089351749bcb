"""``fast-axolotl compare``: two records or protocols beside each other, and limits for CI."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["COMPARE_EXAMPLES", "compare"]

COMPARE_EXAMPLES = "\n\n".join(
    [
        "Examples:",
        "  fast-axolotl compare runs/before runs/after",
        "  fast-axolotl compare protocols/workers --markdown",
        "  fast-axolotl compare protocols/main protocols/branch "
        "--fail-if 'tokens_per_second < 0.97' --fail-if 'host_stall_fraction > +0.02'",
    ]
)

_BROKEN = 3
"""Exit code where a limit is broken, apart from 1 (the data) and 2 (how it was called)."""


def compare(
    first: Annotated[Path, typer.Argument(help="A record or a protocol.", metavar="A")],
    second: Annotated[
        Path | None,
        typer.Argument(help="Another; without it, the arms of the protocol A.", metavar="B"),
    ] = None,
    arm: Annotated[
        str | None,
        typer.Option(help="Arm of the protocols; by default the last that both have."),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            help="A limit on the ratio B ÷ A, 'tokens_per_second < 0.97', or with a sign on the "
            "difference B − A, 'host_stall_fraction > +0.02'. May be given several times.",
        ),
    ] = None,
    single: Annotated[
        bool, typer.Option("--single", help="Let two single runs break a limit, noise or not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the result as Markdown.")
    ] = False,
) -> None:
    """Set two records or protocols beside each other; fail where a limit is broken for certain.

    Exit code 3 means that the whole 95 % interval of a figure lies beyond a limit of --fail-if.
    One run each has no interval and breaks no limit, unless --single is given.
    """
    from fast_axolotl.protocol import compare_folders, parse_check
    from fast_axolotl.report.matrix import comparison_markdown, show_comparison

    limits = [parse_check(text) for text in fail_if or ()]
    found = compare_folders(first, second, arm=arm, limits=limits, is_single=single)
    checks = [(check.sentence, check.is_broken) for check in found.checks]
    if as_json:
        print(json.dumps(asdict(found), indent=2, ensure_ascii=False))
    elif as_markdown:
        text = comparison_markdown(
            found.matrix, alarms=found.alarms, notes=found.notes, checks=checks
        )
        print(text, end="")
    else:
        show_comparison(found.matrix, alarms=found.alarms, notes=found.notes, checks=checks)
    if found.is_broken:
        raise typer.Exit(_BROKEN)
