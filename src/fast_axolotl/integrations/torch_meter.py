"""Hooks into torch: the fetches of training loaders and the optimizer steps reach a meter.

What is timed is the *base* iterator: ``__next__`` of torch's loader iterators, replaced on the
class while a meter watches. Every loader built on torch's ends there, whatever is wrapped around
it: accelerate's shard and dispatcher, ``skip_first_batches``, torchdata's ``StatefulDataLoader``,
Lightning; with or without workers, pinned, persistent. Outside of it lie copies to the device,
which would bill queued device work as a wait for data.

Making an iterator is no fetch. Forking its workers falls between two epochs, which the meter takes
out and reports; waiting until they are up falls into the first fetch.

Not a training fetch, and left out: one without gradients, or of a dataset that no optimizer step
has followed, once one is known that steps follow (the loop is evaluating; the time until the next
training fetch becomes a span); one inside another, one in another thread than the training's, one
in a loader's worker. The meter itself is quiet in forked children. A loader that is not torch's is
not seen. Training and evaluation on parts of one dataset object are only told apart by gradients.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from fast_axolotl.integrations.profiling import WindowProfiler
from fast_axolotl.integrations.trained_datasets import TrainedDatasets

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

__all__ = ["TorchWatch", "read_settings", "ready_batches", "watch_torch"]

_MOST_ADAPTERS = 4
_ITERABLE = 1
"""``_DatasetKind.Iterable`` of torch: rows come from a stream, and have no numbers."""

LOG = logging.getLogger("fast_axolotl")

IsTraining = Callable[[Any], bool]
"""Told a loader's dataset, whether its fetches are the training's."""


@contextmanager
def watch_torch(
    meter: Meter, *, optimizers: bool = True, profile_steps: int = 0
) -> Iterator[TorchWatch]:
    """Have torch's loaders and optimizers report to a meter inside the block.

    Args:
        meter: Where fetches and steps go.
        optimizers: Whether the first optimizer seen tells the steps; off where something else does.
        profile_steps: So many steps are run under torch's profiler, once.
    """
    profiler = WindowProfiler(meter, profile_steps) if profile_steps else None
    after_step = profiler.step_end if profiler is not None else None
    watch = TorchWatch(meter, optimizers=optimizers, after_step=after_step)
    watch.start()
    try:
        yield watch
    finally:
        if profiler is not None:
            profiler.close()
        watch.stop()


class TorchWatch:
    """One meter's view of the loaders and optimizers of this process.

    Args:
        meter: Where fetches and steps go; or ``None`` with ``open_meter``.
        open_meter: Asked for a meter at the first training fetch.
        optimizers: Whether the first optimizer seen tells the steps.
        is_training: Which datasets are the training's; by default every one while gradients are on.
        before_fetch: Called before a training fetch: a trainer's open span ends there.
        after_step: Called when the fetch after an optimizer step begins. Not at the step's own end:
            that lies inside the optimizer's mark for profilers, which must end first.
    """

    def __init__(
        self,
        meter: Meter | None,
        *,
        open_meter: Callable[[], Meter | None] | None = None,
        optimizers: bool = True,
        is_training: IsTraining | None = None,
        before_fetch: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.meter = meter
        self._open_meter = open_meter
        self._optimizers = optimizers
        self._is_training = is_training
        self._before_fetch = before_fetch
        self._after_step = after_step
        self._thread: int | None = None
        self._is_inside = False
        self._has_stepped = False
        self._settings: dict[str, Any] = {}
        self._iterator: Callable[[], Any] = _nothing
        self._optimizer: Callable[[], Any] | None = None
        self._handle: Any = None
        self._span: AbstractContextManager[Any] | None = None
        self._datasets = TrainedDatasets()

    def start(self) -> None:
        """Hook into torch; without a meter, into its loaders alone, which load before the rest."""
        _hook_loaders()
        _WATCHES.append(self)
        if self.meter is not None:
            self._watch_optimizers()

    def stop(self) -> None:
        """Let go of torch; what was open ends here."""
        if self in _WATCHES:
            _WATCHES.remove(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._end_span()
        if not _WATCHES:
            _unhook_loaders()

    def use_this_thread(self) -> None:
        """Fetches in other threads than the calling one are somebody else's prefetching."""
        self._thread = threading.get_ident()

    def begin(self, iterator: Any) -> bool:
        """A fetch begins; whether it is the training's."""
        if self._is_inside or not self._is_here():
            return False
        if not self._is_training_now(iterator._dataset):
            return False
        if self.meter is None and not self._open():
            return False
        assert self.meter is not None
        self._end_span()
        if self._before_fetch is not None:
            self._before_fetch()
        if self._has_stepped:
            self._has_stepped = False
            if self._after_step is not None:
                self._after_step()
        if self._iterator() is not iterator:
            self._meet(iterator)
        self._is_inside = True
        self.meter.fetch_begin(ready_batches(iterator))
        return True

    def end(self, batch: Any) -> None:
        """The fetch brought a batch."""
        assert self.meter is not None
        self.meter.fetch_end(batch)
        self._is_inside = False

    def fail(self, error: BaseException) -> None:
        """The fetch brought none."""
        assert self.meter is not None
        if isinstance(error, StopIteration):
            self.meter.exhausted()
        else:
            self.meter.fetch_failed(error)
        self._is_inside = False

    def give_up(self, error: Exception) -> None:
        """Watch no more: something in here is broken, and the training goes on."""
        LOG.warning("fast_axolotl stopped measuring: %s: %s", type(error).__name__, error)
        self._is_inside = False
        if self in _WATCHES:
            _WATCHES.remove(self)
        if self.meter is not None:
            self.meter.reason(
                "stall_fraction", f"the meter failed: {type(error).__name__}: {error}"
            )

    def _is_here(self) -> bool:
        if self.meter is None:
            return True
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        return self._thread == here

    def _is_training_now(self, dataset: Any) -> bool:
        if self._is_training is not None:
            return self._is_training(dataset)
        import torch

        # Fetched without gradients it is no training, and no step is due to it.
        if torch.is_grad_enabled() and self._datasets.fetch(dataset):
            return True
        if self.meter is not None and self._span is None:
            self._span = self.meter.span("evaluate")
            self._span.__enter__()
        return False

    def _end_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _open(self) -> bool:
        from torch.utils.data import get_worker_info

        if self._open_meter is None or get_worker_info() is not None:
            return False
        self.meter = self._open_meter()
        self._thread = threading.get_ident()
        self._watch_optimizers()
        return self.meter is not None

    def _watch_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self._optimizers and self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._on_optimizer_step)

    def _meet(self, iterator: Any) -> None:
        assert self.meter is not None
        self._iterator = weakref.ref(iterator)
        found = read_settings(iterator)
        if found != self._settings:
            self._settings = found
            self.meter.settings(**found)

    def _on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Of several optimizers the first one seen tells the steps, as long as it lives."""
        if self.meter is None:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        here = threading.get_ident()
        if self._thread is not None and self._thread != here:
            self.meter.reason(
                "stall_fraction",
                "the loader is read in another thread than the optimizer steps in: "
                "its waits are not the training's",
            )
        self._thread = here
        self._datasets.step()
        # A loop may evaluate between a fetch and its step, and the meter takes no step in a span.
        self._end_span()
        self.meter.step()
        self._has_stepped = True


def ready_batches(iterator: Any) -> int | None:
    """Batches that wait in an iterator's queues; ``None`` where it has no workers, or cannot tell.

    ``_task_info`` holds what was asked for and not yet handed out, ``_tasks_outstanding`` what the
    workers still owe; the difference arrived out of turn. Reads three counters, about 3 µs.
    """
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return None
    try:
        ready = queue.qsize()
        results = iterator._worker_result_queue
        if results is not queue:
            ready += results.qsize()
        return int(ready + max(0, len(iterator._task_info) - iterator._tasks_outstanding))
    except (NotImplementedError, AttributeError, OSError, ValueError):
        # macOS cannot count, other releases may name things differently, a closed queue is gone.
        return None


def read_settings(iterator: Any) -> dict[str, Any]:
    """The settings of a loader, from its iterator."""
    workers = int(getattr(iterator, "_num_workers", 0))
    return {
        "num_workers": workers,
        "prefetch_factor": getattr(iterator, "_prefetch_factor", None) if workers else None,
        "batch_size": getattr(getattr(iterator, "_index_sampler", None), "batch_size", None),
        "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
        "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
        **_read_stream(iterator),
    }


def _read_stream(iterator: Any) -> dict[str, Any]:
    """Whether rows come from a stream, and of Hugging Face's, how many files it has to share."""
    if getattr(iterator, "_dataset_kind", None) != _ITERABLE:
        return {"streaming": False}
    dataset = getattr(iterator, "_dataset", None)
    try:
        # accelerate's adapters hold the dataset that they divide.
        for _ in range(_MOST_ADAPTERS):
            count = getattr(dataset, "num_shards", None)
            if isinstance(count, int):
                return {"streaming": True, "num_shards": count}
            dataset = getattr(dataset, "dataset", None)
    except Exception:  # noqa: BLE001 - a property of anybody's dataset may raise anything
        pass
    return {"streaming": True}


