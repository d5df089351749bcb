"""``fast-axolotl bench protocol``: does the protocol find what is there, and nothing else?

The same loop against itself, many times: a change in the figure that decides is a false finding.
Then against itself made 10 % slower: how often is that found? Each time a whole protocol, with real
child processes by turns, on a machine as noisy as it is.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import Machine, Table, machine_notes, save_json
from fast_axolotl.bench.reader import scratch_folder
from fast_axolotl.protocol import plan_commands, run_protocol
from fast_axolotl.protocol.matrix import find_cell
from fast_axolotl.record.protocol_result import ProtocolResult

__all__ = ["ProtocolBenchResult", "protocol_bench_tables", "run_protocol_bench"]

_FIGURE = "samples_per_second"
_SLOWER = 0.10
_MOST_FALSE_SHARE = 0.10
_LEAST_FOUND_SHARE = 0.90
"""Asked for: at most 2 of 20 false findings, at least 9 of 10 found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolBenchResult:
    """Every protocol that was run, and how often each kind reported a change."""

    machine: Machine
    date: str
    command: str
    pairs: int
    steps: int
    slower: float
    trials: tuple[dict[str, Any], ...]
    """``kind`` (A/A or A/B), ratio, low, high, outcome, the runs' values, seconds."""
    false_findings: int
    """A/A that reported a change."""
    found: int
    """A/B that reported the slow-down as worse."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        save_json(self.to_json(), path)


def run_protocol_bench(
    *,
    same: int = 20,
    different: int = 10,
    pairs: int = 5,
    steps: int = 500,
    slower: float = _SLOWER,
    work_dir: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> ProtocolBenchResult:
    """``same`` protocols of the loop against itself, ``different`` ones against a slower one."""
    machine, begin = describe_machine(), time.monotonic()
    trials: list[dict[str, Any]] = []
    with scratch_folder(work_dir) as folder:
        for number in range(same + different):
            kind = "A/A" if number < same else "A/B"
            trial = _try(kind, pairs, steps, slower, folder / f"protocol-{number + 1:02d}")
            trials.append(trial)
            progress(f"{number + 1} of {same + different}: {kind}: {_in_words(trial)}")
    return ProtocolBenchResult(
        machine=machine,
        date=datetime.now(timezone.utc).date().isoformat(),
        command=f"fast-axolotl bench protocol --same {same} --different {different} "
        f"--pairs {pairs} --steps {steps}",
        pairs=pairs,
        steps=steps,
        slower=slower,
        trials=tuple(trials),
        false_findings=sum(one["is_change"] for one in trials if one["kind"] == "A/A"),
        found=sum(one["outcome"] == "worse" for one in trials if one["kind"] == "A/B"),
        seconds=time.monotonic() - begin,
    )


def protocol_bench_tables(result: ProtocolBenchResult) -> list[Table]:
    """How often a change was reported, and every trial."""
    rows = tuple(
        (
            one["kind"],
            f"{one['ratio']:.3f}",
            f"{one['low']:.3f} – {one['high']:.3f}",
            one["outcome"],
            f"{one['seconds']:.1f} s",
        )
        for one in result.trials
    )
    same = [one for one in result.trials if one["kind"] == "A/A"]
    other = [one for one in result.trials if one["kind"] == "A/B"]
    notes = (
        f"A/A: {result.false_findings} of {len(same)} report a change; "
        f"asked for: at most {100 * _MOST_FALSE_SHARE:.0f} %",
        f"A/B, {100 * result.slower:.0f} % slower: {result.found} of {len(other)} find it; "
        f"asked for: at least {100 * _LEAST_FOUND_SHARE:.0f} %",
        f"{result.pairs} pairs of runs of {result.steps} steps each; "
        f"{result.seconds / 60:.1f} min; {result.date}: {result.command}",
        *machine_notes(result.machine),
    )
    header = ("trial", "samples/s, ratio", "95 % interval", "outcome", "took")
    return [Table(title="bench protocol", header=header, rows=rows, notes=notes)]


def _try(kind: str, pairs: int, steps: int, slower: float, folder: Path) -> dict[str, Any]:
    worker = [sys.executable, "-m", "fast_axolotl.bench.protocol_loop", str(steps)]
    plan = plan_commands(
        shlex.join([*worker, "0"]),
        shlex.join([*worker, str(slower if kind == "A/B" else 0)]),
        pairs=pairs,
        # The figure is of the steady phase, which a first run has, too.
        warmup=0,
    )
    begin = time.monotonic()
    protocol = run_protocol(plan, folder, environment=os.environ)
    return {"kind": kind, **_outcome(protocol), "seconds": time.monotonic() - begin}


def _outcome(protocol: ProtocolResult) -> dict[str, Any]:
    cell = find_cell(protocol.matrix, _FIGURE, "candidate")
    base = find_cell(protocol.matrix, _FIGURE, "baseline")
    if cell is None or base is None or cell.low is None:
        tails = [run.log_tail for arm in protocol.arms for run in arm.runs if run.log_tail]
        raise RuntimeError(f"{_FIGURE} was not measured: {tails[:1] or cell}")
    return {
        "ratio": cell.ratio,
        "low": cell.low,
        "high": cell.high,
        "outcome": cell.outcome,
        "is_change": cell.outcome != "no detectable change",
        "baseline": list(base.values),
        "candidate": list(cell.values),
        "figures_changed": sum(
            row.cells[1].outcome in ("better", "worse", "changed") for row in protocol.matrix.rows
        ),
    }


def _in_words(trial: dict[str, Any]) -> str:
    return f"{trial['ratio']:.3f} ({trial['low']:.3f} – {trial['high']:.3f}) {trial['outcome']}"
