"""The meter: a training loop or a hook reports to it, and it writes the record.

    fetch_begin ─ wait ─ fetch_end(batch) ─ work ─ step ─ span("log") ─ fetch_begin ─ …

Two clock readings bracket each fetch; on a GPU two CUDA events do, too, and are read steps later.
Fetches become steps (``steps``), steps wait for their events and become blocks of about a second
(``blocks``), and blocks become lines of ``RUN/rank-N.jsonl`` (``writers``). Memory does not grow
with the run. ``measure`` puts a meter together and starts it.

The meter never raises into the loop that it measures: ``_guarded`` is the one place where faults of
its own end. It notes them in the record, says so once in the log, and goes quiet.

A forked child inherits its parent's meters and must not use them: not their file, and not the
parent's CUDA events. They go quiet in the child, whatever it does with them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from fast_axolotl._version import __version__
from fast_axolotl.errors import UsageError
from fast_axolotl.measure.batch_counts import BatchCount, BatchCounter, read_loader, ready_batches
from fast_axolotl.measure.blocks import BlockBuilder
from fast_axolotl.measure.events import CudaEvents, EventPair, find_events
from fast_axolotl.measure.sampler import SystemSampler
from fast_axolotl.measure.stacks import Looks, StackSampler, WorkerLines
from fast_axolotl.measure.steps import WARMUP_STEPS, Step, StepTracker
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.writers import Journal, as_json, open_system_file, read_rank
from fast_axolotl.record import ModelShape, ProfileWindow, RunSummary, Stacks, Start, SystemSample
from fast_axolotl.record.folder import read_run
from fast_axolotl.record.schema import Phase, Reason
from fast_axolotl.system import MEASURE, describe, node_name, pid_namespace

_RUN = "FAST_AXOLOTL_RUN"
"""``1`` in what ``fast-axolotl run`` starts, which has said what it replaces."""

_WRITTEN_SPANS = ("evaluate", "checkpoint")
"""Spans with a line of their own: one after the last step is in no block."""

_LEAST_STACKS_SECONDS, _MOST_STACKS_SECONDS = 10.0, 600.0
"""Between two lines of the record that name lines of code; in between a sixtieth of its age."""

_LEAST_BETWEEN_SECONDS = 1e-3
"""Between two loops, for it to be no wait."""
_LEARNED = 4
"""Fetches and steps whose lines of code tell what lies between them."""

_Method = TypeVar("_Method", bound=Callable[..., Any])

_log = logging.getLogger("fast_axolotl.measure")


def measure(
    run_dir: str | Path,
    *,
    accumulation: int = 1,
    told_steps: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    source: str = "loop",
    data_paths: Sequence[str | Path] = (),
    sample_system: bool = True,
    stacks: bool = True,
    peak_tflops: float | None = None,
    command: Sequence[str] | None = None,
    environment: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
    events: Callable[[], CudaEvents | None] = find_events,
    proc: str | Path = "/proc",
) -> Meter:
    """Start measuring into the folder ``run_dir``; use it in a ``with``, or call ``close``.

    ``accumulation`` fetches count as a step until ``Meter.step`` is called for the first time.
    After that, only its calls count; with ``told_steps``, only they count from the start.
    ``rank``, ``world_size`` and ``local_rank`` default to those of the launcher.

    On each node, the process with local rank 0 also samples the processes of all ranks. It does
    not if ``sample_system`` is off, or if ``fast-axolotl run`` samples them into the same folder.
    ``stacks`` is whether to look at the loop's Python stack, about 20 times per second.
    The disk of the first of ``data_paths`` is probed for at most two seconds. ``peak_tflops`` is
    the peak of one GPU, if its name is not known here. A record that is already in the folder is
    kept under another name. If another process is still writing one, this one writes nothing.

    ``clock``, ``wall_clock``, ``events`` and ``proc`` are there for tests.
    """
    if accumulation < 1:
        raise UsageError(f"accumulation is {accumulation}, but must be at least 1")
    if rank is None:
        rank, count, local = read_rank()
        world_size = world_size or count
        local_rank = local if local_rank is None else local_rank
    environment = describe(Path(proc)) if environment is None else environment
    start = Start(
        time=wall_clock(),
        rank=rank,
        world_size=world_size or 1,
        pid=os.getpid(),
        pid_namespace=pid_namespace(Path(proc)),
        host=node_name(),
        version=__version__,
        source=source,
        command=tuple(command or ()),
        environment={key: as_json(value) for key, value in environment.items()},
    )
    journal = Journal(Path(run_dir), start, clock=clock)
    meter = Meter(
        journal,
        StepTracker(accumulation=accumulation, is_told=told_steps, origin=journal.origin),
        find_events=events,
        peak_tflops=peak_tflops,
    )
    paths = [str(path) for path in data_paths]
    known: dict[str, Any] = {"data_paths": paths} if paths else {}
    if accumulation > 1 or told_steps:
        known["gradient_accumulation"] = accumulation
    meter.settings(**known)
    meter.note_replacements()
    _show_in_run(journal)
    if journal.is_refused:
        return meter
    # A clock of a test's own does not go on by itself.
    if stacks and clock is time.perf_counter:
        meter.look_at_stacks()
    # A trainer that does not know the local rank says −1: the first of the node to come samples.
    is_first = (local_rank or 0) <= 0
    if sample_system and is_first and (writer := open_system_file(run_dir)) is not None:
        meter.attach_sampler(
            SystemSampler(
                os.getpid(),
                writer,
                rank_folder=run_dir,
                data_path=paths[0] if paths else None,
                proc=Path(proc),
                on_sample=meter.see_sample,
                source="meter",
            )
        )
    return meter


def _show_in_run(journal: Journal) -> None:
    """Have a program's own record show in the folder of the measured run that it is part of."""
    run = os.environ.get(MEASURE, "")
    if not run or journal.is_refused:
        return
    with suppress(OSError):  # the folder we are in was removed
        # A run's later trainings are recorded beside the first, in RUN-2, RUN-3, ….
        own = rf"{re.escape(os.path.realpath(run))}(-\d+)?"
        if re.fullmatch(own, os.path.realpath(journal.folder)):
            return
        shared, where = Path(run, journal.path.name), "see it with fast-axolotl show"
        with suppress(OSError):  # that folder has a record of its own, or has no links
            shared.parent.mkdir(parents=True, exist_ok=True)
            shared.symlink_to(journal.path.absolute())
            where = f"{run} holds the same record"
        if journal.start.rank == 0:
            _say(f"this program already records into {journal.folder}: {where}")


