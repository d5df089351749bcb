"""Where the time of a step goes, told by looks at the stack: real loops whose truth is what they
sleep, and sums whose truth is made up."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure import measure
from fast_axolotl.measure.stacks import Looks
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunSummary, StackLine, Stacks, read_run
from support.records import make_rank, make_ranks, make_run, steady

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

NAP = 0.008
STEPS = 220

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Rows(data.Dataset):  # type: ignore[name-defined,misc]
    """Rows that take a while each."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, row: int) -> Any:
        return fetch_row(self.seconds)


def fetch_row(seconds: float) -> Any:
    if seconds:
        time.sleep(seconds)
    return torch.ones(8)


def nap(batch: Any = None) -> Any:
    time.sleep(NAP)
    return batch


def rebatched(loader: Iterable[Any]) -> Iterator[Any]:
    for batch in loader:
        time.sleep(NAP)
        yield batch


class Slow(torch.nn.Module):
    """A model that takes a while."""

    def __init__(self, seconds: float = NAP / 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, batch: Any) -> Any:
        time.sleep(self.seconds)
        return self.layer(batch)


def train(
    folder: Path,
    *,
    rows: float = 0.0,
    workers: int = 0,
    source: Callable[[Any], Iterable[Any]] = lambda loader: loader,
    before: Callable[[Any], Any] = lambda batch: batch,
    after: Callable[[], Any] = lambda: None,
    stacks: bool = True,
) -> RunSummary:
    """What a loop over a loader of torch comes to."""
    from fast_axolotl.integrations.torch_meter import watch_torch

    model = Slow()
    optimizer = torch.optim.SGD(model.parameters())
    meter = measure(folder, sample_system=False, stacks=stacks)
    with meter, watch_torch(meter):
        for batch in source(data.DataLoader(Rows(rows), num_workers=workers)):
            ready = before(batch)
            loss = model(ready).sum()
            loss.backward()
            optimizer.step()
            after()
    return meter.summary()


LOOPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "map": ({"source": lambda loader: map(nap, loader)}, "preparing", "nap"),
    "rebatched": ({"source": rebatched}, "preparing", "rebatched"),
    "in the loop": ({"before": nap}, "preparing", "nap"),
    "after the step": ({"after": nap}, "other", "nap"),
    "holding the lock": ({"after": lambda: sum(range(1_500_000))}, "other", "<lambda>"),
    "rows": ({"rows": NAP}, "waiting", "fetch_row"),
    "workers": ({"rows": 2 * NAP, "workers": 1}, "waiting", "fetch_row"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_time_of_a_loop_is_found_with_its_line(name: str, tmp_path: Path) -> None:
    """Two thirds of the time are in one place, the other third in forward."""
    options, phase, function = LOOPS[name]
    summary = train(tmp_path / "run", **options)
    shares = summary.phases
    assert sum(shares.values()) == pytest.approx(1.0)
    assert max(shares, key=shares.__getitem__) == phase
    assert summary.verdict.kind == ("code" if phase == "other" else "data")
    told = [line for line in summary.where if line.phase in (phase, "loading")]
    assert told[0].function == function
    assert told[0].place.startswith("test_stacks.py:")
    assert told[0].share > 0.5
    assert not (tmp_path / "run" / "workers").exists()


def test_without_looks_there_are_no_phases_and_the_reason_is_told(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", before=nap, stacks=False)
    assert (summary.phases, summary.where) == ({}, ())
    assert "was not looked at" in summary.reasons["preparing_fraction"]


def test_a_queue_of_the_loops_own_is_waited_for(tmp_path: Path) -> None:
    from fast_axolotl.integrations.torch_meter import watch_torch

    filled: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in data.DataLoader(Rows(2 * NAP)):
            filled.put(batch)
        filled.put(None)

    model = Slow()
    optimizer = torch.optim.SGD(model.parameters())
    meter = measure(tmp_path / "run", sample_system=False)
    with meter, watch_torch(meter):
        threading.Thread(target=fill).start()
        while (batch := filled.get()) is not None:
            model(batch).sum().backward()
            optimizer.step()
    summary = meter.summary()
    assert summary.stall_source == "stacks"
    assert 0.25 < summary.stall_fraction < 0.95
    assert summary.verdict.kind == "data"
    assert "queue" in summary.verdict.action


NO_LOADER = """
import time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
def get_batch():
    time.sleep(0.01)
    return torch.ones(4)
for _ in range(250):
    model(get_batch()).sum().backward()
    optimizer.step()
"""


def test_a_loop_without_a_loader_is_measured_by_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NO_LOADER, encoding="utf-8")
    run = [sys.executable, "-m", "fast_axolotl", "measure", "--output", str(tmp_path / "run"), "-q"]
    subprocess.run([*run, "--", sys.executable, str(script)], check=True, env={**os.environ})
    summary = summarise(read_run(tmp_path / "run"))
    assert (summary.steps, summary.fetches) == (250 - 5, 0)
    assert summary.phases["preparing"] > 0.5
    assert (summary.verdict.kind, summary.verdict.subtype) == ("data", "prepare")
    assert "get_batch" in summary.verdict.headline


def test_looks_are_cheap_and_know_no_data() -> None:
    looks = Looks()
    secret = "a password"
    frame = sys._getframe()
    looks.count(frame, 0.1)
    begin = time.thread_time()
    for _ in range(500):
        looks.count(frame, 0.1)
    assert (time.thread_time() - begin) / 500 < 1e-3
    (line, *_) = looks.take_lines()
    assert secret not in str(line)
    assert looks.take_phases() == {"other": pytest.approx(50.1)}
    assert looks.take_phases() == {}


def test_shares_are_those_of_the_clock_divided_by_the_looks() -> None:
    """30 % of waiting by the clock; of the rest a quarter is preparing, by made-up looks."""
    phases = {"waiting": 5.0, "preparing": 1.0, "forward": 1.5, "backward/idle": 1.5}
    rank = make_rank(wait=steady(0.3), phases={**phases, "between/checkpoint": 1.0})
    summary = summarise(make_run(rank))
    assert summary.phases["waiting"] == pytest.approx(0.3)
    assert summary.preparing_fraction == pytest.approx(0.7 / 4)
    assert summary.backward_fraction == pytest.approx(0.7 * 1.5 / 4)


@pytest.mark.parametrize(
    ("phase", "kind"), [("preparing", "data"), ("other", "code"), ("forward", "compute")]
)
def test_what_is_not_waiting_is_compute_only_where_the_model_was_seen(
    phase: str, kind: str
) -> None:
    phases = {phase: 6.0, "backward": 4.0}
    summary = summarise(make_run(make_rank(wait=steady(0.01), phases=phases)))
    assert summary.verdict.kind == kind


def test_a_rank_that_works_longer_is_named_with_both_times() -> None:
    """Rank 1 works all of its step; the others sleep in backward for half of it."""
    quick = {"forward": 5.0, "backward/idle": 5.0}
    ranks = make_ranks(4, wait=steady(0.01), phases=quick)
    ranks[1] = make_rank(rank=1, world_size=4, wait=steady(0.01), phases={"forward": 10.0})
    line = StackLine(phase="forward", file="/a/net.py", line=7, function="mix", seconds=9.0)
    ranks[1].add(Stacks(t=9.0, who="training", seconds=9.0, lines=(line,)))
    summary = summarise(make_run(*ranks))
    assert (summary.straggler_rank, summary.straggler_part) == (1, "compute")
    assert summary.straggler_fraction == pytest.approx(0.5, abs=0.01)
    assert (summary.verdict.kind, summary.verdict.subtype) == ("communication", "skew")
    assert summary.verdict.headline.startswith("Rank 1 works 10.")
    assert summary.verdict.headline.endswith("of the time, at net.py:7 mix.")
    assert "Look at net.py:7 mix on rank 1" in summary.verdict.action


def test_healthy_ranks_without_a_profiler_window_are_compute_bound() -> None:
    ranks = make_ranks(2, wait=steady(0.01), phases={"forward": 5.0, "backward": 5.0})
    verdict = summarise(make_run(*ranks)).verdict
    assert verdict.kind == "compute"
    assert any("--profile-steps" in line for line in verdict.evidence)


def test_a_gpu_that_is_not_known_to_idle_hides_what_the_host_does() -> None:
    """Half of the host's time is other code; the truth on a device is in ``benchmarks``."""
    settings = {"cuda_memory": {"total": 9, "reserved_peak": 8, "allocated_peak": 7}}
    phases = {"other": 5.0, "forward": 5.0}
    rank = make_rank(wait=steady(0.0), settings=settings, phases=phases)
    assert summarise(make_run(rank)).verdict.kind == "compute"


def test_lines_of_several_writes_add_up() -> None:
    rank = make_rank(wait=steady(0.0), phases={"other": 1.0})
    line: dict[str, Any] = {"phase": "other", "file": "/a/b/train.py", "line": 3, "function": "f"}
    for seconds in (1.0, 2.0):
        lines = (StackLine(**line, seconds=seconds),)
        rank.add(Stacks(t=seconds, who="training", seconds=3.0, lines=lines))
    (found,) = summarise(make_run(rank)).where
    assert (found.place, found.seconds, found.share) == ("train.py:3 f", 3.0, 1.0)
