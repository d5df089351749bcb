"""``fast-axolotl run --measure``: any command, its exit code and signals, what trains inside it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fast_axolotl
from fast_axolotl.integrations.launch import launch_environment
from fast_axolotl.integrations.measuring import (
    Order,
    attach,
    end_of,
    next_folder,
    order,
    read_rank,
)
from fast_axolotl.record import read_run

Run = Callable[..., "subprocess.CompletedProcess[str]"]

NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

LOOP = """
import os, sys, time
import torch
from torch.utils.data import DataLoader

rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if "RANK" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def collate(rows):
    time.sleep(0.002)
    return torch.stack(rows)

for batch in DataLoader([torch.ones(4)] * 80, batch_size=2, collate_fn=collate):
    model(batch).sum().backward()
    optimizer.step()
    if len(sys.argv) > 1:
        raise ValueError(sys.argv[1])
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
print("trained")
"""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    source = Path(fast_axolotl.__file__).parents[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAST_AXOLOTL")}
    return subprocess.Popen(
        [sys.executable, "-m", "fast_axolotl.cli", "run", *command],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run_it(*command: str) -> subprocess.CompletedProcess[str]:
        child = start(tmp_path, *command)
        try:
            out, err = child.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            child.terminate()
            raise
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    return run_it


def test_an_order_travels_through_the_environment(tmp_path: Path) -> None:
    wanted = Order(
        run_dir=str(tmp_path / "run"),
        peak_tflops=989.4,
        profile_steps=5,
        data_paths=(str(tmp_path / "a"), str(tmp_path / "b")),
    )
    environment = launch_environment({"PATH": "p"}, order=wanted, accelerate=False)
    assert order(environment) == wanted
    assert environment["FAST_AXOLOTL"] == "0"
    assert order(launch_environment(environment)) == wanted
    assert order({"PATH": "p"}) is None
    bare = Order(run_dir=str(tmp_path))
    assert order(bare.variables()) == bare


def test_an_order_of_a_relative_folder_means_the_same_folder_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Order(run_dir="run").variables()["FAST_AXOLOTL_MEASURE"] == str(tmp_path / "run")


def test_the_rank_is_the_launcher_s() -> None:
    assert read_rank({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    assert read_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8, 0)
    assert read_rank({}) == (0, 1, 0)


def test_the_end_of_a_record_names_what_ended_the_run() -> None:
    assert end_of(None) == ("finished", "")
    assert end_of(KeyboardInterrupt()) == ("interrupted", "KeyboardInterrupt")
    assert end_of(OSError("gone")) == ("exception", "OSError: gone")


def test_trainings_of_one_callback_have_folders_side_by_side() -> None:
    assert next_folder("runs/a", 1) == Path("runs/a")
    assert next_folder("runs/a", 3) == Path("runs/a-3")


def test_nothing_is_attached_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAST_AXOLOTL_MEASURE", raising=False)
    assert attach() is False


def test_a_command_that_is_no_python_is_measured_from_outside(run: Run, tmp_path: Path) -> None:
    done = run("--measure", "--no-accelerate", "--", "sh", "-c", "echo out; exit 3")
    assert (done.returncode, done.stdout) == (3, "out\n")
    [folder] = (tmp_path / "fast-axolotl-runs").iterdir()
    assert folder.name.endswith("-sh")
    record = read_run(folder)
    assert record.ranks == {}
    assert record.system is not None
    assert len(record.system.samples) >= 1
    assert record.system.end is not None
    assert (record.system.end.reason, record.system.end.error) == ("exception", "exit code 3")
    assert f"fast-axolotl: measuring into {folder}" in done.stderr
    assert "Inconclusive" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_to_the_command(tmp_path: Path, number: signal.Signals) -> None:
    script = f"trap 'echo caught; exit 9' {int(number)}; echo ready; while :; do sleep 0.05; done"
    child = start(tmp_path, "--measure", "--output", "run", "--", "sh", "-c", script)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (9, "caught\n"), err
    assert (tmp_path / "run" / "system.jsonl").is_file()


def test_a_command_that_dies_of_a_signal_takes_this_one_along(run: Run) -> None:
    done = run("--measure", "--output", "run", "--", "sh", "-c", "kill -KILL $$")
    assert done.returncode == -signal.SIGKILL
    assert "measuring into" in done.stderr


def test_a_signal_ignored_by_who_starts_us_stays_ignored(run: Run) -> None:
    code = (
        "import os, signal, subprocess, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "sys.exit(subprocess.call([sys.executable, '-m', 'fast_axolotl.cli', 'run', '--measure', "
        "'--output', 'run', '--', 'sh', '-c', 'kill -HUP $$; exit 5']))"
    )
    done = run("--", sys.executable, "-c", code)
    assert done.returncode == 5, done.stderr


def test_flags_of_a_measured_run_need_it_to_be_measured(run: Run, tmp_path: Path) -> None:
    done = run("--profile-steps", "5", "--", "true")
    assert done.returncode == 2
    assert "add --measure" in done.stderr
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-0.jsonl").write_text("")
    done = run("--measure", "--output", "run", "--", "true")
    assert done.returncode == 2
    assert "run holds a record already; give another --output" in done.stderr


@NEEDS_TORCH
def test_a_loop_in_torch_is_measured_with_no_line_edited(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = run("--measure", "--output", "run", "--", sys.executable, "loop.py")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    record = read_run(tmp_path / "run")
    assert list(record.ranks) == [0]
    rank = record.ranks[0]
    assert rank.start.source == "torch"
    assert sum(block.steps for block in rank.blocks) == 40
    assert sum(block.fetches for block in rank.blocks) == 40
    assert sum(block.host_wait_seconds for block in rank.blocks) >= 40 * 0.002
    assert rank.end is not None
    assert rank.end.reason == "finished"
    assert record.system is not None
    assert record.system.start.root_pid == rank.start.pid
    assert "Inconclusive" in done.stderr


@NEEDS_TORCH
def test_an_error_in_a_loop_is_the_command_s_and_the_record_s(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = run("--measure", "--output", "run", "--", sys.executable, "loop.py", "row 7")
    assert done.returncode == 1
    assert "ValueError: row 7" in done.stderr
    end = read_run(tmp_path / "run").ranks[0].end
    assert end is not None
    assert (end.reason, end.error) == ("exception", "ValueError: row 7")


@NEEDS_TORCH
def test_two_ranks_of_torchrun_leave_a_file_each(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    flags = ("--measure", "--output", "run", "--profile-steps", "10")
    begin = time.monotonic()
    done = run(*flags, "--", sys.executable, *launcher, "loop.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    record = read_run(tmp_path / "run")
    assert sorted(record.ranks) == [0, 1]
    for number, rank in record.ranks.items():
        assert (rank.start.rank, rank.start.world_size) == (number, 2)
        assert sum(block.steps for block in rank.blocks) == 40
        [window] = rank.windows
        assert window.steps == 10
        assert len(window.collectives) >= 10
        assert window.exposed_communication_seconds is not None
        assert 0 < window.exposed_communication_seconds <= time.monotonic() - begin
    lengths = {len(rank.windows[0].collectives) for rank in record.ranks.values()}
    assert len(lengths) == 1
