"""What bounds a run: every rule, its order, its evidence and its action."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.phases import Phases
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.verdict import judge
from fast_axolotl.record import (
    DeviceSample,
    End,
    ProfileWindow,
    RunRecord,
    Settings,
    Verdict,
    read_run,
)
from support.meter import Clock, batches, open_meter
from support.records import (
    GIGABYTE,
    START_TIME,
    every,
    make_profiled_run,
    make_rank,
    make_ranks,
    make_run,
    make_system,
    steady,
    with_figures,
)


def verdict_of(record: RunRecord) -> Verdict:
    return summarise(record).verdict


def told(verdict: Verdict) -> str:
    return "/".join(filter(None, (verdict.kind, verdict.subtype)))


def run(source: str = "loop", *, system: dict[str, Any] | None = None, **values: Any) -> RunRecord:
    """A run of one rank, and where they are given, of samples of its process tree."""
    rank = make_rank(source=source, **values)
    return make_run(rank, system=None if system is None else make_system(**system))


def two_ranks(*ranks: dict[str, Any]) -> RunRecord:
    return make_run(
        *(make_rank(rank=number, world_size=2, **values) for number, values in enumerate(ranks))
    )


def stalled(share: float, **values: Any) -> Verdict:
    return verdict_of(run(wait=steady(share), **values))


SLOW = steady(0.3)
HALF = steady(0.5)

SWAPPING = {"swap_in_bytes": 2e6, "swap_bytes": GIGABYTE}
RANDOM = {"read_bytes": 120e6, "device_reads": 120e6 / 8192, "device_read_bytes": 120e6}
BUSY: dict[str, Any] = {
    "start": {"processors": 8},
    "cpu_seconds": 4.0,
    "machine_cpu_seconds": 8.0,
    "cpu_wait_seconds": 0.5,
}
"""Eight processors, of which the run gets four."""

RUNS: dict[str, tuple[str, Callable[[], RunRecord]]] = {
    "swapping and waiting": ("swap", lambda: run(wait=HALF, system=SWAPPING)),
    "another program that swaps": ("compute", lambda: run(system={"swap_in_bytes": 5e7})),
    "random reads at 12 % of what the disk gives in order": (
        "io/random", lambda: run(wait=HALF, system={**RANDOM, "psi_io_full_seconds": 0.4}),
    ),
    "every task waits for the disk, the loop included": (
        "io", lambda: run(wait=HALF, system={"psi_io_full_seconds": 0.11}),
    ),
    "tasks that wait for the disk, and no loop": (
        "compute", lambda: run(system={**RANDOM, "psi_io_full_seconds": 0.4}),
    ),
    "random reads that the disk serves well": ("data/rate", lambda: run(wait=HALF, system=RANDOM)),
    "programs that are in each other's way, not in the run's": (
        "compute", lambda: run(system={**BUSY, "cpu_wait_seconds": 0.03}),
    ),
    "training that fills all processors by itself": (
        "compute", lambda: run(system={**BUSY, "cpu_seconds": 7.7}),
    ),
    "a slow loader on a slightly busy machine": (
        "data/rate", lambda: run(wait=HALF, system={**BUSY, "cpu_wait_seconds": 0.15}),
    ),
    "a quota that is used up": (
        "cpu/quota", lambda: run(system={"cpu_seconds": 4.0, "throttled_seconds": 1.0}),
    ),
    "a stolen processor": (
        "cpu/steal", lambda: run(system={"machine_cpu_seconds": 4.0, "steal_seconds": 1.0}),
    ),
}  # fmt: skip
"""Beside the golden runs, of which each kind of verdict has one."""


LIMITED: dict[str, Any] = {
    "start": {"limit_bytes": 32 * GIGABYTE},
    "pss_bytes": 28 * GIGABYTE,
    "largest_anon_bytes": 2 * GIGABYTE,
}


def killed(
    error: str = "exit code -9", *, fetches: int = 600, counter: str = "", **system: Any
) -> RunRecord:
    """A run whose rank left no end, beside a watcher that saw the command end, and perhaps one
    more in a counter."""
    record = run(wait=HALF, fetches=fetches, end=None, system={**LIMITED, **system})
    record.system.end = End(t=60.0, reason="exception", error=error)
    return count_one(record, counter) if counter else record


def count_one(record: RunRecord, counter: str) -> RunRecord:
    *others, last = record.system.samples
    counted = [replace(sample, **{counter: 3}) for sample in others]
    record.system.samples = [*counted, replace(last, **{counter: 4})]
    return record


@pytest.mark.parametrize("fetches", [600, 20, 0])
def test_a_run_that_was_killed_at_its_limit_ran_out_of_memory_however_short(fetches: int) -> None:
    verdict = verdict_of(killed(fetches=fetches))
    assert verdict.kind == "memory"
    assert "87.5 % of its memory limit" in verdict.headline
    assert "signal 9" in verdict.evidence[0]
    assert "longer" not in verdict.action
    before_any_step = make_run(system=killed().system)
    assert verdict_of(before_any_step).kind == "memory"


def growing(size: Callable[[float], float], field: str = "training_anon_bytes") -> RunRecord:
    """A run of 60 seconds and 60 steps a second, of which a part holds so much at a time."""
    record = run(fetches=3600, own_seconds=1 / 60, system={"largest_anon_bytes": GIGABYTE})
    for number, sample in enumerate(record.system.samples):
        sizes = {"training_anon_bytes": GIGABYTE, "anon_bytes": 2 * GIGABYTE, "shared_bytes": 0}
        sizes["pss_bytes"] = 4 * GIGABYTE
        grown = int(size(sample.t))
        sizes[field] += grown
        if field == "training_anon_bytes":
            sizes["anon_bytes"] += grown
        sizes["gpus"] = (DeviceSample(index=1, memory_bytes=GIGABYTE, total_bytes=2 * GIGABYTE),)
        record.system.samples[number] = replace(sample, **sizes)
    return record


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("training_anon_bytes", "the training process"),
        ("anon_bytes", "the workers"),
        ("shared_bytes", "shared memory (/dev/shm)"),
    ],
)
def test_memory_that_grows_with_every_step_is_named_with_when_it_is_full(
    field: str, part: str
) -> None:
    summary = summarise(growing(lambda t: 60e6 * t, field))
    (growth,), verdict = summary.growth, summary.verdict
    assert (growth.part, growth.bytes_per_step) == (part, pytest.approx(1e6, rel=0.02))
    assert growth.full_in_seconds == pytest.approx(60e9 / 60e6)
    assert (verdict.kind, verdict.subtype) == ("memory", "growing")
    assert "16 min 40 s" in verdict.headline
    assert part in verdict.action
    assert summarise(growing(lambda t: 0.7e6 * t, field)).growth == ()
    # Not within a day: a line beside another verdict.
    large = growing(lambda t: 1e6 * t, field)
    large.system.start = replace(large.system.start, memory_bytes=100_000 * GIGABYTE)
    verdict = summarise(large).verdict
    assert verdict.kind == "compute"
    assert f"the memory of {part} grows by 16.7 kB per step" in verdict.evidence[-1]


def test_a_gpu_that_fills_first_is_what_grows() -> None:
    record = growing(lambda t: 6e6 * t)
    for number, sample in enumerate(record.system.samples):
        gpu = replace(sample.gpus[0], memory_bytes=int(GIGABYTE + 6e6 * sample.t))
        record.system.samples[number] = replace(sample, gpus=(gpu,))
    assert summarise(record).growth[0].part == "GPU 1"


@pytest.mark.parametrize(
    "size",
    [
        lambda t: 0.0,
        lambda t: 60e6 * min(t, 20.0),
        lambda t: 60e6 * min(t, 45.0),
        lambda t: 2e9 * (1 - math.exp(-t / 15)),
        lambda t: 300e6 * (t % 10),
        lambda t: 1e9 if t > 40 else 0.0,
        lambda t: 100e6 * math.sin(t),
    ],
    ids=["level", "warm-up", "fills", "saturates", "saw", "once", "wave"],
)
def test_what_warms_up_fills_or_swings_does_not_grow(size: Callable[[float], float]) -> None:
    summary = summarise(growing(size))
    assert (summary.growth, summary.verdict.kind) == ((), "compute")


@pytest.mark.parametrize(
    ("expected", "record"),
    [
        ("memory", lambda: killed("exit code 137")),
        ("data", lambda: killed(pss_bytes=8 * GIGABYTE)),
        ("memory", lambda: killed(pss_bytes=8 * GIGABYTE, counter="oom_kills")),
        ("memory", lambda: killed(pss_bytes=8 * GIGABYTE, counter="machine_oom_kills")),
        ("data", lambda: count_one(run(wait=HALF, system={}), "machine_oom_kills")),
        ("data", lambda: run(wait=HALF, system=LIMITED)),
    ],
)
def test_memory_is_the_verdict_only_where_something_was_killed(
    expected: str, record: Callable[[], RunRecord]
) -> None:
    assert verdict_of(record()).kind == expected


def test_a_worker_or_a_rank_that_was_killed_counts_like_the_run() -> None:
    error = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    rank = make_rank()
    rank.end = End(t=6.0, reason="exception", error=error)
    verdict = verdict_of(make_run(rank, system=make_system(**LIMITED)))
    assert verdict.kind == "memory"
    assert "worker (pid 7)" in verdict.evidence[0]
    # What torch raises, too, where a worker has gone that had sent a tensor.
    rank.end = End(t=6.0, reason="exception", error="EOFError")
    assert verdict_of(make_run(rank, system=make_system(**LIMITED))).kind == "memory"
    ranks = [make_rank(world_size=2), make_rank(rank=1, world_size=2, end=None)]
    ranks[0].end = End(t=6.0, reason="exception", error="RuntimeError: connection closed by peer")
    verdict = verdict_of(make_run(*ranks, system=make_system(**LIMITED)))
    assert verdict.kind == "memory"
    assert verdict.evidence[0].startswith("rank 1 stopped without a message")


def test_a_record_without_an_end_that_was_near_its_limit_says_so() -> None:
    record = run(end=None, system={**LIMITED, "end": None})
    verdict = verdict_of(record)
    assert verdict.kind == "compute"
    assert "if the run is over, it probably ran out of memory" in verdict.evidence[-1]


def test_a_kill_in_the_runs_own_cgroup_is_not_blamed_on_other_programs() -> None:
    for counter, words in (("machine_oom_kills", "other programs"), ("oom_kills", "num_workers=4")):
        record = killed(pss_bytes=2 * GIGABYTE, counter=counter)
        record.ranks[0].settings[0].values.update(num_workers=8, prefetch_factor=2)
        assert words in verdict_of(record).action


def test_a_busy_gpu_has_lost_nothing_to_a_busy_machine() -> None:
    record = run(system={**BUSY, "gpus": (DeviceSample(index=0, utilization=0.97),)})
    verdict = verdict_of(record)
    assert verdict.kind == "compute"
    assert any("other programs used 50.0 %" in line for line in verdict.evidence)


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_is_right_and_has_evidence_and_one_action(name: str) -> None:
    expected, make = RUNS[name]
    verdict = verdict_of(make())
    assert told(verdict) == expected
    assert verdict.headline.endswith(".")
    assert verdict.action.endswith(".")
    assert verdict.evidence
    assert "None" not in " ".join((verdict.headline, verdict.action, *verdict.evidence))


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.049, "compute"), (0.051, "mixed"), (0.099, "mixed"), (0.101, "data")],
)
def test_the_thresholds_are_5_and_10_percent(share: float, expected: str) -> None:
    assert stalled(share).kind == expected


@pytest.mark.parametrize(("own_seconds", "fetches", "needed"), [(0.01, 100, 1.0), (2.0, 10, 40.0)])
def test_a_short_run_is_told_how_much_longer_it_must_be(
    own_seconds: float, fetches: int, needed: float
) -> None:
    verdict = stalled(0.0, own_seconds=own_seconds, fetches=fetches)
    assert verdict.seconds_needed == pytest.approx(needed)
    assert "longer" in verdict.action


def draining(
    steps: int, *, capacity: int = 64, own_seconds: float = 0.1, load_seconds: float = 0.12
) -> RunRecord:
    """A loader 20 % slower than the model behind a queue that is full at first."""
    ready, waits, depths = float(capacity), [], []
    for _ in range(steps):
        wait = 0.0 if ready >= 1 else (1 - ready) * load_seconds
        depths.append(float(int(ready)))
        waits.append(wait)
        ready = min(capacity, ready + (own_seconds + wait) / load_seconds - 1)
    return make_run(
        make_rank(
            wait=lambda fetch: waits[fetch],
            queue=lambda step: depths[step],
            own_seconds=own_seconds,
            warmup_steps=capacity + 1,
            fetches=steps - capacity - 1,
            settings={"num_workers": 2, "prefetch_factor": capacity // 2},
        )
    )


@pytest.mark.parametrize("steps", [300, 380, 400, 540])
def test_a_queue_that_drains_or_has_just_run_dry_gives_no_verdict(steps: int) -> None:
    verdict = verdict_of(draining(steps))
    assert told(verdict) == "inconclusive/draining"
    assert "longer" in verdict.action


@pytest.mark.parametrize("steps", [620, 1500])
def test_a_queue_that_has_run_dry_is_judged_by_what_came_after(steps: int) -> None:
    summary = summarise(draining(steps))
    assert told(summary.verdict) == "data/rate"
    assert summary.stall_fraction == pytest.approx(1 / 6, abs=0.005)
    assert summary.warmup_steps == pytest.approx(390, abs=15)
    assert "when a queue hid waits, are left out" in summary.verdict.evidence[0]


@pytest.mark.parametrize(
    "queue",
    [
        lambda step: abs(32 - step / 20 % 64),
        lambda step: max(40.0, 64 - step / 4),
        lambda step: 64.0 if step < 2900 else 0.0,
        lambda step: 0.5,
        lambda step: 2047 - 0.01 * step,
        lambda step: 700 + (step * 7919 % 11) - 5,
    ],
    ids=["fills again", "settles", "dips", "is empty", "lacks one batch in a hundred", "is noisy"],
)
def test_a_queue_that_is_not_draining_is_no_obstacle(queue: Callable[[int], float]) -> None:
    settings = {"num_workers": 2, "prefetch_factor": 32}
    rank = make_rank(queue=queue, fetches=3000, settings=settings)
    summary = summarise(make_run(rank))
    assert (summary.verdict.kind, summary.fetches) == ("compute", 3000)


def dispatched(workers: int) -> Verdict:
    settings = {"dispatcher": True, "num_workers": workers, "prefetch_factor": 2}
    common = {"settings": settings, "source": "axolotl"}
    return verdict_of(two_ranks({"wait": steady(0.4), **common}, {"fetches": 0, **common}))


def test_a_dispatcher_is_given_workers() -> None:
    few, many = dispatched(1), dispatched(8)
    assert told(few) == "data/rate"
    assert "dataloader_num_workers: 2, " in few.action
    assert many.action.startswith("Make loading cheaper: ")


@pytest.mark.parametrize(("hidden", "is_settled"), [(0.85, True), (0.78, False), (0.6, True)])
def test_a_short_run_is_judged_by_what_its_gpu_does_not_hide(
    hidden: float, is_settled: bool
) -> None:
    figures = with_figures(summarise(make_run()), measured_seconds=13.0, stall_fraction=0.003)
    phases = Phases(step={"forward": 0.57, "other": 0.43}, visible=1.0 - hidden)
    assert Evidence(figures=figures, phases=phases, stall_error=0.004).is_settled == is_settled


INCONCLUSIVE: dict[str, Callable[[], RunRecord]] = {
    "warming": lambda: make_run(make_rank(fetches=0)),
    "short": lambda: make_run(make_rank(fetches=10)),
    "draining": lambda: make_run(make_rank(queue=lambda step: 500 - step / 2)),
}


@pytest.mark.parametrize("name", INCONCLUSIVE)
def test_what_keeps_a_run_from_being_judged_stands_beside_swap_disk_and_its_error(
    name: str,
) -> None:
    record = INCONCLUSIVE[name]()
    record.systems = {"machine": make_system(**SWAPPING, read_bytes=0.8e9)}
    verdict = verdict_of(record)
    assert told(verdict) == f"inconclusive/{name}"
    assert any("swap" in line for line in verdict.evidence)
    assert any("of the disk's capacity" in line for line in verdict.evidence)
    record.ranks[0].add(End(t=1.0, reason="exception", error="OutOfMemoryError: CUDA\nmore."))
    verdict = verdict_of(record)
    assert told(verdict) == f"inconclusive/{name}"
    assert "OutOfMemoryError: CUDA." in verdict.headline
    assert "OutOfMemoryError: CUDA." in verdict.action
    assert "longer" not in verdict.action
    assert verdict.seconds_needed is None


@pytest.mark.parametrize(
    ("stall", "exposed", "expected"),
    [(0.06, 0.19, "gradient_accumulation"), (0.09, 0.05, "at most 10 %"), (0.02, 0.15, "gradient")],
)
def test_mixed_acts_on_the_larger_part(stall: float, exposed: float, expected: str) -> None:
    record = make_profiled_run(
        (exposed,), (exposed,), wait=steady(stall), source="axolotl", settings={"num_workers": 0}
    )
    verdict = verdict_of(record)
    assert verdict.kind == "mixed"
    assert expected in verdict.action
    assert "under 5 % is fine" in verdict.evidence[0]


def test_a_rank_that_is_too_short_does_not_decide() -> None:
    summary = summarise(two_ranks({"wait": SLOW}, {"wait": steady(0.9), "fetches": 20}))
    assert told(summary.verdict) == "data/rate"
    assert summary.deciding_rank == 0
    assert "rank 1 is too short to judge: its steady phase has 20 fetches" in summary.notes


BURSTS: dict[str, Any] = {"wait": every(16, 0.3), "fetches": 3000}


ACTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "two workers, where no number of workers would do": (
        "axolotl", {"wait": steady(0.9)}, {"num_workers": 2},
        "8, because 2 workers cannot keep up; about 20.0 are needed, but there are only 8",
    ),
    "bursts with four workers, a loop of one's own": (
        "loop", BURSTS, {"num_workers": 4, "prefetch_factor": 2}, "DataLoader(prefetch_factor=4); ",
    ),
    "a stream of few files": (
        "transformers", {"wait": steady(0.8)}, {"num_workers": 1, "num_shards": 3},
        "TrainingArguments(dataloader_num_workers=3), because 1 worker cannot keep up",
    ),
    "a quota that is used up": (
        "axolotl", {"system": {"cpu_seconds": 4.0, "throttled_seconds": 1.0}}, {"num_workers": 8},
        "Raise the CPU quota (cpu.max, docker run --cpus, resources.limits.cpu)",
    ),
    "random reads": (
        "transformers", {"wait": HALF, "system": {**RANDOM, "psi_io_full_seconds": 0.4}},
        {"num_workers": 2}, "copy the data to a local NVMe drive or into memory",
    ),
}  # fmt: skip
"""Who trains, how it goes, the settings recorded, and what is advised; the rest is golden."""


@pytest.mark.parametrize("name", ACTIONS)
def test_the_action_names_the_setting_that_fits(name: str) -> None:
    source, values, settings, expected = ACTIONS[name]
    assert expected in verdict_of(run(source, settings=settings, **values)).action


def test_workers_are_counted_for_the_ranks_that_share_a_machine() -> None:
    def action(hosts: str, workers: int) -> str:
        settings = {"num_workers": workers, "prefetch_factor": 2}
        ranks = make_ranks(8, wait=steady(0.8), source="axolotl", settings=settings)
        for rank, host in zip(ranks, hosts, strict=True):
            rank.start = replace(rank.start, host=host, environment={"cores": 64})
        return verdict_of(make_run(*ranks)).action

    assert "num_workers" not in action("aaaaaaaa", 8)
    assert "dataloader_num_workers: 8, " in action("aaaaaaaa", 4)
    assert "dataloader_num_workers: 16, " in action("aaaabbbb", 4)


def test_a_window_that_saw_no_communication_is_not_asked_for_again() -> None:
    reason = "the profiler saw no known communication between the 2 ranks"
    for why, words in (
        (reason, f"fast-axolotl scale: {reason}"),
        ("no profiler window: another profiler was running", "--profile-steps 5 -- COMMAND."),
        ("", "--profile-steps 5 -- COMMAND."),
    ):
        record = two_ranks({}, {})
        for rank in record.ranks.values():
            reasons = {"exposed_communication_seconds": why}
            if why == reason:
                rank.add(ProfileWindow(t=1.0, steps=2, wall_seconds=1.0, reasons=reasons))
            elif why:
                rank.add(Settings(t=1.0, reasons={"exposed_communication_fraction": why}))
        verdict = verdict_of(record)
        assert (verdict.kind, words in verdict.action) == ("mixed", True), verdict.action
        assert f"was not measured: {why}" in " ".join(verdict.evidence)


_SHARES = st.none() | st.floats(0, 1.5)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_figures_get_a_verdict(data: st.DataObject) -> None:
    base = summarise(make_run(make_rank(fetches=250), system=make_system()))
    values: dict[str, Any] = {name: data.draw(_SHARES, label=name) for name in base.figures}
    values["duration_seconds"] = 100.0
    values["fetches"] = data.draw(st.sampled_from([0, 3, 1000]))
    values["steps"] = data.draw(st.sampled_from([0, 3, 1000]))
    values["world_size"] = data.draw(st.sampled_from([1, 2]))
    values["stall_pattern"] = data.draw(st.sampled_from(["", "steady", "burst", "periodic"]))
    values["settings"] = {
        name: data.draw(st.none() | st.integers(0, 300), label=name)
        for name in ("num_workers", "prefetch_factor", "gradient_accumulation")
    }
    verdict = judge(Evidence(figures=with_figures(base, **values), skew_share=data.draw(_SHARES)))
    assert verdict.headline
    assert verdict.action


@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize(
    ("wait", "expected", "period"),
    [
        (steady(0.02), "compute", None),
        (steady(0.3), "data/rate", None),
        (every(16, 0.3), "data/burst", 16),
        (every(125, 0.6), "data/periodic", 125),
    ],
)
def test_the_meter_and_the_verdict_agree_with_what_was_injected(
    tmp_path: Path,
    accumulation: int,
    wait: Callable[[int], float],
    expected: str,
    period: int | None,
) -> None:
    clock = Clock(START_TIME)
    with open_meter(tmp_path, clock, accumulation=accumulation) as meter:
        for _ in meter.watch(batches(clock, 800, wait)):
            clock.sleep(0.01)
    summary = summarise(read_run(tmp_path))
    assert told(summary.verdict) == expected
    assert summary.stall_period_fetches == (period and pytest.approx(period, rel=0.07))
