"""Assign fetches to optimizer steps, and time the steps.

    T(s) = first fetch start of step s → first fetch start of step s + 1, spans taken out

Steps are told by the trainer, or made of a fixed number of fetches. A trainer may fetch all
micro-batches of a step before its first forward pass, and one batch ahead of that: since a step
begins with the first fetch after the trainer has told the end of the one before, a batch fetched
ahead counts for the step that waited for it, and sums over steps hold.

The end of an epoch is a call that gives no batch. Its wait counts for the step that follows, and so
does all the time from there (or from the end of a step told after it, where batches are fetched
ahead) to the first batch of the next epoch, spans taken out: planning, shuffling and starting
workers are waits for data.

A trainer that resumes may read over the batches that it has trained on. They are no steps: the
first step that is told then has more than ten times the fetches of the second.

Pure bookkeeping: times come in as numbers, and a step that has ended goes out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.measure.batch_counts import BatchCount
from fast_axolotl.measure.events import CudaEvents, EventPair
from fast_axolotl.record.schema import PhaseName

WARMUP_STEPS = 5
"""Steps in which caches fill, kernels are chosen and memory is taken."""

_MOST_FETCHES = 4096
"""Fetches after which a step ends though nobody told its end, so that memory stays bounded. Those
before the first step that is told are only added up."""

_LEAST_TOLD, _LOST_FACTOR = 3, 16
"""Steps told, and times the fetches of one that come without another, for no more to be told."""

_SKIPPING_FACTOR = 10
"""A first step with more than so many times the fetches of the second has skipped batches: fewer
may have been fetched ahead, or belong to steps that a gradient scaler left out."""

Fetch = tuple[float, EventPair | None]
"""Seconds the host waited, events around it."""


@dataclass(slots=True)
class Span:
    """A stretch of time that is no training."""

    name: str
    seconds: float
    """Of the host; once the events were read, of the device."""
    pair: EventPair | None = None
    is_inside: bool = True
    """Whether it lies within the step's time, and so is taken out of it."""


@dataclass(slots=True)
class Step:
    """One optimizer step: open until its end is known, then waiting for its events."""

    start: float
    first_fetch: int
    phase: PhaseName = "warmup"
    spans: list[Span] = field(default_factory=list)
    number: int = 0
    end: float = 0.0
    told_at: float | None = None
    fetches: list[Fetch] = field(default_factory=list)
    device_waits: list[float] | None = None
    """Of every fetch, once the events were read; ``None`` where one is missing."""
    device_wait_seconds: float | None = None
    """Time the device had nothing to run because the host waited for data; likewise."""
    others: list[Fetch] = field(default_factory=list)
    """Waits that gave no batch: the end of an epoch, a loader that raised."""
    counts: list[BatchCount] = field(default_factory=list)
    """Of every batch; complete once the step is folded."""
    told: BatchCount | None = None
    """Tokens that the loop counted itself."""
    waits_by_cause: Counter[str] = field(default_factory=Counter)
    """Host waits with which an epoch or an iterator began."""
    depth_sum: int = 0
    depth_count: int = 0
    last_event: Any = None

    @property
    def host_wait_seconds(self) -> float:
        """Time the host waited for data."""
        return sum(seconds for seconds, _ in (*self.fetches, *self.others))

    @property
    def removed_seconds(self) -> float:
        """What is taken out of the step's time."""
        return sum(span.seconds for span in self.spans if span.is_inside)

    def take_in(self, spans: list[Span]) -> None:
        """Add spans that are reported with the step."""
        self.spans += spans
        for span in spans:
            if span.pair is not None:
                self.last_event = span.pair[1]

    def is_ready(self, events: CudaEvents | None) -> bool:
        """Whether the device has reached the step's last event."""
        return events is None or self.last_event is None or events.has_passed(self.last_event)

    def read_events(self, events: CudaEvents | None) -> None:
        """Read all events, which must have passed; those that have not are missing."""
        if events is None or self.last_event is None:
            return
        pairs = [pair for _, pair in (*self.fetches, *self.others)]
        waits = [events.seconds(pair) for pair in pairs if pair is not None]
        known = [wait for wait in waits if wait is not None]
        if len(known) == len(pairs):
            self.device_waits, self.device_wait_seconds = known[: len(self.fetches)], sum(known)
        for span in self.spans:
            found = None if span.pair is None else events.seconds(span.pair)
            span.seconds = span.seconds if found is None else found
            span.pair = None
        self.last_event = None


