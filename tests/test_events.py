"""CUDA events, with a stand-in for torch.cuda: this machine need not have a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.measure.events import CudaEvents, find_events


class Event:
    """An event whose moment and state a test sets."""

    made = 0
    moments: list[float]  # milliseconds, in the order of recording

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1
        self.moment = 0.0
        self.has_passed = True

    def record(self, stream: Any) -> None:
        self.stream = stream
        self.moment = Event.moments.pop(0)

    def query(self) -> bool:
        return self.has_passed

    def elapsed_time(self, other: Event) -> float:
        assert self.has_passed
        assert other.has_passed
        return other.moment - self.moment

    def synchronize(self) -> None:
        raise AssertionError("nothing may wait for the device")


@pytest.fixture
def cuda() -> Any:
    Event.made, Event.moments = 0, [10.0, 74.0, 80.0, 90.0]
    return SimpleNamespace(
        Event=Event, is_initialized=lambda: True, current_stream=lambda: "stream"
    )


def test_two_events_give_the_time_between_them_in_seconds(cuda: Any) -> None:
    events = CudaEvents(cuda)
    assert events.seconds((events.record(), events.record())) == pytest.approx(0.064)


def test_events_follow_the_current_stream(cuda: Any) -> None:
    current = [("a", 0, 1)]
    native = SimpleNamespace(
        _cuda_getDevice=lambda: 0, _cuda_getCurrentStream=lambda device: current[0]
    )
    cuda.current_stream = lambda: f"stream {current[0][0]}"
    events = CudaEvents(cuda, native)
    assert [events.record().stream, events.record().stream] == ["stream a", "stream a"]
    current[0] = ("b", 0, 1)
    assert events.record().stream == "stream b"


def test_events_are_used_again_once_they_were_read(cuda: Any) -> None:
    events = CudaEvents(cuda)
    events.seconds((events.record(), events.record()))
    events.seconds((events.record(), events.record()))
    assert Event.made == 2


def test_an_event_that_has_not_passed_is_neither_read_nor_waited_for(cuda: Any) -> None:
    events = CudaEvents(cuda)
    pair = (events.record(), events.record())
    pair[1].has_passed = False
    assert not events.has_passed(pair[1])
    assert events.seconds(pair) is None
    events.settle(pair[1], 0.005)
    pair[1].has_passed = True
    assert events.seconds(pair) == pytest.approx(0.064)


def test_an_error_of_the_device_is_a_reason_and_no_exception(cuda: Any) -> None:
    events = CudaEvents(cuda)
    pair = (events.record(), events.record())

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with …")

    pair[1].query = fail
    assert events.has_passed(pair[1])
    assert events.failure == "CUDA events failed: CUDA error: an illegal memory access"
    assert events.seconds(pair) is None
    assert events.record() is None


def test_a_device_that_refuses_events_is_a_reason(cuda: Any) -> None:
    Event.moments = []
    cuda.Event = lambda enable_timing: (_ for _ in ()).throw(RuntimeError(""))
    events = CudaEvents(cuda)
    assert events.record() is None
    assert events.failure == "CUDA events failed: RuntimeError"


def test_there_is_no_device_before_torch_has_initialised_it(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert find_events() is None
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__name__="torch"))  # half imported
    assert find_events() is None
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert isinstance(find_events(), CudaEvents)
    cuda.is_initialized = lambda: False
    assert find_events() is None
