"""A clock, a device and loops that several tests of the meter drive: no time passes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fast_axolotl.measure import Meter, measure
from fast_axolotl.measure.events import CudaEvents
from fast_axolotl.record import RankRecord, StepBlock, read_run


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Device:
    """A stream: work queued on it runs in order, and the host may be so far ahead of it."""

    def __init__(self, clock: Clock, most_ahead: float = 0.2) -> None:
        self.failure = ""
        self.clock = clock
        self.most_ahead = most_ahead
        self.free_at = clock.now
        self.num_recorded = 0

    def run(self, seconds: float) -> None:
        """Queue work; the host blocks where the queue is full."""
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.clock.now = max(self.clock.now, self.free_at - self.most_ahead)

    def synchronise(self) -> None:
        self.clock.now = max(self.clock.now, self.free_at)

    def follow(self) -> None:
        pass

    def record(self) -> float:
        self.num_recorded += 1
        return max(self.clock.now, self.free_at)

    def has_passed(self, event: float) -> bool:
        return event <= self.clock.now

    def seconds(self, pair: tuple[float, float]) -> float | None:
        return pair[1] - pair[0] if pair[1] <= self.clock.now else None

    def settle(self, event: float, seconds: float) -> None:
        self.clock.now = max(self.clock.now, min(event, self.clock.now + seconds))

    def close(self) -> None:
        pass


def open_meter(
    folder: Path,
    clock: Clock,
    *,
    device: CudaEvents | None = None,
    wall_clock: Callable[[], float] | None = None,
    **options: Any,
) -> Meter:
    """A meter that lives in the fake time and looks at no process."""
    return measure(
        folder,
        clock=clock,
        wall_clock=wall_clock or clock,
        events=lambda: device,
        sample_system=False,
        environment={},
        **options,
    )


def batches(clock: Clock, count: int, wait: float | Callable[[int], float], size: int = 4) -> Any:
    """A loader that takes so long for every batch, and can be iterated again."""

    class Loader:
        def __iter__(self) -> Iterator[list[str]]:
            for number in range(count):
                clock.sleep(wait(number) if callable(wait) else wait)
                yield ["row"] * size

    return Loader()


def read_rank(folder: Path, rank: int = 0) -> RankRecord:
    return read_run(folder).ranks[rank]


def steady(folder: Path) -> list[StepBlock]:
    return [block for block in read_rank(folder).blocks if block.phase == "steady"]


def stall(blocks: list[StepBlock]) -> float:
    """Host waits over wall time."""
    return sum(one.host_wait_seconds for one in blocks) / sum(one.wall_seconds for one in blocks)


def device_stall(blocks: list[StepBlock]) -> float:
    waits = [one.device_wait_seconds for one in blocks]
    assert None not in waits
    return sum(wait or 0.0 for wait in waits) / sum(one.wall_seconds for one in blocks)
