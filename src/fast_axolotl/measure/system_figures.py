"""The watcher's samples folded into figures: memory, pressure, disk, swap, GPU.

Only samples of the steady phase count, where a rank recorded. Where none lies in it, or it was not
reached, there is no memory of the steady phase; rates take two samples, else they are those of the
whole run. So are highest values, if one sample is of the training: those before say nothing of it.
Counters are compared from the first to the last sample; one that runs backwards (a process went
missing) counts as nothing. Swap and pressure are the machine's, not the run's: another program's
count, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fast_axolotl.record import DeviceSample, SystemRecord, SystemSample
from fast_axolotl.record.arithmetic import finite, middle, ratio, total

__all__ = ["SystemFigures", "fold_system"]

LEAST_SWAP_SHARE = 0.5
"""Share of the sampled intervals with swap-in for it to be sustained. Ours: most of the time."""

LEAST_SWAP_RUN = 3
"""Intervals in a row with swap-in for it to be sustained. Ours: one burst is no state."""

CLOCKS_DIFFER_SECONDS = 10.0
"""A training that begins so long after the last sample was timed by another clock. Ours: samples
are at most five seconds apart."""

_UNWATCHED = (
    "nobody sampled the process tree: fast-axolotl run --measure, or measure(sample_system=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFigures:
    """Figures by their names in ``RunSummary``, and the reasons of those that are ``None``."""

    values: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)


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

_LEVELS = ("working_set_bytes", "rss_bytes", "anon_bytes", "file_bytes", "shared_bytes")
"""Of the steady phase alone."""

_UNSAMPLED = "it was not sampled in the steady phase, which is too short: run longer"

_MISSING = {
    "spike_ratio": "the high-water mark or the steady resident size is not known",
    "limit_bytes": "neither a limit nor the machine's memory is known",
    "limit_share": "the highest working set or the limit is not known",
    "disk_bytes_per_second": "the capacity of the data's device was not measured: give --data-path",
    "disk_share": "the rate of reads or the capacity of the device is not known",
    "is_swap_sustained": f"{LEAST_SWAP_RUN} sampled intervals are needed",
    "gpus": "no GPU was seen",
}


def fold_system(
    system: SystemRecord | None,
    begin: float | None = None,
    end: float | None = None,
    *,
    trained_from: float | None = None,
) -> SystemFigures:
    """Figures of the process tree in the steady phase, from ``begin`` to ``end``, if it has both.

    ``trained_from`` is when the ranks began to train; ``None``: no rank recorded, and all samples
    count. Moments are given in seconds since 1970.
    """
    if system is None:
        return SystemFigures(
            values=dict.fromkeys(_SOURCES), reasons=dict.fromkeys(_SOURCES, _UNWATCHED)
        )
    samples = _choose_samples(system, begin, end, has_ranks=trained_from is not None)
    several = samples if len(samples) > 1 else system.samples
    values = {
        **_memory(system, samples, trained_from),
        **_pressure(several),
        **_disk(system, several),
        **_swap(several),
        **_gpus(several),
    }
    reasons = {
        name: _explain(name, system, several, is_steady=begin is not None)
        for name in values
        if values[name] is None
    }
    return SystemFigures(values=values, reasons=reasons)


def _choose_samples(
    system: SystemRecord, begin: float | None, end: float | None, *, has_ranks: bool
) -> Sequence[SystemSample]:
    if begin is None or end is None:
        return [] if has_ranks else system.samples
    if end < system.start.time or _is_of_another_clock(system, begin):
        return system.samples
    zero = system.start.time
    return [one for one in system.samples if begin <= zero + one.t <= end]


def _is_of_another_clock(system: SystemRecord, time: float) -> bool:
    """Whether a moment of the training is of another machine's clock, or of one that was set."""
    lines = [*system.samples[-1:], system.end]
    last = max((line.t for line in lines if line is not None), default=0.0)
    return time > system.start.time + last + CLOCKS_DIFFER_SECONDS


def _peak(system: SystemRecord, name: str, trained_from: float | None) -> float | None:
    """The highest of all samples; ``None`` where none of them is of the training."""
    known = [one for one in system.samples if finite(getattr(one, name)) is not None]
    if known and trained_from is not None and not _is_of_another_clock(system, trained_from):
        known = known if system.start.time + known[-1].t >= trained_from else []
    return _highest(getattr(one, name) for one in known)


def _used(system: SystemRecord, trained_from: float | None) -> float | None:
    """The memory that was needed: of ΣPSS and the high-water mark of one process the higher.

    ΣRSS stands in where ΣPSS cannot be read. Of several processes one has the mean at least.
    """
    has_pss = any(one.pss_bytes is not None for one in system.samples)
    peak = _peak(system, "pss_bytes" if has_pss else "rss_bytes", trained_from)
    proven = [(one.hwm_bytes or 0) / max(1, one.processes) for one in system.samples]
    return None if peak is None else max([peak, *proven])


