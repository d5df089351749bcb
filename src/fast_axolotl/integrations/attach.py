"""Measure the training in this process if the environment asks for it.

The start-up hook of ``fast-axolotl run --measure`` calls ``attach()`` when ``torch`` is first
looked for. From there on, every training process records into the folder of the ``Order``, each
rank into a file of its own:

- a ``transformers`` trainer: a ``MeterCallback`` joins its callbacks as they are made,
- a Lightning trainer likewise,
- any other loop: its first training fetch or optimizer step opens a meter, its optimizer reports
  the steps.

A trainer that begins replaces the meter of a plain loop: what came before was not yet training.
A process that never trains writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fast_axolotl.integrations.hooks import guarded, wrap
from fast_axolotl.integrations.launch import Order, order

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

_TORCH = ("torch.utils.data.dataloader", "torch.optim.optimizer")
"""What is hooked into for loops of the user's own. Both load before the rest of torch."""
_ATTACHED: list[Attachment] = []


def attach() -> bool:
    """Measure what trains in this process, if the environment asks for it; whether it does."""
    wanted = order()
    if wanted is None or _ATTACHED:
        return wanted is not None
    import wrapt

    attachment = Attachment(wanted)
    _ATTACHED.append(attachment)

    def hook(name: str, action: Callable[[ModuleType], None]) -> None:
        wrapt.register_post_import_hook(_guarded(name, action), name)

    for name in _TORCH:
        hook(name, attachment.watch_loops)
    join = attachment.join
    for name, owner, action in (
        ("transformers.trainer_callback", "CallbackHandler", partial(join, "transformers_meter")),
        ("lightning.pytorch.trainer.trainer", "Trainer", partial(join, "lightning_meter")),
        ("pytorch_lightning.trainer.trainer", "Trainer", partial(join, "lightning_meter")),
        ("axolotl.core.builders.base", "TrainerBuilderBase", attachment.read_axolotl),
    ):
        hook(name, partial(_after_init, owner, _guarded(owner, action)))
    return True


class Attachment:
    """What the environment's switch has set up in this process."""

    def __init__(self, wanted: Order) -> None:
        self._order = wanted
        self._loaded: set[str] = set()
        self._folders: list[Path] = []
        self._settings: dict[str, Any] = {}

    def watch_loops(self, module: ModuleType) -> None:
        """Once torch's loaders and optimizers are loaded: a plain loop opens a meter with its first
        fetch, or its first step."""
        self._loaded.add(module.__name__)
        if not self._loaded.issuperset(_TORCH):
            return
        from fast_axolotl.integrations.torch_meter import TorchWatch
        from fast_axolotl.measure.stacks import WorkerLines
        from fast_axolotl.measure.writers import read_rank

        order = self._order

        def open_loop_meter() -> Meter | None:
            from fast_axolotl.integrations.training_meter import open_meter
            from fast_axolotl.measure.meter import is_measured

            if is_measured():
                # The loop measures itself: meter.watch(loader).
                return None
            options = asdict(order)
            del options["profile_steps"]  # the watch's
            return open_meter(**options, source="torch")

        TorchWatch(
            None,
            open_meter=open_loop_meter,
            worker_start=WorkerLines(Path(order.run_dir), read_rank()[0]).start_before
            if order.stacks
            else None,
            profile_steps=order.profile_steps,
        ).start()

    def join(self, name: str, owner: Any) -> None:
        """Who has a trainer's list of callbacks: ours goes first, but where a meter of the user's
        own is there, whose record shows in the folder of the run, too."""
        kind = import_module(f"fast_axolotl.integrations.{name}").MeterCallback
        if not any(isinstance(item, kind) for item in owner.callbacks):
            callback = kind(**asdict(self._order), settings=self._settings)
            # A second trainer of this process must not take the first one's folder.
            callback.folders = self._folders
            owner.callbacks.insert(0, callback)

    def read_axolotl(self, builder: Any) -> None:
        """What Axolotl trains is recorded with its configuration."""
        from fast_axolotl.integrations.axolotl_plugin import recorded_settings

        self._settings.update(recorded_settings(builder.cfg))


def _after_init(owner: str, action: Callable[[Any], None], module: ModuleType) -> None:
    """Have something happen to every object of a class, once it is made."""

    def init(original: Callable[..., None], self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        action(self)

    wrap(getattr(module, owner), "__init__", init)


def _guarded(name: str, action: Callable[[Any], None]) -> Callable[[Any], None]:
    def say(_: Any, error: Exception) -> None:
        print(f"fast-axolotl: {name} is not measured: {error}", file=sys.stderr)

    return guarded(say)(action)
