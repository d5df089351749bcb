"""The meter in a loop: with a fake clock and a fake device, so that hours take seconds."""

from __future__ import annotations

import os
import sys
import weakref
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.measure import Meter, measure
from fast_axolotl.record import ModelShape, ProfileWindow, RankRecord, SystemSample
from fast_axolotl.record.folder import system_file
from fast_axolotl.record.waits import WAIT_SECONDS
from fast_axolotl.system import node_name
from support.hosts import spans_of, total
from support.meter import Clock, Device, batches, device_stall, open_meter, read_rank, stall, steady

pytestmark = pytest.mark.usefixtures("alone")


def names(rank: RankRecord) -> list[str]:
    return [mark.name for mark in rank.marks]


def run_loop(meter: Meter, clock: Clock, loader: Any, work: float = 0.05) -> None:
    for _ in meter.watch(loader):
        clock.sleep(work)


def record_loop(folder: Path, count: int, wait: Any, work: float = 0.05) -> RankRecord:
    """What the meter records of a plain loop over so many batches."""
    clock = Clock()
    with open_meter(folder, clock) as meter:
        run_loop(meter, clock, batches(clock, count, wait), work)
    return read_rank(folder)


def test_a_loop_is_recorded_from_its_first_batch_to_its_end(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock, rank=0, world_size=2, command=["train", "it"]) as meter:
        clock.sleep(3)
        run_loop(meter, clock, batches(clock, 100, 0.05))
    rank = read_rank(tmp_path)
    assert (rank.start.world_size, rank.start.command) == (2, ("train", "it"))
    assert names(rank) == ["first_fetch", "first_batch", "first_step"]
    assert [round(mark.t, 3) for mark in rank.marks] == [3.0, 3.05, 3.1]
    assert sum(block.steps for block in rank.blocks) == 100
    assert stall(steady(tmp_path)) == pytest.approx(0.5)
    assert (rank.end.reason, rank.end.overhead_fetches) == ("finished", 95)
    assert "device_stall_fraction" in rank.reasons


def test_blocks_are_a_second_long_and_never_hold_two_phases(tmp_path: Path) -> None:
    blocks = record_loop(tmp_path, 205, 0.01, 0.09).blocks
    assert [(block.phase, block.steps) for block in blocks[:2]] == [("warmup", 1), ("warmup", 4)]
    assert {block.phase for block in blocks[2:]} == {"steady"}
    assert {block.steps for block in blocks[3:-1]} <= {10, 11}
    assert [block.first_step for block in blocks] == [
        sum(one.steps for one in blocks[:number]) for number in range(len(blocks))
    ]
    assert [block.first_fetch for block in blocks] == [block.first_step for block in blocks]
    for block in blocks:
        assert len(block.walls) == block.steps == sum(block.step_times.values())
        assert sum(block.walls) == pytest.approx(block.wall_seconds, abs=1e-4)
        assert sum(block.hosts or ()) == pytest.approx(block.host_wait_seconds, abs=1e-4)
        assert sum(block.host_waits.values()) == block.fetches


def test_spans_are_taken_out_and_reported(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock, told_steps=True) as meter:
        for number, _ in enumerate(meter.watch(batches(clock, 100, 0.02))):
            clock.sleep(0.08)
            meter.step()
            with meter.span("log"):
                clock.sleep(0.01)
            if number % 20 == 10:
                with meter.span("evaluate"):
                    run_loop(meter, clock, batches(clock, 7, 1.0))  # no fetches of training
                    with meter.span("log"):
                        clock.sleep(1)
                with meter.span("checkpoint"):
                    clock.sleep(4)
    rank = read_rank(tmp_path)
    assert stall(steady(tmp_path)) == pytest.approx(0.2, abs=1e-4)
    assert total(rank, "fetches") == 100
    expected = {"log": 1.0, "evaluate": 5 * 8.35, "checkpoint": 20}
    assert spans_of(rank) == pytest.approx(expected)
    assert [phase.name for phase in rank.phases] == ["evaluate", "checkpoint"] * 5


