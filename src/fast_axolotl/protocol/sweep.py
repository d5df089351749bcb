"""One training at several batch sizes: every trial is a child process with a record of its own.

A trial is a turn of a protocol (see ``runner``) with the sizes filled in: into the words of a
command, or into the keys of a configuration. What has run is kept in the folder and found again by
its name, ``runs/03-micro-4x16``; a trial that was cut off, or failed for another reason than
memory, is made again when the sweep is continued. Which size comes next is decided elsewhere.

Memory that runs out is an answer, not a failure. It is recognised by what the process printed, or
by signal 9, which is what the kernel's OOM killer sends.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.child import read_last_lines
from fast_axolotl.protocol.plan import Turn
from fast_axolotl.protocol.runner import Running
from fast_axolotl.protocol.statistics import t_quantile
from fast_axolotl.record.protocol_result import ArmRun, Trial
from fast_axolotl.record.run_folders import read_training

_LOG_BYTES = 4_000_000
"""Of the end of a log, in which memory that ran out is looked for: 64 ranks print a lot."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|\b(CUDA|HIP|XPU|NPU)( error:)? out of memory|hipErrorOutOfMemory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (can't|not enough)|\bMemoryError\b"
    r"|exitcode\s*: -9\b|Signal 9 \(SIGKILL\)"
)
_KILLED = (-9, 137)


def run_trial(
    running: Running, micro_batch: int, accumulation: int, kind: str = "micro", **keys: Any
) -> Trial:
    """A trial of the only arm of a plan: as it was recorded, or made now.

    ``{micro_batch}`` and ``{accumulation}`` in the command, and two keys of the configuration,
    become the sizes; ``keys`` are more of the configuration.
    """
    root, state, [arm] = running.root, running.state, running.plan.arms
    trial = Trial(micro_batch=micro_batch, accumulation=accumulation, outcome="failed")
    name = f"{kind}-{micro_batch}x{accumulation}"
    kept = [at for at, run in state.runs.items() if f"-{name}-" in f"{run.folder}-"]
    number = kept[0] if kept else max(state.runs, default=0) + 1
    if kept:
        with contextlib.suppress(DataError):
            found = _read(trial, state.runs[number], root)
            if found.outcome != "failed":
                return found
    words = (word.replace("{micro_batch}", str(micro_batch)) for word in arm.command)
    command = tuple(word.replace("{accumulation}", str(accumulation)) for word in words)
    config = None
    if arm.config is not None:
        sizes = {"micro_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
        config = {**arm.config, **sizes, **keys}
    turn = Turn(number=number, arm=replace(arm, name=name, command=command, config=config), pair=0)
    running.save()  # a folder with a run and no state is not continued
    state.runs[number] = running.run_turn(turn)
    running.save()
    return _read(trial, state.runs[number], root)


def find_out_of_memory(code: int | None, log: Path) -> str:
    """The line that says that memory ran out, or that the run was killed; empty where none does."""
    lines = read_last_lines(log, _LOG_BYTES, num_bytes=_LOG_BYTES)
    killed = "signal 9 ended it, as when memory runs out" if code in _KILLED else ""
    return next((line.strip() for line in lines if _OUT_OF_MEMORY.search(line)), killed)


def _read(trial: Trial, run: ArmRun, root: Path) -> Trial:
    """What a run has left."""
    trial = replace(trial, folder=run.folder, reason=run.log_tail)
    if run.status != "done":
        full = find_out_of_memory(run.exit_code, root / run.folder / "log.txt")
        return replace(trial, outcome="out of memory", reason=full) if full else trial
    record = read_training(root / run.folder)
    summary = summarise(record)
    unit, rate = "tokens/s", summary.tokens_per_second
    if rate is None and summary.samples_per_second is not None:
        unit, rate = "samples/s", summary.samples_per_second
    # The 95 % interval of the mean step time, as a share of it.
    first, error = summary.first_steady_step, None
    walls = [
        wall
        for rank, lines in record.ranks.items()
        for block in lines.blocks
        for step, wall in enumerate(block.walls or (), block.first_step)
        if rank == summary.deciding_rank and block.phase == "steady" and step >= (first or 0)
    ]
    if len(walls) > 1:
        spread = statistics.stdev(walls) / statistics.fmean(walls)
        error = t_quantile(len(walls) - 1.0) * spread / math.sqrt(len(walls))
    held = summary.settings.get("cuda_memory")
    held = held if isinstance(held, dict) else {}
    return replace(
        trial,
        outcome="ran",
        reason="" if rate else summary.reasons.get("tokens_per_second", ""),
        ranks=summary.data_parallel_size or max(1, summary.world_size),
        rate=rate,
        low=None if rate is None or error is None else rate / (1 + error),
        high=None if rate is None or error is None or error >= 1 else rate / (1 - error),
        unit=unit,
        step_seconds=summary.step_p50_seconds,
        stall=summary.stall_fraction,
        peak_bytes=summary.gpu_peak_allocated_bytes,
        held_bytes=max(summary.gpu_memory_bytes or 0, held.get("reserved_peak") or 0) or None,
        total_bytes=held.get("total"),
    )
