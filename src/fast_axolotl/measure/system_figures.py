"""The watcher's samples folded into figures: memory, pressure, disk, swap, GPU.

Only samples of the steady phase count, where a rank tells when that was. Where none lies in it,
there is no memory of the steady phase; rates take two samples, else they are those of the whole
run, as highest values always are. Counters are compared from the first to the last sample; one that
runs backwards (a process went missing) counts as nothing. Swap and pressure are the machine's, not
the run's: another program's count, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fast_axolotl.measure.arithmetic import finite, middle, ratio, total
from fast_axolotl.record import DeviceSample, SystemRecord, SystemSample

__all__ = ["SystemFigures", "fold_system"]

LEAST_SWAP_SHARE = 0.5
"""Share of the sampled intervals with swap-in for it to be sustained. Ours: most of the time."""

LEAST_SWAP_RUN = 3
"""Intervals in a row with swap-in for it to be sustained. Ours: one burst is no state."""

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
    "limit_share": "limit_bytes",
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

_MISSING = {
    "spike_ratio": "the high-water mark or the steady resident size is not known",
    "limit_bytes": "neither a limit nor the machine's memory is known",
    "limit_share": "the working set or the limit is not known",
    "disk_bytes_per_second": "the capacity of the data's device was not measured: give --data-path",
    "disk_share": "the rate of reads or the capacity of the device is not known",
    "is_swap_sustained": f"{LEAST_SWAP_RUN} sampled intervals are needed",
    "gpus": "no GPU was seen",
}


def fold_system(
    system: SystemRecord | None, begin: float | None = None, end: float | None = None
) -> SystemFigures:
    """Figures of the process tree between two moments, given in seconds since 1970."""
    if system is None:
        return SystemFigures(
            values=dict.fromkeys(_SOURCES), reasons=dict.fromkeys(_SOURCES, _UNWATCHED)
        )
    samples = _choose_samples(system, begin, end)
    several = samples if len(samples) > 1 else system.samples
    values = {
        **_memory(system, samples),
        **_pressure(several),
        **_disk(system, several),
        **_swap(several),
        **_gpus(several),
    }
    reasons = {name: _explain(name, system, several) for name in values if values[name] is None}
    return SystemFigures(values=values, reasons=reasons)


def _choose_samples(
    system: SystemRecord, begin: float | None, end: float | None
) -> Sequence[SystemSample]:
    times = [system.start.time + one.t for one in system.samples]
    if begin is None or end is None or not times:
        return system.samples
    if end < times[0] or begin > times[-1]:
        # The clocks of two machines, or one that was set.
        return system.samples
    pairs = zip(system.samples, times, strict=True)
    return [one for one, time in pairs if begin <= time <= end]


def _memory(system: SystemRecord, samples: Sequence[SystemSample]) -> dict[str, Any]:
    start = system.start
    peak = _highest(one.pss_bytes for one in system.samples)
    hwm = _highest(one.hwm_bytes for one in system.samples)
    rss = middle(one.rss_bytes for one in samples)
    limits = [one for one in (start.limit_bytes, start.memory_bytes) if one]
    limit = min(limits, default=None)
    used = peak if peak is not None else _highest(one.rss_bytes for one in system.samples)
    return {
        "working_set_bytes": _whole(middle(one.pss_bytes for one in samples)),
        "working_set_peak_bytes": _whole(peak),
        "rss_bytes": _whole(rss),
        "anon_bytes": _whole(middle(one.anon_bytes for one in samples)),
        "file_bytes": _whole(middle(one.file_bytes for one in samples)),
        "shared_bytes": _whole(middle(one.shared_bytes for one in samples)),
        "hwm_bytes": _whole(hwm),
        "spike_ratio": ratio(hwm, rss),
        "limit_bytes": limit,
        "limit_share": ratio(used, limit),
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


def _explain(name: str, system: SystemRecord, samples: Sequence[SystemSample]) -> str:
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
    if name in _LEVELS and any(getattr(one, source) is not None for one in system.samples):
        return "it was not sampled in the steady phase, which is too short: run longer"
    if len(samples) < 2:
        return "one sample of the process tree makes no rate"
    return f"{source} could not be read on this machine"


def _highest(values: Any) -> float | None:
    return max((value for value in values if finite(value) is not None), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
