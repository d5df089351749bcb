"""The order of rows, and who reads which of them: all of it is decided here.

The order is a pure function of the file list, the seed, the epoch, the number of shards and a
position. Two nouns carry it: files are cut into *units*, and a unit gives *blocks* (``blocks``).

1. Without a seed, the units are read in the order of the files. With a seed they are permuted,
   and neighbours are put together until they hold a window's worth of bytes; their blocks then
   come in windows, and rows are permuted inside a window.
2. Shards deal the units among themselves, balanced by bytes. Where units are too few or too
   unequal for that, they deal the blocks of every unit; where those are too few as well, the rows
   of every block. Each is a partition: every row goes to exactly one shard.
3. A position is (unit, block, row) in the sequence of a shard.
4. A state is a position and all that it depends on, as plain JSON. It fits the same files (name,
   size, format, order) read with the same columns; anything else is refused with the reason.

When a run is resumed on another number of shards, what is left of every old shard is what the new
shards deal out: the same function again, applied to the remainder. Each such *generation* is
therefore kept in the state as the list of positions that its shards had come to, and a
``UnitShare`` is some units together with the chain of cuts that led to it.

Costs a few machine words a unit. Does not balance by rows: a text file's rows are not known until
they are read.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import ResumeError, UsageError
from fast_axolotl.reading.blocks import (
    Block,
    Dataset,
    Decoded,
    ReadOptions,
    Rejection,
    Unit,
    decode_or_reject,
)
from fast_axolotl.reading.schema import TypeClash, conform, join_or_mark
from fast_axolotl.reading.unify_types import is_joinable, unify

__all__ = [
    "BlockShare",
    "Cut",
    "Order",
    "Position",
    "ResumePoint",
    "UnitShare",
    "Window",
    "check_shard",
    "find_states",
]

_FINENESS = 4
"""Shards should have so many units or blocks each before these are fine enough to deal out."""

_STATE_VERSION = 1
_STATE_MARK = "fast_axolotl_reader"
_STATE_KEYS = {
    "fingerprint",
    "columns",
    "seed",
    "epoch",
    "shard",
    "position",
    "generations",
    "plan",
    "schema",
}


class Position(NamedTuple):
    """How far a shard has come."""

    unit: int = 0
    """Index in the shard's list of ``UnitShare``s."""
    block: int = 0
    row: int = 0

    def forward(self, rows: int) -> Position:
        return Position(self.unit, self.block, self.row + rows)


_START = Position()


@dataclass(frozen=True, slots=True)
class Cut:
    """One dealing: which share of the blocks or rows, and how much of it is already done."""

    mode: str
    """``unit``: all of it. ``block``: every count-th block. ``row``: a slice of every block."""
    index: int = 0
    count: int = 1
    offset: int = 0
    """Rotates the dealing from unit to unit, so that small units do not all favour one shard."""
    skip_blocks: int = 0
    skip_rows: int = 0