@pytest.mark.parametrize("wait", [0.02, 0.06, 0.1, 0.2])
@pytest.mark.parametrize("is_synchronised", [False, True])
def test_on_a_device_only_waits_it_noticed_are_a_stall(
    tmp_path: Path, wait: float, is_synchronised: bool
) -> None:
    """64 ms of queued work a step: what the host waits behind it costs nothing."""
    clock = Clock()
    device = Device(clock, most_ahead=0.15)
    with open_meter(tmp_path, clock, device=device) as meter:
        for _ in meter.watch(batches(clock, 400, wait)):
            device.run(0.064)
            if is_synchronised:
                device.synchronise()
    found = steady(tmp_path)
    # A wait that the device does not notice takes one event.
    events = 1 if wait < 0.064 and not is_synchronised else 2
    assert device.num_recorded == pytest.approx(400 * events, abs=15)
    step = 0.064 + wait if is_synchronised else max(0.064, wait)
    idle = 1 - 0.064 / step
    assert device_stall(found) == pytest.approx(idle, abs=0.005)
    assert stall(found) == pytest.approx(wait / step, abs=0.01)
    counted = sum(sum((block.device_waits or {}).values()) for block in found)
    assert counted == sum(block.fetches for block in found)
    assert "device_stall_fraction" not in read_rank(tmp_path).reasons


def test_a_log_that_only_waits_for_queued_work_is_not_taken_out_of_it(tmp_path: Path) -> None:
    """Reading a loss makes the host wait for the step itself: that time is training."""
    clock = Clock()
    device = Device(clock, most_ahead=10)
    with open_meter(tmp_path, clock, device=device, told_steps=True) as meter:
        for _ in meter.watch(batches(clock, 200, 0.01)):
            device.run(0.09)
            meter.step()
            with meter.span("log"):
                device.synchronise()
                clock.sleep(0.005)
    found = steady(tmp_path)
    seconds = sum(block.wall_seconds for block in found) / sum(block.steps for block in found)
    assert seconds == pytest.approx(0.1, abs=1e-3)
    assert device_stall(found) == pytest.approx(0.1, abs=1e-3)
    assert sum(b.spans["log"] for b in found) / len(found) == pytest.approx(0.05, rel=0.2)


def test_a_span_that_the_device_ends_later_is_owed_by_the_steps_that_follow(tmp_path: Path) -> None:
    clock = Clock()
    device = Device(clock, most_ahead=100)
    with open_meter(tmp_path, clock, device=device, told_steps=True) as meter:
        for number, _ in enumerate(meter.watch(batches(clock, 300, 0.0))):
            device.run(0.1)
            clock.sleep(0.1)
            meter.step()
            if number % 50 == 20:
                with meter.span("evaluate"):
                    device.run(2.0)  # queued, and the host goes on at once
            if number % 50 == 30:
                device.synchronise()
    blocks = read_rank(tmp_path).blocks
    assert sum(block.wall_seconds for block in blocks) == pytest.approx(300 * 0.1, rel=0.02)
    assert all(wall >= 0 for block in blocks for wall in block.walls or ())


def test_a_device_that_never_answers_costs_figures_and_no_memory(tmp_path: Path) -> None:
    clock = Clock()
    device = Device(clock)
    device.has_passed = lambda event: False  # type: ignore[method-assign]
    device.seconds = lambda pair: None  # type: ignore[method-assign]
    with open_meter(tmp_path, clock, device=device) as meter:
        run_loop(meter, clock, batches(clock, 2000, 0.01))
        assert len(meter._blocks._steps) <= 256 + 64
    blocks = read_rank(tmp_path).blocks
    assert sum(block.steps for block in blocks) == 2000
    assert {block.device_wait_seconds for block in blocks} == {None}


