"""``fast-axolotl run --measure``: any command, its exit code and signals, what trains inside it."""

from __future__ import annotations

import importlib.util
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fast_axolotl
from fast_axolotl.cli.run import _print_summary
from fast_axolotl.integrations.attach import Attachment, attach
from fast_axolotl.integrations.launch import Order, launch_environment, order
from fast_axolotl.integrations.training_meter import end_of, read_rank
from fast_axolotl.measure import measure
from fast_axolotl.protocol.matrix import read_figures
from fast_axolotl.record import read_run
from fast_axolotl.record.run_folders import find_folders, next_folder

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
        [sys.executable, "-m", "fast_axolotl", "run", *command],
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
        matmul=True,
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
    assert end_of(SystemExit(0)) == ("finished", "")
    assert end_of(SystemExit(3)) == ("exception", "SystemExit: 3")


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
        "sys.exit(subprocess.call([sys.executable, '-m', 'fast_axolotl', 'run', '--measure', "
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


def record(folder: Path, steps: int) -> None:
    with measure(folder, sample_system=False, environment={}) as meter:
        for _ in meter.watch([["row"]] * steps):
            time.sleep(0.001)


def test_the_training_with_the_most_steps_is_shown_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.time() - 1.0
    first, second, third = (next_folder(tmp_path / "run", number) for number in (1, 2, 3))
    record(first, 5)
    record(second, 40)
    record(third, 5)
    old = next_folder(tmp_path / "run", 4)
    record(old, 60)
    os.utime(old / "rank-0.jsonl", (begin - 60, begin - 60))
    assert find_folders(first, begin) == [first, second, third]
    _print_summary(str(first), begin)
    err = capsys.readouterr().err
    assert f"this training of 3 has the most steps; the others: {first}, {third}" in err
    assert f"to see this again: fast-axolotl show {second}" in err


