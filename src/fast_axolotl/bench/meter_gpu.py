"""``fast-axolotl bench meter-gpu``: is the stall fraction true on a GPU, where host timing lies?

Two parts, both on a real GPU. A loop whose step queues about 64 ms of matrix products, and whose
loader waits 20 to 200 ms, with and without a synchronise a step: the device stall that the meter
reports beside the idle time that torch's profiler saw in the same steps, and beside naive host
timing. Then a small Llama trained by HF ``Trainer`` from a fast loader, from one whose waits hide
in part behind queued work, and from a slow one: the verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import Machine, Table, machine_notes, save_json
from fast_axolotl.bench.reader import scratch_folder
from fast_axolotl.errors import MissingExtraError

__all__ = ["GpuMeterResult", "gpu_meter_tables", "run_gpu_meter_bench"]

_STEP_SECONDS = 0.064
_WAITS = (0.020, 0.060, 0.100, 0.200)
_WARMUP, _STEPS = 5, 60
"""The meter leaves out the first five steps, and so does the profiler."""
_TOLERANCE = 0.02
_TRAINER_STEPS = 230
_TRAINER_WAITS = {"fast": 0.0, "half hidden": 0.5, "slow": 2.0}
"""Loaders by their wait a batch, in steps of the model. Half a step hides in part: the host runs
ahead of the device by less than a step in this trainer."""
_RIGHT = {"fast": "compute", "half hidden": "data", "slow": "data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMeterResult:
    """What was reported, beside the profiler's truth."""

    machine: Machine
    gpu: str
    date: str
    command: str
    tolerance: float
    loops: tuple[dict[str, Any], ...]
    trainers: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        save_json(self.to_json(), path)


def run_gpu_meter_bench(
    *, work_dir: Path | None = None, progress: Callable[[str], None] = lambda text: None
) -> GpuMeterResult:
    """Runs both parts on the first GPU."""
    torch = _require_gpu()
    loops, trainers = [], []
    with scratch_folder(work_dir) as folder:
        queue_work = _calibrate(torch)
        for is_synchronised in (False, True):
            for wait in _WAITS:
                progress(f"loop: wait {wait:.3f} s, synchronised: {is_synchronised}")
                place = folder / f"loop-{wait}-{is_synchronised}"
                loops.append(_run_loop(torch, queue_work, wait, is_synchronised, place))
        step = _run_trainer(0.0, folder / "trial", steps=20)["step_p50_seconds"]
        for name, waits in _TRAINER_WAITS.items():
            progress(f"trainer: {name} loader")
            found = _run_trainer(waits * step, folder / name)
            trainers.append({"loader": name, "expected": _RIGHT[name], **found})
    return GpuMeterResult(
        machine=describe_machine(),
        gpu=torch.cuda.get_device_name(0),
        date=datetime.now(timezone.utc).date().isoformat(),
        command="fast-axolotl bench meter-gpu",
        tolerance=_TOLERANCE,
        loops=tuple(loops),
        trainers=tuple(trainers),
    )


def gpu_meter_tables(result: GpuMeterResult) -> list[Table]:
    """The loops, then the trainers."""
    return [_loop_table(result), _trainer_table(result)]


def _loop_table(result: GpuMeterResult) -> Table:
    rows = tuple(
        (
            f"{1000 * item['wait_seconds']:.0f} ms",
            "yes" if item["is_synchronised"] else "no",
            _percent(item["naive_host_fraction"]),
            _percent(item["host_stall_fraction"]),
            _percent(item["device_stall_fraction"]),
            _percent(item["profiler_idle_fraction"]),
            "yes" if item["right"] else "NO",
        )
        for item in result.loops
    )
    return Table(
        title=f"bench meter-gpu: {result.gpu}, steps of {1000 * _STEP_SECONDS:.0f} ms",
        header=("wait", "sync", "naive host", "host stall", "device stall", "profiler", "right"),
        rows=rows,
        notes=(
            f"right: device stall within {100 * _TOLERANCE:.0f} points of the profiler's idle time",
            *machine_notes(result.machine),
        ),
    )


