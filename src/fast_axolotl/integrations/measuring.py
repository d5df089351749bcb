"""Opening meters inside other programs: the environment's switch, the rank, the one at work.

``FAST_AXOLOTL_MEASURE=RUN`` in the environment makes every training process record into the folder
RUN, each rank into a file of its own. ``fast-axolotl run --measure`` sets it; the start-up hook
then calls ``attach()`` when ``torch`` is first looked for. From there on, what trains is measured:

- a ``transformers`` trainer: a ``MeterCallback`` joins its callbacks as they are made,
- a Lightning trainer likewise,
- any other loop: its first training fetch opens a meter, its optimizer tells the steps.

A trainer that begins replaces the meter of a plain loop: what came before was not yet training.
A process that never trains writes nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fast_axolotl.integrations.profiling import WindowProfiler
    from fast_axolotl.integrations.torch_meter import TorchWatch
    from fast_axolotl.measure import Meter

__all__ = [
    "DATA_PATHS",
    "GIVEN_UP",
    "MATMUL",
    "MEASURE",
    "PEAK_TFLOPS",
    "PROFILE_STEPS",
    "Order",
    "attach",
    "close_at_exit",
    "end_of",
    "log_figures",
    "never_raises",
    "open_meter",
    "order",
    "read_rank",
    "record_model",
    "tell_end",
    "yield_to_trainer",
]

LOG = logging.getLogger("fast_axolotl")

MEASURE = "FAST_AXOLOTL_MEASURE"
"""The environment variable that names the folder to record into; ``measure`` knows it, too."""
PEAK_TFLOPS = "FAST_AXOLOTL_PEAK_TFLOPS"
PROFILE_STEPS = "FAST_AXOLOTL_PROFILE_STEPS"
MATMUL = "FAST_AXOLOTL_MATMUL"
DATA_PATHS = "FAST_AXOLOTL_DATA_PATHS"

PREFIX = "fast_axolotl/"
"""Before the names of our figures in a trainer's log."""

_LOGGED = (
    "stall_fraction",
    "host_stall_fraction",
    "device_stall_fraction",
    "tokens_per_second",
    "trainable_tokens_per_second",
    "samples_per_second",
    "steps_per_second",
    "queue_depth",
    "working_set_gb",
    "is_warming",
)
"""Those of ``Meter.current`` that go into a log: what changes and can be acted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the environment asks for."""

    run_dir: str
    peak_tflops: float | None = None
    profile_steps: int = 0
    matmul: bool = False
    data_paths: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """The variables that ``order`` reads this from, in a child wherever it runs."""
        return {
            MEASURE: str(Path(self.run_dir).absolute()),
            PEAK_TFLOPS: "" if self.peak_tflops is None else repr(self.peak_tflops),
            PROFILE_STEPS: str(self.profile_steps),
            MATMUL: "1" if self.matmul else "",
            DATA_PATHS: os.pathsep.join(str(Path(path).absolute()) for path in self.data_paths),
        }


def order(environment: Mapping[str, str] | None = None) -> Order | None:
    """What the environment asks for; ``None``: nothing."""
    found = os.environ if environment is None else environment
    folder = found.get(MEASURE)
    if not folder:
        return None
    peak, steps, paths = (found.get(name, "") for name in (PEAK_TFLOPS, PROFILE_STEPS, DATA_PATHS))
    return Order(
        run_dir=folder,
        peak_tflops=float(peak) if peak else None,
        profile_steps=int(steps) if steps else 0,
        matmul=found.get(MATMUL) == "1",
        data_paths=tuple(filter(None, paths.split(os.pathsep))),
    )


def read_rank(environment: Mapping[str, str] | None = None) -> tuple[int, int, int]:
    """Rank, number of ranks, rank on this machine: by the launcher's variables, else torch's."""
    found = os.environ if environment is None else environment
    if found.get("RANK", "").isdigit():
        local = found.get("LOCAL_RANK", "")
        return (
            int(found["RANK"]),
            int(found.get("WORLD_SIZE", "1")),
            int(local) if local.isdigit() else 0,
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), 0
    return 0, 1, 0


