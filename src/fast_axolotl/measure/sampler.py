"""Samples a process tree and the machine about once a second, into ``system.jsonl``.

Cost. A sample takes about 0.4 ms, and 0.08 ms more for every process of the tree. ΣPSS is dearer,
since the kernel walks page tables for it: 0.4 ms for 2 GB in huge pages, 19 ms for 2 GB in small
ones. So it is taken only when the last one lies 200 times its own duration back, or ten seconds,
and once more whenever ΣRSS has outgrown every earlier one by a quarter: a growing tree does that
some twenty times in its life. Samples altogether are kept under 0.5 % of one core.

Size. Every sample is given to ``on_sample``. The file takes all of them for ten minutes, then one
in two seconds up to an hour, then one in five: a day comes to 7 MB, with eight GPUs to 22 MB.

The sampler stands outside of what it measures: a supervisor passes its child's pid as the root and
is not counted. Inside a training process it is one thread that sleeps; the process then counts it.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fast_axolotl import system
from fast_axolotl.measure import procfs
from fast_axolotl.measure.disk import DiskCapacity, probe_capacity
from fast_axolotl.measure.gpu import GpuReader, open_gpus
from fast_axolotl.measure.portable_tree import PortableTree, read_portable_swap_bytes
from fast_axolotl.measure.process_tree import ProcessTree, TreeSample
from fast_axolotl.measure.system_reasons import explain_missing
from fast_axolotl.record import End, LineWriter, SystemSample, SystemStart
from fast_axolotl.system import CGROUP, PROC, find_memory_cgroup

__all__ = ["SystemSampler"]

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

_NO_DATA = "where the data lies was not told: give --data-path, or data_paths to measure()"


class SystemSampler:
    """Watches one process tree from ``start`` to ``stop``, or for as long as ``run`` is let."""

    def __init__(
        self,
        root_pid: int,
        writer: LineWriter | None = None,
        *,
        data_path: str | Path | None = None,
        probe: bool = True,
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        proc: Path = PROC,
        cgroup_root: Path = CGROUP,
        gpu: GpuReader | None = None,
        on_sample: Callable[[SystemSample], None] | None = None,
        exclude_pids: Collection[int] = (),
        source: str = "",
    ) -> None:
        self.root_pid = root_pid
        self.source = source
        """Who watches, as ``SystemStart`` has it."""
        self.failure = ""
        """What ended the sampling before its time; empty while all is well."""
        self.overhead_seconds = 0.0
        """Time spent in sampling."""
        self.num_samples = 0
        self.begun: SystemStart | None = None
        """The record's first line, once there is one."""
        self._writer = writer
        self._data_path = None if data_path is None else str(data_path)
        self._is_probing = probe
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._proc = proc
        self._gpu = gpu
        self._on_sample = on_sample
        self._has_procfs = procfs.has_procfs(proc)
        self._tree: ProcessTree | PortableTree = (
            ProcessTree(root_pid, proc=proc, exclude_pids=exclude_pids)
            if self._has_procfs
            else PortableTree(root_pid, exclude_pids=exclude_pids)
        )
        self._cgroup = find_memory_cgroup(root_pid, proc=proc, root=cgroup_root)
        self._start = clock()
        self._time = time.time()
        self._pss_due = 0.0
        self._pss_rss_bytes = 0
        self._write_due = 0.0
        self._last_cost = 0.0
        self._last_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._owner_pid = os.getpid()

    @property
    def is_alive(self) -> bool:
        """Whether the root was alive at the last sample."""
        return self._tree.is_alive

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the last sample, the root first."""
        return self._tree.pids

    def start(self) -> None:
        """Probe the data's device, write the first lines, and go on in a daemon thread."""
        self.begin()
        self._thread = threading.Thread(
            target=self._run_guarded, name="system-sampler", daemon=True
        )
        self._thread.start()

    def begin(self) -> SystemStart:
        """The first sample and the record's first line; the probe takes up to two seconds."""
        if self.begun is not None:
            return self.begun
        if self._gpu is None:
            self._gpu = open_gpus()
        sample = self._measure()
        capacity = self._probe()
        self.begun = self._describe(sample, capacity)
        self._write(self.begun)
        self._hand_on(sample)
        return self.begun

    def sample(self) -> SystemSample:
        """The tree and the machine of now, written and handed on."""
        with self._lock:
            self.begin()
            sample = self._measure()
            self._hand_on(sample)
            return sample

    def run(self, seconds: float | None = None) -> None:
        """Sample until the root ends, ``stop`` is called, or the time is up."""
        self.begin()
        end = None if seconds is None else self._clock() + seconds
        due = self._clock() + self._pause()
        while self._tree.is_alive:
            until = due if end is None else min(due, end)
            if self._stopping.wait(max(0.0, until - self._clock())):
                return
            self.sample()
            if end is not None and self._clock() >= end:
                return
            due = max(due + self._pause(), self._clock())

    def stop(
        self, reason: Literal["finished", "exception", "interrupted"] = "finished", error: str = ""
    ) -> None:
        """Take a last sample, close the record.

        Called before the root is waited for (``os.waitid`` with ``WNOWAIT``), the last sample holds
        all that the tree has read: a zombie still shows its counters. Else what the root did after
        the sample before is lost.
        """
        # A forked child holds a copy of this object; the record is its parent's.
        if os.getpid() != self._owner_pid:
            return
        if self._is_closed:
            return
        self._is_closed = True
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=_PATIENCE_SECONDS)
        self._take_last_sample()
        self._write_end(reason, error)

    def _take_last_sample(self) -> None:
        """Unless there was one just now, or there is nobody left to look at."""
        if self._thread is not None and self._thread.is_alive():
            self.failure = "a file of procfs did not answer"
            return
        stat = procfs.read_stat(self.root_pid, proc=self._proc)
        if stat is None or self.begun is None:
            return
        is_recent = self._clock() - self._last_at < _SLACK * self._interval_seconds
        if not stat.is_alive or not is_recent:
            self._write_due = 0.0
            self.sample()

    def _write_end(
        self, reason: Literal["finished", "exception", "interrupted"], error: str
    ) -> None:
        self._write(
            End(
                t=round(self._clock() - self._start, 3),
                reason=reason,
                error=error or self.failure,
                overhead_seconds=round(self.overhead_seconds, 6),
                overhead_fetches=self.num_samples,
            )
        )
        if self._writer is not None:
            self._writer.close()
        if self._gpu is not None:
            self._gpu.close()

    def _run_guarded(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - the run that is watched must go on
            self.failure = f"sampling ended: {type(error).__name__}: {error}"

    def _pause(self) -> float:
        return max(self._interval_seconds, self._last_cost / _SAMPLE_SHARE)

    def _measure(self) -> SystemSample:
        begin = self._last_at = self._clock()
        sample = self._assemble(round(begin - self._start, 3), self._tree.sample())
        self._last_cost = self._clock() - begin
        if self._is_pss_due(sample):
            sample = replace(sample, pss_bytes=self._read_pss_bytes())
            self._pss_rss_bytes = max(self._pss_rss_bytes, sample.rss_bytes or 0)
        self.overhead_seconds += self._clock() - begin
        self.num_samples += 1
        return sample

    def _is_pss_due(self, sample: SystemSample) -> bool:
        if sample.t < self._write_due or not sample.processes:
            return False
        has_grown = (sample.rss_bytes or 0) > _PSS_GROWTH * self._pss_rss_bytes
        return has_grown or sample.t >= self._pss_due

    def _read_pss_bytes(self) -> int | None:
        begin = self._clock()
        pss_bytes = self._tree.read_pss_bytes()
        end = self._clock()
        pause = min((end - begin) / _PSS_SHARE, _PSS_LONGEST_SECONDS)
        self._pss_due = end - self._start + pause
        return pss_bytes

    def _assemble(self, t: float, tree: TreeSample) -> SystemSample:
        swap = self._read_swap_bytes()
        memory = tree.memory
        return SystemSample(
            t=t,
            processes=tree.processes,
            rss_bytes=None if memory is None else memory.rss_bytes,
            anon_bytes=None if memory is None else memory.anon_bytes,
            file_bytes=None if memory is None else memory.file_bytes,
            shared_bytes=None if memory is None else memory.shared_bytes,
            hwm_bytes=None if memory is None else memory.hwm_bytes,
            swap_bytes=None if memory is None else memory.swap_bytes,
            read_bytes=tree.read_bytes,
            read_chars=tree.read_chars,
            cpu_seconds=round(tree.cpu_seconds, 2),
            swap_in_bytes=None if swap is None else swap[0],
            swap_out_bytes=None if swap is None else swap[1],
            cgroup_bytes=None if self._cgroup is None else self._cgroup.used_bytes(),
            psi_memory_full_seconds=self._read_pressure("memory"),
            psi_io_full_seconds=self._read_pressure("io"),
            gpus=() if self._gpu is None else self._gpu.read(self._tree.pids),
        )

    def _read_swap_bytes(self) -> tuple[int, int] | None:
        if self._has_procfs:
            return procfs.read_swap_bytes(proc=self._proc)
        return read_portable_swap_bytes()

    def _read_pressure(self, name: Literal["memory", "io"]) -> float | None:
        """Of the processes' own cgroup, where there is one, else of the system."""
        own = None if self._cgroup is None else self._cgroup.pressure_file(name)
        return procfs.read_pressure_seconds(own or self._proc / "pressure" / name)

    def _probe(self) -> DiskCapacity:
        if self._data_path is None:
            return DiskCapacity(bytes_per_second=None, reason=_NO_DATA)
        if not self._is_probing:
            return DiskCapacity(bytes_per_second=None, reason="the probe was turned off")
        return probe_capacity(self._data_path, proc=self._proc)

    def _describe(self, sample: SystemSample, capacity: DiskCapacity) -> SystemStart:
        limit_bytes = None if self._cgroup is None else self._cgroup.limit_bytes()
        gpu_reason = "" if self._gpu is None else self._gpu.reason
        return SystemStart(
            time=self._time,
            host=platform.node(),
            root_pid=self.root_pid,
            command=procfs.read_command(self.root_pid, proc=self._proc),
            memory_bytes=system.memory_bytes(self._proc),
            limit_bytes=limit_bytes,
            data_path=self._data_path,
            disk_bytes_per_second=capacity.bytes_per_second,
            gpu_names=() if self._gpu is None else self._gpu.names,
            source=self.source,
            reasons=explain_missing(
                sample,
                has_procfs=self._has_procfs,
                limit_bytes=limit_bytes,
                disk_reason=capacity.reason,
                gpu_reason=gpu_reason,
            ),
        )

    def _hand_on(self, sample: SystemSample) -> None:
        if not self._tree.pids:
            return
        if sample.t >= self._write_due:
            self._write(sample)
            self._write_due = sample.t + _SLACK * _seconds_between_lines(sample.t)
        if self._on_sample is not None:
            self._on_sample(sample)

    def _write(self, line: object) -> None:
        if self._writer is not None:
            self._writer.write(line)


def _seconds_between_lines(age_seconds: float) -> float:
    return next(gap for most, gap in _WRITE_EVERY if age_seconds < most)
