"""What bounds a run: every rule, its order, its evidence and its action."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fast_axolotl.measure import measure
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.verdict import judge
from fast_axolotl.record import ProfileWindow, RunRecord, RunSummary, Verdict, read_run
from records import GIGABYTE, START_TIME, every, make_rank, make_run, make_system, steady


def verdict_of(record: RunRecord) -> Verdict:
    return summarise(record).verdict


def told(verdict: Verdict) -> str:
    return "/".join(filter(None, (verdict.kind, verdict.subtype)))


def stalled(share: float, **values: Any) -> Verdict:
    return verdict_of(make_run(make_rank(wait=steady(share), **values)))


def ranks_with_windows(*collectives: tuple[float, ...], **values: Any) -> RunRecord:
    ranks = []
    for number, seconds in enumerate(collectives):
        rank = make_rank(rank=number, world_size=len(collectives), **values)
        rank.add(
            ProfileWindow(
                t=1.0,
                steps=2,
                wall_seconds=1.0,
                exposed_communication_seconds=sum(seconds),
                collectives=seconds,
            )
        )
        ranks.append(rank)
    return make_run(*ranks)


RUNS: dict[str, tuple[str, Callable[[], RunRecord]]] = {
    "nothing at all": ("inconclusive/unseen", make_run),
    "watched from outside": ("inconclusive/unseen", lambda: make_run(system=make_system())),
    "only warm-up": ("inconclusive/warming", lambda: make_run(make_rank(fetches=0))),
    "199 quick fetches": (
        "inconclusive/short",
        lambda: make_run(make_rank(wait=steady(0.5), fetches=199)),
    ),
    "a queue that drains": (
        "inconclusive/draining",
        lambda: make_run(make_rank(queue=lambda step: 500 - step / 2)),
    ),
    "waits that hide no time": (
        "inconclusive/contradiction",
        lambda: contradicting(0.05),
    ),
    "swapping": (
        "swap",
        lambda: make_run(make_rank(wait=steady(0.5)), system=make_system(swap_in_bytes=1e6)),
    ),
    "memory pressure": (
        "swap",
        lambda: make_run(make_rank(), system=make_system(psi_memory_full_seconds=0.02)),
    ),
    "swapping, seen from outside": (
        "swap",
        lambda: make_run(system=make_system(swap_in_bytes=1e6)),
    ),
    "a full disk": (
        "io",
        lambda: make_run(make_rank(wait=steady(0.5)), system=make_system(read_bytes=0.95e9)),
    ),
    "a disk that is nearly full": (
        "io/near",
        lambda: make_run(make_rank(wait=steady(0.5)), system=make_system(read_bytes=0.75e9)),
    ),
    "a full disk, seen from outside": (
        "io",
        lambda: make_run(system=make_system(read_bytes=0.95e9, psi_io_full_seconds=0.3)),
    ),
    "a busy disk that nobody waits for": (
        "compute",
        lambda: make_run(make_rank(), system=make_system(read_bytes=0.95e9)),
    ),
    "a slow loader": ("data/rate", lambda: make_run(make_rank(wait=steady(0.3)))),
    "a slow loader, reading from the cache": (
        "data/rate",
        lambda: make_run(make_rank(wait=steady(0.3)), system=make_system()),
    ),
    "bursts": ("data/burst", lambda: make_run(make_rank(wait=every(16, 0.3), fetches=3000))),
    "rare long waits": (
        "data/periodic",
        lambda: make_run(make_rank(wait=every(125, 0.3), fetches=900)),
    ),
    "one rank of two that waits": (
        "data/rate",
        lambda: make_run(
            make_rank(world_size=2), make_rank(rank=1, world_size=2, wait=steady(0.4))
        ),
    ),
    "a slow network": (
        "communication/network",
        lambda: ranks_with_windows((0.15, 0.15), (0.14, 0.16)),
    ),
    "a slow rank": ("communication/skew", lambda: ranks_with_windows((0.2, 0.2), (0.01, 0.01))),
    "a busy model": ("compute", lambda: make_run(make_rank(wait=steady(0.02)))),
    "two busy ranks": ("compute", lambda: ranks_with_windows((0.02,), (0.02,))),
    "some stall": ("mixed", lambda: make_run(make_rank(wait=steady(0.07)))),
    "some communication": ("mixed", lambda: ranks_with_windows((0.15,), (0.15,))),
    "ranks whose communication nobody saw": (
        "mixed",
        lambda: make_run(make_rank(world_size=2), make_rank(rank=1, world_size=2)),
    ),
}


def contradicting(share: float) -> RunRecord:
    """A loop that waits, and takes half as long with a cached batch."""
    rank = make_rank(wait=steady(share), replayed=100)
    rank.blocks = [
        replace(block, wall_seconds=block.wall_seconds / 2) if block.phase == "replay" else block
        for block in rank.blocks
    ]
    return make_run(rank)


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_is_right(name: str) -> None:
    expected, make = RUNS[name]
    assert told(verdict_of(make())) == expected


@pytest.mark.parametrize("name", RUNS)
def test_every_verdict_has_a_sentence_evidence_and_one_action(name: str) -> None:
    verdict = verdict_of(RUNS[name][1]())
    assert verdict.headline.endswith(".")
    assert verdict.action.endswith(".")
    assert verdict.evidence
    assert "None" not in " ".join((verdict.headline, verdict.action, *verdict.evidence))


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, "compute"), (0.049, "compute"), (0.051, "mixed"), (0.099, "mixed"), (0.101, "data")],
)
def test_the_thresholds_are_5_and_10_percent(share: float, expected: str) -> None:
    assert stalled(share).kind == expected


def test_the_threshold_comes_with_its_origin() -> None:
    assert "MLPerf Storage passes at 90 % accelerator utilisation" in stalled(0.3).evidence[0]
    assert "threshold 10 %" in stalled(0.3).evidence[0]


def test_a_minute_is_long_enough_whatever_the_number_of_fetches() -> None:
    assert stalled(0.0, own_seconds=2.0, fetches=40).kind == "compute"


@pytest.mark.parametrize(("own_seconds", "fetches", "needed"), [(0.01, 100, 1.0), (2.0, 10, 40.0)])
def test_a_short_run_is_told_how_much_longer_it_must_be(
    own_seconds: float, fetches: int, needed: float
) -> None:
    verdict = stalled(0.0, own_seconds=own_seconds, fetches=fetches)
    assert verdict.seconds_needed == pytest.approx(needed)
    assert "longer" in verdict.action


def test_a_run_still_warming_up_is_told_how_much_longer_it_must_be() -> None:
    settings = {"num_workers": 2, "prefetch_factor": 256}
    verdict = stalled(0.0, fetches=0, warmup_steps=13, settings=settings)
    # 500 more steps of warm-up, and 200 fetches after it, at 10 ms each.
    assert verdict.seconds_needed == pytest.approx(7.0, rel=0.1)


def test_a_draining_queue_is_told_when_it_is_empty() -> None:
    rank = make_rank(queue=lambda step: 500 - step / 2, fetches=600)
    verdict = verdict_of(make_run(rank))
    # 605 steps have taken half a batch each: 200 are left, 400 steps more.
    assert verdict.seconds_needed == pytest.approx(4 + 2, rel=0.15)
    assert "÷" in verdict.evidence[0]


def test_a_queue_that_has_run_dry_is_judged() -> None:
    rank = make_rank(queue=lambda step: max(0.0, 20 - step / 2), fetches=600, wait=steady(0.3))
    assert verdict_of(make_run(rank)).kind == "data"


def test_a_cached_batch_that_agrees_is_evidence() -> None:
    verdict = stalled(0.3, replayed=100)
    assert verdict.kind == "data"
    assert "with a cached batch a step is 30.0 % shorter" in verdict.evidence


def test_a_hidden_wait_is_named_and_does_not_decide() -> None:
    rank = make_rank(wait=lambda fetch: 0.006, device_wait=steady(0.01))
    verdict = verdict_of(make_run(rank))
    assert verdict.kind == "compute"
    assert any("behind work queued on the device" in line for line in verdict.evidence)


def test_the_rank_that_waits_is_named_with_the_skew() -> None:
    ranks = [make_rank(rank=number, world_size=2, wait=steady(0.4 * number)) for number in (0, 1)]
    verdict = verdict_of(make_run(*ranks))
    assert "on rank 1" in verdict.evidence[0]
    assert "rank 1 40.0 %, the least 0.0 %" in verdict.evidence[1]
    assert "skew" in verdict.evidence[1]


def test_the_slow_rank_is_named() -> None:
    verdict = verdict_of(ranks_with_windows((0.2, 0.2), (0.01, 0.01), (0.2, 0.2)))
    assert "rank 1" in verdict.headline
    assert "rank 1" in verdict.action


def test_the_dispatcher_is_named_and_taken_away() -> None:
    settings = {"dispatcher": True, "num_workers": 1, "prefetch_factor": 2}
    ranks = [
        make_rank(world_size=2, wait=steady(0.4), settings=settings),
        make_rank(rank=1, world_size=2, fetches=0, settings=settings),
    ]
    verdict = verdict_of(make_run(*ranks))
    assert told(verdict) == "data/rate"
    assert any("dispatcher" in line for line in verdict.evidence)
    assert "dispatch_batches: false" in verdict.action


def test_swap_is_mentioned_where_the_run_is_too_short_to_judge() -> None:
    record = make_run(make_rank(fetches=10), system=make_system(swap_in_bytes=1e6))
    verdict = verdict_of(record)
    assert told(verdict) == "inconclusive/short"
    assert any("swap" in line for line in verdict.evidence)


ACTIONS: dict[str, tuple[RunRecord, str]] = {
    "no workers": (
        make_run(make_rank(wait=steady(0.3), settings={"num_workers": 0})),
        "dataloader_num_workers: 2 ",
    ),
    "no workers, much reading": (
        make_run(make_rank(wait=steady(0.75), settings={"num_workers": 0})),
        "dataloader_num_workers: 4 ",
    ),
    "two workers": (
        make_run(make_rank(wait=steady(0.5), settings={"num_workers": 2, "prefetch_factor": 2})),
        "dataloader_num_workers: 4 ",
    ),
    "as many workers as cores": (
        make_run(make_rank(wait=steady(0.5), settings={"num_workers": 8, "prefetch_factor": 2})),
        "axolotl preprocess",
    ),
    "as many workers as cores, streaming": (
        make_run(
            make_rank(
                wait=steady(0.5),
                settings={"num_workers": 8, "prefetch_factor": 2, "streaming": True},
            )
        ),
        "dataset_use_rust_streaming: true",
    ),
    "bursts without workers": (
        make_run(make_rank(wait=every(16, 0.3), fetches=3000)),
        "dataloader_num_workers: 2 and dataloader_prefetch_factor: 8 ",
    ),
    "bursts with four workers": (
        make_run(
            make_rank(
                wait=every(16, 0.3),
                fetches=3000,
                settings={"num_workers": 4, "prefetch_factor": 2},
            )
        ),
        "dataloader_prefetch_factor: 4 ",
    ),
    "bursts that the queue should hide": (
        make_run(
            make_rank(
                wait=every(16, 0.3),
                fetches=3000,
                settings={"num_workers": 2, "prefetch_factor": 8},
            )
        ),
        "dataloader_num_workers: 3 ",
    ),
    "every 1,000 rows": (
        make_run(make_rank(wait=every(125, 0.3), fetches=900)),
        "batch_size=100",
    ),
    "streamed packs": (
        make_run(
            make_rank(
                wait=every(125, 0.3),
                fetches=900,
                settings={"streaming": True, "sample_packing": True},
            )
        ),
        "streaming_multipack_buffer_size: 1000 ",
    ),
    "swap with a deep queue": (
        make_run(
            make_rank(settings={"num_workers": 2, "prefetch_factor": 256}),
            system=make_system(swap_in_bytes=1e6, pss_bytes=60 * GIGABYTE),
        ),
        "dataloader_prefetch_factor: 8 ",
    ),
    "swap by another program": (
        make_run(make_rank(), system=make_system(swap_in_bytes=1e6)),
        "other programs",
    ),
    "much padding": (
        make_run(make_rank(tokens=50, padded=100)),
        "sample_packing: true",
    ),
    "a network": (
        ranks_with_windows((0.3,), (0.3,), accumulation=2),
        "gradient_accumulation_steps: 4 ",
    ),
    "nothing to do": (make_run(make_rank()), "Leave the data path as it is"),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_the_action_names_the_setting_that_fits(name: str) -> None:
    record, expected = ACTIONS[name]
    assert expected in verdict_of(record).action


def test_waits_with_every_epoch_ask_for_persistent_workers() -> None:
    summary = summarise(make_run(make_rank(wait=every(125, 0.3), fetches=900)))
    verdict = judge(replace(summary, stall_period_of="epoch"))
    assert "persistent_workers=True" in verdict.action
    assert "smaller shards" in judge(replace(summary, stall_period_of="shard")).action


_SHARES = st.none() | st.floats(0, 1.5)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_figures_get_a_verdict(data: st.DataObject) -> None:
    base: RunSummary = summarise(make_run(make_rank(fetches=250), system=make_system()))
    names = (
        "stall_fraction",
        "host_stall_fraction",
        "device_stall_fraction",
        "cached_stall_fraction",
        "exposed_communication_fraction",
        "pure_communication_fraction",
        "disk_share",
        "psi_memory_full",
        "psi_io_full",
        "queue_depth",
        "queue_drift_per_step",
        "stall_period_fetches",
        "rank_skew",
        "mfu",
        "headroom",
        "limit_share",
    )
    values: dict[str, Any] = {name: data.draw(_SHARES, label=name) for name in names}
    values["fetches"] = data.draw(st.sampled_from([0, 3, 1000]))
    values["steps"] = data.draw(st.sampled_from([0, 3, 1000]))
    values["world_size"] = data.draw(st.sampled_from([1, 2]))
    values["stall_pattern"] = data.draw(st.sampled_from(["", "steady", "burst", "periodic"]))
    values["settings"] = {
        name: data.draw(st.none() | st.integers(0, 300), label=name)
        for name in ("num_workers", "prefetch_factor", "gradient_accumulation")
    }
    verdict = judge(replace(base, **values), skew_share=data.draw(_SHARES), slow_rank=1)
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
    now = [0.0]

    def loader() -> Iterator[list[int]]:
        for fetch in range(800):
            now[0] += wait(fetch)
            yield [0] * 8

    with measure(
        tmp_path,
        accumulation=accumulation,
        sample_system=False,
        environment={},
        clock=lambda: now[0],
        wall_clock=lambda: START_TIME + now[0],
        events=lambda: None,
    ) as meter:
        for _ in meter.watch(loader()):
            now[0] += 0.01
    summary = summarise(read_run(tmp_path))
    assert told(summary.verdict) == expected
    assert summary.stall_period_fetches == period
