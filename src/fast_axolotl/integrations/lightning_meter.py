"""The meter as a callback of Lightning's ``Trainer``.

    trainer = Trainer(..., callbacks=[MeterCallback("runs/a")])

Fetches come from torch's loaders (``torch_meter``), steps from the trainer's count of optimizer
steps. Validation and ``save_checkpoint`` are spans. Writing logs is not taken out: Lightning does
it inside its step, a few hundred microseconds every ``log_every_n_steps``.

Figures join what the module logs, under ``fast_axolotl/``, as often as the trainer logs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
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
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtraError(
            "the callback needs Lightning in the same environment: pip install lightning"
        ) from error

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

__all__ = ["MeterCallback"]


class MeterCallback(Callback):  # type: ignore[misc]
    """Measures a ``fit`` into a folder; a second ``fit`` into a folder beside it.

    Args:
        run_dir: The folder of the record.
        peak_tflops: The device's, where its name is not known here.
        profile_steps: So many steps are run under torch's profiler, once.
        matmul: Whether the matmul rate of the device is measured first, for a second.
        data_paths: Files whose disk is probed.
        sample_system: Whether the process tree is watched.
        log: Whether figures join what the module logs.
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
        self._peak_tflops = peak_tflops
        self._profile_steps = profile_steps
        self._matmul = matmul
        self._data_paths = tuple(data_paths)
        self._sample_system = sample_system
        self._is_logging = log
        self._settings = dict(settings or {})
        self.folders: list[Path] = []
        """Of the trainings so far."""
        self._watch: TorchWatch | None = None
        self._profiler: WindowProfiler | None = None
        self._span: AbstractContextManager[Any] | None = None
        self._step = 0
        self._trainer: Callable[[], Any] = lambda: None

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open a meter and hook into torch's loaders."""
        yield_to_trainer()
        self.folders.append(next_folder(self.run_dir, len(self.folders) + 1))
        self.meter = open_meter(
            self.folders[-1],
            source="lightning",
            rank=(trainer.global_rank, trainer.world_size, trainer.local_rank),
            accumulation=trainer.accumulate_grad_batches,
            told_steps=True,
            peak_tflops=self._peak_tflops,
            data_paths=self._data_paths,
            sample_system=self._sample_system,
            error_at_exit=GIVEN_UP,
        )
        self.meter.settings(**self._settings)
        record_model(self.meter, pl_module, matmul=self._matmul)
        if self._profile_steps:
            self._profiler = WindowProfiler(self.meter, self._profile_steps)
        self._step = trainer.global_step
        trainer.save_checkpoint = self._spanned(trainer.save_checkpoint)
        self._trainer = weakref.ref(trainer)
        self._watch = TorchWatch(self.meter, optimizers=False, is_training=self._is_training)
        self._watch.use_this_thread()
        self._watch.start()

    @never_raises
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Perhaps an optimizer step ended."""
        if self.meter is None or self._watch is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.meter.step()
        if self._profiler is not None:
            self._profiler.step_end()
        if self._is_logging and self._step % max(1, trainer.log_every_n_steps) == 0:
            pl_module.log_dict(log_figures(self.meter), on_step=True, on_epoch=False)

    @never_raises
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validation is no training."""
        if self._watch is not None and self._span is None:
            assert self.meter is not None
            self._span = self.meter.span("evaluate")
            self._span.__enter__()

    @never_raises
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on."""
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    @never_raises
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the meter."""
        self._close(None)

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the meter with the error that ends the training."""
        self._close(exception)

    def _is_training(self, dataset: Any) -> bool:
        # Loaders may be made anew for an epoch, so they are looked up every time.
        trainer = self._trainer()
        known = list(_datasets(getattr(trainer, "train_dataloader", None)))
        return self._span is None and (not known or any(dataset is item for item in known))

    def _spanned(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def save_checkpoint(*arguments: Any, **named: Any) -> Any:
            assert self.meter is not None
            with self.meter.span("checkpoint"):
                return save(*arguments, **named)

        return save_checkpoint

    def abandon(self, error: Exception) -> None:
        """Measure no more: something in here is broken, and the training goes on."""
        with suppress(Exception):
            # What was broken may be in the way here, too.
            self._end("exception", f"the meter failed: {type(error).__name__}: {error}")

    def _close(self, error: BaseException | None) -> None:
        is_open = self._watch is not None
        self._end(*end_of(error))
        if is_open and error is None and self.meter is not None:
            tell_end(self.meter)

    def _end(self, reason: Any, error: str) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        trainer = self._trainer()
        if trainer is not None:
            # The attribute of the instance goes, the method of the class is back.
            vars(trainer).pop("save_checkpoint", None)
        if self.meter is not None:
            self.meter.close(reason, error)


def _datasets(loaders: Any) -> Iterator[Any]:
    """The datasets of a loader, of a list or dict of loaders, or of a ``CombinedLoader``."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from _datasets(loader)
    elif hasattr(loaders, "iterables"):
        yield from _datasets(loaders.iterables)
    elif hasattr(loaders, "dataset"):
        yield loaders.dataset
