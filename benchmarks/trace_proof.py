"""Does ``fast-axolotl trace`` find what was injected? ``python -m benchmarks.trace_proof``.

``delays``: 2 and 4 gloo ranks train on the CPU under torch.profiler, some of them asleep before the
all-reduce of every step. What a rank should wait is the longest sleep less its own.

``size``: the trace of one step, written again and again until it has ``--megabytes``: the time
that reading it takes, and the memory, in a process of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import MEGABYTE, Case, Goal, Measurement, Result
from fast_axolotl.plan.trace import summarise_traces

PARTS = ("delays", "size")
_DELAYS = {"2 ranks": (0.0, 0.1), "4 ranks": (0.0, 0.05, 0.2, 0.0)}
"""Seconds of sleep of each rank, in each step."""
_STEPS = 10
_TRACE = Path(__file__).parents[1] / "tests" / "data" / "hta-128ranks-rank0.json.gz"
_SPAN = 2_000_000
"""Microseconds by which each copy of its steps comes later."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("trace-proof", __doc__)
    parser.add_argument("--parts", type=names, default=[], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--megabytes", type=int, default=200, help="of the large trace")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Both parts, or those that are named."""
    parts = check_names("part", options.parts, PARTS)
    cases = []
    for name, delays in _DELAYS.items() if "delays" in parts else ():
        tell(f"delays: {name}")
        place = folder / f"{len(delays)}"
        place.mkdir()
        cases.append(_run_delays(name, delays, place))
    if "size" in parts:
        tell(f"size: {options.megabytes} MB")
        cases.append(_run_size(options.megabytes, folder / "rank0.json"))
    return Result(cases=cases)


def _run_delays(name: str, delays: Sequence[float], folder: Path) -> Case:
    _run_children(_train, [(rank, delays, str(folder)) for rank in range(len(delays))])
    summary = summarise_traces(sorted(folder.glob("rank*.json")))
    measurements, errors = [], []
    for rank, delay in enumerate(delays):
        steps = [step for step in summary.steps if step.rank == rank]
        waits = [step.waiting_seconds or 0.0 for step in steps]
        injected, found = max(delays) - delay, statistics.median(waits)
        values = {
            "injected_ms": 1e3 * injected,
            "waiting_ms": 1e3 * found,
            "error_percent": 100 * (found / injected - 1) if injected else None,
            "exposed_ms": 1e3 * statistics.median(step.exposed_seconds for step in steps),
        }
        measurements.append(Measurement(name=f"rank {rank}", seconds=tuple(waits), values=values))
        errors += [abs(100 * (found / injected - 1))] if injected else []
    late = delays.index(max(delays))
    is_right = summary.straggler == late
    return Case(
        name=name,
        text=f"sleeps of {', '.join(f'{1e3 * delay:.0f}' for delay in delays)} ms by rank",
        rows=_STEPS,
        unit="steps",
        measurements=measurements,
        goals=[
            Goal("median waiting off what was injected", 5.0, "%", max(errors)),
            Goal(f"rank {late} named as the straggler", 1.0, "×", float(is_right), at_least=True),
        ],
    )


def _train(rank: int, delays: Sequence[float], folder: str) -> None:
    """One rank: a step is a product, a sleep, and an all-reduce."""
    import torch
    from torch import distributed
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=len(delays)
    )
    gradients, weights = torch.ones(100_000), torch.ones(128, 128)
    plan = schedule(wait=0, warmup=1, active=_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as found:
        for _ in range(_STEPS + 1):
            weights @ weights
            time.sleep(delays[rank])
            distributed.all_reduce(gradients)
            found.step()
    found.export_chrome_trace(f"{folder}/rank{rank}.json")
    distributed.destroy_process_group()


def _run_size(megabytes: int, path: Path) -> Case:
    events = json.loads(gzip.decompress(_TRACE.read_bytes()))["traceEvents"]
    with path.open("w", encoding="utf-8") as file:
        file.write('{"distributedInfo": {"rank": 0, "world_size": 128}, "traceEvents": [\n')
        copies = 0
        while file.tell() < megabytes * MEGABYTE:
            file.writelines(json.dumps(_shift(event, copies), indent=1) + ",\n" for event in events)
            copies += 1
        file.write("{}]}")
    ((seconds, cpu_seconds, peak_bytes, steps),) = _run_children(_read, [(str(path),)])
    values = {"megabytes_per_second": path.stat().st_size / MEGABYTE / seconds}
    values |= {"processor_seconds": cpu_seconds, "peak_bytes": peak_bytes, "steps": steps}
    return Case(
        name="size",
        text="a trace of rank 0 of 128, repeated",
        rows=copies * len(events),
        unit="events",
        num_bytes=path.stat().st_size,
        measurements=[Measurement(name="trace", seconds=(seconds,), values=values)],
        goals=[Goal("peak memory of the process", 300.0, "MB", peak_bytes / MEGABYTE)],
    )


def _shift(event: dict[str, Any], copies: int) -> dict[str, Any]:
    """The event, so many spans later; kernels stay with their launches."""
    args = dict(event.get("args", {}))
    if "correlation" in args:
        args["correlation"] += 10_000_000 * copies
    return event | {"ts": event.get("ts", 0) + _SPAN * copies, "args": args}


def _read(path: str) -> tuple[float, float, int, int]:
    start, start_cpu = time.perf_counter(), time.process_time()
    summary = summarise_traces([Path(path)])
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, cpu, peak_bytes, len(summary.steps)


def _run_children(call: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    with multiprocessing.get_context("spawn").Pool(len(arguments)) as pool:
        return pool.starmap(call, arguments, chunksize=1)


if __name__ == "__main__":
    main()
