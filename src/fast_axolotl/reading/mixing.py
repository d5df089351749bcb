"""``mix_datasets``: rows of several readers in one stream, in proportion to their weights.

**Which source comes next.** Source ``i`` comes for the k-th time at ``(k + phase) / weight``; the
rows of all sources are put in the order of these times. So every source stays within a few rows of
its weight, however many rows there are. The phases depend on seed and epoch; all shards draw alike.

**When a pass ends.** A source is used up when it is drawn and has no row left. ``stop="first"``:
the pass ends at that draw. ``stop="all"``: the source begins its next epoch, shuffled anew, and the
pass ends at the draw that finds the last source used up for the first time. Source epoch k in epoch
e of the mix is the reader's epoch ``e + k * 2**20``.

**State:** the number of draws of each source, and each reader's state. Only the same shard of the
same number can continue it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fast_axolotl.errors import DataError, ResumeError, UsageError
from fast_axolotl.reading.order import find_states
from fast_axolotl.reading.reader import Reader, check_pass
from fast_axolotl.reading.rows import take
from fast_axolotl.reading.schema import conform, join_schemas, schema_of, schema_text

_EPOCH_STRIDE = 1 << 20
_MARK = "fast_axolotl_mix"
_VERSION = 6


def mix_datasets(
    sources: Mapping[str, tuple[Reader, float]] | Sequence[tuple[Reader, float]],
    *,
    seed: int = 0,
    epoch: int = 0,
    stop: Literal["first", "all"] = "first",
    batch_size: int | None = None,
    source_column: str | None = None,
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
    """
    opened = []
    for name, pair in dict(sources if isinstance(sources, Mapping) else enumerate(sources)).items():
        try:
            reader, weight = pair
            opened.append(_Source(name=str(name), reader=reader, weight=float(weight)))
        except (TypeError, ValueError):
            raise UsageError(
                f"source {name!r} must be a reader and a weight, not {pair!r}"
            ) from None
        if not 0 < opened[-1].weight < math.inf:
            raise UsageError(f"source {name!r} must have a weight above 0, not {weight!r}")
    if len({id(source.reader) for source in opened}) < max(1, len(opened)):
        raise UsageError(
            "a mix needs at least one source and a separate reader for each; open one per source"
        )
    layouts = {source.name: (source.reader.shard, source.reader.even) for source in opened}
    if len(set(layouts.values())) > 1:
        raise UsageError(
            "all readers of a mix must be opened with the same shard and even; their (shard, even) "
            f"are {layouts}"
        )
    batch_size = opened[0].reader.batch_size if batch_size is None else batch_size
    if stop not in ("first", "all") or batch_size < 1 or seed < 0:
        raise UsageError(
            f"{stop=} must be 'first' or 'all', {batch_size=} at least 1, and {seed=} at least 0"
        )
    return MixedReader(opened, seed, epoch, stop, batch_size, source_column)


