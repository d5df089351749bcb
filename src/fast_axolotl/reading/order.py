"""Decide the order of rows and which shard reads them; save and restore positions.

The order is a pure function of the file list, the seed, the epoch, the number of shards and a
position. Files are cut into *units* by the data alone (``blocks``), and then:

1. Shards deal whole units among themselves, balanced by bytes, so that together they read every
   byte once. They deal runs of neighbours, long ones first: a shard reads neighbours as a *piece*.
   Only where units are fewer than shards do several shards read the same unit. Each then takes
   every n-th row of it. Where shards are to give the same number of batches, the number of rows of
   every unit is known, and those with more rows than others hand some over: a unit or two for each
   shard are then read twice.
2. Without a seed a shard reads its pieces in the order of the files. With a seed it permutes its
   units, and then the rows inside *windows*, which are full at a number of decoded bytes
   (``rows``).
3. A position is (piece, row) in the sequence of a shard. Under a shuffle it also says where the
   current window ends, and how many of its rows have been taken.
4. A state is a position and all that it depends on, as plain JSON. It fits the same files (name,
   size, format, order) read with the same columns; anything else is refused with the reason.

When a run is resumed on another number of shards, what is left of all old shards is what the new
shards deal out: units that no shard had begun, and the pieces in which a shard had stopped. Each
such *generation* is kept in the state as the list of positions that its shards had come to.

Costs a few machine words a unit, and n·log(shards) to deal them. Does not balance by rows: those of
a text file are not known until they are read.
"""

from __future__ import annotations

import heapq
import operator
import sys
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import ResumeError, UsageError
from fast_axolotl.reading.blocks import Dataset, Unit
from fast_axolotl.reading.index import unit_rows, with_csv_edges
from fast_axolotl.reading.schema import join_schemas, schema_of, schema_text

_RUNS = 8
"""A shard is dealt what is left in runs of about this fraction of its share: long at first, and
single units at the end, which even out what the runs before left uneven."""

_RUN_BYTES = 4 * 1024 * 1024
"""A run is no longer. A constant, because shards with different memory budgets must deal alike."""

_SHUFFLED_TOGETHER = 256
"""A shuffle permutes at least so many parts of a shard, where it has as many units."""

_WORTH_A_WARNING_BYTES = 1024 * 1024
"""Files smaller than this cost nothing to read on every shard."""

_ALL = range(sys.maxsize)
"""The numbers of the rows of a piece."""

_STATE_VERSION = 8
_STATE_MARK = "fast_axolotl_reader"
_SHARED_KEYS = ("fingerprint", "seed", "epoch", "even", "generations", "plan")
_STATE_KEYS = {*_SHARED_KEYS, "shard", "position", "rows", "schema"}


class ShardWarning(UserWarning):
    """Shards read more than their share, because files cannot be cut."""


