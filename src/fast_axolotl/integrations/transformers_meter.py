"""The meter as a callback for transformers' ``Trainer``.

    trainer = Trainer(..., callbacks=[MeterCallback("runs/a")])

Fetches come from torch's loaders (``torch_meter``), steps and spans from the trainer's events.
Evaluations, checkpoints and logs are what happens inside of ``Trainer.evaluate`` and ``predict``,
``_save_checkpoint`` and ``log``, whoever calls them; one inside another is part of that. The
methods are bracketed in place, and do nothing more where no meter is at work.

A training that fails has no event. ``Trainer.train`` is bracketed, too, to see its error.

Figures join the trainer's logs under ``fast_axolotl/``. TensorBoard, W&B and MLflow are callbacks
too, and were made before any callback of the user. So ours moves to the front of the list as it is
added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.integrations.hooks import wrap
from fast_axolotl.integrations.training_meter import TrainingMeter, log_figures, never_raises

try:
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "the callback needs transformers in the same environment: pip install transformers"
    ) from error


class MeterCallback(TrainingMeter, TrainerCallback):  # type: ignore[misc]
    """Measures a ``Trainer``'s run into a folder; a second ``train()`` into a folder beside it.

    The arguments are those of ``TrainingMeter``.
    """

    def _prepare(self) -> None:
        self._thread = 0
        self._counted: Any = None
        _hook_transformers()

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Open a meter and hook into torch's loaders."""
        loader = known.get("train_dataloader")
        self._dataset = getattr(loader, "dataset", None)
        self._thread = threading.get_ident()
        settings = {
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "batch_size": args.per_device_train_batch_size,
            # The adapters of accelerate claim the class of what they wrap; their type tells.
            "dispatcher": type(loader).__name__ == "DataLoaderDispatcher",
            "gradient_checkpointing": bool(args.gradient_checkpointing),
            "optimizer": str(getattr(args.optim, "value", args.optim)),
            "use_liger_kernel": bool(getattr(args, "use_liger_kernel", False)),
            # How the user's script calls them: TRL's trainers have arguments of their own.
            "arguments": type(args).__name__,
        }
        if getattr(args, "sample_packing", None) is not None:
            settings["sample_packing"] = bool(args.sample_packing)
        padding = getattr(known.get("processing_class"), "pad_token_id", None)
        if isinstance(padding, int):
            settings["pad_token_id"] = padding
        # Length and packing where a trainer's arguments know them: Axolotl's and TRL's do.
        length = getattr(args, "max_seq_length", None) or getattr(args, "max_length", None)
        packed = getattr(args, "sample_packing", None) or getattr(args, "packing", None)
        self._begin(
            known.get("model"),
            source="transformers",
            rank=(args.process_index, args.world_size, args.local_process_index),
            accumulation=args.gradient_accumulation_steps,
            settings=settings,
            sequence_len=int(length) if isinstance(length, int) and length > 0 else None,
            is_packed=bool(packed),
        )
        _ACTIVE.append(self)

    @never_raises
    def on_epoch_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Leave the loop: what follows, up to the next epoch's iterator, lies between two."""
        if self.meter is not None and self._watch is not None:
            self.meter.loop_end()

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Report an optimizer step; after the first, there is a state to be counted."""
        if self._watch is not None:
            self._watch.step()
        states = getattr(known.get("optimizer"), "state", None)
        if self.meter is not None and states and self._counted is not self.meter:
            self._counted = self.meter
            parts = [part for state in states.values() for part in state.values()]
            sizes = [getattr(getattr(p, "_local_tensor", p), "nbytes", 0) for p in parts]
            self.meter.settings(optimizer_state_bytes=sum(sizes))

    @never_raises
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **known: Any
    ) -> None:
        """Add our figures to the log before other callbacks report it."""
        if logs is None or self.meter is None or self._watch is None or "loss" not in logs:
            return
        self.meter.log(state.global_step, logs)
        if self._logged:
            figures = log_figures(self.meter, self._logged)
            logs.update(figures)
            # The trainer's own history holds a copy.
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(figures)

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Close the meter."""
        self._finish()

    @property
    def _is_here(self) -> bool:
        """Whether a training is at work in this very thread."""
        return self._watch is not None and self._thread == threading.get_ident()

    def _close(self, reason: Any, error: str = "") -> None:
        """End the record; spans are no longer of interest."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        super()._close(reason, error)


_ACTIVE: list[MeterCallback] = []
"""Those whose training is at work."""


@cache
def _hook_transformers() -> None:
    """Once: bracket the methods in which trainings begin, evaluate and fail, of any trainer."""
    from transformers import Trainer

    @contextmanager
    def keep_meters_first(handler: Any) -> Iterator[None]:
        yield
        handler.callbacks.sort(key=lambda item: not isinstance(item, MeterCallback))

    @contextmanager
    def report_span(name: str, trainer: Any) -> Iterator[None]:
        with ExitStack() as spans:
            for head in _ACTIVE:
                if head._is_here and head.meter is not None:
                    spans.enter_context(head.meter.span(name))
            yield

    @contextmanager
    def report_failure(trainer: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            own = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
            for head in tuple(_ACTIVE):
                if head._is_here and head in own:
                    head._fail(error)
            raise

    _bracket(CallbackHandler, "add_callback", keep_meters_first)
    # The private ones are what the training loop calls.
    for name, span in (
        *dict.fromkeys(("evaluate", "predict", "_evaluate"), "evaluate").items(),
        ("_save_checkpoint", "checkpoint"),
        ("log", "log"),
    ):
        _bracket(Trainer, name, partial(report_span, span))
    _bracket(Trainer, "train", report_failure)


def _bracket(owner: type, name: str, bracket: Callable[[Any], AbstractContextManager[Any]]) -> None:
    def method(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
        with bracket(self):
            return original(self, *arguments, **named)

    if hasattr(owner, name):
        wrap(owner, name, method)
