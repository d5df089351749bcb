"""Figures of the machine from the watcher's samples: memory, CPU, pressure, disk, swap, GPU.

With several nodes, the figures are those of the one under most pressure.

Only samples of the steady phase count, where a rank recorded. Where none lies in it, or it was not
reached, there is no memory of the steady phase; rates take two samples, else they are those of the
whole run. So are highest values.
Counters are compared from the first to the last sample; one that runs backwards (a process went
missing) counts as nothing. Swap is the machine's, not the run's: another program's counts, too.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.record import (
    Growth,
    RunRecord,
    SystemRecord,
    SystemSample,
    SystemStart,
    thresholds,
)
from fast_axolotl.record.arithmetic import finite, known, mean, middle, ratio, total
from fast_axolotl.record.catalogue import FIGURES

_MOST_POINTS = 60
"""Samples between which slopes are taken, of a long run evenly spread."""

LEAST_SWAP_INTERVALS = 3
"""Sampled intervals, of which half or more swap in for it to be sustained. Ours."""

_NODE_FIGURES = (
    *("working_set_bytes", "working_set_peak_bytes", "limit_bytes", "limit_share", "cpu_cores"),
    *("other_cpu_share", "read_bytes_per_second", "swap_in_bytes_per_second", "psi_io_full"),
    *("psi_memory_full", "gpu_utilization", "gpu_clock_mhz"),
)
_UNWATCHED = "processes were not sampled; use fast-axolotl measure, or measure(sample_system=True)"

_TOO_FEW = "there are too few samples of the steady phase: run longer"

_LEVELS = ("working_set_bytes", "working_set_peak_bytes", "rss_bytes")
"""Memory that is asked for of the training alone."""

_Found = tuple[Any, str]
"""A figure, and the line's field that it is made of, under which the watcher gives its reasons."""


