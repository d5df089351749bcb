"""What the callbacks for all trainers share.

``TrainingMeter`` holds the options, opens a meter when a training begins, has torch's loaders
report to it, and closes it when the training ends, in whatever way. A callback derives from it and
calls it from the trainer's own events; ``never_raises`` goes before each of them.

Ranks come from the launcher's variables, and ``FAST_AXOLOTL_MEASURE`` says that a process is
measured by ``fast-axolotl run --measure``: then the process tree is watched from outside, and the
verdict is printed there.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fast_axolotl.integrations.hooks import guarded
from fast_axolotl.integrations.model_shape import record_model
from fast_axolotl.integrations.parallelism import read_parallelism
from fast_axolotl.integrations.torch_meter import TorchWatch, yield_to_trainer
from fast_axolotl.measure import measure
from fast_axolotl.measure.meter import end_of
from fast_axolotl.measure.writers import has_sampler
from fast_axolotl.record.folder import free_folder
from fast_axolotl.system import MEASURE

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

LOG = logging.getLogger("fast_axolotl")

PREFIX = "fast_axolotl/"
"""Before the names of our figures in a trainer's log."""

GIVEN_UP = "the training was aborted"
"""The error of a training whose end its trainer never reported."""

_LOGGED = ("stall_fraction", "tokens_per_second")
"""The figures of ``Meter.current`` that go into a log."""
_ALL_LOGGED = (
    *(*_LOGGED, "host_stall_fraction", "device_stall_fraction", "trainable_tokens_per_second"),
    *("samples_per_second", "steps_per_second", "queue_depth", "working_set_gb", "is_warming"),
)
"""Those that go into it on request."""


def _give_up(meter: TrainingMeter, error: Exception) -> None:
    LOG.warning("fast-axolotl stopped measuring: %s: %s", type(error).__name__, error)
    meter._close("exception", f"the meter failed: {type(error).__name__}: {error}")


never_raises = guarded(_give_up)
"""Before each event of a ``TrainingMeter``."""


class TrainingMeter:
    """Measures a trainer's run into a folder; a second training into a folder beside it.

    Args:
        run_dir: The folder of the record.
        peak_tflops: The device's, where its name is not known here.
        profile_steps: So many steps are run under torch's profiler, once.
        data_paths: Files whose disk is probed.
        sample_system: Whether the process tree is watched.
        stacks: Whether the Python stack is looked at, to tell where the time of a step goes.
        log: Whether the stall and the tokens per second join the trainer's logs; ``"all"`` adds
            eight more figures.
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
        stacks: bool = True,
        log: bool | Literal["all"] = True,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.meter: Meter | None = None
        """The meter of the training at work, or of the last one."""
        self.folders: list[Path] = []
        """Of the trainings so far."""
        self._watch: TorchWatch | None = None
        """The hooks of the training at work; ``None`` where there is none."""
        self._dataset: Any = None
        self._logged = _ALL_LOGGED if log == "all" else _LOGGED if log else ()
        self._profile_steps = profile_steps
        options: dict[str, Any] = {"peak_tflops": peak_tflops, "data_paths": tuple(data_paths)}
        self._options = {**options, "sample_system": sample_system, "stacks": stacks}
        self._settings = dict(settings or {})
        self._prepare()

    def _prepare(self) -> None:
        """Set up what a callback needs of its own before a training begins."""

    def _find_dataset(self) -> Any:
        """The dataset that is trained on; ``None``: not known."""
        return self._dataset

    def _is_training(self, dataset: Any) -> bool:
        """Whether fetches of a dataset are the training's, and no evaluation is under way."""
        known = self._find_dataset()
        is_outside = self.meter is not None and not self.meter.is_in_span
        return is_outside and (known is None or dataset is known)

    def _begin(
        self,
        model: Any,
        *,
        source: str,
        rank: tuple[int, int, int],
        accumulation: int,
        settings: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> None:
        """A training begins: open a meter and hook into torch's loaders.

        ``settings`` are those that the trainer knows, before which the user's go; ``shape`` is what
        ``read_shape`` is told of the model.
        """
        yield_to_trainer()
        # One that has not ended (a batch that did not fit, tried again with a smaller one).
        self._close("exception", GIVEN_UP)
        self.folders.append(free_folder(self.run_dir, len(self.folders) + 1, rank[0]))
        self.meter = open_meter(
            self.folders[-1],
            source=source,
            rank=rank,
            accumulation=accumulation,
            told_steps=True,
            error_at_exit=GIVEN_UP,
            **self._options,
        )
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        known = {**(settings or {}), **({"attn_implementation": attention} if attention else {})}
        self.meter.settings(**{**known, **self._settings})
        if model is not None:
            self.meter.settings(**read_parallelism(model))
            record_model(self.meter, model, **shape)
        self._watch = TorchWatch(
            self.meter,
            optimizers=False,
            is_training=self._is_training,
            profile_steps=self._profile_steps,
            thread=threading.get_ident(),
        )
        self._watch.start()

    def _finish(self) -> None:
        """The training has ended well: one line says what bounds it, and where to read on."""
        is_open = self._watch is not None
        self._close("finished")
        meter = self.meter
        # ``run --measure`` prints it all.
        if is_open and meter is not None and meter.rank == 0 and not os.environ.get(MEASURE):
            headline = meter.summary().verdict.headline
            folder = shlex.quote(str(meter.run_dir))
            print(f"fast-axolotl: {headline} See: fast-axolotl show {folder}", file=sys.stderr)

    @never_raises
    def _fail(self, error: BaseException) -> None:
        """The training has ended in an error."""
        self._close(*end_of(error))

    def _close(self, reason: Any, error: str = "") -> None:
        """Let go of torch and end the record; nothing happens where both have been done."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if self.meter is not None:
            self.meter.close(reason, error)


def open_meter(
    run_dir: str | Path,
    *,
    source: str,
    rank: tuple[int, int, int] | None = None,
    sample_system: bool = True,
    error_at_exit: str = "",
    **options: Any,
) -> Meter:
    """A meter of this rank, closed at the end of the process if not before.

    A trainer reports the end of its training. ``error_at_exit`` is what has happened where the
    process ends without it; a loop of the user's own has no other end than the process's.
    ``options`` are those of ``measure``.
    """
    number, count, local = rank or (None, None, None)
    # Further trainings of a watched run have folders of their own, and the same watcher.
    watched = os.environ.get(MEASURE)
    # Axolotl trains by transformers, or by a loop of its own, never by Lightning.
    is_axolotl = source != "lightning" and "axolotl.train" in sys.modules
    meter = measure(
        run_dir,
        rank=number,
        world_size=count,
        local_rank=local,
        source="axolotl" if is_axolotl else source,
        sample_system=sample_system and not (watched and has_sampler(watched)),
        command=sys.argv,
        **options,
    )
    reference = weakref.ref(meter)

    @atexit.register
    def close() -> None:
        # The interpreter keeps what it printed a traceback of.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        is_cut_off = error is None and error_at_exit
        if (meter := reference()) is not None:
            meter.close(*(("exception", error_at_exit) if is_cut_off else end_of(error)))

    return meter


def log_figures(meter: Meter, names: Sequence[str]) -> dict[str, float]:
    """The figures since the last log, named and rounded as a trainer's log wants them."""
    figures = meter.interval()
    size = figures.get("working_set_bytes")
    if size is not None:
        figures["working_set_gb"] = size / 1e9
    return {f"{PREFIX}{name}": float(f"{figures[name]:.5g}") for name in names if name in figures}
