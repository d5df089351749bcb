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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
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
    opened = list[tuple[str, Reader, float]]()
    for name, pair in dict(sources if isinstance(sources, Mapping) else enumerate(sources)).items():
        try:
            reader, weight = pair
            opened.append((str(name), reader, float(weight)))
            if not 0 < opened[-1][2] < math.inf:
                raise ValueError
        except (TypeError, ValueError):
            raise UsageError(
                f"source {name!r} must be a reader and a weight above 0, not {pair!r}"
            ) from None
    layouts = {id(reader): (reader.shard, reader.even) for _, reader, _ in opened}
    if len(layouts) < max(1, len(opened)) or len(set(layouts.values())) > 1:
        raise UsageError(
            "a mix needs at least one source and a separate reader for each, all opened with the "
            f"same shard and even; their (shard, even) are {[*layouts.values()]}"
        )
    batch_size = opened[0][1].batch_size if batch_size is None else batch_size
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


class MixedReader(AbstractContextManager["MixedReader"]):
    """Record batches of several readers, with a position that can be saved and restored.

    Iteration starts at the beginning, or where ``load_state_dict`` resumes. A new iterator ends
    the previous one. Do not use the readers of a mix directly while the mix is in use.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Reader, float]],
        seed: int,
        epoch: int,
        stop: Literal["first", "all"],
        batch_size: int,
        source_column: str | None,
    ) -> None:
        self._names, self._readers, self._weights = zip(*sources, strict=True)
        self._seed, self._stop, self._source_column = seed, stop, source_column
        self._end_of: Callable[[list[int]], int] = min if stop == "first" else max
        self.batch_size = batch_size
        """Draws for a batch."""
        self._base = pa.schema([])
        for name, reader, _ in sources:
            self._base = join_schemas(self._base, reader.schema, source=f"source {name!r}")
        if source_column in self._base.names:
            raise UsageError(
                f"the data already has a column {source_column!r}; pass another source_column"
            )
        if source_column is not None:
            self._base = self._base.append(pa.field(source_column, pa.string()))
        self._running = ExitStack()
        self.set_epoch(epoch)

    @property
    def rows(self) -> dict[str, int]:
        """Rows delivered in the current pass, by the name of the source."""
        return dict(zip(self._names, self._given.tolist(), strict=True))

    @property
    def num_rows(self) -> int:
        """The rows of a whole pass; needs what ``Reader.num_rows`` needs."""
        sizes = enumerate(reader.num_rows for reader in self._readers)
        return self._end_of([self._draws.place(index, rows) for index, rows in sizes])

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the current iteration; a new one can start."""
        self._running.close()
        self._running = ExitStack()

    def set_epoch(self, epoch: int) -> None:
        """Go back to the beginning, with the order of another epoch."""
        self.close()
        for reader in self._readers:
            reader.set_epoch(epoch)
        self._epoch, self._has_begun = epoch, False
        self.schema = self._base
        """The columns known so far: final where those of the readers are."""
        self._draws = Draws(self._weights, self._seed, epoch)
        self._given = np.zeros(len(self._readers), dtype=np.int64)
        """How often each source was drawn."""
        self._epochs = [0] * len(self._readers)
        """How often each source began again."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, as plain JSON values."""
        return {
            _MARK: _VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "stop": self._stop,
            "weights": [*map(list, zip(self._names, self._weights, strict=True))],
            "shard": list(self._readers[0].shard),
            "given": self._given.tolist(),
            "schema": schema_text(self.schema),
            "epochs": list(self._epochs),
            "readers": [reader.state_dict() for reader in self._readers],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Resume from a saved state.

        ``state`` is a return value of ``state_dict``, or an object that contains those of all
        shards. The number of shards must be the same as when it was saved.
        """
        states, own = find_states(state, _MARK), self.state_dict()
        if not states:
            raise ResumeError("this is not a state of a mix; pass the return value of state_dict()")
        found = next((each for each in states if each["shard"] == own["shard"]), states[0])
        for key in (_MARK, "shard", "stop", "weights"):
            if found[key] != own[key]:
                raise ResumeError(
                    f"the state has {key}={found[key]!r} and this mix {key}={own[key]!r}; use the "
                    "same sources, options and number of ranks and workers as when it was saved"
                )
        self._seed = found["seed"]
        self.set_epoch(found["epoch"])
        self._given[:], self._epochs[:] = found["given"], found["epochs"]
        self.schema = join_schemas(self.schema, schema_of(found["schema"]))
        for reader, position in zip(self._readers, found["readers"], strict=True):
            reader.load_state_dict(position)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._has_begun:
            self.set_epoch(self._epoch)
        self.close()
        self._has_begun = True
        return self._run(self._running)

    def _run(self, running: ExitStack) -> Iterator[pa.RecordBatch]:
        with running:
            for reader in self._readers:
                running.callback(reader.close)
            sources = [self._epochs_of(index) for index in range(len(self._readers))]
            while (batch := self._next_batch(sources)) is not None:
                yield batch
                check_pass(self._running, running)
                if len(batch) < self.batch_size:
                    return

    def _epochs_of(self, index: int) -> Iterator[pa.RecordBatch | None]:
        """The batches of a source without end; ``None`` where it is used up and begins again."""
        reader, num_rows = self._readers[index], int(self._given[index])
        while True:
            for batch in reader:
                num_rows += len(batch)
                yield batch
            if num_rows == 0:
                raise DataError(
                    f"source {self._names[index]!r} has no rows for shard {reader.shard[0]} of "
                    f"{reader.shard[1]}; remove the source, use fewer shards, or open the "
                    'readers with even="pad"'
                )
            yield None
            num_rows = 0
            self._epochs[index] += 1
            reader.set_epoch(self._epoch + self._epochs[index] * _EPOCH_STRIDE)

    def _next_batch(self, sources: Sequence[Iterator[Any]]) -> pa.RecordBatch | None:
        """The rows of the next draws; fewer than a batch has, or none, where the pass ends."""
        drawn = self._draws.draw(self._given, self.batch_size)
        ends = [0 if epoch else len(drawn) for epoch in self._epochs]
        """The draw that finds each source used up for the first time, as far as it is known."""
        drawn = drawn[: self._end_of(ends)]
        counts = np.bincount(drawn, minlength=len(sources))
        pieces, starts, num_rows = list[pa.Table](), list[int](), 0
        for index, (name, batches) in enumerate(zip(self._names, sources, strict=True)):
            starts.append(num_rows)
            while (missing := starts[-1] + int(counts[index]) - num_rows) > 0:
                self._readers[index].batch_size = missing
                if (part := next(batches)) is None:
                    place = np.flatnonzero(drawn == index)[-missing]
                    ends[index] = min(ends[index], int(place))
                    drawn = drawn[: self._end_of(ends)]
                    counts = np.bincount(drawn, minlength=len(sources))
                    continue
                self.schema = join_schemas(
                    self.schema, part.schema, settled=self.schema, source=f"source {name!r}"
                )
                pieces.append(pa.Table.from_batches([part]))
                num_rows += len(part)
        if not len(drawn):
            return None
        self._given += counts
        order = np.argsort(np.argsort(drawn, kind="stable"))
        order += (np.array(starts) + counts - np.cumsum(counts))[drawn]  # more rows may have come
        table = pa.concat_tables([conform(piece, self.schema) for piece in pieces])
        table = take(table.combine_chunks(), order)
        if self._source_column is not None:
            place = self.schema.get_field_index(self._source_column)
            names = pa.array(self._names, pa.string()).take(pa.array(drawn))
            table = table.set_column(place, self.schema.field(place), names)
        (batch,) = table.to_batches()
        return batch
