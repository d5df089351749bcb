"""Sum steps over about a second, and keep running totals for the trainer's log.

The host runs ahead of a device. So a step that has ended on the host waits in a queue until the
last event recorded in it has passed, which is asked later, and is then folded into a block. Steps
are folded many at a time, once a second or every 64: between two batches of a training run caches
are cold, and what is done once for many steps costs a fifth of what it costs for each. At most 256
wait: beyond that the oldest goes without its device times rather than memory growing.

A block never holds steps of two phases, nor steps with and without device times. Blocks grow with
the age of the run, from a second to a minute: a day of 50 ms steps takes some 2,700 lines and 6 MB.
Where there are several ranks, the wait of every single step is kept as a byte, so that the steps of
the ranks can be laid side by side however long the run is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fast_axolotl.measure.batch_counts import BatchCount, BatchCounter
from fast_axolotl.measure.events import CudaEvents, EventPair, explain_no_events
from fast_axolotl.measure.steps import Step
from fast_axolotl.measure.writers import Journal
from fast_axolotl.record import Histogram, StepBlock
from fast_axolotl.record.arithmetic import ratio
from fast_axolotl.record.schema import COUNTED, PhaseName
from fast_axolotl.record.waits import WaitTotals, encode_waits

_FOLD_EVERY_STEPS = 64
_MOST_WAITING_STEPS = 256
"""A device lags a few steps at most, since its launch queue is bounded."""
_SETTLE_SECONDS = 2.0
"""How long the end of a run waits for the device to reach the last events."""

_LEAST_BLOCK_SECONDS, _MOST_BLOCK_SECONDS = 1.0, 60.0
_BLOCK_SHARE = 1 / 300
"""Of the run's age, that a block is long."""
_MOST_SINGLES = 64

_RATES = {
    "samples_per_second": "samples",
    "rows_per_second": "rows",
    "tokens_per_second": "real_tokens",
    "trainable_tokens_per_second": "trainable_tokens",
    "padded_tokens_per_second": "padded_tokens",
    "bytes_per_second": "num_bytes",
}
"""Rate in a trainer's log → what is counted for it."""


class _Block:
    """The steps of the block that is being filled."""

    def __init__(self, first: Step, *, with_waits: bool) -> None:
        self.first = self.last = first
        self.step_waits: list[float] | None = [] if with_waits else None
        """Of every single step: of the device where it is known, else of the host."""
        self.waits = WaitTotals()
        self.counted: BatchCount | None = None
        self.spans: dict[str, float] = {}
        self.depth_sum = self.depth_count = 0
        self.waits_by_cause: Counter[str] = Counter()
        self.host_waits, self.device_waits = Histogram(), Histogram()
        self.step_times = Histogram()
        self.singles: list[tuple[float, float, float]] = []
        """Wall time, host and device wait of every step, as long as they are few."""

    def add(self, step: Step, wall: float) -> None:
        """Add one step."""
        host_wait, device_wait = step.host_wait_seconds, step.device_wait_seconds
        self.waits.add(wall, host_wait, device_wait, fetches=len(step.fetches))
        self.last = step
        for counted in step.counts:
            self.counted = counted if self.counted is None else self.counted + counted
        self.depth_sum += step.depth_sum
        self.depth_count += step.depth_count
        for span in step.spans:
            self.spans[span.name] = self.spans.get(span.name, 0.0) + span.seconds
        self.waits_by_cause.update(step.waits_by_cause)
        self.step_times.add(wall)
        if len(self.singles) <= _MOST_SINGLES:
            self.singles.append((_round(wall), _round(host_wait), _round(device_wait or 0.0)))
        if self.step_waits is not None:
            self.step_waits.append(host_wait if device_wait is None else device_wait)
        for wait_seconds, _ in step.fetches:
            self.host_waits.add(wait_seconds)
        for wait_seconds in step.device_waits or ():
            self.device_waits.add(wait_seconds)

    def line(self, t: float, *, with_singles: bool) -> StepBlock:
        """The line of the steps so far."""
        waits, counted = self.waits, self.counted or BatchCount()
        has_device = self.first.device_waits is not None
        walls = hosts = devices = None
        if with_singles and waits.steps <= _MOST_SINGLES:
            walls, hosts, devices = zip(*self.singles, strict=True)
        return StepBlock(
            t=t,
            phase=self.first.phase,
            first_step=self.first.number,
            steps=waits.steps,
            first_fetch=self.first.first_fetch,
            fetches=waits.fetches,
            wall_seconds=_round(waits.wall_seconds),
            host_wait_seconds=_round(waits.host_wait_seconds),
            device_wait_seconds=_round(waits.device_wait_seconds) if has_device else None,
            **{name: getattr(counted, name) for name in COUNTED},
            sequence_tokens=counted.sequence_tokens or None,
            sequence_squares=counted.sequence_squares or None,
            spans={name: _round(seconds) for name, seconds in self.spans.items()},
            queue_depth=_round(self.depth_sum / self.depth_count) if self.depth_count else None,
            waits_by_cause={name: _round(wait) for name, wait in self.waits_by_cause.items()},
            step_waits="" if self.step_waits is None else encode_waits(self.step_waits),
            host_waits=self.host_waits.written(),
            device_waits=self.device_waits.written() if has_device else None,
            step_times=self.step_times.written(),
            walls=walls,
            hosts=hosts,
            devices=devices if has_device else None,
        )


