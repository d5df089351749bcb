"""The tree's members and sums, with real processes that fork, read and end as they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fast_axolotl.measure import procfs
from fast_axolotl.measure.process_tree import ProcessTree

MEGABYTE = 1 << 20
SLACK = 200_000
"""What the interpreter itself reads between two samples."""

PARENT = """
import os, signal, sys
kids = {}
def serve(stdin, stdout):
    for line in stdin:
        word, _, rest = line.decode().strip().partition(" ")
        if word == "fork":
            ours, theirs = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(ours[1]); os.close(theirs[0])
                serve(os.fdopen(ours[0], "rb", 0), os.fdopen(theirs[1], "wb", 0))
                os._exit(0)
            os.close(ours[0]); os.close(theirs[1])
            kids[rest] = pid, os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb", 0)
            stdout.write(b"%d\\n" % pid)
            continue
        if word == "tell":
            name, _, order = rest.partition(" ")
            kids[name][1].write(order.encode() + b"\\n")
            stdout.write(kids[name][2].readline() or b"gone\\n")
            continue
        if word == "send":
            name, _, order = rest.partition(" ")
            kids[name][1].write(order.encode() + b"\\n")
        if word == "read":
            with open("/dev/zero", "rb", buffering=0) as zero:
                for _ in range(int(rest)):
                    zero.read(1 << 20)
        if word == "ignore":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if word == "wait":
            try:
                os.waitpid(kids[rest][0], 0)
            except ChildProcessError:
                pass
        if word == "exit":
            os._exit(0)
        stdout.write(b"done\\n")
