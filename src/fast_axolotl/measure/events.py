"""Measure time on the GPU by CUDA events, without synchronising.

An event recorded before a fetch fires when the device has drained what was queued; one recorded
after it fires when the host has come back. Their distance is the time the device had nothing to
run. Nothing here synchronises: an event is asked whether it has passed, and read only then.

torch is never imported: without it, or before it has initialised CUDA, there is no device to time.

Destroying an event calls CUDA, and CUDA aborts a forked child that calls it: a DataLoader worker in
which the garbage collector finds what its parent has dropped, or that exits. So no event is ever
destroyed: each is immortal from the start, and what a meter has read is used again by the next one.

While the current stream captures a graph, nothing is recorded or asked: either would end up in the
graph or break it. An event that fails is put aside.
"""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import suppress
from typing import Any

EventPair = tuple[Any, Any]
"""The events before and after something."""

_POLL_SECONDS = 0.002
_MOST_FAILURES = 8
"""Events that fail before the device is taken to be lost."""

_FREE: dict[int, set[Any]] = {}
"""Events of each device that nobody uses now."""


def find_events() -> CudaEvents | None:
    """The events of torch's CUDA, once this process has initialised it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return CudaEvents(cuda, getattr(torch, "_C", None))


def explain_no_events() -> str:
    """Why there is no device that could be timed."""
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
    device = None if accelerator is None else accelerator.current_accelerator()
    if device is not None and device.type != "cuda":
        return f"device times are not supported on {device.type.upper()}, only on CUDA and ROCm"
    return "this process has not initialised CUDA, so there is no GPU to time"


class CudaEvents:
    """Events on the stream that computes, used again and again.

    That is the current stream of the current device. But where data is fetched under a side stream,
    as prefetchers do, it is the stream of the last optimizer step.
    """

    def __init__(self, cuda: Any, native: Any = None) -> None:
        self.failure = ""
        """Why the events cannot be used; empty while they can."""
        self._cuda = cuda
        self._native = native
        self._is_capturing = getattr(cuda, "is_current_stream_capturing", lambda: False)
        self._broken: set[Any] = set()
        self._num_failures = 0
        self._followed: tuple[Any, Any, int] | None = None
        self._found: tuple[Any, Any, int] = (None, None, 0)
        self._used: dict[Any, int] = {}
        """Events that were recorded and not read yet, and their devices."""

    def follow(self) -> None:
        """The current stream is the one that computes: an optimizer step has been queued on it."""
        with suppress(RuntimeError):
            if not self._is_capturing():
                self._followed = self._find_stream()

    def record(self) -> Any:
        """An event behind all that is queued on the stream that computes; ``None`` where that
        failed, or while a graph is captured."""
        event = None
        try:
            if self.failure or self._is_capturing():
                return None
            stream, key, device = self._find_stream()
            if self._followed is not None and key is not None and key[0]:
                stream, _, device = self._followed
            free = _FREE.setdefault(device, set())
            if free:
                event = free.pop()
            else:
                event = self._cuda.Event(enable_timing=True)
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
            self._used[event] = device
            event.record(stream)
        except RuntimeError as error:
            self._fail(event, error)
            return None
        return event

    def _find_stream(self) -> tuple[Any, Any, int]:
        """The current stream, what the driver knows it by, and its device."""
        # ``torch.cuda.current_stream`` reads the environment at every call; what it asks the
        # driver for in the end tells whether the stream is still the one that was found last. The
        # number of the default stream is 0.
        try:
            device = self._native._cuda_getDevice()
            key = self._native._cuda_getCurrentStream(device)
        except AttributeError:
            device, key = 0, None
        if key is None or key != self._found[1]:
            stream = self._cuda.current_stream()
            self._found = stream, key, getattr(stream, "device_index", device)
        return self._found

    def has_passed(self, event: Any) -> bool:
        """Whether the stream has reached an event; of a broken one, yes: nothing more will come."""
        try:
            return event in self._broken or (not self._is_capturing() and bool(event.query()))
        except RuntimeError as error:
            self._fail(event, error)
            return True

    def seconds(self, pair: EventPair) -> float | None:
        """Device time between two events, which go back to the pool."""
        first, last = pair
        if first is None or last is None or self.failure or not self._broken.isdisjoint(pair):
            return None
        found = None
        try:
            if not self._is_capturing() and last.query():
                found = 0.0 if first is last else first.elapsed_time(last) / 1000.0
        except RuntimeError as error:
            self._fail(last, error)
            return None
        for event in pair:
            # One that ends a stretch of time and begins another comes back twice.
            if event in self._used:
                _FREE[self._used.pop(event)].add(event)
        return None if found is None else max(0.0, float(found))

    def settle(self, event: Any, seconds: float) -> None:
        """Let at most so much time pass until an event has passed: at the end of a run."""
        deadline = time.monotonic() + seconds
        while not self.has_passed(event) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """What was not read can be recorded anew: nobody reads it any more."""
        while self._used:
            event, device = self._used.popitem()
            if not self.failure:
                _FREE[device].add(event)

    def _fail(self, event: Any, error: RuntimeError) -> None:
        """Put an event aside for good; after some, all of them."""
        self._used.pop(event, None)
        self._broken.add(event)
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES:
            text = str(error).strip()
            first_line = text.splitlines()[0] if text else type(error).__name__
            self.failure = self.failure or f"CUDA events failed: {first_line}"
