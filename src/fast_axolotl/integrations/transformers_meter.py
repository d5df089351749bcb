"""The meter as a callback of transformers' ``Trainer``.

    trainer = Trainer(..., callbacks=[MeterCallback("runs/a")])

Fetches come from torch's loaders (``torch_meter``), steps and spans from the trainer's events.
After a step these come in the order log, evaluate, save; what the flags of ``control`` announce
when every callback has seen the end of a step is opened as a span, and the event that says it is
done ends it. So does the next fetch: a checkpoint announced and not made costs nothing.

Figures join the trainer's logs under ``fast_axolotl/``. TensorBoard, W&B and MLflow are callbacks
too, and were made before any callback of the user. So ours moves to the front of the list as it is
added, and a second, silent one to the end, where the flags are final and the log has been written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.integrations.measuring import (
    end_of,
    log_figures,
    next_folder,
    open_meter,
    record_model,
    tell_end,
    yield_to_trainer,
)
from fast_axolotl.integrations.profiling import WindowProfiler
from fast_axolotl.integrations.torch_meter import TorchWatch

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
        self._data_paths = tuple(data_paths)
        self._sample_system = sample_system
        self._is_logging = log
        self._settings = dict(settings or {})
        self._trainings = 0
        self._watch: TorchWatch | None = None
        self._profiler: WindowProfiler | None = None
        self._dataset: Any = None
        self._span: AbstractContextManager[Any] | None = None
        self._span_name = ""
        self._logged_step = -1
        _keep_meters_in_place()

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Open a meter and hook into torch's loaders."""
        yield_to_trainer()
        # A training that ended in an error has not said so.
        self._close(sys.exc_info()[1] or RuntimeError("the training was given up"))
        self._trainings += 1
        self.meter = open_meter(
            next_folder(self.run_dir, self._trainings),
            source="transformers",
            rank=(args.process_index, args.world_size, args.local_process_index),
            accumulation=args.gradient_accumulation_steps,
            told_steps=True,
            peak_tflops=self._peak_tflops,
            data_paths=self._data_paths,
            sample_system=self._sample_system,
        )
        loader = found.get("train_dataloader")
        self._dataset = getattr(loader, "dataset", None)
        self.meter.settings(**_read_settings(args, state, loader), **self._settings)
        padding = getattr(found.get("processing_class"), "pad_token_id", None)
        if isinstance(padding, int):
            self.meter.settings(pad_token_id=padding)
        if found.get("model") is not None:
            record_model(self.meter, found["model"], **_read_lengths(args))
        if self._profile_steps:
            self._profiler = WindowProfiler(self.meter, self._profile_steps)
        self._watch = TorchWatch(
            self.meter,
            optimizers=False,
            is_training=self._is_training,
            before_fetch=self._end_span,
        )
        self._watch.use_this_thread()
        self._watch.start()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """What the end of the last epoch had announced is over."""
        self._end_span()

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """An optimizer step ended."""
        if self.meter is not None:
            self.meter.step()
        if self._profiler is not None:
            self._profiler.step_end()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **found: Any
    ) -> None:
        """Add our figures, before anyone who reports them looks."""
        if logs is None or self.meter is None or "loss" not in logs:
            return
        self._logged_step = state.global_step
        self.meter.log(state.global_step, logs)
        if self._is_logging:
            figures = log_figures(self.meter)
            logs.update(figures)
            # The trainer's own history holds a copy.
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Close the meter."""
        self._close(None)

    def open_span(self, args: Any, state: Any, control: Any) -> None:
        """Begin the first span that the flags announce, none where they announce nothing."""
        if self.meter is None or self._watch is None:
            return
        self._end_span()
        if control.should_log and state.global_step != self._logged_step:
            self._begin_span("log")
        elif control.should_evaluate:
            self._begin_span("evaluate")
        elif control.should_save:
            self._begin_span("checkpoint")

    def next_span(self, done: str, args: Any, control: Any) -> None:
        """End a span whose event has come, and begin the one that follows."""
        if self._span_name != done:
            return
        self._end_span()
        # Whether a best model is saved is only decided once the evaluation is done.
        is_best = getattr(args.save_strategy, "value", args.save_strategy) == "best"
        if done == "log" and control.should_evaluate:
            self._begin_span("evaluate")
        elif done != "checkpoint" and (control.should_save or (done == "evaluate" and is_best)):
            self._begin_span("checkpoint")

    def _is_training(self, dataset: Any) -> bool:
        if self._span_name == "evaluate":
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

    def _close(self, error: BaseException | None) -> None:
        self._end_span()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
            assert self.meter is not None
            self.meter.close(*end_of(error))
            if error is None:
                tell_end(self.meter)


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

    def on_evaluate(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self._head.next_span("evaluate", args, control)

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
