"""The figures of a run from made-up records: what they are, and why they are missing."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.measure.ranks import DEEPEST_QUEUE, Pattern, find_pattern
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import (
    DeviceSample,
    End,
    Histogram,
    Log,
    Mark,
    ModelShape,
    ProfileWindow,
    RankRecord,
    RunRecord,
    RunSummary,
    StackLine,
    Stacks,
    SystemRecord,
    SystemSample,
    SystemStart,
)
from fast_axolotl.record.schema import Phase
from support.records import (
    GIGABYTE,
    START_TIME,
    make_profiled_run,
    make_rank,
    make_ranks,
    make_run,
    make_system,
    steady,
)

SHAPE = ModelShape(
    num_parameters=1_000_000_000,
    layers=16,
    attention_width=2048,
    sequence_len=1024,
    device_name="NVIDIA H200",
)


def bare_system(*samples: SystemSample) -> SystemRecord:
    return SystemRecord(
        start=SystemStart(time=START_TIME, host="machine", root_pid=1), samples=list(samples)
    )


STACKS = Stacks(
    t=9.0,
    who="training",
    seconds=9.0,
    lines=(
        StackLine(phase="preparing", file="/a/train.py", line=7, function="tokenise", seconds=2.0),
        StackLine(phase="other", file="/a/train.py", line=9, function="main", seconds=1.0),
    ),
)


def full_run() -> RunRecord:
    """Two ranks with everything that can be recorded."""
    settings = {"num_workers": 2, "prefetch_factor": 2, "sample_packing": True}
    settings |= {"cuda_memory": {"total": 9, "reserved_peak": 8, "allocated_peak": 7}}
    ranks = make_ranks(
        2,
        wait=steady(0.2),
        device_wait=steady(0.02),
        tokens=7000,
        padded=8000,
        queue=lambda step: 3.0,
        settings={**settings, "tensor_parallel": 1, "replacements": ["fetch"]},
        rows=16,
        trainable_tokens=5000,
        num_bytes=64_000,
        sequence_tokens=7000,
        sequence_squares=7000 * 500,
        spans={"evaluate": 0.5},
        phases={"waiting": 0.2, "preparing": 0.1, "forward": 0.3, "other": 0.1, "between/other": 1},
    )
    idle = StackLine(phase="idle", file="queue.py", line=1, function="get", seconds=9.0)
    for rank in ranks:
        rank.add(Stacks(t=1.0, who="workers", seconds=3.0, lines=(idle,)))
        rank.add(STACKS)
        for name, seconds in (("first_fetch", 1.0), ("first_batch", 1.5), ("first_step", 2.5)):
            rank.marks.insert(0, Mark(t=seconds, name=name))
        # More devices than one, for an MFU that can be.
        rank.add(replace(SHAPE, is_packed=True, num_devices=64))
        rank.add(Log(t=3.0, step=200, values={"tokens/train_per_sec_per_gpu": 1000.0}))
        rank.add(Phase(t=4.0, name="evaluate", seconds=3.0))
        window = ProfileWindow(t=5.0, steps=5, wall_seconds=1.0, collectives=(0.01, 0.02))
        known = {"device_idle_seconds": 0.05, "exposed_communication_seconds": 0.04}
        rank.add(replace(window, **known))
    sizes = {"pss_anon_bytes": 2 * GIGABYTE, "pss_shared_bytes": GIGABYTE}
    sizes |= {"read_bytes": 1e7, "device_reads": 10, "device_read_bytes": 1e7}
    times = {"cpu_seconds": 4.0, "machine_cpu_seconds": 4.5}
    times |= dict.fromkeys(("cpu_wait_seconds", "steal_seconds", "throttled_seconds"), 0.01)
    start = {"limit_bytes": 32 * GIGABYTE, "processors": 64, "disk_bytes_per_second": 1e9}
    system = make_system(swap_bytes=0, oom_kills=0, start=start, **sizes, **times)
    memory = {"memory_bytes": 40 * GIGABYTE, "total_bytes": 140 * GIGABYTE}
    gpu = DeviceSample(index=0, utilization=0.9, power_watts=500.0, clock_mhz=1900.0, **memory)
    system.samples = [replace(sample, gpus=(gpu,)) for sample in system.samples]
    return make_run(*ranks, system=system)


NO_NUMBERS: dict[str, Any] = {"wall_seconds": math.nan, "host_wait_seconds": math.inf}
NO_NUMBERS |= dict.fromkeys(("t", "device_wait_seconds", "queue_depth"), math.nan)
NO_NUMBERS |= {"spans": {"log": math.nan}}

RECORDS = {
    "nothing": lambda: make_run(),
    "a rank that only started": lambda: make_run(RankRecord(start=make_rank().start)),
    "warm-up only": lambda: make_run(make_rank(fetches=0)),
    "a plain loop": lambda: make_run(make_rank(wait=steady(0.3))),
    "a loop that was killed": lambda: make_run(make_rank(wait=steady(0.3), end=None)),
    "no number anywhere": lambda: make_run(altered(make_rank(), "steady", **NO_NUMBERS)),
    "steps without fetches": lambda: make_run(make_rank(fetches=0, warmup_steps=0, end=None)),
    "watched from outside": lambda: make_run(system=make_system()),
    "watched without a sample": lambda: make_run(system=bare_system()),
    "watched for one sample": lambda: make_run(system=bare_system(SystemSample(t=0, processes=1))),
    "two ranks, one empty": lambda: make_run(make_rank(), make_rank(rank=1, fetches=0)),
    "everything": full_run,
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_figure_is_a_finite_number_or_is_missing_for_a_reason(name: str) -> None:
    summary = summarise(RECORDS[name]())
    values = summary.as_dict()
    numbers = {name: value for name, value in values.items() if isinstance(value, float)}
    assert {name for name, value in numbers.items() if not math.isfinite(value)} == set()
    assert all(map(math.isfinite, summary.ledger.values()))
    assert set(summary.reasons) == {name for name, value in values.items() if value is None}
    assert all(len(text) > 10 for text in summary.reasons.values())


def figures(source: str = "loop", **values: Any) -> RunSummary:
    """The figures of one rank."""
    return summarise(make_run(make_rank(source=source, **values)))


def watched(**values: Any) -> RunSummary:
    """The figures of a run that was watched from outside."""
    return summarise(make_run(system=make_system(**values)))


def altered(rank: RankRecord, phase: str = "", **changes: Any) -> RankRecord:
    """The rank with other values in the blocks of a phase, or in its last block."""
    for number, block in enumerate(rank.blocks):
        if block.phase == phase or (not phase and number == len(rank.blocks) - 1):
            rank.blocks[number] = replace(block, **changes)
    return rank


def test_a_run_that_records_everything_has_every_figure() -> None:
    summary = summarise(full_run())
    rhythm = {"stall_period_fetches", "stall_period_rows"}
    assert set(summary.reasons) == {*rhythm, "straggler_rank"}
    assert repr(summary) == f"<RunSummary of {summary.run_dir}: {summary.verdict.headline}>"
    page = summary._repr_html_()
    assert page.startswith(f"<b>{summary.verdict.headline}</b>")
    assert page.count("<tr>") == 5


def test_the_stall_is_a_ratio_of_sums_over_the_steady_phase() -> None:
    summary = figures(wait=steady(0.3))
    assert summary.stall_fraction == pytest.approx(0.3)
    assert summary.host_stall_fraction == summary.stall_fraction
    assert (summary.stall_source, summary.device_stall_fraction) == ("host", None)
    assert (summary.steps, summary.fetches, summary.warmup_steps) == (600, 600, 5)
    assert summary.wait_p50_seconds == pytest.approx(0.01 * 3 / 7, rel=0.02)
    assert summary.step_p50_seconds == pytest.approx(0.01 / 0.7, rel=0.02)
    assert summary.steps_per_second == pytest.approx(70)


def test_where_device_waits_are_known_they_are_the_stall() -> None:
    summary = figures(wait=steady(0.5), device_wait=steady(0.02))
    assert (summary.stall_source, summary.stall_fraction) == ("device", pytest.approx(0.02))
    assert summary.host_stall_fraction > 0.5
    assert summary.wait_max_seconds == pytest.approx(0.01 * 2 / 98, rel=0.02)
    # Those of a part of the run do not stand for all of it.
    rank = make_rank(wait=steady(0.3), device_wait=steady(0.3), fetches=3000)
    rank.blocks[::2] = [replace(block, device_wait_seconds=None) for block in rank.blocks[::2]]
    assert summarise(make_run(rank)).stall_source == "host"


def test_tokens_of_three_kinds_are_summed_over_ranks() -> None:
    one, two = (
        make_rank(rank=rank, tokens=90, padded=100, trainable_tokens=0) for rank in range(2)
    )
    alone, both = summarise(make_run(one)), summarise(make_run(one, two))
    assert alone.tokens_per_second == pytest.approx(9000)
    assert both.tokens_per_second == pytest.approx(18_000)
    assert both.padded_tokens_per_second == pytest.approx(20_000)
    assert both.padding_share == pytest.approx(0.1)
    # A rank or a block that did not count leaves no sum.
    assert summarise(make_run(make_rank(tokens=90), make_rank(rank=1))).tokens_per_second is None
    rank = altered(make_rank(tokens=90, padded=100, num_bytes=8), padded_tokens=None)
    summary = summarise(make_run(rank))
    assert summary.tokens_per_second == pytest.approx(9000)
    assert (summary.padded_tokens_per_second, summary.padding_share) == (None, None)
    assert summary.reasons["padded_tokens_per_second"].startswith("some batches were not counted")
    # Lengths of sequences that are looked at now and then are enough.
    rank = make_rank(sequence_tokens=100, sequence_squares=5000)
    altered(rank, sequence_tokens=None, sequence_squares=None)
    assert summarise(make_run(rank)).mean_attended_length == 50


def test_rows_of_packed_samples_are_unknown_unless_they_were_counted() -> None:
    unknown = figures(settings={"sample_packing": True})
    assert unknown.rows_per_second is None
    assert "packed" in unknown.reasons["rows_per_second"]
    assert figures(settings={"sample_packing": True}, rows=100).rows_per_second is not None


def test_mfu_takes_tokens_and_devices_of_all_ranks() -> None:
    def modelled(**values: Any) -> RankRecord:
        rank = make_rank(tokens=100, **values)
        rank.add(SHAPE)
        return rank

    alone = summarise(make_run(modelled()))
    both = summarise(make_run(modelled(world_size=2), modelled(rank=1, world_size=2)))
    assert both.mfu == pytest.approx(alone.mfu)
    assert both.model_flops_per_second == pytest.approx(2 * (alone.model_flops_per_second or 0))
    # A dispatcher reads the tokens of all devices.
    settings = {"dispatcher": True}
    other = make_rank(rank=1, world_size=2, fetches=0, settings=settings)
    both = summarise(make_run(modelled(world_size=2, settings=settings), other))
    assert both.mfu == pytest.approx((alone.mfu or 0) / 2)


def test_samples_of_the_machine_are_those_of_the_steady_phase() -> None:
    rank = make_rank(fetches=1000)
    system = make_system(samples=100)
    system.samples = [
        replace(sample, pss_bytes=GIGABYTE if sample.t < 11 else 9 * GIGABYTE)
        for sample in system.samples
    ]
    summary = summarise(make_run(rank, system=system))
    assert summary.working_set_bytes == GIGABYTE
    assert summary.working_set_peak_bytes == 9 * GIGABYTE
    unsteady = summarise(make_run(make_rank(fetches=0), system=make_system()))
    for name in ("working_set_bytes", "rss_bytes"):
        assert getattr(unsteady, name) is None
        assert "too few samples" in unsteady.reasons[name]
    assert watched().working_set_bytes == 4 * GIGABYTE
    unread = summarise(RECORDS["watched for one sample"]())
    assert "as its own user or as root" in unread.reasons["working_set_bytes"]


def test_the_share_of_the_limit_is_of_what_cannot_give_way() -> None:
    """A process that has mapped 40 GB of Arrow files under a limit of 8 GB is in no danger."""
    limit = {"limit_bytes": 8 * GIGABYTE}
    mapped = {"rss_bytes": 43 * GIGABYTE}
    sizes = {"pss_anon_bytes": GIGABYTE, "pss_shared_bytes": GIGABYTE, "pss_bytes": 42 * GIGABYTE}
    summary = summarise(make_run(make_rank(), system=make_system(start=limit, **sizes, **mapped)))
    assert summary.working_set_bytes == summary.working_set_peak_bytes == 2 * GIGABYTE
    assert (summary.limit_bytes, summary.limit_share) == (8 * GIGABYTE, 0.25)
    # It is no less than one process proves, and where PSS cannot be read that of resident sizes.
    assert watched(start=limit, largest_anon_bytes=6 * GIGABYTE).limit_share == 0.75
    unread = watched(start=limit, pss_bytes=None, anon_bytes=GIGABYTE, shared_bytes=GIGABYTE)
    assert unread.limit_share == 0.25
    # Without a limit it is of the machine itself.
    assert watched().limit_bytes == 64 * GIGABYTE


def test_processors_that_others_take_are_those_that_the_run_does_not_use() -> None:
    used = {"cpu_seconds": 2.0, "machine_cpu_seconds": 6.0}
    waits = {"cpu_wait_seconds": 0.25}
    refused = {"steal_seconds": 2.0, "throttled_seconds": 0.5}
    summary = watched(start={"processors": 8}, **used, **waits, **refused)
    expected = {"cpu_cores": 2.0, "other_cpu_share": 0.5, "cpu_wait_share": 0.25}
    # Of the time that was wanted: 2 of 2 + 6, and 0.5 of 0.5 + 2.
    expected |= {"cpu_steal_share": 0.25, "cpu_throttled_share": 0.2}
    assert {name: getattr(summary, name) for name in expected} == pytest.approx(expected)


def test_the_disk_has_a_capacity_for_large_requests_alone() -> None:
    values = {"read_bytes": 19e6, "device_reads": 19, "device_read_bytes": 19e6}
    start = {"disk_bytes_per_second": 20e6}
    summary = summarise(make_run(system=make_system(start=start, **values)))
    assert summary.disk_request_bytes == pytest.approx(1e6, rel=0.01)
    assert (summary.disk_bytes_per_second, summary.disk_share) == (20e6, pytest.approx(0.95))
    small = make_system(start=start, **{**values, "device_reads": 4639})
    summary = summarise(make_run(system=small))
    assert (summary.disk_bytes_per_second, summary.disk_share) == (None, None)
    assert "small requests" in summary.reasons["disk_bytes_per_second"]
    why = {"disk_bytes_per_second": "data is not on a device"}
    start = {"disk_bytes_per_second": None, "reasons": why}
    summary = summarise(make_run(system=make_system(start=start, **values)))
    assert summary.reasons["disk_bytes_per_second"] == "data is not on a device"


def test_free_gpu_memory_is_the_least_of_all_devices_and_of_torch() -> None:
    system = make_system()
    devices = (
        DeviceSample(index=0, memory_bytes=60, total_bytes=100),
        DeviceSample(index=1, memory_bytes=30, total_bytes=100),
    )
    system.samples = [replace(sample, gpus=devices) for sample in system.samples]
    assert summarise(make_run(make_rank(), system=system)).gpu_free_bytes == 40
    held = {"cuda_memory": {"total": 100, "reserved_peak": 95, "allocated_peak": 50}}
    rank = make_rank(settings=held)
    assert summarise(make_run(rank, system=system)).gpu_free_bytes == 5
    assert summarise(make_run(rank)).gpu_free_bytes == 5
    other = make_rank(rank=1, settings={"cuda_memory": {"total": 100, "allocated_peak": 60}})
    assert summarise(make_run(rank, other)).gpu_peak_allocated_bytes == 60
    alone = summarise(make_run(make_rank()))
    assert alone.gpu_peak_allocated_bytes is None
    assert alone.reasons["gpu_peak_allocated_bytes"] == alone.reasons["gpu_memory_bytes"]


def test_fetches_taken_for_steps_before_the_first_told_step_are_warm_up() -> None:
    rank = make_rank(fetches=40)
    hidden = sum(block.steps for block in rank.blocks)
    rank.blocks += [replace(block, first_step=block.first_step + 100) for block in rank.blocks]
    summary = summarise(make_run(rank))
    assert (summary.steps, summary.warmup_steps) == (40, hidden + 5)


def counted(name: str, *values: float) -> RunSummary:
    """A run of which nothing but a counter is known, once a second."""
    one = SystemSample(t=0.0, processes=1)
    samples = (replace(one, t=float(t), **{name: int(value)}) for t, value in enumerate(values))
    return summarise(make_run(system=bare_system(*samples)))


def test_counters_that_run_backwards_count_as_nothing() -> None:
    found = counted("read_bytes", 0, 100, 20, 120)
    assert found.read_bytes_per_second == pytest.approx(200 / 3)


def test_swap_is_sustained_from_half_of_the_samples_on() -> None:
    def swapping(grown: list[int], unit: float = 1e6) -> bool | None:
        counters = [unit * sum(grown[:number]) for number in range(len(grown) + 1)]
        return counted("swap_in_bytes", *counters).is_swap_sustained

    assert swapping([1, 1, 1]) is True
    assert swapping([0, 0, 0]) is False
    assert swapping([1, 1, 1, 0, 0, 0]) is True
    assert swapping([1, 1, 1, 0, 0, 0, 0]) is False
    assert swapping([1, 1, 0, 1, 1, 0, 1, 1]) is True
    assert swapping([1, 1]) is None
    assert swapping([1, 1, 1], unit=4096) is False


def test_pure_communication_is_every_collective_at_its_least_over_ranks() -> None:
    summary = summarise(make_profiled_run((0.1, 0.3), (0.2, 0.05)))
    assert summary.pure_communication_fraction == pytest.approx(0.15)
    assert summary.exposed_communication_fraction == pytest.approx(0.4)
    unlike = summarise(make_profiled_run((0.1, 0.3), (0.2,)))
    assert unlike.pure_communication_fraction is None
    assert "the same collectives" in unlike.reasons["pure_communication_fraction"]


def test_the_end_of_a_run_is_that_of_its_worst_rank_and_its_earliest_error() -> None:
    fine, other = (make_rank(rank=n, world_size=2, end=None if n else "finished") for n in range(2))
    assert summarise(make_run(fine, other)).end_reason == "cut off"
    other.start = replace(other.start, time=other.start.time + 20.0)
    other.add(End(t=49.0, reason="exception", error="ValueError: no"))
    summary = summarise(make_run(fine, other))
    assert (summary.is_finished, summary.end_reason) == (False, "exception")
    first = make_rank(world_size=2, end=None)
    first.add(End(t=70.0, reason="exception", error="RuntimeError: gloo: closed by peer"))
    assert summarise(make_run(first, other)).error == "rank 1: ValueError: no"
    other.start = replace(other.start, time=other.start.time + 2.0)
    assert summarise(make_run(first, other)).error.startswith("rank 0: RuntimeError")


def test_a_record_tells_what_is_wrong_with_itself() -> None:
    rank = make_rank(world_size=4)
    rank.add(Mark(t=1.0, name="clock_step", text="the date moved by +3.0 s"))
    record = make_run(rank)
    record.notes.append("rank-0.jsonl: cut off in line 7")
    assert summarise(record).notes[:3] == (
        "rank-0.jsonl: cut off in line 7",
        "only 1 of 4 ranks left a record, and sums cover only those; if other nodes recorded on "
        "their own disks, copy their rank-*.jsonl and system-*.jsonl files into this folder",
        "rank 0: the date moved by +3.0 s",
    )


@pytest.mark.parametrize(
    ("rank_end", "reason", "error"),
    [
        ("finished", "exception", "exit code 3"),
        (None, "exception", "exit code -15"),
        (None, "finished", ""),
    ],
)
def test_who_supervised_the_command_knows_how_it_ended(
    rank_end: str | None, reason: Any, error: str
) -> None:
    system = make_system(start={"source": "run"})
    system.end = End(t=60.0, reason=reason, error=error)
    summary = summarise(make_run(make_rank(end=rank_end), system=system))
    assert (summary.end_reason, summary.error) == (reason, error)


def find(*waits: tuple[float, int], **causes: float) -> Pattern:
    """The pattern of so many waits of these lengths."""
    histogram = Histogram()
    for seconds, count in waits:
        histogram.add(seconds, count)
    return find_pattern(histogram, causes)


@pytest.mark.parametrize(
    ("period", "kind"),
    [(4, "burst"), (16, "burst"), (62.5, "burst"), (64, "burst"), (DEEPEST_QUEUE + 1, "periodic")],
)
def test_a_period_that_a_queue_can_hide_is_a_burst(period: float, kind: str) -> None:
    long = (0.1, 600)
    assert find(long, (0.0, round(600 * period) - 600)) == (kind, pytest.approx(period), "rows")
    # Short waits in between change nothing.
    strays = find(long, (0.02, 60), (0.0, round(600 * period) - 660))
    assert strays == (kind, pytest.approx(period), "rows")


def test_waits_that_vary_by_chance_or_hold_little_are_steady() -> None:
    assert find((0.02, 100), (0.01, 1500)).kind == "steady"
    chance = random.Random(2)
    assert find(*((chance.expovariate(10), 1) for _ in range(2000))).kind == "steady"
    assert find() == find((0.5, 1), (0.0, 900)) == find((0.0, 900)) == Pattern()


def test_waits_that_come_with_epochs_are_named_after_them() -> None:
    assert find((0.1, 5), (0.0, 900), epoch=0.9) == ("periodic", 181, "epoch")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000)), max_size=60))
def test_any_waits_give_an_answer(waits: list[tuple[float, int]]) -> None:
    found = find(*waits)
    assert found.kind in ("steady", "burst", "periodic")
    assert (found.period_fetches is None) is (found.kind == "steady")
    assert found.period_fetches is None or found.period_fetches >= 1
