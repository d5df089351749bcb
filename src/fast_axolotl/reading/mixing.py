"""``mix_datasets``: rows of several readers in one stream, in proportion to their weights.

**Which source comes next** is a pure function of (seed, epoch, shard, row number). Sources are
paired as in a Huffman tree, the two lightest first. After n draws of a pair, its left side was
drawn ``floor(n * share + phase)`` times: evenly, as a line is drawn on pixels. A pair is thus less
than a row off, and a source less than the sum of its part in each of its pairs: after any number of
rows below 2 rows for two or three sources, below 4 for any number and any weights. (Independent
draws are ``sqrt(n * w * (1 - w))`` off: 458 rows after a million, for w = 0.3.) Phases differ
between seeds, epochs and shards; those of the shards are spread evenly, as multiples of square
roots of primes, so that what all shards deliver in one step is in proportion as well.

**When a pass ends.** A source is used up when it is drawn and has no row left. ``stop="first"``:
the pass ends at that draw. All rows of that source have come, and of the others what their weights
gave them. ``stop="all"``: the source begins its next epoch, shuffled anew, and the pass ends at the
draw that finds the last source used up for the first time. Every row has come at least once, and at
most once in each epoch of its source. Source epoch k in epoch e of the mix is the reader's epoch
``e + k * 2**20``. With ``even`` readers the rows of all shards are known, hence their ends, and
all end at the earliest (``first``) or the latest (``all``). A source that has no rows on a shard is
an error; only with ``stop="all"`` and uneven readers are its draws passed over.

**State:** the number of draws, and each reader's state at its first row that was not drawn. To
resume on another number of shards, each source deals out what is left of its epoch. Where shards
were in different epochs of a source, what is left of each comes in turn; for that the ends of
finished epochs are kept.

Rows are concatenated once and taken once, about a thousand at a time. Does not mix by tokens or
bytes, does not shuffle rows (the readers do), and has no memory budget: each reader has its own.
"""

from __future__ import annotations

import base64
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fast_axolotl.errors import ConflictError, DataError, ResumeError, UsageError
from fast_axolotl.reading.blocks import Decoded, ReadOptions
from fast_axolotl.reading.order import find_states
from fast_axolotl.reading.reader import Reader, ReadStats
from fast_axolotl.reading.rows import take
from fast_axolotl.reading.schema import TypeClash, join_or_mark
from fast_axolotl.reading.unify_types import unify

_BITS = 32
_ONE = 1 << _BITS
"""Shares and phases are whole multiples of 1 / _ONE, so that no row number is ever rounded."""
_EPOCH_STRIDE = 1 << 20
_ROWS_AT_ONCE = 1000
"""Small batches are made of so many rows together: 3 times as fast for 100, 15 times for 10."""
_MARK = "fast_axolotl_mix"


@dataclass(slots=True)
class MixStats:
    """What a mix has done in its current pass; dictionaries are by the name of the source."""

    batches: int = 0
    """Batches delivered."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows delivered."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Epochs begun."""
    read: dict[str, ReadStats] = field(default_factory=dict)
    """What the reader has done in the current one of them."""

    @property
    def shares(self) -> dict[str, float]:
        """Of the rows delivered."""
        total = max(1, sum(self.rows.values()))
        return {name: rows / total for name, rows in self.rows.items()}