def test_a_device_that_appears_later_is_timed_from_there_on(tmp_path: Path) -> None:
    clock = Clock()
    device = Device(clock)
    appears = clock.now + 1.5
    find_device = lambda: device if clock.now > appears else None  # noqa: E731
    with measure(tmp_path, clock=clock, events=find_device, sample_system=False) as meter:
        run_loop(meter, clock, batches(clock, 60, 0.01))
    blocks = read_rank(tmp_path).blocks
    with_device = [block.device_wait_seconds is not None for block in blocks]
    assert with_device == sorted(with_device)
    assert with_device[-1]
    assert not with_device[0]


def test_epochs_are_marked_where_they_begin(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock) as meter:
        for _ in range(3):
            run_loop(meter, clock, batches(clock, 10, 0.01))
            clock.sleep(60)
        for number, _ in enumerate(meter.watch(batches(clock, 10, 0.01))):
            clock.sleep(0.05)
            if number == 4:
                break
        clock.sleep(60)
        run_loop(meter, clock, batches(clock, 10, 0.01))
    rank = read_rank(tmp_path)
    epochs = [round(mark.t, 3) for mark in rank.marks if mark.name == "epoch"]
    assert epochs == pytest.approx([60.6, 121.2, 181.8, 242.1])
    assert sum(block.wall_seconds for block in rank.blocks) == pytest.approx(45 * 0.06)
    assert spans_of(rank) == {"between": pytest.approx(240)}
    waited = [block.waits_by_cause.get("epoch", 0) for block in rank.blocks]
    assert sum(waited) == pytest.approx(4 * 0.01)


def test_a_hook_at_the_base_iterator_knows_better_than_the_loop_around_it(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock) as meter:

        def hooked() -> Iterator[list[str]]:
            for _ in range(60):
                clock.sleep(0.03)  # a copy that waits for the device
                meter.fetch_begin(queue_depth=2)
                clock.sleep(0.01)
                meter.fetch_end(["row"])
                yield ["row"]

        run_loop(meter, clock, hooked(), work=0.06)
    found = steady(tmp_path)
    assert stall(found) == pytest.approx(0.1)
    assert sum(block.fetches for block in read_rank(tmp_path).blocks) == 60
    assert {block.queue_depth for block in found} == {2.0}


def test_figures_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock) as meter:
        assert meter.current() == {}
        for number, _ in enumerate(meter.watch(batches(clock, 60, 0.02))):
            clock.sleep(0.08)
            if number == 3:
                assert meter.current()["is_warming"] == 1
        # One that is killed now is readable up to its last second.
        rank = read_rank(tmp_path)
        assert (rank.end, rank.blocks[-1].t > 6 - 1.2) == (None, True)
        meter.see_sample(SystemSample(t=1, processes=2, pss_bytes=512))
        meter.see_sample(SystemSample(t=2, processes=2))
        found = meter.current()
    assert found["stall_fraction"] == pytest.approx(0.2)
    assert found["samples_per_second"] == pytest.approx(40)
    assert found["steps_per_second"] == pytest.approx(10)
    assert found["working_set_bytes"] == 512
    assert not {"is_warming", "tokens_per_second", "device_stall_fraction"} & set(found)


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (ValueError("the loss is nan"), "exception", "ValueError: the loss is nan"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (SystemExit(3), "exception", "SystemExit: 3"),
        (SystemExit(0), "finished", ""),
        (SystemExit(), "finished", ""),
    ],
)
def test_what_ends_the_loop_is_recorded_and_raised_again(
    tmp_path: Path, error: BaseException, reason: str, text: str
) -> None:
    clock = Clock()

    def train() -> None:
        with open_meter(tmp_path, clock) as meter:
            for number, _ in enumerate(meter.watch(batches(clock, 60, 0.02))):
                clock.sleep(0.08)
                if number == 40:
                    raise error

    with pytest.raises(type(error)):
        train()
    rank = read_rank(tmp_path)
    assert (rank.end.reason, rank.end.error) == (reason, text)
    assert sum(block.steps for block in rank.blocks) == 40


