"""What a job of several ranks loses: by real gloo processes, and by made-up records."""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fast_axolotl.integrations.parallelism import read_parallelism
from fast_axolotl.measure.ranks import fold_rank
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import (
    ModelShape,
    RunRecord,
    StackLine,
    Stacks,
    StepBlock,
    read_run,
)
from fast_axolotl.record.waits import encode_waits, find_common_steps, fold_waits
from support.children import run_ranks
from support.records import make_ranks, make_run

pytestmark = pytest.mark.usefixtures("alone")

GLOO = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from fast_axolotl.integrations.parallelism import read_parallelism
from fast_axolotl.measure import measure

torch.set_num_threads(1)
folder, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

def rows(steps):
    for step in range(steps):
        if step % 10 == 5 * rank:
            time.sleep(0.035)
        yield {"input_ids": torch.full((2, 8), step * world + rank)}

weight = torch.ones(1, requires_grad=True)

def train(meter, batches, forward=0.012):
    # Seconds of each step, by a clock of its own.
    dist.barrier()
    ends = [time.perf_counter()]
    for batch in meter.watch(batches):
        time.sleep(forward)
        (weight * batch["input_ids"]).sum().backward()
        dist.all_reduce(weight.grad)
        ends.append(time.perf_counter())
    return [end - begin for begin, end in zip(ends, ends[1:])]

def measured(name):
    return measure(f"{folder}/{name}", rank=rank, world_size=world, sample_system=False)

with measured("late") as meter:
    seconds = train(meter, rows(120))
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
layer = torch.nn.Linear(4, 4, bias=False)
layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
if rank == 0:
    print(json.dumps({"seconds": seconds, "mesh": read_parallelism(layer)}))
dist.barrier()
"""


Gloo = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Gloo:
    """Records of two processes, and what a clock outside of the meter saw."""
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    folder = tmp_path_factory.mktemp("gloo")
    printed = run_ranks(sys.executable, "-c", GLOO, str(folder), count=2, OMP_NUM_THREADS="1")
    return folder, json.loads(printed[0])


def test_two_ranks_that_are_late_in_different_steps_lose_what_the_clock_lost(gloo: Gloo) -> None:
    folder, seen = gloo
    # The same loop without delays: the steps in which nobody is late, in the same minutes.
    steps = seen["seconds"][20:]
    punctual = statistics.mean(step for number, step in enumerate(steps) if number % 5)
    lost = 1.0 - punctual / statistics.mean(steps)
    assert lost > 0.15
    summary = summarise(read_run(folder / "late"))
    assert summary.stall_fraction == pytest.approx(lost, abs=0.06)
    # What each rank waited alone is half of it.
    own = [rank.stall_fraction for rank in summary.ranks]
    assert max(share for share in own if share is not None) < 0.8 * lost


def test_the_groups_are_read_off_the_mesh_of_the_weights(gloo: Gloo) -> None:
    assert gloo[1]["mesh"] == {"tensor_parallel": 2}


def test_the_groups_are_read_from_accelerate() -> None:
    state = pytest.importorskip("accelerate.state").AcceleratorState
    from accelerate.utils import ParallelismConfig, TorchDynamoPlugin

    found: dict[str, Any] = {}
    try:
        sizes = ParallelismConfig(tp_size=2, cp_size=2)
        known = {"parallelism_config": sizes, "dynamo_plugin": TorchDynamoPlugin()}
        state(cpu=True, _from_accelerator=True, **known)
        found = read_parallelism()
    finally:
        state._reset_state(reset_partial_state=True)
    assert (found["tensor_parallel"], found["context_parallel"]) == (2, 2)
    assert found["fsdp"] is False
    assert read_parallelism() == {}


Waits = Sequence[float]

OWN = 0.1
"""Seconds of the model's work in a step."""


