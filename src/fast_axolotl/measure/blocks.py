"""From steps to lines: sums over about a second, and the running totals for a trainer's log.

The host runs ahead of a device. So a step that has ended on the host waits in a queue until the
last event recorded in it has passed, which is asked later, and is then folded into a block. Steps
are folded many at a time, once a second or every 64: between two batches of a training run caches
are cold, and what is done once for many steps costs a fifth of what it costs for each. At most 256
wait: beyond that the oldest goes without its device times rather than memory growing.

A block never holds steps of two phases, nor steps with and without device times. Blocks grow with
the age of the run, from a second to a minute: a day of 50 ms steps takes some 2,700 lines and 4 MB.
Where there are several ranks, the wait of every single step is kept as a byte, so that the steps of
the ranks can be laid side by side however long the run is.

A slow fetch is one whose wait is an outlier by the modified z-score (3.5; Iglewicz and Hoaglin,
1993) against all waits of the run so far, at least twice their median, and at least a twentieth of
a mean step: shorter ones cannot matter.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fast_axolotl.measure.batch_counts import BatchCount, BatchCounter
from fast_axolotl.measure.events import DeviceEvents, EventPair
from fast_axolotl.measure.journal import Journal
from fast_axolotl.measure.steps import SkippedBatches, Step
from fast_axolotl.record import Histogram, SlowFetch, StepBlock
from fast_axolotl.record.schema import COUNTED, SAMPLED, PhaseName
from fast_axolotl.record.stall import WaitTotals, encode_waits

_FOLD_EVERY_STEPS = 64
_MOST_WAITING_STEPS = 256
"""A device lags a few steps at most, since its launch queue is bounded."""
_SETTLE_SECONDS = 2.0
"""How long the end of a run waits for the device to reach the last events."""

_LEAST_BLOCK_SECONDS, _MOST_BLOCK_SECONDS = 1.0, 60.0
_BLOCK_SHARE = 1 / 300
"""Of the run's age, that a block is long."""
_SINGLES_BYTES = 3_000_000
"""Size of the record up to which the times of every single step are written."""
_HISTOGRAM_SHARE, _HISTOGRAM_SECONDS = 1 / 30, 600.0
"""How long the histograms of waits may wait: so much of the run's age, and at most so long."""

_MOST_SINGLES = 64
_MOST_SLOW = 8

_OUTLIER_SCORE = 3.5
_SCORE_SCALE = 0.6745
_LEAST_SLOW_SECONDS = 1e-4
_SLOW_SHARE_OF_STEP = 0.05
_SLOW_GROWTH = 1.05
"""So much longer must the run be before it is settled anew which waits are slow."""

_RATES = {
    "samples_per_second": "samples",
    "rows_per_second": "rows",
    "tokens_per_second": "real_tokens",
    "trainable_tokens_per_second": "trainable_tokens",
    "padded_tokens_per_second": "padded_tokens",
    "bytes_per_second": "num_bytes",
}
"""Rate in a trainer's log → what is counted for it."""


_WAITS = tuple(one.name for one in fields(WaitTotals))


class _StepSums:
    """Sums over steps: their waits, and what their batches held."""

    __slots__ = ("counted", "waits")

    def __init__(self) -> None:
        self.waits = WaitTotals()
        self.counted: BatchCount | None = None

    def add(self, step: Step, wall: float, host_wait: float, device_wait: float | None) -> None:
        """Add one step and its times, which are sums that both its block and its phase take."""
        self.waits.add(
            fetches=len(step.fetches),
            wall_seconds=wall,
            host_wait_seconds=host_wait,
            device_wait_seconds=device_wait,
        )
        if step.counted is not None:
            self.counted = step.counted if self.counted is None else self.counted + step.counted

    def since(self, earlier: _StepSums) -> _StepSums:
        """What was added since these sums were ``earlier``."""
        later = _StepSums()
        for name in _WAITS:
            value = getattr(self.waits, name) - getattr(earlier.waits, name)
            setattr(later.waits, name, value)
        later.counted = self.counted
        if self.counted is not None and earlier.counted is not None:
            later.counted = self.counted - earlier.counted
        return later

    def figures(self) -> dict[str, float]:
        """The ratios that are known."""
        waits = self.waits
        if waits.wall_seconds <= 0:
            return {}
        found: dict[str, float | None] = {
            "stall_fraction": waits.stall_fraction,
            "host_stall_fraction": waits.host_stall_fraction,
            "device_stall_fraction": waits.device_stall_fraction,
            "steps_per_second": waits.steps / waits.wall_seconds,
        }
        for rate, name in _RATES.items():
            count = None if self.counted is None else getattr(self.counted, name)
            found[rate] = None if count is None else count / waits.wall_seconds
        return {name: value for name, value in found.items() if value is not None}


