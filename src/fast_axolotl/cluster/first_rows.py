"""Which rows repeat an earlier one: dealt to buckets by their digests, decided bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Engine, Heard

__all__ = ["Part", "find_repeated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows whose digests are in ``digests/NAME.npy``: two uint64 a row."""

    name: str
    num_rows: int
    first_place: int | None
    """The place of its first row among all rows, the others following; ``None`` where every row has
    a place of its own, in ``places/NAME.npy``: one int64 a row."""


def find_repeated(
    engine: Engine, store: Store, parts: Sequence[Part], *, memory: int, heard: Heard
) -> Any:
    """The places of all rows that repeat a row of an earlier place, as a sorted int64 array."""
    raise NotImplementedError
