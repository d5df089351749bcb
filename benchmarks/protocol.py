"""Does the protocol find what is there, and nothing else? ``make bench-protocol``.

The same loop against itself, many times: a change in the figure that decides is a false finding.
Then against itself made 10 % slower: how often is that found? Each time a whole protocol, with real
child processes in alternating order, on a machine as noisy as it is.

``python -m benchmarks.protocol --loop STEPS SLOWER`` is the loop. A reader makes rows of plain
Python objects; a step sums over them and then waits as for a device. ``SLOWER`` is the share of its
own time that every step then spends doing nothing: 0.1 makes the loop 10 % slower, whatever the
machine. The meter writes into the folder that ``fast-axolotl run --measure`` names.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import module_environment
from benchmarks.command import Tell, execute, race_parser
from benchmarks.result import Result, Table, record_table
from fast_axolotl.measure import measure
from fast_axolotl.protocol.plan import plan_commands
from fast_axolotl.protocol.runner import run_protocol

_FIGURE = "samples_per_second"
_MOST_FALSE_SHARE = 0.10
_LEAST_FOUND_SHARE = 0.90
"""Asked for: at most 2 of 20 false findings, at least 9 of 10 found."""
_BATCH_ROWS = 8
_ROW_NUMBERS = 300
_ROUNDS = 10
"""Sums over a batch in one step: with the reader some 1 ms of one core."""
_DEVICE_SECONDS = 0.002


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("protocol", __doc__)
    parser.add_argument("--same", type=int, default=20, help="protocols whose arms are equal")
    parser.add_argument("--different", type=int, default=10, help="protocols with a slower arm")
    parser.add_argument("--slower", type=float, default=0.1, help="by how much it is slower")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of every protocol")
    parser.add_argument("--steps", type=int, default=500, help="steps of every run")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """``same`` protocols of the loop against itself, ``different`` ones against a slower one."""
    begin = time.monotonic()
    trials: list[dict[str, Any]] = []
    for number in range(options.same + options.different):
        kind = "A/A" if number < options.same else "A/B"
        slower = options.slower if kind == "A/B" else 0
        place = folder / f"protocol-{number + 1:02d}"
        trial = _try(kind, options.pairs, options.steps, slower, place)
        trials.append(trial)
        interval = f"{trial['ratio']:.3f} ({trial['low']:.3f} – {trial['high']:.3f})"
        tell(f"{number + 1}: {kind}: {interval} {trial['outcome']}")
    facts = {
        "pairs": options.pairs,
        "steps": options.steps,
        "slower": options.slower,
        "trials": trials,
        "false_findings": sum(trial["is_change"] for trial in trials if trial["kind"] == "A/A"),
        "found": sum(trial["outcome"] == "worse" for trial in trials if trial["kind"] == "A/B"),
        "seconds": time.monotonic() - begin,
    }
    return Result(facts=facts, tables=[_table(facts)])


def _table(facts: dict[str, Any]) -> Table:
    """How often a change was reported, and every trial."""
    trials = facts["trials"]
    same = sum(trial["kind"] == "A/A" for trial in trials)
    return record_table(
        "bench protocol",
        trials,
        {
            "trial": lambda trial: trial["kind"],
            "samples/s, ratio": lambda trial: f"{trial['ratio']:.3f}",
            "95 % interval": lambda trial: f"{trial['low']:.3f} – {trial['high']:.3f}",
            "outcome": lambda trial: trial["outcome"],
            "took": lambda trial: f"{trial['seconds']:.1f} s",
        },
        (
            f"A/A: {facts['false_findings']} of {same} report a change; "
            f"asked for: at most {100 * _MOST_FALSE_SHARE:.0f} %",
            f"A/B, {100 * facts['slower']:.0f} % slower: {facts['found']} of "
            f"{len(trials) - same} find it; asked for: at least {100 * _LEAST_FOUND_SHARE:.0f} %",
            f"{facts['pairs']} pairs of runs of {facts['steps']} steps each; "
            f"{facts['seconds'] / 60:.1f} min",
        ),
    )


def _try(kind: str, pairs: int, steps: int, slower: float, folder: Path) -> dict[str, Any]:
    worker = [sys.executable, "-m", "benchmarks.protocol", "--loop", str(steps)]
    plan = plan_commands(
        shlex.join([*worker, "0"]),
        shlex.join([*worker, str(slower)]),
        pairs=pairs,
        # The figure is of the steady phase, which a first run has, too.
        warmup=0,
    )
    begin = time.monotonic()
    protocol = run_protocol(plan, folder, environment=module_environment())
    cells = [row.cells for row in protocol.matrix.rows if row.name == _FIGURE]
    base, cell = cells[0] if cells else (None, None)
    if cell is None or base is None or cell.low is None:
        tails = [run.log_tail for arm in protocol.arms for run in arm.runs if run.log_tail]
        raise RuntimeError(f"{_FIGURE} was not measured: {tails[:1] or cell}")
    changed = ("better", "worse", "changed")
    return {
        "kind": kind,
        "ratio": cell.ratio,
        "low": cell.low,
        "high": cell.high,
        "outcome": cell.outcome,
        "is_change": cell.outcome in changed,
        "baseline": list(base.values),
        "candidate": list(cell.values),
        "figures_changed": sum(row.cells[1].outcome in changed for row in protocol.matrix.rows),
        "seconds": time.monotonic() - begin,
    }


def loop(steps: str, slower: str) -> None:
    """So many steps, each this share slower."""
    share = float(slower)
    batches = (
        [list(range(step, step + _ROW_NUMBERS)) for _ in range(_BATCH_ROWS)]
        for step in range(int(steps))
    )
    with measure(os.environ["FAST_AXOLOTL_MEASURE"]) as meter:
        begin = time.perf_counter()
        for batch in meter.watch(batches):
            for _ in range(_ROUNDS):
                for row in batch:
                    sum(row)
            time.sleep(_DEVICE_SECONDS)
            now = time.perf_counter()
            # Exact to a microsecond, where a sleep would be late by some fifty.
            while time.perf_counter() < now + share * (now - begin):
                pass
            begin = time.perf_counter()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--loop"]:
        loop(*sys.argv[2:])
    else:
        main()