class _Block(_StepSums):
    """The steps of the block that is being filled."""

    def __init__(self, first: Step) -> None:
        super().__init__()
        self.first = first
        self.last = first
        self.spans: dict[str, float] = {}
        self.depth_sum = 0
        self.depth_count = 0
        self.waits_by_cause: dict[str, float] = {}
        self.produced = 0
        self.producing_seconds = 0.0
        self.step_times = Histogram()
        self.slow: list[tuple[float, int, int]] = []
        """The slowest fetches, a heap: seconds, fetch, row."""
        self.walls: list[float] = []
        self.hosts: list[float] = []
        self.devices: list[float] = []
        self.forward_seconds: float | None = 0.0
        """``None`` where a step has none."""
        self.step_waits: list[float] = []
        """Of every single step: of the device where it is known, else of the host."""

    def add(self, step: Step, wall: float, host_wait: float, device_wait: float | None) -> None:
        super().add(step, wall, host_wait, device_wait)
        self.last = step
        self.depth_sum += step.depth_sum
        self.depth_count += step.depth_count
        for span in step.spans:
            self.spans[span.name] = self.spans.get(span.name, 0.0) + span.seconds
        for cause, seconds in step.waits_by_cause.items():
            self.waits_by_cause[cause] = self.waits_by_cause.get(cause, 0.0) + seconds
        self.produced += step.produced
        self.producing_seconds += step.producing_seconds
        self.step_times.add(wall)
        if len(self.walls) <= _MOST_SINGLES:
            self.walls.append(wall)
            self.hosts.append(host_wait)
            self.devices.append(device_wait or 0.0)
        forward = step.forward_seconds
        if forward is None or self.forward_seconds is None:
            self.forward_seconds = None
        else:
            self.forward_seconds += forward
        self.step_waits.append(host_wait if device_wait is None else device_wait)

    def line(self, t: float, *, with_singles: bool, **values: Any) -> StepBlock:
        waits, counted = self.waits, self.counted or BatchCount()
        counts: dict[str, Any] = {name: getattr(counted, name) for name in COUNTED}
        counts |= {name: getattr(counted, name) or None for name in SAMPLED[:3]}
        has_device = self.first.device_waits is not None
        with_singles = with_singles and waits.steps <= _MOST_SINGLES
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
            **counts,
            spans={name: _round(seconds) for name, seconds in self.spans.items()},
            queue_depth=_round(self.depth_sum / self.depth_count) if self.depth_count else None,
            produced=self.produced if self.producing_seconds else None,
            producing_seconds=_round(self.producing_seconds) if self.producing_seconds else None,
            waits_by_cause={name: _round(wait) for name, wait in self.waits_by_cause.items()},
            forward_seconds=None if self.forward_seconds is None else _round(self.forward_seconds),
            step_times=self.step_times.take(),
            slow=tuple(
                SlowFetch(fetch=fetch, row=row, seconds=_round(seconds))
                for seconds, fetch, row in sorted(self.slow, key=lambda slow: slow[1])
            ),
            walls=tuple(map(_round, self.walls)) if with_singles else None,
            hosts=tuple(map(_round, self.hosts)) if with_singles else None,
            devices=tuple(map(_round, self.devices)) if with_singles and has_device else None,
            **values,
        )


