"""Runs that are made short of one thing, for real, and what the meter says of them.

The children are ``meter_shortages``. Limits are control groups of Linux where this user may make
them: a memory group with a swap file, a block group that throttles the disk. Where they may not be
made, the scenario says so and is left out, or takes a resource limit instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fast_axolotl.bench.axolotl_runs import child_environment
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run

__all__ = ["SCENARIOS", "run_scenario"]

_GROUPS = Path("/sys/fs/cgroup")
_DISK_BYTES_PER_SECOND = 50 << 20
_MEMORY_BYTES = 96 << 20
_SWAP_BYTES = 512 << 20
_SECONDS = 180

SCENARIOS: Mapping[str, str] = {
    "compute": "compute",
    "tokenise": "data/rate",
    "tokenise-thread": "inconclusive/contradiction",
    "disk": "io",
    "swap": "swap",
    "refused": "killed",
    "slow-loader-rank": "data/rate",
    "slow-compute-rank": "communication/skew",
}
"""What each is made to be."""


def run_scenario(name: str, folder: Path) -> dict[str, Any]:
    """Runs one and compares the verdict."""
    folder.mkdir(parents=True)
    expected = SCENARIOS[name]
    found: dict[str, Any] = {"name": name, "expected": expected, "verdict": None}
    with ExitStack() as stack:
        try:
            join = _PLACES.get(name, _no_place)(stack, folder)
        except OSError as error:
            note = f"left out: {error.strerror}: {error.filename}"
            return {**found, "right": None, "note": note}
        code = _run(_command(name, folder), folder, join)
    summary = summarise(read_run(folder / "run"))
    verdict = summary.verdict
    told = "/".join(filter(None, (verdict.kind, verdict.subtype)))
    if expected == "killed":
        right = code == -signal.SIGKILL and not summary.is_finished
        told = f"{told}, {summary.end_reason}"
    else:
        right = told in (expected, f"{expected}/near")
    return {
        **found,
        "verdict": told,
        "right": right,
        "note": "" if right else "NOT as made: " + verdict.headline,
        "headline": verdict.headline,
        "evidence": list(verdict.evidence),
        "action": verdict.action,
        "stall_fraction": summary.stall_fraction,
        "disk_share": summary.disk_share,
        "swap_in_bytes_per_second": summary.swap_in_bytes_per_second,
        "exposed_communication_fraction": summary.exposed_communication_fraction,
        "end_reason": summary.end_reason,
    }


def _command(name: str, folder: Path) -> list[str]:
    child = ["-m", "fast_axolotl.bench.meter_shortages", name, str(folder)]
    if name.endswith("-rank"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, *launcher, *child]
    if name == "refused":
        measured = ["-m", "fast_axolotl", "run", "--measure", "--output", str(folder / "run")]
        return [sys.executable, *measured, "--", sys.executable, *child]
    return [sys.executable, *child]


def _run(command: Sequence[str], folder: Path, join: Callable[[], None]) -> int:
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_SECONDS,
        check=False,
        preexec_fn=join,
        env={**child_environment(folder, folder), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode and not (folder / "run").exists():
        raise RuntimeError(done.stderr.strip().splitlines()[-1:])
    return done.returncode


def _no_place(stack: ExitStack, folder: Path) -> Callable[[], None]:
    return lambda: None


def _short_memory(stack: ExitStack, folder: Path) -> Callable[[], None]:
    values = {"memory.limit_in_bytes": _MEMORY_BYTES, "memory.swappiness": 100}
    return stack.enter_context(_control_group("memory", values))


def _swapping_memory(stack: ExitStack, folder: Path) -> Callable[[], None]:
    stack.enter_context(_swap_file(folder / "swap"))
    return _short_memory(stack, folder)


def _slow_disk(stack: ExitStack, folder: Path) -> Callable[[], None]:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    limit = {"blkio.throttle.read_bps_device": f"{number} {_DISK_BYTES_PER_SECOND}"}
    return stack.enter_context(_control_group("blkio", limit))


_PLACES: Mapping[str, Callable[[ExitStack, Path], Callable[[], None]]] = {
    "disk": _slow_disk,
    "swap": _swapping_memory,
    "refused": _short_memory,
}


@contextmanager
def _control_group(controller: str, values: Mapping[str, object]) -> Iterator[Callable[[], None]]:
    """A new control group; the callable moves the process that calls it there."""
    group = _GROUPS / controller / f"fast-axolotl-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in values.items():
            (group / name).write_text(str(value))
        yield lambda: _write(group / "cgroup.procs", str(os.getpid()))
    finally:
        group.rmdir()


def _write(path: Path, text: str) -> None:
    path.write_text(text)


@contextmanager
def _swap_file(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _SWAP_BYTES)
    path.chmod(0o600)
    _call("mkswap", str(path))
    _call("swapon", str(path))
    try:
        yield
    finally:
        _call("swapoff", str(path))


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise PermissionError(1, done.stderr.decode().strip() or "refused", command[0])
