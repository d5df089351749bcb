"""CUDA events, with a stand-in for torch.cuda: this machine need not have a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.measure.events import _FREE, CudaEvents, explain_no_events, find_events
from support.children import run_child


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
    _FREE.clear()
    return SimpleNamespace(
        Event=Event, is_initialized=lambda: True, current_stream=lambda: "stream"
    )


def test_events_follow_the_current_stream(cuda: Any) -> None:
    current = [("a", 0, 1)]
    native = SimpleNamespace(
        _cuda_getDevice=lambda: 0, _cuda_getCurrentStream=lambda device: current[0]
    )
    cuda.current_stream = lambda: f"stream {current[0][0]}"
    events = CudaEvents(cuda, native)
    Event.moments *= 2
    assert [events.record().stream, events.record().stream] == ["stream a", "stream a"]
    current[0] = ("b", 0, 1)
    assert events.record().stream == "stream b"
    # A prefetcher's side stream is none that computes; a training's own is.
    current[0] = (0, 0, 1)
    events.follow()
    assert events.record().stream == "stream 0"
    current[0] = ("side", 0, 1)
    assert events.record().stream == "stream 0"
    events.follow()
    assert events.record().stream == "stream side"


def test_each_gpu_has_events_of_its_own(cuda: Any) -> None:
    device = [0]
    cuda.current_stream = lambda: SimpleNamespace(device_index=device[0])
    native = SimpleNamespace(
        _cuda_getDevice=lambda: device[0],
        _cuda_getCurrentStream=lambda number: (0, number, 1),
    )
    for events in (CudaEvents(cuda, native), CudaEvents(cuda)):
        Event.moments, device[0] = [10.0, 74.0, 80.0, 90.0], 0
        events.seconds(pair := (events.record(), events.record()))
        device[0] = 1
        others = (events.record(), events.record())
        assert {one.stream.device_index for one in others} == {1}
        assert not set(pair) & set(others)
        events.close()


def test_while_a_graph_is_captured_the_device_is_left_alone(cuda: Any) -> None:
    is_capturing = [False]
    cuda.is_current_stream_capturing = lambda: is_capturing[0]
    events = CudaEvents(cuda)
    pair = (events.record(), events.record())

    def fail() -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")

    is_capturing[0], query, pair[1].query = True, pair[1].query, fail
    events.follow()
    assert (events.record(), events.has_passed(pair[1])) == (None, False)
    events.settle(pair[1], 0.005)
    assert len(Event.moments) == 2
    is_capturing[0], pair[1].query = False, query
    assert events.has_passed(pair[1])
    assert events.seconds(pair) == pytest.approx(0.064)
    assert events.failure == ""


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu"])
def test_other_accelerators_are_said_to_be_unsupported(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type=kind))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=found))
    assert explain_no_events().startswith(f"device times are not supported on {kind.upper()}")
    monkeypatch.delitem(sys.modules, "torch")
    assert "has not initialised CUDA" in explain_no_events()


def test_two_events_give_the_time_between_them_once_both_have_passed_and_are_used_again(
    cuda: Any,
) -> None:
    events = CudaEvents(cuda)
    pair = (events.record(), events.record())
    pair[1].has_passed = False
    assert not events.has_passed(pair[1])
    assert events.seconds(pair) is None
    events.settle(pair[1], 0.005)
    pair[1].has_passed = True
    assert events.seconds(pair) == pytest.approx(0.064)
    assert events.seconds((events.record(), events.record())) == pytest.approx(0.01)
    assert Event.made == 2


def test_one_event_that_fails_is_put_aside_and_the_others_are_used(cuda: Any) -> None:
    events = CudaEvents(cuda)
    pair = (events.record(), events.record())
    pair[0].elapsed_time = lambda other: (_ for _ in ()).throw(RuntimeError("invalid handle"))
    assert [events.seconds(pair) for _ in range(20)] == [None] * 20
    assert events.has_passed(pair[1])
    later = (events.record(), events.record())
    assert pair[1] not in later
    assert (events.seconds(later), events.failure) == (pytest.approx(0.01), "")


def test_an_error_of_the_device_is_a_reason_and_no_exception(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fast_axolotl.measure.events._MOST_FAILURES", 1)
    events = CudaEvents(cuda)
    pair = (events.record(), events.record())

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with …")

    pair[1].query = fail
    assert events.has_passed(pair[1])
    assert events.failure == "CUDA events failed: CUDA error: an illegal memory access"
    assert events.seconds(pair) is None
    assert events.record() is None
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


FORKING = '''
import gc, os, sys
from types import SimpleNamespace
from fast_axolotl.measure import measure
from fast_axolotl.measure.events import CudaEvents

MAIN = os.getpid()

class Event:
    """Like CUDA's: destroying it in a forked process is fatal."""

    def __init__(self, enable_timing):
        pass

    def record(self, stream):
        pass

    def query(self):
        return is_done

    def elapsed_time(self, other):
        return 1.0

    def __del__(self):
        if os.getpid() != MAIN:
            os.write(2, b"destroyed in a child\\n")
            os.abort()

cuda = SimpleNamespace(Event=Event, current_stream=lambda: "stream")
is_done = True

def train(name, steps=50):
    meter = measure(f"{sys.argv[1]}/{name}", events=lambda: CudaEvents(cuda), sample_system=False)
    for number, _ in enumerate(meter.watch([["row"]] * steps)):
        if number == 10:
            with meter.span("evaluate"):
                pass
    return meter

def fork(depth=2):
    """A child drops all it has inherited, as a worker of a loader may, and has a child itself."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        meters.clear()
        gc.collect()
        if depth:
            fork(depth - 1)
        gc.collect()
        if depth % 2:
            sys.exit(0)
        import atexit
        atexit._run_exitfuncs()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        os._exit(1)

meters = {}
meters["open"] = train("open")
fork()
meters["open"].close()
fork()
with train("finished"):
    pass
fork()
gc.disable()
is_done = False
train("dropped").itself = None
stuck = train("in a cycle")
stuck.itself = stuck
meters["waits"] = train("waits")
del stuck
fork()
meters["waits"].close()
meters.clear()
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_no_event_is_destroyed_in_a_child_whoever_drops_it(tmp_path: Path) -> None:
    done = run_child(sys.executable, "-c", FORKING, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