def open_meter(
    run_dir: str | Path,
    *,
    source: str,
    rank: tuple[int, int, int] | None = None,
    accumulation: int = 1,
    told_steps: bool = False,
    peak_tflops: float | None = None,
    data_paths: Sequence[str] = (),
    sample_system: bool = True,
    error_at_exit: str = "",
) -> Meter:
    """A meter of this rank, closed at the end of the process if not before.

    What a trainer runs has an end that it tells. ``error_at_exit`` is what has happened where the
    process ends without it; a loop of the user's own has no other end than the process's.

    Under ``fast-axolotl run --measure`` the process tree is watched from outside, so not from here.
    """
    from fast_axolotl.measure import measure

    number, count, local = read_rank() if rank is None else rank
    is_watched = bool(os.environ.get(MEASURE))
    meter = measure(
        run_dir,
        accumulation=accumulation,
        rank=number,
        world_size=count,
        local_rank=local,
        told_steps=told_steps,
        source="axolotl" if "axolotl.train" in sys.modules else source,
        data_paths=data_paths,
        sample_system=sample_system and not is_watched,
        peak_tflops=peak_tflops,
        command=sys.argv,
    )
    close_at_exit(meter, error_at_exit)
    return meter


def record_model(meter: Meter, model: Any, *, matmul: bool = False, **known: Any) -> None:
    """Record what FLOPs are computed from, with ``matmul`` this device's own rate; or why not."""
    try:
        from fast_axolotl.integrations.matmul import measure_matmul_tflops
        from fast_axolotl.integrations.model_shape import read_shape

        shape = read_shape(model, **known)
        if matmul:
            device = next(model.parameters()).device
            shape = replace(shape, matmul_tflops=measure_matmul_tflops(device, shape.dtype))
        meter.model(shape)
    except Exception as error:  # noqa: BLE001
        # The one broad except: a model of any make must train, whether its shape is read or not.
        sentence = f"the model's shape could not be read: {type(error).__name__}: {error}"
        for field in ("mfu", "hfu", "model_flops_per_token"):
            meter.reason(field, sentence)


def log_figures(meter: Meter) -> dict[str, float]:
    """The figures so far, named and rounded as a trainer's log wants them."""
    found = meter.current()
    size = found.get("working_set_bytes")
    if size is not None:
        found["working_set_gb"] = size / 1e9
    return {f"{PREFIX}{name}": float(f"{found[name]:.5g}") for name in _LOGGED if name in found}


def tell_end(meter: Meter) -> None:
    """One line: what bounds the run, and where to read on. ``run --measure`` prints it all."""
    if meter.rank != 0 or order() is not None:
        return
    headline = meter.summary().verdict.headline
    folder = shlex.quote(str(meter.run_dir))
    print(f"fast-axolotl: {headline} See: fast-axolotl show {folder}", file=sys.stderr)


def end_of(error: BaseException | None) -> tuple[Any, str]:
    """The reason and the error with which a record ends."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished", ""
    kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "exception"
    return kind, f"{type(error).__name__}: {error}".removesuffix(": ")


GIVEN_UP = "the training was given up"
"""The error of a training whose end its trainer never told."""

_OPEN: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Meters to close at the end of the process, and the error that it then is, if it is one."""
_AT_EXIT: list[Callable[[], None]] = []


_Event = TypeVar("_Event", bound=Callable[..., Any])