def is_measured() -> bool:
    """Whether a meter of this process is at work."""
    return any(not meter.is_quiet for meter in _meters())


def end_of(error: BaseException | None) -> tuple[Reason, str]:
    """The reason and the error with which a record ends."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished", ""
    kind: Reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "exception"
    return kind, f"{type(error).__name__}: {error}".removesuffix(": ")


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # a closed stderr ends nothing
        print(f"fast-axolotl: {line}", file=sys.stderr)


def _guarded(method: _Method) -> _Method:
    """Have a method do nothing once the meter is quiet, and never raise."""

    @functools.wraps(method)
    def call(self: Meter, *arguments: Any, **named: Any) -> Any:
        if self.is_quiet:
            return None
        try:
            return method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the training
            self.is_quiet = True
            text = f"the meter has stopped: {type(error).__name__}: {error}"
            _log.warning("%s; the run continues", text, exc_info=error)
            self._journal.mark("error", text=text)
            return None

    return call  # type: ignore[return-value]


class Meter:
    """Takes the measurements of one rank. Made by ``measure``; not for several threads at once."""

    def __init__(
        self,
        journal: Journal,
        tracker: StepTracker,
        *,
        find_events: Callable[[], CudaEvents | None],
        peak_tflops: float | None = None,
    ) -> None:
        self.run_dir = journal.folder
        self.rank, self.world_size = journal.start.rank, journal.start.world_size
        self.is_quiet = False
        """Nothing is measured any more: closed, given up, or a forked child."""
        self.read_over: Literal["resume", "evaluate"] = "resume"
        """Why batches were read over before the first step, if they were."""
        self._is_closed = False
        self._journal = journal
        self._clock = journal.clock
        self._tracker = tracker
        self._counter = BatchCounter(journal.reason)
        self._blocks = BlockBuilder(journal, self._counter, find_events)
        self._peak_tflops = peak_tflops
        self._sampler: SystemSampler | None = None
        self._stacks: StackSampler | None = None
        self._workers = WorkerLines(journal.folder, self.rank)
        self._stacks_due = self._stacks_cpu_seconds = 0.0
        """When the lines of code will be written next, and what the looks had cost when the warm-up
        ended."""
        self._working_set_bytes: int | None = None
        self._fetch_start: float | None = None
        self._fetch_event: Any = None
        self._is_fetching = self._is_early = False
        """Whether the time before the first fetch of a loop is timed."""
        self._is_due = False
        """Whether that time is a wait: the loop has begun. Else it lies between two loops."""
        self._span_name = ""
        self._span_start = 0.0
        self._span_event: Any = None
        self._begin_seconds = 0.0
        self._overhead_seconds = 0.0
        """What the meter itself took, but for what was hidden behind the device's work; of the
        steady phase, once there is one."""
        self._overhead_from = 0
        """The fetch from which on that counts."""
        _meters().add(self)

    @property
    def place(self) -> str:
        """Where the loop is: ``waiting`` for data, ``between`` loops, in a span by its name; empty
        inside of a step."""
        if self._span_name or self._is_fetching:
            return self._span_name or "waiting"
        if not self._is_early or (not self._is_due and self._tracker.is_step_due):
            return ""
        return "waiting" if self._is_due else "between"

    @property
    def is_in_span(self) -> bool:
        """Whether time goes by that is not training."""
        return bool(self._span_name)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(*end_of(error))

    # The loop, or a hook in it, tells:

    def watch(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of ``iterable`` and time the waits for them.

        Creating the iterator is part of the first wait, since workers start there.
        """
        self.settings(**read_loader(iterable))
        self.wait_begin()
        iterator: Iterator[Any] | None = None
        try:
            while True:
                self.fetch_begin(ready_batches(iterator))
                iterator = iter(iterable) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    self.exhausted()
                    return
                # Where a hook at the base iterator has timed fetches meanwhile, none is open here.
                self.fetch_end(batch)
                yield batch
                del batch  # what the loop has let go of is not held during the next fetch
        except GeneratorExit:
            raise
        except BaseException as error:
            self.fetch_failed(error)
            raise
        finally:
            self.loop_end()

    @_guarded
    def fetch_begin(self, queue_depth: int | None = None) -> None:
        """Report that a wait for the next batch begins; ``queue_depth`` batches are ready now.

        If it is called again before the fetch has ended, the later call counts, because a hook at
        the base iterator knows better than a loop around it. Calls inside a span are ignored, so
        that evaluation is not a fetch. To include the start of workers in the first wait, call it
        before you create the iterator, and not again for the first fetch.
        """
        now = self._clock()
        if self._span_name:
            return
        tracker = self._tracker
        if not self._is_fetching:
            self._end_between(now)
            began = self._fetch_start if self._is_early and self._fetch_start is not None else now
            if self._stacks is not None and tracker.num_fetches < _LEARNED:
                self._stacks.looks.learn("fetch", sys._getframe())
            if not tracker.has_begun:
                self._journal.mark("first_fetch", at=began)
            elif tracker.is_new_epoch:
                self._journal.mark("epoch", at=now)
            self._take(tracker.begin_fetch(now))
            self._is_fetching = True
        tracker.see_queue(queue_depth)
        if not self._is_early:
            self._fetch_event = self._blocks.record()
            self._fetch_start = self._clock()
        self._begin_seconds = self._clock() - now

    @_guarded
    def fetch_end(self, batch: Any) -> None:
        """Report that the batch has arrived. Ignored if no fetch has begun."""
        now = self._clock()
        if not self._is_fetching:
            return
        host_wait_seconds, pair = self._end_wait(now)
        if self._tracker.num_fetches == 0:
            self._journal.mark("first_batch", at=now)
        counted = self._counter.count(batch, is_patient=pair is not None)
        self._tracker.end_fetch(host_wait_seconds, pair, counted)
        if pair is None or pair[0] is not pair[1]:  # else the device was busy all the while
            self._overhead_seconds += self._begin_seconds + self._clock() - now

    @_guarded
    def exhausted(self) -> None:
        """Report the end of an epoch: the loader has no more batches. Replaces ``fetch_end``.

        The time from here to ``wait_begin`` or the next fetch lies between two loops.
        """
        if self._is_fetching:
            now = self._clock()
            self._tracker.fail_fetch(*self._end_wait(now))
            self._begin_early_wait(now, is_due=False)

    @_guarded
    def wait_begin(self) -> None:
        """Report that the wait for the first batch of a loop begins: the iterator of a loader is
        about to be created. Ignored inside a span and a fetch."""
        if not self._span_name and not self._is_fetching:
            now = self._clock()
            self._end_between(now)
            if not self._is_early:
                self._begin_early_wait(now, is_due=True)

    @_guarded
    def loop_end(self) -> None:
        """Report that the loop over a loader has ended: what follows, up to ``wait_begin`` or the
        next fetch, lies between two loops."""
        if not self._span_name and not self._is_fetching and not self._is_early:
            self._begin_early_wait(self._clock(), is_due=False)

    @_guarded
    def fetch_failed(self, error: BaseException | None = None) -> None:
        """Report that the loader raised an error. Replaces ``fetch_end``."""
        if self._is_fetching:
            self._tracker.fail_fetch(*self._end_wait(self._clock()))
            text = "" if error is None else f" {type(error).__name__}: {error}"
            self.mark("error", f"the loader raised{text}")

    @_guarded
    def step(self) -> None:
        """Report that an optimizer step has ended. Ignored inside a span."""
        now = self._clock()
        if not self._span_name:
            self._blocks.follow()
            self._take(self._tracker.tell(now))
            if self._stacks is not None:
                self._stacks.thread = threading.get_ident()
                if self._tracker.num_steps < _LEARNED:
                    self._stacks.looks.learn("step", sys._getframe())
            if self._is_early:
                # The loader was found exhausted ahead of this step: the loop ends only now.
                self._begin_early_wait(now, is_due=self._is_due)
            num_skipped = self._tracker.find_skipped()
            if num_skipped:
                self._blocks.leave_out(num_skipped, now, self.read_over)
            self._overhead_seconds += self._clock() - now

    @_guarded
    def tokens(
        self, count: int, *, trainable: int | None = None, padded: int | None = None
    ) -> None:
        """Add real tokens to the current step. Reported numbers replace counted ones."""
        told = BatchCount(real_tokens=count, trainable_tokens=trainable, padded_tokens=padded)
        self._tracker.add_tokens(told)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Mark time that is not training: ``evaluate``, ``checkpoint``, ``log``.

        It is taken out of the steps and reported separately. Fetches inside it are not counted, and
        a span inside another one is part of the outer one.
        """
        # One inside a fetch is part of the wait.
        is_own = not self._span_name and not self._is_fetching
        if is_own:
            self._begin_span(name)
        try:
            yield
        finally:
            if is_own:
                self._end_span()

    # What is known of the run:

    @_guarded
    def mark(self, name: str, text: str = "") -> None:
        """Note that something happened now, by a name of your own."""
        self._journal.mark(name, text=text)

    @_guarded
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record what the trainer itself logged: the loss, the gradient norm."""
        self._journal.log(step, values)

    @_guarded
    def settings(self, **values: Any) -> None:
        """Record settings of the run."""
        self._journal.settings(values)
        self._counter.batch_size = self._journal.values.get("batch_size", 0)
        self._counter.pad_token_id = self._journal.values.get("pad_token_id")

    @_guarded
    def note_replacements(self) -> None:
        """Record which functions of Axolotl are replaced in this process by now.

        It imports nothing: if the module that replaces them is not loaded, none are replaced.
        """
        replacing = sys.modules.get("fast_axolotl.axolotl")
        patches = () if replacing is None else replacing.status().patches
        active = [patch.name for patch in patches if patch.state in ("active", "check")]
        known = self._journal.values.get("replacements", [])
        if active and not known and self.rank == 0 and os.environ.get(_RUN) != "1":
            _say(
                "fast-axolotl has replaced functions of Axolotl in the run measured in "
                f"{self.run_dir}: set FAST_AXOLOTL=0 in the environment to measure stock Axolotl"
            )
        self._journal.settings({"replacements": list(dict.fromkeys([*known, *active]))})

    @_guarded
    def reason(self, field: str, sentence: str) -> None:
        """Note why a figure is not measured."""
        self._journal.reason(field, sentence)

    @_guarded
    def model(self, shape: ModelShape) -> None:
        """Note the model's shape, from which FLOPs are computed."""
        if shape.peak_tflops is None and self._peak_tflops is not None:
            shape = replace(shape, peak_tflops=self._peak_tflops)
        self._journal.write(shape)

    @_guarded
    def window(self, window: ProfileWindow) -> None:
        """Note what a window of the profiler saw."""
        self._journal.write(window)

    def attach_sampler(self, sampler: SystemSampler) -> None:
        """Start a sampler of the process tree, which ends with the meter."""
        self._sampler = sampler
        sampler.start()

    def look_at_stacks(self) -> None:
        """Start to look at the stack of this thread; later, of the one that reports steps."""
        looks = Looks()
        self._stacks = StackSampler(looks, lambda: self.place)
        self._blocks.take_phases = looks.take_phases
        self._stacks_due = self._clock() + _LEAST_STACKS_SECONDS
        self._stacks.start()

    def worker_start(self, original: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
        """What the workers of a loader call first, in the place of the loader's own function."""
        return original if self._stacks is None else self._workers.start_before(original)

    def see_sample(self, sample: SystemSample) -> None:
        """Take the working set of a sample; called from the sampler's thread."""
        if sample.working_set_bytes is not None:
            self._working_set_bytes = sample.working_set_bytes

    # The figures:

    def current(self) -> dict[str, float]:
        """The figures so far, for a trainer's log; unknown figures are left out.

        ``stall_fraction``, ``host_stall_fraction``, ``device_stall_fraction``,
        ``steps_per_second``, ``samples_per_second``, ``tokens_per_second`` (and ``trainable_``,
        ``padded_``), ``bytes_per_second``, ``working_set_bytes``: for the steady phase once it has
        begun; before that for the warm-up, with ``is_warming`` 1.
        """
        return self._log_figures(self._blocks.current)

    def interval(self) -> dict[str, float]:
        """The figures since the last call, by the same names: what a trainer's log shows over
        time. Empty if no step has ended since then."""
        return self._log_figures(self._blocks.take_interval)

    def summary(self) -> RunSummary:
        """Every figure of the run so far, from its record."""
        self._fold(write=True)
        return summarise(read_run(self.run_dir))

    def close(self, reason: Reason = "finished", error: str = "") -> None:
        """End the record. Nothing is measured afterwards."""
        if self._is_closed:
            return
        self._finish()
        self.is_quiet = self._is_closed = True
        _meters().discard(self)
        for sampler in (self._sampler, self._stacks):
            if sampler is not None:
                sampler.stop()
        if self._stacks is not None:
            self._workers.close()
            self._overhead_seconds += self._stacks.cpu_seconds - self._stacks_cpu_seconds
        num_fetches = self._tracker.num_fetches - self._overhead_from
        self._journal.end(reason, error, self._overhead_seconds, num_fetches)
        self._blocks.close()

    def go_quiet(self) -> None:
        """Stop measuring and do not touch the record any more, as a forked child does."""
        self.is_quiet = self._is_closed = True

    # Inside.

    def _log_figures(self, take: Callable[[], dict[str, float]]) -> dict[str, float]:
        self._fold(write=False)
        size = self._working_set_bytes
        return take() | ({} if size is None else {"working_set_bytes": float(size)})

    def _end_wait(self, now: float) -> tuple[float, EventPair | None]:
        """Seconds that the host waited, and the events around them."""
        start, self._fetch_start = self._fetch_start, None
        self._is_fetching = self._is_early = False
        host_wait_seconds = 0.0 if start is None else max(0.0, now - start)
        return host_wait_seconds, self._blocks.wait_pair(self._fetch_event)

    def _begin_early_wait(self, now: float, *, is_due: bool) -> None:
        """The next loop has begun, or will, though no fetch has."""
        self._tracker.leave(now)
        self._is_early, self._is_due = True, is_due
        self._fetch_event = self._blocks.record()
        self._fetch_start = now

    def _end_between(self, now: float) -> None:
        """What lay between two loops is over: the next batch is waited for from here."""
        if self._is_early and not self._is_due:
            if now - (self._fetch_start or now) >= _LEAST_BETWEEN_SECONDS:
                self._tracker.add_span("between", *self._end_wait(now))
                self._begin_early_wait(now, is_due=True)
            self._is_due = True

    def _write_stacks(self, now: float) -> None:
        """Note the lines of code that most time went to since the last time."""
        if self._stacks is None:
            return
        journal, age = self._journal, self._journal.since_start(now)
        self._stacks_due = now + min(max(_LEAST_STACKS_SECONDS, age / 60), _MOST_STACKS_SECONDS)
        if lines := self._stacks.looks.take_lines():
            journal.write(Stacks(t=age, who="training", lines=lines))
        seconds, lines = self._workers.take()
        if lines:
            journal.write(Stacks(t=age, who="workers", seconds=round(seconds, 3), lines=lines))

    def _take(self, step: Step | None) -> None:
        if step is None:
            return
        if step.number == 0:
            self._journal.mark("first_step", at=step.end)
            self.note_replacements()
        elif step.number == WARMUP_STEPS - 1:
            self._overhead_seconds, self._overhead_from = 0.0, self._tracker.num_fetches
            if self._stacks is not None:
                self._stacks_cpu_seconds = self._stacks.cpu_seconds
            self._note_device()
        self._blocks.add(step)
        if self._tracker.note:
            self._journal.mark("note", at=step.end, text=self._tracker.note)
            self._tracker.note = ""
        if step.end >= self._stacks_due:
            self._write_stacks(step.end)

    def _note_device(self) -> None:
        self.settings(**_read_cuda())
        if reason := self._blocks.no_device_reason:
            self._journal.reason("device_stall_fraction", reason)

    @_guarded
    def _begin_span(self, name: str) -> None:
        now = self._clock()
        if self._is_early:
            wait = self._end_wait(now)
            if self._is_due:
                self._tracker.early_waits.append(wait)
            else:
                self._tracker.add_span("between", *wait)
        self._span_name, self._span_start = name, now
        self._span_event = self._blocks.record()

    @_guarded
    def _end_span(self) -> None:
        now = self._clock()
        name, self._span_name = self._span_name, ""
        if name:
            pair = self._blocks.pair(self._span_event)
            seconds = max(0.0, now - self._span_start)
            self._tracker.add_span(name, seconds, pair)
            if name in _WRITTEN_SPANS:
                at = self._journal.since_start(now)
                self._journal.write(Phase(t=at, name=name, seconds=round(seconds, 6)))
                self.settings(**_read_cuda())
            if self._tracker.waits_since is not None:
                self._begin_early_wait(now, is_due=self._is_due)

    @_guarded
    def _fold(self, *, write: bool) -> None:
        (self._blocks.flush if write else self._blocks.fold)()

    @_guarded
    def _finish(self) -> None:
        self._end_span()
        self.note_replacements()
        self._take(self._tracker.finish())
        self._blocks.finish()
        self._write_stacks(self._clock())
        self._note_device()


def _read_cuda() -> dict[str, Any]:
    """The memory that torch has taken of the device of this process, where it uses one."""
    with suppress(KeyError, AttributeError, RuntimeError):  # no torch, a device that is lost
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            held = {
                "total": cuda.get_device_properties(cuda.current_device()).total_memory,
                "reserved_peak": cuda.max_memory_reserved(),
                "allocated_peak": cuda.max_memory_allocated(),
            }
            return {"cuda_memory": held}
    return {}


@functools.cache
def _meters() -> weakref.WeakSet[Meter]:
    """All meters of this process, which go quiet in every child that is forked from now on."""
    meters: weakref.WeakSet[Meter] = weakref.WeakSet()

    def go_quiet() -> None:
        for meter in list(meters):
            meter.go_quiet()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=go_quiet)
    return meters