def make_blocks(
    waits: Waits, walls: Waits, *, form: str = "exact", size: int = 50, first: int = 0, **more: Any
) -> list[StepBlock]:
    """Steps as a rank records them: with all waits, condensed, or as sums alone."""
    blocks, t = [], 0.0
    for begin in range(0, len(waits), size):
        own, wall = tuple(waits[begin : begin + size]), tuple(walls[begin : begin + size])
        t += sum(wall)
        block = StepBlock(
            t=t,
            phase="steady",
            first_step=first + begin,
            steps=len(own),
            first_fetch=first + begin,
            fetches=len(own),
            wall_seconds=sum(wall),
            host_wait_seconds=sum(own),
            samples=8 * len(own),
            **{name: value * len(own) for name, value in more.items()},
        )
        if form == "exact":
            block = replace(block, hosts=own, walls=wall)
        elif form == "condensed":
            block = replace(block, step_waits=encode_waits(own))
        blocks.append(block)
    return blocks


def make_job(*waits: Waits, settings: dict[str, Any] | None = None, **options: Any) -> RunRecord:
    """A job whose steps are as late as the rank that waits longest."""
    walls = [OWN + max(step) for step in zip(*waits, strict=True)]
    more = options.pop("more", [{}] * len(waits))
    ranks = make_ranks(len(waits), fetches=0, warmup_steps=0, settings=settings, end=None)
    for rank, own, values in zip(ranks, waits, more, strict=True):
        rank.blocks = make_blocks(own, walls, **options, **values)
    return make_run(*ranks)


def late_in_turn(ranks: int = 4, steps: int = 400, wait: float = 0.27) -> list[list[float]]:
    """Each rank is late in one of twenty steps, and never with another."""
    gap = 20 // ranks
    return [
        [wait if step % 20 == gap * rank else 0.0 for step in range(steps)] for rank in range(ranks)
    ]


def test_the_stall_of_a_job_is_that_of_the_latest_rank_in_every_step() -> None:
    summary = summarise(make_job(*late_in_turn()))
    lost = 0.2 * 0.27
    assert summary.stall_fraction == pytest.approx(lost / (OWN + lost), abs=1e-12)
    assert summary.stall_fraction == summary.host_stall_fraction
    assert [rank.stall_fraction for rank in summary.ranks] == pytest.approx([0.0876] * 4, abs=1e-4)
    assert summary.verdict.kind == "data"
    # The same waits in the same steps cost what one rank waits.
    together = summarise(make_job(*[late_in_turn()[0]] * 4))
    assert together.stall_fraction == pytest.approx(0.05 * 0.27 / (OWN + 0.05 * 0.27))


def test_damaged_waits_are_no_worse_than_none_and_one_rank_keeps_every_digit() -> None:
    record = make_job(*late_in_turn(), form="condensed")
    summary = summarise(record)
    assert summary.stall_fraction == pytest.approx(0.054 / 0.154, rel=0.04)
    assert not any("at least" in note for note in summary.notes)
    block = record.ranks[0].blocks[2]
    for damaged in (f"{block.step_waits[:-4]}####", f"{block.step_waits[:-1]}A"):
        record.ranks[0].blocks[2] = replace(block, step_waits=damaged)
        assert summarise(record).stall_fraction == pytest.approx(0.35, abs=0.03)
    chance = random.Random(2)
    record = make_job([chance.expovariate(20) for _ in range(500)])
    own = fold_rank(record.ranks[0]).steady.stall_fraction
    assert summarise(record).stall_fraction == own


def test_the_steps_are_those_that_all_ranks_have() -> None:
    one, two = [0.0] * 100 + [0.1] * 300, [0.1] * 100 + [0.0] * 300
    record = make_job(one, two)
    # The second rank's warm-up lasted a hundred steps longer, and its last second was lost.
    second = record.ranks[1].blocks
    second[:2] = [replace(block, phase="warmup") for block in second[:2]]
    del second[-1]
    assert summarise(record).stall_fraction == pytest.approx(0.5)
    # A rank whose record stopped early ends nothing for the others.
    del second[3:]
    assert summarise(record).stall_fraction == pytest.approx(0.5)
    assert summarise(record).deciding_rank == 0