def test_a_loader_that_raises_is_recorded_and_raises(tmp_path: Path) -> None:
    def broken() -> Iterator[list[str]]:
        yield ["row"]
        raise OSError("no such shard")

    clock = Clock()
    with pytest.raises(OSError, match="no such shard"), open_meter(tmp_path, clock) as meter:
        run_loop(meter, clock, broken())
    texts = [mark.text for mark in read_rank(tmp_path).marks if mark.name == "error"]
    assert texts == ["the loader raised OSError: no such shard"]


def test_a_fault_of_the_meter_costs_figures_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def break_down(*_: Any) -> None:
        raise ZeroDivisionError("a fault of our own")

    with open_meter(tmp_path, clock) as meter:
        assert len(list(meter.watch([["row"]] * 7))) == 7
        monkeypatch.setattr(meter._tracker, "end_fetch", break_down)
        assert len(list(meter.watch([["row"]] * 13))) == 13
        meter.step()
        meter.mark("note")
        with meter.span("log"):
            pass
        assert meter.is_quiet
    rank = read_rank(tmp_path)
    assert [mark.text for mark in rank.marks if mark.name == "error"] == [
        "the meter has stopped: ZeroDivisionError: a fault of our own"
    ]
    assert len(caplog.records) == 1
    assert rank.end
    assert rank.end.reason == "finished"


def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    clock = Clock()
    with open_meter(tmp_path, clock) as meter:
        run_loop(meter, clock, batches(clock, 30, 0.1))
        meter._journal._writer._file.close()
        meter._journal._writer._file = full.open("wb")
        run_loop(meter, clock, batches(clock, 100, 0.1))
        assert meter.current()["stall_fraction"] == pytest.approx(2 / 3, abs=0.01)
    assert [record.message for record in caplog.records if "has stopped" in record.message]
    assert len(caplog.records) == 1
    rank = read_rank(tmp_path)
    assert rank.end is None
    assert sum(block.steps for block in rank.blocks) < 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_writes_nothing_into_its_parents_record(tmp_path: Path) -> None:
    clock = Clock()
    meter = open_meter(tmp_path, clock)
    run_loop(meter, clock, batches(clock, 20, 0.1))
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        code = 1
        try:
            run_loop(meter, clock, batches(clock, 500, 0.1))
            meter.step()
            meter.mark("note", "from the child")
            meter.close()
            code = 0 if meter.is_quiet else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run_loop(meter, clock, batches(clock, 20, 0.1))
    meter.close()
    rank = read_rank(tmp_path)
    assert sum(block.steps for block in rank.blocks) == 40
    assert "note" not in names(rank)
    assert rank.end is not None


def test_the_memory_that_torch_took_of_its_device_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(total_memory=80),
        max_memory_reserved=lambda: 70,
        max_memory_allocated=lambda: 60,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    known = record_loop(tmp_path, 20, 0.01).values
    assert known["cuda_memory"] == {"total": 80, "reserved_peak": 70, "allocated_peak": 60}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert record_loop(tmp_path / "none", 20, 0.01).values == {"replacements": []}


def test_what_is_known_of_a_run_joins_its_record(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock, peak_tflops=100, data_paths=["a.parquet"]) as meter:
        meter.settings(num_workers=4, prefetch_factor=2, config={"lr": 1e-4, ("odd", 1): 2})
        meter.settings(num_workers=4)
        meter.reason("mfu", "no model was seen")
        meter.reason("mfu", "no model was seen")
        meter.model(ModelShape(num_parameters=10, layers=1, attention_width=4))
        meter.window(ProfileWindow(t=1, steps=3, wall_seconds=2.0))
        meter.mark("note", "a.parquet")
        run_loop(meter, clock, batches(clock, 20, 0.02))
    rank = read_rank(tmp_path)
    assert rank.values["num_workers"] == 4
    assert rank.values["data_paths"] == ["a.parquet"]
    assert isinstance(rank.values["config"], str)
    assert len([line for line in rank.settings if line.values]) == 3
    assert rank.reasons["mfu"] == "no model was seen"
    assert rank.models[0].peak_tflops == 100
    assert rank.windows[0].steps == 3
    assert (rank.marks[0].name, rank.marks[0].text) == ("note", "a.parquet")
    assert sum(block.steps for block in rank.blocks if block.phase == "warmup") == 5