class BlockBuilder:
    """Folds steps into blocks and writes them to the journal."""

    def __init__(self, journal: Journal, begin_steady: Callable[[], None]) -> None:
        self.phase: PhaseName | None = None
        """Phase of the last step."""
        self._begin_steady = begin_steady
        self._journal = journal
        self._block: _Block | None = None
        self._sums = defaultdict[PhaseName, _StepSums](_StepSums)
        self._taken: tuple[PhaseName | None, _StepSums] = (None, _StepSums())
        """The phase and its sums when the figures of an interval were last taken."""
        self._skipped = SkippedBatches()
        self._waits = Histogram()
        self._host_waits = Histogram()
        self._device_waits = Histogram()
        self._histograms_due = 0.0
        self._slow_seconds: float | None = None
        """From which wait on a fetch is slow."""
        self._slow_due = 0
        """The step at which that is settled anew."""
        self._owed_seconds = 0.0

    @property
    def block_seconds(self) -> float:
        """How long a block is by now."""
        share = self._journal.since_start() * _BLOCK_SHARE
        return min(max(_LEAST_BLOCK_SECONDS, share), _MOST_BLOCK_SECONDS)

    def add(self, step: Step) -> None:
        """Fold one step in, beside others of its kind."""
        block = self._block
        has_device = step.device_waits is not None
        if block is not None and (
            step.phase != block.last.phase or has_device != (block.last.device_waits is not None)
        ):
            self.flush()
            block = None
        if step.phase == "steady" and self.phase == "warmup":
            self._begin_steady()
        if block is None:
            block = self._block = _Block(step)
        self.phase = step.phase
        for count in step.counts:
            step.counted = count if step.counted is None else step.counted + count
        if step.told_tokens is not None:
            # What the loop told takes the place of what was counted.
            counted = step.counted = step.counted or BatchCount()
            counted.real_tokens, trainable, padded = step.told_tokens
            if trainable is not None:
                counted.trainable_tokens = trainable
            if padded is not None:
                counted.padded_tokens = padded
        # Spans are taken out of a step's time. A device may still be busy with a span when the host
        # is steps ahead; what is taken out of one step then is owed by the next.
        wall = step.end - step.start - step.removed_seconds - self._owed_seconds
        self._owed_seconds = max(0.0, -wall)
        wall = max(0.0, wall)
        host_wait, device_wait = step.host_wait_seconds, step.device_wait_seconds
        self._sums[step.phase].add(step, wall, host_wait, device_wait)
        block.add(step, wall, host_wait, device_wait)
        for number, (row, wait_seconds, _) in enumerate(step.fetches):
            self._host_waits.add(wait_seconds)
            if step.device_waits is not None:
                wait_seconds = step.device_waits[number]
                self._device_waits.add(wait_seconds)
            self._waits.add(wait_seconds)
            if self._slow_seconds is not None and wait_seconds >= self._slow_seconds:
                heapq.heappush(block.slow, (wait_seconds, step.first_fetch + number, row))
                if len(block.slow) > _MOST_SLOW:
                    heapq.heappop(block.slow)
        num_skipped = self._skipped.add(step, wall)
        if num_skipped:
            self.leave_out(num_skipped, step.end)

    def leave_out(self, num_skipped: int, at: float) -> None:
        """So many batches were read over before the training began: they are start-up."""
        self.flush()
        text = f"about {num_skipped:,} batches were skipped before the first step"
        self._journal.mark("resume", at=at, text=text, fetch=num_skipped)
        self._sums.clear()
        self._taken = (None, _StepSums())
        self._waits, self._host_waits, self._device_waits = Histogram(), Histogram(), Histogram()
        self._slow_due = 0

    def flush(self, *, is_whole: bool = True) -> None:
        """Write what there is, and settle from which wait on a fetch is slow.

        Histograms of waits are long. Unless all there is must be written, they may wait for a
        later block of the same phase.
        """
        block, self._block = self._block, None
        if block is None:
            return
        journal = self._journal
        journal.check_date()
        t = journal.since_start(block.last.end)
        values: dict[str, Any] = {}
        if is_whole or t >= self._histograms_due:
            self._histograms_due = t + min(t * _HISTOGRAM_SHARE, _HISTOGRAM_SECONDS)
            values = {
                "host_waits": self._host_waits.take(),
                "device_waits": self._device_waits.take() or None,
            }
        if journal.world_size > 1 and block.first.phase != "replay":
            values["step_waits"] = encode_waits(block.step_waits)
        with_singles = journal.num_bytes < _SINGLES_BYTES
        journal.write(block.line(t, with_singles=with_singles, **values))
        if block.last.number < self._slow_due:
            return
        self._slow_due = round(_SLOW_GROWTH * block.last.number)
        median = self._waits.quantile(0.5)
        sums = self._sums.get("steady") or self._sums.get("warmup")
        if median is None or sums is None:
            self._slow_seconds = None
            return
        distances = Histogram()
        for seconds, count in self._waits.items():
            distances.add(abs(seconds - median), count)
        spread = distances.quantile(0.5) or 0.0
        self._slow_seconds = max(
            median + _OUTLIER_SCORE * spread / _SCORE_SCALE,
            2 * median,
            _SLOW_SHARE_OF_STEP * sums.waits.wall_seconds / sums.waits.steps,
            _LEAST_SLOW_SECONDS,
        )

    def current(self) -> dict[str, float]:
        """The figures so far: of the steady phase, else of the warm-up."""
        if "steady" in self._sums:
            return self._sums["steady"].figures()
        warmup = self._sums.get("warmup")
        return {} if warmup is None else warmup.figures() | {"is_warming": 1.0}

    def take_interval(self) -> dict[str, float]:
        """The figures since the last call, of the present phase."""
        if self.phase is None or self.phase not in self._sums:
            return {}
        phase, taken = self._taken
        sums = self._sums[self.phase]
        self._taken = (self.phase, sums.since(_StepSums()))
        figures = sums.since(taken if phase == self.phase else _StepSums()).figures()
        return figures | {"is_warming": 1.0} if figures and self.phase == "warmup" else figures