class Draws:
    """The turns that sources take."""

    def __init__(self, weights: Sequence[float], seed: int, epoch: int) -> None:
        self._weights = np.array(weights) / sum(weights)
        self._phases = np.random.default_rng([seed, epoch]).random(len(weights))

    def draw(self, given: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """The index of the source for each of the next rows, after sources gave so many each."""
        most = (self._weights * (count + 2 * len(given))).astype(np.int64) + 2
        sources = np.repeat(np.arange(len(given)), most)
        turns = np.concatenate([rows + np.arange(n) for rows, n in zip(given, most, strict=True)])
        times = (turns + self._phases[sources]) / self._weights[sources]
        return sources[np.argsort(times, kind="stable")[:count]]

    def place(self, source: int, rows: int) -> int:
        """The row for which a source is drawn when it has given ``rows`` rows already."""
        time = (rows + self._phases[source]) / self._weights[source]
        turns = np.ceil(time * self._weights - self._phases).clip(0)
        turns[source] = rows  # which rounding could lose
        return int(turns.sum())


@dataclass(slots=True, kw_only=True)
class _Source:
    """A reader, and its epochs in this pass."""

    name: str
    reader: Reader
    weight: float
    epoch: int = 0
    """How often it was used up in this pass."""
    has_rows: bool = False
    """Whether any row of the current epoch was read."""
    batches: Iterator[pa.RecordBatch] = field(default_factory=lambda: iter(()))

    def begin(self, epoch: int, of_mix: int) -> None:
        """Its next rows are the first ones of an epoch."""
        self.epoch, self.has_rows = epoch, False
        self.reader.set_epoch(of_mix + epoch * _EPOCH_STRIDE)


class MixedReader(AbstractContextManager["MixedReader"]):
    """Record batches of several readers, with a position that can be saved and restored.

    Iteration starts at the beginning, or where ``load_state_dict`` resumes. A new iterator ends
    the previous one. Do not use the readers of a mix directly while the mix is in use.
    """

    def __init__(
        self,
        sources: list[_Source],
        seed: int,
        epoch: int,
        stop: Literal["first", "all"],
        batch_size: int,
        source_column: str | None,
    ) -> None:
        self._sources, self._seed, self._stop = sources, seed, stop
        self.batch_size = batch_size
        """Draws for a batch."""
        self._source_column = source_column
        self._shard = sources[0].reader.shard
        self._weights = [[source.name, source.weight] for source in sources]
        self._base = pa.schema([])
        for source in sources:
            schema, place = source.reader.schema, f"source {source.name!r}"
            self._base = join_schemas(self._base, schema, source=place)
        if source_column in self._base.names:
            raise UsageError(
                f"the data already has a column {source_column!r}; pass another source_column"
            )
        if source_column is not None:
            self._base = self._base.append(pa.field(source_column, pa.string()))
        self.rows: dict[str, int] = {}
        """Rows delivered in the current pass, by the name of the source."""
        self._running = ExitStack()
        self.set_epoch(epoch)

    @property
    def num_rows(self) -> int:
        """The rows of a whole pass; needs what ``Reader.num_rows`` needs."""
        ends = [
            self._draws.place(index, source.reader.num_rows)
            for index, source in enumerate(self._sources)
            if source.epoch == 0
        ]
        return min(ends) if self._stop == "first" else max(ends, default=0)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the current iteration; a new one can start."""
        self._running.close()
        self._running = ExitStack()

    def set_epoch(self, epoch: int) -> None:
        """Go back to the beginning, with the order of another epoch."""
        self.close()
        self._epoch, self._has_begun = epoch, False
        for source in self._sources:
            source.begin(0, epoch)
        self.schema = self._base
        """The columns known so far: final where those of the readers are."""
        self._draws = Draws([source.weight for source in self._sources], self._seed, epoch)
        self._given = np.zeros(len(self._sources), dtype=np.int64)
        """How often each source was drawn."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, as plain JSON values."""
        return {
            _MARK: _VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "stop": self._stop,
            "weights": self._weights,
            "shard": list(self._shard),
            "given": self._given.tolist(),
            "schema": schema_text(self.schema),
            "epochs": [source.epoch for source in self._sources],
            "readers": [source.reader.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Resume from a saved state.

        ``state`` is a return value of ``state_dict``, or an object that contains those of all
        shards. The number of shards must be the same as when it was saved.
        """
        states = {tuple(found["shard"]): found for found in find_states(state, _MARK)}
        if not states:
            raise ResumeError("this is not a state of a mix; pass the return value of state_dict()")
        if self._shard not in states:
            raise ResumeError(
                f"the state is of shard {min(states)} and this mix reads shard {self._shard}; "
                "a mix continues only on the same number of ranks and workers"
            )
        found = states[self._shard]
        for key, value in {_MARK: _VERSION, "stop": self._stop, "weights": self._weights}.items():
            if found[key] != value:
                raise ResumeError(
                    f"the state has {key}={found[key]!r} and this mix {key}={value!r}; use "
                    "the same sources and options as when the state was saved"
                )
        self._seed = found["seed"]
        self.set_epoch(found["epoch"])
        self._given = np.array(found["given"], dtype=np.int64)
        self.schema = join_schemas(self.schema, schema_of(found["schema"]))
        for index, source in enumerate(self._sources):
            source.reader.load_state_dict(found["readers"][index])
            source.epoch, source.has_rows = found["epochs"][index], True

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._has_begun:
            self.set_epoch(self._epoch)
        self.close()
        self._has_begun = True
        self.rows = {source.name: 0 for source in self._sources}
        return self._run(self._running)

    def _run(self, running: ExitStack) -> Iterator[pa.RecordBatch]:
        with running:
            for source in self._sources:
                source.batches = iter(source.reader)
                running.callback(source.reader.close)
            while (batch := self._next_batch()) is not None:
                yield batch
                check_pass(self._running, running)
                if len(batch) < self.batch_size:
                    return

    def _next_batch(self) -> pa.RecordBatch | None:
        """The rows of the next draws; fewer than a batch has, or none, where the pass ends."""
        drawn = self._draws.draw(self._given, self.batch_size)
        held: list[list[pa.RecordBatch]] = [[] for _ in self._sources]
        while True:
            used_up = []
            for index, (source, parts) in enumerate(zip(self._sources, held, strict=True)):
                places = np.flatnonzero(drawn == index)
                while (missing := len(places) - sum(map(len, parts))) > 0:
                    source.reader.batch_size = missing
                    part = next(source.batches, None)
                    if part is None:
                        used_up.append((int(places[-missing]), source))
                        break
                    parts.append(part)
                    source.has_rows = True
            if not used_up:
                break
            place, source = min(used_up, key=itemgetter(0))
            if not source.has_rows:
                raise DataError(
                    f"source {source.name!r} has no rows for shard {self._shard[0]} of "
                    f"{self._shard[1]}; remove the source, use fewer shards, or open the "
                    'readers with even="pad"'
                )
            others = (other for other in self._sources if other is not source)
            if self._stop == "first" or all(other.epoch for other in others):
                drawn = drawn[:place]
            else:
                source.begin(source.epoch + 1, self._epoch)
                source.batches = iter(source.reader)
        if not len(drawn):
            return None
        given = np.bincount(drawn, minlength=len(self._sources))
        self._given += given
        pieces: list[pa.Table] = []
        for source, parts, count in zip(self._sources, held, given.tolist(), strict=True):
            self.rows[source.name] += count
            left = count
            for part in parts:
                piece = pa.Table.from_batches([part.slice(0, left)])
                left -= len(piece)
                if self._source_column is not None:
                    names = pa.repeat(source.name, len(piece))
                    piece = piece.append_column(self._source_column, names)
                self.schema = join_schemas(
                    self.schema, piece.schema, settled=self.schema, source=f"source {source.name!r}"
                )
                pieces.append(piece)
        order = np.argsort(np.argsort(drawn, kind="stable"))
        table = pa.concat_tables([conform(piece, self.schema) for piece in pieces])
        (batch,) = take(table.combine_chunks(), order).to_batches()
        return batch
