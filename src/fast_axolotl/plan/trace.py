"""Divide the time of a step on many GPUs into compute, communication and idle, from traces.

A step's window on a device runs from the first kernel launched in it to the first one launched in
the next. Inside it every nanosecond is one of: compute, compute with communication beside it,
communication alone (exposed), copies alone, idle: measures of unions of intervals, so they add up.

Ranks need no common clock. A collective ends on all ranks at about the same time, so what one rank
spends in it beyond the shortest of all ranks is waiting for peers. Collectives are matched by group
and sequence number, or by their order among those of one kind and size in a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fast_axolotl.errors import DataError
from fast_axolotl.plan.kineto import COMMUNICATION, COMPUTE, COPY, Collective, Trace, read_trace
from fast_axolotl.record.units import count_words, format_share

Numbers = NDArray[np.int64]
Spans = Numbers
"""Starts and ends in two columns; merged ones are in order and do not touch."""

_NEVER = np.iinfo(np.int64).max
_STRAGGLER_LEAD = 0.01
"""Share of a step by which every other rank waits longer than a straggler, at least."""
_UNORDERED = {"send", "recv", "send_recv", "other"}
"""Kinds in which the ranks of a group have no common order."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """One step of one rank: compute, overlapped, exposed, copies and idle add up to it."""

    rank: int
    step: int | None
    """The profiler's number; ``None`` of a mean, and of a trace without steps, taken as one."""
    seconds: float
    compute_seconds: float
    """Compute with no communication beside it."""
    overlapped_seconds: float
    """Compute and communication at once."""
    exposed_seconds: float
    """Communication with no compute beside it."""
    copy_seconds: float
    """Memory copies and sets with neither beside them."""
    idle_seconds: float
    host_seconds: float
    """The part of ``idle_seconds`` in which the next work had not been launched yet: the GPU waits
    for the host. The rest lies between kernels that were launched in time."""
    waiting_seconds: float | None = None
    """The part of ``exposed_seconds`` that was waiting for peers; ``None`` where not known."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind, group and message, over all ranks."""

    kind: str
    group: str | None
    group_size: int | None
    message: str
    count: int
    seconds: float
    waiting_seconds: float | None
    """Of those that are matched with their peers'."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What the traces of a job's ranks say."""

    world_size: int | None
    missing_ranks: tuple[int, ...]
    ranks: tuple[StepParts, ...]
    """The mean step of each."""
    steps: tuple[StepParts, ...]
    collectives: tuple[CollectiveRow, ...]
    """By time, the most first."""
    straggler: int | None
    straggler_reason: str
    notes: tuple[str, ...]


class _Rank(NamedTuple):
    """What is kept of a trace."""

    path: str
    world_size: int | None
    steps: list[StepParts]
    windows: Spans
    is_cut: bool
    """Whether the last of several steps has no next one whose first kernel ends it: it drains."""
    compute: Spans
    collectives: list[Collective]


