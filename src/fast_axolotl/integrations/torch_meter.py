"""Hooks in torch: report the fetches of loaders and the optimizer steps to the meter.

What is timed is the *base* iterator: ``__next__`` of torch's loader iterators, replaced on the
class while a meter watches. Every loader built on torch's ends there, whatever is wrapped around
it: accelerate's shard and dispatcher, ``skip_first_batches``, torchdata's ``StatefulDataLoader``,
Lightning; with or without workers, pinned, persistent. Outside of it lie copies to the device,
which would bill queued device work as a wait for data.

The wait for an epoch's first batch begins when the epoch before ends, or else when the iterator
begins to be made: samplers plan and shuffle in there, and workers are started. What ``torch.save``
writes is a checkpoint.

Not a training fetch, and left out: one without gradients, or of a dataset that no optimizer step
has followed, once one is known that steps follow (the loop is evaluating; the time until the next
training fetch becomes a span); one inside another, one in another thread than the training's, one
in a loader's worker. The meter itself is quiet in forked children. A loader that is not torch's is
not seen. Training and evaluation on parts of one dataset object are only told apart by gradients.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from fast_axolotl.integrations.hooks import guarded, unwrap, wrap
from fast_axolotl.integrations.parallelism import read_parallelism
from fast_axolotl.integrations.profiler import WindowProfiler
from fast_axolotl.measure.batch_counts import read_loader, ready_batches

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

_SETTLING_STEPS = 2

LOG = logging.getLogger("fast_axolotl")


@contextmanager
def watch_torch(
    meter: Meter, *, optimizers: bool = True, profile_steps: int = 0
) -> Iterator[TorchWatch]:
    """Have torch's loaders and optimizers report to a meter inside the block.

    The arguments are those of ``TorchWatch``; ``optimizers=False`` if something else reports steps.
    """
    watch = TorchWatch(meter, optimizers=optimizers, profile_steps=profile_steps)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def yield_to_trainer() -> None:
    """A trainer begins: what a plain loop has recorded of its own accord was not the training."""
    for watch in tuple(_WATCHES):
        if watch.open_meter is not None:
            watch.stop()
            if watch.meter is not None:
                watch.meter.close("finished")


_survives = guarded(lambda watch, error: watch.give_up(error))


@dataclass(slots=True, eq=False)
class TorchWatch:
    """One meter's view of the loaders and optimizers of this process."""

    meter: Meter | None
    """Where fetches and steps go; or ``None`` with ``open_meter``."""
    open_meter: Callable[[], Meter | None] | None = None
    """Asked for a meter at the first training fetch or optimizer step."""
    worker_start: Callable[[Any], Any] | None = None
    """What a loader's workers call first, made of the loader's own function, until there is a
    meter."""
    optimizers: bool = True
    """Whether the first optimizer seen reports the steps; else ``step`` does."""
    is_training: Callable[[Any], bool] | None = None
    """Whether fetches of a dataset are the training's; by default those are while gradients are on,
    of datasets that optimizer steps follow."""
    profile_steps: int = 0
    """So many steps are run under torch's profiler, once."""
    thread: int | None = None
    """The training's; fetches in others are somebody else's prefetching. By default that of the
    first fetch."""
    profiler: WindowProfiler | None = None
    _is_inside: bool = False
    _has_stepped: bool = False
    _iterator: Callable[[], Any] = lambda: None
    _optimizer: Callable[[], Any] = lambda: None
    _handle: Any = None
    _span: AbstractContextManager[Any] | None = None
    _datasets: _TrainedDatasets = field(default_factory=lambda: _TrainedDatasets())

    def start(self) -> None:
        """Hook into torch."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data.dataloader import (
            _BaseDataLoaderIter,
            _MultiProcessingDataLoaderIter,
        )

        _hook(_BaseDataLoaderIter, "__next__", _watch_next)
        _hook(_BaseDataLoaderIter, "__init__", _watch_start)
        _hook(_BaseDataLoaderIter, "_reset", _watch_start)  # persistent workers: another epoch
        _hook(_MultiProcessingDataLoaderIter, "__init__", _watch_workers)
        _WATCHES.append(self)
        if self.optimizers:
            self._handle = register_optimizer_step_post_hook(self.optimizer_step)
        if self.meter is not None:
            self._use(self.meter)

    def stop(self) -> None:
        """Let go of torch; what was open ends here."""
        if self in _WATCHES:
            _WATCHES.remove(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._end_span()
        # One that stays watches nothing.
        for place, ours in () if _WATCHES else tuple(_HOOKED.items()):
            if unwrap(*place, ours):
                del _HOOKED[place]
        # Last: it may fail, and torch has to be let go of all the same.
        if self.profiler is not None:
            self.profiler.close()

    @_survives
    def begin_loop(self, loader: Any) -> None:
        """A loader's iterator begins to be made; where it is the training's, waiting begins."""
        if self.meter is not None and loader is not None and self._is_ours(loader.dataset):
            self._end_span()
            self.meter.wait_begin()

    @_survives
    def start_of_workers(self, loader: Any) -> Any:
        """What the workers of a loader are to call first; ``None``: what it says."""
        start = self.worker_start if self.meter is None else self.meter.worker_start
        return start and self._is_ours(loader.dataset) and start(loader.worker_init_fn)

    @_survives
    def begin(self, iterator: Any) -> bool:
        """A fetch begins; whether it is the training's."""
        if not self._is_ours(iterator._dataset, is_fetch=True):
            return False
        if self.meter is None and not self._open():
            return False
        assert self.meter is not None
        self._end_span()
        if self._has_stepped:
            # Not at the step's own end: that lies inside the optimizer's mark for profilers, which
            # must end first.
            self._has_stepped = False
            if self.profiler is not None:
                self.profiler.step_end()
        if self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self.meter.settings(**read_loader(iterator), **read_parallelism())
        self._is_inside = True
        self.meter.fetch_begin(ready_batches(iterator))
        return True

    @_survives
    def end(self, batch: Any) -> None:
        """The fetch brought a batch."""
        assert self.meter is not None
        self.meter.fetch_end(batch)
        self._is_inside = False

    @_survives
    def fail(self, error: BaseException) -> None:
        """The fetch brought none."""
        assert self.meter is not None
        if isinstance(error, StopIteration):
            self.meter.exhausted()
        else:
            self.meter.fetch_failed(error)
        self._is_inside = False

    def step(self) -> None:
        """An optimizer step ended, by a trainer's own count."""
        assert self.meter is not None
        self.meter.step()
        if self.profiler is not None:
            self.profiler.step_end()

    @_survives
    def optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Of several optimizers the first one seen reports the steps, as long as it lives."""
        if self.meter is None and not self._open():
            return
        assert self.meter is not None
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        here = threading.get_ident()
        if self.thread is not None and self.thread != here:
            self.meter.reason(
                "stall_fraction",
                "the loader is read in another thread than the optimizer, so its waits are "
                "not those of the training",
            )
        self.thread = here
        self._datasets.step()
        if self._datasets.was_checked:
            self.meter.read_over = "evaluate"
        # A loop may evaluate between a fetch and its step, and the meter takes no step in a span.
        self._end_span()
        self.meter.step()
        self._has_stepped = True

    @_survives
    def begin_save(self, spans: ExitStack) -> None:
        """A file is written by ``torch.save``: a checkpoint."""
        is_here = self.thread in (None, threading.get_ident()) and not self._is_inside
        if self.meter is not None and is_here:
            self._end_span()
            spans.enter_context(self.meter.span("checkpoint"))

    def give_up(self, error: Exception) -> None:
        """Watch no more: something in here is broken, and the training goes on."""
        LOG.warning("fast-axolotl stopped measuring: %s: %s", type(error).__name__, error)
        self._is_inside = False
        if self in _WATCHES:
            _WATCHES.remove(self)
        if self.meter is not None:
            self.meter.reason(
                "stall_fraction", f"the meter failed: {type(error).__name__}: {error}"
            )

    def _is_ours(self, dataset: Any, *, is_fetch: bool = False) -> bool:
        """Whether what is read of a dataset, here and now, is read to train on."""
        if self._is_inside:
            return False
        if self.meter is not None:
            here = threading.get_ident()
            if self.thread is None and is_fetch:
                self.thread = here
            elif self.thread not in (None, here):
                return False
        if self.is_training is not None:
            return self.is_training(dataset)
        import torch

        # Fetched without gradients it is no training, and no step is due to it.
        is_trained = torch.is_grad_enabled() and self._datasets.is_trained(dataset)
        if is_fetch and torch.is_grad_enabled():
            self._datasets.fetch(dataset)
        if not is_trained and self.meter is not None and self._span is None:
            self._span = self.meter.span("evaluate")
            self._span.__enter__()
        return is_trained

    def _end_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _open(self) -> bool:
        """Open the meter of a plain loop, but not in a loader's worker."""
        from torch.utils.data import get_worker_info

        if self.open_meter is None or get_worker_info() is not None:
            return False
        self.meter = self.open_meter()
        if self.meter is None:
            return False
        self.thread = threading.get_ident()
        self._use(self.meter)
        return True

    def _use(self, meter: Meter) -> None:
        import torch

        _hook(torch, "save", _watch_save)
        if self.profile_steps:
            self.profiler = WindowProfiler(meter, self.profile_steps)


