"""Do the sums of ``fast-axolotl trace`` agree with torch's own on a GPU?

A small transformer is trained for 10 steps on one GPU under torch.profiler, while a second stream
copies the next batch from a pinned buffer. torch's ``key_averages`` sums up the self
device time of kernels and of copies; ours must be the same within 1 %. It runs from the source
tree, where nothing of ours is installed: ``PYTHONPATH=src python -m benchmarks.trace_gpu``.
``--keep FILE.json.gz`` keeps the trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, execute, race_parser
from benchmarks.result import Case, Goal, Measurement, Result
from fast_axolotl.errors import MissingExtraError, UsageError

_WARMUP, _STEPS = 3, 10
_WIDTH, _LAYERS, _TOKENS, _ROWS = 1024, 8, 512, 16
_TOLERANCE = 1.0
"""Percent."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("trace-gpu", __doc__)
    parser.add_argument("--keep", type=Path, help="where the trace is kept")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Train, export, and sum up the same window twice."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("this race needs torch: pip install torch") from error
    if not torch.cuda.is_available():
        raise UsageError("this race needs a GPU; torch sees none")
    from fast_axolotl.plan.kineto import COPY, read_trace
    from fast_axolotl.plan.trace import summarise_traces

    path = folder / "rank0.json.gz" if options.keep is None else options.keep
    tell(f"training {_WARMUP + _STEPS} steps")
    theirs = _profile(torch, path)
    tell("reading the trace")
    device = read_trace(path).device
    ours = {"kernels": 0, "copies": 0}
    for start, end, kind in zip(device[::5], device[1::5], device[2::5], strict=True):
        ours["copies" if kind == COPY else "kernels"] += end - start
    summary = summarise_traces([path])
    whole = sum(step.seconds for step in summary.steps)
    compute = sum(step.compute_seconds for step in summary.steps)
    copies, idle = (
        sum(getattr(step, f"{name}_seconds") for step in summary.steps) for name in ("copy", "idle")
    )
    measurements = [
        Measurement(
            name=name,
            values={"ours_ms": ours[name] / 1e6, "torch_ms": theirs[name] / 1e3},
        )
        for name in ours
    ]
    parts = {"steps_ms": whole, "compute_ms": compute, "copies_alone_ms": copies, "idle_ms": idle}
    values: dict[str, Any] = {name: 1e3 * value for name, value in parts.items()}
    measurements.append(Measurement(name="parts", values={**values, "steps": len(summary.steps)}))
    goals = [
        Goal(f"{name} off torch's sum", _TOLERANCE, "%", _off(ours[name] / 1e3, theirs[name]))
        for name in ours
    ]
    # One stream computes, so that the union of its kernels is their sum.
    goals += [
        Goal(
            "compute of the steps off torch's",
            _TOLERANCE,
            "%",
            _off(1e6 * compute, theirs["kernels"]),
        ),
        Goal("parts off the steps", 1e-6, "%", _off(compute + copies + idle, whole)),
    ]
    case = Case(
        name="transformer",
        text=f"{_LAYERS} layers of {_WIDTH} on {torch.cuda.get_device_name(0)}, copies beside",
        rows=_STEPS,
        unit="steps",
        num_bytes=path.stat().st_size,
        measurements=measurements,
        goals=goals,
    )
    return Result(cases=[case])


def _off(value: float, right: float) -> float:
    return abs(100 * (value / right - 1))


def _profile(torch: Any, path: Path) -> dict[str, float]:
    """Write the trace; microseconds of kernels and copies as torch sums them up."""
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 16, 4 * _WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    host = torch.randn(_ROWS, _TOKENS, _WIDTH).pin_memory()
    batch, copying = host.cuda(), torch.cuda.Stream()
    plan = schedule(wait=0, warmup=_WARMUP, active=_STEPS, repeat=1)
    found: dict[str, float] = {"kernels": 0.0, "copies": 0.0}

    def finish(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))
        for event in profiler.key_averages():
            is_device = event.device_type != torch.autograd.DeviceType.CPU
            if is_device and not getattr(event, "is_user_annotation", False):
                name = "copies" if event.key.startswith(("Memcpy", "Memset")) else "kernels"
                found[name] += event.self_device_time_total

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=plan,
        on_trace_ready=finish,
    ) as profiler:
        for _ in range(_WARMUP + _STEPS):
            with torch.cuda.stream(copying):
                following = host.to("cuda", non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.current_stream().wait_stream(copying)
            batch = following
            torch.cuda.synchronize()
            profiler.step()
    return found


if __name__ == "__main__":
    main()
