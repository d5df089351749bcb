"""What happens before the first batch: epochs that begin, runs that resume, and what waits are for.

The truth is what the schedule says, or what the loader slept; nothing else waits in these loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.measure import measure
from fast_axolotl.measure.batch_counts import BatchCount, read_loader, ready_batches
from fast_axolotl.measure.steps import Step, StepTracker
from fast_axolotl.record import RankRecord, read_run
from support.hosts import spans_of, total
from support.meter import Clock, Device, batches, device_stall, open_meter, read_rank, stall, steady

pytestmark = pytest.mark.usefixtures("alone")

PLAN = 0.3
STEPS = 40
WORK = 0.0075


def causes(rank: RankRecord) -> dict[str, float]:
    """Waits by what they are put down to."""
    found: dict[str, float] = {}
    for block in rank.blocks:
        for name, seconds in block.waits_by_cause.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


@pytest.mark.parametrize("is_in_iter", [True, False])
@pytest.mark.parametrize("has_device", [True, False])
def test_planning_an_epoch_is_waiting_for_data(
    tmp_path: Path, is_in_iter: bool, has_device: bool
) -> None:
    """0.3 s of planning for 40 steps of 7.5 ms: half of the time, by the host and by the device.
    What is done before the iterator is made lies between two loops."""
    clock = Clock()
    device = Device(clock) if has_device else None
    loader = batches(clock, STEPS, 0.0)

    class Planned:
        def __iter__(self) -> Iterator[Any]:
            clock.sleep(PLAN if is_in_iter else 0)
            return iter(loader)

    with open_meter(tmp_path, clock, device=device) as meter:
        for _ in range(10):
            if not is_in_iter:
                clock.sleep(PLAN)  # a new plan, shuffle or dataset, made before the loop
            for _ in meter.watch(Planned()):
                if device is None:
                    clock.sleep(WORK)
                else:
                    device.run(WORK)
        found = meter.current()
    blocks = steady(tmp_path)
    rank = read_rank(tmp_path)
    if not is_in_iter:
        # The host is 0.2 s ahead of the device when it begins to plan.
        between = 9 * (PLAN - 0.2 * has_device)
        assert spans_of(rank) == {"between": pytest.approx(between, rel=0.05)}
        assert (device_stall(blocks) if has_device else stall(blocks)) == pytest.approx(0, abs=0.01)
        return
    if has_device:
        assert device_stall(blocks) == pytest.approx(0.1 / 0.4, abs=0.03)
    else:
        assert stall(blocks) == pytest.approx(0.5, abs=0.03)
        assert found["samples_per_second"] == pytest.approx(4 / (2 * WORK), rel=0.05)
    assert causes(rank)["epoch"] == pytest.approx(9 * PLAN, rel=0.01)
    assert spans_of(rank) == {}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("is_told", [False, True])
def test_spans_between_epochs_are_no_wait_by_host_nor_device(
    tmp_path: Path, ahead: int, is_told: bool
) -> None:
    clock = Clock()
    device = Device(clock, most_ahead=0.0)
    with open_meter(tmp_path, clock, device=device, told_steps=is_told) as meter:
        for _ in range(6):
            clock.sleep(0.1)
            source = iter(meter.watch(batches(clock, 20, 0.0)))
            ready = [next(source) for _ in range(ahead)]
            for _ in range(20):
                ready += [batch for batch in [next(source, None)] if batch is not None]
                device.run(0.01)
                if is_told:
                    meter.step()
            assert next(source, None) is None
            clock.sleep(0.1)
            with meter.span("evaluate"):
                device.run(3.0)
            clock.sleep(0.1)
            with meter.span("checkpoint"):
                clock.sleep(5.0)
    rank = read_rank(tmp_path)
    # An epoch's last step is not told to be over where nobody tells steps: it lies between loops.
    hidden = 0.01 * ahead * (not is_told)
    assert total(rank, "device_wait_seconds") == pytest.approx(0, abs=0.02)
    assert total(rank, "wall_seconds") == pytest.approx(6 * 0.2 - 5 * hidden, rel=0.02)
    found = spans_of(rank)
    # The last epoch ends with a step only where one is told after the loader was found empty.
    last = 0.2 * (is_told and ahead)
    assert found["between"] == pytest.approx(5 * (0.3 + hidden) + last, rel=0.02)
    assert 5 * 3.0 <= found["evaluate"] <= 6 * 3.0
    assert 5 * 5.0 <= found["checkpoint"] <= 6 * 5.0


def test_a_watched_evaluation_and_an_iterator_for_every_batch_begin_no_epoch(
    tmp_path: Path,
) -> None:
    clock = Clock()
    with open_meter(tmp_path / "a", clock, told_steps=True) as meter:
        for number, _ in enumerate(meter.watch(batches(clock, 60, 0.0))):
            clock.sleep(0.1)
            meter.step()
            if number % 10 == 9:
                with meter.span("evaluate"):
                    list(meter.watch(batches(clock, 3, 1.0)))
    evaluated = read_rank(tmp_path / "a")
    assert (total(evaluated, "host_wait_seconds"), causes(evaluated)) == (0, {})
    with open_meter(tmp_path / "b", clock) as meter:
        for _ in range(100):
            meter.wait_begin()
            clock.sleep(0.01)
            for _ in meter.watch(batches(clock, 1, 0.01)):
                clock.sleep(0.02)
                break
    assert stall(steady(tmp_path / "b")) == pytest.approx(0.5)
    for rank in (evaluated, read_rank(tmp_path / "b")):
        assert "epoch" not in [mark.name for mark in rank.marks]


@pytest.mark.parametrize("kind", ["told", "promised"])
def test_batches_that_a_resumed_run_reads_over_are_start_up(tmp_path: Path, kind: str) -> None:
    """3,000 batches skipped at 0.1 ms each, then 300 steps of 15 ms with 1 ms of waiting."""
    clock = Clock()
    with open_meter(tmp_path, clock, told_steps=kind == "promised") as meter:
        loader = batches(clock, 3300, lambda number: 1e-4 if number < 3000 else 1e-3)
        for number, _ in enumerate(meter.watch(loader)):
            if number < 3000:
                clock.sleep(2e-5)
                continue
            clock.sleep(0.015)
            meter.step()
        found = meter.current()
        summary = meter.summary()
    assert found["samples_per_second"] == pytest.approx(4 / 0.016, rel=0.01)
    assert summary.samples_per_second == pytest.approx(4 / 0.016, rel=0.01)
    assert summary.stall_fraction == pytest.approx(1 / 16, rel=0.05)
    rank = read_rank(tmp_path)
    assert total(rank, "steps") == pytest.approx(300, abs=65)
    assert total(rank, "samples") == 4 * total(rank, "fetches")
    assert spans_of(rank)["resume"] == pytest.approx(3000 * 1.2e-4, abs=1.0)
    [mark] = [mark for mark in rank.marks if mark.name == "resume"]
    assert mark.fetch == 3000
    assert mark.text == "about 3,000 batches were skipped before the first step"
    [first] = [mark for mark in rank.marks if mark.name == "first_step"]
    assert 0.36 <= first.t <= 0.36 + 6 * 0.016


@pytest.mark.parametrize("accumulation", [1, 8, 64])
@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_accumulation_and_fetching_ahead_are_no_resume(accumulation: int, ahead: int) -> None:
    tracker = StepTracker()
    tracker.num_fetches = accumulation + ahead
    for number in range(1, 5):
        tracker.tell(float(number))
        assert tracker.find_skipped() == 0
        tracker.num_fetches += accumulation


def test_what_is_logged_is_of_the_last_interval(tmp_path: Path) -> None:
    clock = Clock()
    logged = []
    with open_meter(tmp_path, clock) as meter:
        assert meter.interval() == {}
        loader = batches(clock, 300, lambda number: 0.05 if number >= 200 else 0.0)
        for number, _ in enumerate(meter.watch(loader), 1):
            clock.sleep(0.05)
            if number % 100 == 0:
                logged.append(meter.interval())
        assert meter.current()["stall_fraction"] == pytest.approx(1 / 4, abs=0.01)
    assert [one["stall_fraction"] for one in logged] == pytest.approx([0, 0, 0.5], abs=0.01)
    assert [one["samples_per_second"] for one in logged] == pytest.approx([80, 80, 40], rel=0.02)
    assert "is_warming" not in logged[0]


def test_a_watched_loader_tells_its_settings_and_its_queue(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    loader = torch.utils.data.DataLoader(range(64), batch_size=4, num_workers=1, prefetch_factor=3)
    expected = {"num_workers": 1, "prefetch_factor": 3, "batch_size": 4, "streaming": False}
    expected |= {"pin_memory": False, "persistent_workers": False}
    assert read_loader(SimpleNamespace(iterable=loader)) == expected
    assert read_loader(iter([1])) == read_loader(object()) == read_loader(None) == {}
    with measure(tmp_path / "run", sample_system=False) as meter:
        list(meter.watch(loader))
    rank = read_run(tmp_path / "run").ranks[0]
    assert rank.values == {**expected, "replacements": []}
    assert any(block.queue_depth is not None for block in rank.blocks)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_real_loader_that_plans_its_epochs_is_waited_for(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    from fast_axolotl.integrations.torch_meter import watch_torch

    class Planned(torch.utils.data.BatchSampler):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Iterator[list[int]]:
            time.sleep(0.1)
            return iter([[number] for number in range(20)])

    rows = torch.ones(20, 4)
    plan = Planned(torch.utils.data.SequentialSampler(rows), 1, False)
    options = {"num_workers": 1, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(rows, batch_sampler=plan, **options)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with measure(tmp_path, sample_system=False) as meter, watch_torch(meter):
        for _ in range(4):
            for number, batch in enumerate(loader):
                model(batch).sum().backward()
                optimizer.step()
                if number == 18:
                    break
            with torch.no_grad():
                for _ in torch.utils.data.DataLoader(torch.ones(2, 4)):
                    time.sleep(0.15)
    rank = read_run(tmp_path).ranks[0]
    assert [mark.name for mark in rank.marks].count("epoch") == 3
    assert causes(rank)["epoch"] >= 3 * 0.1
    assert spans_of(rank)["evaluate"] >= 3 * 0.3


def test_a_queue_that_empties_because_the_epoch_ends_says_nothing() -> None:
    asked, queue = dict.fromkeys(range(4)), SimpleNamespace(qsize=lambda: 3)
    iterator = SimpleNamespace(_data_queue=queue, _worker_result_queue=queue, _task_info=asked)
    vars(iterator).update(_tasks_outstanding=4, _num_workers=2, _prefetch_factor=2)
    assert ready_batches(iterator) == 3
    asked.popitem()  # nothing is asked for any more: the sampler is exhausted
    assert ready_batches(iterator) is None


# Which fetch belongs to which step, and how long a step took: a schedule is the oracle.


def fetch(tracker: StepTracker, begin: float, end: float) -> Step | None:
    ended = tracker.begin_fetch(begin)
    tracker.end_fetch(end - begin, None, BatchCount(samples=2))
    return ended


def test_ahead_of_the_last_step_of_an_epoch_the_loader_is_found_exhausted() -> None:
    """Then the step's only fetch gave no batch, and the step still has its whole time."""
    tracker = StepTracker(is_told=True)
    fetch(tracker, 0, 1)
    fetch(tracker, 1, 2)  # ahead
    tracker.tell(12)
    first = tracker.begin_fetch(12)  # the end of the epoch
    assert (first.end - first.start, first.host_wait_seconds) == (12, 2)
    tracker.fail_fetch(0.5, None)
    tracker.leave(12.5)
    tracker.tell(22.5)
    tracker.early_waits.append((4, None))
    tracker.add_span("evaluate", 30, None)
    last = tracker.begin_fetch(60)
    assert (last.start, last.end, last.host_wait_seconds, last.fetches) == (12, 22.5, 0.5, [])
    assert last.removed_seconds == 0
    tracker.end_fetch(3.5, None, BatchCount(samples=2))
    tracker.tell(70)
    first = tracker.begin_fetch(71)
    assert (first.start, first.end, first.removed_seconds) == (22.5, 71, 30)
    assert first.host_wait_seconds == 7.5