class _TrainedDatasets:
    """Which datasets a plain loop trains on: those whose fetches an optimizer step follows.

    A loop may evaluate with ``no_grad`` inside of it, where the fetch itself still has gradients.
    So once a dataset is known to be trained on, another one is evaluated: until a step follows that
    no fetch of a known one explains. Then it is trained on, too (tasks that take turns, a second
    stage).

    Several datasets fetched before the very first step may all be trained on, or one of them
    checked first; the second step, which follows the trained ones alone, tells.

    A dataset is held weakly. Where none that is known lives any more (a new one for each epoch),
    the next one takes its place at once, if a known one was read at the same line.
    """

    def __init__(self) -> None:
        self.was_checked = False
        """Whether one was read before the first step that is not trained on."""
        self._known: dict[int, Callable[[], Any]] = {}
        """By ``id``, what tells whether it lives."""
        self._fetched: dict[int, Callable[[], Any]] = {}
        """Since the last step."""
        self._lines: dict[int, tuple[str, int]] = {}
        """Where the loops over datasets stand that are fetched from."""
        self._trained_lines: set[tuple[str, int]] = set()
        self._num_steps = 0

    def is_trained(self, dataset: Any) -> bool:
        """Whether a dataset counts as trained on, by what is known now."""
        self._known = {key: held for key, held in self._known.items() if held() is not None}
        if self._known:
            return id(dataset) in self._known
        return not self._trained_lines or _loop_line() in self._trained_lines

    def fetch(self, dataset: Any) -> None:
        """A dataset is fetched from."""
        key = id(dataset)
        if key in self._fetched:
            return
        if key not in self._known:
            self._lines[key] = _loop_line()
        try:
            self._fetched[key] = weakref.ref(dataset)
        except TypeError:  # a list cannot be held weakly, and is taken to live on
            self._fetched[key] = lambda: True

    def step(self) -> None:
        """An optimizer step follows what was fetched."""
        fetched, self._fetched = self._fetched, {}
        if not fetched:
            return
        explained = {key: held for key, held in fetched.items() if key in self._known}
        self._num_steps += 1
        if not explained:
            self._known.update(fetched)
        elif self._num_steps <= _SETTLING_STEPS:
            self.was_checked = len(explained) < len(self._known)
            self._known = explained
        self._lines = {key: line for key, line in self._lines.items() if key in self._known}
        self._trained_lines = set(self._lines.values())


