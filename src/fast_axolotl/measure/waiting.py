"""Steps that have ended on the host, until the device has reached their events.

The host runs ahead of a device. So a step waits here until the last event recorded in it has
passed, which is asked later, and is then folded into a block. Steps are folded many at a time, once
a second or every 64: between two batches of a training run caches are cold, and what is done once
for many steps costs a fifth of what it costs for each. At most 256 wait: beyond that the oldest
goes without its device times rather than memory growing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fast_axolotl.measure.blocks import BlockBuilder
from fast_axolotl.measure.events import DeviceEvents, EventPair
from fast_axolotl.measure.steps import Step

__all__ = ["StepQueue"]

_FOLD_EVERY_STEPS = 64
_MOST_WAITING_STEPS = 256
"""A device lags a few steps at most, since its launch queue is bounded."""

_SETTLE_SECONDS = 2.0
"""How long the end of a run waits for the device to reach the last events."""


class StepQueue:
    """Records events, and hands on the steps whose events have passed."""

    def __init__(
        self, blocks: BlockBuilder, find_events: Callable[[], DeviceEvents | None]
    ) -> None:
        self._blocks = blocks
        self._find_events = find_events
        self._events: DeviceEvents | None = None
        self._steps: deque[Step] = deque()
        self._num_new = 0
        self._block_due = float("-inf")

    @property
    def no_device_reason(self) -> str:
        """Why device times are missing, if they are."""
        failure = "" if self._events is None else self._events.failure
        return failure or "this process has not initialised CUDA: there is no device to time"

    @property
    def is_blind(self) -> bool:
        """Whether there is no device that could be timed."""
        return self._events is None or bool(self._events.failure)

    def record(self) -> Any:
        """An event behind all that is queued on the device; ``None`` where there is no device."""
        if self._events is None:
            self._events = self._find_events()
            if self._events is None:
                return None
        return self._events.record()

    def pair(self, first: Any) -> EventPair | None:
        """The event recorded earlier, and one recorded now."""
        if first is None or self._events is None:
            return None
        last = self._events.record()
        return None if last is None else (first, last)

    def add(self, step: Step) -> None:
        """A step has ended on the host."""
        self._steps.append(step)
        self._num_new += 1
        if step.end >= self._block_due:
            self.fold()
            self._blocks.flush()
            self._block_due = step.end + self._blocks.block_seconds
        elif self._num_new >= _FOLD_EVERY_STEPS:
            self.fold()

    def fold(self) -> None:
        """Fold the steps that the device has ended, too."""
        self._num_new = 0
        steps = self._steps
        while steps and (len(steps) > _MOST_WAITING_STEPS or steps[0].is_ready(self._events)):
            self._fold_oldest()

    def finish(self) -> None:
        """Fold all steps, and wait a little for the device to end them."""
        if self._events is not None:
            last = next(
                (step.last_event for step in reversed(self._steps) if step.last_event), None
            )
            if last is not None:
                self._events.settle(last, _SETTLE_SECONDS)
        while self._steps:
            self._fold_oldest()

    def _fold_oldest(self) -> None:
        step = self._steps.popleft()
        step.read_events(self._events)
        self._blocks.add(step)
