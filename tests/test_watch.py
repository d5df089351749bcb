"""``fast-axolotl watch`` as a user runs it: on real processes, in a terminal's stead."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from fast_axolotl.errors import UsageError
from fast_axolotl.measure import processes
from fast_axolotl.measure.sampler import check_process
from fast_axolotl.record import read_run
from support.children import FAST_AXOLOTL, run_child

linux = pytest.mark.skipif(not processes.has_procfs(), reason="there is no /proc here")


def run(*arguments: str | int | Path) -> subprocess.CompletedProcess[str]:
    return run_child(*FAST_AXOLOTL, "watch", *map(str, arguments))


@linux
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


@linux
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


@linux
def test_json_alone_goes_to_standard_output(sleeper: subprocess.Popen[bytes]) -> None:
    done = run(sleeper.pid, "--seconds", "0.2", "--json")
    found = json.loads(done.stdout)
    assert "processes 1" in done.stderr
    assert found["working_set_bytes"] > 1_000_000
    assert found["verdict"]["subtype"] == "unseen"


@linux
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


@linux
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
