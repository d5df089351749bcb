"""Several ranks on a node, several nodes in one record: real processes that play them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fast_axolotl.measure import measure
from fast_axolotl.measure.process_tree import ProcessTree
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.writers import LocalRanks, find_owner, find_running_nodes
from fast_axolotl.record import RunRecord, RunSummary, Start, SystemRecord, read_run
from fast_axolotl.record.folder import dump_line, system_file
from fast_axolotl.record.follower import RunFollower
from fast_axolotl.system import node_name, pid_namespace
from support.children import FAST_AXOLOTL, clean_environment, run_child
from support.records import GIGABYTE, START_TIME, make_rank, make_run, make_system, write_run

MEGABYTE = 1_000_000
HELD = 150 * MEGABYTE
SECONDS = 2.5

RANK = f"""
import os, time
held = bytes(range(250)) * ({HELD} // 250)
from fast_axolotl import measure
with measure("run", local_rank=int(os.environ["LOCAL_RANK"])) as meter:
    end = time.monotonic() + {SECONDS}
    def loader():
        while time.monotonic() < end:
            yield [1, 2]
    for batch in meter.watch(loader()):
        time.sleep(0.02)
"""
LAUNCHER = f"""
import os, subprocess, sys
size = int(sys.argv[1])
def start(rank):
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    environment = {{**os.environ, **{{name: str(value) for name, value in variables.items()}}}}
    return subprocess.Popen([sys.executable, "-c", {RANK!r}], env=environment)
sys.exit(max(child.wait() for child in [start(rank) for rank in range(size)]))
"""
"""Starts ranks as torchrun does: siblings, none of which is the parent of another."""


def launch(folder: Path, size: int, *before: str, **variables: str) -> None:
    done = run_child(
        *before,
        sys.executable,
        "-c",
        LAUNCHER,
        str(size),
        cwd=folder,
        environment=clean_environment(**variables),
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks of one node that measure themselves."""
    folder = tmp_path_factory.mktemp("inside")
    launch(folder, 3)
    return folder / "run"


def steady_memory(record: RunRecord) -> int:
    """The largest ΣPSS of the node."""
    assert record.system is not None
    return max(sample.pss_bytes or 0 for sample in record.system.samples)


def test_one_sampler_covers_every_rank_of_its_node(inside: Path) -> None:
    record = read_run(inside)
    assert sorted(record.ranks) == [0, 1, 2]
    [system] = record.systems.values()
    assert system.start.source == "meter"
    assert steady_memory(record) > 3 * HELD
    assert max(sample.processes for sample in system.samples) == 3


def test_sampling_from_inside_agrees_with_sampling_from_outside(
    inside: Path, tmp_path: Path
) -> None:
    launch(tmp_path, 3, *FAST_AXOLOTL, "run", "--measure", "-q", "--output", "run", "--")
    outside = read_run(tmp_path / "run")
    assert outside.system is not None
    assert outside.system.start.source == "run"
    # The launcher and its memory are seen from outside only.
    assert steady_memory(read_run(inside)) == pytest.approx(steady_memory(outside), rel=0.05)
