"""Add up waits, for a rank and for a job.

A stall is a ratio of sums: waiting ÷ wall time. It is the device's where device waits are known for
at least 90 % of the wall time, and then over exactly that part of it; else it is the host's. The
meter's running figures, the summary, the live view and the charts all add up steps or blocks here,
so that they cannot disagree.

Ranks meet in a collective at every step, so a step is as late as the rank that waits longest. The
job's stall is Σ over steps of the largest wait of any rank ÷ wall time, over the steps that are
steady on all ranks. Steps are aligned by their number. The waits of single steps are exact in the
first hours of a record, and a byte each after that.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from fast_axolotl.record.arithmetic import finite, ratio
from fast_axolotl.record.schema import COUNTED, SAMPLED, StepBlock

StallSource = Literal["device", "host", ""]

LEAST_DEVICE_SHARE = 0.9
"""Share of the wall time over which device waits must be known to stand for all of it."""

_LEAST_WAIT, _WAIT_GROWTH = 1e-5, 1.08
WAIT_SECONDS = (0.0, *(_LEAST_WAIT * _WAIT_GROWTH**number for number in range(255)))
"""The wait that each byte of condensed waits stands for, within 4 %: none, 10 µs to 50 minutes."""

LEAST_PRESENCE = 0.9
"""Of the longest rank's steps, that a rank must have recorded to end the common steps."""
_LEAST_STEPS = 20
"""Steps that a rank must have recorded to begin them later, where it has far fewer than others."""


def encode_waits(waits: Iterable[float]) -> str:
    """Waits of single steps as a byte each; longer is larger, so ranks are compared as bytes."""
    growth = math.log(_WAIT_GROWTH)
    return base64.b64encode(
        bytes(
            min(255, max(0, round(math.log(wait / _LEAST_WAIT) / growth) + 1)) if wait > 0 else 0
            for wait in waits
        )
    ).decode()


@dataclass(slots=True)
class WaitTotals:
    """Wall time and waits, and what the batches held, summed over steps or blocks."""

    steps: int = 0
    fetches: int = 0
    wall_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    device_wall_seconds: float = 0.0
    """Wall time of the steps whose device waits are known."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Samples, rows, tokens and bytes of the blocks that counted them; and seconds."""
    uncounted: set[str] = field(default_factory=set)
    """What at least one block with fetches did not count."""

    def add(
        self,
        wall_seconds: float,
        host_wait_seconds: float,
        device_wait_seconds: float | None,
        *,
        steps: int = 1,
        fetches: int = 0,
    ) -> None:
        """Add one step, or several at once."""
        self.steps += steps
        self.fetches += fetches
        self.wall_seconds += wall_seconds
        self.host_wait_seconds += host_wait_seconds
        if device_wait_seconds is not None:
            self.device_wait_seconds += device_wait_seconds
            self.device_wall_seconds += wall_seconds

    def add_block(self, block: StepBlock) -> None:
        """Add the steps of a block; a foreign record's numbers may be none."""
        self.add(
            finite(block.wall_seconds) or 0.0,
            finite(block.host_wait_seconds) or 0.0,
            finite(block.device_wait_seconds),
            steps=block.steps,
            fetches=block.fetches,
        )
        for name in (*COUNTED, *SAMPLED):
            value = getattr(block, name)
            if finite(value) is not None:
                self.counts[name] = self.counts.get(name, 0) + value
            elif block.fetches:
                self.uncounted.add(name)

    def since(self, earlier: WaitTotals) -> WaitTotals:
        """What was added since these sums were ``earlier``."""
        names: tuple[str, ...] = ("steps", "fetches", "wall_seconds", "host_wait_seconds")
        names += ("device_wait_seconds", "device_wall_seconds")
        sums: Any = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        counts = {name: own - earlier.counts.get(name, 0) for name, own in self.counts.items()}
        return WaitTotals(**sums, counts=counts, uncounted=self.uncounted)

    def count(self, name: str) -> Any:
        """How much of something there was; ``None`` where a part was not counted."""
        is_partial = name in self.uncounted and name not in SAMPLED
        return None if is_partial else self.counts.get(name)

    @property
    def source(self) -> StallSource:
        """Whose waits the stall is made of; empty before the first step."""
        if not self.steps:
            return ""
        known = ratio(self.device_wall_seconds, self.wall_seconds)
        return "device" if known is not None and known >= LEAST_DEVICE_SHARE else "host"

    @property
    def host_stall_fraction(self) -> float | None:
        """Share of the time in which the host waited."""
        return ratio(self.host_wait_seconds, self.wall_seconds)

    @property
    def device_stall_fraction(self) -> float | None:
        """Share of the time in which the device had nothing to run for want of data."""
        if self.source != "device":
            return None
        return ratio(self.device_wait_seconds, self.device_wall_seconds)

    @property
    def stall_fraction(self) -> float | None:
        """The device's where it is known, else the host's."""
        return self.device_stall_fraction if self.source == "device" else self.host_stall_fraction


