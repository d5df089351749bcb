"""Time on the device, by CUDA events: recorded without waiting, read once they have passed.

An event recorded before a fetch fires when the device has drained what was queued; one recorded
after it fires when the host has come back. Their distance is the time the device had nothing to
run. Nothing here synchronises: an event is asked whether it has passed, and read only then.

torch is never imported: without it, or before it has initialised CUDA, there is no device to time.

Destroying an event calls CUDA, and CUDA aborts a forked child that calls it. So no event is ever
destroyed in a child, whoever lets go of it there: a DataLoader worker that drops the meter of its
parent, the garbage collector, the end of the interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
import weakref
from typing import Any, Protocol

__all__ = ["CudaEvents", "DeviceEvents", "EventPair", "find_events"]

EventPair = tuple[Any, Any]
"""The events before and after something."""

_POLL_SECONDS = 0.002


class DeviceEvents(Protocol):
    """What the meter asks of a device; the seam for tests."""

    failure: str
    """Why the events cannot be used; empty while they can."""

    def record(self) -> Any:
        """An event behind all that is queued now; ``None`` where that failed."""

    def has_passed(self, event: Any) -> bool:
        """Whether the device has reached an event."""

    def seconds(self, pair: EventPair) -> float | None:
        """Device time between two events that have passed. They are taken back."""

    def settle(self, event: Any, seconds: float) -> None:
        """Let at most so much time pass until the device has reached an event."""


def find_events() -> DeviceEvents | None:
    """The events of torch's CUDA, once this process has initialised it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return CudaEvents(cuda, getattr(torch, "_C", None))


class CudaEvents:
    """Events on the current stream of the current device, used again and again."""

    def __init__(self, cuda: Any, native: Any = None) -> None:
        self.failure = ""
        self._cuda = cuda
        self._native = native
        self._pool: set[Any] = set()
        """An event that ends one stretch of time and begins another comes back twice."""
        self._stream: Any = None
        self._stream_key: Any = None

    def record(self) -> Any:
        """An event on the current stream."""
        if self.failure:
            return None
        try:
            if self._pool:
                event = self._pool.pop()
            else:
                event = self._cuda.Event(enable_timing=True)
                _living_events()[id(event)] = event
            event.record(self._current_stream())
        except RuntimeError as error:
            self._fail(error)
            return None
        return event

    def has_passed(self, event: Any) -> bool:
        """Whether the stream has reached an event; of a broken one, yes: nothing more will come."""
        try:
            return bool(event.query())
        except RuntimeError as error:
            self._fail(error)
            return True

    def seconds(self, pair: EventPair) -> float | None:
        """Device time between two events, which go back to the pool."""
        first, last = pair
        if first is None or last is None or self.failure:
            return None
        try:
            if not last.query():
                return None
            found = 0.0 if first is last else first.elapsed_time(last) / 1000.0
        except RuntimeError as error:
            self._fail(error)
            return None
        self._pool.update(pair)
        return max(0.0, float(found))

    def settle(self, event: Any, seconds: float) -> None:
        """Ask until an event has passed: at the end of a run, where nobody waits for the host."""
        deadline = time.monotonic() + seconds
        while not self.has_passed(event) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _current_stream(self) -> Any:
        """The stream that work is queued on now.

        ``torch.cuda.current_stream`` reads the environment at every call; what it asks the driver
        for in the end tells whether the stream is still the one that was found last.
        """
        try:
            key = self._native._cuda_getCurrentStream(self._native._cuda_getDevice())
        except AttributeError:
            return self._cuda.current_stream()
        if key != self._stream_key:
            self._stream, self._stream_key = self._cuda.current_stream(), key
        return self._stream

    def _fail(self, error: RuntimeError) -> None:
        text = str(error).strip()
        first_line = text.splitlines()[0] if text else type(error).__name__
        self.failure = self.failure or f"CUDA events failed: {first_line}"


@functools.cache
def _living_events() -> weakref.WeakValueDictionary[int, Any]:
    """All events of this process. In every child that is forked from now on they are immortal.

    They are held from before the fork until the child has run its first code of ours: the collector
    may run in between.
    """
    events: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    held: list[Any] = []

    def hold() -> None:
        held.extend(event for reference in events.valuerefs() if (event := reference()) is not None)

    def make_immortal() -> None:
        for event in held:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=hold, after_in_parent=held.clear, after_in_child=make_immortal)
    return events
