"""The watcher's samples folded into figures: memory, pressure, disk, swap, GPU.

Only samples of the steady phase count, where a rank recorded. Where none lies in it, or it was not
reached, there is no memory of the steady phase; rates take two samples, else they are those of the
whole run. So are highest values, if one sample is of the training: those before say nothing of it.
Counters are compared from the first to the last sample; one that runs backwards (a process went
missing) counts as nothing. Swap and pressure are the machine's, not the run's: another program's
count, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from fast_axolotl.record import SystemRecord, SystemSample, SystemStart
from fast_axolotl.record.arithmetic import finite, middle, ratio, total
from fast_axolotl.record.catalogue import FIGURES

__all__ = ["Watched", "fold_system"]

LEAST_SWAP_SHARE = 0.5
"""Share of the sampled intervals with swap-in for it to be sustained. Ours: most of the time."""

LEAST_SWAP_RUN = 3
"""Intervals in a row with swap-in for it to be sustained. Ours: one burst is no state."""

CLOCKS_DIFFER_SECONDS = 10.0
"""A training that begins so long after the last sample was timed by another clock. Ours: samples
are at most five seconds apart."""


_UNKNOWN = {
    "stall": "who waits for whom is decided inside the process",
    "throughput": "rows, tokens and steps are counted inside the process",
    "mfu": "the model's shape is known inside the process",
}
"""What cannot be known from outside, and why."""

_MOST_SAMPLES = 4096


_SOURCES = {
    "working_set_bytes": "pss_bytes",
    "working_set_peak_bytes": "pss_bytes",
    "rss_bytes": "rss_bytes",
    "anon_bytes": "anon_bytes",
    "file_bytes": "file_bytes",
    "shared_bytes": "shared_bytes",
    "hwm_bytes": "hwm_bytes",
    "spike_ratio": "hwm_bytes",
    "limit_bytes": "limit_bytes",
    "limit_share": "pss_bytes",
    "psi_memory_full": "psi_memory_full_seconds",
    "psi_io_full": "psi_io_full_seconds",
    "read_bytes_per_second": "read_bytes",
    "read_chars_per_second": "read_chars",
    "disk_bytes_per_second": "disk_bytes_per_second",
    "disk_share": "disk_bytes_per_second",
    "swap_in_bytes_per_second": "swap_in_bytes",
    "swap_out_bytes_per_second": "swap_out_bytes",
    "is_swap_sustained": "swap_in_bytes",
    "gpu_utilization": "gpus",
    "gpu_memory_bytes": "gpus",
    "gpu_power_watts": "gpus",
    "gpu_clock_mhz": "gpus",
}
"""Figure → the line's field that it is made of, under which the watcher gives its reasons."""

_UNWATCHED = FIGURES["working_set_bytes"].missing

_LEVELS = ("working_set_bytes", "rss_bytes", "anon_bytes", "file_bytes", "shared_bytes")
"""Of the steady phase alone."""


