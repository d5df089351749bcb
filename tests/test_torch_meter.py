"""The hooks in torch: which fetches and steps reach the meter, from real loaders and optimizers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

from fast_axolotl.integrations.profiler import (  # noqa: E402
    Event,
    WindowProfiler,
    read_events,
    window_of,
)
from fast_axolotl.integrations.torch_meter import (  # noqa: E402
    TorchWatch,
    watch_torch,
    yield_to_trainer,
)
from fast_axolotl.record.schema import is_collective  # noqa: E402
from support.hosts import FakeMeter, break_down  # noqa: E402

# Forking beside the threads that earlier tests have left behind warns on Python 3.12 and later.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    # Of other profilers than ours, which torch 2.11 warns about wherever they are started.
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
    pytest.mark.usefixtures("alone"),
]


class Numbers(Dataset):  # type: ignore[type-arg]
    """Rows that are their own numbers."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise OSError("row 7 is gone")
        return torch.full((4,), float(index))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(10, 4))


@pytest.fixture
def meter() -> FakeMeter:
    return FakeMeter()


def a_model() -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(loader: Any, *optimizers: Any, model: Any = None) -> None:
    for batch in loader:
        if model is not None:
            model(batch).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


ITERATOR = torch.utils.data.dataloader._BaseDataLoaderIter

EPOCH = ["begin", 4, "begin", 4, "begin", 2, "begin", "exhausted"]
"""Ten rows in batches of four."""


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(10), {}),
        (Stream(), {}),
        (Stream(), {"num_workers": 1, "in_order": False}),
        (
            Numbers(10),
            {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
        ),
    ],
    ids=["rows", "stream", "in any order", "spawned"],
)
def test_every_fetch_of_a_loader_is_told_once(
    meter: FakeMeter, dataset: Any, options: dict[str, Any]
) -> None:
    loader = DataLoader(dataset, batch_size=4, **options)
    with watch_torch(meter):
        train(loader)
        train(loader)
    assert meter.told == EPOCH * 2
    workers = options.get("num_workers", 0)
    assert meter.known == {
        "num_workers": workers,
        "prefetch_factor": 2 if workers else None,
        "batch_size": 4,
        "pin_memory": False,
        "persistent_workers": options.get("persistent_workers", False),
        "streaming": isinstance(dataset, Stream),
    }


def test_the_files_of_a_stream_are_counted_through_adapters(meter: FakeMeter) -> None:
    class Files(Stream):
        num_shards = 3

    class Adapter(Stream):
        dataset = Files()

    for dataset in (Files(), Adapter()):
        with watch_torch(meter):
            train(DataLoader(dataset, batch_size=4))
        assert (meter.known["streaming"], meter.known["num_shards"]) == (True, 3)


def test_hooks_are_gone_after_the_last_watch_even_where_its_profiler_fails(
    meter: FakeMeter,
) -> None:
    def hooked() -> list[Any]:
        names = ("__next__", "__init__", "_reset")
        return [getattr(ITERATOR, name) for name in names]

    before = hooked()
    with watch_torch(meter), watch_torch(FakeMeter()):
        assert not any(one is other for one, other in zip(hooked(), before, strict=True))
    assert hooked() == before
    train(DataLoader(Numbers(4), batch_size=4), a_model()[1])
    assert meter.told == []
    watch = TorchWatch(meter)
    watch.start()
    watch.profiler = SimpleNamespace(close=break_down)
    with pytest.raises(ZeroDivisionError):
        watch.stop()
    assert hooked() == before


def test_steps_are_told_by_the_first_optimizer_alone_or_left_to_who_tells_them() -> None:
    model, optimizer = a_model()
    other = torch.optim.Adam(model.parameters())
    for optimizers in (True, False):
        meter = FakeMeter()
        with watch_torch(meter, optimizers=optimizers):
            train(DataLoader(Numbers(8), batch_size=4), optimizer, other, model=model)
        step = ["step"] * optimizers
        assert meter.told == ["begin", 4, *step, "begin", 4, *step, "begin", "exhausted"]


def test_a_file_saved_in_a_plain_loop_is_a_checkpoint(meter: FakeMeter, tmp_path: Path) -> None:
    original = torch.save
    model, optimizer = a_model()
    with watch_torch(meter):
        train(DataLoader(Numbers(4), batch_size=4), optimizer, model=model)
        with torch.no_grad():
            train(DataLoader(Numbers(4), batch_size=4))
        torch.save(model.state_dict(), tmp_path / "model.pt")
        thread = threading.Thread(target=torch.save, args=({}, tmp_path / "other.pt"))
        thread.start()
        thread.join()
    assert torch.save is original
    assert meter.told[-4:] == ["evaluate", "end evaluate", "checkpoint", "end checkpoint"]
    assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}


