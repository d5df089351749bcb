"""Norms of gradients that a training computes anyway: what the gradient noise scale is made of.

A step ends with g, the sum of the gradients h of K micro-batches, those of all ranks. Whatever the
loss was divided by, they have one distribution, so that in units of a micro-batch

    E|g|² = |G|² + tr(Σ)/K      E|K·h|² = |G|² + tr(Σ)      noise scale = tr(Σ) ÷ |G|²

|h|² is that of the step's first micro-batch. With gradient accumulation it is what ``.grad`` holds
after the first backward pass: of this rank alone under ``no_sync``, of all ranks where each pass is
reduced; then it is equal on all ranks, which the record shows. Without accumulation, hooks at the
parameters see the gradients of a rank on their way to be reduced; they are there for one pass, and
change nothing. |g|² is taken at the end of the last backward pass, before clipping. A gradient
scaler multiplies both alike.

Nothing is copied but two numbers of a step, no collective runs, and the host never waits: numbers
of a GPU come by an asynchronous copy, read once its event has passed. Fewer steps are looked at
late in a run, the same on all ranks, by powers of 2.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.guard import guarded
from fast_axolotl.measure.events import find_events

if TYPE_CHECKING:
    from fast_axolotl.measure import Meter

_EVERY_STEP_BITS = 10
"""Every step is looked at up to step 1,024, then every second one up to 2,048, and so on."""


def _stop(noise: NoiseScale, error: Exception) -> None:
    failed = f"the gradient norms failed: {type(error).__name__}: "
    noise.stop(f"{'' if isinstance(error, UsageError) else failed}{error}")


_guarded = guarded(_stop)
"""Has our faults end the norms, not the training and not the meter."""


class NoiseScale:
    """Notes norms of this process's gradients; told of backward passes, it sees steps by itself."""

    def __init__(self, meter: Meter) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook as hook

        self.is_over = self._is_due = False
        self._meter, self._torch = meter, torch
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ranks, self._owner = 1, 0
        self._events: Any = None
        self._step = self._passes = self._expected = 0
        """Steps so far, backward passes since the last one, and those of the step before."""
        self._line: dict[str, Any] = {}
        self._heard: dict[int, Any] = {}
        self._handles: list[Any] = [hook(self._before_step)]
        self._waiting: deque[tuple[dict[str, Any], Any, Any]] = deque()
        """Lines, their norms, and the events behind the copies of these."""

    @_guarded
    def close(self) -> None:
        """Write what is left."""
        if self.is_over:
            return
        if self._waiting and self._waiting[-1][-1] is not None:
            self._events.settle(self._waiting[-1][-1], seconds=2.0)
        self._read()
        self.stop()

    def stop(self, reason: str = "") -> None:
        """Look at no more gradients, for a reason."""
        self.is_over = True
        for handle in self._handles:
            handle.remove()
        if self._events is not None:
            self._events.close()
        if reason:
            self._meter.reason("gradient_noise_scale", reason)

    @_guarded
    def backward_begin(self) -> None:
        """A backward pass begins."""
        if self._is_due and not self._passes and self._expected == 1 and not self.is_over:
            for leaf in self._parameters():
                if leaf.requires_grad and not hasattr(leaf, "device_mesh"):
                    hook = functools.partial(self._hear, id(leaf))
                    self._handles.append(leaf.register_hook(hook))

    @_guarded
    def _hear(self, key: int, gradient: Any) -> None:
        """The gradient of one parameter, on its way there; in parts it has no norm of its own."""
        kind = self._torch.float32 if gradient.dtype.itemsize < 4 else None
        norm = self._torch.linalg.vector_norm(gradient.detach(), dtype=kind)
        self._heard[key] = norm * math.nan if key in self._heard else norm

    @_guarded
    def backward_end(self) -> None:
        """A backward pass has ended, its gradients reduced if it reduces any."""
        self._passes += 1
        if self.is_over or not self._is_due or self._passes not in (1, self._expected):
            return
        self._events = self._events or find_events()
        gradients = [one.grad for one in self._parameters() if one.grad is not None]
        is_sharded = any(hasattr(item, "device_mesh") for item in gradients)
        if (
            not gradients
            or (is_sharded and self._expected == 1)
            or any(hasattr(item, "_fsdp_flattened") for item in self._parameters())
        ):
            raise UsageError(
                "DeepSpeed, FSDP1 and steps inside backward hide the gradients; FSDP2 hides those "
                "of a rank, so it needs gradient accumulation that reduces each pass"
            )
        squared = self._square(gradients)
        if self._passes == 1:
            heard, self._heard = list(self._heard.values()), {}
            self._line = {"is_reduced": is_sharded and not heard}
            self._line["first"] = self._square(heard) if heard else squared
            while self._handles[1:]:
                self._handles.pop().remove()
        if self._passes == self._expected:
            self._line["whole"] = squared

    @_guarded
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step; the second of several has no backward pass before it."""
        torch = self._torch
        self._optimizers.add(optimizer)
        if self.is_over or not self._passes:
            return
        line, self._line = self._line, {}
        if line and self._passes == self._expected:
            line |= {"step": self._step, "micro_batches": self._passes}
            both, event = torch.stack([line.pop("first"), line.pop("whole")]), None
            if both.device.type != "cpu":
                if self._events is None:
                    raise UsageError(f"norms on {both.device.type} cannot be read without blocking")
                both, event = both.to("cpu", non_blocking=True), self._events.record()
            self._waiting.append((line, both, event))
        if self._step and self._owner != id(optimizer):
            raise UsageError("several optimizers have separate backward passes")
        if not self._step:
            self._owner = id(optimizer)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                self._ranks = torch.distributed.get_world_size()
        self._expected, self._passes, self._step = self._passes, 0, self._step + 1
        if self._step > 1 and self._expected == self._ranks == 1:
            raise UsageError("a step has only one micro-batch on one rank; accumulate two or more")
        self._read()
        bits = max(0, self._step.bit_length() - _EVERY_STEP_BITS)
        self._is_due = not self._step % (1 << bits)

    def _parameters(self) -> Iterator[Any]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return (parameter for group in groups for parameter in group["params"])

    def _square(self, gradients: list[Any]) -> Any:
        """This rank's part: summed over ranks, a shard counts once, and whole ones as a mean."""
        torch = self._torch
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
        return total

    def _read(self) -> None:
        """Write the norms whose copies have come."""
        while self._waiting:
            line, both, event = self._waiting[0]
            if event is not None and not self._events.has_passed(event):
                return
            self._waiting.popleft()
            if event is not None:
                self._events.seconds((event, event))  # back to the pool
            first, whole = both.tolist()
            if math.isfinite(first) and math.isfinite(whole):
                self._meter.gradients(**line, first=first, whole=whole)