def _memory(
    system: SystemRecord, samples: Sequence[SystemSample], trained_from: float | None
) -> dict[str, Any]:
    start = system.start
    hwm = _highest(one.hwm_bytes for one in system.samples)
    rss = middle(one.rss_bytes for one in samples)
    limits = [one for one in (start.limit_bytes, start.memory_bytes) if one]
    limit = min(limits, default=None)
    return {
        "working_set_bytes": _whole(middle(one.pss_bytes for one in samples)),
        "working_set_peak_bytes": _whole(_peak(system, "pss_bytes", trained_from)),
        "rss_bytes": _whole(rss),
        "anon_bytes": _whole(middle(one.anon_bytes for one in samples)),
        "file_bytes": _whole(middle(one.file_bytes for one in samples)),
        "shared_bytes": _whole(middle(one.shared_bytes for one in samples)),
        "hwm_bytes": _whole(hwm),
        "spike_ratio": ratio(hwm, rss),
        "limit_bytes": limit,
        "limit_share": ratio(_used(system, trained_from), limit),
    }


def _pressure(samples: Sequence[SystemSample]) -> dict[str, Any]:
    return {
        "psi_memory_full": _rate(samples, "psi_memory_full_seconds"),
        "psi_io_full": _rate(samples, "psi_io_full_seconds"),
    }


def _disk(system: SystemRecord, samples: Sequence[SystemSample]) -> dict[str, Any]:
    read = _rate(samples, "read_bytes")
    capacity = finite(system.start.disk_bytes_per_second)
    return {
        "read_bytes_per_second": read,
        "read_chars_per_second": _rate(samples, "read_chars"),
        "disk_bytes_per_second": capacity,
        "disk_share": ratio(read, capacity),
    }


def _swap(samples: Sequence[SystemSample]) -> dict[str, Any]:
    return {
        "swap_in_bytes_per_second": _rate(samples, "swap_in_bytes"),
        "swap_out_bytes_per_second": _rate(samples, "swap_out_bytes"),
        "is_swap_sustained": _is_sustained(samples),
    }


def _is_sustained(samples: Sequence[SystemSample]) -> bool | None:
    """Swap-in in at least half of the intervals, and in three in a row."""
    counters = [one.swap_in_bytes for one in samples if one.swap_in_bytes is not None]
    grew = [b > a for a, b in pairwise(counters)]
    if len(grew) < LEAST_SWAP_RUN:
        return None
    longest = run = 0
    for one in grew:
        run = run + 1 if one else 0
        longest = max(longest, run)
    return sum(grew) >= LEAST_SWAP_SHARE * len(grew) and longest >= LEAST_SWAP_RUN


def _gpus(samples: Sequence[SystemSample]) -> dict[str, Any]:
    """Means over devices and samples; of memory, the highest of one device."""
    devices = [gpu for one in samples for gpu in one.gpus]
    return {
        "gpu_utilization": _mean(devices, "utilization"),
        "gpu_memory_bytes": _whole(_highest(gpu.memory_bytes for gpu in devices)),
        "gpu_power_watts": _mean(devices, "power_watts"),
        "gpu_clock_mhz": _mean(devices, "clock_mhz"),
    }


def _mean(devices: Sequence[DeviceSample], name: str) -> float | None:
    found = [value for one in devices if finite(value := getattr(one, name)) is not None]
    return ratio(total(found), len(found))


def _rate(samples: Sequence[SystemSample], name: str) -> float | None:
    """Growth of a counter per second, between the first and the last sample that have it."""
    known = [(one.t, value) for one in samples if (value := getattr(one, name)) is not None]
    if len(known) < 2:
        return None
    grown = sum(max(0, b - a) for (_, a), (_, b) in pairwise(known))
    return ratio(grown, known[-1][0] - known[0][0])


def _explain(
    name: str, system: SystemRecord, samples: Sequence[SystemSample], *, is_steady: bool
) -> str:
    source = _SOURCES[name]
    given = system.start.reasons
    for key in (name, source):
        if key in given:
            return given[key]
    if not samples:
        return "the record of the process tree holds no sample"
    if source == "gpus":
        seen = any(one.gpus for one in samples)
        return "the driver does not tell it" if seen else _MISSING["gpus"]
    if name in _MISSING:
        return _MISSING[name]
    is_sampled = any(getattr(one, source) is not None for one in system.samples)
    if name in _LEVELS and is_sampled:
        return _UNSAMPLED if is_steady else "no step of the steady phase was recorded"
    if name == "working_set_peak_bytes" and is_sampled:
        return "it was not sampled after the first step, the run is too short: run longer"
    if len(samples) < 2:
        return "one sample of the process tree makes no rate"
    return f"{source} could not be read on this machine"


def _highest(values: Any) -> float | None:
    return max((value for value in values if finite(value) is not None), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
