"""Decode ahead in threads, in order, within a budget of bytes.

A worker takes the next item under a lock (splitting is sequential and may read or decompress),
then decodes it outside the lock. Results are handed out in the order in which items were taken.
Workers pause while what is decoded or being decoded, the item in the consumer's hands included, is
over the budget; one item is always allowed, so a row larger than the budget still passes. What an
item will take is guessed from its weight and from what the last one made of its own; so only two
are decoded before the first is done.

The threads know only the shared state, never the ``Prefetcher``: when that is closed, dropped or
garbage, they stop after the item in hand. They are daemons, and an interpreter that exits waits for
the items in hand only: a thread that came back from pyarrow later would abort the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fast_axolotl.errors import UsageError

_IN_FLIGHT_FACTOR = 3
"""An item being decoded holds its bytes, its rows, and what the decoder needs between the two;
more where the items before it came to more."""

_EXIT_SECONDS = 10.0
"""How long an exit waits for the items in hand at most; a remote read can hang that long."""

_running: weakref.WeakKeyDictionary[threading.Thread, _Shared] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Slot:
    task: Any
    reserved: int = 0
    done: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Shared:
    """What the threads and the consumer share."""

    tasks: Iterator[Any]
    decode: Callable[[Any], tuple[Any, int]]
    budget: int
    taking: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    slots: deque[_Slot] = field(default_factory=deque)
    reserved: int = 0
    factor: float | None = None
    """What an item being decoded takes, in multiples of its weight; not known before the first."""
    stopped: bool = False
    """Nothing more is taken: it was closed, or there is nothing more, or an error."""
    process: int = field(default_factory=os.getpid)

    def stop(self) -> None:
        if os.getpid() != self.process:
            return  # a forked child has none of the threads, and one may have held the lock
        with self.changed:
            self.stopped = True
            self.slots.clear()
            self.changed.notify_all()

    def work(self) -> None:
        """Takes and decodes until there is nothing more."""
        while True:
            with self.taking:
                slot = self._take()
            if slot is None:
                return
            size = 0
            try:
                if slot.error is None:
                    slot.result, size = self.decode(slot.task)
                    self.factor = max(_IN_FLIGHT_FACTOR, size / max(1, slot.task.weight))
            except BaseException as caught:  # noqa: BLE001 - raised again by the consumer
                slot.error = caught
            with self.changed:
                self.reserved += size - slot.reserved
                self.stopped |= slot.error is not None  # nobody asks for what comes after it
                slot.reserved, slot.done = size, True
                self.changed.notify_all()
            del slot

    def _take(self) -> _Slot | None:
        """The next task, once there is room for it; or the error of taking it."""
        with self.changed:
            while self.reserved and not self.stopped and self.reserved >= self.budget:
                self.changed.wait()
            if self.stopped:
                return None
        slot = _Slot(None)
        try:
            slot.task = next(self.tasks, None)
        except BaseException as caught:  # noqa: BLE001 - raised again by the consumer
            slot.error = caught
        with self.changed:
            if slot.task is not None:
                guess = self.budget // 2
                slot.reserved = int(slot.task.weight * self.factor) if self.factor else guess
            elif slot.error is None:
                self.stopped = True
                self.changed.notify_all()
                return None
            self.reserved += slot.reserved
            if not self.stopped:  # it may have been closed meanwhile
                self.slots.append(slot)
        return slot


class Prefetcher:
    """Iterates (task, result) in order.

    A task has a ``weight``, known before; ``decode`` returns a result and its size in bytes.
    """

    def __init__(
        self,
        tasks: Iterator[Any],
        decode: Callable[[Any], tuple[Any, int]],
        *,
        num_threads: int,
        budget: int,
    ) -> None:
        self._shared = _Shared(tasks, decode, budget)
        self._held = 0
        self.close = weakref.finalize(self, self._shared.stop)
        """Stops the threads; what was read ahead is dropped."""
        for number in range(num_threads):
            name = f"fast-axolotl-reader-{number}"
            thread = threading.Thread(target=self._shared.work, name=name, daemon=True)
            _running[thread] = self._shared
            thread.start()
        atexit.unregister(_finish)
        atexit.register(_finish)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        shared = self._shared
        if os.getpid() != shared.process:
            raise UsageError("this iterator was created before a fork; create one in this process")
        with shared.changed:
            shared.reserved -= self._held
            self._held = 0
            shared.changed.notify_all()
            while not (shared.slots and shared.slots[0].done):
                if shared.stopped and not shared.slots:
                    raise StopIteration
                shared.changed.wait()
            slot = shared.slots.popleft()
            self._held = slot.reserved
        if isinstance(slot.error, StopIteration):
            # As it is, it would read as the end of the data.
            raise RuntimeError("decoding raised StopIteration") from slot.error
        if slot.error is not None:
            raise slot.error
        return slot.task, slot.result


def _finish() -> None:
    """At exit: stops every thread and waits for it."""
    threads = list(_running.items())
    for _, shared in threads:
        shared.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
