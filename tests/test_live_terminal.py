"""The live view in a real terminal: a pseudo-terminal, real processes, real keys."""

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
import time
from pathlib import Path

import pytest

import fast_axolotl
from fast_axolotl.measure import procfs
from fast_axolotl.protocol.state import hold
from fast_axolotl.record import End, read_run
from fast_axolotl.record.folder import dump_line
from support.records import make_rank, make_run, make_system, steady, write_run
from test_following import ORDER, write_protocol
from test_watch import run as watch

pytestmark = pytest.mark.skipif(not procfs.has_procfs(), reason="there is no /proc here")

PATIENCE_SECONDS = 60.0
OTHER_SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'fast_axolotl', *sys.argv[1:]])"
)
"""A terminal of its own, as a shell in a window has it."""


class Terminal:
    """A command in a terminal, seen from the side of the one who sits there."""

    def __init__(self, folder: Path, *arguments: str | int | Path, width: int = 80) -> None:
        self.screen, inner = pty.openpty()
        self.resize(width, 24)
        self.before = termios.tcgetattr(inner)
        self.inner = inner
        self.text = ""
        source = Path(fast_axolotl.__file__).parents[1]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FAST_AXOLOTL") and name not in ("COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *map(str, arguments)],
            cwd=folder,
            env={**inherited, "PYTHONPATH": str(source), "TERM": "xterm-256color"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )

    def resize(self, width: int, height: int) -> None:
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, size)

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
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it did not end: {self.text[-3000:]!r}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def is_put_back(self) -> bool:
        return termios.tcgetattr(self.inner) == self.before

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


def test_keys_pause_reset_and_quit_and_the_terminal_is_put_back(unfinished: Path) -> None:
    with Terminal(unfinished.parent, "watch", unfinished) as one:
        seen = one.wait_for(" quit")
        assert OTHER_SCREEN in seen
        assert HIDE_CURSOR in seen
        assert "Data-bound (rate)" in seen
        assert not one.is_put_back()
        one.press("p")
        one.wait_for("paused for")
        one.press("\x1b[A")  # an arrow is no key of ours
        one.press("r")
        one.wait_for("No step has ended since the reset.")
        one.press("q")
        assert one.wait() == 0
        after = one.text.partition(BACK)[2]
        assert SHOW_CURSOR in one.text
        assert "Watched until q was pressed." in plain(after)
        assert one.is_put_back()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_trace_on_the_terminal(
    unfinished: Path, number: signal.Signals, code: int
) -> None:
    with Terminal(unfinished.parent, "watch", unfinished) as one:
        one.wait_for(" quit")
        one.process.send_signal(number)
        assert one.wait() == code
        assert BACK in one.text
        assert SHOW_CURSOR in one.text
        assert one.is_put_back()


def test_the_view_ends_with_the_run(unfinished: Path) -> None:
    with Terminal(unfinished.parent, "watch", unfinished) as one:
        one.wait_for(" quit")
        for name in ("rank-0.jsonl", "system.jsonl"):
            with (unfinished / name).open("a") as file:
                file.write(dump_line(End(t=60.0, reason="exception", error="bad row")) + "\n")
        assert one.wait() == 0
        assert "Watched until the run failed: bad row." in plain(one.text)
        assert one.is_put_back()


def test_a_new_size_is_drawn_at_once_and_nothing_is_wider(unfinished: Path) -> None:
    with Terminal(unfinished.parent, "watch", unfinished, width=120) as one:
        one.wait_for("one mark is 1 s")
        one.resize(40, 20)
        one.wait_for("memory")
        one.text = ""
        drawn = plain(one.wait_for(" quit"))
        assert max(len(line.rstrip()) for line in re.split(r"\r?\n", drawn)) <= 40
        one.press("q")
        assert one.wait() == 0


def test_ctrl_z_gives_the_terminal_back_and_takes_it_again(unfinished: Path) -> None:
    with Terminal(unfinished.parent, "watch", unfinished) as one:
        one.wait_for(" quit")
        one.process.send_signal(signal.SIGTSTP)
        one.wait_for(BACK)
        end = time.monotonic() + PATIENCE_SECONDS
        while _state(one.process.pid) != "T":
            assert time.monotonic() < end
            time.sleep(0.02)
        assert one.is_put_back()
        one.process.send_signal(signal.SIGCONT)
        one.wait_for(OTHER_SCREEN)
        one.wait_for(" quit")
        assert not one.is_put_back()
        one.press("q")
        assert one.wait() == 0
        assert one.is_put_back()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_is_watched_from_outside_and_its_table_follows(tmp_path: Path) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        ) as sleeper,
        Terminal(tmp_path, "watch", sleeper.pid, "-o", tmp_path / "kept") as one,
    ):
        one.wait_for("From outside")
        one.press("q")
        assert one.wait() == 0
        assert "until q was pressed" in plain(one.text)
        assert "working set" in plain(one.text)
        assert sleeper.poll() is None
        system = read_run(tmp_path / "kept").system
        assert system is not None
        assert system.end is not None


