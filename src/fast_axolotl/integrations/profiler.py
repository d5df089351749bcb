"""A short window of torch's profiler: the device's idle time, and communication left exposed.

The profiler's raw events are intervals of time. Per window, with ``|x|`` the length of a union:

    busy      = kernels, copies and fills of the device, merged
    idle      = |window| − |busy|
    exposed   = |collectives ∪ everything else that ran| − |everything else|

On a GPU a collective is a kernel with ``nccl`` in its name. Without one, collectives are gloo's own
marks (``gloo:all_reduce``), and what else ran are torch's operators (``aten::…``).

The window on a GPU goes from the first kernel of its first step to the first kernel of its last, so
it holds whole steps: a gap is counted with the step it follows, and none is cut. On a CPU it goes
from the first step's begin to the last step's end.

Opt-in: the profiler slows the host by some microseconds an operator, and takes a second or so to
start and to stop. Starting and stopping is a span, taken out of the step times.

Torch runs one profiler at a time, and a second one leaves neither with anything. So a window is not
begun while another profiler runs, and ends where somebody else begins one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from fast_axolotl.record import ProfileWindow

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

__all__ = ["Event", "WindowProfiler", "clip", "open_profile", "read_events", "total", "window_of"]

Interval = tuple[int, int]
"""Begin and end in nanoseconds, not negative."""

STEP_MARK = "ProfilerStep#"
"""What torch's profiler calls the marks that its ``step()`` makes."""

FIRST_STEP = 20
"""Steps before the window begins: past the warm-up of most runs."""

_NANO = 1e-9
_CPU_COLLECTIVES = ("gloo:", "mpi:", "ucc:")