class StepQueue:
    """Records events, and hands on the steps whose events have passed."""

    def __init__(
        self,
        blocks: BlockBuilder,
        counter: BatchCounter,
        find_events: Callable[[], DeviceEvents | None],
    ) -> None:
        self._blocks = blocks
        self._counter = counter
        self._find_events = find_events
        self._events: DeviceEvents | None = None
        self._is_sought = True
        """Whether to look for a device: once for every block until there is one."""
        self._steps: deque[Step] = deque()
        self._num_new = 0
        self._block_due = float("-inf")

    @property
    def no_device_reason(self) -> str:
        """Why there is no device that could be timed; empty where there is one."""
        if self._events is None:
            return "this process has not initialised CUDA, so there is no GPU to time"
        return self._events.failure

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

    def add(self, step: Step) -> None:
        """A step has ended on the host."""
        self._steps.append(step)
        self._num_new += 1
        if step.end >= self._block_due:
            # In an old run histograms of waits may wait, if another step of the phase is there.
            block_seconds = self._blocks.block_seconds
            self.flush(is_whole=block_seconds <= _LEAST_BLOCK_SECONDS)
            self._block_due = step.end + block_seconds
        elif self._num_new >= _FOLD_EVERY_STEPS:
            self.fold()

    def fold(self, *, kept: int = 0, all_steps: bool = False) -> None:
        """Fold the steps that the device has ended, too, but for the last ``kept``; or all."""
        self._num_new = 0
        self._counter.settle()
        steps = self._steps
        while len(steps) > kept and (
            all_steps or len(steps) > _MOST_WAITING_STEPS or steps[0].is_ready(self._events)
        ):
            step = steps.popleft()
            step.read_events(self._events)
            self._blocks.add(step)

    def flush(self, *, is_whole: bool = True) -> None:
        """Fold what the device has ended, and write it."""
        self.fold(kept=0 if is_whole else 1)
        has_more = bool(self._steps) and self._steps[0].phase == self._blocks.phase
        self._blocks.flush(is_whole=is_whole or not has_more)
        self._is_sought = True

    def finish(self) -> None:
        """Fold and write all steps, and wait a little for the device to end them."""
        events = [step.last_event for step in self._steps if step.last_event]
        if self._events is not None and events:
            self._events.settle(events[-1], _SETTLE_SECONDS)
        self.fold(all_steps=True)
        self._blocks.flush()

    def close(self) -> None:
        """Let go of the device and of all events."""
        self._steps.clear()
        if self._events is not None:
            self._events.close()
        self._events = None


def _round(seconds: float) -> float:
    return round(seconds, 6)
