"""``fast-axolotl protocol`` with real child processes: small loops, Ctrl-C, failing commands."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import fast_axolotl
from fast_axolotl.errors import UsageError
from fast_axolotl.protocol import runner
from fast_axolotl.protocol.child import launch
from fast_axolotl.protocol.plan import plan_commands
from fast_axolotl.protocol.runner import hold
from fast_axolotl.record.protocol_result import ProtocolResult

LOOP = """
import os, sys, time
from fast_axolotl.measure import measure

def read():
    for _ in range(60):
        time.sleep(float(sys.argv[1]))
        yield [1, 2, 3, 4]

with measure(os.environ["FAST_AXOLOTL_MEASURE"]) as meter:
    for batch in meter.watch(read()):
        time.sleep(0.002)
        meter.tokens(400)
"""


@pytest.fixture
def loop(tmp_path: Path) -> str:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return shlex.join([sys.executable, str(path)])


def start(folder: Path, baseline: str, candidate: str, *options: str) -> subprocess.Popen[str]:
    source = Path(fast_axolotl.__file__).parents[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAST_AXOLOTL")}
    words = ("--baseline", baseline, "--candidate", candidate, "--warmup", "0", "--output", "p")
    return subprocess.Popen(
        [sys.executable, "-m", "fast_axolotl", "protocol", *words, *options],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        child.terminate()
        raise
    return child.returncode, out, err


def test_two_commands_from_the_command_line(tmp_path: Path, loop: str) -> None:
    child = start(
        tmp_path, f"{loop} 0.004", f"{loop} 0.0005", *("--pairs", "2", "--json", "--matters", "2%")
    )
    code, out, err = finish(child)
    assert code == 0, err
    found = json.loads(out)
    assert sorted(found["order"]) == ["baseline"] * 2 + ["candidate"] * 2
    assert isinstance(found["seed"], int)
    rows = {row["name"]: row["cells"] for row in found["matrix"]["rows"]}
    assert rows["tokens_per_second"][1]["ratio"] > 1.3
    assert rows["host_stall_fraction"][0]["value"] > rows["host_stall_fraction"][1]["value"]
    assert f"run 4 of 4: {found['order'][-1]}, pair 2 of 2" in err
    assert found["matrix"]["matters"] == 0.02
    assert (tmp_path / "p" / "runs" / f"01-{found['order'][0]}" / "log.txt").exists()
    assert ProtocolResult.read(tmp_path / "p").pairs == 2


def test_ctrl_c_leaves_a_folder_that_can_be_continued(tmp_path: Path, loop: str) -> None:
    # Warm-up runs have a fixed order, pairs a random one.
    options = ("--pairs", "1", "--warmup", "1")
    arguments = (f"{loop} 0.001", f"{sys.executable} -c '{SLEEP}'", *options)
    child = start(tmp_path, *arguments)
    marker = tmp_path / "sleeping"
    deadline = time.monotonic() + 60
    while not (marker.exists() and marker.read_text()):
        assert child.poll() is None, finish(child)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    inner = int(marker.read_text())
    child.send_signal(signal.SIGINT)
    code, _, err = finish(child)
    assert code == 130
    assert "the same command with --output p continues from here" in err
    # Nothing of the run is left behind.
    with pytest.raises(ProcessLookupError):
        os.kill(inner, 0)
    state = json.loads((tmp_path / "p" / "state.json").read_text())
    assert [run["status"] for run in state["runs"].values()] == ["done"]
    (tmp_path / "go").write_text("")
    code, out, err = finish(start(tmp_path, *arguments))
    assert code == 0, err
    assert "run 2 of 4: candidate" in err
    assert "run 1 of 4" not in err
    assert "1 pair; " in out


SLEEP = (
    'import os, pathlib, time; here = pathlib.Path("go").exists(); '
    'here or pathlib.Path("sleeping").write_text(str(os.getpid())); '
    "here or time.sleep(60)"
)


def test_failing_commands_are_told_with_the_end_of_their_logs(tmp_path: Path) -> None:
    child = start(tmp_path, "no-such-program", f"{sys.executable} -c 1/0", "--pairs", "1")
    code, out, err = finish(child)
    assert code == 1, err
    assert "there is no command 'no-such-program'" in out
    assert "ZeroDivisionError" in out
    assert "No counted run of baseline or candidate succeeded" in out


def test_what_a_command_leaves_in_the_background_is_ended(tmp_path: Path) -> None:
    code = launch(
        ["sh", "-c", "sleep 60 & echo $!; exit 3"], os.environ, tmp_path / "log.txt", lambda: None
    )
    assert code == 3
    pid = int((tmp_path / "log.txt").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_while_a_run_is_being_started_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows the process yet: it would go on, and hold the lock of the folder."""
    made: list[subprocess.Popen[bytes]] = []
    start_process = subprocess.Popen

    def interrupted(*words: object, **named: object) -> subprocess.Popen[bytes]:
        made.append(start_process(*words, **named))  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGINT)
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(["sleep", "60"], os.environ, tmp_path / "log.txt", lambda: None)
    assert made[0].poll() is not None


def test_the_next_start_waits_a_while_for_a_folder_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold(tmp_path) as (opened,):
        # As a run that has inherited the lock, and ends by itself.
        late = subprocess.Popen(["sleep", "0.5"], pass_fds=(opened,))
    with hold(tmp_path):
        assert late.poll() is not None or late.wait(5) == 0
        monkeypatch.setattr(runner, "_PATIENCE_SECONDS", 0.1)
        plan = plan_commands("true", "true")
        with pytest.raises(UsageError, match=rf"in use: process {os.getpid()}"):
            runner.run_protocol(plan, tmp_path, environment=os.environ)
