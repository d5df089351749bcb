"""Puts a meter together and starts it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fast_axolotl.errors import UsageError
from fast_axolotl.measure.events import DeviceEvents, find_events
from fast_axolotl.measure.journal import Journal
from fast_axolotl.measure.meter import Meter
from fast_axolotl.measure.phases import PhaseLog
from fast_axolotl.measure.sampler import SystemSampler
from fast_axolotl.measure.steps import StepTracker
from fast_axolotl.record import LineWriter
from fast_axolotl.system import describe

__all__ = ["measure"]

_MEASURE = "FAST_AXOLOTL_MEASURE"
"""Names the folder of the measured run that this process is part of. Who started it, ``run`` or
``protocol``, samples the process tree from outside."""


def measure(
    run_dir: str | Path,
    *,
    accumulation: int = 1,
    told_steps: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    source: str = "loop",
    data_paths: Sequence[str | Path] = (),
    sample_system: bool = True,
    peak_tflops: float | None = None,
    command: Sequence[str] | None = None,
    environment: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
    events: Callable[[], DeviceEvents | None] = find_events,
    proc: str | Path = "/proc",
) -> Meter:
    """Start measuring into the folder ``run_dir``; use it in a ``with``, or call ``close``.

    ``accumulation`` fetches are a step until ``Meter.step`` is called for the first time; from then
    on, and from the start with ``told_steps``, steps are those it is told. Rank 0 also samples its
    process tree, unless ``sample_system`` is off or the folder is that of a measured run, whose
    tree is sampled from outside; the disk that holds the first of ``data_paths`` is probed for at
    most two seconds. ``peak_tflops`` is the device's, for one whose name is not known here. A
    record that is in the folder already is kept under another name; one that another process is
    still writing is left alone, and this one writes nothing.

    ``clock``, ``wall_clock``, ``events`` and ``proc`` are there for tests.
    """
    if accumulation < 1:
        raise UsageError(f"accumulation is {accumulation}, and a step has at least one fetch")
    journal = Journal(Path(run_dir), rank=rank or 0, clock=clock, wall_clock=wall_clock)
    journal.start(
        world_size=world_size or 1,
        local_rank=local_rank or 0,
        source=source,
        command=tuple(command or ()),
        environment=describe(Path(proc)) if environment is None else dict(environment),
    )
    meter = Meter(
        journal,
        StepTracker(accumulation=accumulation, is_told=told_steps, origin=journal.origin),
        PhaseLog(journal, Path(proc)),
        find_events=events,
        peak_tflops=peak_tflops,
    )
    paths = [str(path) for path in data_paths]
    # One that nobody gave is found out where steps are told, and else goes without saying.
    given = {} if accumulation == 1 and not told_steps else {"gradient_accumulation": accumulation}
    meter.settings(**given, **({"data_paths": paths} if paths else {}))
    if journal.rank == 0 and not journal.is_refused:
        run = os.environ.get(_MEASURE, "")
        is_of_run = _is_same_folder(run, run_dir)
        if sample_system and not is_of_run:
            meter.attach_sampler(_make_sampler(meter, paths, Path(proc)))
        if run and not is_of_run and source == "loop":
            _tell_folders(run_dir, run)
    return meter


def _is_same_folder(run: str, run_dir: str | Path) -> bool:
    try:
        return bool(run) and os.path.realpath(run) == os.path.realpath(run_dir)
    except OSError:
        # The folder we are in was removed.
        return False


def _tell_folders(run_dir: str | Path, run: str) -> None:
    """One line where a loop of a measured run records into another folder than the run's."""
    # Loops that do not tell their rank all have number 0 here.
    if os.environ.get("RANK", "0") != "0":
        return
    with suppress(OSError, ValueError):
        print(
            f"fast-axolotl: measure() records into {run_dir}, not into {run}, the folder of this "
            f'run: for that, call measure(os.environ["{_MEASURE}"]); for the record made now, see '
            f"fast-axolotl show {shlex.quote(str(run_dir))}",
            file=sys.stderr,
        )


def _make_sampler(meter: Meter, data_paths: Sequence[str], proc: Path) -> SystemSampler:
    return SystemSampler(
        os.getpid(),
        LineWriter(meter.run_dir / "system.jsonl"),
        data_path=data_paths[0] if data_paths else None,
        proc=proc,
        on_sample=meter.see_sample,
        source="meter",
    )