def summarise_traces(paths: Sequence[Path]) -> TraceSummary:
    """Divide the steps of some ranks' traces."""
    found: dict[int, _Rank] = {}
    notes: list[str] = []
    for path in paths:
        trace = read_trace(path)
        if trace.rank is None and len(paths) > 1:
            message = "no rank in the trace or in its file name; rename it, for example to "
            raise DataError(f"{message}rank3.json", path=trace.path)
        rank = trace.rank or 0
        if rank in found:
            message = f"{found[rank].path} is also of rank {rank}; pass only one"
            raise DataError(message, path=trace.path)
        found[rank] = _measure(trace, notes)
    ranks = [found[rank] for rank in sorted(found)]
    sizes = sorted({item.world_size for item in ranks if item.world_size})
    if len(sizes) > 1:
        raise DataError(f"the traces are from jobs of {sizes} ranks; pass those of one job")
    size = sizes[0] if sizes else None
    missing = tuple(rank for rank in range(size or 0) if rank not in found)
    _match(ranks, notes)
    if any(item.is_cut for item in ranks):
        notes.append("The last step, which ends as the GPU drains, is not in the mean.")
    if missing:
        effect = "not known" if len(ranks) == 1 else "at least the value shown"
        absent = f"{len(missing)} of {size} ranks have no trace here"
        notes.append(f"{absent}: waiting for peers is {effect}.")
    means = []
    for item in ranks:
        whole = item.steps[: len(item.steps) - item.is_cut]
        columns = zip(*(astuple(step)[2:] for step in whole), strict=True)
        known = ([value for value in column if value is not None] for column in columns)
        values = (mean(column) if column else None for column in known)
        means.append(StepParts(item.steps[0].rank, None, *values))  # type: ignore[arg-type]
    # The straggler waits least, and all others wait clearly longer.
    waits = sorted((w, item.rank) for item in means if (w := item.waiting_seconds) is not None)
    straggler, reason = None, "Waiting for peers is known for fewer than two ranks."
    if len(waits) > 1:
        reason = "No rank clearly makes the others wait."
        lead = (waits[1][0] - waits[0][0]) / means[0].seconds
        if lead >= _STRAGGLER_LEAD:
            straggler = waits[0][1]
            reason = f"Every other rank waits at least {format_share(lead)} of a step longer."
    groups: dict[tuple[str, str | None, int | None, str], list[Collective]] = defaultdict(list)
    for one in (one for item in ranks for one in item.collectives):
        groups[one.kind, one.group, one.group_size, one.message].append(one)
    rows = []
    for key, items in groups.items():
        waited = [one.waiting / 1e9 for one in items if one.waiting is not None]
        seconds = sum(one.end - one.start for one in items) / 1e9
        rows.append(CollectiveRow(*key, len(items), seconds, sum(waited) if waited else None))
    return TraceSummary(
        world_size=size,
        missing_ranks=missing,
        ranks=tuple(means),
        steps=tuple(step for item in ranks for step in item.steps),
        collectives=tuple(sorted(rows, key=lambda row: -row.seconds)),
        straggler=straggler,
        straggler_reason=reason,
        notes=tuple(notes),
    )


def _measure(trace: Trace, notes: list[str]) -> _Rank:
    """Reduce a trace to its windows, their parts and its collectives."""
    device = np.asarray(trace.device, np.int64).reshape(-1, 4)
    spans, classes = device[:, :2], device[:, 2]
    items = trace.collectives
    if not items and (trace.world_size or 1) > 1:
        # A job of several ranks communicates: none found means none recognised.
        longest = [name[:70] for name, _ in trace.kernels.most_common(5)]
        raise DataError(
            f"this trace of {trace.world_size} ranks holds no communication recognised by name; "
            f"profile whole steps, optimizer included. The longest kernels: {'; '.join(longest)}",
            path=trace.path,
        )
    kinds = (COMPUTE, COPY, COMMUNICATION)
    compute, copies, communication = (merge(spans[classes == kind]) for kind in kinds)
    either = merge(np.concatenate((compute, communication)))
    busy = merge(np.concatenate((either, copies)))
    # When each event was launched; -1 where that is not known.
    called = np.asarray(trace.launches or (-2, -1), np.int64).reshape(-1, 2)
    called = called[np.argsort(called[:, 0], kind="stable")]
    position = np.searchsorted(called[:, 0], device[:, 3]).clip(max=len(called) - 1)
    launches = np.where(called[position, 0] == device[:, 3], called[position, 1], -1)
    # Idle time before work that was launched only after the GPU had nothing left to do.
    order = np.lexsort((launches, spans[:, 0]))
    nexts = order[np.searchsorted(spans[order, 0], busy[1:, 0])]
    gaps = np.stack((busy[:-1, 1], busy[1:, 0]), axis=1)
    late = gaps[launches[nexts] > gaps[:, 0]]
    numbers: list[int | None] = [None]
    is_cut = False
    if trace.steps:
        places, bounds, is_cut = _windows(trace, spans, launches, is_kernel=classes != COPY)
        numbers = [trace.steps[place][0] for place in places]
        if left_out := len(trace.steps) - len(numbers):
            notes.append(f"{trace.path}: {count_words(left_out, 'step')} without kernels skipped.")
    else:
        bounds = np.array([[busy[0, 0], busy[-1, 1]]])
    if not numbers:
        raise DataError("none of its steps holds a kernel", path=trace.path)
    begins = [step[1] for step in trace.steps]
    for item, launch in zip(items, launches[classes == COMMUNICATION].tolist(), strict=True):
        place = bisect_right(begins, item.start if launch < 0 else launch) - 1
        item.step = trace.steps[place][0] if place >= 0 else None
    spans_by_part = (compute, communication, either, busy, late)
    c, m, e, b, h = (inside(part, bounds) for part in spans_by_part)
    whole = bounds[:, 1] - bounds[:, 0]
    parts = np.stack((whole, e - m, c + m - e, e - c, b - e, whole - b, h), axis=1) / 1e9
    columns = zip(numbers, parts.tolist(), strict=True)
    steps = [StepParts(trace.rank or 0, number, *row) for number, row in columns]
    chosen = [item for item in items if not trace.steps or item.step in numbers]
    is_cut = is_cut and len(steps) > 1
    return _Rank(trace.path, trace.world_size, steps, bounds, is_cut, compute, chosen)


