"""Where a run takes place, and the cgroup it lives in, laid out in folders and for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fast_axolotl import system
from fast_axolotl.measure import processes
from fast_axolotl.measure.processes import ProcessTree, read_pressure_seconds
from fast_axolotl.system import find_memory_cgroup, usable_cores
from support.files import lay_out

GIGABYTE = 1_000_000_000


def test_version_two_gives_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out(proc, {"7/cgroup": "0::/slice/job\n"})
    files = {
        "cgroup.controllers": "memory",
        "slice/memory.max": f"{8 * GIGABYTE}\n",
        "slice/memory.high": "max\n",
        "slice/job/memory.max": "max\n",
        "slice/job/memory.pressure": "full avg10=0.00 total=1500000\n",
    }
    lay_out(root, files)
    found = find_memory_cgroup(7, proc=proc, root=root)
    assert found.limit_bytes() == 8 * GIGABYTE
    assert read_pressure_seconds(found.pressure_file("memory")) == 1.5
    assert found.pressure_file("io") is None


def test_version_one_knows_no_limit_as_the_largest_number_of_pages(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out(proc, {"self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/\n0::/\n"})
    no_limit = "9223372036854771712\n"
    limits = ("memory/memory.limit_in_bytes", "memory/job/memory.limit_in_bytes")
    lay_out(root, dict.fromkeys(limits, no_limit))
    found = find_memory_cgroup(proc=proc, root=root)
    assert found.version == 1
    assert found.limit_bytes() is None
    lay_out(root, {"memory/job/memory.limit_in_bytes": "4096000\n"})
    assert found.limit_bytes() == 4_096_000


def test_in_a_container_that_sees_the_hosts_path_the_mount_is_the_cgroup(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out(proc, {"self/cgroup": "0::/../../kubepods/pod1/container\n"})
    lay_out(root, {"cgroup.controllers": "memory", "memory.max": "1000000\n"})
    found = find_memory_cgroup(proc=proc, root=root)
    assert found.limit_bytes() == 1_000_000
    # A group inside that has the name of one of the host's is another.
    lay_out(root, {"kubepods/memory.max": "1000\n", "kubepods/cpu.max": "100000 100000\n"})
    assert found.limit_bytes() == 1_000_000
    assert usable_cores(proc, root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cgroup/cpu.max": "100000 100000"}, 1),
        ({"cgroup/cpu.max": "50000 100000"}, 1),
        ({"cgroup/cpu.max": "nonsense"}, None),
        (
            {"proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/cpu.max": "max 100000"}
            | {"cgroup/a/cpu.max": "100000 100000"},
            1,
        ),
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/\n"}
            | {f"cgroup/cpu/job/cpu.cfs_{name}_us": "100000" for name in ("quota", "period")},
            1,
        ),
        ({"cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_quota(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    lay_out(tmp_path, files)
    here = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == (expected or here)


def test_an_affinity_of_one_core_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert usable_cores() == 1


def test_this_machine_is_described_without_its_name() -> None:
    found = system.describe()
    assert found["memory_bytes"] > 100_000_000
    assert found["cores"] >= 1
    assert found["versions"]["pyarrow"]
    assert "host" not in found
    assert None not in found.values()


# Processes: the figures of one, and the members and sums of a tree that forks, reads and ends.


MEGABYTE = 1 << 20
SLACK = 200_000
"""What the interpreter itself reads between two samples."""

PARENT = """
import os, sys
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
        if word in ("tell", "send"):
            name, _, order = rest.partition(" ")
            kids[name][1].write(order.encode() + b"\\n")
        if word == "tell":
            stdout.write(kids[name][2].readline() or b"gone\\n")
            continue
        if word == "read":
            with open("/dev/zero", "rb", buffering=0) as zero:
                for _ in range(int(rest)):
                    zero.read(1 << 20)
        if word == "wait":
            os.waitpid(kids[rest][0], 0)
        if word == "exit":
            os._exit(0)
        stdout.write(b"done\\n")
