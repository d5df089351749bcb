"""The order of rows: a pure function of the file list, the seed, the epoch and a position.

1. The files' units, in order, are the *groups*. With a seed, units are permuted and neighbours are
   grouped until a group holds a window's worth of bytes; rows are permuted inside a group.
2. A group is a sequence of *items*: blocks, or with a seed windows of blocks.
3. Shards deal the groups among themselves, balanced by bytes. Where groups are too few or too
   unequal for that, they deal the items of every group; where those are too few as well, the rows
   of every item. Each is a partition: every row goes to exactly one shard.
4. A position is (part, item, row) in the sequence of a shard.

When a run is resumed on another number of shards, what is left of every old shard becomes the list
of parts that the new shards deal out: the same function again, applied to the remainder. A *part*
is therefore a group and the chain of dealings and skips that led to it.

Costs a few machine words a unit. Does not balance by rows: a text file's rows are not known until
they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import UsageError
from fast_axolotl.reading.blocks import Unit

__all__ = [
    "Item",
    "Order",
    "Part",
    "Position",
    "Step",
    "apply_steps",
    "check_shard",
    "deal",
    "fingerprint",
    "make_groups",
    "remaining",
    "resumed",
]

_FINENESS = 4
"""Shards should have so many parts or items each before these are fine enough to deal out."""


class Position(NamedTuple):
    """How far a shard has come."""

    part: int = 0
    item: int = 0
    row: int = 0

    def forward(self, rows: int) -> Position:
        return Position(self.part, self.item, self.row + rows)


@dataclass(frozen=True, slots=True)
class Step:
    """One dealing: which share of a part's items or rows, and how much of it is already done."""

    mode: str
    """``part``: all of it. ``item``: every count-th item. ``row``: a slice of every item."""
    index: int = 0
    count: int = 1
    offset: int = 0
    """Rotates the dealing from part to part, so that small parts do not all favour one shard."""
    skip_items: int = 0
    skip_rows: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A group of units and the share of it that is meant."""

    group: int
    num_bytes: int
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """Something to decode, and the slices to take of its rows."""

    content: Any
    slices: tuple[tuple[str, int, int], ...] = ()
    """``("share", index, count)`` or ``("skip", rows, 0)``, applied in order."""

    @property
    def is_first_share(self) -> bool:
        """Whether what is said of the whole item is to be counted here and nowhere else."""
        return all(kind == "share" and first == 0 for kind, first, _ in self.slices)

    def cut(self, table: pa.Table) -> pa.Table:
        for kind, first, second in self.slices:
            if kind == "skip":
                table = table.slice(first)
            else:
                start = table.num_rows * first // second
                table = table.slice(start, table.num_rows * (first + 1) // second - start)
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The groups of a dataset for one seed and epoch."""

    units: tuple[Unit, ...]
    groups: tuple[tuple[int, ...], ...]
    """Indices into ``units``."""
    item_bytes: int
    """About how large an item is."""
    seed: int | None
    epoch: int
    parts: tuple[Part, ...]
    """Every group, whole: what the first generation of shards deals out."""

    def window_seed(self, group: int, window: int) -> tuple[int, ...]:
        """What the shuffle of one window of rows is seeded with."""
        assert self.seed is not None
        return self.seed, self.epoch, 1, group, window


def make_groups(
    units: Sequence[Unit], *, seed: int | None, epoch: int, block_bytes: int, window_bytes: int
) -> Order:
    """Groups and the parts of the first generation: every group, whole."""
    if seed is None:
        groups: list[tuple[int, ...]] = [(index,) for index in range(len(units))]
    else:
        groups = _windows(units, seed, epoch, window_bytes)
    weights = [sum(units[index].num_bytes for index in group) for group in groups]
    parts = tuple(Part(index, weight) for index, weight in enumerate(weights))
    return Order(
        units=tuple(units),
        groups=tuple(groups),
        item_bytes=block_bytes if seed is None else window_bytes,
        seed=seed,
        epoch=epoch,
        parts=parts,
    )