def test_the_view_of_a_process_ends_with_it(tmp_path: Path) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        ) as sleeper,
        Terminal(tmp_path, "watch", sleeper.pid) as one,
    ):
        one.wait_for("From outside")
        assert sleeper.stdin is not None
        sleeper.stdin.close()
        sleeper.wait()
        assert one.wait() == 0
        assert "until the process ended" in plain(one.text)


LOOP = """
import sys, time
from fast_axolotl.measure import measure
assert not sys.stdout.isatty() and sys.stdin.read() == ""
end = time.monotonic() + float(sys.argv[2])
with measure(sys.argv[1], sample_system=False) as meter:
    for number, batch in enumerate(meter.watch({"input_ids": [[1] * 8]} for _ in range(10**9))):
        time.sleep(0.005)
        if number % 50 == 0:
            print("batch", number)
        if time.monotonic() > end:
            break
sys.exit(int(sys.argv[3]))
"""


def test_run_live_shows_the_command_and_its_output_and_ends_as_it_ends(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = (sys.executable, "loop.py", "run", "3", "7")
    with Terminal(tmp_path, "measure", "--live", "--output", "run", "--", *command) as one:
        one.wait_for("tokens/s")
        one.wait_for("batch 50")
        assert one.wait() == 7
        after = plain(one.text.partition(BACK)[2])
        verdict, _, log = after.partition("Every figure: fast-axolotl show --all ")
        assert "Why" in verdict
        assert "Next" in verdict
        assert len(verdict.splitlines()) <= 24
        assert "output of the command:" in log
        assert "batch 100" in log, "the end of the output of a command that failed comes last"
        assert "the command failed with exit code 7; its last lines:" in log
        assert "captures the keyboard" not in log
        assert one.is_put_back()
    assert (tmp_path / "run" / "log.txt").read_text().startswith("batch 0\n")
    assert sorted(read_run(tmp_path / "run").ranks) == [0]


@pytest.mark.parametrize(
    ("code", "how", "hint"),
    [
        ("input('name? ')", "failed with exit code 1; its last lines:", "the live view captures"),
        (
            "import sys; sys.exit(not sys.stdin.read())",
            "failed with exit code 1 and printed nothing",
            "if it reads input: the live view captures",
        ),
        ("import no_such_module", "failed with exit code 1; its last lines:", ""),
        ("import sys; sys.stdin.read()", "", ""),
        ("import os; os.kill(os.getpid(), 15)", "was stopped by signal 15", ""),
    ],
)
def test_a_command_that_fails_at_once_is_told_how_and_the_keyboard_only_where_it_wanted_it(
    tmp_path: Path, code: str, how: str, hint: str
) -> None:
    flags = ("--live", "--quiet", "--output", "run")
    with Terminal(tmp_path, "measure", *flags, "--", sys.executable, "-c", code) as one:
        one.wait()
        end = plain(one.text).partition("output of the command:")[2]
        assert (f"fast-axolotl: the command {how}" in end) is bool(how)
        assert ("ModuleNotFoundError: No module named 'no_such_module'" in end) is (
            "no_such_module" in code
        )
        assert f"fast-axolotl: {hint}" in f"{end}fast-axolotl: "
        assert ("keyboard" in end) is bool(hint)


def test_quitting_the_view_leaves_the_command_running_with_its_output_on_the_terminal(
    tmp_path: Path,
) -> None:
    script = "sleep 1.5; echo going; while [ ! -e stop ]; do sleep 0.1; done; echo done; exit 4"
    with Terminal(
        tmp_path, "measure", "--live", "--output", "run", "--", "sh", "-c", script
    ) as one:
        one.wait_for(" quit")
        one.press("q")
        one.wait_for("the command continues; Ctrl-C stops it")
        one.wait_for("going")
        assert one.is_put_back()
        (tmp_path / "stop").write_text("")
        assert one.wait() == 4
        assert plain(one.text).count("done") == 1


def test_run_live_without_a_terminal_prints_lines_and_leaves_the_output_alone(
    tmp_path: Path,
) -> None:
    source = Path(fast_axolotl.__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fast_axolotl", "measure", "--live"),
            *("--output", "run", "--", "sh", "-c", "sleep 1.2; echo out; exit 3"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "out\n"), done.stderr
    assert re.search(r"^ +\d s  Waiting  working set [\d.]+ [kM]B", done.stderr, re.MULTILINE)
    assert "the command ended" in done.stderr
    assert "Every figure: fast-axolotl show --all " in done.stderr
    assert "keeps the keyboard" not in done.stderr
    assert not (tmp_path / "run" / "log.txt").exists()


def test_the_command_that_follows_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "out dir [x]"
    write_run(folder, make_run(make_rank(wait=steady(0.3)), system=make_system()))
    done = watch(folder)
    assert "the run finished" in done.stdout
    assert f"Every figure: fast-axolotl show --all '{folder}'" in done.stdout
    protocol = tmp_path / "p 1"
    make_protocol(protocol, done=6)
    assert f"The answer: fast-axolotl report '{protocol}'" in watch(protocol).stdout


def test_of_a_protocol_the_newest_run_is_shown(tmp_path: Path) -> None:
    for name in ("01-baseline", "02-candidate"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        write_run(folder, make_run(make_rank(wait=steady(0.3)), system=make_system()))
        for file in folder.iterdir():
            os.utime(file, (0, 0))
    done = watch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run finished, and no other run followed" in done.stdout
    assert f"fast-axolotl show --all {tmp_path / 'runs' / '02-candidate'}" in done.stdout
    write_protocol(tmp_path, done=2)
    done = watch(tmp_path)
    assert "run 2 of 6 · candidate · warm-up · about" in done.stdout
    assert "the run finished, and no other run followed" in done.stdout
    assert f"The answer so far: fast-axolotl report {tmp_path}\n" in done.stdout
    with hold(tmp_path):
        done = watch(tmp_path, "--seconds", "1")
    assert "Watched until the time was up" in done.stdout, "it is at work between two runs"


def make_protocol(folder: Path, *, done: int) -> None:
    write_protocol(folder, done=done)
    for number, arm in enumerate(ORDER[:done], 1):
        record = make_run(make_rank(wait=steady(0.3)), system=make_system())
        write_run(folder / "runs" / f"{number:02d}-{arm}", record)


def test_a_protocol_whose_runs_are_all_done_is_over_at_once_and_its_answer_is_named(
    tmp_path: Path,
) -> None:
    make_protocol(tmp_path, done=6)
    begin = time.monotonic()
    done = watch(tmp_path)
    assert time.monotonic() - begin < 15
    first, *_, last = done.stdout.splitlines()
    run = tmp_path / "runs" / "06-candidate"
    assert first == f"fast-axolotl: watching run 6 of 6: candidate, pair 2 of 2, {run}"
    assert "Watched until all 6 runs ended.\n" in done.stdout
    assert last == f"The answer: fast-axolotl report {tmp_path}"


def test_a_protocol_is_waited_for_and_followed_to_its_last_run(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    make_protocol(folder, done=0)
    with Terminal(tmp_path, "watch", "p", width=60) as one:
        one.wait_for("run 1 of 6 has not started")
        one.wait_for("Nothing has been recorded yet.")
        make_protocol(folder, done=5)
        one.wait_for("p/runs/05-baseline")
        one.wait_for("run 5 of 6 · baseline · pair 2 of 2")
        make_protocol(folder, done=6)
        assert one.wait() == 0
        assert "Watched until all 6 runs ended." in plain(one.text)
        assert "The answer: fast-axolotl report p" in plain(one.text)
        assert one.is_put_back()


def test_a_folder_that_is_no_protocol_and_holds_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = watch(tmp_path)
    assert done.returncode == 1
    assert "holds no record" in done.stderr


def test_json_of_a_record_is_its_summary(unfinished: Path) -> None:
    done = watch(unfinished, "--seconds", "0.2", "--json")
    assert json.loads(done.stdout)["stall_fraction"] == pytest.approx(0.3)
    assert "Data-bound (rate)" in done.stderr


def test_a_run_whose_processes_are_gone_was_cut_off(unfinished: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    host = os.uname().nodename
    for file in unfinished.glob("*.jsonl"):
        text = re.sub(r'"(pid|root_pid)":\d+', rf'"\1":{gone.pid}', file.read_text())
        file.write_text(text.replace('"host":"machine"', f'"host":"{host}"'))
        os.utime(file, (1, 1))
    done = watch(unfinished)
    assert "the run was cut off: its processes are gone" in done.stdout


def test_flags_of_a_process_are_refused_for_a_record_and_so_is_what_is_none(
    unfinished: Path,
) -> None:
    done = watch(unfinished, "--output", unfinished / "x")
    assert done.returncode == 2
    assert "--data-path and --output need a PID" in done.stderr
    done = watch(unfinished / "gone")
    assert done.returncode == 1
    assert "there is no such folder" in done.stderr
