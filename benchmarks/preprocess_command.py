"""The whole of ``axolotl preprocess``, as the user sees it.

    python -m benchmarks.preprocess_command

The console script in a process of its own, from its start to its end, imports included: stock with
``FAST_AXOLOTL=0``, accelerated behind ``fast-axolotl run --``, in alternating order. Every run has
fresh caches of Hugging Face and its own folder; kernels are compiled before. Each pair is compared:
files, schemas, rows and their order. Memory is the greatest PSS of the process tree, of 0.1 s
samples: a page that several processes share counts once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.axolotl_inputs import preprocess_config, write_config, write_rows
from benchmarks.axolotl_runs import OURS, STOCK, by_turns, prepared_difference, run_watched
from benchmarks.children import offline_environment, run_child
from benchmarks.command import Tell, execute, names, race_parser
from benchmarks.result import MEGABYTE, Case, Goal, Measurement, Result, Timing
from fast_axolotl.errors import UsageError

LEAST = {20_000: 2.5, 200_000: 5.0}
"""Rows to the least ratio of the whole process."""

NOTES = (
    "the whole process, imports included, as the console script starts it",
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
    cache, model = folder / "kernels", folder / "model"
    environment = offline_environment(folder, cache)
    tell("compiling kernels, making the model")
    run_child("fast_axolotl", "warmup", "--json", env=environment)
    run_child("benchmarks.axolotl", "--model", str(model), env=environment)
    sizes = [int(text) for text in options.rows]
    cases = [_case(folder, cache, model, size, options.repeats, tell) for size in sizes]
    return Result(cases=cases, notes=NOTES)


def _case(folder: Path, cache: Path, model: Path, rows: int, repeats: int, tell: Tell) -> Case:
    data = write_rows(folder / f"chat-{rows}.jsonl", rows)
    seconds: dict[str, list[float]] = {STOCK: [], OURS: []}
    peaks: dict[str, list[int]] = {STOCK: [], OURS: []}
    reason: str | None = None
    for turn, (arm, repeat) in enumerate(by_turns(repeats)):
        place = folder / arm
        place.mkdir()
        wall, peak = _run(arm, place, cache, model, data)
        tell(f"{rows:,} rows, repeat {repeat + 1}, {arm}: {wall:.1f} s, {peak / MEGABYTE:,.0f} MB")
        seconds[arm].append(wall)
        peaks[arm].append(peak)
        if turn % 2:
            both = [folder / name / "prepared" for name in (STOCK, OURS)]
            reason = reason or prepared_difference(*both)
            for name in (STOCK, OURS):
                shutil.rmtree(folder / name)
    timings = [
        Timing(
            name=arm,
            output="JSON lines → prepared",
            rows=rows,
            seconds=tuple(seconds[arm]),
            reason=reason if arm == OURS else None,
        )
        for arm in (OURS, STOCK)
    ]
    case = Case(
        name=f"{rows} rows",
        text="chat rows of 130 tokens, a fifth of them repeated: the whole process",
        rows=rows,
        timings=timings,
        rivals={STOCK: OURS},
        measurements=[
            Measurement(name=arm, values={"peak_bytes": max(found)}) for arm, found in peaks.items()
        ],
    )
    share = 100 * median(peaks[OURS]) / median(peaks[STOCK])
    goals = [Goal("peak memory, of Axolotl's", 100, "%", share)]
    if rows in LEAST:
        goals.insert(0, case.ratio_goal(OURS, STOCK, LEAST[rows]))
    return replace(case, goals=goals)


def _run(arm: str, place: Path, cache: Path, model: Path, data: Path) -> tuple[float, int]:
    """Seconds and greatest memory of one command."""
    environment = offline_environment(place, cache)
    config = write_config(preprocess_config(model, data, place / "prepared"), place / "config.yml")
    command = [str(Path(sys.executable).with_name("axolotl")), "preprocess", str(config)]
    if arm == STOCK:
        environment["FAST_AXOLOTL"] = "0"
    else:
        command = [sys.executable, "-m", "fast_axolotl", "run", "--", *command]
    wall, samples, _ = run_watched(command, env=environment, folder=place)
    return wall, max(sample.pss_bytes for sample in samples)


if __name__ == "__main__":
    main()