def deal(parts: Sequence[Part], shard: tuple[int, int], item_bytes: int) -> list[Part]:
    """The parts of one shard. Over all shards, every row of ``parts`` occurs exactly once."""
    index, count = shard
    mode = _mode(parts, count, item_bytes)
    if mode == "part":
        owners = _owners(parts, count)
        return [part for part, owner in zip(parts, owners, strict=True) if owner == index]
    return [
        replace(
            part,
            num_bytes=max(1, part.num_bytes // count),
            steps=(*part.steps, Step(mode, index, count, ordinal % count)),
        )
        for ordinal, part in enumerate(parts)
    ]


def remaining(parts: Sequence[Part], positions: dict[int, Position], item_bytes: int) -> list[Part]:
    """What is left after every shard of a generation has come to its position."""
    count = len(positions)
    left: list[Part] = []
    for index in range(count):
        left += resumed(deal(parts, (index, count), item_bytes), positions[index])
    return left


def resumed(parts: Sequence[Part], position: Position) -> list[Part]:
    """A shard's parts from a position on."""
    left = list(parts[position.part :])
    if left and (position.item or position.row):
        left[0] = _skipped(left[0], position)
    return left


def apply_steps(items: Iterator[Any], steps: Sequence[Step]) -> Iterator[Item]:
    """The items of a part: its group's items with every dealing and skip applied."""
    stream: Iterator[Item] = (Item(content) for content in items)
    for step in steps:
        stream = _apply(stream, step)
    return stream


def check_shard(shard: tuple[int, int] | None) -> tuple[int, int]:
    if shard is None:
        return 0, 1
    try:
        index, count = shard
        valid = 0 <= index < count
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise UsageError(f"shard must be (index, count) with 0 <= index < count, not {shard!r}")
    return int(index), int(count)


def fingerprint(files: Sequence[tuple[str, int, str]]) -> str:
    """A short hash of the file list: base name, size and format of each."""
    text = "\n".join(f"{name}\t{size}\t{kind}" for name, size, kind in files)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _windows(
    units: Sequence[Unit], seed: int, epoch: int, window_bytes: int
) -> list[tuple[int, ...]]:
    """Units permuted, then neighbours grouped up to a window's worth of bytes."""
    generator = np.random.default_rng([seed, epoch, 0])
    groups: list[tuple[int, ...]] = []
    held: list[int] = []
    size = 0
    for index in generator.permutation(len(units)).tolist():
        weight = units[index].num_bytes
        if held and size + weight > window_bytes:
            groups.append(tuple(held))
            held, size = [], 0
        held.append(index)
        size += weight
    return [*groups, tuple(held)] if held else groups


def _mode(parts: Sequence[Part], count: int, item_bytes: int) -> str:
    if count == 1 or not parts:
        return "part"
    total = sum(part.num_bytes for part in parts)
    if max(part.num_bytes for part in parts) * _FINENESS * count <= total:
        return "part"
    return "item" if total >= item_bytes * _FINENESS * count else "row"


def _owners(parts: Sequence[Part], count: int) -> list[int]:
    """Each part to the shard that has the fewest bytes so far."""
    loads = [0] * count
    owners = []
    for part in parts:
        owner = loads.index(min(loads))
        loads[owner] += part.num_bytes
        owners.append(owner)
    return owners


def _skipped(part: Part, position: Position) -> Part:
    steps = part.steps or (Step("part"),)
    if steps[-1].skip_items or steps[-1].skip_rows:
        steps = (*steps, Step("part"))
    done = replace(steps[-1], skip_items=position.item, skip_rows=position.row)
    return replace(part, steps=(*steps[:-1], done))


def _apply(items: Iterator[Item], step: Step) -> Iterator[Item]:
    """One dealing, then its skip."""
    kept = 0
    for ordinal, item in enumerate(items):
        if step.mode == "item" and (ordinal + step.offset) % step.count != step.index:
            continue
        kept += 1
        if kept <= step.skip_items:
            continue
        slices = item.slices
        if step.mode == "row":
            share = (step.index + step.offset + ordinal) % step.count
            slices = (*slices, ("share", share, step.count))
        if step.skip_rows and kept == step.skip_items + 1:
            slices = (*slices, ("skip", step.skip_rows, 0))
        yield replace(item, slices=slices)
