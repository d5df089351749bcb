"""``fast-axolotl run --measure``: any command, its exit code and signals, what trains inside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fast_axolotl.cli.measure import _print_summary
from fast_axolotl.integrations.attach import Attachment, attach
from fast_axolotl.integrations.launch import Order, launch_environment, order
from fast_axolotl.measure import measure
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.writers import read_rank
from fast_axolotl.record import read_run
from fast_axolotl.record.folder import find_folders, free_folder, next_folder, system_file
from fast_axolotl.system import node_name
from support.children import FAST_AXOLOTL, NEEDS_TORCH, clean_environment, run_child, run_python
from support.hosts import end_of, total

Run = Callable[..., "subprocess.CompletedProcess[str]"]

MODEL = """
import subprocess, sys, time
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOP = f"""
{MODEL}
def collate(rows):
    time.sleep(0.002)
    return torch.stack(rows)

for number, batch in enumerate(DataLoader([torch.ones(4)] * 80, 2, collate_fn=collate)):
    model(batch).sum().backward()
    optimizer.step()
    if not number:
        subprocess.run([sys.executable, "child.py"], check=True)
raise ValueError("row 7")
"""


def start_shell(folder: Path, script: str) -> subprocess.Popen[str]:
    """A script that is measured while the test goes on."""
    command = [*FAST_AXOLOTL, "measure", "--output", "run", "--", "sh", "-c", script]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=clean_environment(), **piped)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return lambda *command: run_child(*FAST_AXOLOTL, "run", *command, cwd=tmp_path)


def test_an_order_travels_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    known = {"peak_tflops": 989.4, "profile_steps": 5, "data_paths": data_paths}
    wanted = Order(run_dir=str(tmp_path / "run"), **known)
    environment = launch_environment({"PATH": "p"}, order=wanted, accelerate=False)
    assert order(environment) == wanted
    assert environment["FAST_AXOLOTL"] == "0"
    assert order(launch_environment(environment)) == wanted
    assert order({"PATH": "p"}) is None
    bare = Order(run_dir=str(tmp_path))
    assert order(bare.variables()) == bare
    # A relative folder means the same one everywhere.
    monkeypatch.chdir(tmp_path)
    assert Order(run_dir="run").variables()["FAST_AXOLOTL_MEASURE"] == str(tmp_path / "run")


