"""The curves of whoever watched the process tree: memory, disk, swap, GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fast_axolotl.record import SystemRecord, SystemSample
from fast_axolotl.report.downsampling import finite, keep_extremes, round_figures

__all__ = ["disk_series", "gpu_series", "memory_series"]

_MEMORY = ("pss_bytes", "rss_bytes", "anon_bytes", "hwm_bytes", "swap_bytes", "cgroup_bytes")
_COUNTERS = ("read_bytes", "read_chars", "swap_in_bytes", "swap_out_bytes")

Columns = dict[str, Any]


def memory_series(system: SystemRecord, offset: float, most: int) -> Columns:
    """Memory of the process tree; what was never sampled is left out."""
    samples = [sample for sample in system.samples if finite(sample.t) is not None]
    columns = {name: [getattr(one, name) for one in samples] for name in _MEMORY}
    known = {name: column for name, column in columns.items() if any(column)}
    watched = [known[name] for name in ("pss_bytes", "anon_bytes", "hwm_bytes") if name in known]
    kept = keep_extremes(watched or list(known.values()), most)
    if not kept:
        return {}
    found: Columns = {"t": round_figures((offset + samples[row].t for row in kept), 7)}
    for name, column in known.items():
        found[name] = round_figures(column[row] for row in kept)
    return found


def disk_series(system: SystemRecord, offset: float, most: int) -> Columns:
    """Rates between neighbouring samples."""
    pairs = [
        (one, two)
        for one, two in zip(system.samples, system.samples[1:], strict=False)
        if two.t > one.t
    ]
    columns = {
        f"{name}_per_second": [_rate(one, two, name) for one, two in pairs] for name in _COUNTERS
    }
    known = {
        name: column
        for name, column in columns.items()
        if any(value is not None for value in column)
    }
    kept = keep_extremes(list(known.values()), most)
    if not kept:
        return {}
    found: Columns = {"t": round_figures((offset + pairs[row][1].t for row in kept), 7)}
    for name, column in known.items():
        found[name] = round_figures(column[row] for row in kept)
    return found


def _rate(one: SystemSample, two: SystemSample, name: str) -> float | None:
    before, after = finite(getattr(one, name)), finite(getattr(two, name))
    if before is None or after is None:
        return None
    return max(0.0, after - before) / (two.t - one.t)


def gpu_series(system: SystemRecord, offset: float, most: int) -> Columns:
    """Over all devices: the mean utilisation, and the memory of the fullest."""
    samples = [sample for sample in system.samples if sample.gpus]
    busy = [_mean(finite(gpu.utilization) for gpu in sample.gpus) for sample in samples]
    memory = [
        max((gpu.memory_bytes for gpu in sample.gpus if gpu.memory_bytes), default=None)
        for sample in samples
    ]
    kept = keep_extremes([busy, memory], most)
    if not kept:
        return {}
    return {
        "t": round_figures((offset + samples[row].t for row in kept), 7),
        "utilization": round_figures(busy[row] for row in kept),
        "memory_bytes": round_figures(memory[row] for row in kept),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
