"""What a machine does to a run, for real: no memory, no processors, a slow disk.

Limits are set by cgroups of the test's own. Where they cannot be made, as in most containers, these
tests are skipped; the arithmetic has tests of its own (``test_summary``, ``test_verdict``).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fast_axolotl.measure.disk import find_numbers
from fast_axolotl.measure.gpu import GpuReader
from fast_axolotl.measure.sampler import SystemSampler
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.system_figures import fold_system
from fast_axolotl.record import RunSummary, SystemRecord, read_run
from fast_axolotl.system import CGROUP

SPIN = "while True: pass"

Limit = Callable[[str, tuple[str, str], tuple[str, str]], Path]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """Makes a cgroup with a limit: its controller, file and value in version 1, and in 2."""
    made: list[Path] = []

    def make(controller: str, first: tuple[str, str], second: tuple[str, str]) -> Path:
        is_first = (CGROUP / controller).is_dir()
        folder = (CGROUP / controller if is_first else CGROUP) / f"fast-axolotl-{os.getpid()}"
        name, value = first if is_first else second
        try:
            folder.mkdir()
            made.append(folder)
            (folder / name).write_text(value)
        except OSError as error:
            pytest.skip(f"no cgroup with {name} can be made here: {error}")
        return folder

    yield make
    for folder in made:
        folder.rmdir()


def measured(folder: Path, cgroup: Path, code: str, *arguments: str | Path) -> RunSummary:
    """The summary of a loop that was run inside a cgroup with ``run --measure``."""
    script = folder / "train.py"
    script.write_text(code)
    words = [sys.executable, "-m", "fast_axolotl", "run", "--measure", "--output"]
    words += [str(folder / "run"), "--", sys.executable, str(script), *map(str, arguments)]
    inside = f"echo $$ > {cgroup}/cgroup.procs && exec {shlex.join(words)}"
    subprocess.run(["sh", "-c", inside], capture_output=True, timeout=60, check=False)
    return summarise(read_run(folder / "run"))


LEAK = """
import os, time
from fast_axolotl import measure
held = []
with measure(os.environ["FAST_AXOLOTL_MEASURE"]) as meter:
    def load():
        while True:
            time.sleep(0.002)
            yield [1]
    for batch in meter.watch(load()):
        held.append(bytearray(os.urandom(1000)) * 250)
"""


def test_a_run_that_the_kernel_kills_at_its_limit_ran_out_of_memory(
    tmp_path: Path, limit: Limit
) -> None:
    """It waits for its loader most of the time, and the loader is not what ended it."""
    size = str(400 << 20)
    cgroup = limit("memory", ("memory.limit_in_bytes", size), ("memory.max", size))
    summary = measured(tmp_path, cgroup, LEAK)
    assert (summary.verdict.kind, summary.oom_kills) == ("memory", 1)
    assert summary.stall_fraction > 0.1
    assert "signal 9" in summary.verdict.evidence[0]
    assert "the largest process from" in " ".join(summary.verdict.evidence)


FAULT = """
import mmap, os, random, sys
from fast_axolotl import measure
with open(sys.argv[1], "rb") as file:
    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
data.madvise(mmap.MADV_RANDOM)
places = random.sample(range(len(data) // 4096), 4000)
def load():
    while places:
        yield [data[4096 * places.pop()] for _ in range(8)]
with measure(os.environ["FAST_AXOLOTL_MEASURE"], data_paths=[sys.argv[1]]) as meter:
    for batch in meter.watch(load()):
        pass
"""


def test_random_reads_that_fill_a_slow_disk_are_bound_by_it_and_not_by_the_loader(
    tmp_path: Path, limit: Limit
) -> None:
    """A disk of 800 requests a second gives 3 MB/s at random and 800 MB/s in order."""
    data = tmp_path / "rows.arrow"
    data.write_bytes(os.urandom(128 << 20))
    with data.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    device = find_numbers(data)
    if device is None:
        pytest.skip("the folder for tests is on no block device")
    name = f"{device[0]}:{device[1]}"
    cgroup = limit(
        "blkio", ("blkio.throttle.read_iops_device", f"{name} 800"), ("io.max", f"{name} riops=800")
    )
    summary = measured(tmp_path, cgroup, FAULT, data)
    probe = read_run(tmp_path / "run").system.disk
    assert probe.path == str(data)
    assert probe.random_4k_bytes_per_second == pytest.approx(800 * 4096, rel=0.3)
    assert probe.bytes_per_second > 20 * probe.random_4k_bytes_per_second
    assert summary.disk_request_bytes < 3 * 4096
    assert summary.disk_share > 10 * summary.read_bytes_per_second / probe.bytes_per_second
    assert (summary.verdict.kind, summary.verdict.subtype) == ("io", "random")
    assert "More workers do not help" in summary.verdict.action


def spin_on_one_processor() -> subprocess.Popen[bytes]:
    processor = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\n{SPIN}"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def watched(pid: int, num_samples: int = 7) -> dict[str, float]:
    """Figures of the processors, by a sampler from outside."""
    sampler = SystemSampler(pid, gpu=GpuReader("none in this test"))
    record = SystemRecord(start=sampler.begin())
    for _ in range(num_samples):
        time.sleep(0.2)
        record.add(sampler.sample())
    sampler.stop()
    return fold_system(record)[0]


def test_another_program_on_the_same_processor_takes_its_half_and_makes_the_run_wait() -> None:
    with spin_on_one_processor() as run, spin_on_one_processor() as other:
        try:
            figures = watched(run.pid)
        finally:
            run.kill()
            other.kill()
    # Other programs of this machine may be on the processor, too.
    assert figures["cpu_cores"] < 0.65
    assert figures["other_cpu_share"] == pytest.approx(1 - figures["cpu_cores"], abs=0.15)
    if figures["cpu_wait_share"] is not None:
        assert figures["cpu_wait_share"] == pytest.approx(1 - figures["cpu_cores"], abs=0.15)


def test_a_quota_refuses_what_is_wanted_beyond_it(limit: Limit) -> None:
    cgroup = limit("cpu", ("cpu.cfs_quota_us", "10000"), ("cpu.max", "10000 100000"))
    with spin_on_one_processor() as run:
        try:
            (cgroup / "cgroup.procs").write_text(str(run.pid))
            figures = watched(run.pid)
        finally:
            run.kill()
    assert figures["cpu_cores"] == pytest.approx(0.1, abs=0.05)
    assert figures["cpu_throttled_share"] > 0.3
