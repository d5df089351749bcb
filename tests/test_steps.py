"""Which fetch belongs to which step, and how long a step took: with a clock that is a number.

A loop is written down as a schedule; the oracle is the schedule's own arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.measure.batch_counts import BatchCount
from fast_axolotl.measure.steps import Step, StepTracker
from support.hosts import spans_of
from support.meter import Clock, batches, open_meter, read_rank, stall, steady


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
    tracker.add_early_wait(4, None)
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
    assert (first.start, first.end, first.spans) == (5, 10, ())
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