@dataclass(frozen=True, slots=True)
class UnitShare:
    """Units that are read together, one of them where nothing is shuffled, and the share meant."""

    ordinal: int
    """Its place before anything was dealt: the shuffle of its rows is seeded with it."""
    units: tuple[Unit, ...]
    num_bytes: int
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockShare:
    """A block to decode, its position in the shard's sequence, and the slices to take of it."""

    block: Block
    position: Position = _START
    slices: tuple[tuple[str, int, int], ...] = ()
    """``("share", index, count)`` or ``("skip", rows, 0)``, applied in order."""

    @property
    def weight(self) -> int:
        return self.block.weight

    @property
    def is_first(self) -> bool:
        """Whether what is said of the whole block is to be counted here and nowhere else."""
        return all(kind == "share" and first == 0 for kind, first, _ in self.slices)

    def rows(self, table: pa.Table) -> pa.Table:
        """The rows of this share, out of those of the whole block."""
        for kind, first, second in self.slices:
            if kind == "skip":
                table = table.slice(first)
            else:
                start = table.num_rows * first // second
                table = table.slice(start, table.num_rows * (first + 1) // second - start)
        return table


@dataclass(frozen=True, slots=True)
class Window:
    """A block made of blocks whose rows are shuffled together."""

    blocks: tuple[Block, ...]
    seed: tuple[int, ...]
    options: ReadOptions
    num_rows: int | None = None

    @property
    def weight(self) -> int:
        return sum(block.weight for block in self.blocks)

    @property
    def text_wins(self) -> bool:
        return any(block.text_wins for block in self.blocks)

    def decode(self, schema: pa.Schema | None) -> Decoded:
        known = schema if schema is not None else pa.schema([])
        tables: list[pa.Table] = []
        rejections: list[Rejection] = []
        for block in self.blocks:
            decoded = decode_or_reject(block, known, self.options)
            decoded, known = unify(decoded, block, known, self.options)
            tables.append(decoded.table)
            rejections += decoded.rejections
        if any(not is_joinable(table, known) for table in tables):
            return self.decode(known)
        table = pa.concat_tables([conform(table, known) for table in tables]).combine_chunks()
        order = pa.array(np.random.default_rng(self.seed).permutation(table.num_rows))
        # pyarrow cannot take from columns of views, so those go by way of plain ones.
        plain = pa.schema([field.with_type(_without_views(field.type)) for field in table.schema])
        if plain.equals(table.schema):
            return Decoded(table.take(order), tuple(rejections))
        return Decoded(table.cast(plain).take(order).cast(table.schema), tuple(rejections))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of a dataset's rows for one seed and epoch."""

    seed: int | None
    epoch: int
    shares: tuple[UnitShare, ...]
    """All units, whole: what the first generation of shards deals out."""
    block_bytes: int
    """About how large a block is."""

    @classmethod
    def plan(cls, dataset: Dataset, seed: int | None, epoch: int) -> Order:
        units = dataset.units()
        together: list[list[Unit]] = [[unit] for unit in units]
        if seed is not None:
            together, size = [], 0
            generator = np.random.default_rng([seed, epoch, 0])
            for index in generator.permutation(len(units)).tolist():
                size += units[index].num_bytes
                if not together or size > dataset.window_bytes:
                    together.append([])
                    size = units[index].num_bytes
                together[-1].append(units[index])
        shares = (
            UnitShare(ordinal, tuple(group), sum(unit.num_bytes for unit in group))
            for ordinal, group in enumerate(together)
        )
        return cls(
            seed=seed,
            epoch=epoch,
            shares=tuple(shares),
            block_bytes=dataset.options.block_bytes if seed is None else dataset.window_bytes,
        )

    def deal(
        self, shard: tuple[int, int], generations: Sequence[Sequence[Sequence[int]]] = ()
    ) -> list[UnitShare]:
        """What one shard reads, after generations of shards have come to these positions.

        Over all shards, every row that is left occurs exactly once.
        """
        shares: Sequence[UnitShare] = self.shares
        for positions in generations:
            left: list[UnitShare] = []
            for index, position in enumerate(positions):
                dealt = _deal(shares, (index, len(positions)), self.block_bytes)
                left += _resume(dealt, Position(*position))
            shares = left
        return _deal(shares, shard, self.block_bytes)

    def blocks(
        self, dataset: Dataset, shares: Sequence[UnitShare], start: Position
    ) -> Iterator[BlockShare]:
        """The blocks of a shard from a position on."""
        for offset, share in enumerate(_resume(shares, start)):
            first = start.block if offset == 0 else 0
            blocks: Iterator[BlockShare] = (
                BlockShare(block) for block in self._whole_blocks(dataset, share)
            )
            for cut in share.cuts:
                blocks = _apply(blocks, cut)
            for index, block in enumerate(blocks, first):
                yield replace(block, position=Position(start.unit + offset, index))

    def _whole_blocks(self, dataset: Dataset, share: UnitShare) -> Iterator[Block]:
        """The blocks of some units, or under a shuffle the windows of them."""
        blocks = (block for unit in share.units for block in dataset.blocks(unit))
        if self.seed is None:
            yield from blocks
            return
        held: list[Block] = []
        size = window = 0
        for block in blocks:
            held.append(block)
            size += block.weight
            if size >= dataset.window_bytes:
                yield self._window(held, share, window, dataset.options)
                held, size, window = [], 0, window + 1
        if held:
            yield self._window(held, share, window, dataset.options)

    def _window(
        self, blocks: Sequence[Block], share: UnitShare, index: int, options: ReadOptions
    ) -> Window:
        assert self.seed is not None
        return Window(tuple(blocks), (self.seed, self.epoch, 1, share.ordinal, index), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a shard goes on reading, and all that this position depends on."""

    dataset: Dataset
    """The files, cut up as they were when the state was taken."""
    order: Order
    generations: list[list[list[int]]]
    position: Position
    schema: pa.Schema
    """The columns known so far."""

    @classmethod
    def from_states(cls, value: Any, dataset: Dataset, shard: tuple[int, int]) -> ResumePoint:
        """What a shard needs out of its own state, or else out of the states of all shards."""
        states = find_states(value)
        _check_states(states, dataset)
        first = states[0]
        plan = dict(first["plan"])
        dataset = replace(dataset, window_bytes=plan.pop("window_bytes")).with_options(**plan)
        generations, position = first["generations"], _START
        own = [state for state in states if tuple(state["shard"]) == shard]
        if own:
            position = Position(*own[0]["position"])
        else:
            generations = [*generations, _all_positions(states)]
        schema = pa.schema([])
        for state in own or states:
            try:
                found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state["schema"])))
            except (pa.ArrowException, ValueError):
                raise ResumeError("the schema in the state is damaged; take an older one") from None
            try:
                schema = join_or_mark(schema, found, dataset.options.on_conflict, text_wins=True)
            except TypeClash as clash:
                raise clash.error("the data of several ranks") from None
        return cls(
            dataset=dataset,
            order=Order.plan(dataset, first["seed"], first["epoch"]),
            generations=generations,
            position=position,
            schema=schema,
        )

    def state(self, shard: tuple[int, int]) -> dict[str, Any]:
        """The same as plain JSON values."""
        options = self.dataset.options
        return {
            _STATE_MARK: _STATE_VERSION,
            "fingerprint": self.dataset.fingerprint,
            "columns": None if options.columns is None else list(options.columns),
            "seed": self.order.seed,
            "epoch": self.order.epoch,
            "shard": list(shard),
            "position": list(self.position),
            "generations": self.generations,
            "plan": {
                "block_bytes": options.block_bytes,
                "unit_bytes": options.unit_bytes,
                "window_bytes": self.dataset.window_bytes,
            },
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
        }


def find_states(value: Any) -> list[dict[str, Any]]:
    """Every reader state inside nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        if _STATE_MARK in value:
            return [dict(value)]
        return [state for item in value.values() for state in find_states(item)]
    if isinstance(value, (list, tuple)):
        return [state for item in value for state in find_states(item)]
    return []


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


def _deal(shares: Sequence[UnitShare], shard: tuple[int, int], block_bytes: int) -> list[UnitShare]:
    """The share of one shard. Over all shards, every row of ``shares`` occurs exactly once."""
    index, count = shard
    if count == 1 or not shares:
        return list(shares)
    total = sum(share.num_bytes for share in shares)
    if max(share.num_bytes for share in shares) * _FINENESS * count <= total:
        loads = [0] * count
        dealt = []
        for share in shares:
            owner = loads.index(min(loads))
            loads[owner] += share.num_bytes
            if owner == index:
                dealt.append(share)
        return dealt
    mode = "block" if total >= block_bytes * _FINENESS * count else "row"
    return [
        replace(
            share,
            num_bytes=max(1, share.num_bytes // count),
            cuts=(*share.cuts, Cut(mode, index, count, ordinal % count)),
        )
        for ordinal, share in enumerate(shares)
    ]


def _resume(shares: Sequence[UnitShare], position: Position) -> list[UnitShare]:
    """What a shard has left from a position on."""
    left = list(shares[position.unit :])
    if left and (position.block or position.row):
        cuts = left[0].cuts or (Cut("unit"),)
        if cuts[-1].skip_blocks or cuts[-1].skip_rows:
            cuts = (*cuts, Cut("unit"))
        done = replace(cuts[-1], skip_blocks=position.block, skip_rows=position.row)
        left[0] = replace(left[0], cuts=(*cuts[:-1], done))
    return left


def _apply(blocks: Iterator[BlockShare], cut: Cut) -> Iterator[BlockShare]:
    """One dealing, then its skip."""
    kept = 0
    for ordinal, block in enumerate(blocks):
        if cut.mode == "block" and (ordinal + cut.offset) % cut.count != cut.index:
            continue
        kept += 1
        if kept <= cut.skip_blocks:
            continue
        slices = block.slices
        if cut.mode == "row":
            share = (cut.index + cut.offset + ordinal) % cut.count
            slices = (*slices, ("share", share, cut.count))
        if cut.skip_rows and kept == cut.skip_blocks + 1:
            slices = (*slices, ("skip", cut.skip_rows, 0))
        yield replace(block, slices=slices)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if kind.equals(pa.string_view()):
        return pa.large_string()
    if kind.equals(pa.binary_view()):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(_without_views(inner.type)) for inner in kind])
    if pa.types.is_list(kind):
        return pa.list_(_without_views(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_without_views(kind.value_type))
    return kind


def _check_states(states: Sequence[Mapping[str, Any]], dataset: Dataset) -> None:
    """Refuses states of another version, of other files, or of different runs."""
    if not states:
        raise ResumeError("no state of a reader in what was given; pass what state_dict gave")
    if any(state[_STATE_MARK] != _STATE_VERSION for state in states):
        raise ResumeError("the state was written by another version of fast-axolotl")
    if not all(state.keys() >= _STATE_KEYS for state in states):
        raise ResumeError("the state is damaged; take an older one")
    fingerprint = dataset.fingerprint
    if any(state["fingerprint"] != fingerprint for state in states):
        raise ResumeError(
            "the state belongs to other files: names, sizes, formats and their order must be "
            "the same as when it was taken"
        )
    columns = None if dataset.options.columns is None else list(dataset.options.columns)
    if any(state["columns"] != columns for state in states):
        raise ResumeError(f"the state was taken with other columns than {columns}; use the same")
    shards = [tuple(state["shard"]) for state in states]
    if twice := next((shard for shard in shards if shards.count(shard) > 1), None):
        raise ResumeError(f"the state of shard {twice[0]} of {twice[1]} was given twice")
    for key in ("seed", "epoch", "generations", "plan"):
        if any(state[key] != states[0][key] for state in states):
            raise ResumeError(f"the states do not belong together: their {key} differs")


def _all_positions(states: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The position of every shard of one generation; all of them must be there."""
    count = int(states[0]["shard"][1])
    positions: dict[int, list[int]] = {}
    for state in states:
        index, other = state["shard"]
        if other != count:
            raise ResumeError(f"the states come from {count} and from {other} shards")
        positions[index] = list(state["position"])
    missing = sorted(set(range(count)) - set(positions))
    if missing:
        raise ResumeError(
            f"the state of shard {missing[0]} of {count} is missing; to continue on another number "
            "of ranks or workers, pass the states of all of them"
        )
    return [positions[index] for index in range(count)]
