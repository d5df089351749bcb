"""The order of rows, and who reads which of them: all of it is decided here.

The order is a pure function of the file list, the seed, the epoch, the number of shards and a
position. Files are cut into *units* by the data alone (``blocks``), and then:

1. Shards deal whole units among themselves, balanced by bytes, so that together they read every
   byte once. They deal runs of neighbours, long ones first: a shard reads neighbours as one *span*.
   Only where units are fewer than shards do several shards read the same unit. Each then takes
   every n-th row of it. Where shards are to give the same number of batches, the number of rows of
   every unit is known, and those with more rows than others hand some over: a unit or two for each
   shard are then read twice.
2. Without a seed a shard reads its spans in the order of the files. With a seed it permutes its
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

import base64
import heapq
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import ResumeError, UsageError
from fast_axolotl.reading.blocks import Dataset, Unit
from fast_axolotl.reading.index import unit_rows, with_csv_edges
from fast_axolotl.reading.schema import TypeClash, join_or_mark

_RUNS = 8
"""A shard is dealt what is left in runs of about this fraction of its share: long at first, and
single units at the end, which even out what the runs before left uneven."""

_RUN_BYTES = 4 * 1024 * 1024
"""A run is no longer. A constant, because shards with different memory budgets must deal alike."""

_SHUFFLED_TOGETHER = 256
"""A shuffle permutes at least so many parts of a shard, where it has as many units."""

_OUTSIZED = 2.0
"""A shard that has so many times its share, because of one unit that cannot be cut, is reported."""

_WORTH_A_WARNING_BYTES = 1024 * 1024
"""Files smaller than this cost nothing to read on every shard."""

_STATE_VERSION = 2
_STATE_MARK = "fast_axolotl_reader"
_STATE_KEYS = {
    "fingerprint",
    "columns",
    "seed",
    "epoch",
    "even",
    "shard",
    "position",
    "rows",
    "generations",
    "plan",
    "schema",
}


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
        piece, row, end_piece, end_row, taken = self
        if end_piece < 0:
            return Position(piece, row + rows, end_piece, end_row, taken)
        return Position(piece, row, end_piece, end_row, taken + rows)


@dataclass(frozen=True, slots=True)
class Step:
    """Which rows to keep, of those that come."""

    kind: str
    """``skip``: all but the first n. ``head``: the first n. ``part``: of every n rows the i-th."""
    number: int
    index: int = 0

    def count(self, rows: int) -> int:
        """How many rows are kept of so many."""
        if self.kind == "skip":
            return max(0, rows - self.number)
        if self.kind == "head":
            return min(rows, self.number)
        return max(0, (rows - self.index + self.number - 1) // self.number)


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring units of one file, which are read in one go."""

    units: tuple[Unit, ...]
    steps: tuple[Step, ...] = ()

    @property
    def unit(self) -> Unit:
        """All of them as one."""
        first, last = self.units[0], self.units[-1]
        return replace(first, stop=last.stop, num_bytes=sum(unit.num_bytes for unit in self.units))

    def count(self, rows: Mapping[Unit, int]) -> int:
        return _count(self.steps, sum(rows[unit] for unit in self.units))