class Event(NamedTuple):
    """One event of the profiler."""

    name: str
    start: int
    """Nanoseconds."""
    end: int
    is_device: bool
    is_mark: bool
    """An annotation, which covers work but is none."""


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts inside a window."""
    low, high = window
    return [
        (max(start, low), min(end, high)) for start, end in intervals if end > low and start < high
    ]


def total(intervals: Iterable[Interval]) -> int:
    """The length of the union."""
    length = reached = 0
    for start, end in sorted(intervals):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length


def open_profile() -> Any:
    """A profiler of all there is, not yet started, that keeps its events until they are read."""
    import torch

    profile = torch.profiler.profile
    # Newer releases warn where it is not said that events of one cycle are meant to be all.
    options = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    return profile(activities=torch.profiler.supported_activities(), **options)


def window_of(events: Sequence[Event], *, t: float, steps: int) -> ProfileWindow:
    """What the events of a window say, as a line of a record.

    ``steps`` is how many there were, where the events have no marks of them.
    """
    on_device = [event for event in events if event.is_device and not event.is_mark]
    marks = [event for event in events if event.name.startswith(STEP_MARK)]
    bounds = _intervals(on_device or marks or events) or [(0, 0)]
    window = min(start for start, _ in bounds), max(end for _, end in bounds)
    reasons: dict[str, str] = {}
    if on_device:
        starts: dict[str, int] = {}
        for mark in marks:
            if mark.is_device:
                starts[mark.name] = min(mark.start, starts.get(mark.name, mark.start))
        if len(starts) > 1:
            window, steps = (min(starts.values()), max(starts.values())), len(starts) - 1
        collectives = [event for event in on_device if "nccl" in event.name.lower()]
        work = [event for event in on_device if "nccl" not in event.name.lower()]
        busy = total(clip(_intervals(on_device), window))
        idle_seconds = (window[1] - window[0] - busy) * _NANO
    else:
        collectives = [event for event in events if event.name.startswith(_CPU_COLLECTIVES)]
        work = [event for event in events if event.name.startswith("aten::")]
        idle_seconds = None
        reasons["device_idle_seconds"] = "the profiler saw no work on an accelerator"
    inside = [event for event in collectives if window[0] <= event.start < window[1]]
    spans, other = clip(_intervals(collectives), window), clip(_intervals(work), window)
    return ProfileWindow(
        t=t,
        steps=steps,
        wall_seconds=(window[1] - window[0]) * _NANO,
        device_idle_seconds=idle_seconds,
        communication_seconds=total(spans) * _NANO,
        exposed_communication_seconds=(total([*spans, *other]) - total(other)) * _NANO,
        collectives=tuple(
            round((event.end - event.start) * _NANO, 9)
            for event in sorted(inside, key=lambda event: event.start)
        ),
        reasons=reasons,
    )


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]


def read_events(profile: Any) -> list[Event]:
    """The events of a stopped ``torch.profiler.profile``."""

    def is_mark(event: Any) -> bool:
        kind = getattr(event, "activity_type", None)
        if kind is not None and "annotation" in str(kind()):
            return True
        asked = getattr(event, "is_user_annotation", None)
        return bool(asked()) if asked is not None else event.name().startswith(STEP_MARK)

    return [
        Event(
            name=event.name(),
            start=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
            is_device=event.device_type().name != "CPU",
            is_mark=is_mark(event),
        )
        for event in profile.profiler.kineto_results.events()
    ]


class WindowProfiler:
    """Profiles some steps of a run, once, and hands what it saw to the meter."""

    def __init__(self, meter: Meter, steps: int, *, first_step: int = FIRST_STEP) -> None:
        self._meter = meter
        self._first = first_step
        self._last = first_step + steps
        self._steps = steps
        self._seen = 0
        self._begun = time.perf_counter()
        self._profile: Any = None
        self._mark: Any = None
        self._hook: Any = None

    def step_end(self) -> None:
        """An optimizer step ended."""
        if self._seen > self._last:
            return
        self._seen += 1
        if self._seen == self._first:
            self._start()
        elif self._profile is not None:
            if self._seen == self._last:
                self.close()
            else:
                self._mark_step()

    def close(self) -> None:
        """End the window now, if one is open."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        owner, name, ours, original = self._hook
        # Where someone else has wrapped ours meanwhile it stays, and does nothing.
        if getattr(owner, name) is ours:
            setattr(owner, name, original)
        done = self._steps - (self._last - self._seen)
        with self._meter.span("profile"):
            self._end_mark()
            profile.stop()
            if done > 0:
                # Made with the meter, so this is the meter's time to within milliseconds.
                now = round(time.perf_counter() - self._begun, 3)
                self._meter.window(window_of(read_events(profile), t=now, steps=done))
            else:
                self._explain("no profiler window: it ended before its first step did")

    def _start(self) -> None:
        import torch

        # There can be one profiler only: a second one would end the first.
        if torch.autograd._profiler_enabled():
            self._explain("no profiler window: another profiler was running")
            return
        with self._meter.span("profile"):
            profile = open_profile()
            # Work queued before the window would be missing from it.
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.start()
        self._yield_to_others()
        self._profile = profile
        self._mark_step()

    def _yield_to_others(self) -> None:
        """While the window is open, the begin of any other profiler ends it."""
        from torch.autograd.profiler import profile

        # What every profiler of torch goes through before it starts; by name where it is there.
        name = "_prepare_trace" if hasattr(profile, "_prepare_trace") else "__init__"
        original = getattr(profile, name)

        @wraps(original)
        def begin(other: Any, *arguments: Any, **named: Any) -> Any:
            try:
                self.close()
            except Exception as error:  # noqa: BLE001
                # The one broad except: what is raised here would end the other's profiling.
                self._explain(f"no profiler window: it could not be ended: {error}")
            return original(other, *arguments, **named)

        setattr(profile, name, begin)
        self._hook = (profile, name, begin, original)

    def _explain(self, sentence: str) -> None:
        for field in ("exposed_communication_fraction", "device_idle_fraction"):
            self._meter.reason(field, sentence)

    def _mark_step(self) -> None:
        """What the profiler's own ``step()`` does, which wants a schedule and warns about it."""
        import torch

        self._end_mark()
        self._mark = torch.profiler.record_function(f"{STEP_MARK}{self._seen}")
        self._mark.__enter__()

    def _end_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
