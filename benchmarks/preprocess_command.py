"""The whole of ``axolotl preprocess``, as the user sees it.

    python -m benchmarks.preprocess_command

The command in a process of its own, from its start to its end, imports included: stock with
``FAST_AXOLOTL=0``, accelerated behind ``fast-axolotl run --``, in alternating order. Every run has
fresh caches of Hugging Face and its own folder; kernels are compiled before. Each pair is compared:
files, schemas, rows and their order. ``axolotl_driver`` divides the time of the main thread by
stage. Memory is the greatest PSS of the process tree, of 0.1 s samples, over the whole run and by
stage: a page that several processes share counts once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.axolotl_inputs import preprocess_config, write_rows
from benchmarks.axolotl_runs import (
    ANSWERED,
    OURS,
    STOCK,
    AxolotlSession,
    Race,
    open_axolotl_session,
    prepared_difference,
)
from benchmarks.command import Tell, execute, names, race_parser
from benchmarks.result import Case, Goal, Measurement, Result
from fast_axolotl.errors import UsageError

LEAST = {20_000: 2.5, 200_000: 5.0}
"""Rows to the least ratio of the whole process."""

NOTES = (
    "the whole process, imports included",
    "stock is FAST_AXOLOTL=0, accelerated is fast-axolotl run --; alternating order: A B, B A, …",
    "prepared rows, schemas and files are compared after every pair",
    "memory is the greatest PSS of the process tree, sampled every 0.1 s",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("preprocess-command", __doc__)
    parser.add_argument("--rows", type=names, default=["20000", "200000"], help="sizes, by commas")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each arm")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """A case for each number of rows."""
    if options.repeats < 1 or not all(text.isdecimal() and int(text) for text in options.rows):
        raise UsageError("rows and repeats must be at least 1")
    session = open_axolotl_session(folder, 0, options.repeats, tell)
    cases = [_case(replace(session, rows=int(text))) for text in options.rows]
    return Result(cases=cases, notes=NOTES)


def _case(session: AxolotlSession) -> Case:
    rows = session.rows
    data = write_rows(session.folder / f"chat-{rows}.jsonl", rows)
    race = Race(
        name=f"{rows:,} rows",
        command=("axolotl.cli.main", "preprocess"),
        configure=lambda _, place: preprocess_config(session.model, data, place / "prepared"),
        difference=lambda stock, ours: prepared_difference(
            stock.folder / "prepared", ours.folder / "prepared"
        ),
        session=session,
        watch_memory=True,
    )
    race.repeat()
    peaks = {
        arm: [max(sample.pss_bytes for sample in run.memory) for run in runs]
        for arm, runs in race.runs.items()
    }
    case = Case(
        name=f"{rows} rows",
        text="chat rows of 130 tokens, a fifth of them repeated: the whole process",
        rows=rows,
        timings=race.timings(rows, "JSON lines → prepared", lambda run: run.wall_seconds),
        rivals={STOCK: OURS},
        measurements=[
            *(Measurement(name=arm, values={"peak_bytes": max(peaks[arm])}) for arm in peaks),
            *(item for item in race.phases() if item.name != ANSWERED),
        ],
    )
    share = 100 * median(peaks[OURS]) / median(peaks[STOCK])
    goals = [Goal("peak memory, of Axolotl's", 100, "%", share)]
    if rows in LEAST:
        goals.insert(0, case.ratio_goal(OURS, STOCK, LEAST[rows]))
    return replace(case, goals=goals)


if __name__ == "__main__":
    main()
