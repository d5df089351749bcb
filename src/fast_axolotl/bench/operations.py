"""``fast-axolotl bench hash``, ``dedupe``, ``pack`` and ``pad``: the cases of one, in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from fast_axolotl.bench import deduping, hashing, packing, padding
from fast_axolotl.bench.contest import AXOLOTL, Session
from fast_axolotl.bench.earlier import EARLIER, EarlierPackage, start_earlier
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import LeftOut, Machine
from fast_axolotl.bench.operation_result import OperationCase, OperationResult
from fast_axolotl.bench.peer_process import PeerError, PeerProcess
from fast_axolotl.bench.reader import scratch_folder
from fast_axolotl.bench.sizes import size_name
from fast_axolotl.bench.warming import warm_up
from fast_axolotl.errors import UsageError

__all__ = ["NOTES", "OPERATIONS", "run_operation_bench"]

NOTES = (
    "answers are compared with ours before anything is timed, by a digest of each column",
    "one warm-up pass each, then interleaved repeats, each the median of as many passes as take "
    "0.2 s; ratios are of medians; what a pass gives is freed outside the timing",
    "kernels are compiled and packages imported before; inputs are in each one's own form before",
    "the earlier package and Axolotl run in processes of their own, timed inside them",
    "memory is that of a fresh process: RssAnon sampled every 2 ms, above what it was before",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    kernels: Sequence[str]
    """How the names of the kernels that it uses begin."""
    cases: Callable[[Sequence[int], Session], Iterator[OperationCase]]


OPERATIONS: Mapping[str, _Operation] = {
    "hash": _Operation(kernels=hashing.KERNELS, cases=hashing.hash_cases),
    "dedupe": _Operation(kernels=deduping.KERNELS, cases=deduping.dedupe_cases),
    "pack": _Operation(kernels=packing.KERNELS, cases=packing.pack_cases),
    "pad": _Operation(kernels=padding.KERNELS, cases=padding.pad_cases),
}

_AXOLOTL_WORKER = Path(__file__).with_name("axolotl_worker.py")


def run_operation_bench(
    operation: str,
    *,
    sizes: Sequence[int],
    repeats: int = 5,
    peer_python: str | None = None,
    work_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> OperationResult:
    """Runs every case of an operation.

    Args:
        operation: One of ``OPERATIONS``.
        sizes: Rows, ascending.
        repeats: Timed passes of each contestant.
        peer_python: The interpreter of an environment with the earlier package.
        work_dir: Inputs are written to a new folder in it, which is removed at the end; ``None``
            takes the system's temporary folder.
        progress: Called with a line before each step.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"no operation is called {operation!r}: {', '.join(OPERATIONS)}")
    if repeats < 1 or not sizes or min(sizes) < 1:
        raise UsageError(f"repeats and sizes must be at least 1, not {repeats} and {list(sizes)}")
    tell = progress or _silent
    chosen = OPERATIONS[operation]
    machine = describe_machine()
    tell("compiling kernels")
    warmth = warm_up(chosen.kernels)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(work_dir))
        session = Session(
            folder=folder,
            repeats=repeats,
            earlier=start_earlier(peer_python, folder, stack),
            axolotl=partial(_start_axolotl, folder, stack, tell),
            progress=tell,
        )
        cases = tuple(chosen.cases(sorted(set(sizes)), session))
    return OperationResult(
        title=operation,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_command(operation, sizes, repeats, peer_python),
        machine=_with_earlier(machine, session.earlier),
        notes=NOTES,
        warm_up=warmth,
        cases=cases,
    )


def _start_axolotl(
    folder: Path, stack: ExitStack, tell: Callable[[str], None]
) -> PeerProcess | LeftOut:
    if find_spec("axolotl") is None:
        return LeftOut(name=AXOLOTL, reason="not installed: axolotl")
    tell("starting Axolotl")
    try:
        return stack.enter_context(PeerProcess(sys.executable, _AXOLOTL_WORKER, folder))
    except PeerError as error:
        return LeftOut(name=AXOLOTL, reason=str(error))


def _with_earlier(machine: Machine, earlier: EarlierPackage | LeftOut) -> Machine:
    if isinstance(earlier, LeftOut):
        return machine
    return replace(machine, versions={**machine.versions, EARLIER: earlier.version})


def _command(operation: str, sizes: Sequence[int], repeats: int, peer_python: str | None) -> str:
    names = ",".join(size_name(size) for size in sizes)
    command = f"fast-axolotl bench {operation} --sizes {names} --repeats {repeats}"
    return command if peer_python is None else f"{command} --peer-python PYTHON"


def _silent(_: str) -> None:
    return None
