"""Decode ahead in threads, in order, within a budget of bytes.

A worker takes the next item under a lock (splitting is sequential and may read or decompress),
then decodes it outside the lock. Results are handed out in the order in which items were taken.
Workers pause while what is decoded or being decoded, the item in the consumer's hands included, is
over the budget; one item is always allowed, so a row larger than the budget still passes. What an
item will take is guessed from its weight and from what the last one made of its own; so only two
are decoded before the first is done.

The threads are daemons, which end after the item in hand once the ``Prefetcher`` is closed. An
interpreter that exits waits for the items in hand only: a thread that came back from pyarrow later
would abort the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fast_axolotl.errors import UsageError

_IN_FLIGHT_FACTOR = 3
"""An item being decoded holds its bytes, its rows, and what the decoder needs between the two;
more where the items before it came to more."""

_EXIT_SECONDS = 10.0
"""How long an exit waits for the items in hand at most; a remote read can hang that long."""

_running: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@dataclass(slots=True)
class _Slot:
    task: Any = None
    reserved: int = 0
    done: bool = False
    result: Any = None
    error: BaseException | None = None


class Prefetcher:
    """Iterates (task, result) in order.

    A task is a block, whose ``weight`` is known before, and what its reader wants to find beside
    it; ``decode`` returns the result of a block and its size in bytes.
    """

    def __init__(
        self,
        tasks: Iterator[tuple[Any, ...]],
        decode: Callable[[Any], tuple[Any, int]],
        *,
        num_threads: int,
        budget: int,
    ) -> None:
        self._tasks, self._decode, self._budget = tasks, decode, budget
        self._taking, self._changed = threading.Lock(), threading.Condition()
        self._slots: deque[_Slot] = deque()
        self._reserved = 0
        """Bytes of all items, the one in the consumer's hands included."""
        self._factor: float | None = None
        """What an item being decoded takes, in multiples of its weight; first not known."""
        self._stopped = False
        """Nothing more is taken: it was closed, or there is nothing more, or an error."""
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        _running.add(self)
        for number in range(num_threads):
            name = f"fast-axolotl-reader-{number}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        atexit.unregister(_finish)
        atexit.register(_finish)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        held = 0
        while True:
            if os.getpid() != self._process:
                raise UsageError(
                    "this iterator was created before a fork; create one in this process"
                )
            with self._changed:
                self._reserved -= held
                self._changed.notify_all()
                while not (self._slots and self._slots[0].done):
                    if self._stopped and not self._slots:
                        return
                    self._changed.wait()
                slot = self._slots.popleft()
                held = slot.reserved
            if slot.error is not None:
                raise slot.error
            yield slot.task, slot.result
            del slot  # or it would be held while the next one is waited for

    def close(self) -> None:
        """Stops the threads; what was read ahead is dropped."""
        if os.getpid() != self._process:
            return  # a forked child has none of the threads, and one may have held the lock
        with self._changed:
            self._stopped = True
            self._slots.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        """Takes and decodes until there is nothing more."""
        while (slot := self._take()) is not None:
            size = 0
            try:
                if slot.error is None:
                    slot.result, size = self._decode(slot.task[0])
                    self._factor = max(_IN_FLIGHT_FACTOR, size / max(1, slot.task[0].weight))
            except BaseException as caught:  # noqa: BLE001 - raised again by the consumer
                slot.error = caught
            with self._changed:
                self._reserved += size - slot.reserved
                self._stopped |= slot.error is not None  # nobody asks for what comes after it
                slot.reserved, slot.done = size, True
                self._changed.notify_all()
            del slot

    def _take(self) -> _Slot | None:
        """The next task, once there is room for it; or the error of taking it."""
        with self._taking:
            with self._changed:
                while self._reserved and not self._stopped and self._reserved >= self._budget:
                    self._changed.wait()
                if self._stopped:
                    return None
            slot = _Slot()
            try:
                slot.task = next(self._tasks, None)
            except BaseException as caught:  # noqa: BLE001 - raised again by the consumer
                slot.error = caught
            with self._changed:
                if slot.task is not None:
                    guess = self._budget // 2
                    slot.reserved = (
                        int(slot.task[0].weight * self._factor) if self._factor else guess
                    )
                elif slot.error is None:
                    self._stopped = True
                    self._changed.notify_all()
                    return None
                self._reserved += slot.reserved
                if not self._stopped:  # it may have been closed meanwhile
                    self._slots.append(slot)
            return slot


def _finish() -> None:
    """At exit: stops every thread and waits for it."""
    for ahead in (opened := list(_running)):
        ahead.close()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in (thread for ahead in opened for thread in ahead._threads):
        thread.join(max(0.0, deadline - time.monotonic()))
