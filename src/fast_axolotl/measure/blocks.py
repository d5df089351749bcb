"""From steps to lines: sums over about a second, and the running totals for a trainer's log.

A block never holds steps of two phases, nor steps with and without device times. Blocks are a
second long until the record has 10 MB, and then longer by a second a megabyte: a day of 50 ms steps
stays near 25 MB, a week under 50.

A slow fetch is one whose wait is an outlier by the modified z-score (3.5; Iglewicz and Hoaglin,
1993) against all waits of the run so far, at least twice their median, and at least a twentieth of
a mean step: shorter ones cannot matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fast_axolotl.measure.counting import BatchCount
from fast_axolotl.measure.journal import Journal
from fast_axolotl.measure.steps import Step
from fast_axolotl.record import Histogram, SlowFetch, StepBlock
from fast_axolotl.record.schema import PhaseName

__all__ = ["BlockBuilder", "Totals"]

_BLOCK_SECONDS = 1.0
_ROOMY_BYTES = 10_000_000
"""Size of the record up to which blocks are as short as they can be."""
_SINGLES_BYTES = 16_000_000
"""Size of the record up to which the times of every single step are written."""

_MOST_SINGLES = 64
_MOST_SLOW = 8

_OUTLIER_SCORE = 3.5
_SCORE_SCALE = 0.6745
_LEAST_SLOW_SECONDS = 1e-4
_SLOW_SHARE_OF_STEP = 0.05


class Totals:
    """Sums over steps."""

    __slots__ = ("counted", "device", "fetches", "host", "num_device_steps", "steps", "wall")

    def __init__(self) -> None:
        self.steps = 0
        self.fetches = 0
        self.wall = 0.0
        self.host = 0.0
        self.device = 0.0
        self.num_device_steps = 0
        self.counted: BatchCount | None = None

    def add(self, step: Step, wall: float, counted: BatchCount | None) -> None:
        """Add one step."""
        self.steps += 1
        self.fetches += len(step.fetches)
        self.wall += wall
        self.host += step.host_seconds
        device = step.device_seconds
        if device is not None:
            self.device += device
            self.num_device_steps += 1
        if counted is not None:
            self.counted = counted if self.counted is None else self.counted + counted

    def figures(self) -> dict[str, float]:
        """The ratios that are known."""
        if self.wall <= 0:
            return {}
        host = self.host / self.wall
        found = {"stall_fraction": host, "host_stall_fraction": host}
        if self.num_device_steps == self.steps:
            found["stall_fraction"] = found["device_stall_fraction"] = self.device / self.wall
        found["steps_per_second"] = self.steps / self.wall
        if self.counted is not None:
            rates = {
                "samples_per_second": self.counted.samples,
                "rows_per_second": self.counted.rows,
                "tokens_per_second": self.counted.real,
                "trainable_tokens_per_second": self.counted.trainable,
                "padded_tokens_per_second": self.counted.padded,
                "bytes_per_second": self.counted.num_bytes,
            }
            found |= {key: value / self.wall for key, value in rates.items() if value is not None}
        return found


class _Block:
    """The steps of the block that is being filled."""

    def __init__(self, first: Step) -> None:
        self.first = first
        self.last = first
        self.totals = Totals()
        self.spans: dict[str, float] = {}
        self.depth_sum = 0
        self.depth_count = 0
        self.host_waits = Histogram()
        self.device_waits = Histogram()
        self.step_times = Histogram()
        self.slow: list[tuple[float, int, int]] = []
        self.walls: list[float] = []
        self.hosts: list[float] = []
        self.devices: list[float] = []

    def add(self, step: Step, wall: float, counted: BatchCount | None) -> None:
        self.last = step
        self.totals.add(step, wall, counted)
        self.depth_sum += step.depth_sum
        self.depth_count += step.depth_count
        for span in step.spans:
            self.spans[span.name] = self.spans.get(span.name, 0.0) + span.seconds
        if step.gap_seconds:
            self.spans["epoch"] = self.spans.get("epoch", 0.0) + step.gap_seconds
        self.step_times.add(wall)
        for _, waited, _ in step.fetches:
            self.host_waits.add(waited)
        for wait in step.device_waits or ():
            self.device_waits.add(wait)
        if len(self.walls) <= _MOST_SINGLES:
            self.walls.append(wall)
            self.hosts.append(step.host_seconds)
            self.devices.append(step.device_seconds or 0.0)

    def add_slow(self, fetch: int, row: int, seconds: float) -> None:
        """Keep the slowest."""
        if len(self.slow) < _MOST_SLOW:
            heapq.heappush(self.slow, (seconds, fetch, row))
        else:
            heapq.heappushpop(self.slow, (seconds, fetch, row))

    def line(self, t: float, *, with_singles: bool) -> StepBlock:
        totals = self.totals
        counted = totals.counted or BatchCount()
        has_device = self.first.device_waits is not None
        with_singles = with_singles and totals.steps <= _MOST_SINGLES
        slow = sorted(self.slow, key=lambda one: one[1])
        return StepBlock(
            t=t,
            phase=self.first.phase,
            first_step=self.first.number,
            steps=totals.steps,
            first_fetch=self.first.first_fetch,
            fetches=totals.fetches,
            wall_seconds=_round(totals.wall),
            host_wait_seconds=_round(totals.host),
            device_wait_seconds=_round(totals.device) if has_device else None,
            samples=counted.samples,
            rows=counted.rows,
            real_tokens=counted.real,
            trainable_tokens=counted.trainable,
            padded_tokens=counted.padded,
            num_bytes=counted.num_bytes,
            sequences=counted.sequences or None,
            sequence_tokens=counted.sequence_tokens or None,
            sequence_squares=counted.sequence_squares or None,
            spans={name: _round(seconds) for name, seconds in self.spans.items()},
            queue_depth=_round(self.depth_sum / self.depth_count) if self.depth_count else None,
            host_waits=self.host_waits.take(),
            device_waits=self.device_waits.take() if has_device else None,
            step_times=self.step_times.take(),
            slow=tuple(
                SlowFetch(fetch=fetch, row=row, seconds=_round(seconds))
                for seconds, fetch, row in slow
            ),
            walls=tuple(map(_round, self.walls)) if with_singles else None,
            hosts=tuple(map(_round, self.hosts)) if with_singles else None,
            devices=tuple(map(_round, self.devices)) if with_singles and has_device else None,
        )


class BlockBuilder:
    """Folds steps into blocks and writes them to the journal."""

    def __init__(self, journal: Journal, begin_steady: Callable[[], None]) -> None:
        self.phase: PhaseName | None = None
        """Phase of the last step."""
        self._begin_steady = begin_steady
        self._journal = journal
        self._block: _Block | None = None
        self._totals: dict[PhaseName, Totals] = {}
        self._waits = Histogram()
        self._slow_seconds: float | None = None
        self._owed_seconds = 0.0

    @property
    def block_seconds(self) -> float:
        """How long a block is by now."""
        return _BLOCK_SECONDS + max(0, self._journal.num_bytes - _ROOMY_BYTES) / 1_000_000

    def add(self, step: Step) -> None:
        """Fold one step in, beside others of its kind."""
        block = self._block
        if block is not None and not _belongs(step, block.last):
            self.flush()
            block = None
        if step.phase == "steady" and self.phase == "warmup":
            self._begin_steady()
        if block is None:
            block = self._block = _Block(step)
        wall = self._take_wall(step)
        counted = _replace_told(step)
        self.phase = step.phase
        self._totals.setdefault(step.phase, Totals()).add(step, wall, counted)
        block.add(step, wall, counted)
        self._look_for_slow(block, step)

    def flush(self) -> None:
        """Write what there is."""
        block, self._block = self._block, None
        if block is None:
            return
        self._journal.check_date()
        self._journal.write(
            block.line(
                self._journal.since_start(block.last.end),
                with_singles=self._journal.num_bytes < _SINGLES_BYTES,
            )
        )
        self._slow_seconds = self._find_slow_seconds()

    def current(self) -> dict[str, float]:
        """The figures so far: of the steady phase, else of the warm-up."""
        steady = self._totals.get("steady")
        if steady is not None:
            return steady.figures()
        warmup = self._totals.get("warmup")
        return {} if warmup is None else warmup.figures() | {"is_warming": 1.0}

    def _take_wall(self, step: Step) -> float:
        """A step's time without its spans. A device may still be busy with a span when the host is
        steps ahead; what is taken out of one step then is owed by the next."""
        wall = step.end - step.start - step.removed_seconds - self._owed_seconds
        self._owed_seconds = max(0.0, -wall)
        return max(0.0, wall)

    def _look_for_slow(self, block: _Block, step: Step) -> None:
        for number, (row, waited, _) in enumerate(step.fetches):
            if step.device_waits is not None:
                waited = step.device_waits[number]
            self._waits.add(waited)
            if self._slow_seconds is not None and waited >= self._slow_seconds:
                block.add_slow(step.first_fetch + number, row, waited)

    def _find_slow_seconds(self) -> float | None:
        """From which wait on a fetch is slow, by all fetches that are no warm-up."""
        middle = self._waits.quantile(0.5)
        totals = self._totals.get("steady") or self._totals.get("warmup")
        if middle is None or totals is None:
            return None
        spread = _find_spread(self._waits, middle)
        return max(
            middle + _OUTLIER_SCORE * spread / _SCORE_SCALE,
            2 * middle,
            _SLOW_SHARE_OF_STEP * totals.wall / totals.steps,
            _LEAST_SLOW_SECONDS,
        )


def _belongs(step: Step, other: Step) -> bool:
    has_device = step.device_waits is not None
    return step.phase == other.phase and has_device == (other.device_waits is not None)


def _replace_told(step: Step) -> BatchCount | None:
    """What was counted, with what was told in its place."""
    if step.told_tokens is None:
        return step.counted
    counted = step.counted or BatchCount()
    real, trainable, padded = step.told_tokens
    counted.real = real
    counted.trainable = counted.trainable if trainable is None else trainable
    counted.padded = counted.padded if padded is None else padded
    return counted


def _find_spread(waits: Histogram, middle: float) -> float:
    """Median of the distances from the median."""
    distances = Histogram()
    for seconds, count in waits.items():
        distances.add(abs(seconds - middle), count)
    return distances.quantile(0.5) or 0.0


def _round(seconds: float) -> float:
    return round(seconds, 6)