class StepTracker:
    """Sorts fetches, ends of steps and spans into steps."""

    def __init__(
        self, *, accumulation: int = 1, is_told: bool = False, origin: float = 0.0
    ) -> None:
        self.num_fetches = 0
        self.num_steps = 0
        """Steps that have ended."""
        self.has_begun = False
        """Whether a fetch was ever begun."""
        self.is_new_epoch = False
        """Whether the next fetch is the first of another epoch."""
        self.waits_since: float | None = None
        """When the loop over the loader ended, and waiting for the next one's first batch began."""
        self.cause = ""
        """What begins with the fetch under way: an epoch, or an iterator after one that gave a
        single batch."""
        self._accumulation = accumulation
        self._is_told = is_told
        self._fetches_at_tell: list[int] = []
        self._was_lost = False
        """Whether steps were counted by fetches once, because none was told any more."""
        self.note = ""
        """What the record is to say about it."""
        self._origin = origin
        self._warm_steps = 0
        self._open: Step | None = None
        self._loop_start = 0
        self._later_spans: list[Span] = []
        """Those that began after the open step had ended, or while none was open."""
        self.early_waits: list[Fetch] = []
        """Waits between two loops, before a span. They count once a fetch follows."""

    def begin_fetch(self, now: float) -> Step | None:
        """A fetch begins; the step that ends with it, if one does."""
        since, self.waits_since = self.waits_since, None
        if self.is_new_epoch:
            self.cause = "epoch"
        elif since is not None and self.num_fetches:
            self.cause = "iterator"
        self.has_begun, self.is_new_epoch = True, False
        start = now if since is None else since
        if since is not None:
            self._loop_start = self.num_fetches
        step, ended = self._open, None
        if step is None:
            step = self._open = self._new(start)
        else:
            self._find_lost(len(step.fetches))
            is_full = len(step.fetches) >= (_MOST_FETCHES if self._is_told else self._accumulation)
            if is_full and self._is_told and not self._fetches_at_tell:
                # A resumed run skips batches: before the first step is told there is none.
                step.others = [(step.host_wait_seconds, None)]
                step.fetches.clear()
                is_full = False
            is_over = is_full or step.told_at is not None
            if since is None or not is_over:
                step.take_in(self._take_later_spans())
            if is_over:
                ended = self._end(step, start)
                step = self._open = self._new(start)
        waits, self.early_waits = self.early_waits, []
        for host_wait_seconds, pair in waits:
            self.fail_fetch(host_wait_seconds, pair)
            step.waits_by_cause["epoch"] += host_wait_seconds  # type: ignore[assignment]
        return ended

    def end_fetch(
        self, host_wait_seconds: float, pair: EventPair | None, counted: BatchCount
    ) -> None:
        """The fetch that was begun has given a batch."""
        step = self._open
        assert step is not None
        if self.cause:
            step.waits_by_cause[self.cause] += host_wait_seconds  # type: ignore[assignment]
            self.cause = ""
        step.fetches.append((host_wait_seconds, pair))
        if pair is not None:
            step.last_event = pair[1]
        step.counts.append(counted)
        self.num_fetches += 1

    def fail_fetch(self, host_wait_seconds: float, pair: EventPair | None) -> None:
        """A wait that gave no batch, and the loop may go on."""
        step = self._open
        assert step is not None
        step.others.append((host_wait_seconds, pair))
        if pair is not None:
            step.last_event = pair[1]

    def leave(self, now: float) -> None:
        """The loop over the loader has ended: from here on the next one's first batch is due."""
        if self.waits_since is None:
            step = self._open
            self.waits_since = now if step is None or step.told_at is None else step.told_at
            # A loop may make an iterator for every batch: that is no epoch.
            self.is_new_epoch = self.num_fetches > self._loop_start + 1

    def tell(self, now: float) -> Step | None:
        """The trainer says that a step has ended; the one before it, where no fetch ended that."""
        if not self._is_told and not self._was_lost:
            # What was taken for steps until now were fetches of this one: warm up from here.
            self._warm_steps = 0
        self._is_told = True
        if len(self._fetches_at_tell) <= _LEAST_TOLD:
            self._fetches_at_tell.append(self.num_fetches)
        ended = None
        step = self._open
        if step is None:
            step = self._open = self._new(self._origin)
        elif step.told_at is not None:
            # What came after the end was told lies in the step that follows.
            ended = self._end(step, step.told_at)
            step = self._open = self._new(step.told_at)
        step.told_at = now
        if self.waits_since is not None:
            # The last step had its batch already: the wait begins with its end.
            self.waits_since = now
            self.early_waits.clear()
        return ended

    def find_skipped(self) -> int:
        """Batches that were read over before the first step, found out as the second is told."""
        if len(self._fetches_at_tell) != 2:
            return 0
        first, second = self._fetches_at_tell
        per_step = second - first
        return first - per_step if first > _SKIPPING_FACTOR * per_step > 0 else 0

    def add_tokens(self, told: BatchCount) -> None:
        """Tokens that the loop counted itself."""
        if self._open is None:
            self._open = self._new(self._origin)
        before = self._open.told
        self._open.told = told if before is None else before + told

    def add_span(self, name: str, seconds: float, pair: EventPair | None) -> None:
        """A span has ended. One outside of any step is reported with the next."""
        step = self._open
        if step is None:
            self._later_spans.append(Span(name, seconds, is_inside=False))
        elif step.told_at is not None or self.waits_since is not None:
            self._later_spans.append(Span(name, seconds, pair))
        else:
            step.take_in([Span(name, seconds, pair)])

    def see_queue(self, depth: int | None) -> None:
        """How many batches were ready when the fetch began."""
        if depth is not None and self._open is not None:
            self._open.depth_sum += depth
            self._open.depth_count += 1

    def finish(self) -> Step | None:
        """The run has ended. A step of which no end was told or fetched is left out."""
        step, self._open = self._open, None
        if step is None or step.told_at is None:
            return None
        later = self._take_later_spans()
        for span in later:
            span.is_inside = False
        step.take_in(later)
        return self._end(step, step.told_at)

    @property
    def is_step_due(self) -> bool:
        """Whether batches were fetched whose step is not told yet: the last one of an epoch goes on
        where a trainer finds the loader exhausted ahead of it."""
        step = self._open
        return self._is_told and step is not None and bool(step.fetches) and step.told_at is None

    def _find_lost(self, num_fetches: int) -> None:
        """Count steps by fetches, once far more have come than a step has: steps were told and are
        not any more, as where a CUDA graph replays them."""
        told = self._fetches_at_tell
        if not self._is_told or self._was_lost or len(told) < _LEAST_TOLD:
            return
        per_step = max(1, told[-1] - told[-2])
        if num_fetches > _LOST_FACTOR * (per_step + 1):
            self._is_told, self._was_lost, self._accumulation = False, True, per_step
            self.note = (
                "the optimizer is not called any more (a CUDA graph?): steps are counted by fetches"
            )

    def _new(self, start: float) -> Step:
        step = Step(start, self.num_fetches)
        step.take_in(self._take_later_spans())
        return step

    def _take_later_spans(self) -> list[Span]:
        later, self._later_spans = self._later_spans, []
        return later

    def _end(self, step: Step, end: float) -> Step:
        step.end = max(end, step.start)
        step.number = self.num_steps
        if self._warm_steps >= WARMUP_STEPS:
            step.phase = "steady"
        self.num_steps += 1
        self._warm_steps += 1
        return step
