"""``fast-axolotl show``: what limits a recorded run, on one screen or with every figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fast_axolotl.cli.options import AsJson, examples, latest_run

SHOW_EXAMPLES = examples(
    "show",
    "show fast-axolotl-runs/20300131-120000-axolotl --all",
    "show outputs/fast-axolotl-measure --json",
)


def show(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="The folder of a record. Default: the latest in fast-axolotl-runs/.",
            metavar="[RUN]",
        ),
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Print every figure, all settings and the environment.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what limits a run: the verdict, the reasons, the advice and the main figures.

    It also works while the run is still going on, and after the run was killed.
    """
    from fast_axolotl.cli.report import read_report_run
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.report.runs import run_document, show_short_summary
    from fast_axolotl.report.terminal import print_document

    run = run or latest_run()
    shown = read_report_run(run, "")
    if as_json:
        print(to_json(shown.summary))
    elif is_all:
        print_document(run_document(shown))
    else:
        show_short_summary(shown.summary, shown.record)