serve(os.fdopen(0, "rb", 0), os.fdopen(1, "wb", 0))
"""


def start(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


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
    with start(PARENT) as process:
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
    while (stat := processes.read_stat(orphan)) is not None and stat.is_alive:
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
    with start(code) as process:
        for _ in range(4):
            process.stdout.readline()
        tree = ProcessTree(process.pid)
        sample = tree.sample()
        pss = tree.read_pss()
        process.kill()
    assert sample.processes == 5
    assert sample.rss_bytes > 5 * (64 << 20)
    assert (64 << 20) < pss["pss_anon_bytes"] <= pss["pss_bytes"] < 2 * (64 << 20)
    assert (64 << 20) < sample.largest_anon_bytes < sample.anon_bytes


def test_a_pid_given_out_again_is_another_process(tmp_path: Path) -> None:
    lay_out_process(tmp_path, 10, parent=1, ticks=100, chars=1000)
    tree = ProcessTree(10, proc=tmp_path)
    assert tree.sample().processes == 1
    assert tree.is_alive
    lay_out_process(tmp_path, 10, parent=1, ticks=999, chars=5)
    sample = tree.sample()
    assert (sample.processes, sample.read_chars, tree.is_alive) == (0, 1000, False)


def test_a_process_that_may_not_be_read_makes_the_sums_unknown(tmp_path: Path) -> None:
    lay_out_process(tmp_path, 10, parent=1, ticks=100, chars=1000)
    lay_out_process(tmp_path, 11, parent=10, ticks=101, chars=None)
    tree = ProcessTree(10, proc=tmp_path)
    sample = tree.sample()
    assert (sample.processes, sample.read_bytes, sample.read_chars) == (2, None, None)
    assert tree.read_pss() is None
    assert sample.rss_bytes == 2 * 1024 * 1024


def test_a_child_whose_parent_is_not_listed_yet_is_looked_at_again(tmp_path: Path) -> None:
    lay_out_process(tmp_path, 1, parent=0, ticks=1, chars=0)
    lay_out_process(tmp_path, 10, parent=1, ticks=100, chars=0)
    lay_out_process(tmp_path, 12, parent=11, ticks=102, chars=0)
    tree = ProcessTree(10, proc=tmp_path)
    assert tree.sample().processes == 1
    lay_out_process(tmp_path, 11, parent=10, ticks=101, chars=0)
    assert tree.sample().processes == 3


def test_other_processes_are_read_once_and_not_at_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_process(tmp_path, 1, parent=0, ticks=1, chars=0)
    for pid in range(100, 150):
        lay_out_process(tmp_path, pid, parent=1, ticks=1, chars=0)
    lay_out_process(tmp_path, 10, parent=1, ticks=100, chars=0)
    tree = ProcessTree(10, proc=tmp_path)
    tree.sample()
    read: list[object] = []
    plain = processes.read_stat
    monkeypatch.setattr(
        processes, "read_stat", lambda pid, *, proc: read.append(pid) or plain(pid, proc=proc)
    )
    tree.sample()
    assert read == [10]


def lay_out_process(
    proc: Path, pid: int, *, parent: int, ticks: int = 1, chars: int | None = 0
) -> None:
    """A process of one MiB, in a folder laid out like procfs."""
    tail = f"S {parent} 1 1 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 {ticks} 0 0"
    status = "Name:\tpython\nVmRSS:\t1024 kB\n"
    lay_out(proc, {f"{pid}/stat": f"{pid} (python) {tail}", f"{pid}/status": status})
    if chars is not None:
        io = f"rchar: {chars}\nread_bytes: {chars // 2}\n"
        lay_out(proc, {f"{pid}/io": io, f"{pid}/smaps_rollup": "x\nPss:                 512 kB\n"})


# Single processes


def test_memory_is_split_as_status_tells(tmp_path: Path) -> None:
    names = {"VmRSS": 2000, "RssAnon": 1500, "RssShmem": 100, "VmHWM": 3000, "VmSwap": 50}
    lines = "".join(f"{name}:\t    {size} kB\n" for name, size in names.items())
    lay_out(tmp_path, {"7/status": f"Name:\tpython\n{lines}RssFile:\t 400 kB\n"})
    found = processes.read_memory(7, proc=tmp_path)
    assert list(found.values()) == [size * 1024 for size in names.values()]


def test_our_own_process_is_described_and_one_that_is_gone_has_no_figures() -> None:
    stat = processes.read_stat("self")
    assert (stat.pid, stat.parent_pid) == (os.getpid(), os.getppid())
    assert stat.is_alive
    assert stat.cpu_ticks > 0
    assert processes.read_pss("self")["pss_bytes"] > 1_000_000
    assert processes.read_command("self")[1:] != ()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in ("memory", "stat", "io", "pss", "run_delay"):
        assert getattr(processes, f"read_{name}")(gone.pid) is None
    assert processes.read_command(gone.pid) == ()


@pytest.mark.parametrize(
    ("text", "is_alive"),
    [
        # A name with blanks and parentheses does not shift the fields.
        (b"7 (a) Z 1 (b) S 3 1 1 0 -1 0 0 0 0 0 100 50 30 20 20 0 4 0 999 0 0", True),
        (b"7 (main) Z 3 1 1 0 -1 0 0 0 0 0 100 50 30 20 20 0 1 0 999 0 0", False),
        # A main thread that ended before its siblings is no dead process.
        (b"7 (main) Z 3 1 1 0 -1 0 0 0 0 0 100 50 30 20 20 0 3 0 999 0 0", True),
        *((text, None) for text in (b"", b"7 (x", b"7 (x) S 1", b"nonsense")),
    ],
)
def test_a_stat_is_read_by_its_fields(tmp_path: Path, text: bytes, is_alive: bool | None) -> None:
    lay_out(tmp_path, {"7/stat": text})
    stat = processes.read_stat(7, proc=tmp_path)
    assert (None if stat is None else stat.is_alive) is is_alive
    if stat is not None:
        assert (stat.parent_pid, stat.start_ticks) == (3, 999)
        assert stat.cpu_ticks == 200


def test_counters_of_the_machine_are_in_bytes_and_seconds_or_none(tmp_path: Path) -> None:
    vmstat, pressure = tmp_path / "vmstat", tmp_path / "memory"
    vmstat.write_text("nr_free_pages 1\npswpin 3\npswpout 5\noom_kill 2\n")
    page = os.sysconf("SC_PAGE_SIZE")
    expected = {"swap_in_bytes": 3 * page, "swap_out_bytes": 5 * page, "machine_oom_kills": 2}
    assert processes.read_vmstat(proc=tmp_path) == expected
    vmstat.write_text("nr_free_pages 1\n")
    assert processes.read_vmstat(proc=tmp_path) == {}
    lay_out(tmp_path, {"7/schedstat": "900 2500000000 3\n"})
    lay_out(tmp_path, {"8/schedstat": "0 0 0\n"})  # by a kernel that does not count
    assert [processes.read_run_delay(pid, proc=tmp_path) for pid in (7, 8, 9)] == [2.5, None, None]
    pressure.write_text("some avg10=1.00 total=9\nfull avg10=0.00 avg60=0.00 total=2500000\n")
    assert processes.read_pressure_seconds(pressure) == 2.5
    pressure.write_text("some avg10=1.00 total=9\n")
    assert processes.read_pressure_seconds(pressure) is None
    assert processes.read_pressure_seconds(tmp_path / "none") is None
