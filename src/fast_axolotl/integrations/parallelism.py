"""How the ranks of a job divide the work, as far as accelerate and torch tell.

Ranks of one tensor, context or pipeline parallel group are fed the same batches, so that their
tokens must not be added up. Ranks whose weights are gathered in the forward pass (FSDP, ZeRO-3)
wait for each other there.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

__all__ = ["read_parallelism"]

_MESH_NAMES = {
    "tp": "tensor_parallel",
    "tensor": "tensor_parallel",
    "cp": "context_parallel",
    "context": "context_parallel",
    "pp": "pipeline_parallel",
    "pipeline": "pipeline_parallel",
}
"""Usual names of a device mesh's dimensions → settings."""


def read_parallelism(model: Any = None) -> dict[str, Any]:
    """Sizes of the groups, and how weights are divided; what is not known is left out."""
    found: dict[str, Any] = {}
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal():
        found["local_world_size"] = int(local)
    with suppress(Exception):  # other releases may name things differently
        found.update(_read_accelerate())
    with suppress(Exception):
        found.update(_read_mesh(model))
    return found


def _read_accelerate() -> dict[str, Any]:
    """What accelerate was set up with, where a script or trainer did."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.AcceleratorState._shared_state:
        return {}
    state = module.AcceleratorState()
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    found: dict[str, Any] = {"fsdp": kind == "FSDP"}
    plugin = state.deepspeed_plugin
    if plugin is not None:
        found["deepspeed_stage"] = int(plugin.zero_stage)
    if kind != "MEGATRON_LM":
        sizes = state.parallelism_config
        for name, setting in (("tp_size", "tensor_parallel"), ("cp_size", "context_parallel")):
            found[setting] = int(getattr(sizes, name, None) or 1)
    return found


def _read_mesh(model: Any) -> dict[str, Any]:
    """The dimensions of the device mesh that a model's weights are laid out on."""
    for weight in () if model is None else model.parameters():
        mesh = getattr(weight, "device_mesh", None)
        if mesh is not None:
            names = mesh.mesh_dim_names or ()
            sizes = dict(zip(names, mesh.shape, strict=False))
            return {_MESH_NAMES[name]: sizes[name] for name in names if name in _MESH_NAMES}
    return {}
