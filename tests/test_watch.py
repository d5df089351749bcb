"""``fast-axolotl watch`` as a user runs it: on real processes, in a terminal's stead."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from fast_axolotl.errors import UsageError
from fast_axolotl.measure import processes
from fast_axolotl.measure.sampler import check_process
from fast_axolotl.record import End, read_run
from fast_axolotl.record.folder import dump_line
from support.children import FAST_AXOLOTL, clean_environment, run_child
from support.records import make_rank, make_run, make_system, steady, write_run

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="there is no /proc here")


def run(*arguments: str | int | Path) -> subprocess.CompletedProcess[str]:
    return run_child(*FAST_AXOLOTL, "watch", *map(str, arguments))


def test_one_line_a_sample_and_a_summary_with_what_it_cannot_know(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    done = run(sleeper.pid, "--seconds", "0.3", "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines, _, table = done.stdout.partition("\n\n")
    assert re.match(r"0\.\d s  Inconclusive \(unseen\)  working set [\d.]+ MB", lines)
    assert "processes 1" in lines
    assert len(lines.splitlines()) == 2
    assert "until the time was up" in table
    for label in ("working set", "resident memory", "mean read request"):
        assert label in table
    assert "the process was only watched from outside" in " ".join(table.split())
    assert "fast-axolotl measure -- COMMAND" in table
    record = read_run(tmp_path / "run").system
    assert record.samples
    assert record.end is not None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (None, 0)])
def test_it_ends_with_the_process_or_an_interrupt_and_the_record_is_closed(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals | None, code: int
) -> None:
    with subprocess.Popen(
        [*FAST_AXOLOTL, "watch", str(sleeper.pid), "-o", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watcher:
        assert sleeper.stdin is not None
        assert "processes 1" in watcher.stdout.readline()
        if number is None:
            sleeper.stdin.close()
            sleeper.wait()
        else:
            watcher.send_signal(number)
        rest = watcher.stdout.read()
    assert watcher.returncode == code
    assert ("until Ctrl-C" in rest) is (number == signal.SIGINT)
    assert ("until the process ended" in rest) is (number is None)
    record = read_run(tmp_path).system
    assert record.end.reason == ("finished" if number is None else "interrupted")


def test_json_alone_goes_to_standard_output(sleeper: subprocess.Popen[bytes]) -> None:
    done = run(sleeper.pid, "--seconds", "0.2", "--json")
    found = json.loads(done.stdout)
    assert "processes 1" in done.stderr
    assert found["working_set_bytes"] > 1_000_000
    assert found["verdict"]["subtype"] == "unseen"


def test_what_is_no_process_that_can_be_watched_is_refused_with_the_reason(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    for pid in (0, -5):
        with pytest.raises(UsageError, match=f"there is no process {pid}"):
            check_process(pid)
    with pytest.raises(UsageError, match="only be watched on Linux"):
        check_process(os.getpid(), proc=tmp_path)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(UsageError, match=f"a thread of process {os.getpid()}: watch"):
            check_process(thread.native_id or 0)
    finally:
        done.set()
        thread.join()
    sleeper.stdin.close()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(UsageError, match=f"process {sleeper.pid} has ended"):
        check_process(sleeper.pid)


def test_a_record_that_is_there_is_kept_and_a_folder_that_cannot_be_written_is_an_error_at_once(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "system.jsonl").write_text("kept")
    done = run(sleeper.pid, "-o", tmp_path)
    assert done.returncode == 2
    assert "already exists: choose another --output" in done.stderr
    assert (tmp_path / "system.jsonl").read_text() == "kept"
    done = run(sleeper.pid, "-o", tmp_path / "system.jsonl" / "run")
    assert done.returncode == 1
    assert "the record cannot be written" in done.stderr


def test_the_watcher_below_the_watched_shell_is_not_counted(tmp_path: Path) -> None:
    assert run(os.getpid(), "--seconds", "0.1", "-o", tmp_path).returncode == 0
    record = read_run(tmp_path).system
    assert record is not None
    children = [
        pid
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        if (stat := processes.read_stat(pid)) is not None and stat.parent_pid == os.getpid()
    ]
    assert max(sample.processes for sample in record.samples) == 1 + len(children)


# The live view in a real terminal: a pseudo-terminal, real processes, Ctrl-C.


PATIENCE_SECONDS = 60.0
OTHER_SCREEN = "\x1b[?1049h"
CTRL_C = "\x03"

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'fast_axolotl', *sys.argv[1:]])"
)
"""A terminal of its own, as a shell in a window has it."""


class Terminal:
    """A command in a terminal, seen from the side of the one who sits there."""

    def __init__(self, folder: Path, *arguments: str | int | Path, width: int = 80) -> None:
        self.screen, self.inner = pty.openpty()
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.text = ""
        environment = clean_environment(TERM="xterm-256color")
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdin=self.inner,
            stdout=self.inner,
            stderr=self.inner,
            start_new_session=True,
        )

    def press(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read until the text has come; what came up to then, which is not looked at again."""
        end = time.monotonic() + PATIENCE_SECONDS
        while text not in self.text:
            is_over = self.process.poll() is not None
            if not self._read() and (is_over or time.monotonic() > end):
                pytest.fail(f"{text!r} did not come: {self.text[-3000:]!r}")
        seen, _, self.text = self.text.partition(text)
        return seen + text

    def wait(self) -> int:
        """Read until the command has ended; its exit code."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < end, f"it did not end: {self.text[-3000:]!r}"
        return self.process.returncode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.screen)
        os.close(self.inner)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.screen], [], [], 0.1)
        if not ready:
            return False
        self.text += os.read(self.screen, 65536).decode(errors="replace")
        return True


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A record whose process, this one, lives."""
    rank = make_rank(wait=steady(0.3), fetches=900, tokens=10, end=None)
    folder = tmp_path / "run"
    write_run(folder, make_run(rank, system=make_system(end=None)))
    text = (folder / "rank-0.jsonl").read_text()
    (folder / "rank-0.jsonl").write_text(text.replace('"pid":100', f'"pid":{os.getpid()}'))
    return folder


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-?]*[a-zA-Z]", "", text)


