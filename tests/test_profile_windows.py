"""Windows of the profiler again and again: when they open, what is kept, what ranks show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fast_axolotl.cli.options import parse_duration
from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.profiler import Event, WindowProfiler, _condense, window_of
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunRecord
from fast_axolotl.record.schema import is_collective
from fast_axolotl.report.series import read_series
from support.children import FAST_AXOLOTL, run_child
from support.hosts import FakeMeter
from support.records import make_profiled_run


def opened(
    pace: Callable[[int], float], every: float = 60.0, steps: int = 4000
) -> dict[int, float]:
    """Steps after which windows open, and when; no profiler is started."""
    now, found = 0.0, {}
    profiler = WindowProfiler(FakeMeter(), 5, every=every)  # type: ignore[arg-type]
    profiler.clock = lambda: now
    profiler._start = lambda: found.update({profiler._seen: now})  # type: ignore[method-assign]
    for step in range(steps):
        now += pace(step)
        profiler.step_end()
    return found


@pytest.mark.parametrize("seconds", [0.05, 0.3, 4.0])
def test_windows_come_about_as_often_as_asked_a_power_of_two_apart(seconds: float) -> None:
    found = opened(lambda step: seconds)
    [gap] = {later - earlier for earlier, later in pairwise(found)}
    assert (min(found), gap.bit_count()) == (20, 1)
    assert 0.7 * 60 <= gap * seconds <= 1.5 * 60
    assert list(opened(lambda step: seconds, every=0.0)) == [20]


@pytest.mark.parametrize("paces", [(4.0, 0.05), (0.05, 4.0)])
def test_a_pace_that_changes_is_followed(paces: tuple[float, float]) -> None:
    times = list(opened(lambda step: paces[step >= 5000], steps=10_000).values())
    assert 0.6 * 60 <= times[-1] - times[-2] <= 1.5 * 60
    assert len(times) <= 5000 * sum(paces) / 42 + 8


def test_sums_of_neighbours_keep_the_waiting() -> None:
    # 5 steps of 900 collectives; of 8 ranks another is late in every half of a step.
    noise = random.Random(1)
    late = [one for one in noise.choices(range(8), k=10) for _ in range(450)]
    ranks = [[noise.gauss(0.1 if one == rank else 1.5, 0.02) for one in late] for rank in range(8)]
    short = [_condense(rank) for rank in ranks]
    single, summed = (sum(map(min, zip(*one, strict=True))) for one in (ranks, short))
    longest = max(map(sum, ranks))
    assert longest - summed == pytest.approx(longest - single, rel=0.03)
    assert (len(short[0]), _condense([0.5, 0.25]), _condense([])) == (128, (0.5, 0.25), ())


def test_kernels_of_all_kinds_are_communication_and_what_is_not_known_is_no_zero() -> None:
    names = ("ncclDevKernel_AllGather", "rcclGeneric", "nvshmemi_put", "multimem_all_reduce")
    assert all(map(is_collective, names))
    assert not any(map(is_collective, ("triton_poi_fused_all_reduce_0", "warp_all_reduce", "gemm")))
    work = Event("gemm", 0, 10**6, is_device=True, is_mark=False)
    window = window_of([work], t=1.0, steps=1, first_step=20, world_size=2)
    assert window.communication_seconds is window.exposed_communication_seconds is None
    assert "between the 2 ranks" in window.reasons["exposed_communication_seconds"]
    gloo = Event("gloo:all_reduce", 0, 2 * 10**6, is_device=False, is_mark=False)
    assert window_of([work, gloo], t=1.0, steps=1, world_size=2).num_collectives == 1


def course(*shares: float, shift: int = 0) -> RunRecord:
    """Two ranks with windows of one second; the second comes last and never waits."""
    record = make_profiled_run(shares, (0.01,) * len(shares))
    for number, rank in record.ranks.items():
        [window] = rank.windows
        rank.windows = [
            replace(
                window,
                t=1.0 + place,
                first_step=20 + 64 * place + shift * number,
                exposed_communication_seconds=share,
                collectives=(share,),
            )
            for place, share in enumerate(window.collectives)
        ]
    return record


def test_the_verdict_is_on_all_windows_and_tells_how_the_share_moved() -> None:
    record = course(0.12, 0.13, 0.2, 0.25, 0.31, 0.31)
    summary = summarise(record)
    assert summary.exposed_communication_fraction == pytest.approx(1.32 / 6)
    assert summary.pure_communication_fraction == pytest.approx(0.01)
    assert "rank 1" in summary.verdict.headline
    assert read_series(record, summary)["communication"]["exposed"][::5] == [0.12, 0.31]
    apart = summarise(course(0.3, 0.3, shift=8))
    assert apart.reasons["pure_communication_fraction"]


def test_a_duration_is_read_and_too_short_a_distance_is_refused(tmp_path: Path) -> None:
    assert [parse_duration(text, least=30) for text in ("90s", "10m", "1.5 H")] == [90, 600, 5400]
    for text in ("10", "m", "-5m", "1e3s", "29s"):
        with pytest.raises(
            UsageError, match="not a duration of at least 30s; write 90s, 10m or 1h"
        ):
            parse_duration(text, least=30)
    done = run_child(*FAST_AXOLOTL, "measure", "--profile-every", "9s", "--", "true", cwd=tmp_path)
    assert (done.returncode, "at least 30s" in done.stderr) == (2, True)
