"""``fast-axolotl show``: what a record says, the verdict first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fast_axolotl.cli.options import AsJson, examples

__all__ = ["SHOW_EXAMPLES", "show"]

SHOW_EXAMPLES = examples(
    "show fast-axolotl-runs/20300131-120000-axolotl", "show outputs/fast-axolotl-measure --json"
)


def show(
    run: Annotated[Path, typer.Argument(help="The folder of a record.", metavar="RUN")],
    as_json: AsJson = False,
) -> None:
    """Show what bounds a run: the verdict, why, what to do next, and every figure.

    A record is read as far as it goes, so a run that is still going on, or was killed, can be
    shown, too. The record of fast-axolotl prepare shows its rows, stages and nodes.
    """
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.record.folder import JOB_FILE
    from fast_axolotl.record.run_folders import read_training
    from fast_axolotl.report.show import show_summary

    if (run / JOB_FILE).is_file():
        from fast_axolotl.cli.job_progress import summary_table
        from fast_axolotl.cli.job_record import JobRecord

        job = JobRecord.read(run)
        print(to_json(job)) if as_json else summary_table(job)
        return
    record = read_training(run)
    summary = summarise(record)
    if as_json:
        print(to_json(summary))
    else:
        show_summary(summary, record=record)
