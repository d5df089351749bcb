"""Norms of gradients that a training computes anyway: what the gradient noise scale is made of.

A step ends with g, the sum of the gradients h of K micro-batches, those of all ranks. Whatever the
loss was divided by, they have one distribution, so that in units of a micro-batch

    E|g|² = |G|² + tr(Σ)/K      E|K·h|² = |G|² + tr(Σ)      noise scale = tr(Σ) ÷ |G|²

|h|² is that of the step's first micro-batch. With gradient accumulation it is what ``.grad`` holds
after the first backward pass: of this rank alone under ``no_sync``, of all ranks where each pass is
reduced; then it is equal on all ranks, which the record shows. FSDP2 keeps what is not reduced yet
at its unsharded parameters. Without accumulation, hooks at the parameters see the gradients of a
rank on their way to be reduced; they are there for one pass, and change nothing.

|g|² is taken at the end of the last backward pass: before clipping, and before a gradient scaler
divides. Both are divided by the scaler's factor here.

Nothing is copied but two numbers of a step, no collective runs, and the host never waits: numbers
of a GPU come by an asynchronous copy, and are read once its event has passed. Steps looked at get
fewer as a run gets longer, and where norms would take more than 1 % of the time; they are multiples
of powers of two, so that ranks look at the same ones. A loop that never clears its gradients is not
noticed.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fast_axolotl.errors import UsageError
from fast_axolotl.measure.events import find_events

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

__all__ = ["NoiseScale"]

MOST_COST = 0.01
"""Share of the time that the norms may take."""
_EVERY_STEP_BITS = 10
"""Every step is looked at up to step 1,024, then every second one up to 2,048, and so on."""
_MOST_STRIDE = 4096

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(method: _Method) -> _Method:
    """Have our faults end the norms, not the training and not the meter."""

    @functools.wraps(method)
    def call(self: NoiseScale, *arguments: Any) -> None:
        try:
            if not self.is_over:
                method(self, *arguments)
        except Exception as error:  # noqa: BLE001 - what is raised here would end the training
            text = f"the norms of the gradients failed: {type(error).__name__}: {error}"
            self.stop(str(error) if isinstance(error, UsageError) else text)

    return call  # type: ignore[return-value]


class NoiseScale:
    """Notes norms of this process's gradients; told of backward passes, it sees steps by itself."""

    def __init__(self, meter: Meter) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.is_over = False
        self.scaler: Callable[[], Any] = lambda: None
        """The gradient scaler that scaled the last loss."""
        self._meter = meter
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ranks = 1
        self._step = self._passes = self._expected = 0
        """Steps so far, backward passes since the last one, and those of the step before."""
        self._is_due = False
        self._taken: dict[str, Any] = {}
        """The fields of this step's line so far."""
        self._heard: dict[int, Any] = {}
        """Squared norms of the gradients that hooks have seen in this pass."""
        self._handles: list[Any] = []
        self._events: Any = None
        self._cost: Any = None
        """Seconds of the last norm; on a GPU the event before it."""
        self._least_cost, self._since = math.inf, 0.0
        self._waiting: deque[tuple[dict[str, Any], Any, Any, Any]] = deque()
        """Fields of a line, both norms, what they cost, and the event behind their copy."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @_guarded
    def close(self) -> None:
        """Write what is left."""
        if self._waiting and self._events is not None:
            self._events.settle(self._waiting[-1][-1], seconds=2.0)
        self._read()
        is_alone = self._expected == self._ranks == 1
        self.stop("a step is one micro-batch of one rank: accumulate two or more" * is_alone)

    def stop(self, reason: str = "") -> None:
        """Look at no more gradients, for a reason."""
        self.is_over = True
        for handle in (self._hook, *self._handles):
            handle.remove()
        if self._events is not None:
            self._events.close()
        if reason:
            self._meter.reason("gradient_noise_scale", reason)

    @_guarded
    def backward_begin(self) -> None:
        """A backward pass begins."""
        if self._is_due and not self._passes and self._expected == 1:
            leaves = [item._unsharded_param for item in _find_unsharded()]
            leaves += [item for item in self._parameters() if not hasattr(item, "device_mesh")]
            for leaf in leaves:
                if leaf.requires_grad:
                    hear = functools.partial(self._hear, id(leaf))
                    self._handles.append(leaf.register_hook(hear))

    @_guarded
    def _hear(self, key: int, gradient: Any) -> None:
        """The gradient of one parameter, on its way there."""
        squared = self._square([gradient])
        # What comes in parts has a norm that those of the parts do not tell.
        self._heard[key] = squared * math.nan if key in self._heard else squared

    @_guarded
    def backward_end(self) -> None:
        """A backward pass has ended, its gradients reduced if it reduces any."""
        self._passes += 1
        if not self._is_due or self._passes not in (1, self._expected):
            return
        begin, self._events = time.perf_counter(), self._events or find_events()
        event = None if self._events is None else self._events.record()
        gradients = [item.grad for item in self._parameters() if item.grad is not None]
        for item in _find_unsharded():
            held = item.unsharded_accumulated_grad
            gradients.append(item._unsharded_param.grad if held is None else held)
        gradients = [item for item in gradients if item is not None]
        if not gradients:
            raise UsageError(
                "no parameter has a gradient after a backward pass: DeepSpeed, and optimizers that "
                "step inside of it, keep none in .grad"
            )
        squared = self._square(gradients)
        if self._passes == 1:
            is_sharded = any(hasattr(item, "device_mesh") for item in gradients)
            self._taken = {"first": squared, "is_reduced": is_sharded}
            if self._heard:
                self._taken = {"first": sum(self._heard.values())}
            for handle in self._handles:
                handle.remove()
            self._heard, self._handles = {}, []
        if self._passes == self._expected:
            self._taken["whole"] = squared
            self._cost = time.perf_counter() - begin if event is None else event

    @_guarded
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step; the second of several has no backward pass before it."""
        import torch

        self._optimizers.add(optimizer)
        if not self._passes:
            return
        if self._is_due and self._passes == self._expected and len(self._taken) > 1:
            both, event = torch.stack([self._taken.pop("first"), self._taken.pop("whole")]), None
            if both.device.type != "cpu":
                if self._events is None:
                    raise UsageError(f"norms on {both.device.type} are not read without waiting")
                both = both.to("cpu", non_blocking=True)
                event = self._events.record()
            line = {"step": self._step, "micro_batches": self._passes, **self._taken}
            self._waiting.append((line, both, self._cost, event))
        if not self._step:
            self._since = time.perf_counter()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                self._ranks = torch.distributed.get_world_size()
        self._expected, self._passes, self._taken = self._passes, 0, {}
        self._step += 1
        self._read()
        stride = 1 << max(0, self._step.bit_length() - _EVERY_STEP_BITS)
        seconds = (time.perf_counter() - self._since) / max(1, self._step - 1)
        if self._least_cost < math.inf:
            # A step that is looked at has two norms.
            times = 2 * self._least_cost / (MOST_COST * max(seconds, 1e-9))
            times = min(max(1.0, times), _MOST_STRIDE)
            stride = max(stride, 1 << math.ceil(math.log2(times)))
        self._is_due = (self._expected > 1 or self._ranks > 1) and self._step % stride == 0

    def _parameters(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if hasattr(parameter, "_fsdp_flattened"):
                        raise UsageError("FSDP1 flattens gradients: with FSDP2 they can be seen")
                    yield parameter

    def _square(self, gradients: list[Any]) -> Any:
        """This rank's part of the squared norm: summed over ranks, each piece counts once, and of
        what every rank has a whole one the mean counts."""
        import torch

        groups: dict[Any, list[Any]] = defaultdict(list)
        for item in gradients:
            copies, local = self._ranks, item
            if hasattr(item, "device_mesh"):
                local = item._local_tensor
                for size, place in zip(item.device_mesh.shape, item.placements, strict=True):
                    copies //= 1 if place.is_replicate() else size
            groups[max(1, copies), local.device, local.dtype].append(local)
        with torch.no_grad():
            total = torch.zeros((), device=gradients[0].device)
            for (copies, _, dtype), tensors in groups.items():
                kind = torch.float32 if dtype.itemsize < 4 else None
                norms = torch.stack(torch._foreach_norm(tensors, 2, kind))
                total += (norms.square().sum() / copies).to(total.device)
            scaler = self.scaler()
            if scaler is not None and scaler._scale is not None:
                total /= scaler._scale.to(total.device).square()
        return total

    def _read(self) -> None:
        """Write the norms whose copies have come."""
        while self._waiting:
            line, both, cost, event = self._waiting[0]
            if event is not None and not self._events.has_passed(event):
                return
            self._waiting.popleft()
            seconds = cost if event is None else self._events.seconds((cost, event))
            self._least_cost = min(self._least_cost, math.inf if seconds is None else seconds)
            # Those of a step that a scaler leaves out overflow.
            first, whole = both.tolist()
            if math.isfinite(first) and math.isfinite(whole):
                self._meter.gradients(**line, first=first, whole=whole)


def _find_unsharded() -> Iterator[Any]:
    """Of every parameter of FSDP2, by torch's own books, what its backward pass works on."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return
    from torch.distributed._composable_state import _module_state_mapping

    for state in {reference() for reference in list(_module_state_mapping.values())}:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12 has one
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            yield from (item for item in group.fsdp_params if hasattr(item, "_unsharded_param"))
