"""How many ranks see the same batches, so that what they count is not added up twice.

Ranks of one tensor, context or pipeline parallel group are fed the same batches. The sizes of these
groups stand in the settings. Where they do not, fingerprints of a few batches tell: ranks that all
saw other batches count other tokens. Equal fingerprints are no proof, since a made-up dataset may
repeat one row; they are reported, and nothing is divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.measure.ready_queue import number_of

__all__ = ["Replicas", "find_replicas"]

_SIZES = {
    "tensor_parallel": ("tensor_parallel_size",),
    "context_parallel": ("context_parallel_size", "sequence_parallel_degree"),
    "pipeline_parallel": ("pipeline_parallel_size",),
}
"""Setting → names of the same in a framework's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How a job's ranks share the batches."""

    copies: int = 1
    """Ranks that count the same tokens."""
    data_parallel_size: int | None = None
    """Groups that see other batches; ``None``: not known."""
    note: str = ""
    """What to know about sums over ranks."""


def find_replicas(ranks: Sequence[RankFigures], world_size: int) -> Replicas:
    """By the settings, else by the batches."""
    if world_size < 2:
        return Replicas(data_parallel_size=world_size or None)
    sizes = [_read_sizes(rank.settings) for rank in ranks]
    known = {name: size for found in sizes for name, size in found.items()}
    copies = math.prod(known.values())
    groups = _count_groups(ranks)
    are_all_other = len(ranks) == world_size == groups
    if any(rank.settings.get("dispatcher") for rank in ranks):
        # Rank 0 counts all of it, once.
        return Replicas(data_parallel_size=max(1, world_size // copies) if known else None)
    if copies > 1 and (are_all_other or world_size % copies):
        why = "every rank saw other batches" if are_all_other else f"{world_size} ranks do not fit"
        text = ", ".join(f"{name} {size}" for name, size in known.items() if size > 1)
        note = f"the settings say {text.replace('_', ' ')}, but {why}: nothing is divided by it"
        return Replicas(data_parallel_size=world_size if are_all_other else None, note=note)
    if known or are_all_other:
        return Replicas(copies=copies, data_parallel_size=world_size // copies)
    note = (
        f"tokens, samples and rows are summed over {world_size} ranks: whether ranks of a tensor "
        "or context parallel group saw the same batches is not known"
    )
    if groups is not None and groups < len(ranks):
        note = (
            f"of {len(ranks)} ranks only {groups} saw other batches: tokens, samples and rows are "
            f"probably counted {len(ranks) / groups:.3g} times; pass the sizes with "
            "meter.settings(tensor_parallel=…, context_parallel=…)"
        )
    return Replicas(note=note)


def _read_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    config = settings.get("config")
    found = {}
    for name, others in _SIZES.items():
        sizes = [number_of(settings, name)]
        if isinstance(config, Mapping):
            sizes += [number_of(config, other) for other in others]
        told = [round(size) for size in sizes if size is not None and size >= 1]
        if told:
            found[name] = max(told)
    return found


def _count_groups(ranks: Sequence[RankFigures]) -> int | None:
    """Of ranks that saw the same batches; ``None`` where the fingerprints do not tell."""
    prints = [
        {mark.fetch: mark.text for mark in rank.record.marks if mark.name == "batch" and mark.text}
        for rank in ranks
    ]
    common = set(prints[0]).intersection(*prints[1:]) if prints else set()
    seen = {tuple(found[fetch] for fetch in sorted(common, key=str)) for found in prints}
    # One row that is repeated for ever looks like one batch seen by all.
    is_varied = len(common) > 1 and all(len(set(one)) > 1 for one in seen)
    return len(seen) if is_varied else None