def test_a_rank_that_fetches_nothing_has_steps_from_end_to_end() -> None:
    tracker = StepTracker(is_told=True, origin=5)
    assert tracker.tell(10) is None
    tracker.add_span("log", 2, None)
    first = tracker.tell(20)
    assert (first.start, first.end, first.spans) == (5, 10, [])
    second = tracker.tell(30)
    assert (second.start, second.end, second.removed_seconds) == (10, 20, 2)


def test_spans_before_the_first_fetch_and_after_the_last_step_are_reported_only() -> None:
    tracker = StepTracker(is_told=True)
    fetch(tracker, 0, 1)
    tracker.add_span("log", 1, None)
    tracker.tell(10)
    tracker.add_span("checkpoint", 50, None)
    last = tracker.finish()
    assert (last.end, last.removed_seconds) == (10, 1)
    assert {span.name for span in last.spans} == {"log", "checkpoint"}
    tracker = StepTracker()
    tracker.add_span("evaluate", 5, None)
    fetch(tracker, 10, 11)
    first = fetch(tracker, 20, 21)
    assert (first.removed_seconds, [span.name for span in first.spans]) == (0, ["evaluate"])


def test_the_first_step_that_is_told_starts_the_warm_up_anew() -> None:
    tracker = StepTracker()
    for number in range(8):
        fetch(tracker, number, number + 0.5)
    phases = []
    for step in range(1, 8):
        tracker.tell(step * 10)
        for micro in range(8):
            ended = fetch(tracker, step * 10 + micro, step * 10 + micro + 0.5)
            if ended is not None:
                phases.append(ended.phase)
    assert phases == ["warmup"] * 5 + ["steady"] * 2


