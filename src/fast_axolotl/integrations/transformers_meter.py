"""The meter as a callback of transformers' ``Trainer``.

    trainer = Trainer(..., callbacks=[MeterCallback("runs/a")])

Fetches come from torch's loaders (``torch_meter``), steps and spans from the trainer's events.
After a step these come in the order log, evaluate, save. An evaluation is what happens inside of
``Trainer.evaluate`` and ``predict``, whoever calls them and on however many datasets; the methods
are bracketed in place, and do nothing more where no meter is at work. For the others, what the
flags of ``control`` announce when every callback has seen the end of a step is opened as a span,
and the event that says it is done ends it. So does the next fetch: a checkpoint announced and not
made costs nothing.

A training that fails has no event. ``Trainer.train`` is bracketed, too, to see its error.

Figures join the trainer's logs under ``fast_axolotl/``. TensorBoard, W&B and MLflow are callbacks
too, and were made before any callback of the user. So ours moves to the front of the list as it is
added, and a second, silent one to the end, where the flags are final and the log has been written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.integrations.measuring import (
    GIVEN_UP,
    end_of,
    log_figures,
    never_raises,
    open_meter,
    record_model,
    tell_end,
    yield_to_trainer,
)
from fast_axolotl.integrations.profiling import WindowProfiler
from fast_axolotl.integrations.torch_meter import TorchWatch
from fast_axolotl.record.run_folders import next_folder

try:
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "the callback needs transformers in the same environment: pip install transformers"
    ) from error

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

__all__ = ["MeterCallback"]


class MeterCallback(TrainerCallback):  # type: ignore[misc]
    """Measures a ``Trainer``'s run into a folder; a second ``train()`` into a folder beside it.

    Args:
        run_dir: The folder of the record.
        peak_tflops: The device's, where its name is not known here.
        profile_steps: So many steps are run under torch's profiler, once.
        matmul: Whether the matmul rate of the device is measured first, for a second.
        data_paths: Files whose disk is probed.
        sample_system: Whether the process tree is watched.
        log: Whether figures join the trainer's logs.
        settings: More that is known of the run.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        peak_tflops: float | None = None,
        profile_steps: int = 0,
        matmul: bool = False,
        data_paths: Sequence[str] = (),
        sample_system: bool = True,
        log: bool = True,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.meter: Meter | None = None
        """The meter of the training at work, or of the last one."""
        self.tail = _Tail(self)
        self._peak_tflops = peak_tflops
        self._profile_steps = profile_steps
        self._matmul = matmul
        self._data_paths = tuple(data_paths)
        self._sample_system = sample_system
        self._is_logging = log
        self._settings = dict(settings or {})
        self.folders: list[Path] = []
        """Of the trainings so far."""
        self._thread = 0
        self._watch: TorchWatch | None = None
        self._profiler: WindowProfiler | None = None
        self._dataset: Any = None
        self._span: AbstractContextManager[Any] | None = None
        self._span_name = ""
        self._num_evaluations = 0
        self._is_evaluation_announced = False
        self._is_save_due = False
        self._logged_step = -1
        _keep_meters_in_place()
        _bracket_trainers()

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Open a meter and hook into torch's loaders."""
        yield_to_trainer()
        # One that has not ended (a batch that did not fit, tried again with a smaller one).
        self._close("exception", GIVEN_UP)
        self.folders.append(next_folder(self.run_dir, len(self.folders) + 1))
        self.meter = open_meter(
            self.folders[-1],
            source="transformers",
            rank=(args.process_index, args.world_size, args.local_process_index),
            accumulation=args.gradient_accumulation_steps,
            told_steps=True,
            peak_tflops=self._peak_tflops,
            data_paths=self._data_paths,
            sample_system=self._sample_system,
            error_at_exit=GIVEN_UP,
        )
        loader = found.get("train_dataloader")
        self._dataset = getattr(loader, "dataset", None)
        self.meter.settings(**{**_read_settings(args, state, loader), **self._settings})
        padding = getattr(found.get("processing_class"), "pad_token_id", None)
        if isinstance(padding, int):
            self.meter.settings(pad_token_id=padding)
        if found.get("model") is not None:
            record_model(self.meter, found["model"], matmul=self._matmul, **_read_lengths(args))
        if self._profile_steps:
            self._profiler = WindowProfiler(self.meter, self._profile_steps)
        self._watch = TorchWatch(
            self.meter,
            optimizers=False,
            is_training=self._is_training,
            before_fetch=self._end_span,
        )
        self._thread = threading.get_ident()
        self._watch.use_this_thread()
        self._watch.start()
        _ACTIVE.append(self)

    @never_raises
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """What the end of the last epoch had announced is over."""
        self._end_span()

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """An optimizer step ended."""
        if self._watch is not None and self.meter is not None:
            self.meter.step()
        if self._profiler is not None:
            self._profiler.step_end()

    @never_raises
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **found: Any
    ) -> None:
        """Add our figures, before anyone who reports them looks."""
        if logs is None or self.meter is None or self._watch is None or "loss" not in logs:
            return
        self._logged_step = state.global_step
        self.meter.log(state.global_step, logs)
        if self._is_logging:
            figures = log_figures(self.meter)
            logs.update(figures)
            # The trainer's own history holds a copy.
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(figures)

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Close the meter."""
        is_open = self._watch is not None
        self._close("finished", "")
        if is_open and self.meter is not None:
            tell_end(self.meter)

    @never_raises
    def fail(self, error: BaseException) -> None:
        """The training has ended in an error."""
        self._close(*end_of(error))

    def abandon(self, error: Exception) -> None:
        """Measure no more: something in here is broken, and the training goes on."""
        text = f"the meter failed: {type(error).__name__}: {error}"
        with suppress(Exception):
            # What was broken may be in the way here, too.
            self._close("exception", text)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Time that is evaluation: a span, without training fetches. Inside another, part of it."""
        self._begin_evaluation()
        try:
            yield
        finally:
            self._end_evaluation()

    @property
    def is_here(self) -> bool:
        """Whether a training is at work in this very thread."""
        return self._watch is not None and self._thread == threading.get_ident()

    @never_raises
    def open_span(self, args: Any, state: Any, control: Any) -> None:
        """Begin the first span that the flags announce, none where they announce nothing."""
        if self.meter is None or self._watch is None:
            return
        self._end_span()
        self._is_evaluation_announced = bool(control.should_evaluate)
        self._is_save_due = control.should_save or _saves_the_best(args)
        if control.should_log and state.global_step != self._logged_step:
            self._begin_span("log")
        elif control.should_save and not control.should_evaluate:
            self._begin_span("checkpoint")

    @never_raises
    def next_span(self, done: str, args: Any, control: Any) -> None:
        """End a span whose event has come, and begin the one that follows."""
        if self._span_name != done:
            return
        self._end_span()
        if done == "log" and control.should_save and not self._is_evaluation_announced:
            self._begin_span("checkpoint")

    @never_raises
    def _begin_evaluation(self) -> None:
        self._num_evaluations += 1
        if self._num_evaluations == 1 and self._watch is not None:
            self._end_span()
            self._begin_span("evaluate")

    @never_raises
    def _end_evaluation(self) -> None:
        self._num_evaluations -= 1
        if self._num_evaluations:
            return
        self._end_span()
        # A checkpoint follows what the trainer evaluates, not what a callback does. Whether a best
        # model is saved is only decided once the evaluation is done.
        if self._is_evaluation_announced and self._watch is not None:
            self._is_evaluation_announced = False
            if self._is_save_due:
                self._begin_span("checkpoint")

    def _is_training(self, dataset: Any) -> bool:
        if self._num_evaluations:
            return False
        return self._dataset is None or dataset is self._dataset

    def _begin_span(self, name: str) -> None:
        assert self.meter is not None
        self._span_name, self._span = name, self.meter.span(name)
        self._span.__enter__()

    def _end_span(self) -> None:
        span, self._span, self._span_name = self._span, None, ""
        if span is not None:
            span.__exit__(None, None, None)

    def _close(self, reason: Any, error: str) -> None:
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        self._num_evaluations = 0
        self._is_evaluation_announced = False
        self._end_span()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if self.meter is not None:
            self.meter.close(reason, error)


