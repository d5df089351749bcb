"""Figures of single processes: from the real procfs, and from folders laid out like one."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fast_axolotl.measure import procfs

STATUS = b"""Name:\tpython
SigIgn:\t0000000001001000
VmHWM:\t    3000 kB
VmRSS:\t    2000 kB
RssAnon:\t    1500 kB
RssFile:\t     400 kB
RssShmem:\t     100 kB
VmSwap:\t      50 kB
"""


def lay_out(proc: Path, pid: int, **files: bytes) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text)


def test_memory_is_split_as_status_tells(tmp_path: Path) -> None:
    lay_out(tmp_path, 7, status=STATUS)
    assert procfs.read_memory(7, proc=tmp_path) == procfs.ProcessMemory(
        rss_bytes=2000 * 1024,
        anon_bytes=1500 * 1024,
        file_bytes=400 * 1024,
        shared_bytes=100 * 1024,
        hwm_bytes=3000 * 1024,
        swap_bytes=50 * 1024,
    )


def test_a_zombie_holds_nothing(tmp_path: Path) -> None:
    lay_out(tmp_path, 7, status=b"Name:\tpython\nState:\tZ (zombie)\n")
    found = procfs.read_memory(7, proc=tmp_path)
    assert (found.rss_bytes, found.hwm_bytes) == (0, 0)


def test_a_process_that_is_gone_has_no_figures() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert procfs.read_memory(gone.pid) is None
    assert procfs.read_stat(gone.pid) is None
    assert procfs.read_io(gone.pid) is None
    assert procfs.read_pss(gone.pid) is None
    assert procfs.read_run_delay(gone.pid) is None
    assert procfs.read_command(gone.pid) == ()
    assert not procfs.reset_high_water(gone.pid)


def test_without_procfs_nothing_is_known(tmp_path: Path) -> None:
    assert procfs.read_memory(proc=tmp_path / "none") is None
    assert not procfs.reset_high_water(proc=tmp_path / "none")


def test_the_high_water_mark_begins_anew_after_a_reset() -> None:
    num_bytes = 64 << 20
    before = procfs.read_memory()
    with mmap.mmap(-1, num_bytes) as block:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            block[offset] = 1
    spike = procfs.read_memory()
    assert procfs.reset_high_water()
    after = procfs.read_memory()
    assert (spike.hwm_bytes or 0) >= before.rss_bytes + num_bytes * 0.9
    assert (after.hwm_bytes or 0) < (spike.hwm_bytes or 0) - num_bytes * 0.5


def test_our_own_process_is_described() -> None:
    stat = procfs.read_stat("self")
    assert (stat.pid, stat.parent_pid) == (os.getpid(), os.getppid())
    assert stat.is_alive
    assert stat.cpu_seconds > 0
    assert procfs.read_pss("self").pss_bytes > 1_000_000
    assert procfs.read_processors("self") == frozenset(os.sched_getaffinity(0))
    assert procfs.read_command("self")[1:] != ()


def test_read_calls_are_counted_although_the_bytes_are_cached(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(3_000_000))
    before = procfs.read_io("self")
    file.read_bytes()
    after = procfs.read_io("self")
    assert after.read_chars - before.read_chars >= 3_000_000
    assert after.read_bytes - before.read_bytes < 3_000_000


def test_a_name_with_blanks_and_parentheses_does_not_shift_the_fields(tmp_path: Path) -> None:
    tail = b"S 3 1 1 0 -1 0 0 0 0 0 100 50 30 20 20 0 4 0 999 0 0"
    lay_out(tmp_path, 7, stat=b"7 (a) Z 1 (b) " + tail)
    stat = procfs.read_stat(7, proc=tmp_path)
    assert (stat.parent_pid, stat.state, stat.num_threads, stat.start_ticks) == (3, "S", 4, 999)
    assert stat.cpu_seconds == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize(("num_threads", "is_alive"), [(b"1", False), (b"3", True)])
def test_a_main_thread_that_ended_before_its_siblings_is_no_dead_process(
    tmp_path: Path, num_threads: bytes, is_alive: bool
) -> None:
    tail = b"Z 3 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 " + num_threads + b" 0 999 0 0"
    lay_out(tmp_path, 7, stat=b"7 (main) " + tail)
    assert procfs.read_stat(7, proc=tmp_path).is_alive is is_alive


@pytest.mark.parametrize("text", [b"", b"7 (x", b"7 (x) S 1", b"nonsense"])
def test_a_stat_that_is_cut_off_is_no_stat(tmp_path: Path, text: bytes) -> None:
    lay_out(tmp_path, 7, stat=text)
    assert procfs.read_stat(7, proc=tmp_path) is None


def test_swap_counters_are_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\npswpin 3\npswpout 5\noom_kill 2\n")
    page = os.sysconf("SC_PAGE_SIZE")
    expected = {b"pswpin": 3 * page, b"pswpout": 5 * page, b"oom_kill": 2}
    assert procfs.read_vmstat(proc=tmp_path) == expected
    (tmp_path / "vmstat").write_text("nr_free_pages 1\n")
    assert procfs.read_vmstat(proc=tmp_path) == {}


def test_a_kernel_that_does_not_count_waiting_for_processors_gives_none(tmp_path: Path) -> None:
    lay_out(tmp_path, 7, schedstat=b"900 2500000000 3\n")
    lay_out(tmp_path, 8, schedstat=b"0 0 0\n")
    assert [procfs.read_run_delay(pid, proc=tmp_path) for pid in (7, 8, 9)] == [2.5, None, None]


def test_pressure_is_the_total_of_the_full_line_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_text("some avg10=1.00 total=9\nfull avg10=0.00 avg60=0.00 total=2500000\n")
    assert procfs.read_pressure_seconds(file) == 2.5
    assert procfs.read_pressure_seconds(file, "some") == 9e-6
    file.write_text("some avg10=1.00 total=9\n")
    assert procfs.read_pressure_seconds(file) is None
    assert procfs.read_pressure_seconds(tmp_path / "none") is None


def test_reading_leaves_no_file_open() -> None:
    def read_all() -> None:
        procfs.read_memory()
        procfs.read_stat("self")
        procfs.read_io("self")
        procfs.read_pss("self")
        procfs.read_pressure_seconds("/proc/pressure/memory")

    read_all()
    before = len(list(Path("/proc/self/fd").iterdir()))
    thread = threading.Thread(target=read_all)
    thread.start()
    thread.join()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