def _loop_line() -> tuple[str, int]:
    """Where the loop stands that fetches now: the innermost line that is no part of torch or ours.

    A loop over a generator has that one's line, whoever it feeds.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and _OF_LOADERS.search(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno or 0)


_OF_LOADERS = re.compile(r"[/\\](torch|accelerate|fast_axolotl)[/\\]")
_WATCHES: list[TorchWatch] = []
_HOOKED: dict[tuple[Any, str], Callable[..., Any]] = {}
"""Where ours stands in for a function of torch: owner and name → ours."""


def _hook(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ours around a function, unless it is there."""
    if (owner, name) not in _HOOKED:
        _HOOKED[owner, name] = wrap(owner, name, around)


def _watch_next(original: Callable[[Any], Any], iterator: Any) -> Any:
    # The last first: a meter of the program's own goes before that of the run around it.
    watching = [watch for watch in _WATCHES[::-1] if watch.begin(iterator)]
    try:
        batch = original(iterator)
    except BaseException as error:
        for watch in watching:
            watch.fail(error)
        raise
    for watch in watching:
        watch.end(batch)
    return batch


def _watch_start(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
    loader = arguments[0] if arguments else named.get("loader")
    for watch in tuple(_WATCHES):
        watch.begin_loop(loader)
    return original(self, *arguments, **named)


def _watch_workers(
    original: Callable[..., None], self: Any, loader: Any, *arguments: Any, **named: Any
) -> None:
    own = loader.worker_init_fn
    starts = filter(None, (watch.start_of_workers(loader) for watch in _WATCHES[::-1]))
    loader.worker_init_fn = next(starts, own)
    try:
        original(self, loader, *arguments, **named)
    finally:
        loader.worker_init_fn = own


def _watch_save(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with ExitStack() as spans:
        for watch in tuple(_WATCHES):
            watch.begin_save(spans)
        return original(*arguments, **named)