serve(os.fdopen(0, "rb", 0), os.fdopen(1, "wb", 0))
"""


class Puppet:
    """A process that does what it is told, one order at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, *orders: str) -> str:
        """The answer to the last of the orders."""
        for order in orders:
            self.process.stdin.write(order.encode() + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        return answer.decode().strip()


@pytest.fixture
def root() -> Iterator[Puppet]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            found = Puppet(process)
            assert found.tell("begin") == "done"
            yield found
        finally:
            process.kill()


@pytest.fixture
def tree(root: Puppet) -> ProcessTree:
    return ProcessTree(root.pid)


def chars(tree: ProcessTree) -> int:
    return tree.sample().read_chars or 0


def test_children_and_grandchildren_belong_to_the_tree(root: Puppet, tree: ProcessTree) -> None:
    assert tree.sample().processes == 1
    child = int(root.tell("fork a"))
    grandchild = int(root.tell("tell a fork b"))
    assert tree.sample().processes == 3
    assert tree.pids == (root.pid, child, grandchild)
    assert os.getpid() not in tree.pids


def test_what_a_waited_for_child_read_is_counted_once(root: Puppet, tree: ProcessTree) -> None:
    root.tell("fork a")
    before = chars(tree)
    root.tell("tell a read 8")
    during = chars(tree)
    root.tell("tell a exit", "wait a")
    after = chars(tree)
    assert during - before == pytest.approx(8 * MEGABYTE, abs=SLACK)
    assert after - before == pytest.approx(8 * MEGABYTE, abs=SLACK)


def test_of_a_child_that_nobody_waits_for_what_was_seen_stays_counted(
    root: Puppet, tree: ProcessTree
) -> None:
    root.tell("ignore", "fork a")
    before = chars(tree)
    root.tell("tell a read 8")
    during = chars(tree)
    # Read after the last sample, by a child whose counters go nowhere: the blind spot.
    root.tell("tell a read 4", "tell a exit", "wait a")
    after = chars(tree)
    assert during - before == pytest.approx(8 * MEGABYTE, abs=SLACK)
    assert after - before == pytest.approx(8 * MEGABYTE, abs=SLACK)


def test_an_orphan_stays_in_the_tree_and_stays_counted_after_its_end(
    root: Puppet, tree: ProcessTree
) -> None:
    root.tell("fork a")
    orphan = int(root.tell("tell a fork b"))
    before = chars(tree)
    root.tell("tell a tell b read 8")
    assert chars(tree) - before == pytest.approx(8 * MEGABYTE, abs=SLACK)
    # Stopped, or it would end by itself when its parent's end of the pipe closes.
    os.kill(orphan, signal.SIGSTOP)
    root.tell("send a exit", "wait a")
    sample = tree.sample()
    assert orphan in tree.pids
    assert sample.processes == 2
    os.kill(orphan, signal.SIGKILL)
    while _exists(orphan):
        pass
    # Whether it is buried at once is up to the process that adopted it.
    last = tree.sample()
    assert last.processes == 1
    assert (last.read_chars or 0) - before == pytest.approx(8 * MEGABYTE, abs=SLACK)


def test_many_short_children_are_counted_to_the_last_byte(root: Puppet, tree: ProcessTree) -> None:
    before = chars(tree)
    counts = [before]
    for number in range(12):
        root.tell(f"fork {number}", f"tell {number} read 2")
        if number % 3:
            counts.append(chars(tree))
        root.tell(f"tell {number} exit", f"wait {number}")
        if number % 2:
            counts.append(chars(tree))
    counts.append(chars(tree))
    assert counts == sorted(counts)
    assert counts[-1] - before == pytest.approx(24 * MEGABYTE, abs=SLACK)


def test_a_zombie_counts_for_its_reads_and_not_as_a_process(
    root: Puppet, tree: ProcessTree
) -> None:
    root.tell("fork a")
    before = chars(tree)
    root.tell("tell a read 4", "tell a exit")
    pid = tree.pids[1]
    while (stat := procfs.read_stat(pid)) is None or stat.is_alive:
        pass
    sample = tree.sample()
    assert sample.processes == 1
    assert (sample.read_chars or 0) - before == pytest.approx(4 * MEGABYTE, abs=SLACK)
    assert tree.read_pss().pss_bytes > 0


def test_the_zombie_of_the_root_shows_its_counters_and_no_memory(
    root: Puppet, tree: ProcessTree
) -> None:
    before = chars(tree)
    assert tree.is_alive
    root.tell("read 4", "exit")
    os.waitid(os.P_PID, root.pid, os.WEXITED | os.WNOWAIT)
    sample = tree.sample()
    assert not tree.is_alive
    assert (sample.processes, sample.rss_bytes) == (0, None)
    assert (sample.read_chars or 0) - before == pytest.approx(4 * MEGABYTE, abs=SLACK)
    root.process.wait()
    assert tree.sample().processes == 0
    assert (tree.sample().read_chars or 0) >= (sample.read_chars or 0)


def test_pss_of_forked_workers_counts_shared_pages_once() -> None:
    code = """
import os, sys
block = bytearray(b"x") * (64 << 20)
for _ in range(4):
    if os.fork() == 0:
        total = sum(block[::4096])
        sys.stdout.write("ready\\n"); sys.stdout.flush()
        os.read(0, 1)
        os._exit(0)
os.read(0, 1)
for _ in range(4):
    os.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for _ in range(4):
            process.stdout.readline()
        tree = ProcessTree(process.pid)
        sample = tree.sample()
        pss = tree.read_pss()
        process.kill()
        for pid in tree.pids:
            _kill(pid)
    assert sample.processes == 5
    assert sample.rss_bytes > 5 * (64 << 20)
    assert (64 << 20) < pss.pss_anon_bytes <= pss.pss_bytes < 2 * (64 << 20)
    assert (64 << 20) < sample.largest_anon_bytes < sample.anon_bytes


def test_pages_of_a_mapped_file_are_told_apart_from_what_cannot_give_way(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(bytes(48 << 20))
    code = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    rows = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
shared = mmap.mmap(-1, 16 << 20)
shared.write(bytes(16 << 20))
private = bytearray(b"x") * (32 << 20)
print(sum(rows[::4096]), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(tmp_path / "rows.arrow")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        tree = ProcessTree(process.pid)
        tree.sample()
        pss = tree.read_pss()
        process.kill()
    assert pss.pss_file_bytes == pytest.approx(48 << 20, rel=0.2)
    assert pss.pss_shared_bytes == pytest.approx(16 << 20, rel=0.05)
    assert pss.pss_anon_bytes == pytest.approx(32 << 20, rel=0.5)


def test_an_excluded_process_is_not_counted_though_it_is_below_the_root(root: Puppet) -> None:
    everybody = ProcessTree(os.getpid())
    others = ProcessTree(os.getpid(), exclude_pids=(root.pid,))
    everybody.sample()
    others.sample()
    assert root.pid in everybody.pids
    assert root.pid not in others.pids


def test_processor_time_of_ended_children_stays(root: Puppet, tree: ProcessTree) -> None:
    root.tell("fork a", "tell a read 2000")
    during = tree.sample().cpu_seconds
    root.tell("tell a exit", "wait a")
    after = tree.sample().cpu_seconds
    assert during <= after < 1.5 * during + 0.1


def test_a_pid_given_out_again_is_another_process(tmp_path: Path) -> None:
    lay_out(tmp_path, 10, parent=1, ticks=100, chars=1000)
    tree = ProcessTree(10, proc=tmp_path)
    assert tree.sample().processes == 1
    assert tree.is_alive
    lay_out(tmp_path, 10, parent=1, ticks=999, chars=5)
    sample = tree.sample()
    assert (sample.processes, sample.read_chars, tree.is_alive) == (0, 1000, False)


def test_a_process_that_may_not_be_read_makes_the_sums_unknown(tmp_path: Path) -> None:
    lay_out(tmp_path, 10, parent=1, ticks=100, chars=1000)
    lay_out(tmp_path, 11, parent=10, ticks=101, chars=None)
    tree = ProcessTree(10, proc=tmp_path)
    sample = tree.sample()
    assert (sample.processes, sample.read_bytes, sample.read_chars) == (2, None, None)
    assert tree.read_pss() is None
    assert sample.rss_bytes == 2 * 1024 * 1024


def test_a_child_whose_parent_is_not_listed_yet_is_looked_at_again(tmp_path: Path) -> None:
    lay_out(tmp_path, 1, parent=0, ticks=1, chars=0)
    lay_out(tmp_path, 10, parent=1, ticks=100, chars=0)
    lay_out(tmp_path, 12, parent=11, ticks=102, chars=0)
    tree = ProcessTree(10, proc=tmp_path)
    assert tree.sample().processes == 1
    lay_out(tmp_path, 11, parent=10, ticks=101, chars=0)
    assert tree.sample().processes == 3


def test_other_processes_are_read_once_and_not_at_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, 1, parent=0, ticks=1, chars=0)
    for pid in range(100, 150):
        lay_out(tmp_path, pid, parent=1, ticks=1, chars=0)
    lay_out(tmp_path, 10, parent=1, ticks=100, chars=0)
    tree = ProcessTree(10, proc=tmp_path)
    tree.sample()
    read: list[object] = []
    plain = procfs.read_stat
    monkeypatch.setattr(
        procfs, "read_stat", lambda pid, *, proc: read.append(pid) or plain(pid, proc=proc)
    )
    tree.sample()
    assert read == [10]


def test_without_procfs_there_is_nobody_in_the_tree(tmp_path: Path) -> None:
    tree = ProcessTree(os.getpid(), proc=tmp_path / "none")
    assert (tree.sample().processes, tree.sample().rss_bytes, tree.is_alive) == (0, None, False)


def lay_out(proc: Path, pid: int, *, parent: int, ticks: int, chars: int | None) -> None:
    """A process of one MiB, in a folder laid out like procfs."""
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    tail = f"S {parent} 1 1 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 {ticks} 0 0"
    (folder / "stat").write_text(f"{pid} (python) {tail}")
    (folder / "status").write_text("Name:\tpython\nVmRSS:\t1024 kB\n")
    if chars is not None:
        (folder / "io").write_text(f"rchar: {chars}\nread_bytes: {chars // 2}\n")
        (folder / "smaps_rollup").write_text("x\nPss:                 512 kB\n")


def _exists(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.is_alive


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
