"""Memory of one call in a fresh process, where nothing that ran before can hide it.

Run as ``python -m fast_axolotl.bench.peaks call MODULE NAME ROWS`` or ``… peaks files INPUT OUTPUT
BUDGET``, it makes the input, warms up, notes its memory, makes the call, and prints figures as
JSON. ``MODULE`` is one of this package that has ``memory_entries(rows)``.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fast_axolotl.bench.goals import most_goal
from fast_axolotl.bench.matrix import Goal
from fast_axolotl.bench.operation_result import Measurement
from fast_axolotl.bench.resident import ResidentPeak

__all__ = ["dedupe_in_child", "main", "output_bytes", "peak_goal", "peak_of_call"]

_TIMEOUT_SECONDS = 1800
_WARM_UP_ROWS = 200


def peak_of_call(module: str, name: str, rows: int) -> Measurement:
    """The peak of one entry's pass, beside the size of what it gives."""
    found = _run_child("call", module, name, str(rows))
    if isinstance(found, str):
        return Measurement(name=name, values={}, reason=found)
    peak, size = found["peak_bytes"], found["output_bytes"]
    share = None if peak is None else peak / size
    return Measurement(
        name=name,
        values={"peak_bytes": peak, "output_bytes": size, "peak_over_output": share},
        reason=found["reason"],
    )


def peak_goal(measurement: Measurement, most: float) -> Goal:
    """Memory at most so many times what is given."""
    share = measurement.values.get("peak_over_output")
    return most_goal(
        f"memory over output, {measurement.name}", most, "×", share, measurement.reason
    )


def dedupe_in_child(source: Path, target: Path, budget: int) -> Mapping[str, Any] | str:
    """The summary of ``dedupe_files`` with ``peak_bytes``; or why there is none."""
    return _run_child("files", str(source), str(target), str(budget))


def output_bytes(output: Any) -> int:
    """What an answer takes: of lists the lists alone, since they share their integers."""
    if isinstance(output, Mapping):
        return sum(output_bytes(column) for column in output.values())
    if hasattr(output, "nbytes"):
        return int(output.nbytes)
    return sys.getsizeof(output) + sum(map(sys.getsizeof, output))


def _run_child(*arguments: str) -> Mapping[str, Any] | str:
    command: Sequence[str] = (sys.executable, "-m", "fast_axolotl.bench.peaks", *arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_TIMEOUT_SECONDS} s"
    except subprocess.CalledProcessError as error:
        lines: list[str] = error.stderr.strip().splitlines()
        return (lines or [f"exit code {error.returncode}"])[-1][:200]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(task: str, *arguments: str) -> None:
    """Measures and prints."""
    found = _measure_call(*arguments) if task == "call" else _measure_files(*arguments)
    print(json.dumps(found))


def _measure_call(module: str, name: str, rows: str) -> dict[str, Any]:
    make = importlib.import_module(module).memory_entries
    for count in (_WARM_UP_ROWS, int(rows)):
        entry = next(entry for entry in make(count) if entry.name == name)
        run = entry.prepare()
        with ResidentPeak() as memory:
            answer = run()
    return {
        "peak_bytes": memory.above_start_bytes,
        "output_bytes": output_bytes(answer),
        "reason": memory.reason,
    }


def _measure_files(source: str, target: str, budget: str) -> dict[str, Any]:
    from fast_axolotl.bench.warming import warm_up
    from fast_axolotl.dedupe.files import dedupe_files

    warm_up(("rowhash.", "digests."))
    with ResidentPeak() as memory:
        summary = dedupe_files(source, target, memory_budget=int(budget))
    return {**asdict(summary), "peak_bytes": memory.above_start_bytes, "reason": memory.reason}


if __name__ == "__main__":
    main(*sys.argv[1:])