def test_a_batch_is_not_held_while_the_next_is_fetched(tmp_path: Path) -> None:
    made: list[weakref.ref[Any]] = []

    class Batch(list[str]):
        pass

    def loader() -> Iterator[Batch]:
        for _ in range(5):
            assert all(one() is None for one in made)
            batch = Batch(["row"])
            made.append(weakref.ref(batch))
            yield batch
            del batch

    with open_meter(tmp_path, Clock()) as meter:
        for batch in meter.watch(loader()):
            del batch
    assert len(made) == 5


def test_after_the_end_the_loop_goes_on_unmeasured(tmp_path: Path) -> None:
    clock = Clock()
    meter = open_meter(tmp_path, clock)
    meter.close("finished")
    meter.close("exception", "again")
    assert len(list(meter.watch([[1], [2]]))) == 2
    meter.tokens(3)
    meter.settings(late=True)
    with meter.span("log"):
        pass
    rank = read_rank(tmp_path)
    assert rank.end
    assert rank.end.reason == "finished"
    assert "late" not in rank.values


def run_for(meter: Meter, clock: Clock, seconds: float, step_seconds: float) -> None:
    """Steps of all lengths around one, with a long wait every thousand."""
    batch = ["row"] * 4
    end = clock.now + seconds
    number = 0
    while clock.now < end:
        meter.fetch_begin(3)
        clock.now += 0.4 if number % 997 == 0 else 0.001 + number % 17 * 1e-4
        meter.fetch_end(batch)
        meter.tokens(8192, trainable=8000, padded=8192)
        clock.now += step_seconds * (0.9 + number % 19 / 100)
        meter.step()
        number += 1


def test_a_day_takes_few_lines_and_keeps_the_wait_of_every_step(tmp_path: Path) -> None:
    clock = Clock()
    with open_meter(tmp_path, clock, told_steps=True, world_size=64) as meter:
        run_for(meter, clock, 6 * 3600, step_seconds=0.5)
        assert meter._blocks.block_seconds == 60
    blocks = read_rank(tmp_path).blocks
    of_a_day = len(blocks) + 18 * 60  # a block a minute from now on
    assert of_a_day < 3000
    assert (tmp_path / "rank-0.jsonl").stat().st_size / len(blocks) * of_a_day < 4e6
    condensed = [WAIT_SECONDS[byte] for block in blocks for byte in b64decode(block.step_waits)]
    waited = sum(block.host_wait_seconds for block in blocks)
    assert len(condensed) == sum(block.steps for block in blocks) == meter._tracker.num_steps
    assert sum(condensed) == pytest.approx(waited, rel=0.04)
    # The longest wait of a thousand steps is seen as such, hours into the run.
    late = blocks[-60:]
    longest = sum(WAIT_SECONDS[max(b64decode(block.step_waits))] > 0.38 for block in late)
    first, last = late[0].first_fetch, late[-1].first_fetch + late[-1].fetches
    assert longest == len(range(-(-first // 997), -(-last // 997)))


@pytest.mark.parametrize("named", ["run", "./run", "link"])
def test_the_run_that_this_process_is_part_of_is_sampled_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "run").mkdir()
    path = system_file(tmp_path / "run", node_name())
    path.write_text("the supervisor's\n")
    monkeypatch.setenv("FAST_AXOLOTL_MEASURE", str(tmp_path / "run"))
    with measure(named) as meter:
        list(meter.watch([["row"]] * 5))
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"rank-0.jsonl", path.name}
    assert path.read_text() == "the supervisor's\n"
    assert capsys.readouterr().err == ""