def mix_datasets(
    sources: Mapping[str, tuple[Reader, float]] | Sequence[tuple[Reader, float]],
    *,
    seed: int = 0,
    epoch: int = 0,
    stop: Literal["first", "all"] = "first",
    batch_size: int | None = None,
    source_column: str | None = None,
    on_conflict: Literal["raise", "json"] = "raise",
) -> MixedReader:
    """Mix the rows of several readers; the result yields ``pyarrow.RecordBatch``es.

    Args:
        sources: Readers and their relative weights: ``{"code": (reader, 3), ...}``, or a list of
            pairs, which are then named ``"0"``, ``"1"`` and so on.
        seed: The seed that decides which source gives the next row; readers shuffle their own
            rows.
        epoch: Gives each epoch another order of sources, and another shuffle of the readers.
        stop: End the pass when the ``first`` source is exhausted, or when ``all`` are; sources
            that are exhausted earlier start again.
        batch_size: Rows per batch; by default that of the first reader.
        source_column: Add a column of this name with the name of each row's source.
        on_conflict: ``raise``, or ``json`` to get a column with conflicting types as JSON text.
    """
    pairs = dict(sources) if isinstance(sources, Mapping) else dict(enumerate(sources))
    held = []
    for name, pair in pairs.items():
        try:
            reader, weight = pair
            is_valid = isinstance(reader, Reader) and 0 < float(weight) < math.inf
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise UsageError(
                f"source {name!r} must be a pair of a reader and a weight above 0, not {pair!r}"
            )
        held.append(_Source(str(name), reader, float(weight)))
    if len({id(source.reader) for source in held}) < max(1, len(held)):
        raise UsageError(
            "a mix needs at least one source and a separate reader for each; open one per source"
        )
    layouts = {source.name: (source.reader.shard, source.reader.even) for source in held}
    if len(set(layouts.values())) > 1:
        raise UsageError(
            "all readers of a mix must be opened with the same shard and even; their (shard, even) "
            f"are {layouts}"
        )
    batch_size = held[0].reader.batch_size if batch_size is None else batch_size
    for option, is_valid in (
        (f"stop={stop!r}", stop in ("first", "all")),
        (f"on_conflict={on_conflict!r}", on_conflict in ("raise", "json")),
        (f"batch_size={batch_size!r}", isinstance(batch_size, int) and batch_size > 0),
        (f"seed={seed!r}", isinstance(seed, int) and seed >= 0),
    ):
        if not is_valid:
            raise UsageError(f"{option} is not allowed; see help(mix_datasets)")
    total = sum(source.weight for source in held)
    for source in held:
        source.weight /= total
    options = ReadOptions(on_conflict=on_conflict)
    return MixedReader(held, seed, epoch, stop, batch_size, source_column, options)