def find_common_steps(ranks: Sequence[Sequence[StepBlock]]) -> range:
    """The steps that all ranks have. One that recorded far fewer than others ends nothing: its
    record was cut off. It may begin them, since its queue may have hidden what came before."""
    spans = [(rank[0].first_step, rank[-1].first_step + rank[-1].steps) for rank in ranks]
    least = LEAST_PRESENCE * max((end - first for first, end in spans), default=0)
    firsts = [first for first, end in spans if end - first >= min(least, _LEAST_STEPS)]
    begin = max(firsts, default=0)
    end = min((end for first, end in spans if end - first >= least), default=begin)
    return range(begin, max(begin, end))


def wall_between(blocks: Sequence[StepBlock], steps: range) -> float:
    """Wall seconds of a rank in these steps; of a block that reaches beyond, its share."""
    seconds = 0.0
    for block in blocks:
        begin, end = max(steps.start, block.first_step), block.first_step + block.steps
        inside = min(steps.stop, end) - begin
        if inside > 0:
            seconds += (finite(block.wall_seconds) or 0.0) * (inside / block.steps)
    return seconds


def fold_waits(
    ranks: Sequence[Sequence[StepBlock]], steps: range, source: Literal["host", "device"]
) -> list[float]:
    """The largest wait of any rank in each of these steps, by the host or by the device, summed up
    for the rank whose it is; all of them together are the job's."""
    import numpy as np

    largest, holder = np.zeros(len(steps)), np.zeros(len(steps), dtype=np.int32)
    for number, blocks in enumerate(ranks):
        spread = _spread(blocks, steps, source)
        np.copyto(holder, number, where=spread > largest)
        np.maximum(largest, spread, out=largest)
    return list(np.bincount(holder, largest, len(ranks)).tolist())


def _spread(blocks: Sequence[StepBlock], steps: range, source: str) -> Any:
    """Waits of a rank by step; where only the sum of a block is known, each step has its share."""
    import numpy as np

    waits = np.zeros(len(steps))
    by_step, seconds_of = attrgetter("first_step"), np.array(WAIT_SECONDS)
    first = max(0, bisect_right(blocks, steps.start, key=by_step) - 1)
    for block in blocks[first : bisect_left(blocks, steps.stop, key=by_step)]:
        at = block.first_step - steps.start
        inside = slice(max(0, at), min(len(steps), at + block.steps))
        singles = block.hosts if source == "host" else block.devices
        codes = b""
        # What is condensed are the device's waits where there are any.
        if (block.device_wait_seconds is not None) == (source == "device"):
            with suppress(ValueError):  # a damaged line
                codes = base64.b64decode(block.step_waits)
        if singles is not None and len(singles) == block.steps:
            values = np.nan_to_num(np.array(singles), nan=0.0, posinf=0.0, neginf=0.0)
        elif len(codes) == block.steps > 0:
            values = seconds_of[np.frombuffer(codes, dtype=np.uint8)]
        else:
            seconds = block.wait_seconds(is_device=source == "device")
            values = np.full(block.steps, seconds / max(1, block.steps))
        waits[inside] = values[max(0, -at) : len(steps) - at]
    return waits
