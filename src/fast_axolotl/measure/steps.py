"""From fetches to optimizer steps: which fetch belongs to which step, and how long a step took.

    T(s) = first fetch start of step s → first fetch start of step s + 1, spans taken out

Steps are told by the trainer, or made of a fixed number of fetches. A trainer may fetch all
micro-batches of a step before its first forward pass, and one batch ahead of that: since a step
begins with the first fetch after the trainer has told the end of the one before, a batch fetched
ahead counts for the step that waited for it, and sums over steps hold.

The end of an epoch is a call that gives no batch. Its wait counts for the step that follows. The
time from there (or from the end of a step told after it, where batches are fetched ahead) to the
next epoch's first fetch is no training; it is taken out and reported as the span ``epoch``.

Pure bookkeeping: times come in as numbers, and a step that has ended goes out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.measure.batch_counts import BatchCount, add_known
from fast_axolotl.measure.events import DeviceEvents, EventPair
from fast_axolotl.record.schema import PhaseName

__all__ = ["Span", "Step", "StepTracker", "count_warmup"]

_LEAST_WARMUP_STEPS = 5

_MOST_FETCHES = 4096
"""Fetches after which a step ends though nobody told its end, so that memory stays bounded."""

_MOST_WORKER_BATCHES = 1_000_000

_STEPS_LOOKED_AT = 4
"""Told steps whose fetches are counted to find out how many make a step, after the first."""


Fetch = tuple[int, float, EventPair | None]
"""Samples delivered before it, seconds the host waited, events around it."""


@dataclass(slots=True)
class Span:
    """A stretch of time that is no training."""

    name: str
    seconds: float
    """Of the host; once the events were read, of the device."""
    pair: EventPair | None = None
    is_after_step: bool = False
    """Whether the step's end had been told when it began."""
    is_inside: bool = True
    """Whether it lies within the step's time, and so is taken out of it."""


@dataclass(slots=True)
class Step:
    """One optimizer step: open until its end is known, then waiting for its events."""

    start: float
    first_fetch: int
    phase: PhaseName
    spans: tuple[Span, ...] = ()
    number: int = 0
    end: float = 0.0
    told_at: float | None = None
    fetches: list[Fetch] = field(default_factory=list)
    device_waits: list[float] | None = None
    """Of every fetch, once the events were read; ``None`` where one is missing."""
    other_host_wait_seconds: float = 0.0
    """Waits that gave no batch: the end of an epoch, a loader that raised."""
    other_pairs: tuple[EventPair, ...] = ()
    other_device_wait_seconds: float = 0.0
    counted: BatchCount | None = None
    told_tokens: tuple[int, int | None, int | None] | None = None
    gap_seconds: float = 0.0
    """Time between epochs."""
    depth_sum: int = 0
    depth_count: int = 0
    last_event: Any = None

    @property
    def host_wait_seconds(self) -> float:
        """Time the host waited for data."""
        return sum(fetch[1] for fetch in self.fetches) + self.other_host_wait_seconds

    @property
    def device_wait_seconds(self) -> float | None:
        """Time the device had nothing to run because the host waited for data."""
        if self.device_waits is None:
            return None
        return sum(self.device_waits) + self.other_device_wait_seconds

    @property
    def removed_seconds(self) -> float:
        """What is taken out of the step's time."""
        return self.gap_seconds + sum(span.seconds for span in self.spans if span.is_inside)

    def is_ready(self, events: DeviceEvents | None) -> bool:
        """Whether the device has reached the step's last event."""
        return events is None or self.last_event is None or events.has_passed(self.last_event)

    def read_events(self, events: DeviceEvents | None) -> None:
        """Read all events, which must have passed; those that have not are missing."""
        if events is None or self.last_event is None:
            return
        pairs = [pair for _, _, pair in self.fetches]
        waits = [None if pair is None else events.seconds(pair) for pair in pairs]
        others = [events.seconds(pair) for pair in self.other_pairs]
        known = [wait for wait in waits if wait is not None]
        if len(known) == len(waits) and None not in others:
            self.device_waits = known
            self.other_device_wait_seconds = sum(other for other in others if other is not None)
        for span in self.spans:
            found = None if span.pair is None else events.seconds(span.pair)
            span.seconds = span.seconds if found is None else found
            span.pair = None
        self.other_pairs, self.last_event = (), None