def fold_system(
    system: SystemRecord | None,
    begin: float | None = None,
    end: float | None = None,
    *,
    trained_from: float | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of the process tree in the steady phase, from ``begin`` to ``end``, if it has both:
    by their names in ``RunSummary``, and the reasons of those that are ``None``.

    ``trained_from`` is when the ranks began to train; ``None``: no rank recorded, and all samples
    count. Moments are given in seconds since 1970.
    """
    if system is None:
        return dict.fromkeys(_SOURCES), dict.fromkeys(_SOURCES, _UNWATCHED)
    zero = system.start.time
    samples: Sequence[SystemSample] = system.samples
    if begin is None or end is None:
        samples = samples if trained_from is None else []
    elif end >= zero and not _is_of_another_clock(system, begin):
        samples = [sample for sample in samples if begin <= zero + sample.t <= end]
    several = samples if len(samples) > 1 else system.samples
    read, capacity = _rate(several, "read_bytes"), finite(system.start.disk_bytes_per_second)
    devices = [gpu for sample in several for gpu in sample.gpus]
    values = {
        **_memory(system, samples, trained_from),
        "psi_memory_full": _rate(several, "psi_memory_full_seconds"),
        "psi_io_full": _rate(several, "psi_io_full_seconds"),
        "read_bytes_per_second": read,
        "read_chars_per_second": _rate(several, "read_chars"),
        "disk_bytes_per_second": capacity,
        "disk_share": ratio(read, capacity),
        "swap_in_bytes_per_second": _rate(several, "swap_in_bytes"),
        "swap_out_bytes_per_second": _rate(several, "swap_out_bytes"),
        "is_swap_sustained": _is_sustained(several),
        # Means over devices and samples; of memory, the highest of one device.
        "gpu_utilization": _mean(gpu.utilization for gpu in devices),
        "gpu_memory_bytes": _whole(_highest(gpu.memory_bytes for gpu in devices)),
        "gpu_power_watts": _mean(gpu.power_watts for gpu in devices),
        "gpu_clock_mhz": _mean(gpu.clock_mhz for gpu in devices),
    }
    reasons = {
        name: _explain(name, system, several, is_steady=begin is not None)
        for name in values
        if values[name] is None
    }
    return values, reasons


class Watched:
    """Samples of a process tree as they come, and the figures of all of them.

    Memory is bounded: past 4,096 samples every other one is let go, the first and last excepted.
    """

    def __init__(self) -> None:
        self.samples: list[SystemSample] = []
        self.most_processes = 0
        self.pss_bytes: int | None = None
        """The latest that was measured."""

    def add(self, sample: SystemSample) -> None:
        """Take one sample in."""
        if len(self.samples) >= _MOST_SAMPLES:
            self.samples = [*self.samples[:-1:2], self.samples[-1]]
        self.samples.append(sample)
        self.most_processes = max(self.most_processes, sample.processes)
        self.pss_bytes = self.pss_bytes if sample.pss_bytes is None else sample.pss_bytes

    def figures(self, start: SystemStart) -> dict[str, Any]:
        """Figures by name, then ``reasons`` of those that are ``None``, then ``unknown``."""
        values, reasons = fold_system(SystemRecord(start=start, samples=self.samples))
        return {
            "root_pid": start.root_pid,
            "command": list(start.command),
            "seconds": self.samples[-1].t - self.samples[0].t if self.samples else 0.0,
            "most_processes": self.most_processes,
            "cpu_cores": self.rate("cpu_seconds", num_samples=len(self.samples)),
            **values,
            "memory_bytes": start.memory_bytes,
            "gpu_names": list(start.gpu_names),
            "reasons": reasons,
            "unknown": _UNKNOWN,
        }

    def rate(self, name: str, *, num_samples: int = 2) -> float | None:
        """Growth of a counter per second over the last samples; ``None`` before there are two."""
        return _rate(self.samples[-num_samples:], name)


def _is_of_another_clock(system: SystemRecord, time: float) -> bool:
    """Whether a moment of the training is of another machine's clock, or of one that was set."""
    lines = [*system.samples[-1:], system.end]
    last = max((line.t for line in lines if line is not None), default=0.0)
    return time > system.start.time + last + CLOCKS_DIFFER_SECONDS


def _peak(system: SystemRecord, name: str, trained_from: float | None) -> float | None:
    """The highest of all samples; ``None`` where none of them is of the training."""
    known = [sample for sample in system.samples if finite(getattr(sample, name)) is not None]
    if known and trained_from is not None and not _is_of_another_clock(system, trained_from):
        known = known if system.start.time + known[-1].t >= trained_from else []
    return _highest(getattr(sample, name) for sample in known)


def _memory(
    system: SystemRecord, samples: Sequence[SystemSample], trained_from: float | None
) -> dict[str, Any]:
    start = system.start
    hwm = _highest(sample.hwm_bytes for sample in system.samples)
    rss = middle(sample.rss_bytes for sample in samples)
    limit = min((size for size in (start.limit_bytes, start.memory_bytes) if size), default=None)
    # The memory that was needed: of ΣPSS (ΣRSS where that cannot be read) and the high-water mark
    # of one process the higher. Of several processes one has the mean at least.
    has_pss = any(sample.pss_bytes is not None for sample in system.samples)
    used = _peak(system, "pss_bytes" if has_pss else "rss_bytes", trained_from)
    if used is not None:
        marks = ((sample.hwm_bytes or 0) / max(1, sample.processes) for sample in system.samples)
        used = max(used, *marks)
    return {
        "working_set_bytes": _whole(middle(sample.pss_bytes for sample in samples)),
        "working_set_peak_bytes": _whole(_peak(system, "pss_bytes", trained_from)),
        "rss_bytes": _whole(rss),
        "anon_bytes": _whole(middle(sample.anon_bytes for sample in samples)),
        "file_bytes": _whole(middle(sample.file_bytes for sample in samples)),
        "shared_bytes": _whole(middle(sample.shared_bytes for sample in samples)),
        "hwm_bytes": _whole(hwm),
        "spike_ratio": ratio(hwm, rss),
        "limit_bytes": limit,
        "limit_share": ratio(used, limit),
    }


def _is_sustained(samples: Sequence[SystemSample]) -> bool | None:
    """Swap-in in at least half of the intervals, and in three in a row."""
    counters = [sample.swap_in_bytes for sample in samples if sample.swap_in_bytes is not None]
    grew = [b > a for a, b in pairwise(counters)]
    if len(grew) < LEAST_SWAP_RUN:
        return None
    longest = run = 0
    for has_grown in grew:
        run = run + 1 if has_grown else 0
        longest = max(longest, run)
    return sum(grew) >= LEAST_SWAP_SHARE * len(grew) and longest >= LEAST_SWAP_RUN


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if finite(value) is not None]
    return ratio(total(known), len(known))


def _rate(samples: Sequence[SystemSample], name: str) -> float | None:
    """Growth of a counter per second, between the first and the last sample that have it."""
    known = [(sample.t, at) for sample in samples if (at := getattr(sample, name)) is not None]
    if len(known) < 2:
        return None
    grown = sum(max(0, b - a) for (_, a), (_, b) in pairwise(known))
    return ratio(grown, known[-1][0] - known[0][0])


def _explain(
    name: str, system: SystemRecord, samples: Sequence[SystemSample], *, is_steady: bool
) -> str:
    source = _SOURCES[name]
    for key in (name, source):
        if key in system.start.reasons:
            return system.start.reasons[key]
    if not samples:
        return "the record of the process tree holds no sample"
    if source == "gpus" and any(sample.gpus for sample in samples):
        return "the driver does not tell it"
    if FIGURES[name].missing != _UNWATCHED:
        return FIGURES[name].missing
    is_sampled = any(getattr(sample, source) is not None for sample in system.samples)
    if name in _LEVELS and is_sampled and is_steady:
        return "it was not sampled in the steady phase, which is too short: run longer"
    if name in _LEVELS and is_sampled:
        return "no step of the steady phase was recorded"
    if name == "working_set_peak_bytes" and is_sampled:
        return "it was not sampled after the first step, the run is too short: run longer"
    if len(samples) < 2:
        return "one sample of the process tree makes no rate"
    return f"{source} could not be read on this machine"


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in map(finite, values) if value is not None), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