def test_a_step_that_is_never_told_ends_before_memory_does() -> None:
    tracker = StepTracker(is_told=True)
    assert {fetch(tracker, number, number + 0.5) for number in range(10_000)} == {None}
    tracker.tell(10_000)
    first = fetch(tracker, 10_000, 10_000)
    assert (len(first.fetches), first.host_wait_seconds) == (10_000 - 2 * 4096, 5_000)
    ended = [fetch(tracker, number, number) for number in range(10_001, 20_000)]
    assert [len(step.fetches) for step in ended if step is not None] == [4096, 4096]
    # The last one, which nobody ended, is left out.
    assert tracker.finish() is StepTracker().finish() is None


def test_steps_that_are_not_told_any_more_are_counted_by_fetches(tmp_path: Path) -> None:
    """A CUDA graph replays the optimizer from the 40th step on."""
    clock = Clock()
    with open_meter(tmp_path, clock) as meter:
        for number, _ in enumerate(meter.watch(batches(clock, 400, 0.01))):
            clock.sleep(0.09)
            if number < 40:
                meter.step()
    rank = read_rank(tmp_path)
    assert [mark.text[:13] for mark in rank.marks if mark.name == "note"] == ["the optimizer"]
    assert total(rank, "steps") == pytest.approx(400, abs=40)
    assert stall(steady(tmp_path)) == pytest.approx(0.1)