def fold_machines(
    record: RunRecord, ranks: Sequence[RankFigures]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Figures of every node, and of the one under most pressure; reasons for those that are
    missing, and notes.

    A node's samples are compared with its own ranks, which have the same clock.
    """
    by_node: dict[str, list[RankFigures]] = defaultdict(list)
    for rank in ranks:
        by_node[rank.record.start.host].append(rank)
    folded = {
        node: _fold_node(record.systems.get(node), by_node.get(node, []), ranks)
        for node in dict.fromkeys([*by_node, *record.systems])
    }

    def pressure(node: str) -> tuple[bool, bool, bool, float]:
        values, _ = folded[node]
        waited = min(values["other_cpu_share"] or 0.0, values["cpu_wait_share"] or 0.0)
        refused = max(values["cpu_throttled_share"] or 0.0, values["cpu_steal_share"] or 0.0)
        return (
            bool(values["oom_kills"]),
            bool(values["is_swap_sustained"]),
            max(waited, refused, values["psi_io_full"] or 0.0) >= thresholds.CPU_LOST,
            values["limit_share"] or 0.0,
        )

    watched = [node for node in folded if node in record.systems]
    worst = max(watched, key=pressure, default="")
    values, reasons = folded[worst] if worst else _fold_node(None, ranks, ranks)
    nodes = tuple(
        {"node": node, "ranks": tuple(rank.rank for rank in by_node.get(node, ()))}
        | {name: found.get(name) for name in _NODE_FIGURES}
        for node, (found, _) in folded.items()
    )
    notes = [
        f"{node}: {text}"
        for node, system in record.systems.items()
        if (text := system.start.reasons.get("processes"))
    ]
    if len(folded) > 1 and worst:
        notes.append(
            f"memory, CPU, disk, swap and GPU figures are from {worst}, the node under most "
            f"pressure of {len(folded)}"
        )
    unwatched = [node for node in folded if node not in record.systems]
    if worst and unwatched:
        notes.append(f"there are no samples from {', '.join(unwatched)}")
    held = (rank.settings.get("cuda_memory") for rank in ranks)
    peaks = [one.get("allocated_peak", 0) for one in held if isinstance(one, dict)]
    values |= {"node": worst, "nodes": nodes}
    values["gpu_peak_allocated_bytes"] = max(peaks, default=0) or None
    if values["gpu_memory_bytes"] is None:
        reasons["gpu_peak_allocated_bytes"] = reasons["gpu_memory_bytes"]
    return values, reasons, notes


def _fold_node(
    system: SystemRecord | None, own: Sequence[RankFigures], all_ranks: Sequence[RankFigures]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures of one node by its samples in the steady phase, and what its own ranks took of their
    GPUs, by their names in ``RunSummary``; and the reasons of those that are ``None``.

    Who watches a node without ranks, that of the launcher, goes by the times of all. Where no rank
    is recorded, all samples count.
    """
    if system is None:
        empty = SystemRecord(start=SystemStart(time=0.0, host="", root_pid=0))
        nothing, _ = _fold_node(empty, own, all_ranks)
        return nothing, dict.fromkeys(nothing, _UNWATCHED)
    ranks, start = own or all_ranks, system.start
    samples: Sequence[SystemSample] = system.samples
    if ranks:
        begin = min(known(rank.steady_from for rank in ranks), default=math.inf)
        end = max(known(rank.steady_to for rank in ranks), default=-math.inf)
        samples = [sample for sample in samples if begin <= start.time + sample.t <= end]
    several = samples if len(samples) > 1 else system.samples

    def rate(counter: str) -> _Found:
        return _rate(several, counter), counter

    devices = [gpu for sample in several for gpu in sample.gpus]
    read, requests = _rate(several, "read_bytes"), _rate(several, "device_reads")
    request_bytes = ratio(_rate(several, "device_read_bytes"), requests)
    # It was tested in order: of small requests it gives less, and nobody knows how much.
    is_random = request_bytes is not None and request_bytes < thresholds.SMALL_REQUEST_BYTES
    capacity = None if is_random else finite(start.disk_bytes_per_second)
    used, everybody = _rate(several, "cpu_seconds"), _rate(several, "machine_cpu_seconds")
    others = None
    if used is not None and everybody is not None:
        # A tick more or less can make it more than all.
        others = min(1.0, ratio(max(0.0, everybody - used), start.processors) or 0.0)
    stolen, throttled = _rate(several, "steal_seconds"), _rate(several, "throttled_seconds")
    swapped = [(one.t, one.swap_in_bytes) for one in several if one.swap_in_bytes is not None]
    pairs = pairwise(swapped)
    rates = [ratio(last[1] - first[1], last[0] - first[0]) or 0.0 for first, last in pairs]
    is_sustained = None
    if len(rates) >= LEAST_SWAP_INTERVALS:  # most of the time, so one burst is none
        is_sustained = sorted(rates)[len(rates) // 2] >= thresholds.SWAP_RATE
    free = [
        gpu.total_bytes - gpu.memory_bytes
        for gpu in devices
        if gpu.total_bytes is not None and gpu.memory_bytes is not None
    ]
    for rank in own:
        # Torch's allocator knows what it held at most, which the samples may have missed.
        held = rank.settings.get("cuda_memory")
        if isinstance(held, dict) and {"total", "reserved_peak"} <= held.keys():
            free.append(held["total"] - held["reserved_peak"])

    def level(name: str) -> int | None:
        value = middle(getattr(sample, name) for sample in samples)
        return None if value is None else round(value)

    limit = min((size for size in (start.limit_bytes, start.memory_bytes) if size), default=None)
    peak = most = _highest(one.working_set_bytes for one in system.samples)
    if most is None and not any(sample.pss_bytes is not None for sample in system.samples):
        # Where PSS cannot be read, at most the resident sizes.
        levels = ("anon_bytes", "shared_bytes")
        most = total(_highest(getattr(one, name) for one in system.samples) for name in levels)
    if most is not None:
        # ΣPSS is read seldom; what one process alone held in between is proven, too.
        most = max(most, *(sample.largest_anon_bytes or 0 for sample in system.samples))
    found: dict[str, _Found] = {
        "working_set_bytes": (level("working_set_bytes"), "pss_bytes"),
        "working_set_peak_bytes": (peak, "pss_bytes"),
        "rss_bytes": (level("rss_bytes"), "rss_bytes"),
        "hwm_bytes": (_highest(one.hwm_bytes for one in system.samples), "hwm_bytes"),
        "limit_bytes": (limit, "limit_bytes"),
        "limit_share": (ratio(most, limit), "pss_bytes"),
        "psi_memory_full": rate("psi_memory_full_seconds"),
        "psi_io_full": rate("psi_io_full_seconds"),
        "cpu_cores": (used, "cpu_seconds"),
        "other_cpu_share": (others, "machine_cpu_seconds"),
        "cpu_wait_share": rate("cpu_wait_seconds"),
        # Of the processor time that was wanted: what ran, and what could have.
        "cpu_steal_share": (ratio(stolen, total([stolen, everybody])), "steal_seconds"),
        "cpu_throttled_share": (ratio(throttled, total([throttled, used])), "throttled_seconds"),
        "oom_kills": (growth(system.samples, "oom_kills"), "oom_kills"),
        "read_bytes_per_second": (read, "read_bytes"),
        "disk_bytes_per_second": (capacity, "disk_bytes_per_second"),
        "disk_share": (ratio(read, capacity), "disk_bytes_per_second"),
        "disk_request_bytes": (request_bytes, "device_reads"),
        "swap_in_bytes_per_second": rate("swap_in_bytes"),
        "swap_out_bytes_per_second": rate("swap_out_bytes"),
        "is_swap_sustained": (is_sustained, "swap_in_bytes"),
        "process_swap_bytes": (_highest(one.swap_bytes for one in several), "swap_bytes"),
        # Means over devices and samples; of memory, the highest of one device.
        "gpu_utilization": (mean(gpu.utilization for gpu in devices), "gpus"),
        "gpu_memory_bytes": (_highest(gpu.memory_bytes for gpu in devices), "gpus"),
        "gpu_free_bytes": (min(free, default=None), "gpus"),
        "gpu_power_watts": (mean(gpu.power_watts for gpu in devices), "gpus"),
        "gpu_clock_mhz": (mean(gpu.clock_mhz for gpu in devices), "gpus"),
    }
    reasons = {
        name: _explain(name, source, system, several)
        for name, (value, source) in found.items()
        if value is None
    }
    return {name: value for name, (value, _) in found.items()}, reasons


def find_growth(system: SystemRecord | None, rank: RankFigures) -> tuple[Growth, ...]:
    """The parts of the memory that grow in the steady phase; first that which is full first.

    The slope is Theil and Sen's over all samples but those of the first third. What grows does so
    in each third of the others, half as fast or more as in all and in the first of them: what only
    warms up or fills does not.
    """
    if system is None or rank.steady_from is None or rank.steady_to is None:
        return ()
    begin = rank.steady_from + (rank.steady_to - rank.steady_from) / 3
    zero, own_zero = system.start.time, rank.record.start.time
    samples = [one for one in system.samples if begin <= zero + one.t <= rank.steady_to]
    blocks = [block for block in rank.steady_blocks if own_zero + block.t >= begin]
    took = total(one.t - one.begin for one in blocks)
    step_seconds = ratio(took, sum(block.steps for block in blocks)) or 0.0
    limits = [size for size in (system.start.limit_bytes, system.start.memory_bytes) if size]
    used, parts = 0, defaultdict[str, list[tuple[float, int, int | None]]](list)
    for one in samples[:: len(samples) // _MOST_POINTS + 1]:
        used = one.working_set_bytes or used
        for part, size in _divide(one).items():
            parts[part].append((one.t, size, min(limits) - used if limits and used else None))
        for gpu in one.gpus:
            if gpu.memory_bytes is not None and gpu.total_bytes is not None:
                free = gpu.total_bytes - gpu.memory_bytes
                parts[f"GPU {gpu.index}"].append((one.t, gpu.memory_bytes, free))
    found = []
    for part, points in parts.items():
        slope, third, (last, _, left) = _slope(points), len(points) // 3, points[-1]
        slopes = [_slope(points[n * third : (n + 1) * third]) for n in range(3)]
        grown = slope * (last - points[0][0])
        is_steady = min(slopes) >= max(slope, slopes[0]) / 2
        if is_steady and grown >= thresholds.LEAST_GROWTH_BYTES:
            full = None if left is None else max(1.0, left / slope)
            found.append(Growth(part, slope, slope * step_seconds, full))
    return tuple(sorted(found, key=lambda one: one.full_in_seconds or math.inf))


def _slope(points: Sequence[tuple[float, int, int | None]]) -> float:
    """The median of the slopes between any two points; nothing of fewer."""
    pairs = itertools.combinations(points, 2)
    return middle((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs) or 0.0


def _divide(one: SystemSample) -> dict[str, int]:
    """Memory that cannot give way, by who holds it."""
    known = one.training_anon_bytes
    largest = (one.largest_anon_bytes or 0) if known is None else known
    return {
        "the largest process" if known is None else "the training process": largest,
        "the other processes" if known is None else "the workers": (one.anon_bytes or 0) - largest,
        "shared memory (/dev/shm)": one.shared_bytes or 0,
    }


def _rate(samples: Sequence[SystemSample], name: str) -> float | None:
    """Growth of a counter per second, between the first and the last sample that have it."""
    times = [sample.t for sample in samples if getattr(sample, name) is not None]
    return ratio(growth(samples, name), times[-1] - times[0]) if len(times) > 1 else None


def growth(samples: Sequence[SystemSample], name: str) -> Any:
    """Growth of a counter; one that falls has begun anew, and counts as nothing there."""
    known = [at for sample in samples if (at := getattr(sample, name)) is not None]
    return sum(max(0, b - a) for a, b in pairwise(known)) if len(known) > 1 else None


def _explain(name: str, source: str, system: SystemRecord, samples: Sequence[SystemSample]) -> str:
    reasons = system.start.reasons
    if name in reasons or source in reasons:
        return reasons.get(name) or reasons[source]
    if not samples:
        return reasons.get("processes", "the process tree was never sampled")
    if source == "gpus" and any(sample.gpus for sample in samples):
        return "the driver does not report it"
    is_rate = len(samples) < 2 and FIGURES[name].unit in ("share", "bytes/s", "cores")
    is_seen = any(getattr(one, source, None) not in (None, ()) for one in system.samples)
    return _TOO_FEW if is_seen and (is_rate or name in _LEVELS) else FIGURES[name].missing


def _highest(values: Iterable[float | None]) -> float | None:
    return max(known(values), default=None)
