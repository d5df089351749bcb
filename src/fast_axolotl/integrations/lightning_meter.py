"""The meter as a callback for Lightning's ``Trainer``.

    trainer = Trainer(..., callbacks=[MeterCallback("runs/a")])

Fetches come from torch's loaders (``torch_meter``), steps from the trainer's count of optimizer
steps. Validation and ``save_checkpoint`` are spans. Writing logs is not taken out: Lightning does
it inside its step, a few hundred microseconds every ``log_every_n_steps``.

Figures join what the module logs, under ``fast_axolotl/``, as often as the trainer logs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.integrations.hooks import wrap
from fast_axolotl.integrations.training_meter import TrainingMeter, log_figures, never_raises

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtraError(
            "the callback needs Lightning in the same environment: pip install lightning"
        ) from error


class MeterCallback(TrainingMeter, Callback):  # type: ignore[misc]
    """Measures a ``fit`` into a folder; a second ``fit`` into a folder beside it.

    The arguments are those of ``TrainingMeter``.
    """

    def _prepare(self) -> None:
        self._step = 0
        self._spans = ExitStack()
        self._trainer: Callable[[], Any] = lambda: None

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open a meter and hook into torch's loaders."""
        self._step = trainer.global_step
        self._trainer = weakref.ref(trainer)
        self._begin(
            pl_module,
            source="lightning",
            rank=(trainer.global_rank, trainer.world_size, trainer.local_rank),
            accumulation=trainer.accumulate_grad_batches,
            settings=_read_layout(trainer),
        )
        assert self.meter is not None
        meter = self.meter

        def save_checkpoint(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            with meter.span("checkpoint"):
                return original(*arguments, **named)

        wrap(trainer, "save_checkpoint", save_checkpoint)

    @never_raises
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report an optimizer step, if one has ended."""
        if self.meter is None or self._watch is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._watch.step()
        if self._logged and self._step % max(1, trainer.log_every_n_steps) == 0:
            pl_module.log_dict(log_figures(self.meter, self._logged), on_step=True, on_epoch=False)

    @never_raises
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a span: validation is not training."""
        if self.meter is not None and self._watch is not None:
            self._spans.enter_context(self.meter.span("evaluate"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the span of the validation."""
        self._spans.close()

    @never_raises
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the loop: Lightning counts batches, and may never find a loader exhausted."""
        if self.meter is not None and self._watch is not None:
            self.meter.loop_end()

    @never_raises
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the meter."""
        self._finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the meter with the error that ends the training."""
        self._fail(exception)

    def _find_dataset(self) -> Any:
        # The loader may be made anew for an epoch, so it is looked up every time.
        return getattr(getattr(self._trainer(), "train_dataloader", None), "dataset", None)

    def _close(self, reason: Any, error: str = "") -> None:
        """End the record; the trainer's own ``save_checkpoint`` is back."""
        trainer = self._trainer()
        if trainer is not None:
            # The attribute of the instance goes, the method of the class is back.
            vars(trainer).pop("save_checkpoint", None)
        super()._close(reason, error)


def _read_layout(trainer: Any) -> dict[str, Any]:
    """How the ranks share a model."""
    strategy = type(trainer.strategy).__name__
    tensor_parallel = getattr(trainer.strategy, "_tensor_parallel_size", 1)
    settings: dict[str, Any] = {"fsdp": strategy == "FSDPStrategy", "context_parallel": 1}
    if isinstance(tensor_parallel, int):
        settings["tensor_parallel"] = tensor_parallel
    if strategy == "DeepSpeedStrategy":
        config = getattr(trainer.strategy, "config", None) or {}
        settings["deepspeed_stage"] = config.get("zero_optimization", {}).get("stage")
    return settings
