"""How often does a protocol take chance for a change? ``make bench-false-findings``.

By simulation, without any run: the rule of ``protocol`` (its order of runs, its looks at the pairs,
its estimate) on made-up runs that differ by 1.5 % for no reason, and by more in each of these ways:
the next run resembles the last, the machine slows down, some runs are outliers, every fourth run is
disturbed. Beside it the rule of earlier versions: five pairs, A B B A, and the plain mean.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command import Tell, execute, race_parser
from benchmarks.result import Result, record_table
from fast_axolotl.protocol.plan import PAIRS, Plan, plan_commands
from fast_axolotl.protocol.statistics import LEAST_PAIRS, LEVEL, compare_runs, spend_at

SPREAD = 0.015
"""Of the logarithm of a run's time."""
CHANGES = {"no change": 1.0, "5 %": 1.05, "20 %": 1.2, "factor 2": 2.0}
_EARLIER_PAIRS = 5
_SEED = 7

Noise = Callable[[random.Random, int], list[float]]


def independent(chosen: random.Random, count: int) -> list[float]:
    return [chosen.gauss(0, SPREAD) for _ in range(count)]


def alike(chosen: random.Random, count: int) -> list[float]:
    """The first order of autocorrelation, 0.7."""
    values = independent(chosen, count)
    for at in range(1, count):
        values[at] = 0.7 * values[at - 1] + math.sqrt(1 - 0.7**2) * values[at]
    return values


def drifting(chosen: random.Random, count: int) -> list[float]:
    return [0.01 * at + value for at, value in enumerate(independent(chosen, count))]


def with_outliers(chosen: random.Random, count: int) -> list[float]:
    slow = math.log(1.3)
    return [v + slow * (chosen.random() < 0.1) for v in independent(chosen, count)]


def periodic(chosen: random.Random, count: int) -> list[float]:
    begin = chosen.randrange(4)
    return [v + 0.04 * ((at + begin) % 4 == 0) for at, v in enumerate(independent(chosen, count))]


NOISES: dict[str, Noise] = {
    "independent runs": independent,
    "each run like the last, AR(1) 0.7": alike,
    "drift of 1 % per run": drifting,
    "10 % of runs 1.3 times slower": with_outliers,
    "every fourth run 4 % slower": periodic,
}


def simulate(noise: Noise, change: float, plan: Plan, seed: int) -> tuple[bool, int]:
    """Whether a made-up protocol calls a change, and after how many pairs."""
    turns = plan.turns()
    runs = {arm.name: [0.0] * plan.pairs for arm in plan.arms}
    for turn, log in zip(turns, noise(random.Random(seed), len(turns)), strict=True):
        runs[turn.arm.name][turn.pair] = math.exp(log)
    baseline, candidate = runs.values()
    candidate = [change * value for value in candidate]
    looks = [plan.pairs] if plan.seed is None else range(LEAST_PAIRS, plan.pairs + 1)
    for pairs in looks:
        spend = 1.0 if plan.seed is None else spend_at(pairs, plan.pairs)
        found = compare_runs(baseline[:pairs], candidate[:pairs], spend=spend)
        if found.p_value is not None and found.p_value <= LEVEL:
            return True, pairs
    return False, plan.pairs


def count(noise: Noise, change: float, *, protocols: int, pairs: int = PAIRS) -> dict[str, float]:
    """The share of protocols that call a change, and their pairs on average."""
    plans = (
        plan_commands("a", "b", pairs=pairs, warmup=0, seed=_SEED + at) for at in range(protocols)
    )
    results = [simulate(noise, change, plan, at) for at, plan in enumerate(plans)]
    return {"share": fmean(found for found, _ in results), "pairs": fmean(n for _, n in results)}


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every kind of noise with every change, by the rule of today and by the earlier one."""
    rows: list[dict[str, Any]] = []
    earlier = plan_commands("a", "b", pairs=_EARLIER_PAIRS, warmup=0)
    for name, noise in NOISES.items():
        row: dict[str, Any] = {"noise": name}
        for label, change in CHANGES.items():
            row[label] = count(noise, change, protocols=options.protocols, pairs=options.pairs)
            before = [simulate(noise, change, earlier, at)[0] for at in range(options.protocols)]
            row[label]["earlier"] = fmean(before)
        rows.append(row)
        tell(f"{name}: {100 * row['no change']['share']:.1f} % false")

    def show(label: str) -> Callable[[dict[str, Any]], str]:
        def text(row: dict[str, Any]) -> str:
            cell = row[label]
            return (
                f"{100 * cell['share']:.1f} % ({cell['pairs']:.1f}); {100 * cell['earlier']:.1f} %"
            )

        return text

    note = "called a change (pairs on average); with five pairs, A B B A, and the plain mean"
    columns = {"runs": lambda row: row["noise"], **{label: show(label) for label in CHANGES}}
    facts = {"protocols": options.protocols, "pairs": options.pairs, "seed": _SEED, "rows": rows}
    return Result(
        facts=facts, tables=[record_table("bench false-findings", rows, columns, (note,))]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("false-findings", __doc__)
    parser.add_argument("--protocols", type=int, default=10_000, help="simulated for each figure")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="at most, of every protocol")
    execute(parser, run, arguments)


if __name__ == "__main__":
    main()