class _Tail(TrainerCallback):  # type: ignore[misc]
    """The end of the list: by then every callback has set its flags and written its log."""

    def __init__(self, head: MeterCallback) -> None:
        self._head = head

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._head.open_span(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._head.open_span(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._head.next_span("log", args, control)

    def on_save(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._head.next_span("checkpoint", args, control)


def _keep_meters_in_place() -> None:
    """From now on, a list of callbacks keeps ours at both ends, whatever is added to it."""
    original = CallbackHandler.add_callback
    if hasattr(original, "_keeps_meters_in_place"):
        return

    @wraps(original)
    def add_callback(self: Any, callback: Any) -> None:
        original(self, callback)
        heads = [item for item in self.callbacks if isinstance(item, MeterCallback)]
        others = [item for item in self.callbacks if not isinstance(item, MeterCallback | _Tail)]
        self.callbacks[:] = [*heads, *others, *(head.tail for head in heads)]

    add_callback._keeps_meters_in_place = True  # type: ignore[attr-defined]
    CallbackHandler.add_callback = add_callback


_ACTIVE: list[MeterCallback] = []
"""Those whose training is at work."""


def _bracket_trainers() -> None:
    """From now on, evaluations and failed trainings of any trainer are told to those at work."""
    from transformers import Trainer

    # The private one is what the training loop calls: subclasses put their own evaluation into it.
    for name in ("evaluate", "predict", "_evaluate"):
        _bracket(Trainer, name, _tell_evaluation)
    _bracket(Trainer, "train", _tell_failure)


def _bracket(owner: type, name: str, bracket: Callable[[Any], AbstractContextManager[Any]]) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_is_bracketed"):
        return

    @wraps(original)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        with bracket(self):
            return original(self, *arguments, **named)

    method._is_bracketed = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


@contextmanager
def _tell_evaluation(trainer: Any) -> Iterator[None]:
    with ExitStack() as open_spans:
        for head in tuple(_ACTIVE):
            if head.is_here:
                open_spans.enter_context(head.evaluating())
        yield


@contextmanager
def _tell_failure(trainer: Any) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        own = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
        for head in tuple(_ACTIVE):
            if head.is_here and head in own:
                head.fail(error)
        raise


def _saves_the_best(args: Any) -> bool:
    return bool(getattr(args.save_strategy, "value", args.save_strategy) == "best")


def _read_settings(args: Any, state: Any, loader: Any) -> dict[str, Any]:
    found = {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "gradient_accumulation": args.gradient_accumulation_steps,
        "batch_size": args.per_device_train_batch_size,
        "pin_memory": args.dataloader_pin_memory,
        "persistent_workers": args.dataloader_persistent_workers,
        # The adapters of accelerate claim the class of what they wrap; their type tells.
        "dispatcher": type(loader).__name__ == "DataLoaderDispatcher",
        "gradient_checkpointing": bool(args.gradient_checkpointing),
    }
    if state.global_step:
        found["resumed_at_step"] = state.global_step
    if getattr(args, "sample_packing", None) is not None:
        found["sample_packing"] = bool(args.sample_packing)
    return found


def _read_lengths(args: Any) -> dict[str, Any]:
    """Length and packing where a trainer's arguments know them: Axolotl's and TRL's do."""
    length = getattr(args, "max_seq_length", None) or getattr(args, "max_length", None)
    packed = getattr(args, "sample_packing", None) or getattr(args, "packing", None)
    return {
        "sequence_len": int(length) if isinstance(length, int) and length > 0 else None,
        "is_packed": bool(packed),
    }
