"""Ranks wait for each other outside of collectives, and say so; nothing hangs where one is missing.

Processes of torch's launcher load with Axolotl's own ``FileLockLoader`` and then train on gloo with
a time-out shorter than the load of one of them. Its package is laid in without what it imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.axolotl.patching import NotAsked
from fast_axolotl.integrations import ranks
from fast_axolotl.integrations.launch import launch_environment
from support.axolotl import AGAINST_AXOLOTL
from support.children import clean_environment, run_child

pytestmark = AGAINST_AXOLOTL

TIME_OUT = 4
PROGRAM = f"""
import os, sys, time, types
rank = int(os.environ["RANK"])
if rank in map(int, os.environ.get("WITHOUT", "").split()):
    os.environ["FAST_AXOLOTL"] = "0"
import axolotl.utils
data = types.ModuleType("axolotl.utils.data")
data.__path__ = [os.path.join(os.path.dirname(axolotl.utils.__file__), "data")]
sys.modules[data.__name__] = data
from axolotl.utils.data.lock import FileLockLoader
from axolotl.utils.dict import DictDefault
import datetime, torch
from fast_axolotl.integrations import ranks

# Ranks that begin together, however long their imports took.
open(f"here-{{rank}}", "w").close()
while not (os.path.exists("here-0") and os.path.exists("here-1")):
    time.sleep(0.05)

def load(folder, seconds, error=None):
    def prepare():
        time.sleep(seconds)
        if error:
            raise error
        return rank
    loader = FileLockLoader(DictDefault(dataset_prepared_path=folder))
    try:
        return loader.load(prepare)
    finally:
        loader.cleanup()

def compare():
    if os.environ.get("FAST_AXOLOTL") != "0":
        try:
            ranks.compare_ranks(None, None, None)
        except ranks.NotAsked:
            pass

def train():
    limit = datetime.timedelta(seconds={TIME_OUT})
    torch.distributed.init_process_group("gloo", timeout=limit)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(3, 2)).sum().backward()
    print(f"rank {{rank}} trained", flush=True)
    torch.distributed.destroy_process_group()

"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def start(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(PROGRAM + code)
        environment = launch_environment(clean_environment(), order=None)
        environment |= {"AXOLOTL_NCCL_TIMEOUT": str(TIME_OUT), "OMP_NUM_THREADS": "1", **variables}
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        command = (sys.executable, *launcher, "train.py")
        return run_child(*command, cwd=tmp_path, environment=environment, timeout=150)

    return start


@pytest.mark.parametrize("is_stock", [False, True], ids=["ours", "stock"])
def test_a_node_that_prepares_for_longer_than_the_time_out_ends_only_stock(
    run: Run, is_stock: bool
) -> None:
    # A folder each, as on two nodes; only the first has a dataset that is prepared.
    code = "assert load(f'node-{rank}', 12 * rank) == rank\ncompare()\ntrain()\n"
    done = run(code, **({"FAST_AXOLOTL": "0"} if is_stock else {}))
    if is_stock:
        assert done.returncode != 0
        assert "imeout" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall("rank . trained", done.stdout)) == ["rank 0 trained", "rank 1 trained"]
    [line] = lines(done)
    assert re.search(r"rank 0 waits for rank 1 to prepare the dataset \(1\d s so far\)$", line)


def test_ranks_of_one_node_say_what_they_wait_for_and_leave_what_stock_leaves(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        "ranks._FIRST_LINE_SECONDS = 1.0\n"
        "time.sleep(2 * rank)\n"
        "assert load('shared', 6 * (1 - rank)) == rank\n"
        "try:\n"
        "    load('shared', 1, ZeroDivisionError('theirs'))\n"
        "except ZeroDivisionError as error:\n"
        "    assert str(error) == 'theirs'\n"
        "    train()\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall("rank . trained", done.stdout)) == ["rank 0 trained", "rank 1 trained"]
    first, second = lines(done)[:2]
    for line in (first, second):
        assert re.search(r"rank 1 waits for rank 0 to prepare the dataset \(\d s so far\)$", line)
    # The counter of a load that failed is left, as by stock.
    assert {path.name for path in (tmp_path / "shared").iterdir()} <= {"datasets_prep.lock"}


def test_a_rank_without_this_package_is_named_and_not_waited_for(run: Run) -> None:
    code = "ranks._COMPARE_SECONDS = 1.0\nassert load('shared', 0) == rank\ncompare()\ntrain()\n"
    done = run(code, WITHOUT="0")
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = lines(done)
    assert " is not (yet) active on rank 0 of 2, and the other ranks wait" in line


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    found = [line for line in done.stderr.splitlines() if line.startswith("fast-axolotl: ")]
    return [line for line in found if "calls:" not in line]


class TestBoard:
    """One process plays a rank of three, on a store of its own."""

    @pytest.fixture
    def board(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from torch.distributed import HashStore

        for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
            monkeypatch.setenv(name, value)
        store = HashStore()
        monkeypatch.setattr(ranks._Board, "_open", lambda self, _: setattr(self, "store", store))
        return ranks._Board("load")

    def wait(self, board: Any) -> float:
        begin = time.monotonic()
        ranks._wait_for_the_others(board)
        return time.monotonic() - begin

    def test_the_wait_ends_with_the_last_that_began(
        self, board: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ranks, "_LATE_SECONDS", 0.2)
        board.count("begun", 2)
        board.count("ended", 1)
        threading.Timer(1.0, board.count, ("ended", 1)).start()
        assert 0.9 < self.wait(board) < 20

    def test_ranks_that_fall_silent_are_given_up(
        self, board: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ranks, "_SILENT_SECONDS", 0.5)
        board.count("begun", 3)
        assert 0.4 < self.wait(board) < 20

    def test_a_store_that_fails_ends_the_wait_and_nothing_else(
        self, board: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        board.count("begun", 3)
        board.store = object()
        assert self.wait(board) < 20
        assert "rank 0 does not wait for other ranks" in capsys.readouterr().err

    def test_another_version_is_named(
        self, board: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        board.count("0.0.1 on 1", 1)
        board.count("0.0.1 on 2", 1)
        board.count("all", 2)
        with pytest.raises(NotAsked):
            ranks.compare_ranks(None, None, None)
        assert " is not (yet) active on ranks 1, 2 of 3, " in capsys.readouterr().err
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(NotAsked):
            ranks.load_in_turn(None, lambda: None)