def never_raises(event: _Event) -> _Event:
    """Have an event of a callback end our faults here: the training loop must not see them.

    The callback's ``abandon`` is told of the error.
    """

    @wraps(event)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return event(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001
            # The one broad except of the callbacks: what is raised here would end the training.
            LOG.warning("fast_axolotl stopped measuring: %s: %s", type(error).__name__, error)
            self.abandon(error)
            return None

    return call  # type: ignore[return-value]


def yield_to_trainer() -> None:
    """A trainer begins: whatever a plain loop has recorded by the switch was not the training."""
    for attached in _ATTACHED:
        attached.let_go()


def close_at_exit(meter: Any, error: str = "") -> None:
    """Close a meter at the end of the process: with what ends it, or with the error given."""
    if not _AT_EXIT:
        _AT_EXIT.append(_close_all)
        atexit.register(_close_all)
    _OPEN[meter] = error


def _close_all() -> None:
    # The interpreter keeps what it printed a traceback of.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for meter, otherwise in list(_OPEN.items()):
        if error is None and otherwise:
            meter.close("exception", otherwise)
        else:
            meter.close(*end_of(error))
    _OPEN.clear()


class _Attached:
    """What the environment's switch has set up in this process."""

    def __init__(self, wanted: Order) -> None:
        self.order = wanted
        self.watch: TorchWatch | None = None
        self.meter: Meter | None = None
        self.profiler: WindowProfiler | None = None
        self._folders: list[Path] = []
        self._settings: dict[str, Any] = {}

    def watch_loops(self, module: ModuleType) -> None:
        """Once torch's loaders are loaded: a plain loop opens a meter with its first fetch."""
        from fast_axolotl.integrations.torch_meter import TorchWatch

        self.watch = TorchWatch(None, open_meter=self._open, after_step=self._step_end)
        self.watch.start()

    def join_trainers(self, module: ModuleType) -> None:
        """Once transformers' callbacks are loaded: every trainer gets one of ours."""
        _after_init(module.CallbackHandler, self._join_transformers)

    def join_lightning(self, module: ModuleType) -> None:
        """Once Lightning's trainer is loaded, likewise."""
        _after_init(module.Trainer, self._join_lightning)

    def read_axolotl(self, module: ModuleType) -> None:
        """Once Axolotl's builders are loaded: what trains is told with its configuration."""
        _after_init(module.TrainerBuilderBase, self._read_axolotl)

    def let_go(self) -> None:
        """Watch plain loops no more."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        if self.meter is not None:
            self.meter.close("finished")
            self.meter = None

    def _open(self) -> Meter:
        wanted = self.order
        self.meter = open_meter(
            wanted.run_dir,
            source="torch",
            peak_tflops=wanted.peak_tflops,
            data_paths=wanted.data_paths,
        )
        if wanted.profile_steps:
            from fast_axolotl.integrations.profiling import WindowProfiler

            self.profiler = WindowProfiler(self.meter, wanted.profile_steps)
        return self.meter

    def _step_end(self) -> None:
        if self.profiler is not None:
            self.profiler.step_end()

    def _join_transformers(self, handler: Any) -> None:
        from fast_axolotl.integrations.transformers_meter import MeterCallback

        if not self._is_joined(handler.callbacks, MeterCallback):
            handler.add_callback(self._callback(MeterCallback))

    def _join_lightning(self, trainer: Any) -> None:
        from fast_axolotl.integrations.lightning_meter import MeterCallback

        if not self._is_joined(trainer.callbacks, MeterCallback):
            trainer.callbacks.insert(0, self._callback(MeterCallback))

    def _read_axolotl(self, builder: Any) -> None:
        from fast_axolotl.integrations.axolotl_config import read_telling

        self._settings["config"] = read_telling(builder.cfg)

    def _is_joined(self, callbacks: Sequence[Any], kind: type[Any]) -> bool:
        """Whether a meter is there already; one of the user's own has its own folder."""
        found: list[Any] = [item for item in callbacks if isinstance(item, kind)]
        for callback in found:
            if callback.run_dir.absolute() != Path(self.order.run_dir) and read_rank()[0] == 0:
                folder = shlex.quote(str(callback.run_dir))
                print(
                    f"fast-axolotl: this training has a MeterCallback of its own, which records "
                    f"into {folder}: see fast-axolotl show {folder}",
                    file=sys.stderr,
                )
        return bool(found)

    def _callback(self, kind: Callable[..., Any]) -> Any:
        made = kind(
            self.order.run_dir,
            peak_tflops=self.order.peak_tflops,
            profile_steps=self.order.profile_steps,
            matmul=self.order.matmul,
            data_paths=self.order.data_paths,
            settings=self._settings,
        )
        # A second trainer of this process must not take the first one's folder.
        made.folders = self._folders
        return made


_ATTACHED: list[_Attached] = []


def attach() -> bool:
    """Measure what trains in this process, if the environment asks for it; whether it does."""
    wanted = order()
    if wanted is None or _ATTACHED:
        return wanted is not None
    import wrapt

    attached = _Attached(wanted)
    _ATTACHED.append(attached)
    for name, action in (
        ("torch.utils.data.dataloader", attached.watch_loops),
        ("transformers.trainer_callback", attached.join_trainers),
        ("lightning.pytorch.trainer.trainer", attached.join_lightning),
        ("pytorch_lightning.trainer.trainer", attached.join_lightning),
        ("axolotl.core.builders.base", attached.read_axolotl),
    ):
        wrapt.register_post_import_hook(_guarded(action), name)
    return True


def _guarded(action: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:  # noqa: BLE001
            # What is raised here would end the import of torch itself.
            print(f"fast-axolotl: {module.__name__} is not measured: {error}", file=sys.stderr)

    return run


def _after_init(owner: type, action: Callable[[Any], None]) -> None:
    original = owner.__init__  # type: ignore[misc]

    @wraps(original)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        try:
            action(self)
        except Exception as error:  # noqa: BLE001
            # What is raised here would end the making of a trainer.
            print(f"fast-axolotl: {owner.__name__} is not measured: {error}", file=sys.stderr)

    owner.__init__ = __init__  # type: ignore[misc]
