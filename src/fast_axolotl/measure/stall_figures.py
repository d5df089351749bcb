"""The figures of waiting: how much, how long, in which pattern, and what the ready queue does."""

from __future__ import annotations

from fast_axolotl.measure.findings import Findings
from fast_axolotl.measure.periods import Pattern, find_pattern, is_burst_of_accumulation
from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.measure.ready_queue import find_capacity, find_drift, read_queue
from fast_axolotl.record.arithmetic import finite, ratio, total

__all__ = ["add_queue", "add_stall"]

MOST_SIZE_DIFFERENCE = 0.1
"""How far a cached batch may differ in size from the mean batch, to be compared with it. Ours."""

_FETCHES_FIRST = ("transformers", "axolotl")
"""Trainers that fetch all micro-batches of a step before its first forward pass."""


def add_stall(found: Findings, rank: RankFigures | None) -> None:
    found.values.update(
        steps=rank.steady.steps if rank else 0,
        fetches=rank.steady.fetches if rank else 0,
        warmup_steps=rank.warmup.steps if rank else 0,
        measured_seconds=rank.steady.wall_seconds if rank else 0.0,
        stall_source=rank.source if rank else "",
        span_seconds=rank.spans if rank else {},
    )
    steady = "no time passed in the steady phase"
    counted = rank.steady_blocks if rank else ()
    found.put_steady("first_steady_step", counted[0].first_step if counted else None, steady)
    host, device = (rank.host_stall, rank.device_stall) if rank else (None, None)
    found.put_steady("stall_fraction", rank.stall if rank else None, steady)
    found.put_steady("host_stall_fraction", host, steady)
    found.put_steady(
        "device_stall_fraction",
        device,
        "no device events were recorded: there was no CUDA device, or the meter did not see it",
        "device_wait_seconds",
    )
    waits = rank.waits if rank else None
    none = "no waits of single fetches were recorded"
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        found.put_steady(
            f"wait_{name}_seconds", waits.quantile(share) if waits else None, none, "host_waits"
        )
    worst = waits.worst_share() if waits else None
    found.put_steady("worst_percent_share", worst, "no fetch waited longer than a microsecond")
    _add_pattern(found, rank)
    _add_cached(found, rank)
    for name in ("first_batch", "first_step"):
        seconds = _since_first_fetch(rank, name) if rank else None
        found.put(f"{name}_seconds", seconds, "that moment was not recorded", name)


def _since_first_fetch(rank: RankFigures, name: str) -> float | None:
    """Seconds from the begin of the first fetch to a mark; from the start where it has no mark."""
    first: dict[str, float] = {}
    for mark in rank.record.marks:
        first.setdefault(mark.name, mark.t)
    return finite(first[name] - first.get("first_fetch", 0.0)) if name in first else None


def _add_pattern(found: Findings, rank: RankFigures | None) -> None:
    pattern = _pattern_of(rank) if rank is not None and rank.steady.fetches else None
    found.values["stall_pattern"] = pattern.kind if pattern else ""
    found.values["stall_period_of"] = pattern.period_of if pattern else ""
    reason = "the waits follow no period"
    fetches = pattern.period_fetches if pattern else None
    rows = pattern.period_rows if pattern else None
    found.put_steady("stall_period_fetches", fetches, reason)
    uncounted = "samples were not counted" if fetches is not None else reason
    found.put_steady("stall_period_rows", rows, uncounted)


def _pattern_of(rank: RankFigures) -> Pattern:
    steady = rank.steady
    per_fetch = ratio(steady.count("samples"), steady.fetches)
    accumulation = round(rank.setting("gradient_accumulation") or 1)
    pattern = find_pattern(
        [one for block in rank.steady_blocks for one in block.slow],
        steady.fetches,
        per_fetch or None,
        rank.record.marks,
        accumulation=accumulation,
        waits=rank.waits,
    )
    if pattern.kind == "steady" or pattern.period_of == "step":
        is_burst = _is_starved_in_bursts(rank, accumulation)
        if is_burst is not None:
            rows = accumulation * per_fetch if per_fetch else None
            burst = Pattern(
                kind="burst", period_fetches=accumulation, period_rows=rows, period_of="step"
            )
            return burst if is_burst else Pattern()
    return pattern


def _is_starved_in_bursts(rank: RankFigures, accumulation: int) -> bool | None:
    """Whether the loader keeps up on average, but not with a trainer that fetches a whole step at
    once; ``None`` where the trainer does not, or the queue holds a step. A loader that is too slow
    shows waits in the rhythm of the steps, too: the first batches are ready, the others are not."""
    capacity, stall = find_capacity(rank.settings), rank.stall
    own = ratio(rank.own_seconds, rank.steady.steps)
    if rank.record.start.source not in _FETCHES_FIRST or None in (capacity, stall, own):
        return None
    if not 1 <= (capacity or 0) < accumulation:
        return None
    return is_burst_of_accumulation(
        accumulation=accumulation,
        capacity=capacity or 0,
        wait_seconds=(stall or 0.0) * rank.steady.wall_seconds / rank.steady.steps,
        own_seconds=own or 0.0,
    )


def _add_cached(found: Findings, rank: RankFigures | None) -> None:
    """What a step takes with a batch that is there already, against what it took."""
    real, cached = (rank.steady, rank.replay) if rank else (None, None)
    if real is None or cached is None or not cached.fetches or not real.fetches:
        found.put(
            "cached_stall_fraction",
            None,
            "no cached batch was replayed: meter.watch(loader, replay=50)",
        )
        return
    for name in ("padded_tokens", "samples", "num_bytes"):
        own = ratio(cached.count(name), cached.fetches)
        mean = ratio(real.count(name), real.fetches)
        size = ratio(own, mean)
        if size is not None:
            if abs(size - 1.0) > MOST_SIZE_DIFFERENCE:
                word = name.replace("padded_", "").replace("num_", "")
                reason = f"the cached batch has {own:,.0f} {word}, the mean batch {mean:,.0f}"
                found.put("cached_stall_fraction", None, reason)
                return
            break
    took = ratio(ratio(cached.wall_seconds, cached.fetches), ratio(real.wall_seconds, real.fetches))
    value = None if took is None else 1.0 - took
    found.put("cached_stall_fraction", value, "no time passed in the steady phase")


def add_queue(found: Findings, rank: RankFigures | None) -> None:
    points = read_queue(rank.steady_blocks) if rank else []
    weight = total(fetches for _, _, fetches in points)
    depth = ratio(total(depth * fetches for _, depth, fetches in points), weight)
    capacity = find_capacity(rank.settings) if rank else None
    unseen = "the loader has no queue that can be looked into"
    found.put_steady("queue_depth", depth, unseen)
    found.put("queue_capacity", capacity, "the loader's workers and prefetch are not known")
    short = "the queue was looked at in fewer than three blocks of steps" if points else unseen
    found.put_steady("queue_drift_per_step", find_drift(points), short, "queue_depth")
