"""Processes of our own, and the memory of a call or of a whole tree of processes.

``run_child`` starts a module of this folder and gives back the JSON that it prints. A call is
measured in a fresh process, where nothing that ran before can hide it: ``python -m
benchmarks.children call MODULE NAME ROWS`` prepares one entry of that module's
``memory_entries(rows)``, warms up, notes its memory, and makes the call.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import Goal, Measurement, most_goal
from fast_axolotl.cli.race import child_environment
from fast_axolotl.cli.resident_peak import ResidentPeak

ROOT = Path(__file__).parents[1]
MOST_PEAK_OVER_OUTPUT = 2.0
_TIMEOUT_SECONDS = 1800
_WARM_UP_ROWS = 200
_TREE_SECONDS = 0.1
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")
_OFFLINE = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",
}


class RunError(Exception):
    """A process ended badly; never leaves a race."""


def module_environment(**values: str) -> dict[str, str]:
    """With this folder and our package importable, wherever the process runs."""
    inherited = child_environment(ROOT)
    inherited.pop("FAST_AXOLOTL", None)
    return {**inherited, **values}


def offline_environment(folder: Path, cache: Path) -> dict[str, str]:
    """For Axolotl and trainers: offline, on the processor, with these caches."""
    caches = {"HF_HOME": str(folder / "huggingface"), "NUMBA_CACHE_DIR": str(cache)}
    return module_environment(**_OFFLINE, **caches)


def run_child(
    module: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_SECONDS,
) -> str:
    """What ``python -m MODULE ARGUMENTS…`` prints; raises ``RunError`` with its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=env or module_environment(),
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"not done after {timeout:.0f} s") from None
    if done.returncode:
        raise RunError(last_error(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def last_error(text: str) -> str:
    """Why a process failed: the last line that looks like an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[-1][-200:]


def peak_of_call(module: str, name: str, rows: int) -> Measurement:
    """The peak of one entry's pass, beside the size of what it gives."""
    try:
        found = json.loads(run_child(__name__, "call", module, name, str(rows)))
    except RunError as error:
        return Measurement(name=name, reason=str(error))
    peak, size = found["peak_bytes"], found["output_bytes"]
    share = None if peak is None else peak / size
    return Measurement(
        name=name,
        values={"peak_bytes": peak, "output_bytes": size, "peak_over_output": share},
        reason=found["reason"],
    )


def peak_goal(measurement: Measurement) -> Goal:
    """Memory at most so many times what is given."""
    share = measurement.values.get("peak_over_output")
    text = f"memory over output, {measurement.name}"
    return most_goal(text, MOST_PEAK_OVER_OUTPUT, "×", share, measurement.reason)


def output_bytes(output: Any) -> int:
    """What an answer takes: of lists the lists alone, since they share their integers."""
    if isinstance(output, Mapping):
        return sum(output_bytes(column) for column in output.values())
    if hasattr(output, "nbytes"):
        return int(output.nbytes)
    return sys.getsizeof(output) + sum(map(sys.getsizeof, output))


def warm_up(kernels: Sequence[str]) -> dict[str, Any]:
    """Compiles, or loads, the kernels whose names begin so, and tells what that took."""
    start = time.perf_counter()
    from fast_axolotl.kernels.jit import all_kernels

    found = [kernel for kernel in all_kernels() if kernel.name.startswith(tuple(kernels))]
    imported = time.perf_counter() - start
    seconds = {}
    for kernel in found:
        start = time.perf_counter()
        kernel.compile()
        seconds[kernel.name] = time.perf_counter() - start
    return {"import_seconds": imported, "compile_seconds": seconds}


@dataclass(frozen=True, slots=True)
class TreeSample:
    """A process and its descendants at one moment."""

    at: float
    """Seconds since the epoch."""
    pss_bytes: int
    anonymous_bytes: int


class TreeMemory:
    """``with TreeMemory(pid) as memory:`` and then ``memory.samples``; none without ``/proc``.

    The figure is PSS: a page that several processes share counts for each as its share, so the sum
    over the tree counts it once. Anonymous PSS leaves mapped files out, which belong to the page
    cache. It is sampled, so a short peak can be missed.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._proc = proc
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[TreeSample] = []

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> TreeSample | None:
        """The tree now; ``None`` where nothing of it can be read."""
        children: dict[int, list[int]] = {}
        for status in self._proc.glob("[0-9]*/stat"):
            try:
                text = status.read_text()
            except OSError:
                continue
            # The name, in parentheses, may hold anything.
            parent = int(text.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
        total = anonymous = 0
        tree = [self._pid]
        for pid in tree:
            tree += children.get(pid, [])
            try:
                lines = (self._proc / str(pid) / "smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            fields = {line.split(":")[0]: line.split() for line in lines if line.startswith("Pss")}
            if "Pss" in fields:
                total += int(fields["Pss"][1]) * 1024
                anonymous += int(fields.get("Pss_Anon", fields["Pss"])[1]) * 1024
        return TreeSample(time.time(), total, anonymous) if total else None

    def _run(self) -> None:
        while not self._stop.wait(_TREE_SECONDS):
            sample = self.take()
            if sample is not None:
                self.samples.append(sample)


def main(task: str, *arguments: str) -> None:
    """The child's side: measures and prints."""
    if task == "call":
        module, name, rows = arguments
        make = importlib.import_module(module).memory_entries
        for count in (_WARM_UP_ROWS, int(rows)):
            entry = next(entry for entry in make(count) if entry.name == name)
            run = entry.prepare()
            with ResidentPeak() as memory:
                answer = run()
        found = {"output_bytes": output_bytes(answer)}
    else:
        from fast_axolotl.dedupe.files import dedupe_files

        source, target, budget = arguments
        warm_up(("rowhash.", "digests."))
        with ResidentPeak() as memory:
            summary = dedupe_files(source, target, memory_budget=int(budget))
        found = asdict(summary)
    print(json.dumps({**found, "peak_bytes": memory.above_start_bytes, "reason": memory.reason}))


if __name__ == "__main__":
    main(*sys.argv[1:])
