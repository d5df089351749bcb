"""The sampler: what it writes, how often, what it costs, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.measure import disk
from fast_axolotl.measure.disk import choose_files, find_numbers, probe_capacity, read_requests
from fast_axolotl.measure.gpu import GpuReader, open_gpus
from fast_axolotl.measure.sampler import SystemSampler
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import DeviceSample, LineWriter, SystemSample, read_run
from support.files import lay_out
from support.meter import Clock

PID = 2**22 + 7
"""No process of this machine has this number."""

NO_GPU = GpuReader(reason="there is none in this test")


def lay_out_machine(proc: Path, *, rss_kilobytes: int = 1024) -> None:
    """A machine with one process, in a folder laid out like procfs."""
    tail = "S 1 1 1 0 -1 0 0 0 0 0 100 0 0 0 20 0 1 0 5 0 0"
    pss = "Pss: 512 kB\nPss_Dirty: 1 kB\nPss_Anon: 300 kB\nPss_File: 200 kB\nPss_Shmem: 12 kB"
    of_process = {
        "stat": f"{PID} (python) {tail}",
        "status": f"VmRSS:\t{rss_kilobytes} kB\nRssAnon:\t1000 kB\n",
        "io": "rchar: 700\nread_bytes: 500\n",
        "smaps_rollup": f"x\n{pss}\n",
        "cmdline": "python\0train.py\0",
    }
    cores = "cpu0 200 0 100 600 0 50 50 100 0 0\ncpu1 0 0 300 700 0 0 0 0 0 0"
    of_machine = {
        "stat": f"cpu  1\n{cores}\nintr 5\n",
        "meminfo": "MemTotal: 1000 kB\n",
        "vmstat": "pswpin 1\npswpout 2\noom_kill 7\n",
        "pressure/memory": "full avg10=0 total=3000000\n",
    }
    lay_out(proc, of_machine | {f"{PID}/{name}": text for name, text in of_process.items()})


def make(proc: Path, clock: Callable[[], float], **named: Any) -> SystemSampler:
    return SystemSampler(PID, clock=clock, proc=proc, cgroup_root=proc / "no", gpu=NO_GPU, **named)


def watch(pid: int, folder: Path, **options: Any) -> SystemSampler:
    """A sampler of a real process that writes into this folder."""
    return SystemSampler(pid, LineWriter(folder / "system.jsonl"), **{"gpu": NO_GPU, **options})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "system.jsonl").read_text().splitlines()]


def test_a_sample_holds_the_tree_and_the_machine(tmp_path: Path) -> None:
    lay_out_machine(tmp_path)
    clock = Clock()
    sampler = make(tmp_path, clock)
    clock.now += 2.5
    page = os.sysconf("SC_PAGE_SIZE")
    assert sampler.sample() == SystemSample(
        t=2.5,
        processes=1,
        pss_bytes=512 * 1024,
        pss_anon_bytes=300 * 1024,
        pss_shared_bytes=12 * 1024,
        rss_bytes=1024 * 1024,
        anon_bytes=1000 * 1024,
        largest_anon_bytes=1000 * 1024,
        shared_bytes=0,
        hwm_bytes=0,
        swap_bytes=0,
        read_bytes=500,
        read_chars=700,
        cpu_seconds=100 / os.sysconf("SC_CLK_TCK"),
        swap_in_bytes=page,
        swap_out_bytes=2 * page,
        psi_memory_full_seconds=3.0,
        machine_cpu_seconds=700 / os.sysconf("SC_CLK_TCK"),
        steal_seconds=100 / os.sysconf("SC_CLK_TCK"),
        machine_oom_kills=7,
    )


def test_the_first_line_says_why_figures_are_missing(tmp_path: Path) -> None:
    lay_out_machine(tmp_path / "proc")
    writer = LineWriter(tmp_path / "run" / "system.jsonl")
    sampler = make(tmp_path / "proc", Clock(), writer=writer)
    start = sampler.begin()
    assert start.command == ("python", "train.py")
    assert start.memory_bytes == 1000 * 1024
    assert set(start.reasons) == {"limit_bytes", "disk_bytes_per_second", "gpus"}
    assert "--data-path" in start.reasons["disk_bytes_per_second"]
    assert start.reasons["gpus"] == NO_GPU.reason
    sampler.stop()
    kinds = [line["kind"] for line in lines_of(tmp_path / "run")]
    assert kinds == ["system_start", "system", "end"]
    # What may not be read is None.
    for name in ("io", "smaps_rollup"):
        (tmp_path / "proc" / str(PID) / name).unlink()
    sample = make(tmp_path / "proc", Clock()).sample()
    assert (sample.pss_bytes, sample.read_bytes, sample.rss_bytes) == (None, None, 1024 * 1024)
    assert sample.working_set_bytes is None


def test_memory_events_and_throttling_are_those_of_the_cgroup(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out_machine(proc)
    lay_out(proc, {f"{PID}/cgroup": "0::/job\n"})
    files = {
        "cgroup.controllers": "cpu memory",
        "cpu.max": "max 100000",
        "job/cpu.max": "150000 100000",
        "job/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n",
        "job/io.pressure": "some avg10=1 total=9\nfull avg10=0 total=4000000\n",
        "job/memory.events": "low 0\nhigh 0\nmax 40\noom 2\noom_kill 1\n",
    }
    lay_out(root, files)
    sampler = SystemSampler(PID, clock=Clock(), proc=proc, cgroup_root=root, gpu=NO_GPU)
    sample = sampler.sample()
    assert (sample.throttled_seconds, sample.psi_io_full_seconds) == (2.5, 4.0)
    assert sample.oom_kills == 1
    assert sampler.begin().processors == 2


def test_without_procfs_there_is_no_sample_and_a_reason(tmp_path: Path) -> None:
    sampler = watch(os.getpid(), tmp_path / "run", proc=tmp_path, cgroup_root=tmp_path)
    sampler.start()
    sampler.stop()
    record = read_run(tmp_path / "run").system
    assert (record.samples, sampler.is_alive) == ([], False)
    assert record.start.memory_bytes
    reason = "this is only available on Linux: there is no /proc here"
    assert record.start.reasons["processes"] == reason
    assert summarise(read_run(tmp_path / "run")).reasons["rss_bytes"] == reason


def make_slow(proc: Path, pss_seconds: float) -> tuple[SystemSampler, Clock]:
    """A sampler with a clock of its own, whose ΣPSS takes so long."""
    lay_out_machine(proc)
    clock = Clock()
    sampler = make(proc, clock)
    sampler._tree.read_pss = lambda: clock.sleep(pss_seconds) or {"pss_bytes": 1}
    sampler.begin()
    return sampler, clock


@pytest.mark.parametrize(("seconds", "pause"), [(0.02, 4), (2.0, 10)])
def test_pss_is_taken_so_seldom_that_it_costs_little_but_not_too_seldom(
    tmp_path: Path, seconds: float, pause: float
) -> None:
    sampler, clock = make_slow(tmp_path, seconds)
    taken = 0
    for _ in range(100):
        clock.sleep(1.0)
        taken += sampler.sample().pss_bytes is not None
    assert taken == pytest.approx(100 / pause, abs=3)


def test_pss_is_taken_anew_when_the_tree_has_grown_by_a_quarter(tmp_path: Path) -> None:
    sampler, clock = make_slow(tmp_path, 10.0)
    for kilobytes, is_taken in (
        *((1100, False), (1300, True), (1200, False), (1300, False)),
        *((1600, False), (2000, True), (1024, False), (2000, False)),
    ):
        lay_out_machine(tmp_path, rss_kilobytes=kilobytes)
        clock.sleep(1.0)
        assert (sampler.sample().pss_bytes is not None) is is_taken


def test_a_day_of_samples_stays_small(tmp_path: Path) -> None:
    lay_out_machine(tmp_path / "proc")
    clock = Clock()
    writer = LineWriter(tmp_path / "run" / "system.jsonl")
    seen: list[SystemSample] = []
    sampler = make(tmp_path / "proc", clock, writer=writer, on_sample=seen.append)
    sampler.begin()
    seconds = [*range(1, 550), *range(1000, 1200), *range(86000, 86400)]
    for second in seconds:
        clock.now = 1000.0 + second
        sampler.sample()
    assert len(seen) == len(seconds) + 1
    sampler.stop()
    written = [line["t"] for line in lines_of(tmp_path / "run") if line["kind"] == "system"]
    for least, most, gap in ((0, 550, 1), (1000, 1200, 2), (86000, 86400, 5)):
        inside = [t for t in written if least <= t < most]
        assert {round(after - before) for before, after in pairwise(inside)} == {gap}
    per_day = 600 + 3000 / 2 + (86400 - 3600) / 5
    per_line = writer.num_bytes / len(written)
    assert per_day * per_line < 10_000_000


def test_a_thread_samples_a_real_process_until_it_ends(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], nvml: Nvml
) -> None:
    enough = threading.Event()
    seen: list[SystemSample] = []

    def notice(sample: SystemSample) -> None:
        seen.append(sample)
        if len(seen) >= 3:
            enough.set()

    gpu = GpuReader(nvml)
    sampler = watch(sleeper.pid, tmp_path, interval_seconds=0.02, gpu=gpu, on_sample=notice)
    sampler.start()
    assert enough.wait(20)
    sleeper.stdin.close()
    sleeper.wait()
    sampler._thread.join(20)
    assert not sampler._thread.is_alive()
    sampler.stop()
    sampler.stop()
    record = read_run(tmp_path).system
    assert record.start.root_pid == sleeper.pid
    assert record.start.gpu_names == ("NVIDIA H200",) * 3
    assert record.end.reason == "finished"
    assert all(sample.processes == 1 for sample in record.samples)
    assert all(len(sample.gpus) == 3 for sample in record.samples)
    assert nvml.is_shut


def test_the_last_sample_before_the_root_is_waited_for_holds_all_it_read(tmp_path: Path) -> None:
    code = "import sys; sys.stdin.read(); open('/dev/zero','rb').read(9_000_000)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE) as process:
        sampler = watch(process.pid, tmp_path, interval_seconds=60)
        sampler.start()
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        sampler.stop()
    record = read_run(tmp_path).system
    last = record.samples[-1]
    assert (last.processes, last.rss_bytes) == (0, None)
    assert 9_000_000 <= (last.read_chars or 0) < 11_000_000


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_inside_the_run_the_reads_of_the_probe_are_not_the_runs(tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(os.urandom(9 << 20))
    seen: list[SystemSample] = []
    sampler = watch(os.getpid(), tmp_path, data_path=data, on_sample=seen.append)
    sampler.begin()
    assert sampler.begun.data_path == str(data)
    assert sampler.sample().read_bytes - seen[0].read_bytes < 4 << 20
    assert (sampler.sample().device_reads is None) is (sampler._device is None)
    sampler.stop()
    start = lines_of(tmp_path)[0]
    assert ("disk_bytes_per_second" in start) is not ("disk_bytes_per_second" in start["reasons"])


def test_a_fault_in_the_thread_is_noted_and_goes_no_further(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    seen: list[SystemSample] = []

    def fail(sample: SystemSample) -> None:
        seen.append(sample)
        if len(seen) > 1:
            raise RuntimeError("no such luck")

    sampler = watch(sleeper.pid, tmp_path, interval_seconds=0.01, on_sample=fail)
    sampler.start()
    sampler._thread.join(20)
    sampler._on_sample = None
    sampler.stop("finished")
    record = read_run(tmp_path).system
    assert record.end.error == "sampling stopped: RuntimeError: no such luck"


class Nvml(ModuleType):
    """Three devices, the last of which tells nothing but its name."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """As pynvml's: what every call may raise."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.count = 3
        self.running: dict[int, list[int]] = {}
        self.num_searches = 0
        self.is_shut = False
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: self.count
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
        values = {"PowerUsage": 650_500, "ClockInfo": 1980}
        memory = SimpleNamespace(used=5_000_000_000, total=9_000_000_000)
        values |= {"MemoryInfo": memory, "UtilizationRates": SimpleNamespace(gpu=87)}
        for name, value in values.items():
            setattr(self, f"nvmlDeviceGet{name}", partial(self._tell, value))

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self.num_searches += 1
        pids = self.running.get(handle, [])
        return self._tell([SimpleNamespace(pid=pid) for pid in pids], handle)

    def _tell(self, value: Any, handle: int, kind: int = NVML_CLOCK_SM) -> Any:
        assert kind == self.NVML_CLOCK_SM
        if handle == 2:
            raise Nvml.NVMLError("Not Supported")
        return value