class TerminalText(io.StringIO):
    """What looks like a terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_summary_is_no_longer_than_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "run", 40)
    monkeypatch.setattr(sys, "stderr", text := TerminalText())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    _print_summary(str(tmp_path / "run"), time.time() - 60.0)
    lines = re.sub(r"\x1b\[[0-?]*[a-zA-Z]", "", text.getvalue()).splitlines()
    assert len(lines) <= 24, text.getvalue()
    assert lines[0].startswith(" Inconclusive (short)")
    labels = [line.split("  ")[0] for line in lines]
    assert {"Why", "Next", "stall", "step", "first step"} <= set(labels)
    assert any(line.startswith("– tokens/s: ") for line in lines)
    assert lines[-1] == f"Every figure: fast-axolotl show {tmp_path / 'run'}"
    assert max(map(len, lines[:-1])) <= 80


class StandIn:
    """A callback of a trainer, as far as joining one goes."""

    def __init__(self, run_dir: str | Path, **_: object) -> None:
        self.run_dir = Path(run_dir)
        self.folders: list[Path] = []


def test_trainers_of_one_process_share_the_count_of_trainings(tmp_path: Path) -> None:
    attachment = Attachment(Order(run_dir=str(tmp_path)))
    first, second = (attachment.callback_for([], StandIn) for _ in range(2))
    assert first.folders is second.folders


def test_a_meter_of_the_user_s_own_is_told_where_it_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attachment = Attachment(Order(run_dir=str(tmp_path / "run")))
    assert attachment.callback_for([object()], StandIn) is not None
    assert attachment.callback_for([StandIn(tmp_path / "run")], StandIn) is None
    assert capsys.readouterr().err == ""
    assert attachment.callback_for([StandIn("mine")], StandIn) is None
    assert "which records into mine: see fast-axolotl show mine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first_line", "code", "text"),
    [
        ("echo hello", 126, "is neither a program nor begins with #!"),
        ("#!/no/such/interpreter", 127, "names an interpreter in its first line (#!) that is not"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--measure", "--output", "run")])
def test_a_file_that_cannot_be_executed_is_one_line(
    run: Run, tmp_path: Path, flags: tuple[str, ...], first_line: str, code: int, text: str
) -> None:
    script = tmp_path / "script"
    script.write_text(first_line + "\n")
    script.chmod(0o755)
    done = run(*flags, "--", str(script))
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert f"fast-axolotl: {script} {text}" in done.stderr.splitlines()[-1]


def test_the_controlling_terminal_is_asked_even_where_stdin_is_redirected() -> None:
    code = (
        "from fast_axolotl.integrations.launch import _is_in_the_foreground as ask; "
        "print('in front' if ask() else 'behind')"
    )
    source = str(Path(fast_axolotl.__file__).parents[1])
    pid, terminal = pty.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execve(sys.executable, [sys.executable, "-c", code], {"PYTHONPATH": source})
    said = b""
    try:
        while chunk := os.read(terminal, 1024):
            said += chunk
    except OSError:
        pass  # the other end is closed
    os.close(terminal)
    os.waitpid(pid, 0)
    assert said.decode().strip() == "in front"
    alone = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert alone.stdout.strip() == "behind"


@pytest.mark.parametrize("folder", ['os.environ["FAST_AXOLOTL_MEASURE"]', '"own"'])
def test_a_meter_in_the_code_leaves_the_supervisor_s_samples_alone(
    run: Run, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "loop.py").write_text(
        "import os, time\n"
        "time.sleep(0.3)\n"
        "from fast_axolotl import measure\n"
        f"with measure({folder}) as meter:\n"
        "    for batch in meter.watch([[1, 2]] * 3):\n"
        "        time.sleep(0.01)\n"
    )
    done = run("--measure", "--output", "run", "--", sys.executable, "loop.py")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "run").glob("*.1"))
    system = read_run(tmp_path / "run").system
    assert system is not None
    assert (system.start.source, system.end is not None) == ("run", True)
    told = [line for line in done.stderr.splitlines() if "measure() records into own" in line]
    assert len(told) == (folder == '"own"')
    call = 'measure(os.environ["FAST_AXOLOTL_MEASURE"])'
    assert (call in done.stderr) == (folder == '"own"')
    found = read_figures(tmp_path / "run").values["start_to_step_seconds"]
    assert (found is None) == (folder == '"own"')
    assert found is None or found > 0.3


def test_a_meter_that_samples_by_itself_did_not_see_the_start_of_the_process(
    tmp_path: Path,
) -> None:
    with measure(tmp_path) as meter:
        list(meter.watch([[1, 2]] * 3))
    found = read_figures(tmp_path)
    assert found.values["start_to_step_seconds"] is None
    assert found.reasons["start_to_step_seconds"] == "nobody watched the process from its start"


@NEEDS_TORCH
def test_a_child_process_does_not_take_the_record_of_its_parent(run: Run, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "for batch in DataLoader(torch.ones(6, 4)):\n"
        "    pass\n"
    )
    loop = LOOP.replace(
        "    if len(sys.argv) > 1:",
        "    if batch is not None and not os.path.exists('done'):\n"
        "        import subprocess\n"
        "        open('done', 'w').close()\n"
        "        subprocess.run([sys.executable, 'child.py'], check=True)\n"
        "    if len(sys.argv) > 1:",
    )
    (tmp_path / "loop.py").write_text(loop)
    done = run("--measure", "--output", "run", "--", sys.executable, "loop.py")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    rank = read_run(tmp_path / "run").ranks[0]
    assert sum(block.steps for block in rank.blocks) == 40
    assert rank.values["gradient_accumulation"] == 1
    assert sorted(path.name for path in (tmp_path / "run").glob("rank*")) == ["rank-0.jsonl"]


@NEEDS_TORCH
def test_a_trainer_s_meter_that_nobody_closed_is_given_up(tmp_path: Path) -> None:
    code = (
        "import sys; from fast_axolotl.integrations.training_meter import GIVEN_UP, open_meter; "
        "kept = open_meter('a', source='loop'), "
        "open_meter('b', source='transformers', error_at_exit=GIVEN_UP); sys.exit(1)"
    )
    source = str(Path(fast_axolotl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source, "FAST_AXOLOTL_MEASURE": ""},
        check=False,
    )
    assert done.returncode == 1
    ends = [read_run(tmp_path / name).ranks[0].end for name in "ab"]
    assert [(end.reason, end.error) for end in ends if end is not None] == [
        ("finished", ""),
        ("exception", "the training was given up"),
    ]
