"""Sample a process tree and the machine about once per second.

Cost. A sample takes about 0.5 ms, and 0.08 ms more for every process of the tree. ΣPSS is dearer,
since the kernel walks page tables for it: 0.4 ms for 2 GB in huge pages, 19 ms for 2 GB in small
ones. So it is taken only when the last one lies 200 times its own duration back, or ten seconds,
and once more whenever ΣRSS has outgrown every earlier one by a quarter: a growing tree does that
some twenty times in its life. Samples altogether are kept under 0.5 % of one core.

Size. Every sample is given to ``on_sample``. The file takes all of them for ten minutes, then one
in two seconds up to an hour, then one in five: a day comes to 11 MB, with eight GPUs to 30 MB.

Only Linux has a procfs to read. Elsewhere the record holds no sample, and its first line says why.

The sampler stands outside of what it measures: a supervisor passes its child's pid as the root and
is not counted. Inside a training process it is one thread that sleeps; the process then counts it.
One sampler is enough for a node: the processes of all ranks that record into ``rank_folder`` there
are part of the tree, whoever started them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fast_axolotl import system
from fast_axolotl.errors import UsageError
from fast_axolotl.measure import processes
from fast_axolotl.measure.disk import find_numbers, probe_capacity, read_requests
from fast_axolotl.measure.gpu import GpuReader, open_gpus
from fast_axolotl.measure.writers import find_new_ranks
from fast_axolotl.record import End, LineWriter, SystemSample, SystemStart
from fast_axolotl.record.schema import Reason

_PSS_SHARE = 0.005
"""Of one core, at most this for ΣPSS …"""
_PSS_LONGEST_SECONDS = 10.0
"""… but one every so often, whatever it costs: one of before the training says nothing of it."""
_PSS_GROWTH = 1.25
"""A ΣRSS this many times the highest at any ΣPSS asks for a ΣPSS at once."""
_SAMPLE_SHARE = 0.005
"""Of one core, at most this for all sampling."""
_WRITE_EVERY = ((600.0, 0.0), (3600.0, 2.0), (float("inf"), 5.0))
"""Up to this age of the record, at least so many seconds between two lines."""
_SLACK = 0.9
"""A sample that comes a little early is on time."""

_PATIENCE_SECONDS = 5.0
"""Reading of a process that hangs inside the kernel can hang, too."""


class SystemSampler:
    """Watches one process tree from ``start`` to ``stop``."""

    def __init__(
        self,
        root_pid: int,
        writer: LineWriter | None = None,
        *,
        rank_folder: str | Path | None = None,
        data_path: str | Path | None = None,
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        proc: Path = system.PROC,
        cgroup_root: Path = system.CGROUP,
        gpu: GpuReader | None = None,
        on_sample: Callable[[SystemSample], None] | None = None,
        exclude_pids: Collection[int] = (),
        source: str = "",
    ) -> None:
        self.root_pid = root_pid
        self.source = source
        """Who watches, as ``SystemStart`` has it."""
        self.command: tuple[str, ...] = ()
        """Where it is known; else that of the process."""
        self.failure = ""
        """What ended the sampling before its time; empty while all is well."""
        self.begun: SystemStart | None = None
        """The record's first line, once there is one."""
        self._writer = writer
        self._data_path = None if data_path is None else str(data_path)
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._proc = proc
        self._gpu = gpu or open_gpus()
        self._on_sample = on_sample
        self._tree = processes.ProcessTree(root_pid, proc=proc, exclude_pids=exclude_pids)
        self._rank_folder = None if rank_folder is None else Path(rank_folder).absolute()
        self._known_ranks: set[tuple[str, int]] = set()
        self._cgroup = system.find_memory_cgroup(root_pid, proc=proc, root=cgroup_root)
        self._quota = system.find_cpu_quota(root_pid, proc=proc, root=cgroup_root)
        self._processors = processes.read_processors(root_pid)
        self._device: tuple[int, int] | None = None
        self._start = clock()
        self._time = time.time()
        self._pss_due = self._write_due = 0.0
        self._pss_rss_bytes = 0
        self._last_cost = self._last_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether the root was alive at the last sample."""
        return self._tree.is_alive

    def start(self) -> None:
        """Probe the data's device, write the first lines, and go on in a daemon thread."""
        self.begin()
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Sample until the root ends or ``stop`` is called."""
        due = self._clock()
        try:
            while self._tree.is_alive:
                pause = max(self._interval_seconds, self._last_cost / _SAMPLE_SHARE)
                due = max(due + pause, self._clock())
                if self._stopping.wait(max(0.0, due - self._clock())):
                    return
                self.sample()
        except Exception as error:  # noqa: BLE001 - the run that is watched must go on
            self.failure = f"sampling stopped: {type(error).__name__}: {error}"

    def begin(self) -> SystemStart:
        """The record's first line, after a probe of up to two seconds, and the first sample."""
        if self.begun is not None:
            return self.begun
        limit_bytes = None if self._cgroup is None else self._cgroup.limit_bytes()
        reasons: dict[str, str] = {}
        if not (self._proc / "stat").exists():
            reasons["processes"] = "this is only available on Linux: there is no /proc here"
        if limit_bytes is None:
            reasons["limit_bytes"] = "no cgroup above the process sets a memory limit"
        capacity, why = None, "no path of the data was given: use --data-path"
        if (path := self._data_path) is not None:
            capacity, why = probe_capacity(path, proc=self._proc)
            self._device = find_numbers(path, proc=self._proc)
        reasons |= {"disk_bytes_per_second": why, "gpus": self._gpu.reason}
        usage = processes.read_usage(self._processors, proc=self._proc)
        self.begun = SystemStart(
            time=self._time,
            host=system.node_name(),
            root_pid=self.root_pid,
            pid_namespace=system.pid_namespace(self._proc),
            command=self.command or processes.read_command(self.root_pid, proc=self._proc),
            memory_bytes=system.memory_bytes(self._proc),
            limit_bytes=limit_bytes,
            data_path=self._data_path,
            disk_bytes_per_second=capacity,
            gpu_names=self._gpu.names,
            processors=None if usage is None else usage[2],
            source=self.source,
            reasons={name: why for name, why in reasons.items() if why},
        )
        self._write(self.begun)
        # Only now: inside the run, what the probe has read is not the run's.
        self._take()
        return self.begun

    def sample(self) -> SystemSample:
        """The tree and the machine of now, written and handed on."""
        self.begin()
        return self._take()

    def stop(self, reason: Reason = "finished", error: str = "") -> None:
        """Take a last sample, close the record.

        Called before the root is waited for (``os.waitid`` with ``WNOWAIT``), the last sample holds
        all that the tree has read: a zombie still shows its counters. Else what the root did after
        the sample before is lost.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=_PATIENCE_SECONDS)
        if self._thread is not None and self._thread.is_alive():
            self.failure = "a file in /proc could not be read"
        elif self.begun is not None:
            # A last sample, unless there was one just now, or there is nobody left to look at.
            stat = processes.read_stat(self.root_pid, proc=self._proc)
            is_recent = self._clock() - self._last_at < _SLACK * self._interval_seconds
            if stat is not None and not (stat.is_alive and is_recent):
                self._write_due = 0.0
                self.sample()
        t = round(self._clock() - self._start, 3)
        self._write(End(t=t, reason=reason, error=error or self.failure))
        if self._writer is not None:
            self._writer.close()
        self._gpu.close()

    def _take(self) -> SystemSample:
        begin = self._last_at = self._clock()
        # Not by the clock: on a busy machine a sample takes long and costs as little as ever.
        cpu_begin = time.thread_time()
        if self._rank_folder is not None:
            for pid in find_new_ranks(self._rank_folder, self._known_ranks):
                self._tree.add_root(pid)
        tree = self._tree.sample()
        usage = processes.read_usage(self._processors, proc=self._proc)
        requests = read_requests(self._device, proc=self._proc) if self._device else None
        sample = replace(
            tree,
            t=round(begin - self._start, 3),
            **processes.read_vmstat(proc=self._proc),
            psi_memory_full_seconds=self._read_pressure("memory"),
            psi_io_full_seconds=self._read_pressure("io"),
            machine_cpu_seconds=None if usage is None else round(usage[0], 2),
            steal_seconds=None if usage is None else round(usage[1], 2),
            throttled_seconds=None if self._quota is None else self._quota.throttled_seconds(),
            oom_kills=None if self._cgroup is None else self._cgroup.oom_kills(),
            device_reads=None if requests is None else requests[0],
            device_read_bytes=None if requests is None else requests[1],
            gpus=self._gpu.read(self._tree.pids),
        )
        self._last_cost = time.thread_time() - cpu_begin
        has_grown = (sample.rss_bytes or 0) > _PSS_GROWTH * self._pss_rss_bytes
        is_pss_due = has_grown or sample.t >= self._pss_due
        if sample.processes and sample.t >= self._write_due and is_pss_due:
            pss_begin = self._clock()
            sample = replace(sample, **(self._tree.read_pss() or {}))
            pss_end = self._clock()
            pause = min((pss_end - pss_begin) / _PSS_SHARE, _PSS_LONGEST_SECONDS)
            self._pss_due = pss_end - self._start + pause
            self._pss_rss_bytes = max(self._pss_rss_bytes, sample.rss_bytes or 0)
        if self._tree.pids and sample.t >= self._write_due:
            self._write(sample)
            gap_seconds = next(gap for most, gap in _WRITE_EVERY if sample.t < most)
            self._write_due = sample.t + _SLACK * gap_seconds
        if self._tree.pids and self._on_sample is not None:
            self._on_sample(sample)
        return sample

    def _read_pressure(self, name: Literal["memory", "io"]) -> float | None:
        """Of the processes' own cgroup, where there is one, else of the machine."""
        own = None if self._cgroup is None else self._cgroup.pressure_file(name)
        return processes.read_pressure_seconds(own or self._proc / "pressure" / name)

    def _write(self, line: object) -> None:
        if self._writer is not None:
            self._writer.write(line)


def check_process(pid: int, *, proc: Path = system.PROC) -> None:
    """Refuse what cannot be sampled, and say what could be."""
    if not (proc / "stat").exists():
        raise UsageError("processes can only be watched on Linux: there is no /proc here")
    status = processes.read_lines(proc / str(pid) / "status") if pid > 0 else {}
    if not status:
        raise UsageError(f"there is no process {pid}")
    leader = int(status.get(b"Tgid", [b"%d" % pid])[0])
    if leader != pid:
        raise UsageError(f"{pid} is a thread of process {leader}: watch {leader}")
    if status.get(b"State", [b""])[0] in (b"Z", b"X"):
        raise UsageError(f"process {pid} has ended, and its parent has not reaped it")