def test_what_the_loop_counted_takes_the_place_of_what_was_counted(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock) as meter:
        for _ in meter.watch(batches(clock, 40, 0.1)):
            meter.tokens(100, padded=128)
            meter.tokens(11, padded=12)
            clock.sleep(1)
    blocks = steady(tmp_path)
    assert {block.real_tokens for block in blocks} == {111}
    assert {block.padded_tokens for block in blocks} == {140}
    assert {block.trainable_tokens for block in blocks} == {None}


@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("is_up_front", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_stall_is_that_of_the_schedule_however_a_trainer_fetches(
    tmp_path: Path, accumulation: int, is_told: bool, is_up_front: bool, ahead: int
) -> None:
    """20 ms of wait and 80 ms of work a batch: 20 %, whatever the order of fetches."""
    clock = Clock()
    count = 60 * accumulation
    with open_meter(tmp_path, clock, accumulation=accumulation) as meter:
        source = iter(meter.watch(batches(clock, count, 0.02)))
        ready = [next(source) for _ in range(ahead)]
        for _ in range(60):
            group = accumulation if is_up_front else 1
            for _ in range(accumulation // group):
                for _ in range(group):
                    ready += [batch for batch in [next(source, None)] if batch is not None]
                clock.sleep(0.08 * group)
            if is_told:
                meter.step()
    found = steady(tmp_path)
    assert stall(found) == pytest.approx(0.2, abs=0.004)
    total = read_rank(tmp_path).blocks
    # Without being told, the work after the last fetch has no end that could be seen.
    assert sum(block.steps for block in total) >= 60 - (not is_told)
    assert sum(block.fetches for block in found) == sum(b.samples for b in found) // 4


@given(
    waits=st.lists(st.floats(0, 0.2), min_size=30, max_size=60),
    works=st.lists(st.floats(0.001, 0.2), min_size=60, max_size=60),
    accumulation=st.integers(1, 4),
    spans=st.sets(st.integers(0, 59)),
    epoch=st.integers(3, 60),
)
@settings(max_examples=60, deadline=None)
def test_sums_over_steps_are_the_sums_of_the_schedule(
    waits: list[float],
    works: list[float],
    accumulation: int,
    spans: set[int],
    epoch: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    clock = Clock()
    taken = 0
    with open_meter(folder, clock, told_steps=True) as meter:
        while taken < len(waits):
            part = waits[taken : taken + epoch * accumulation]
            for number, _ in enumerate(
                meter.watch(batches(clock, len(part), part.__getitem__)), taken
            ):
                clock.sleep(works[number])
                if (number + 1) % accumulation == 0:
                    meter.step()
                    if number in spans:
                        with meter.span("evaluate"):
                            clock.sleep(5)
            taken += len(part)
            clock.sleep(9)
    ended = len(waits) // accumulation * accumulation
    # What lies between epochs is no wait.
    num_starts = (ended - 1) // (epoch * accumulation)
    waited, worked = sum(waits[:ended]), sum(works[:ended])
    rank = read_rank(folder)
    blocks = rank.blocks
    assert spans_of(rank).get("between", 0.0) == pytest.approx(9 * num_starts, abs=1e-4)
    assert sum(block.fetches for block in blocks) == ended
    assert sum(b.host_wait_seconds for b in blocks) == pytest.approx(waited, abs=1e-4)
    assert sum(b.wall_seconds for b in blocks) == pytest.approx(waited + worked, abs=1e-4)
