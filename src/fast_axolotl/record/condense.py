"""A record that is followed for days, kept in bounded memory with the same figures.

Blocks are sums, so two neighbours of one phase can become one: every ratio of sums stays as it was.
What is lost is detail of long ago: of the slow fetches all but the worst, and the times of single
steps. Of samples, whose counters only grow, every other one is let go, but never the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fast_axolotl.record.histogram import Histogram
from fast_axolotl.record.schema import Mark, StepBlock, SystemSample

__all__ = ["condense_blocks", "condense_marks", "condense_samples", "join_blocks"]

_SUMMED = ("steps", "fetches", "wall_seconds", "host_wait_seconds", "device_wait_seconds")
_COUNTED = ("samples", "rows", "real_tokens", "trainable_tokens", "padded_tokens", "num_bytes")
_SAMPLED = ("sequences", "sequence_tokens", "sequence_squares")
_MOST_SLOW = 16
_FIRST_MARKS = 64


def condense_blocks(blocks: list[StepBlock], *, most: int, newest: int) -> list[StepBlock]:
    """At most about ``most`` blocks, the ``newest`` of them untouched."""
    if len(blocks) <= most:
        return blocks
    joined = _join_pairs(blocks[:-newest]) + blocks[-newest:]
    is_shorter = len(joined) < len(blocks)
    return condense_blocks(joined, most=most, newest=newest) if is_shorter else joined


def _join_pairs(blocks: Sequence[StepBlock]) -> list[StepBlock]:
    joined: list[StepBlock] = []
    index = 0
    while index < len(blocks):
        pair = blocks[index : index + 2]
        if len(pair) == 2 and _are_alike(*pair):
            joined.append(join_blocks(*pair))
            index += 2
        else:
            joined.append(pair[0])
            index += 1
    return joined


def join_blocks(first: StepBlock, second: StepBlock) -> StepBlock:
    """Two blocks that follow each other as one."""
    sums = {name: _add(getattr(first, name), getattr(second, name)) for name in _SUMMED + _SAMPLED}
    # What one of them fetched and did not count leaves no count of both.
    fetched = [one for one in (first, second) if one.fetches]
    for name in _COUNTED:
        counts = [getattr(one, name) for one in fetched or (first, second)]
        sums[name] = None if None in counts else sum(counts)
    slow = sorted((*first.slow, *second.slow), key=lambda one: -one.seconds)[:_MOST_SLOW]
    has_device = first.device_waits is not None or second.device_waits is not None
    return replace(
        second,
        first_step=first.first_step,
        first_fetch=first.first_fetch,
        **sums,
        spans={
            name: first.spans.get(name, 0.0) + second.spans.get(name, 0.0)
            for name in {**first.spans, **second.spans}
        },
        queue_depth=_mean_depth(first, second),
        host_waits=_merge(first.host_waits, second.host_waits),
        device_waits=_merge(first.device_waits, second.device_waits) if has_device else None,
        step_times=_merge(first.step_times, second.step_times),
        slow=tuple(sorted(slow, key=lambda one: one.fetch)),
        walls=None,
        hosts=None,
        devices=None,
    )


def condense_samples(samples: list[SystemSample], *, most: int, newest: int) -> list[SystemSample]:
    """At most about ``most`` samples, the ``newest`` of them untouched."""
    if len(samples) <= most:
        return samples
    old, recent = samples[1:-newest], samples[-newest:]
    peaks = {id(_highest(samples, name)) for name in ("pss_bytes", "hwm_bytes")}
    kept = samples[:1]
    for index in range(0, len(old), 2):
        pair = old[index : index + 2]
        best = max(pair, key=lambda one: (one.pss_bytes is not None, one.t))
        kept += [one for one in pair if one is best or id(one) in peaks]
    kept += recent
    is_shorter = len(kept) < len(samples)
    return condense_samples(kept, most=most, newest=newest) if is_shorter else kept


def condense_marks(marks: list[Mark], *, most: int) -> list[Mark]:
    """The first, which tell how the run began, and the latest."""
    if len(marks) <= most:
        return marks
    return marks[:_FIRST_MARKS] + marks[-(most // 2) :]


def _are_alike(first: StepBlock, second: StepBlock) -> bool:
    knows = [one.device_wait_seconds is not None for one in (first, second)]
    return first.phase == second.phase and knows[0] == knows[1]


def _add(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _mean_depth(first: StepBlock, second: StepBlock) -> float | None:
    known = [one for one in (first, second) if one.queue_depth is not None]
    weight = sum(one.fetches for one in known)
    if not weight:
        return known[-1].queue_depth if known else None
    return sum((one.queue_depth or 0.0) * one.fetches for one in known) / weight


def _merge(first: dict[str, int] | None, second: dict[str, int] | None) -> dict[str, int]:
    found = Histogram(first or {})
    found.merge(second or {})
    return found.take()


def _highest(samples: Sequence[SystemSample], name: str) -> SystemSample:
    return max(samples, key=lambda one: getattr(one, name) or 0)