def test_a_thread_that_fetches_ahead_is_not_the_training(meter: FakeMeter) -> None:
    model, optimizer = a_model()
    loader = DataLoader(Numbers(8), batch_size=4)

    def fetch_ahead() -> None:
        thread = threading.Thread(target=train, args=(loader,))
        thread.start()
        thread.join()

    with watch_torch(meter):
        model(torch.ones(1, 4)).sum().backward()
        fetch_ahead()
        optimizer.step()
        assert "another thread" in meter.reasons["stall_fraction"]
        meter.told.clear()
        fetch_ahead()
        assert meter.told == []


def test_an_error_of_the_loader_is_raised_and_a_broken_meter_leaves_the_training_alone(
    meter: FakeMeter, caplog: pytest.LogCaptureFixture
) -> None:
    with watch_torch(meter), pytest.raises(OSError, match="row 7 is gone"):
        train(DataLoader(Numbers(10, fails_at=7), batch_size=4))
    assert meter.told == ["begin", 4, "begin", "OSError"]
    meter.fetch_end = break_down
    with watch_torch(meter):
        assert len(list(DataLoader(Numbers(10), batch_size=4))) == 3
    assert "ZeroDivisionError" in meter.reasons["stall_fraction"]
    assert "stopped measuring" in caplog.text


def test_a_meter_is_opened_by_the_first_training_fetch_and_given_up_to_a_trainer(
    meter: FakeMeter,
) -> None:
    opened: list[Any] = []
    closed: list[Any] = []
    meter.close = closed.append  # type: ignore[attr-defined]
    loader = DataLoader(Numbers(4), batch_size=4)
    watch = TorchWatch(None, open_meter=lambda: opened.append(meter) or meter)  # type: ignore[func-returns-value, arg-type, return-value]
    watch.start()
    with torch.no_grad():
        train(loader)
    assert opened == []
    train(loader)
    yield_to_trainer()
    train(loader)
    assert (opened, closed) == ([meter], ["finished"])
    assert meter.told == ["begin", 4, "begin", "exhausted"]


def test_a_loop_with_no_grad_inside_is_a_span_once_steps_tell_what_is_trained(
    meter: FakeMeter,
) -> None:
    model, optimizer = a_model()
    trained, checked = (DataLoader(Numbers(count), batch_size=4) for count in (8, 16))

    def evaluate() -> None:
        for batch in checked:
            with torch.no_grad():
                model(batch)

    with watch_torch(meter):
        for _ in range(2):
            train(trained, optimizer, model=model)
            evaluate()
    epoch = ["begin", 4, "step", "begin", 4, "step", "begin", "exhausted"]
    assert meter.told == [*epoch, "evaluate", "end evaluate"] * 2


def test_tasks_that_take_turns_are_all_trained(meter: FakeMeter) -> None:
    model, optimizer = a_model()
    first, second = (iter(DataLoader(Numbers(40), batch_size=4)) for _ in range(2))
    with watch_torch(meter):
        for task in [first, second] * 5:
            model(next(task)).sum().backward()
            optimizer.step()
    # The second task is taken for an evaluation once, until its first step.
    found = [meter.told.count(name) for name in ("evaluate", "begin", "step")]
    assert found == [1, 9, 10]


@pytest.mark.parametrize("at_once", [1, 2])
def test_loaders_read_side_by_side_and_a_new_dataset_for_each_epoch_are_trained(
    meter: FakeMeter, at_once: int
) -> None:
    model, optimizer = a_model()
    with watch_torch(meter):
        for _ in range(1 if at_once > 1 else 3):
            loaders = [DataLoader(Numbers(16), batch_size=4) for _ in range(at_once)]
            for batches in zip(*loaders, strict=True):
                model(sum(batches)).sum().backward()
                optimizer.step()
    assert "evaluate" not in meter.told
    assert meter.told.count(4) == (8 if at_once > 1 else 12)


def test_new_datasets_for_each_epoch_are_told_apart_by_the_lines_that_read_them(
    meter: FakeMeter,
) -> None:
    model, optimizer = a_model()

    def evaluate(rows: Any) -> None:
        for batch in DataLoader(rows, batch_size=4):
            with torch.no_grad():
                model(batch)

    with watch_torch(meter):
        for _ in range(2):
            train(DataLoader(Numbers(8), batch_size=4), optimizer, model=model)
            evaluate(Numbers(8))
    epoch = ["begin", 4, "step", "begin", 4, "step", "begin", "exhausted"]
    assert meter.told == [*epoch, "evaluate", "end evaluate"] * 2


# Intervals of a profiler's events: what was idle, what communication was exposed.


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
    late = WindowProfiler(other, 2, first_step=1)
    late.step_end()
    with torch.profiler.profile(activities=CPU) as theirs:
        torch.ones(8).sum()
    for _ in range(3):
        late.step_end()
    assert "aten::sum" in {event.key for event in theirs.key_averages()}
    assert meter.windows == other.windows == []
    assert "was running" in meter.reasons["exposed_communication_fraction"]
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