MEMORY = {"memory_bytes": 5_000_000_000, "total_bytes": 9_000_000_000}
FULL = {"utilization": 0.87, "power_watts": 650.5, "clock_mhz": 1980.0, **MEMORY}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_every_device_is_read_and_a_refused_figure_is_none(nvml: Nvml) -> None:
    reader = open_gpus()
    assert (reader.names, reader.reason) == (("NVIDIA H200",) * 3, "")
    first, second = (DeviceSample(index=index, **FULL) for index in range(2))
    assert reader.read() == (first, second, DeviceSample(index=2))
    reader.close()
    assert nvml.is_shut


def test_once_the_tree_is_seen_on_a_device_only_such_devices_count(nvml: Nvml) -> None:
    reader = GpuReader(nvml)
    assert len(reader.read({10, 11})) == 3
    nvml.running = {1: [11], 0: [99]}
    for _ in range(9):
        reader.read({10, 11})
    assert nvml.num_searches == 3  # not at every read
    for _ in range(20):
        assert [device.index for device in reader.read({10, 11})] == [1]
        nvml.running = {}


def test_without_package_driver_or_device_the_reason_says_which(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise Nvml.NVMLError("NVML Shared Library Not Found")

    nvml.count = 0
    assert open_gpus().reason == "NVML finds no GPU"
    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert open_gpus().reason == "NVML reports: NVML Shared Library Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = open_gpus()
    assert reader.reason == "GPU figures need NVML: pip install nvidia-ml-py"
    assert (reader.names, reader.read()) == ((), ())
    reader.close()


MEBIBYTE = 1 << 20


def write(path: Path, num_bytes: int) -> Path:
    path.write_bytes(os.urandom(num_bytes))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data")
    write(found / "large.bin", 24 * MEBIBYTE + 777)
    write(found / "small.bin", MEBIBYTE)
    with (found / "large.bin").open("rb") as file:
        os.fsync(file.fileno())
    return found


def test_the_probe_reads_in_order_no_more_and_no_longer_than_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def note(descriptor: int, buffers: list[object], offset: int) -> int:
        assert len(buffers[0]) == MEBIBYTE  # type: ignore[arg-type]
        reads.append(offset)
        return MEBIBYTE

    monkeypatch.setattr(disk.os, "preadv", note)
    ticks = count()
    probe_capacity(folder, max_bytes=20 * MEBIBYTE, clock=lambda: next(ticks) * 1e-3)
    # Several threads read, so one may be noted after the next.
    assert sorted(reads) == [MEBIBYTE * number for number in range(20)]
    reads.clear()
    probe_capacity(folder, max_seconds=0.002, clock=lambda: next(ticks) * 1e-3)
    assert 0 < len(reads) <= 18  # threads that have started read once more


def test_requests_are_those_of_the_device_or_partition_that_holds_the_path(
    tmp_path: Path, shared_memory: Path
) -> None:
    device = tmp_path.stat().st_dev
    major, minor = os.major(device), os.minor(device)
    (tmp_path / "diskstats").write_text(
        f" {major} {minor}1 vda1 9 9 9 9 0 0 0 0 0 0 0\n"
        f" {major} {minor} vda 5 2 80 7 0 0 0 0 0 0 0\n"
        "short line\n"
    )
    assert find_numbers(tmp_path, proc=tmp_path) == (major, minor)
    assert read_requests((major, minor), proc=tmp_path) == (5, 80 * 512)
    assert find_numbers(shared_memory) is None
    assert find_numbers("/nowhere/at/all", proc=tmp_path) is None


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"fast-axolotl-test-{os.getpid()}"
    try:
        yield write(path, 16 * MEBIBYTE)
    finally:
        path.unlink(missing_ok=True)


def test_memory_is_no_device_whether_it_refuses_the_probe_or_not(shared_memory: Path) -> None:
    found, reason = probe_capacity(shared_memory)
    assert found is None
    assert "refused" in reason or "do not count as disk reads" in reason


def test_a_refusal_names_the_path_and_the_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, flags: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk.os, "open", refuse)
    where = folder / "large.bin"
    found, reason = probe_capacity(where, proc=folder / "none")
    assert found is None
    assert reason == f"the system refused to read {where} with O_DIRECT: Invalid argument"


def test_a_device_that_does_not_answer_is_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(disk.os, "preadv", lambda *_: threading.Event().wait(1.0) or 0)
    found, reason = probe_capacity(folder / "large.bin", max_seconds=0.05)
    assert found is None
    assert "no read" in reason


def test_the_largest_files_of_a_folder_are_taken_first(folder: Path) -> None:
    files, reason = choose_files(folder, 256 * MEBIBYTE)
    assert ([file.name for file in files], reason) == (["large.bin", "small.bin"], "")


@pytest.mark.parametrize("num_bytes", [1000, 0])
def test_a_small_dataset_or_a_file_full_of_holes_is_too_little(
    tmp_path: Path, num_bytes: int
) -> None:
    with write(tmp_path / "data", num_bytes).open("r+b") as file:
        file.truncate(num_bytes or 64 * MEBIBYTE)
    files, reason = choose_files(tmp_path, 256 * MEBIBYTE)
    assert files == []
    assert "too little to measure" in reason
    for path, words in (("s3://bucket/data", "not on a disk"), ("/nowhere", "there is no /nowher")):
        assert words in choose_files(path, MEBIBYTE)[1]