def _trainer_table(result: GpuMeterResult) -> Table:
    rows = tuple(
        (
            item["loader"],
            f"{1000 * item['wait_seconds']:.0f} ms",
            f"{1000 * item['step_p50_seconds']:.0f} ms",
            _percent(item["host_stall_fraction"]),
            _percent(item["device_stall_fraction"]),
            _percent(item["mfu"]),
            item["verdict"],
            "yes" if item["verdict"].partition("/")[0] == item["expected"] else "NO",
        )
        for item in result.trainers
    )
    header = ("loader", "wait", "step p50", "host stall", "device stall", "MFU", "verdict", "right")
    return Table(
        title="bench meter-gpu: a small Llama by HF Trainer", header=header, rows=rows, notes=()
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _require_gpu() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("this benchmark needs torch: pip install torch") from error
    if not torch.cuda.is_available():
        raise MissingExtraError("this benchmark needs a GPU that torch can use, and there is none")
    return torch


def _calibrate(torch: Any) -> Callable[[], None]:
    """Work that is queued at once and keeps the device busy for a step."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    result = torch.empty_like(matrix)

    def queue_work(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=result)

    queue_work(20)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    queue_work(100)
    torch.cuda.synchronize()
    count = max(1, round(_STEP_SECONDS / ((time.perf_counter() - begun) / 100)))
    return lambda: queue_work(count)


def _slow_batches(seconds: float, count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(seconds)
        yield number


def _run_loop(
    torch: Any, queue_work: Callable[[], None], wait: float, is_synchronised: bool, folder: Path
) -> dict[str, Any]:
    """The meter over every step, the profiler over those after the warm-up."""
    from fast_axolotl.integrations.profiler import open_profile, read_events, window_of
    from fast_axolotl.measure import measure

    profiler = open_profile()
    waited = begun = 0.0
    with measure(folder, sample_system=False) as meter:
        batches = meter.watch(_slow_batches(wait, _WARMUP + _STEPS))
        for number in range(_WARMUP + _STEPS):
            if number == _WARMUP:
                torch.cuda.synchronize()
                profiler.start()
                # The profiler sees the device from its first kernel on.
                torch.zeros(1, device="cuda")
                waited, begun = 0.0, time.perf_counter()
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            queue_work()
            if is_synchronised:
                torch.cuda.synchronize()
        wall = time.perf_counter() - begun
        torch.cuda.synchronize()
        profiler.stop()
        summary = meter.summary()
    window = window_of(read_events(profiler), t=0.0, steps=_STEPS)
    idle_seconds = window.device_idle_seconds
    idle = None if idle_seconds is None else idle_seconds / window.wall_seconds
    device = summary.device_stall_fraction
    return {
        "wait_seconds": wait,
        "is_synchronised": is_synchronised,
        "naive_host_fraction": waited / wall,
        "host_stall_fraction": summary.host_stall_fraction,
        "device_stall_fraction": device,
        "profiler_idle_fraction": idle,
        "right": None not in (device, idle) and abs((device or 0) - (idle or 0)) <= _TOLERANCE,
    }


def _run_trainer(wait: float, folder: Path, steps: int = _TRAINER_STEPS) -> dict[str, Any]:
    from fast_axolotl.bench.gpu_trainer import train
    from fast_axolotl.integrations.transformers_meter import MeterCallback
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run

    train(wait, steps, folder / "trainer", [MeterCallback(folder / "run")])
    summary = summarise(read_run(folder / "run"))
    verdict = summary.verdict
    return {
        "wait_seconds": wait,
        "step_p50_seconds": summary.step_p50_seconds,
        "host_stall_fraction": summary.host_stall_fraction,
        "device_stall_fraction": summary.device_stall_fraction,
        "tokens_per_second": summary.tokens_per_second,
        "mfu": summary.mfu,
        "flops_convention": summary.flops_convention,
        "peak_tflops": summary.peak_tflops,
        "gpu_utilization": summary.gpu_utilization,
        "overhead_seconds_per_fetch": summary.overhead_seconds_per_fetch,
        "verdict": "/".join(filter(None, (verdict.kind, verdict.subtype))),
        "headline": verdict.headline,
        "evidence": list(verdict.evidence),
        "reasons": summary.reasons,
    }