class Draws:
    """The turns that sources take."""

    def __init__(self, weights: Sequence[float], seed: int, epoch: int, shard: int) -> None:
        count = len(weights)
        phases = np.random.default_rng([seed, epoch]).integers(0, _ONE, count).tolist()
        primes = (n for n in range(2, 9 * count) if all(n % d for d in range(2, math.isqrt(n) + 1)))
        self._sides: list[list[tuple[int, int]]] = [[] for _ in weights]
        """For each source the (share, phase) of its side in each of its pairs, inner ones first."""
        heap: list[tuple[float, int, Any, list[int]]]
        heap = [(weight, index, index, [index]) for index, weight in enumerate(weights)]
        heapq.heapify(heap)
        for pair in range(count - 1):
            (light, _, left, lefts), (heavy, _, right, rights) = heapq.heappop(heap), heap[0]
            share = max(1, min(round(light / (light + heavy) * _ONE), _ONE - 1))
            phase = (phases[pair] + int(shard * math.sqrt(next(primes)) * _ONE)) % _ONE
            for index in lefts:
                self._sides[index].append((share, phase))
            for index in rights:
                self._sides[index].append((_ONE - share, _ONE - 1 - phase))
            node = (share, phase, left, right)
            heapq.heapreplace(heap, (light + heavy, count + pair, node, lefts + rights))
        self._tree = heap[0][2]

    def draw(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The index of the source for each of ``count`` rows from row ``start`` on."""
        drawn = np.empty(count, dtype=np.int64)
        nodes = [(self._tree, start, np.arange(count))]
        while nodes:
            node, before, places = nodes.pop()
            if isinstance(node, int):
                drawn[places] = node
                continue
            share, phase, left, right = node
            lefts, rest = divmod(before * share + phase, _ONE)
            is_left = np.diff((rest + share * np.arange(len(places) + 1)) >> _BITS) == 1
            nodes.append((left, lefts, places[is_left]))
            nodes.append((right, before - lefts, places[~is_left]))
        return drawn

    def place(self, source: int, rows: int) -> int:
        """The row for which a source is drawn when it has given ``rows`` rows already."""
        for share, phase in self._sides[source]:
            rows = -((phase - (rows + 1) * _ONE) // share) - 1
        return rows


class _Source:
    """A reader, the batch of it that rows are drawn from, and its epochs in this pass."""

    def __init__(self, name: str, reader: Reader, weight: float) -> None:
        self.name, self.reader, self.weight = name, reader, weight

    def rewind(self, epoch: int) -> None:
        self.first, self.epoch = epoch, 0
        """The reader's first epoch, and how often it was used up since."""
        self.reader.set_epoch(epoch)
        self.begin = self.reader.state_dict()
        self.states: dict[int, dict[str, Any]] = {}
        """The end of finished epochs, and how far those had come that are to be continued."""
        self.batches: Iterator[pa.RecordBatch] | None = None
        self.held: pa.RecordBatch | None = None
        self.taken = 0
        """Rows of ``held`` that were delivered."""
        self.pieces: list[pa.RecordBatch] = []
        """Rows from before ``held``, for the batch in the making."""
        self.is_empty = False
        """Whether a whole epoch has no rows on this shard."""

    def start(self) -> None:
        """Begins or continues the current epoch."""
        state = self.states.get(self.epoch)
        if state is None:
            self.reader.set_epoch(self.first + self.epoch * _EPOCH_STRIDE)
        else:
            self.reader.load_state_dict(state)
        self.batches = iter(self.reader)
        self.is_empty = not self.read() and state is None

    def read(self) -> bool:
        """Holds the next batch, if there is one; what is held now is put aside."""
        assert self.batches is not None
        if self.held is not None and self.taken < self.held.num_rows:
            self.pieces.append(self.held.slice(self.taken))
        self.held, self.taken = next(self.batches, None), 0
        return self.held is not None

    @property
    def num_rows(self) -> int:
        """Rows at hand."""
        held = 0 if self.held is None else self.held.num_rows - self.taken
        return held + sum(map(len, self.pieces))

    def take(self, count: int) -> list[pa.RecordBatch]:
        """The next rows at hand; the caller adds them to ``taken`` when they are delivered."""
        pieces, self.pieces = self.pieces, []
        put_aside = sum(map(len, pieces))
        if count > put_aside:
            assert self.held is not None
            pieces.append(self.held.slice(self.taken, count - put_aside))
        self.taken -= put_aside
        return pieces

    def state(self) -> dict[str, Any]:
        if self.batches is not None:
            taken = None if self.held is None else self.taken
            self.states[self.epoch] = self.reader.state_dict(taken)
        now = self.states.get(self.epoch, self.begin)
        # Of the others only what differs: a small source may have hundreds of epochs.
        others = {
            str(epoch): {key: value for key, value in state.items() if value != now[key]}
            for epoch, state in {**self.states, -1: self.begin}.items()
        }
        return {"epoch": self.epoch, "state": now, "others": others}

    def load(self, saved: Sequence[Mapping[str, Any]], *, is_own: bool) -> None:
        """Continues from what ``state`` gave on this shard, or on all shards of another number."""
        shards = [
            {int(epoch): {**one["state"], **other} for epoch, other in one["others"].items()}
            for one in saved
        ]
        self.epoch = min(one["epoch"] for one in saved)
        if is_own:
            self.reader.load_state_dict(saved[0]["state"])
            self.states = {epoch: state for epoch, state in shards[0].items() if epoch >= 0}
            return
        for epoch in range(self.epoch, max(self.epoch, *map(max, shards)) + 1):
            begin = {"epoch": self.first + epoch * _EPOCH_STRIDE}
            self.reader.load_state_dict([s.get(epoch, {**s[-1], **begin}) for s in shards])
            self.states[epoch] = self.reader.state_dict()


@dataclass(eq=False, repr=False)
class MixedReader:
    """Record batches of several readers, with a position that can be saved and restored.

    Iteration starts at the beginning, or where ``load_state_dict`` resumes. A new iterator ends
    the previous one. Do not use the readers of a mix directly while the mix is in use.
    """

    _sources: list[_Source]
    _seed: int
    _epoch: int
    _stop: Literal["first", "all"]
    batch_size: int
    """Draws for a batch."""
    _source_column: str | None
    _options: ReadOptions

    def __post_init__(self) -> None:
        reader = self._sources[0].reader
        self._shard, self._even = reader.shard, reader.even
        self._base = pa.schema([])
        for source in self._sources:
            schema = source.reader.schema
            try:
                self._base = join_or_mark(self._base, schema, self._options.on_conflict)
            except TypeClash as clash:
                column = clash.column
                other = next(one for one in self._sources if column in one.reader.schema.names)
                raise ConflictError(
                    f"column {clash.path!r} is {clash.known} in source {other.name!r} and "
                    f"{clash.found} in source {source.name!r}; make the types equal, read other "
                    'columns, or pass on_conflict="json" to mix_datasets'
                ) from None
        if self._source_column in self._base.names:
            raise UsageError(
                f"the data already has a column {self._source_column!r}; pass another source_column"
            )
        if self._source_column is not None:
            self._base = self._base.append(pa.field(self._source_column, pa.string()))
        self.stats = MixStats()
        self.set_epoch(self._epoch)

    @property
    def num_rows(self) -> int:
        """The draws of a whole pass; needs what ``Reader.num_rows`` needs."""
        if self._end is not None:
            return self._end
        rows = [source.reader.num_rows for source in self._sources]
        ends = [
            draws.place(index, rows[index])
            for draws in map(self._draws, range(self._shard[1]) if self._even else self._shard[:1])
            for index, source in enumerate(self._sources)
            if source.epoch == 0 and (rows[index] or self._stop == "first")
        ]
        return min(ends) if self._stop == "first" else max(ends, default=0)

    def __len__(self) -> int:
        """The number of batches of a whole pass; needs what ``num_rows`` needs."""
        if self._is_starting and self._end is None:
            # list(mix) asks after it has begun a pass, only to reserve memory.
            raise TypeError("call len() before iterating: the rows must be counted first")
        return -(-self.num_rows // self.batch_size)

    def __bool__(self) -> bool:
        """True, without counting."""
        return True

    def __enter__(self) -> MixedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the current iteration; a new one can start."""
        self._pass, self._is_starting = object(), False
        for source in self._sources:
            source.reader.close()

    def set_epoch(self, epoch: int) -> None:
        """Go back to the beginning, with the order of another epoch."""
        self.close()
        for source in self._sources:
            source.rewind(epoch)
        self.schema = self._base
        """The columns known so far: final where those of the readers are."""
        self._epoch, self._restored, self._row = epoch, False, 0
        self._end: int | None = None
        """The draw at which all shards end the pass, where they are even."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, as plain JSON values."""
        return {
            _MARK: 1,
            "seed": self._seed,
            "epoch": self._epoch,
            "stop": self._stop,
            "weights": [[source.name, source.weight] for source in self._sources],
            "shard": list(self._shard),
            "row": self._row,
            "end": self._end,
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            "sources": [source.state() for source in self._sources],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Resume from a saved state.

        ``state`` is a return value of ``state_dict``, or an object that contains such states. With
        the states of all shards, the number of shards may change: every remaining row of each
        source's current epoch is delivered exactly once.
        """
        states = find_states(state, _MARK)
        if not states:
            raise ResumeError("this is not a state of a mix; pass the return value of state_dict()")
        weights = [[source.name, source.weight] for source in self._sources]
        expected = {**states[0], _MARK: 1, "stop": self._stop, "weights": weights}
        for key in (_MARK, "stop", "weights", "seed", "epoch"):
            if found := [one[key] for one in states if one[key] != expected[key]]:
                raise ResumeError(
                    f"the state has {key}={found[0]!r} and this mix {key}={expected[key]!r}; use "
                    "the same sources and options as when the state was saved"
                )
        self.set_epoch(expected["epoch"])
        self._seed, self._restored = expected["seed"], True
        own = [one for one in states if tuple(one["shard"]) == self._shard]
        if own:
            states, self._row, self._end = own[:1], own[0]["row"], own[0]["end"]
        for one in states:
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(one["schema"])))
            self.schema = join_or_mark(self.schema, schema, "json")
        for index, source in enumerate(self._sources):
            source.load([one["sources"][index] for one in states], is_own=bool(own))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if not self._restored:
            self.set_epoch(self._epoch)
        self.close()
        self._restored, self._is_starting, self.stats = False, True, MixStats()
        return self._run(self._pass)

    def _run(self, token: object) -> Iterator[pa.RecordBatch]:
        self._is_starting = False
        try:
            for source in self._sources:
                self.stats.rows[source.name] = 0
                self._start(source)
            if self._even and self._end is None:
                self._end = self.num_rows
            draws = self._draws(self._shard[0])
            while self._pass is token:
                row = self._row
                for batch in self._next_batches(draws):
                    self.stats.batches += 1
                    yield batch
                    if self._pass is not token:
                        break
                else:
                    if self._row == row:
                        return
            raise UsageError(
                "this iterator is no longer valid: the mix was closed, restored or iterated again; "
                "use the newest iterator"
            )
        finally:
            if self._pass is token:
                for source in self._sources:
                    source.reader.close()

    def _start(self, source: _Source) -> None:
        source.start()
        self.stats.epochs[source.name] = source.epoch + 1
        self.stats.read[source.name] = source.reader.stats
        if source.is_empty and (self._even or self._stop == "first"):
            raise DataError(
                f"source {source.name!r} has no rows for shard {self._shard[0]} of "
                f"{self._shard[1]}; remove the source, use fewer shards, or open the readers "
                'with even="pad"'
            )

    def _draws(self, shard: int) -> Draws:
        weights = [source.weight for source in self._sources]
        return Draws(weights, self._seed, self._epoch, shard)

    def _next_batches(self, draws: Draws) -> Iterator[pa.RecordBatch]:
        """What is at hand, at most a thousand rows, or else one batch for which sources read on.

        At the end of the pass no draw is made. While rows are delivered no source reads on, since
        a reader only knows the place of each row in its last batch.
        """
        step = self.batch_size
        size = max(1, _ROWS_AT_ONCE // step) * step
        if self._end is not None:
            size = min(size, self._end - self._row)
        drawn = draws.draw(self._row, size)
        places = [np.flatnonzero(drawn == index) for index in range(len(self._sources))]
        if lacking := self._find_lacking(places):
            size = int(min(lacking)[0]) // step * step
        if size == 0:
            size = min(step, len(drawn))
            places = [place[: np.searchsorted(place, size)] for place in places]
        # Whoever runs out first reads on first. So, when the pass ends at a draw, no source has
        # read past the batch that holds its last row before that draw.
        while lacking := [one for one in self._find_lacking(places) if one[0] < size]:
            end, index = min(lacking)
            source = self._sources[index]
            if source.read():
                continue
            others = [one.epoch or one.is_empty for one in self._sources if one is not source]
            if self._stop == "first" or (self._end is None and all(others)):
                size = int(end)
                break
            if not source.is_empty:
                source.states[source.epoch] = source.reader.state_dict()
                source.epoch += 1
                self._start(source)
            if source.is_empty:
                places[index] = places[index][: source.num_rows]
        edges = [*range(0, size, step), size]
        ends = np.array([np.searchsorted(place, edges) for place in places])
        pieces: list[tuple[str, pa.Table]] = []
        for source, count in zip(self._sources, ends[:, -1].tolist(), strict=True):
            for rows in source.take(count):
                piece = pa.Table.from_batches([rows])
                if self._source_column is not None:
                    names = pa.repeat(source.name, piece.num_rows)
                    piece = piece.append_column(self._source_column, names)
                pieces.append((f"source {source.name!r}", piece))
        if pieces:
            self.schema, tables = self._unify(pieces)
            order = np.argsort(
                np.concatenate([p[:n] for p, n in zip(places, ends[:, -1], strict=True)])
            )
            (batch,) = take(pa.concat_tables(tables).combine_chunks(), order).to_batches()
        first = 0
        for number, counts in enumerate(np.diff(ends).T.tolist()):
            for source, count in zip(self._sources, counts, strict=True):
                source.taken += count
                self.stats.rows[source.name] += count
            self._row += edges[number + 1] - edges[number]
            if total := sum(counts):
                yield batch.slice(first, total)
                first += total

    def _find_lacking(self, places: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, int]]:
        """The draw at which each source that has too few rows at hand runs out, and its index."""
        return [
            (place[source.num_rows], index)
            for index, (source, place) in enumerate(zip(self._sources, places, strict=True))
            if source.num_rows < len(place)
        ]

    def _unify(self, pieces: Sequence[tuple[str, pa.Table]]) -> tuple[pa.Schema, list[pa.Table]]:
        """The rows under the schema that they and all rows before them share."""
        schema = self.schema
        while True:
            tables = []
            for label, piece in pieces:
                if piece.schema.equals(schema, check_metadata=True):
                    tables.append(piece)
                    continue
                block: Any = SimpleNamespace(
                    label=label, text_wins=False, decode=lambda _, piece=piece: Decoded(piece)
                )
                decoded, schema = unify(Decoded(piece), block, schema, self._options)
                tables.append(decoded.table)
            if all(table.schema.equals(schema, check_metadata=True) for table in tables):
                return schema, tables