class Position(NamedTuple):
    """How far a shard has come."""

    piece: int = 0
    """Index in the shard's sequence; under a shuffle of the piece in which the window begins."""
    row: int = 0
    """Row in that piece."""
    end_piece: int = -1
    """The piece in which the current window ends; -1 between windows and without a shuffle."""
    end_row: int = 0
    """The row behind the window's last one in that piece."""
    taken: int = 0
    """Rows of the permuted window that have been delivered."""

    def forward(self, rows: int) -> Position:
        if self.end_piece < 0:
            return Position(self.piece, self.row + rows)
        return Position(*self[:4], self.taken + rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """An element of a shard's sequence: neighbouring units of one file, which are read in one go;
    or what an earlier generation left of a window."""

    units: tuple[Unit, ...] = ()
    kept: range = _ALL
    """Which of their rows to keep, by number."""
    window: tuple[Piece, ...] = ()
    """In place of units: the pieces whose rows were permuted together."""
    seed: tuple[int, ...] = ()
    """Of that permutation."""

    @property
    def unit(self) -> Unit:
        """All units as one."""
        first, last = self.units[0], self.units[-1]
        return replace(first, stop=last.stop, num_bytes=sum(unit.num_bytes for unit in self.units))

    @property
    def num_bytes(self) -> int:
        """Its weight: encoded bytes; what is skipped counts too."""
        total = sum(unit.num_bytes for part in self.window or (self,) for unit in part.units)
        return max(1, total // self.kept.step)

    @property
    def place(self) -> tuple[int, int]:
        unit = (self.window or (self,))[0].units[0]
        return unit.file, unit.start

    @property
    def is_whole(self) -> bool:
        """Whether all rows are left of what are units."""
        return self.kept == _ALL and not self.window

    def with_step(self, *of_slice: int | None) -> Piece:
        return replace(self, kept=self.kept[slice(*of_slice)])

    def count(self, rows: Mapping[Unit, int]) -> int:
        """The number of rows, given those of each unit."""
        count = sum(rows[unit] for unit in self.units) + sum(p.count(rows) for p in self.window)
        return bisect_left(self.kept, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of a dataset's rows for one seed and epoch."""

    dataset: Dataset
    """The files, cut up as they were when a state was taken."""
    seed: int | None
    epoch: int
    rows: Mapping[Unit, int] | None = None
    """The rows of each unit, where shards are to have the same number of them."""
    generations: tuple[tuple[Position, ...], ...] = ()
    """For each earlier number of shards, the positions that these had come to."""
    dealt: dict[int, list[list[Piece]]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """What ``deal`` gave: a second of work for a terabyte, and asked for several times."""

    def deal(self, count: int) -> list[list[Piece]]:
        """What each of ``count`` shards gets: over all of them, every row that is left once."""
        if count in self.dealt:
            return self.dealt[count]
        left = [Piece((unit,)) for unit in self.dataset.units()]
        for generation, positions in enumerate(self.generations):
            dealt, left = _deal(left, len(positions), self.rows), []
            for index, position in enumerate(positions):
                shard = (index, len(positions))
                sequence = self._arrange(dealt[index], shard, generation)
                left += self._left(sequence, position, shard, generation)
            left.sort(key=lambda piece: (piece.is_whole, piece.place if piece.is_whole else ()))
        return self.dealt.setdefault(count, _deal(left, count, self.rows))

    def sequence(self, shard: tuple[int, int]) -> list[Piece]:
        """What one shard reads, in order."""
        index, count = shard
        return self._arrange(self.deal(count)[index], shard, len(self.generations))

    def window_seed(
        self, shard: tuple[int, int], generation: int, position: Position
    ) -> tuple[int, ...]:
        """Of the permutation of the window that begins at a position."""
        assert self.seed is not None
        return (self.seed, self.epoch, 1, *shard, generation, position.piece, position.row)

    def _arrange(
        self, dealt: Sequence[Piece], shard: tuple[int, int], generation: int
    ) -> list[Piece]:
        """The sequence of a shard, out of what it was dealt."""
        most_bytes = self.dataset.options.block_bytes // 2
        if self.seed is None:
            return list(_merge(dealt, most_bytes))
        windows = [piece for piece in dealt if piece.window]
        items = [piece for piece in dealt if not piece.window]
        # Neighbours stay together where there are many: reading single ones costs more time.
        total = sum(piece.num_bytes for piece in items)
        items = list(_merge(items, min(most_bytes, total // _SHUFFLED_TOGETHER)))
        generator = np.random.default_rng([self.seed, self.epoch, 0, *shard, generation])
        return windows + [items[place] for place in generator.permutation(len(items)).tolist()]

    def _left(
        self,
        sequence: Sequence[Piece],
        position: Position,
        shard: tuple[int, int],
        generation: int,
    ) -> Iterator[Piece]:
        """What a shard has left from a position on; whole units are units again."""
        at, row = position.piece, position.row
        if position.taken:
            pieces = list(sequence[at : position.end_piece + 1])
            pieces[-1] = pieces[-1].with_step(position.end_row)
            if row:
                pieces[0] = pieces[0].with_step(row, None)
            seed = self.window_seed(shard, generation, position)
            yield Piece(kept=_ALL[position.taken :], window=tuple(pieces), seed=seed)
            at, row = position.end_piece, position.end_row
        if row and at < len(sequence):  # behind the end are rows that were repeated
            yield sequence[at].with_step(row, None)
            at += 1
        for piece in sequence[at:]:
            if piece.is_whole:
                yield from (Piece((unit,)) for unit in piece.units)
            else:
                yield piece


@dataclass(slots=True, kw_only=True)
class ResumePoint:
    """Where a shard goes on reading, and all that this position depends on."""

    order: Order
    schema: pa.Schema
    """The columns known so far."""
    position: Position = field(default_factory=Position)
    rows: int = 0
    """Delivered by this shard since the number of shards last changed."""

    @classmethod
    def from_states(cls, value: Any, dataset: Dataset, shard: tuple[int, int]) -> ResumePoint:
        """What a shard needs out of its own state, or else out of the states of all shards."""
        states = find_states(value)
        _check_states(states, dataset)
        first = states[0]
        plan = dict(first["plan"])
        is_csv_cut = plan.pop("csv_cut")
        dataset = replace(dataset, window_bytes=plan.pop("window_bytes")).with_options(**plan)
        dataset = with_csv_edges(dataset, is_csv_cut)
        generations = [
            tuple(Position(*position) for position in positions)
            for positions in first["generations"]
        ]
        position, rows = Position(), 0
        own = [state for state in states if tuple(state["shard"]) == shard]
        if len(own) == 1:
            position, rows = Position(*own[0]["position"]), int(own[0]["rows"])
        else:
            own = states
            generations.append(_all_positions(states))
        schema = pa.schema([])
        for state in own:
            found = schema_of(state["schema"])
            schema = join_schemas(schema, found, text_wins=True, source="the data of several ranks")
        order = Order(
            dataset=dataset,
            seed=first["seed"],
            epoch=first["epoch"],
            rows=unit_rows(dataset) if first["even"] else None,
            generations=tuple(generations),
        )
        return cls(order=order, position=position, rows=rows, schema=schema)

    def state(self, shard: tuple[int, int]) -> dict[str, Any]:
        """The same as plain JSON values."""
        dataset, options = self.order.dataset, self.order.dataset.options
        return {
            _STATE_MARK: _STATE_VERSION,
            "fingerprint": dataset.fingerprint,
            "seed": self.order.seed,
            "epoch": self.order.epoch,
            "even": self.order.rows is not None,
            "shard": list(shard),
            "position": list(self.position),
            "rows": self.rows,
            "generations": [list(map(list, positions)) for positions in self.order.generations],
            "plan": {
                "block_bytes": options.block_bytes,
                "unit_bytes": options.unit_bytes,
                "window_bytes": dataset.window_bytes,
                "csv_cut": any(getattr(file, "edges", None) for file in dataset.files),
            },
            "schema": schema_text(self.schema),
        }


def find_states(value: Any, mark: str = _STATE_MARK) -> list[dict[str, Any]]:
    """Every reader state, or state with another mark, inside nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        if mark in value:
            return [dict(value)]
        return [state for item in value.values() for state in find_states(item, mark)]
    if isinstance(value, (list, tuple)):
        return [state for item in value for state in find_states(item, mark)]
    return []


def check_shard(shard: tuple[int, int] | None) -> tuple[int, int]:
    try:
        index, count = map(operator.index, (0, 1) if shard is None else shard)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise UsageError(
            f"shard is {shard!r}; pass two whole numbers, the index of the shard and the number of "
            "shards, such as (0, 4) for the first of four"
        )
    return index, count


def _merge(pieces: Sequence[Piece], most_bytes: int) -> Iterator[Piece]:
    """Pieces in the order of the files, whole neighbours put together up to a size."""
    held: list[Unit] = []
    size = 0
    for piece in sorted(pieces, key=operator.attrgetter("place")):
        units, more = piece.units if piece.is_whole else (), piece.num_bytes
        is_next = units and held and (held[-1].file, held[-1].stop) == piece.place
        if held and not (is_next and size + more <= most_bytes):
            yield Piece(tuple(held))
            held, size = [], 0
        if units:
            held += units
            size += more
        else:
            yield piece
    if held:
        yield Piece(tuple(held))


def _deal(
    left: list[Piece], count: int, rows: Mapping[Unit, int] | None = None
) -> list[list[Piece]]:
    """Pieces dealt out to shards. Over all of them, each row occurs exactly once.

    With ``rows``, those of each unit, no shard has two more rows than another.
    """
    if count == 1:
        return [left]
    shards: list[list[Piece]] = [[] for _ in range(count)]
    if len(left) < count:
        sizes, readers = [piece.num_bytes for piece in left], [1] * len(left)
        for _ in range(count - len(left) if left else 0):
            # The next shard goes to whatever is largest for each of its readers.
            index = max(range(len(left)), key=lambda index: sizes[index] / readers[index])
            readers[index] += 1
        parts = (
            piece if number == 1 else piece.with_step(index, None, number)
            for piece, number in zip(left, readers, strict=True)
            for index in range(number)
        )
        for pieces, part in zip(shards, parts, strict=bool(left)):
            pieces.append(part)
    else:
        loads = [(0, index) for index in range(count)]
        unread = sum(piece.num_bytes for piece in left)
        run: list[Piece] = []
        size = 0
        for piece in left:
            are_neighbours = run and piece.is_whole and run[-1].place[0] == piece.place[0]
            run_bytes = min(_RUN_BYTES, unread // (_RUNS * count))
            if run and not (are_neighbours and size + piece.num_bytes <= run_bytes):
                load, index = loads[0]
                shards[index] += run
                heapq.heapreplace(loads, (load + size, index))
                run, size = [], 0
            run.append(piece)
            size += piece.num_bytes
            unread -= piece.num_bytes
        shards[loads[0][1]] += run
    if rows is None:
        return shards
    counts = [sum(piece.count(rows) for piece in pieces) for pieces in shards]
    share_rows, extra = divmod(sum(counts), count)
    surplus = [held - share_rows - (index < extra) for index, held in enumerate(counts)]
    spare: list[Piece] = []
    for pieces, more in zip(shards, surplus, strict=True):
        _hand_over(pieces, spare, more, rows)
    for pieces, more in zip(shards, surplus, strict=True):
        _hand_over(spare, pieces, -more, rows)
    shards[-1] += spare  # whose rows are all damaged, or none
    return shards


def _hand_over(giver: list[Piece], taker: list[Piece], more: int, rows: Mapping[Unit, int]) -> None:
    """Moves so many rows from the end of a list, in whole pieces as far as they go."""
    while more > 0:
        piece = giver.pop()
        num_rows = piece.count(rows)
        if num_rows > more:
            giver.append(piece.with_step(num_rows - more))
            piece, num_rows = piece.with_step(num_rows - more, None), more
        taker.append(piece)
        more -= num_rows


def warn_of_sharing(order: Order, count: int) -> None:
    """Reports a large file that several shards read."""
    for piece in (piece for pieces in order.deal(count) for piece in pieces):
        source = order.dataset.files[piece.place[0]].source
        # What is left of a window is shared as well, but only once, and it is small.
        is_shared = not piece.window and piece.kept.step > 1
        if is_shared and source.num_bytes >= _WORTH_A_WARNING_BYTES:
            warnings.warn(
                f"{source.path}: several of {count} shards each read all of this file, "
                "because it has too few parts that can be read separately; write the data as more "
                "files, or as uncompressed JSON Lines, Parquet or Arrow",
                ShardWarning,
                stacklevel=4,
            )
            return


def _check_states(states: Sequence[Mapping[str, Any]], dataset: Dataset) -> None:
    """Refuses states of another version, of other files, or of different runs."""
    if not states:
        raise ResumeError("this is not a state of a reader; pass the return value of state_dict()")
    first = states[0]
    if old := next((s for s in states if s[_STATE_MARK] != _STATE_VERSION), None):
        raise ResumeError(
            f"the state has format {old[_STATE_MARK]!r}, but this version of fast-axolotl reads "
            f"format {_STATE_VERSION} and orders rows differently; start the epoch again, or "
            "finish it with the version that wrote the state"
        )
    if not all(state.keys() >= _STATE_KEYS for state in states):
        raise ResumeError("the state is incomplete; use an older state")
    for key in _SHARED_KEYS:
        if any(state[key] != first[key] for state in states):
            raise ResumeError(
                f"the states are not of the same run and step: their {key} differs; pass states "
                "that were saved together"
            )
    if first["fingerprint"] != dataset.fingerprint:
        raise ResumeError(
            "the state belongs to other files or columns; pass files with the same names, sizes, "
            "formats and order as when it was saved, and the same columns"
        )


def _all_positions(states: Sequence[Mapping[str, Any]]) -> tuple[Position, ...]:
    """The position of every shard of one generation; all of them must be there, once."""
    shards = [tuple(state["shard"]) for state in states]
    count = max(count for _, count in shards)
    for index in range(count):
        if shards.count((index, count)) != 1:
            is_missing = (index, count) not in shards
            raise ResumeError(
                f"the state of shard {index} of {count} is "
                f"{'missing' if is_missing else 'there twice'}; to continue on another number of "
                "ranks or workers, pass the states of all of them"
            )
    if len(shards) > count:
        raise ResumeError("some states are of another number of shards; pass those of one step")
    positions = {shard[0]: state["position"] for shard, state in zip(shards, states, strict=True)}
    return tuple(Position(*positions[index]) for index in range(count))
