"""What a job of several ranks loses: by real gloo processes, and by made-up records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RankRecord, RunRecord, RunSummary, StepBlock, read_run
from fast_axolotl.record.follower import condense_blocks
from fast_axolotl.record.stall import WAIT_ERROR, encode_waits
from fast_axolotl.report.live_frame import make_frame
from support.children import clean_environment
from support.records import make_rank, make_run

NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

GLOO = """
import json, sys, time
import torch, torch.distributed as dist
from fast_axolotl.measure import measure

torch.set_num_threads(1)
folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

def rows(steps, late):
    for step in range(steps):
        if late and step % 20 == 5 * rank:
            time.sleep(0.035)
        yield {"input_ids": torch.full((2, 8), step * world + rank)}

def train(batches):
    dist.barrier()
    begin = time.perf_counter()
    for _ in batches:
        time.sleep(0.012)
        dist.all_reduce(torch.ones(1))
    return time.perf_counter() - begin

train(rows(10, False))
alone = train(rows(120, False)) / 120
with measure(f"{folder}/late", rank=rank, world_size=world, sample_system=False) as meter:
    late = train(meter.watch(rows(240, True))) / 240
if rank == 0:
    print(json.dumps({"alone": alone, "late": late}))
dist.barrier()
"""


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Records of four processes, and what a clock outside of the meter saw."""
    folder = tmp_path_factory.mktemp("gloo")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO, str(folder), str(rank), "4"],
            env=clean_environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    printed = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    return folder, json.loads(printed[0])


@NEEDS_TORCH
def test_four_ranks_that_are_late_in_different_steps_lose_what_the_clock_lost(
    gloo: tuple[Path, dict[str, float]],
) -> None:
    folder, seen = gloo
    lost = 1.0 - seen["alone"] / seen["late"]
    assert lost > 0.25
    summary = summarise(read_run(folder / "late"))
    assert summary.stall_fraction == pytest.approx(lost, abs=0.05)
    # What each rank waited alone is a quarter of it.
    own = [rank.stall_fraction for rank in summary.ranks]
    assert max(share for share in own if share is not None) < 0.5 * lost
    assert summary.verdict.kind == "data"
