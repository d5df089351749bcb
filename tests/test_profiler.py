"""Intervals of a profiler's events: what was idle, what communication was exposed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.integrations.profiler import (
    Event,
    WindowProfiler,
    read_events,
    window_of,
)
from fast_axolotl.record.schema import is_collective
from support.hosts import FakeMeter

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

# Of other profilers than ours, which torch 2.11 warns about wherever they are started.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

MS = 1_000_000
CPU = [torch.profiler.ProfilerActivity.CPU]


def kernel(name: str, start: int, end: int) -> Event:
    return Event(name, start * MS, end * MS, is_device=True, is_mark=False)


def step_mark(number: int, start: int, end: int, *, is_device: bool = True) -> Event:
    name = f"ProfilerStep#{number}"
    return Event(name, start * MS, end * MS, is_device=is_device, is_mark=True)


def host(name: str, start: int, end: int) -> Event:
    return Event(name, start * MS, end * MS, is_device=False, is_mark=False)


def test_whole_steps_are_counted_from_first_kernel_to_first_kernel_and_marks_are_no_work() -> None:
    events = [
        event
        for number in range(3)
        for event in (
            step_mark(number, 10 * number, 10 * number + 6),
            kernel("gemm", 10 * number, 10 * number + 6),
        )
    ]
    window = window_of(events, t=1.0, steps=3)
    assert window.steps == 2
    assert window.wall_seconds == pytest.approx(0.020)
    assert window.device_idle_seconds == pytest.approx(0.008)
    assert window.exposed_communication_seconds == 0
    assert window.reasons == {}
    events = [step_mark(0, 0, 100), kernel("gemm", 0, 10), kernel("Memcpy HtoD", 90, 100)]
    assert window_of(events, t=0.0, steps=1).device_idle_seconds == pytest.approx(0.080)


def test_only_communication_beside_which_nothing_runs_is_exposed() -> None:
    events = [
        kernel("gemm", 0, 50),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", 40, 70),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 60, 80),
        kernel("gemm", 75, 100),
        Event("nccl:all_reduce", 0, 100 * MS, is_device=True, is_mark=True),
    ]
    window = window_of(events, t=0.0, steps=1)
    assert window.exposed_communication_seconds == pytest.approx(0.025)
    assert window.device_idle_seconds == 0
    assert window.collectives == (0.030, 0.020)


def test_without_a_device_gloo_is_the_communication_and_operators_are_the_work() -> None:
    events = [
        step_mark(0, 0, 100, is_device=False),
        host("aten::mm", 0, 30),
        host("autograd::engine::evaluate_function: MmBackward0", 0, 100),
        host("gloo:all_reduce", 20, 60),
        host("c10d::allreduce_", 20, 21),
    ]
    window = window_of(events, t=0.0, steps=1)
    assert window.wall_seconds == pytest.approx(0.100)
    assert window.exposed_communication_seconds == pytest.approx(0.030)
    assert window.device_idle_seconds is None
    assert "no work on an accelerator" in window.reasons["device_idle_seconds"]


def test_work_is_no_communication_and_what_is_not_known_is_no_zero() -> None:
    assert not any(map(is_collective, ("triton_poi_fused_all_reduce_0", "warp_all_reduce", "gemm")))
    work = kernel("gemm", 0, 1)
    window = window_of([work], t=1.0, steps=1, first_step=20, world_size=2)
    assert window.exposed_communication_seconds is None
    assert "between the 2 ranks" in window.reasons["exposed_communication_seconds"]
    window = window_of([work, host("gloo:all_reduce", 0, 2)], t=1.0, steps=1, world_size=2)
    assert len(window.collectives) == 1


def test_events_are_read_from_the_profiler_s_raw_results() -> None:
    found = [
        SimpleNamespace(
            name=lambda name=name: name,
            start_ns=lambda: 5,
            duration_ns=lambda: 7,
            device_type=lambda device=device: SimpleNamespace(name=device),
            activity_type=lambda kind=kind: kind,
        )
        for name, device, kind in (
            ("gemm", "CUDA", "kernel"),
            ("ProfilerStep#1", "CUDA", "gpu_user_annotation"),
            ("aten::mm", "CPU", "cpu_op"),
        )
    ]
    results = SimpleNamespace(events=lambda: found)
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    assert read_events(profile) == [
        Event("gemm", 5, 12, is_device=True, is_mark=False),
        Event("ProfilerStep#1", 5, 12, is_device=True, is_mark=True),
        Event("aten::mm", 5, 12, is_device=False, is_mark=False),
    ]


def test_a_window_opens_after_the_first_steps_and_closes_once() -> None:
    meter = FakeMeter()
    profiler = WindowProfiler(meter, 3, first_step=2)
    for _ in range(10):
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.step_end()
    profiler.close()
    [window] = meter.windows
    assert window.steps == 3
    assert 0 < window.wall_seconds < 60
    assert window.device_idle_seconds is None
    assert meter.told == ["profile", "end profile"] * 2


def test_beside_another_profiler_there_is_a_reason_and_no_window() -> None:
    meter, other = FakeMeter(), FakeMeter()
    with torch.profiler.profile(activities=CPU):
        profiler = WindowProfiler(meter, 2, first_step=1)
        for _ in range(4):
            profiler.step_end()
    WindowProfiler(other, 10, first_step=1).step_end()
    with torch.profiler.profile(activities=CPU):
        pass  # ends the window before its first step
    assert meter.windows == other.windows == []
    assert "profiler" in meter.reasons["exposed_communication_fraction"]
    assert "before its first step" in other.reasons["device_idle_fraction"]


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_window_ends_where_somebody_else_begins_a_profiler(is_legacy: bool) -> None:
    begin = torch.autograd.profiler.profile._prepare_trace
    meter = FakeMeter()
    profiler = WindowProfiler(meter, 10, first_step=1)
    for _ in range(5):
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.step_end()
    theirs: Any = (
        torch.autograd.profiler.profile() if is_legacy else torch.profiler.profile(activities=CPU)
    )
    with theirs:
        torch.ones(8).sum()
        profiler.step_end()
    assert "aten::sum" in {event.key for event in theirs.key_averages()}
    assert [window.steps for window in meter.windows] == [3]
    assert torch.autograd.profiler.profile._prepare_trace is begin
    profiler.step_end()
    profiler.close()
    assert len(meter.windows) == 1