class BlockBuilder:
    """Records events, folds the steps whose events have passed, and writes blocks of them."""

    def __init__(
        self, journal: Journal, counter: BatchCounter, find_events: Callable[[], CudaEvents | None]
    ) -> None:
        self.take_phases: Callable[[], dict[str, float]] = dict
        """Seconds by what looks at the stack have seen since the last call."""
        self._journal = journal
        self._counter = counter
        self._find_events = find_events
        self._events: CudaEvents | None = None
        self._is_sought = True
        """Whether to look for a device: once for every block until there is one."""
        self._steps: deque[Step] = deque()
        """Those that have ended on the host."""
        self._num_new = 0
        self._block_due = float("-inf")
        self._block: _Block | None = None
        self._phase: PhaseName | None = None
        self._totals, self._taken = WaitTotals(), WaitTotals()
        """Of this phase's blocks that are written; and of all its steps, when the figures of an
        interval were last taken."""
        self._owed_seconds = 0.0

    @property
    def block_seconds(self) -> float:
        """How long a block is by now."""
        share = self._journal.since_start() * _BLOCK_SHARE
        return min(max(_LEAST_BLOCK_SECONDS, share), _MOST_BLOCK_SECONDS)

    @property
    def no_device_reason(self) -> str:
        """Why there is no device that could be timed; empty where there is one."""
        return explain_no_events() if self._events is None else self._events.failure

    def record(self) -> Any:
        """An event behind all that is queued on the device; ``None`` where there is no device."""
        if self._events is None and self._is_sought:
            self._is_sought = False
            self._events = self._find_events()
        return None if self._events is None else self._events.record()

    def pair(self, first: Any) -> EventPair | None:
        """The event recorded earlier, and one recorded now."""
        if first is None or self._events is None:
            return None
        last = self._events.record()
        return None if last is None else (first, last)

    def wait_pair(self, first: Any) -> EventPair | None:
        """The events around a wait that has ended now.

        A device that has not reached the first one yet was busy all the while. Then that event
        stands for both: asking for it costs a fraction of recording another.
        """
        if first is not None and self._events is not None and not self._events.has_passed(first):
            return first, first
        return self.pair(first)

    def follow(self) -> None:
        """A step has been queued on the current stream of the device."""
        if self._events is not None:
            self._events.follow()

    def add(self, step: Step) -> None:
        """A step has ended on the host."""
        self._steps.append(step)
        self._num_new += 1
        if step.end >= self._block_due:
            self.flush()
            self._block_due = step.end + self.block_seconds
        elif self._num_new >= _FOLD_EVERY_STEPS:
            self.fold()

    def fold(self, *, all_steps: bool = False) -> None:
        """Fold the steps that the device has ended, too; or all."""
        self._num_new = 0
        self._counter.settle()
        steps = self._steps
        while steps and (
            all_steps or len(steps) > _MOST_WAITING_STEPS or steps[0].is_ready(self._events)
        ):
            step = steps.popleft()
            step.read_events(self._events)
            self._fold_step(step)

    def flush(self, *, all_steps: bool = False) -> None:
        """Fold what the device has ended, or all steps, and write it."""
        self.fold(all_steps=all_steps)
        self._write()
        self._is_sought = True

    def finish(self) -> None:
        """Fold and write all steps, and wait a little for the device to end them."""
        events = [step.last_event for step in self._steps if step.last_event]
        if self._events is not None and events:
            self._events.settle(events[-1], _SETTLE_SECONDS)
        self.flush(all_steps=True)

    def close(self) -> None:
        """Let go of the device and of all events."""
        self._steps.clear()
        if self._events is not None:
            self._events.close()
        self._events = None

    def leave_out(self, num_skipped: int, at: float, why: str) -> None:
        """So many batches were read over before the training began: they are start-up."""
        self.flush()
        done = "skipped" if why == "resume" else "evaluated"
        text = f"about {num_skipped:,} batches were {done} before the first step"
        self._journal.mark(why, at=at, text=text, fetch=num_skipped)
        self._totals, self._taken = WaitTotals(), WaitTotals()

    def current(self) -> dict[str, float]:
        """The figures so far: of the steady phase, else of the warm-up."""
        self._taken, before = WaitTotals(), self._taken
        found = self.take_interval()
        self._taken = before
        return found

    def take_interval(self) -> dict[str, float]:
        """The figures since the last call, of the present phase."""
        whole = self._totals.since(WaitTotals())
        if self._block is not None:
            whole.add_block(self._block.line(0.0, with_singles=False))
        totals, self._taken = whole.since(self._taken), whole
        if totals.wall_seconds <= 0:
            return {}
        found: dict[str, float | None] = {
            "stall_fraction": totals.stall_fraction,
            "host_stall_fraction": totals.host_stall_fraction,
            "device_stall_fraction": totals.device_stall_fraction,
            "steps_per_second": totals.steps / totals.wall_seconds,
            "is_warming": 1.0 if self._phase == "warmup" else None,
        }
        for rate, name in _RATES.items():
            found[rate] = ratio(totals.count(name), totals.wall_seconds)
        return {name: value for name, value in found.items() if value is not None}

    def _fold_step(self, step: Step) -> None:
        """Fold one step in, beside others of its kind."""
        block = self._block
        has_device = step.device_waits is not None
        if block is not None and (
            step.phase != block.last.phase or has_device != (block.last.device_waits is not None)
        ):
            self._write()
            block = None
        if step.phase != self._phase:
            self._phase = step.phase
            self._totals, self._taken = WaitTotals(), WaitTotals()
        if block is None:
            block = self._block = _Block(step, with_waits=self._journal.start.world_size > 1)
        if (told := step.told) is not None:
            # What the loop told takes the place of what was counted.
            counted = sum(step.counts[1:], step.counts[0]) if step.counts else BatchCount()
            counted.real_tokens = told.real_tokens
            if told.trainable_tokens is not None:
                counted.trainable_tokens = told.trainable_tokens
            if told.padded_tokens is not None:
                counted.padded_tokens = told.padded_tokens
            step.counts = [counted]
        # Spans are taken out of a step's time. A device may still be busy with a span when the host
        # is steps ahead; what is taken out of one step then is owed by the next.
        wall = step.end - step.start - step.removed_seconds - self._owed_seconds
        self._owed_seconds = max(0.0, -wall)
        block.add(step, max(0.0, wall))

    def _write(self) -> None:
        """Write what there is."""
        block, self._block = self._block, None
        if block is None:
            return
        journal = self._journal
        line = block.line(journal.since_start(block.last.end), with_singles=journal.has_room)
        phases = {name: round(seconds, 3) for name, seconds in self.take_phases().items()}
        journal.write(replace(line, phases=phases))
        self._totals.add_block(line)


def _round(seconds: float) -> float:
    return round(seconds, 6)