@given(
    some.lists(
        some.tuples(some.integers(1, 9), some.sampled_from(["exact", "condensed"])),
        min_size=2,
        max_size=5,
    ),
    some.integers(3, 40),
    some.randoms(use_true_random=False),
)
def test_the_fold_agrees_with_a_plain_one_however_blocks_are_cut(
    cuts: list[tuple[int, str]], steps: int, chance: random.Random
) -> None:
    waits = [[chance.choice([0.0, 0.01, 0.3]) for _ in range(steps)] for _ in cuts]
    ranks = [
        make_blocks(own, [1.0] * steps, form=form, size=size, first=7)
        for own, (size, form) in zip(waits, cuts, strict=True)
    ]
    common = find_common_steps(ranks)
    assert common == range(7, 7 + steps)
    true = sum(max(step) for step in zip(*waits, strict=True))
    found = sum(fold_waits(ranks, common, "host"))
    assert found == pytest.approx(true, abs=1e-9 + 0.04 * true)
    if {form for _, form in cuts} == {"exact"}:
        assert found == pytest.approx(true, abs=1e-9)


# The rank that the others wait for.


def test_the_rank_that_alone_is_late_with_data_is_the_straggler() -> None:
    waits = [[0.005] * 400, [0.005] * 400, [0.05] * 400]
    summary = summarise(make_job(*waits))
    assert (summary.straggler_rank, summary.straggler_part) == (2, "data")
    assert summary.straggler_fraction == pytest.approx(0.045 / 0.15)
    # Where all wait alike, none is.
    equal = summarise(make_job(*[[0.05] * 400] * 3))
    assert equal.straggler_rank is None
    assert "profiler window" in equal.reasons["straggler_rank"]


# Ranks that see the same batches.


def counted_job(**settings: Any) -> RunRecord:
    sizes = {"num_parameters": 10**9, "layers": 1, "attention_width": 1, "sequence_len": 64}
    record = make_run(*make_ranks(8, tokens=1000, settings=settings))
    for rank in record.ranks.values():
        rank.add(ModelShape(**sizes, peak_tflops=1e4))
    return record


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 1},
        {"config": {"tensor_parallel_size": 2, "context_parallel_size": 2}},
        {"tensor_parallel": 1, "config": {"sequence_parallel_degree": 4}},
    ],
)
def test_ranks_of_a_parallel_group_count_once(settings: dict[str, Any]) -> None:
    plain = summarise(counted_job(tensor_parallel=1))
    summary = summarise(counted_job(**settings))
    assert (plain.data_parallel_size, summary.data_parallel_size) == (8, 2)
    rates = ("tokens_per_second", "goodput_tokens_per_second", "samples_per_second")
    for name in (*rates, "rows_per_second", "mfu"):
        assert getattr(summary, name) == pytest.approx(getattr(plain, name) / 4), name
    assert not any("parallel" in note for note in summary.notes)


# What the reader could deliver, and what waits came with.


def test_the_rate_of_the_reader_is_rows_per_time_in_which_the_loop_or_its_workers_load() -> None:
    # The slowest rank sets the pace of all.
    inline = make_job([0.005] * 400, [0.025] * 400, settings={"num_workers": 0})
    summary = summarise(inline)
    assert summary.reader_rows_per_second == pytest.approx(2 * 8 / 0.025)
    assert summary.reader_ratio == pytest.approx(0.125 / 0.025)
    workers = make_job(*[[0.0] * 400] * 2, settings={"num_workers": 2, "prefetch_factor": 2})
    assert "not looked at" in summarise(workers).reasons["reader_rows_per_second"]
    idle = StackLine(phase="idle", file="queue.py", line=1, function="get", seconds=3.0)
    for rank in workers.ranks.values():
        rank.add(Stacks(t=1.0, who="workers", seconds=1.0 + rank.start.rank, lines=(idle,)))
    assert summarise(workers).reader_ratio == pytest.approx(2.5)  # of the slower rank
    assert "reads ahead" in summarise(make_job([0.1] * 400)).reasons["reader_rows_per_second"]


def test_waits_are_shared_out_to_what_happened_meanwhile() -> None:
    record = make_job([0.05] * 400)
    for block in record.ranks[0].blocks:
        block.waits_by_cause.update(epoch=0.62 * 2.5, shard=0.08 * 2.5)
    summary = summarise(record)
    assert summary.waits_by_cause == pytest.approx({"epoch": 0.62, "loader": 0.3, "shard": 0.08})
    [line] = [line for line in summary.verdict.evidence if line.startswith("of all waiting")]
    assert "62.0 % at the start of an epoch, 8.0 % with shard" in line