def test_the_rank_is_the_launcher_s() -> None:
    assert read_rank({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    assert read_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8, 0)
    assert read_rank({}) == (0, 1, 0)


def test_nothing_is_attached_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAST_AXOLOTL_MEASURE", raising=False)
    assert attach() is False


def test_a_command_that_is_no_python_is_measured_from_outside(run: Run, tmp_path: Path) -> None:
    done = run("--measure", "--", "sh", "-c", "echo out; exit 3")
    assert (done.returncode, done.stdout) == (3, "out\n")
    [folder] = (tmp_path / "fast-axolotl-runs").iterdir()
    assert folder.name.endswith("-sh")
    record = read_run(folder)
    assert record.ranks == {}
    assert len(record.system.samples) >= 1
    assert (record.system.end.reason, record.system.end.error) == ("exception", "exit code 3")
    assert f"fast-axolotl: measuring into {folder}" in done.stderr
    assert "Inconclusive" in done.stderr


def test_signals_are_passed_on_to_the_command(tmp_path: Path) -> None:
    traps = "trap 'echo TERM' TERM; trap 'echo INT' INT; trap 'echo USR1; exit 9' USR1"
    script = f"{traps}; echo ready; while :; do sleep 0.05; done"
    child = start_shell(tmp_path, script)
    assert child.stdout.readline() == "ready\n"
    for name in ("TERM", "INT"):
        child.send_signal(signal.Signals[f"SIG{name}"])
        assert child.stdout.readline() == f"{name}\n"
    child.send_signal(signal.SIGUSR1)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (9, "USR1\n"), err
    assert system_file(tmp_path / "run", node_name()).is_file()


def test_a_command_that_dies_of_a_signal_takes_this_one_along(run: Run) -> None:
    done = run("--measure", "--output", "run", "--", "sh", "-c", "kill -KILL $$")
    assert done.returncode == -signal.SIGKILL
    assert "measuring into" in done.stderr


@pytest.mark.parametrize("who", ["itself", "its launcher"])
def test_a_command_that_is_terminated_was_stopped_by_sigterm(tmp_path: Path, who: str) -> None:
    # A launcher hears the signal and ends with a code of its own.
    trap = "trap 'exit 1' TERM; " if who == "its launcher" else ""
    child = start_shell(tmp_path, f"{trap}echo $$; while :; do sleep 0.05; done")
    inner = int(child.stdout.readline())
    os.kill(child.pid if trap else inner, signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert "interrupted after" in err, err
    assert "(stopped by SIGTERM)" in err
    end = read_run(tmp_path / "run").system.end
    assert (end.reason, end.error) == ("interrupted", "stopped by SIGTERM")


@pytest.mark.parametrize(
    ("code", "headline", "action"),
    [
        (
            "sys.modules['fast_axolotl'] = None; import torch",
            "The training was not measured: {python} cannot load fast-axolotl.",
            "Install it into that Python: {python} -m pip install fast-axolotl.",
        ),
        ("import torch", "No training loop detected", "Wrap the loader in your code"),
        ("pass", "No training loop detected", "no Python of this command was reached"),
        ("raise ValueError", "The run failed before the first step: exit code 1", "Fix this error"),
        ("stop_with('INT')", "The run was interrupted before the first step.", "let it train"),
        ("stop_with('TERM')", "The run was stopped by SIGTERM before the first", "let it train"),
    ],
)
def test_a_run_without_a_step_says_why(
    tmp_path: Path, run: Run, code: str, headline: str, action: str
) -> None:
    (tmp_path / "torch.py").write_text("")
    stop = "stop_with = lambda name: os.kill(os.getpid(), signal.Signals['SIG' + name])"
    code = f"import os, signal, sys; {stop}; {code}"
    run("--measure", "--output", "run", "--", sys.executable, "-c", code)
    verdict = summarise(read_run(tmp_path / "run")).verdict
    assert verdict.headline.startswith(headline.format(python=sys.executable))
    assert action.format(python=sys.executable) in verdict.action
    assert (verdict.kind, verdict.subtype) == ("inconclusive", "unseen")


def test_a_signal_ignored_by_who_starts_us_stays_ignored(run: Run) -> None:
    code = (
        "import os, signal, subprocess, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "sys.exit(subprocess.call([sys.executable, '-m', 'fast_axolotl', 'run', '--measure', "
        "'--output', 'run', '--', 'sh', '-c', 'kill -HUP $$; exit 5']))"
    )
    done = run("--", sys.executable, "-c", code)
    assert done.returncode == 5, done.stderr


@NEEDS_TORCH
def test_a_loop_in_torch_is_measured_with_no_line_edited_and_its_child_is_not(
    run: Run, tmp_path: Path
) -> None:
    """Its error is the command's and the record's."""
    (tmp_path / "child.py").write_text(
        "from torch.utils.data import DataLoader\nfor batch in DataLoader([1.0] * 6):\n    pass\n"
    )
    (tmp_path / "loop.py").write_text(LOOP)
    done = run("--measure", "--output", "run", "--", sys.executable, "loop.py")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "ValueError: row 7" in done.stderr
    assert "failed before it could be judged" in done.stderr
    record = read_run(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").glob("rank*")) == ["rank-0.jsonl"]
    rank = record.ranks[0]
    assert rank.start.source == "torch"
    assert (total(rank, "steps"), total(rank, "fetches")) == (40, 40)
    assert total(rank, "host_wait_seconds") >= 40 * 0.002
    assert end_of(tmp_path / "run") == ("exception", "ValueError: row 7")
    assert record.system.start.root_pid == rank.start.pid


def record(folder: Path, steps: int) -> None:
    with measure(folder, sample_system=False, environment={}) as meter:
        for _ in meter.watch([["row"]] * steps):
            time.sleep(0.001)


LEAK = f"""
{MODEL}
KEPT = []

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, number):
        KEPT.append(b"x" * 500_000)
        return torch.ones(4)

for batch in DataLoader(Rows(), 1, num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
    KEPT.append(b"y" * 1_000_000)
    time.sleep(0.02)
"""


@NEEDS_TORCH
def test_memory_that_grows_is_told_for_the_training_and_its_workers(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LEAK)
    done = run("--measure", "--output", "run", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    growth = {one.part: one.bytes_per_step for one in summarise(read_run(tmp_path / "run")).growth}
    assert growth == {
        "the training process": pytest.approx(1e6, rel=0.2),
        "the workers": pytest.approx(0.5e6, rel=0.2),
    }
    assert "Memory (growing)" in done.stderr


def test_the_training_with_the_most_steps_is_shown_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = time.time() - 1.0
    first, second, third, old = (next_folder(tmp_path / "run", number) for number in (1, 2, 3, 4))
    for folder, steps in ((first, 5), (second, 40), (third, 5), (old, 60)):
        record(folder, steps)
    os.utime(old / "rank-0.jsonl", (begin - 60, begin - 60))
    assert find_folders(first, begin) == [first, second, third]
    _print_summary(str(first), begin)
    err = capsys.readouterr().err
    assert f"this training has the most steps of 3; the others: {first}, {third}" in err
    assert f"Every figure: fast-axolotl show --all {second}" in err
    # In a terminal it is no longer than a screen.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    _print_summary(str(first), begin)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 25
    assert f"Every figure: fast-axolotl show --all {second}" in lines


def test_a_second_training_leaves_the_record_of_another_run_alone(tmp_path: Path) -> None:
    """Whichever rank chooses, and however many ranks the other run had."""
    run, unrelated, expected = (next_folder(tmp_path / "exp", number) for number in (1, 2, 3))
    record(unrelated, 5)
    begin = time.time()
    record(run, 5)
    assert [free_folder(run, 2, rank) for rank in (0, 1)] == [expected, expected]
    record(expected, 5)
    assert free_folder(run, 2, 1) == expected  # rank 0 of this run was faster
    assert free_folder(run, 3, 0) == next_folder(run, 4)
    assert find_folders(run, begin) == [run, expected]


class StandIn:
    """A callback of a trainer, as far as joining one goes."""

    def __init__(self, run_dir: str | Path, **_: object) -> None:
        self.run_dir = Path(run_dir)
        self.folders: list[Path] = []


def test_a_trainer_gets_a_callback_unless_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(MeterCallback=StandIn)
    monkeypatch.setitem(sys.modules, "fast_axolotl.integrations.stand_in", module)
    attachment = Attachment(Order(run_dir=str(tmp_path / "run")))
    lists = [object()], [object()], [StandIn("mine")]
    for callbacks in lists:
        attachment.join("stand_in", SimpleNamespace(callbacks=callbacks))
    assert list(map(len, lists)) == [2, 2, 1]
    # Trainers of one process share the count of trainings.
    assert lists[0][0].folders is lists[1][0].folders


@pytest.mark.parametrize(
    ("flags", "first_line"), [((), "echo hello"), (("--measure",), "#!/no/such/interpreter")]
)
def test_a_file_that_cannot_be_executed_is_one_line(
    run: Run, tmp_path: Path, flags: tuple[str, ...], first_line: str
) -> None:
    script = tmp_path / "script"
    script.write_text(first_line + "\n")
    script.chmod(0o755)
    done = run(*flags, "--", str(script))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = f"fast-axolotl: {script} needs a first line that names an interpreter"
    assert line in done.stderr.splitlines()[-1]


OWN = f"""
{MODEL}
from fast_axolotl import measure
loader = DataLoader([torch.ones(4)] * 60, batch_size=2)
with measure("own") as meter:
    for batch in meter.watch(loader):
        time.sleep(0.001)
if sys.argv[1] == "both":
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
"""


@NEEDS_TORCH
@pytest.mark.parametrize(("how", "source"), [("loop", "loop"), ("both", "torch")])
def test_a_program_with_a_meter_of_its_own_is_shown_by_the_run_around_it(
    tmp_path: Path, how: str, source: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    command = ("measure", "--output", "run", "--", sys.executable, "own.py", how)
    done = run_child(*FAST_AXOLOTL, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = read_run(tmp_path / "run")
    assert record.ranks[0].start.source == source
    # The last step of a plain loop has no end; of one that tells its steps, it has.
    assert total(record.ranks[0], "steps") in (29, 30)
    assert total(read_run(tmp_path / "own").ranks[0], "steps") in (29, 30)
    assert done.stderr.count("already records into own") == 1
    assert "no torch DataLoader was seen" not in done.stderr


AXOLOTL_STAND_IN = """
import sys
from fast_axolotl import measure
from fast_axolotl.axolotl import _STATE, status
class Patchwork:
    def patches(self):
        from fast_axolotl.axolotl.patching import Patch
        return (Patch("dedupe", "active", "", "m:a"), Patch("save", "waiting", "", "m:b"))
if status().installed:
    _STATE.patchwork = Patchwork()
with measure("own", sample_system=False) as meter:
    for batch in meter.watch([[1, 2]] * 3):
        pass
print(meter.summary().replacements)
"""


def test_a_meter_names_the_replacements_and_how_to_measure_without(tmp_path: Path) -> None:
    done = run_python(AXOLOTL_STAND_IN, cwd=tmp_path)
    assert done.stdout == "('dedupe',)\n", done.stderr
    assert "set FAST_AXOLOTL=0 in the environment to measure stock Axolotl" in done.stderr
    words = ("measure", "-q", "--", sys.executable, "-c", AXOLOTL_STAND_IN)
    off = run_child(*FAST_AXOLOTL, *words, cwd=tmp_path)
    assert off.stdout == "()\n", off.stderr
    assert "FAST_AXOLOTL=0" not in off.stderr
    shown = run_child(*FAST_AXOLOTL, "show", "own", cwd=tmp_path).stdout
    assert "replaced" not in shown


@NEEDS_TORCH
def test_a_trainer_s_meter_that_nobody_closed_is_given_up(tmp_path: Path) -> None:
    code = (
        "import sys; from fast_axolotl.integrations.training_meter import GIVEN_UP, open_meter; "
        "kept = open_meter('a', source='loop'), "
        "open_meter('b', source='transformers', error_at_exit=GIVEN_UP); sys.exit(1)"
    )
    assert run_python(code, cwd=tmp_path).returncode == 1
    assert end_of(tmp_path / "a") == ("finished", "")
    assert end_of(tmp_path / "b") == ("exception", "the training was aborted")
