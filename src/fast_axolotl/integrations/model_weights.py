"""The weights of a live model that one token is multiplied with, at their logical sizes.

A walk over the modules, not over ``parameters()``: what a module says of itself (``in_features``,
``out_features``) stays true when its weight is quantised into bytes, sharded by FSDP or DeepSpeed,
or replaced by something that is no parameter at all. Costs one visit per module.

Left out, because a token is not multiplied with them: embeddings that are looked up, biases and
norms, towers for images or sound (their tokens are not the text's), the copies that PEFT keeps of
modules it replaced, and adapters that are not active.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = ["Weight", "count_weights", "walk_weights"]

_EXPERTS = "experts"
"""Name of the module that holds the routed experts, in every model family of transformers that has
them; those every token meets are called ``shared_expert(s)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One matrix, or a stack of matrices of experts."""

    path: str
    """Where it is in the model, with dots."""
    shape: tuple[int, ...]
    """Logical, whatever its storage looks like."""
    is_trained: bool

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def is_adapter(self) -> bool:
        """Whether it belongs to a LoRA adapter."""
        return any(part.startswith("lora_") for part in self.path.split("."))

    def is_routed(self, num_experts: int | None) -> bool:
        """Whether only some tokens meet it: it belongs to routed experts."""
        if _EXPERTS in self.path.split("."):
            return True
        return len(self.shape) > 2 and self.shape[0] == num_experts


def walk_weights(model: Any, *, skipped: frozenset[int] = frozenset()) -> Iterator[Weight]:
    """Every weight that a token is multiplied with.

    ``skipped`` has the ``id`` of modules that are left out with all below them.
    """
    yield from _walk(model, "", skipped | _lookups(model), None)


def count_weights(model: Any) -> int:
    """All numbers that the model has, embeddings, biases and every expert included."""
    seen: set[int] = set()
    total = 0
    for module in model.modules():
        is_linear = _is_linear(module)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if is_linear and name == "weight":
                total += module.in_features * module.out_features
            else:
                total += prod(_logical_shape(module, parameter))
    return total


def _walk(
    module: Any, path: str, skipped: frozenset[int], adapters: frozenset[str] | None
) -> Iterator[Weight]:
    if id(module) in skipped:
        return
    if _is_linear(module):
        whole = (module.out_features, module.in_features)
        yield Weight(path=path, shape=whole, is_trained=_is_trained(module))
        return
    adapters = _active_adapters(module, adapters)
    for name, parameter in module.named_parameters(recurse=False):
        shape = _logical_shape(module, parameter)
        if len(shape) > 1 and _multiplies(path, name, adapters):
            yield Weight(
                path=_join(path, name), shape=shape, is_trained=bool(parameter.requires_grad)
            )
    for name, child in module.named_children():
        if name == "original_module" and hasattr(module, "modules_to_save"):
            continue  # PEFT trains a copy; this one is kept for undoing it and never runs
        if _is_adapter_name(path, name, adapters):
            yield from _walk(child, _join(path, name), skipped, adapters)


def _is_linear(module: Any) -> bool:
    """A layer that is one matrix. PEFT's wrappers have the same attributes and hold the layer."""
    return (
        isinstance(getattr(module, "in_features", None), int)
        and isinstance(getattr(module, "out_features", None), int)
        and not hasattr(module, "base_layer")
    )


def _is_trained(linear: Any) -> bool:
    """Some quantised layers have buffers only: nothing to train."""
    return bool(getattr(getattr(linear, "weight", None), "requires_grad", False))


def _logical_shape(module: Any, parameter: Any) -> tuple[int, ...]:
    whole = getattr(parameter, "ds_shape", None)  # DeepSpeed ZeRO-3 leaves an empty tensor
    if whole is not None:
        return tuple(whole)
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two weights to a byte
    if state is None and hasattr(module, "original") and hasattr(module, "__getitem__"):
        state = getattr(module[0], "quant_state", None)  # the same, as a parametrization
    shape = getattr(state, "shape", None)
    return tuple(parameter.shape if shape is None else shape)


def _multiplies(path: str, name: str, adapters: frozenset[str] | None) -> bool:
    """Whether a parameter of more than one dimension is a matrix: experts have such biases, and
    LoRA of an embedding looks its first half up."""
    if name.endswith("bias") or path.endswith("lora_embedding_A"):
        return False
    return _is_adapter_name(path, name, adapters)


def _is_adapter_name(path: str, name: str, adapters: frozenset[str] | None) -> bool:
    """Whether what is called so belongs to what runs: only active adapters do."""
    last = path.rpartition(".")[2]
    return adapters is None or not last.startswith("lora_") or name in adapters


def _active_adapters(module: Any, known: frozenset[str] | None) -> frozenset[str] | None:
    found = getattr(module, "active_adapters", None)
    if isinstance(found, (list, tuple)) and all(isinstance(name, str) for name in found):
        return frozenset(found)
    return known


def _lookups(model: Any) -> frozenset[int]:
    """Embeddings, less one that is also the output layer."""
    from torch.nn import Embedding

    ask = getattr(model, "get_output_embeddings", None)
    output = ask() if callable(ask) else None
    return frozenset(
        id(module)
        for module in model.modules()
        if isinstance(module, Embedding) and module is not output
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