def test_a_record_is_drawn_in_place_until_ctrl_c_and_the_terminal_is_left_alone(
    unfinished: Path,
) -> None:
    with Terminal(unfinished.parent, "watch", unfinished, width=60) as terminal:
        drawn = terminal.wait_for("processes")
        assert "Data-bound (rate)" in drawn
        assert max(len(line) for line in re.split(r"\r?\n", plain(drawn))) <= 60
        terminal.wait_for("\x1b[1A")  # the next moment is drawn over this one
        terminal.press(CTRL_C)
        assert terminal.wait() == 0
        assert OTHER_SCREEN not in drawn + terminal.text
        last, _, after = plain(terminal.text).partition("Watched until Ctrl-C.")
        assert "processes" in last
        assert "Every figure" in after


LOOP = """
import os, sys, time
from fast_axolotl.measure import measure
assert not sys.stdout.isatty() and sys.stdin.isatty()
with measure("run", sample_system=False) as meter:
    for number, batch in enumerate(meter.watch({"input_ids": [[1] * 8]} for _ in range(10**9))):
        time.sleep(0.005)
        if number % 50 == 0:
            print("batch", number)
        if os.path.exists("stop"):
            break
sys.exit(7)
"""


def test_run_live_shows_the_command_and_its_output_and_ends_as_it_ends(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = ("measure", "--live", "--output", "run", "--", sys.executable, "loop.py")
    with Terminal(tmp_path, *command) as terminal:
        terminal.wait_for("rows/s")
        terminal.wait_for("batch 50")
        (tmp_path / "stop").write_text("")
        assert terminal.wait() == 7
        after = plain(terminal.text)
    verdict, _, log = after.partition("Every figure: fast-axolotl show --all ")
    assert "Why" in verdict
    assert "output of the command:" in log
    end = log.partition("the command failed with exit code 7; its last lines:")[2]
    assert re.search(r"batch \d+", end), "the end of the output of a command that failed comes last"
    assert (tmp_path / "run" / "log.txt").read_text().startswith("batch 0\n")
    assert sorted(read_run(tmp_path / "run").ranks) == [0]


def test_run_live_without_a_terminal_prints_lines_and_leaves_the_output_alone(
    tmp_path: Path,
) -> None:
    command = ("measure", "--live", "--output", "run", "--", "sh", "-c")
    done = run_child(*FAST_AXOLOTL, *command, "sleep 1.2; echo out; exit 3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "out\n"), done.stderr
    assert re.search(r"^[\d.]+ s  Inconclusive .*  working set [\d.]+ [kM]B", done.stderr, re.M)
    assert "the command ended" in done.stderr
    assert "Every figure: fast-axolotl show --all " in done.stderr
    assert not (tmp_path / "run" / "log.txt").exists()


def test_a_run_is_watched_to_its_end_and_the_command_that_follows_can_be_pasted(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "out dir [x]"
    write_run(folder, make_run(make_rank(wait=steady(0.3)), system=make_system()))
    done = run(folder)
    assert "Watched until the run finished." in done.stdout
    assert f"Every figure: fast-axolotl show --all '{folder}'" in done.stdout
    end = End(t=60.0, reason="exception", error="bad row")
    for file in folder.iterdir():
        lines = file.read_text().splitlines()[:-1]
        file.write_text("\n".join([*lines, dump_line(end), ""]))
    assert "Watched until the run failed: bad row." in run(folder).stdout


def test_json_is_the_summary_and_a_run_whose_processes_are_gone_was_cut_off(
    unfinished: Path,
) -> None:
    done = run(unfinished, "--seconds", "0.2", "--json")
    assert json.loads(done.stdout)["stall_fraction"] == pytest.approx(0.3)
    assert "Data-bound (rate)" in done.stderr
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    host = os.uname().nodename
    for file in unfinished.glob("*.jsonl"):
        text = re.sub(r'"(pid|root_pid)":\d+', rf'"\1":{gone.pid}', file.read_text())
        file.write_text(text.replace('"host":"machine"', f'"host":"{host}"'))
        os.utime(file, (1, 1))
    done = run(unfinished)
    assert "the run was cut off: its processes are gone" in done.stdout
