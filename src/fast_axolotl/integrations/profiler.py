"""Profile a few steps with torch: idle time of the GPU and exposed communication.

The profiler's raw events are intervals of time. Per window, with ``|x|`` the length of a union:

    busy      = kernels, copies and fills of the device, merged
    idle      = |window| − |busy|
    exposed   = |collectives ∪ everything else that ran| − |everything else|

A collective is a kernel that ``is_collective`` knows; where there is none, a mark of gloo's own
(``gloo:all_reduce``). Without a GPU, what else ran are torch's operators (``aten::…``).

The window on a GPU goes from the first kernel of its first step to the first kernel of its last, so
it holds whole steps: a gap is counted with the step it follows, and none is cut. On a CPU it goes
from the first step's begin to the last step's end.

Opt-in: the profiler slows the host by some microseconds an operator. Starting and stopping is a
span, taken out of the step times. It takes longer on some ranks, for which the others then wait: so
the step in which it starts is in no window. Ranks are compared: the window opens at the same step
on all of them.

Torch runs one profiler at a time, and a second one leaves neither with anything. So a window is not
begun while another profiler runs, and ends where somebody else begins one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from fast_axolotl.integrations.hooks import guarded, unwrap, wrap
from fast_axolotl.record import ProfileWindow
from fast_axolotl.record.schema import CPU_COLLECTIVES, is_collective

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

STEP_MARK = "ProfilerStep#"
"""What torch's profiler calls the marks that its ``step()`` makes."""

FIRST_STEP = 20
"""Steps before the first window begins: past the warm-up of most runs."""

_NANO = 1e-9


class Event(NamedTuple):
    """One event of the profiler."""

    name: str
    start: int
    """Nanoseconds."""
    end: int
    is_device: bool
    is_mark: bool
    """An annotation, which covers work but is none."""


def open_profile() -> Any:
    """A profiler of all there is, not yet started, that keeps its events until they are read."""
    import torch

    profile = torch.profiler.profile
    # Newer releases warn where it is not said that events of one cycle are meant to be all.
    options = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    return profile(activities=torch.profiler.supported_activities(), **options)


def window_of(
    events: Sequence[Event], *, steps: int, world_size: int = 1, **known: Any
) -> ProfileWindow:
    """What the events of a window say, as a line of a record; ``known`` are fields of it.

    ``steps`` is how many there were, where the events have no marks of them.
    """
    import numpy as np

    from fast_axolotl.plan.trace import inside, merge

    def busy(part: Sequence[Event]) -> int:
        """Nanoseconds of the window that a part of the events covers."""
        spans = np.array([(event.start, event.end) for event in part], np.int64).reshape(-1, 2)
        return int(inside(merge(spans), np.array([window]))[0])

    on_device = [event for event in events if event.is_device and not event.is_mark]
    marks = [event for event in events if event.name.startswith(STEP_MARK)]
    bounds = on_device or marks or events
    window = min((one.start for one in bounds), default=0), max((x.end for x in bounds), default=0)
    reasons: dict[str, str] = {}
    if on_device:
        starts: dict[str, int] = {}
        for mark in marks:
            if mark.is_device:
                starts[mark.name] = min(mark.start, starts.get(mark.name, mark.start))
        if len(starts) > 1:
            window, steps = (min(starts.values()), max(starts.values())), len(starts) - 1
        collectives = [event for event in on_device if is_collective(event.name)]
        work = [event for event in on_device if not is_collective(event.name)]
        idle_seconds = (window[1] - window[0] - busy(on_device)) * _NANO
    else:
        collectives = []
        work = [event for event in events if event.name.startswith("aten::")]
        idle_seconds = None
        reasons["device_idle_seconds"] = "the profiler saw no work on an accelerator"
    collectives = collectives or [one for one in events if one.name.startswith(CPU_COLLECTIVES)]
    begun = [event for event in collectives if window[0] <= event.start < window[1]]
    begun.sort(key=lambda event: event.start)
    is_seen = world_size < 2 or bool(collectives)
    if not is_seen:
        reason = f"the profiler saw no known communication between the {world_size} ranks"
        reasons["exposed_communication_seconds"] = reason
    exposed = busy([*collectives, *work]) - busy(work)
    return ProfileWindow(
        **known,
        steps=steps,
        wall_seconds=(window[1] - window[0]) * _NANO,
        device_idle_seconds=idle_seconds,
        exposed_communication_seconds=exposed * _NANO if is_seen else None,
        collectives=tuple(round((event.end - event.start) * _NANO, 7) for event in begun),
        reasons=reasons,
    )


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
        self._steps = steps
        self._first = first_step
        """Steps before the window: the one in which the profiler starts is the last of them."""
        self._seen = 0
        self._begun = time.perf_counter()
        self._profile: Any = None
        self._mark = ExitStack()
        self._hook: Any = None

    def step_end(self) -> None:
        """An optimizer step ended."""
        self._seen += 1
        if self._profile is not None:
            if self._seen == self._first + 1 + self._steps:
                self.close()
            else:
                self._mark_step()
        elif self._seen == self._first:
            self._start()

    def close(self) -> None:
        """End the window now, if one is open."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        unwrap(*self._hook)
        done = self._seen - self._first - 1
        with self._meter.span("profile"):
            self._mark.close()
            profile.profiler.acc_events = False  # a tree of them takes 50 times as long as the rest
            profile.stop()
            if done > 0:
                # Made with the meter, so this is the meter's time to within milliseconds.
                found = window_of(
                    read_events(profile),
                    steps=done,
                    world_size=self._meter.world_size,
                    t=round(time.perf_counter() - self._begun, 3),
                    first_step=self._first + 1,
                )
                self._meter.window(found)
            else:
                self._explain("no profiler window: it ended before its first step")
        profile.profiler = None  # it refers to itself, and would hold its events for long

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

    def _yield_to_others(self) -> None:
        """While the window is open, the begin of any other profiler ends it."""
        from torch.autograd.profiler import profile

        # What every profiler of torch goes through before it starts; by name where it is there.
        name = "_prepare_trace" if hasattr(profile, "_prepare_trace") else "__init__"

        def begin(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            self._give_way()
            return original(*arguments, **named)

        self._hook = (profile, name, wrap(profile, name, begin))

    @guarded(lambda self, error: self._explain(f"no profiler window: it failed: {error}"))
    def _give_way(self) -> None:
        self.close()

    def _explain(self, sentence: str) -> None:
        for field in ("exposed_communication_fraction", "device_idle_fraction"):
            self._meter.reason(field, sentence)

    def _mark_step(self) -> None:
        """What the profiler's own ``step()`` does, which wants a schedule and warns about it."""
        import torch

        self._mark.close()
        self._mark.enter_context(torch.profiler.record_function(f"{STEP_MARK}{self._seen}"))