@dataclass(frozen=True, slots=True)
class Piece:
    """An element of a shard's sequence: a span, or what an earlier generation left of a window."""

    spans: tuple[Span, ...]
    """One, but for windows."""
    seed: tuple[int, ...] = ()
    """Of the permutation of a window's rows."""
    steps: tuple[Step, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Its weight: encoded bytes; what is skipped counts too."""
        total = sum(unit.num_bytes for span in self.spans for unit in span.units)
        for step in self.steps:
            if step.kind == "part":
                total = max(1, total // step.number)
        return total

    @property
    def place(self) -> tuple[int, int]:
        unit = self.spans[0].units[0]
        return unit.file, unit.start

    def with_step(self, kind: str, number: int, index: int = 0) -> Piece:
        return replace(self, steps=(*self.steps, Step(kind, number, index)))

    def count(self, rows: Mapping[Unit, int]) -> int:
        """The number of rows, given those of each unit."""
        return _count(self.steps, sum(span.count(rows) for span in self.spans))


@dataclass(slots=True)
class Deal:
    """What one shard was dealt, in no order yet."""

    pieces: list[Piece] = field(default_factory=list)
    """Begun by an earlier generation, or shared with other shards."""
    units: list[Unit] = field(default_factory=list)
    """Whole."""

    def count(self, rows: Mapping[Unit, int]) -> int:
        return sum(piece.count(rows) for piece in self.pieces) + sum(rows[u] for u in self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of a dataset's rows for one seed and epoch."""

    seed: int | None
    epoch: int
    units: tuple[Unit, ...]
    """What the first generation of shards deals out."""
    span_bytes: int
    """Neighbours are read together up to this size."""
    group_bytes: int
    """Under a shuffle, neighbours among so many bytes of permuted units are read together."""
    rows: Mapping[Unit, int] | None = None
    """The rows of each unit, where shards are to have the same number of them."""
    generations: tuple[tuple[Position, ...], ...] = ()
    """For each earlier number of shards, the positions that these had come to."""
    dealt: dict[int, list[Deal]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """What ``deal`` gave: half a second of work for a terabyte, and asked for several times."""

    @classmethod
    def plan(cls, dataset: Dataset, seed: int | None, epoch: int, *, is_even: bool) -> Order:
        units = tuple(dataset.units())
        return cls(
            seed=seed,
            epoch=epoch,
            units=units,
            span_bytes=dataset.options.block_bytes // 2,
            group_bytes=dataset.window_bytes // 2,
            rows=dict(zip(units, unit_rows(dataset, units), strict=True)) if is_even else None,
        )

    def deal(self, count: int) -> list[Deal]:
        """What each of ``count`` shards gets: over all of them, every row that is left once."""
        if count in self.dealt:
            return self.dealt[count]
        left = Deal(units=list(self.units))
        for generation, positions in enumerate(self.generations):
            dealt, left = self._deal(left, len(positions)), Deal()
            for index, position in enumerate(positions):
                shard = (index, len(positions))
                sequence = self._arrange(dealt[index], shard, generation)
                self._leave(sequence, position, shard, generation, left)
            left.units.sort(key=lambda unit: (unit.file, unit.start))
        return self.dealt.setdefault(count, self._deal(left, count))

    def _deal(self, left: Deal, count: int) -> list[Deal]:
        dealt = _deal(left, count)
        if self.rows is not None:
            _level(dealt, self.rows)
        return dealt

    def sequence(self, shard: tuple[int, int]) -> list[Piece]:
        """What one shard reads, in order."""
        index, count = shard
        return self._arrange(self.deal(count)[index], shard, len(self.generations))

    def window_seed(
        self, shard: tuple[int, int], position: Position, generation: int | None = None
    ) -> tuple[int, ...]:
        """Of the permutation of the window that begins at a position; in the last generation."""
        assert self.seed is not None
        generation = len(self.generations) if generation is None else generation
        return (self.seed, self.epoch, 1, *shard, generation, position.piece, position.row)

    def _arrange(self, dealt: Deal, shard: tuple[int, int], generation: int) -> list[Piece]:
        """The sequence of a shard, out of what it was dealt."""
        if self.seed is None:
            return list(_merge(dealt.pieces, self.span_bytes, dealt.units))
        windows = [piece for piece in dealt.pieces if piece.seed]
        items = [piece for piece in dealt.pieces if not piece.seed]
        items += [Piece((Span((unit,)),)) for unit in dealt.units]
        # Neighbours stay together where there are many: reading single ones costs more time.
        total = sum(piece.num_bytes for piece in items)
        items = list(_merge(items, min(self.span_bytes, total // _SHUFFLED_TOGETHER)))
        generator = np.random.default_rng([self.seed, self.epoch, 0, *shard, generation])
        groups: list[list[Piece]] = []
        size = 0
        for place in generator.permutation(len(items)).tolist():
            size += items[place].num_bytes
            if not groups or size > self.group_bytes:
                groups.append([])
                size = items[place].num_bytes
            groups[-1].append(items[place])
        for group in groups:
            windows += _merge(group, self.span_bytes)
        return windows

    def _leave(
        self,
        sequence: Sequence[Piece],
        position: Position,
        shard: tuple[int, int],
        generation: int,
        left: Deal,
    ) -> None:
        """Adds what a shard has left from a position on."""
        at, row = position.piece, position.row
        if position.taken:
            spans = []
            for index in range(at, position.end_piece + 1):
                piece = sequence[index]
                steps = [*piece.spans[0].steps, *piece.steps]
                start = row if index == at else 0
                if start:
                    steps.append(Step("skip", start))
                if index == position.end_piece:
                    steps.append(Step("head", position.end_row - start))
                spans.append(Span(piece.spans[0].units, tuple(steps)))
            seed = self.window_seed(shard, position, generation)
            left.pieces.append(Piece(tuple(spans), seed, (Step("skip", position.taken),)))
            at, row = position.end_piece, position.end_row
        if row and at < len(sequence):  # behind the end are rows that were repeated
            left.pieces.append(sequence[at].with_step("skip", row))
            at += 1
        for piece in sequence[at:]:
            if piece.steps or piece.seed or piece.spans[0].steps:
                left.pieces.append(piece)
            else:
                left.units += piece.spans[0].units


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a shard goes on reading, and all that this position depends on."""

    dataset: Dataset
    """The files, cut up as they were when the state was taken."""
    order: Order
    position: Position
    rows: int
    """Delivered by this shard since the number of shards last changed."""
    schema: pa.Schema
    """The columns known so far."""

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
        if own:
            position, rows = Position(*own[0]["position"]), int(own[0]["rows"])
        else:
            generations.append(_all_positions(states))
        schema = pa.schema([])
        for state in own or states:
            try:
                found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state["schema"])))
            except (pa.ArrowException, ValueError):
                raise ResumeError("the state has a corrupt schema; use an older one") from None
            try:
                schema = join_or_mark(schema, found, dataset.options.on_conflict, text_wins=True)
            except TypeClash as clash:
                raise clash.error("the data of several ranks") from None
        order = Order.plan(dataset, first["seed"], first["epoch"], is_even=first["even"])
        return cls(
            dataset=dataset,
            order=replace(order, generations=tuple(generations)),
            position=position,
            rows=rows,
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
            "even": self.order.rows is not None,
            "shard": list(shard),
            "position": list(self.position),
            "rows": self.rows,
            "generations": [list(map(list, positions)) for positions in self.order.generations],
            "plan": {
                "block_bytes": options.block_bytes,
                "unit_bytes": options.unit_bytes,
                "window_bytes": self.dataset.window_bytes,
                "csv_cut": any(getattr(file, "edges", None) for file in self.dataset.formats),
            },
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
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
    if shard is None:
        return 0, 1
    try:
        index, count = map(operator.index, shard)
        valid = 0 <= index < count
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise UsageError(
            f"shard is {shard!r}; pass two whole numbers, the index of the shard and the number of "
            "shards, such as (0, 4) for the first of four"
        )
    return index, count


def _count(steps: Sequence[Step], rows: int) -> int:
    for step in steps:
        rows = step.count(rows)
    return rows


def _merge(
    pieces: Sequence[Piece], most_bytes: int, whole_units: Sequence[Unit] = ()
) -> Iterator[Piece]:
    """Pieces and units in the order of the files, neighbours put together up to a size."""
    # Units are thousands, and a piece for each would take longer than all the rest of it.
    items: list[tuple[tuple[int, int], tuple[Unit, ...], Piece | None]] = []
    for piece in pieces:
        is_whole = not piece.steps and not piece.seed and not piece.spans[0].steps
        items.append((piece.place, piece.spans[0].units if is_whole else (), piece))
    items += [((unit.file, unit.start), (unit,), None) for unit in whole_units]
    items.sort(key=operator.itemgetter(0))
    held: list[Unit] = []
    size = 0
    for _, units, single in items:
        more = sum([unit.num_bytes for unit in units])
        is_next = units and held and held[-1].file == units[0].file
        if held and not (is_next and held[-1].stop == units[0].start and size + more <= most_bytes):
            yield Piece((Span(tuple(held)),))
            held, size = [], 0
        if units:
            held += units
            size += more
        elif single is not None:
            yield single
    if held:
        yield Piece((Span(tuple(held)),))


def _deal(left: Deal, count: int) -> list[Deal]:
    """Pieces and units dealt out to shards. Over all of them, each row occurs exactly once."""
    if count == 1:
        return [left]
    shards = [Deal() for _ in range(count)]
    if len(left.pieces) + len(left.units) < count:
        whole = [*left.pieces, *(Piece((Span((unit,)),)) for unit in left.units)]
        readers = [1] * len(whole)
        # The next shard goes to whatever is largest for each of its readers.
        heap = [(-float(piece.num_bytes), index) for index, piece in enumerate(whole)]
        heapq.heapify(heap)
        for _ in range(count - len(whole) if whole else 0):
            _, index = heap[0]
            readers[index] += 1
            heapq.heapreplace(heap, (-(whole[index].num_bytes / readers[index]), index))
        owner = 0
        for piece, number in zip(whole, readers, strict=True):
            for index in range(number):
                share = piece if number == 1 else piece.with_step("part", number, index)
                shards[owner + index].pieces.append(share)
            owner += number
        return shards
    loads = [(0, index) for index in range(count)]
    for piece in left.pieces:
        load, index = loads[0]
        shards[index].pieces.append(piece)
        heapq.heapreplace(loads, (load + piece.num_bytes, index))
    unread = sum(unit.num_bytes for unit in left.units)
    run: list[Unit] = []
    size = 0
    for unit in left.units:
        run_bytes = min(_RUN_BYTES, unread // (_RUNS * count))
        if run and (run[-1].file != unit.file or size + unit.num_bytes > run_bytes):
            load, index = loads[0]
            shards[index].units += run
            heapq.heapreplace(loads, (load + size, index))
            run, size = [], 0
        run.append(unit)
        size += unit.num_bytes
        unread -= unit.num_bytes
    if run:
        shards[loads[0][1]].units += run
    return shards


def _level(dealt: Sequence[Deal], rows: Mapping[Unit, int]) -> None:
    """Moves rows until no shard has two more than another."""
    counts = [deal.count(rows) for deal in dealt]
    share, extra = divmod(sum(counts), len(dealt))
    missing = [share + (index < extra) - count for index, count in enumerate(counts)]
    spare: list[Piece] = []
    for deal, lack in zip(dealt, missing, strict=True):
        empty: list[Piece] = []
        while lack < 0:
            piece = Piece((Span((deal.units.pop(),)),)) if deal.units else deal.pieces.pop()
            count = piece.count(rows)
            if count > -lack:
                deal.pieces.append(piece.with_step("head", count + lack))
                piece, count = piece.with_step("skip", count + lack), -lack
            (spare if count else empty).append(piece)
            lack += count
        deal.pieces += empty
    for deal, lack in zip(dealt, missing, strict=True):
        while lack > 0:
            piece = spare.pop()
            count = piece.count(rows)
            if count > lack:
                spare.append(piece.with_step("skip", lack))
                piece, count = piece.with_step("head", lack), lack
            deal.pieces.append(piece)
            lack -= count


def warn_of_sharing(dataset: Dataset, dealt: Sequence[Deal]) -> None:
    """Reports files that several shards read, or that give one shard more than its share."""
    readers: dict[int, int] = {}
    loads = []
    for deal in dealt:
        # What is left of a window is shared as well, but only once, and it is small.
        whole = [piece for piece in deal.pieces if not piece.seed]
        shared = [p for p in whole if any(step.kind == "part" for step in p.steps)]
        for file in {unit.file for p in shared for span in p.spans for unit in span.units}:
            readers[file] = readers.get(file, 0) + 1
        loads.append(
            sum(piece.num_bytes for piece in deal.pieces)
            + sum(unit.num_bytes for unit in deal.units)
        )
    cure = "write the data as more files, or as uncompressed JSON Lines, Parquet or Arrow"
    for file, number in readers.items():
        source = dataset.inputs[file].source
        if number > 1 and source.num_bytes >= _WORTH_A_WARNING_BYTES:
            warnings.warn(
                f"{source.path}: {number} of {len(dealt)} shards each read all of this file, "
                f"because the data has fewer separately readable parts than shards; {cure}",
                ShardWarning,
                stacklevel=4,
            )
            return
    most, mean = max(loads), sum(loads) / len(loads)
    if most > _OUTSIZED * mean and most >= _WORTH_A_WARNING_BYTES and not readers:
        units = dealt[loads.index(most)].units
        if units:
            largest = max(units, key=lambda unit: unit.num_bytes)
            warnings.warn(
                f"{dataset.inputs[largest.file].source.path}: one of {len(dealt)} shards reads "
                f"{most / mean:.1f} times the mean, because this file cannot be split; {cure}",
                ShardWarning,
                stacklevel=4,
            )


def _check_states(states: Sequence[Mapping[str, Any]], dataset: Dataset) -> None:
    """Refuses states of another version, of other files, or of different runs."""
    if not states:
        raise ResumeError("this is not a state of a reader; pass the return value of state_dict()")
    if old := next((s for s in states if s[_STATE_MARK] != _STATE_VERSION), None):
        raise ResumeError(
            f"the state has format {old[_STATE_MARK]!r}, but this version of fast-axolotl reads "
            f"format {_STATE_VERSION} and orders rows differently; start the epoch again, or "
            "finish it with the version that wrote the state"
        )
    if not all(state.keys() >= _STATE_KEYS for state in states):
        raise ResumeError("the state is incomplete; use an older state")
    fingerprint = dataset.fingerprint
    if any(state["fingerprint"] != fingerprint for state in states):
        raise ResumeError(
            "the state belongs to other files; pass files with the same names, sizes, formats and "
            "order as when it was saved"
        )
    columns = None if dataset.options.columns is None else list(dataset.options.columns)
    if any(state["columns"] != columns for state in states):
        other = next(state["columns"] for state in states if state["columns"] != columns)
        raise ResumeError(
            f"the state was saved with columns={other} and the reader has columns={columns}; pass "
            "the same columns"
        )
    shards = [tuple(state["shard"]) for state in states]
    if twice := next((shard for shard in shards if shards.count(shard) > 1), None):
        raise ResumeError(f"the state of shard {twice[0]} of {twice[1]} is there twice; pass one")
    for key in ("seed", "epoch", "even", "generations", "plan"):
        if any(state[key] != states[0][key] for state in states):
            raise ResumeError(
                f"the states are not of the same run and step: their {key} differs; pass states "
                "that were saved together"
            )


def _all_positions(states: Sequence[Mapping[str, Any]]) -> tuple[Position, ...]:
    """The position of every shard of one generation; all of them must be there."""
    count = int(states[0]["shard"][1])
    positions: dict[int, Position] = {}
    for state in states:
        index, other = state["shard"]
        if other != count:
            raise ResumeError(
                f"some states are of {count} shards and some of {other}; pass states that were "
                "saved together"
            )
        positions[index] = Position(*state["position"])
    missing = sorted(set(range(count)) - set(positions))
    if missing:
        raise ResumeError(
            f"the state of shard {missing[0]} of {count} is missing; to continue on another number "
            "of ranks or workers, pass the states of all of them"
        )
    return tuple(positions[index] for index in range(count))