def _nothing() -> None:
    """A reference to nothing."""


_WATCHES: list[TorchWatch] = []
_ORIGINALS: list[Callable[[Any], Any]] = []
"""The ``__next__`` that ours stands in for, while it does."""


def _hook_loaders() -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if not _ORIGINALS:
        _ORIGINALS.append(_BaseDataLoaderIter.__next__)
        _BaseDataLoaderIter.__next__ = _watched(_BaseDataLoaderIter.__next__)


def _unhook_loaders() -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    # Where someone else has wrapped ours meanwhile it stays, and watches nothing.
    ours = _BaseDataLoaderIter.__next__
    if _ORIGINALS and getattr(ours, "__wrapped__", None) is _ORIGINALS[0]:
        _BaseDataLoaderIter.__next__ = _ORIGINALS.pop()


def _watched(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def __next__(self: Any) -> Any:
        watching = [watch for watch in tuple(_WATCHES) if _guarded(watch, watch.begin, self)]
        try:
            batch = original(self)
        except BaseException as error:
            for watch in watching:
                _guarded(watch, watch.fail, error)
            raise
        for watch in watching:
            _guarded(watch, watch.end, batch)
        return batch

    return __next__


def _guarded(watch: TorchWatch, action: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except Exception as error:  # noqa: BLE001
        # The one broad except: what is raised here would end the training.
        watch.give_up(error)
        return None
