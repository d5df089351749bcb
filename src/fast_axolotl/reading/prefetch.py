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
from typing import Any, Generic, Protocol, TypeVar

from fast_axolotl.errors import UsageError

_IN_FLIGHT_FACTOR = 3
"""An item being decoded holds its bytes, its rows, and what the decoder needs between the two;
more where the items before it came to more."""


class Sized(Protocol):
    """What is decoded: its weight is known before."""

    @property
    def weight(self) -> int: ...


_Task = TypeVar("_Task", bound=Sized)
_Result = TypeVar("_Result")

_EXIT_SECONDS = 10.0
"""How long an exit waits for the items in hand at most; a remote read can hang that long."""

_running: weakref.WeakKeyDictionary[threading.Thread, _Shared[Any, Any]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(slots=True)
class _Slot(Generic[_Task, _Result]):
    task: _Task | None
    reserved: int = 0
    done: bool = False
    result: _Result | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Shared(Generic[_Task, _Result]):
    tasks: Iterator[_Task]
    decode: Callable[[_Task], tuple[_Result, int]]
    budget: int
    taking: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    slots: deque[_Slot[_Task, _Result]] = field(default_factory=deque)
    reserved: int = 0
    factor: float | None = None
    """What an item being decoded takes, in multiples of its weight; not known before the first."""
    stopped: bool = False
    """Nothing more is taken: it was closed, or there is nothing more, or an error."""
    process: int = field(default_factory=os.getpid)


class Prefetcher(Generic[_Task, _Result]):
    """Iterates (task, result) in order; ``decode`` returns a result and its size in bytes."""

    def __init__(
        self,
        tasks: Iterator[_Task],
        decode: Callable[[_Task], tuple[_Result, int]],
        *,
        num_threads: int,
        budget: int,
    ) -> None:
        self._shared: _Shared[_Task, _Result] = _Shared(tasks, decode, budget)
        self._held = 0
        self._finalizer = weakref.finalize(self, _stop, self._shared)
        for number in range(num_threads):
            name = f"fast-axolotl-reader-{number}"
            thread = threading.Thread(target=_work, args=(self._shared,), name=name, daemon=True)
            _running[thread] = self._shared
            thread.start()
        atexit.unregister(_finish)
        atexit.register(_finish)

    def __iter__(self) -> Iterator[tuple[_Task, _Result]]:
        return self

    def __next__(self) -> tuple[_Task, _Result]:
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
        return slot.task, slot.result  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the threads; what was read ahead is dropped."""
        self._finalizer()


def _stop(shared: _Shared[_Task, _Result]) -> None:
    if os.getpid() != shared.process:
        return  # a forked child has none of the threads, and one may have held the lock
    with shared.changed:
        shared.stopped = True
        shared.slots.clear()
        shared.changed.notify_all()


def _finish() -> None:
    """At exit: stops every thread and waits for it."""
    threads = list(_running.items())
    for _, shared in threads:
        _stop(shared)
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _work(shared: _Shared[_Task, _Result]) -> None:
    while True:
        with shared.taking:
            slot = _next_slot(shared)
        if slot is None:
            return
        size = 0
        try:
            if slot.task is not None:
                slot.result, size = shared.decode(slot.task)
        except BaseException as caught:  # noqa: BLE001 - raised again by the consumer
            slot.error = caught
        with shared.changed:
            shared.reserved += size - slot.reserved
            if slot.error is not None:
                shared.stopped = True  # nobody asks for what comes after an error
            elif slot.task is not None:
                shared.factor = max(_IN_FLIGHT_FACTOR, size / max(1, slot.task.weight))
            slot.reserved, slot.done = size, True
            shared.changed.notify_all()
        del slot


def _next_slot(shared: _Shared[_Task, _Result]) -> _Slot[_Task, _Result] | None:
    """The next task, once there is room for it; or the error of taking it."""
    with shared.changed:
        while shared.reserved and not shared.stopped and shared.reserved >= shared.budget:
            shared.changed.wait()
        if shared.stopped:
            return None
    slot: _Slot[_Task, _Result] = _Slot(None)
    try:
        slot.task = next(shared.tasks, None)
    except BaseException as caught:  # noqa: BLE001 - raised again by the consumer
        slot.error = caught
    with shared.changed:
        if slot.task is None and slot.error is None:
            shared.stopped = True
            shared.changed.notify_all()
            return None
        if slot.task is not None:
            half = shared.budget // 2
            slot.reserved = int(slot.task.weight * shared.factor) if shared.factor else half
        shared.reserved += slot.reserved
        if not shared.stopped:  # it may have been closed meanwhile
            shared.slots.append(slot)
        return slot