def _windows(
    trace: Trace, spans: Spans, launches: Numbers, *, is_kernel: NDArray[np.bool_]
) -> tuple[list[int], Spans, bool]:
    """Which steps there are in the device's time, where, and whether the last is open."""
    begins, end = np.array([step[1] for step in trace.steps], np.int64), trace.steps[-1][2]
    launches = spans[:, 0] if (launches < 0).all() else launches
    # One place more, for what was launched after the last step.
    step_of = np.searchsorted(begins, launches, "right") - 1 + (launches > end)
    firsts = np.full(len(begins) + 1, _NEVER)
    np.minimum.at(firsts, step_of, np.where(is_kernel & (step_of >= 0), spans[:, 0], _NEVER))
    places = np.flatnonzero(firsts[:-1] < _NEVER)
    is_cut = bool(firsts[-1] == _NEVER)
    of_last = spans[step_of == places.max(initial=-1), 1]
    firsts[-1] = min(firsts[-1], of_last.max(initial=end))
    bounds = np.maximum.accumulate(firsts[[*places, -1]])
    return places.tolist(), np.stack((bounds[:-1], bounds[1:]), axis=1), is_cut


def merge(spans: Spans) -> Spans:
    """The union."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    is_first = np.ones(len(spans) + 1, bool)
    is_first[1:-1] = spans[1:, 0] > ends[:-1]
    return np.stack((spans[is_first[:-1], 0], ends[is_first[1:]]), axis=1)


def inside(merged: Spans, windows: Spans) -> Numbers:
    """How much of the merged spans lies in each window."""
    starts, ends = np.append(merged[:, 0], _NEVER), merged[:, 1]
    total = np.append(0, np.cumsum(ends - starts[:-1]))
    place = np.searchsorted(ends, windows, "right")
    before = total[place] + np.maximum(windows - starts[place], 0)
    return np.asarray(before[:, 1] - before[:, 0])


def _match(ranks: Sequence[_Rank], notes: list[str]) -> None:
    """Find each collective in the traces of its peers; what exceeds the shortest is waiting."""
    found: dict[tuple[object, ...], dict[int, list[Collective]]] = defaultdict(dict)
    members: dict[object, set[int]] = defaultdict(set)
    unmatched = 0
    for index, rank in enumerate(ranks):
        for item in sorted(rank.collectives, key=lambda item: item.start):
            if item.group is None or item.kind in _UNORDERED:
                unmatched += 1
            else:
                members[item.group].add(index)
                order = (item.step, item.message) if item.sequence is None else item.sequence
                peers = found[item.group, order, item.kind]
                peers.setdefault(index, []).append(item)
    for key, lists in found.items():
        present, counts = members[key[0]], [len(items) for items in lists.values()]
        if len(present) < 2 or lists.keys() != present or len(set(counts)) > 1:
            unmatched += sum(counts)
        else:
            for items in zip(*lists.values(), strict=True):
                lengths = [item.end - item.start for item in items]
                for item, length in zip(items, lengths, strict=True):
                    item.waiting = length - min(lengths)
    if unmatched:
        notes.append(
            f"Waiting is not known for {count_words(unmatched, 'collective')}: sends and receives, "
            "and those whose group is not named or whose peers' traces do not hold the same."
        )
    for rank in ranks:
        # Waiting comes first in a collective, and the transfer last.
        known = [item for item in rank.collectives if item.waiting is not None]
        waits = [(item.start, item.start + (item.waiting or 0)) for item in known]
        either = merge(np.array([*waits, *rank.compute], np.int64).reshape(-1, 2))
        alone = inside(either, rank.windows) - inside(rank.compute, rank.windows)
        seconds = (alone / 1e9).tolist()
        numbers = {item.step for item in known}
        for index, step in enumerate(rank.steps):
            if step.step in numbers:
                rank.steps[index] = replace(step, waiting_seconds=seconds[index])
