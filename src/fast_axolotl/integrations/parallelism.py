"""Find out how the ranks of a job divide the work, from accelerate and torch.

Ranks of one tensor, context or pipeline parallel group are fed the same batches, so that their
tokens must not be added up and their rows not be divided. Ranks whose weights are gathered in the
forward pass (FSDP, ZeRO-3) wait for each other there.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from fast_axolotl.errors import UsageError

_MESH_NAMES = {
    "tp": "tensor_parallel",
    "tensor": "tensor_parallel",
    "cp": "context_parallel",
    "context": "context_parallel",
    "pp": "pipeline_parallel",
    "pipeline": "pipeline_parallel",
}
"""Usual names of a device mesh's dimensions → settings."""

_SAME_ROWS = {*_MESH_NAMES, "sp"}
_OWN_ROWS = {"dp", "ddp", "data", "batch", "dp_replicate", "dp_shard", "fsdp", "replicate", "shard"}
"""Dimensions along which ranks are fed the same rows, and rows of their own."""


def read_parallelism(model: Any = None) -> dict[str, Any]:
    """Sizes of the groups, and how weights are divided; what is not known is left out."""
    found: dict[str, Any] = {}
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


def rank_in_mesh(mesh: Any) -> tuple[int, int]:
    """This process's data-parallel ``(rank, size)`` in a torch ``DeviceMesh``."""
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else range(mesh.ndim))
    rank, size = 0, 1
    for name, index, length in zip(names, mesh.get_coordinate() or (), mesh.shape, strict=True):
        if name in _OWN_ROWS:
            rank, size = rank * length + index, size * length
        elif name not in _SAME_ROWS and length > 1:
            raise UsageError(
                f"the device mesh has a dimension {name!r}, and it is unknown whether its ranks "
                "read the same rows; pass shard=(index, count), with equal values on ranks that do"
            )
    return rank, size


def find_data_rank() -> tuple[int, int] | None:
    """The data-parallel ``(rank, size)`` by accelerate's mesh or torch's group, if there is one.

    Does not see a mesh of tensor parallelism over all ranks that accelerate does not know of.
    """
    import torch.distributed as distributed

    module = sys.modules.get("accelerate.state")
    mesh = None if module is None else module.AcceleratorState._shared_state.get("device_mesh")
    if mesh is not None:
        return rank_in_mesh(mesh)
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    # A mesh calls its groups after its dimensions; ``accelerate launch`` sets variables.
    world = getattr(distributed.distributed_c10d, "_world", None)
    for name in sorted(_SAME_ROWS):
        is_set = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1") != "1"
        if is_set or any(
            getattr(group, "group_desc", "") == f"mesh_{name}" and group.size() > 1
            for group in getattr(world, "pg_map", ())
        ):
            raise UsageError(
                f"the ranks of a group {name!r} must read the same rows; pass device_mesh, or "
                "shard=(index, count) with equal values on the ranks of one group"
            )
    return distributed.get_rank(), distributed.get_world_size()