class StepTracker:
    """Sorts fetches, ends of steps and spans into steps."""

    def __init__(
        self, *, accumulation: int = 1, is_told: bool = False, origin: float = 0.0
    ) -> None:
        self.num_fetches = 0
        self.num_samples = 0
        self.num_steps = 0
        """Steps that have ended."""
        self.has_begun = False
        """Whether a fetch was ever begun."""
        self.is_new_epoch = False
        """Whether the next fetch is the first of another epoch."""
        self._accumulation = accumulation
        self._is_told = is_told
        # How many fetches make a step is looked for where nobody said it.
        self._is_counting = accumulation == 1 and not is_told
        self._fetches_at_tell: list[int] = []
        self._origin = origin
        self._warmup_steps = _LEAST_WARMUP_STEPS
        self._warm_steps = 0
        self._is_replay = False
        self._open: Step | None = None
        self._early_spans: tuple[Span, ...] = ()
        self._idle_since: float | None = None
        self._idle_spans = 0.0

    def begin_fetch(self, now: float) -> Step | None:
        """A fetch begins; the step that ends with it, if one does."""
        self.has_begun = True
        self.is_new_epoch = False
        step, idle_since, self._idle_since = self._open, self._idle_since, None
        if step is None:
            self._open = self._new(now)
            return None
        if idle_since is not None:
            step.gap_seconds += max(0.0, now - idle_since - self._idle_spans)
        is_full = len(step.fetches) >= (_MOST_FETCHES if self._is_told else self._accumulation)
        if not is_full and step.told_at is None:
            return None
        self._open = self._new(now)
        return self._end(step, now)

    def end_fetch(
        self, host_wait_seconds: float, pair: EventPair | None, counted: BatchCount
    ) -> None:
        """The fetch that was begun has given a batch."""
        step = self._open
        if step is None:
            return
        step.fetches.append((self.num_samples, host_wait_seconds, pair))
        if pair is not None:
            step.last_event = pair[1]
        step.counted = counted if step.counted is None else step.counted + counted
        self.num_fetches += 1
        self.num_samples += counted.samples

    def fail_fetch(self, host_wait_seconds: float, pair: EventPair | None) -> None:
        """The fetch that was begun has given no batch, and the loop may go on."""
        step = self._open
        if step is not None:
            step.other_host_wait_seconds += host_wait_seconds
            if pair is not None:
                step.other_pairs += (pair,)
                step.last_event = pair[1]

    def exhaust(self, now: float, host_wait_seconds: float, pair: EventPair | None) -> None:
        """The fetch that was begun found the end of the epoch."""
        self.fail_fetch(host_wait_seconds, pair)
        self.leave(now)
        self.is_new_epoch = True

    def leave(self, now: float) -> None:
        """The loop over the loader has ended: time until the next fetch is no training."""
        if self._idle_since is None:
            self._idle_since = now
            self._idle_spans = 0.0

    def begin_replay(self) -> None:
        """From now on one batch comes again and again; what has not ended is left out."""
        self._is_replay = True
        self._open = None
        self._idle_since = None
        self.is_new_epoch = False

    def tell(self, now: float) -> Step | None:
        """The trainer says that a step has ended; the one before it, where no fetch ended that."""
        if not self._is_told:
            # What was taken for steps until now were fetches of this one: warm up from here.
            self._is_told = True
            self._warm_steps = 0
        if self._is_counting:
            self._fetches_at_tell.append(self.num_fetches)
        ended = None
        step = self._open
        if step is None:
            step = self._open = self._new(self._origin)
        elif step.told_at is not None:
            # What came after the end was told lies in the step that follows.
            later = [span for span in step.spans if span.is_after_step]
            step.spans = tuple(span for span in step.spans if not span.is_after_step)
            ended = self._end(step, step.told_at)
            step = self._open = self._new(step.told_at)
            for span in later:
                span.is_after_step = False
                step.spans += (span,)
                if span.pair is not None:
                    step.last_event = span.pair[1]
        step.told_at = now
        if self._idle_since is not None:
            self._idle_since = now
            self._idle_spans = 0.0
        return ended

    def take_accumulation(self) -> int | None:
        """How many fetches make a step, once: when enough steps were told, and nobody said it.

        The commonest number of the first steps: the very first may have fetched ahead, and the last
        of an epoch may have fewer.
        """
        if not self._is_counting or len(self._fetches_at_tell) <= _STEPS_LOOKED_AT:
            return None
        self._is_counting = False
        counts = [after - before for before, after in itertools.pairwise(self._fetches_at_tell)]
        return max(set(counts), key=lambda count: (counts.count(count), -count)) or None

    def add_tokens(self, count: int, trainable: int | None, padded: int | None) -> None:
        """Tokens that the loop counted itself."""
        if self._open is None:
            self._open = self._new(self._origin)
        before = self._open.told_tokens or (0, 0, 0)
        self._open.told_tokens = (
            before[0] + count,
            add_known(before[1], trainable),
            add_known(before[2], padded),
        )

    def add_span(self, name: str, seconds: float, pair: EventPair | None) -> None:
        """A span has ended. One outside of any step is reported with the next."""
        self._idle_spans += seconds
        step = self._open
        if step is None:
            self._early_spans += (Span(name, seconds, is_inside=False),)
            return
        step.spans += (Span(name, seconds, pair, step.told_at is not None),)
        if pair is not None:
            step.last_event = pair[1]

    def see_queue(self, depth: int | None) -> None:
        """How many batches were ready when the fetch began."""
        if depth is not None and self._open is not None:
            self._open.depth_sum += depth
            self._open.depth_count += 1

    def set_warmup(self, settings: Mapping[str, Any]) -> None:
        """Settle how many steps are warm-up, as far as settings are known."""
        self._warmup_steps = count_warmup(settings, self._accumulation)

    def finish(self) -> Step | None:
        """The run has ended. A step of which no end was told or fetched is left out."""
        step, self._open = self._open, None
        if step is None or step.told_at is None:
            return None
        for span in step.spans:
            span.is_inside = span.is_inside and not span.is_after_step
        return self._end(step, step.told_at)

    def _new(self, start: float) -> Step:
        spans, self._early_spans = self._early_spans, ()
        return Step(start, self.num_fetches, "replay" if self._is_replay else "warmup", spans)

    def _end(self, step: Step, end: float) -> Step:
        step.end = max(end, step.start)
        step.number = self.num_steps
        if step.phase != "replay" and self._warm_steps >= self._warmup_steps:
            step.phase = "steady"
        self.num_steps += 1
        self._warm_steps += 1
        return step


def count_warmup(settings: Mapping[str, Any], accumulation: int = 1) -> int:
    """``max(5, ceil(workers · prefetch ÷ accumulation) + 1)``: until the ready queue is used up."""
    workers = _whole(settings.get("num_workers"), 0)
    prefetch = _whole(settings.get("prefetch_factor"), 2)
    per_step = max(1, _whole(settings.get("gradient_accumulation"), accumulation))
    return max(_LEAST_WARMUP_STEPS, math.ceil(workers * prefetch / per_step) + 1)


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_WORKER_BATCHES else otherwise
